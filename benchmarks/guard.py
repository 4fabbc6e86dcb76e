"""How often the guard's rules halt healthy runs, and how late they halt the others: the grid of docs/kill-switch.md.

    python benchmarks/guard.py                  # about two minutes
    python benchmarks/guard.py --runs 1000 --docs

Every cell is some hundred simulated runs of 600 rounds; the change is after round 100, and delays count from there.
Rules are judged by twins on arrays (`guard_rules`), which are first compared with the product's own folds, run by run.
False halts are per 1000 rounds lived, with 95 % Poisson intervals; delays are means with 95 % intervals.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import guard_pictures
import guard_rules
import numpy as np
from guard_trajectories import (
    BOTH_MOVE,
    CHANGE,
    CLIMBS,
    COLLAPSES,
    FAULTS,
    HEALTHY,
    LIES,
    LOSSES,
    ROUNDS,
    Array,
    Fleet,
    Pair,
    collapsing,
    faulty,
    gao,
    healthy,
    noise,
    repeat,
    through_shares,
    times,
)
from measuring import ROOT, Results, Sample, markdown, pick, publish

from diloco_orchestrator.guard import items_needed

NOISES = ((0.0, 0.01), (0.0, 0.02), (0.5, 0.01), (0.5, 0.02), (0.7, 0.01), (0.7, 0.02), (0.0, 0.05), (0.5, 0.05))
IN_THE_BAR = NOISES[:6]  # AR(1), sd
RULES = ("HeldOutGuard", "patience 6", "SequentialGuard")
FLEETS = {
    "all honest": Fleet(),
    "a fifth drops out": Fleet(dropout=0.2),
    "unequal shares": Fleet(unequal=True),
    "unequal, a fifth drops out": Fleet(dropout=0.2, unequal=True),
    "1 of 8 lies: down by 1 sd": Fleet(liars=1, lie="down by 1 sd"),
    **{f"2 of 8 lie: {lie}": Fleet(liars=2, lie=lie) for lie in LIES},
    "each score given 4 times": Fleet(repeated=4),
    "each score given 8 times": Fleet(repeated=8),
}
FLEET_NOISE = (0.5, 0.02)
_DOCUMENT, _PICTURES = ROOT / "docs" / "kill-switch.md", ROOT / "docs" / "kill-switch"


SIZES = (8, 15, 30, 60)  # rounds of delay that `items_needed` is asked for
DROP, ITEM_SD = 0.05, 0.5


def _size_sd(rounds: int, phi: float) -> float:
    """The noise of a score of as many items as `items_needed` says."""
    return ITEM_SD / sqrt(items_needed(DROP, item_sd=ITEM_SD, rounds=rounds, autocorrelation=phi))


# -- cells -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Runs of one kind. `group`: healthy, fault, early, gao, fleet or size; `fault`: what goes wrong, empty if none."""

    group: str
    case: str
    phi: float
    sd: float
    fault: str = ""

    @property
    def change(self) -> int:
        """The last round before anything goes wrong."""
        return {**COLLAPSES, **CLIMBS}[self.case].after if self.group == "early" else CHANGE


def cells() -> Iterator[Cell]:
    for phi, sd in NOISES:
        yield from (Cell("healthy", family, phi, sd) for family in HEALTHY)
        yield from (Cell("fault", fault, phi, sd, fault) for fault in FAULTS)
        yield Cell("fault", "divergence, from scratch", phi, sd, "divergence")
        yield Cell("fault", "jump, from scratch", phi, sd, "jump")
        yield Cell("gao", "Gao curve", phi, sd, "gao")
        yield from (Cell("early", case, phi, sd, "collapse") for case in COLLAPSES)
    for rounds in SIZES:
        yield from (Cell("size", str(rounds), phi, _size_sd(rounds, phi), "drop") for phi in (0.0, 0.5))
    for case in FLEETS:
        yield from (Cell("fleet", case, *FLEET_NOISE, fault) for fault in ("", *BOTH_MOVE))
    for phi, sd in NOISES:
        yield from (Cell("early", case, phi, sd, "collapse") for case in CLIMBS)


@dataclass(frozen=True)
class Simulated:
    """Runs of a cell, as rules see them."""

    pair: Pair  # held-out and training metric
    weight: Array | None = None  # share of the items in each score
    gains: Array | None = None  # of each share
    gold: Array | None = None  # the gold score without noise

    def first(self, rounds: int) -> "Simulated":
        return Simulated(
            (self.pair[0][:rounds], self.pair[1][:rounds]),
            None if self.weight is None else np.round(self.weight[:rounds] * 1e9) / 1e9,
            None if self.gains is None else self.gains[:rounds],
        )


def simulate(cell: Cell, rng: np.random.Generator, runs: int) -> Simulated:
    if cell.group == "healthy":
        return Simulated(healthy(rng, cell.case, runs, cell.phi, cell.sd))
    if cell.group == "early":
        return Simulated(collapsing(rng, cell.case, runs, cell.phi, cell.sd))
    if cell.group == "gao":
        pair, gold = gao(rng, runs, cell.phi, cell.sd)
        return Simulated(pair, gold=gold)
    if cell.group == "fault":
        family = "from scratch" if cell.case.endswith("from scratch") else "plateau"
        return Simulated(faulty(rng, cell.fault, runs, cell.phi, cell.sd, family))
    if cell.group == "size":
        heldout, in_loop = healthy(rng, "plateau", runs, cell.phi, cell.sd)
        return Simulated((heldout - DROP * (times()[1] > 0)[:, None], in_loop))
    fleet, u = FLEETS[cell.case], times()[1][:, None]
    held, trained = (0 * u, 0 * u)
    if cell.fault:
        held, trained = FAULTS[cell.fault].heldout(u), FAULTS[cell.fault].in_loop(u)
    own = noise(rng, ROUNDS, runs, cell.phi, cell.sd)
    in_loop = repeat(trained + own, fleet.repeated)
    if fleet.repeated > 1:
        return Simulated((repeat(held + noise(rng, ROUNDS, runs, cell.phi, cell.sd), fleet.repeated), in_loop))
    scores, weight, gains = through_shares(rng, held, cell.phi, cell.sd, fleet, runs)
    return Simulated((scores, in_loop), weight, gains)


def measure_cell(cell: Cell, seed: Sequence[int], runs: int) -> list[Sample]:
    """A sample for each rule."""
    simulated = simulate(cell, np.random.default_rng(list(seed)), runs)
    heldout, in_loop = simulated.pair
    sequential, channels = guard_rules.sequential(heldout, in_loop, simulated.weight, simulated.gains)
    gap = 0.5 if cell.case in LOSSES else 0.10
    found = {
        "HeldOutGuard": guard_rules.heldout_guard(heldout, in_loop, 3, gap),
        "patience 6": guard_rules.heldout_guard(heldout, in_loop, 6, gap),
        "SequentialGuard": sequential,
    }
    by_channel = {name: int((channels == i).sum()) for i, name in enumerate(guard_rules.CHANNELS) if name}
    return [
        {
            **cell.__dict__,
            "rule": rule,
            "runs": runs,
            **_figures(halts, cell.change, simulated.gold),
            **({"channels": by_channel} if rule == RULES[-1] else {}),
        }
        for rule, halts in found.items()
    ]


def _figures(halts: guard_rules.Rounds, change: int, gold: Array | None) -> dict[str, Any]:
    """Halts and rounds lived; halts before the change, misses, and the delay of the others."""
    late = halts[halts > change] - change
    figures: dict[str, Any] = {
        "halts": int((halts > 0).sum()),
        "lived": int(np.where(halts > 0, halts, ROUNDS).sum()),
        "early": int(((halts > 0) & (halts <= change)).sum()),
        "misses": int((halts == 0).sum()),
        "delay": float(late.mean()) if len(late) else None,
        "delay_error": float(late.std(ddof=1) / sqrt(len(late))) if len(late) > 1 else None,
    }
    if gold is not None:
        stopped = gold[np.where(halts > 0, halts, ROUNDS) - 1]
        figures["kept"] = float((stopped / gold.max()).mean())
        figures["least_kept"] = float((stopped / gold.max()).min())
        figures["stopped_at"] = float(np.where(halts > 0, halts, ROUNDS).mean())
    return figures


def check(seed: int, runs: int) -> int:
    """Compare the twins with the product's folds on trajectories of every kind; returns their number."""
    checked, every = 0, [*cells()][:: 5 if runs < 1000 else 2]
    for index, cell in enumerate(every):
        short = simulate(cell, np.random.default_rng([seed, 10**6 + index]), 5).first(250)
        checked += guard_rules.check_twins(*short.pair, short.weight, short.gains)
    return checked


def measure(given: argparse.Namespace, results: Results) -> None:
    results.add(group="check", runs=check(given.seed, given.runs))
    every = [*cells()]
    with ProcessPoolExecutor(given.processes) as pool:
        done = pool.map(
            measure_cell, every, ([given.seed, i] for i in range(len(every))), [given.runs] * len(every), chunksize=4
        )
        for samples in done:
            for sample in samples:
                results.add(**sample)


# -- tables ------------------------------------------------------------------------------------------------------------


def interval(count: int) -> tuple[float, float]:
    """95 % limits of a Poisson mean (Byar's approximation)."""
    low = 0.0 if count == 0 else count * (1 - 1 / (9 * count) - 1.96 / (3 * sqrt(count))) ** 3
    more = count + 1
    return low, more * (1 - 1 / (9 * more) + 1.96 / (3 * sqrt(more))) ** 3


def rate(sample: Sample) -> float:
    """False halts per 1000 rounds."""
    return float(1000 * sample["halts"] / sample["lived"])


def rate_words(sample: Sample) -> str:
    low, high = (1000 * limit / sample["lived"] for limit in interval(sample["halts"]))
    return f"{rate(sample):.2f} [{low:.2f}, {high:.2f}]"


def delay_words(sample: Sample) -> str:
    """Mean delay, its interval, and what was missed."""
    missed = f", {sample['misses']} of {sample['runs']} missed" if sample["misses"] else ""
    if sample["delay"] is None:
        return f"none halted{missed}"
    error = f" ± {1.96 * sample['delay_error']:.1f}" if sample["delay_error"] is not None else ""
    return f"{sample['delay']:.1f}{error}{missed}"


def noise_words(phi: float, sd: float) -> str:
    return f"{'white' if not phi else f'AR(1) {phi:g}'}, sd {sd:g}"


def table(samples: Sequence[Sample]) -> str:
    parts = [
        ("False halts per 1000 healthy rounds, the worst of 12 families, and rounds of delay", _main_table),
        ("`SequentialGuard` by family: false halts per 1000 healthy rounds", _families),
        ("Other faults: rounds of delay of `SequentialGuard`", _faults),
        ("Collapses in the first rounds: rounds of delay of `SequentialGuard`", _early),
        ("Gao curves: how much of the gold score's peak is left at the halt", _gao),
        (f"A drop of {DROP:g} in a score of as many items as `items_needed` says", _sizes),
        (f"Fleets of 8 replicas, {noise_words(*FLEET_NOISE)}", _fleets),
    ]
    return "\n\n".join(f"**{title}**\n\n{make(samples)}" for title, make in parts)


def _main_table(samples: Sequence[Sample]) -> str:
    rows = []
    for phi, sd in NOISES:
        for rule in RULES:
            worst = max(pick(samples, group="healthy", phi=phi, sd=sd, rule=rule), key=rate)
            late = [
                pick(samples, group="fault", case=c, phi=phi, sd=sd, rule=rule)[0] for c in (*BOTH_MOVE, "divergence")
            ]
            rows.append([noise_words(phi, sd), rule, f"{rate_words(worst)} ({worst['case']})", *map(delay_words, late)])
    return markdown(
        ["noise", "rule", "false halts, 95 %", "fast .02", "medium .005", "slow .001", "divergence .05"], rows
    )


def _families(samples: Sequence[Sample]) -> str:
    rows = [
        [
            family,
            *(
                f"{rate(pick(samples, group='healthy', case=family, phi=p, sd=s, rule=RULES[-1])[0]):.2f}"
                for p, s in NOISES
            ),
        ]
        for family in HEALTHY
    ]
    return markdown(["family", *(noise_words(*n) for n in NOISES)], rows)


def _faults(samples: Sequence[Sample]) -> str:
    from_scratch = ["divergence, from scratch", "jump, from scratch"]
    cases = [*(c for c in FAULTS if c not in (*BOTH_MOVE, "divergence")), *from_scratch]
    rows = [
        [
            case,
            *(delay_words(pick(samples, group="fault", case=case, phi=p, sd=s, rule=RULES[-1])[0]) for p, s in NOISES),
        ]
        for case in cases
    ]
    return markdown(["fault", *(noise_words(*n) for n in NOISES)], rows)


def _early(samples: Sequence[Sample]) -> str:
    ours = pick(samples, group="early", rule=RULES[-1])
    rows = [
        [case, *(delay_words(pick(ours, case=case, phi=p, sd=s)[0]) for p, s in NOISES)]
        for case in (*COLLAPSES, *CLIMBS)
    ]
    return markdown(["collapse", *(noise_words(*n) for n in NOISES)], rows)


def _gao(samples: Sequence[Sample]) -> str:
    rows = []
    for phi, sd in IN_THE_BAR:
        by_rule = [pick(samples, group="gao", phi=phi, sd=sd, rule=rule)[0] for rule in RULES]
        rows.append(
            [
                noise_words(phi, sd),
                *(f"{s['kept']:.0%} (least {s['least_kept']:.0%}), round {s['stopped_at']:.0f}" for s in by_rule),
            ]
        )
    return markdown(["noise", *RULES], rows)


def _sizes(samples: Sequence[Sample]) -> str:
    rows = []
    for s in pick(samples, group="size", rule=RULES[-1]):
        items = items_needed(DROP, item_sd=ITEM_SD, rounds=int(s["case"]), autocorrelation=s["phi"])
        rows.append([s["case"], "white" if not s["phi"] else f"AR(1) {s['phi']:g}", str(items), delay_words(s)])
    return markdown(["rounds asked for", "noise", "items", "rounds of delay"], rows)


def _fleets(samples: Sequence[Sample]) -> str:
    rows = []
    for case in FLEETS:
        for rule in RULES:
            by_fault = {s["fault"]: s for s in pick(samples, group="fleet", case=case, rule=rule)}
            late = [delay_words(by_fault[fault]) for fault in BOTH_MOVE]
            rows.append([case, rule, rate_words(by_fault[""]), *late])
    return markdown(["fleet", "rule", "false halts, 95 %", "fast .02", "medium .005", "slow .001"], rows)


def bar(samples: Sequence[Sample]) -> list[tuple[str, bool]]:
    """Each demand on `SequentialGuard`, with what was measured, and whether it is met."""
    found = []
    ours = pick(samples, rule=RULES[-1])
    for phi, most in ((0.0, 1.0), (0.5, 1.0), (0.7, 2.0)):
        worst = max((s for s in pick(ours, group="healthy", phi=phi) if s["sd"] <= 0.02), key=rate)
        words = f"at most {most:g} false halts per 1000 rounds, {noise_words(phi, 0.02)} or less: {rate_words(worst)}"
        found.append((words, interval(worst["halts"])[1] * 1000 / worst["lived"] <= most))
    for case, fault in FAULTS.items():
        if fault.within is None:
            continue
        judged = [s for s in pick(ours, group="fault", case=case) if s["sd"] <= 0.02 and s["phi"] <= 0.5]
        worst = max(judged, key=lambda s: s["delay"] or ROUNDS)
        found.append((f"{case} within {fault.within:g} rounds: {delay_words(worst)}", worst["delay"] <= fault.within))
    for within in sorted({c.within for c in COLLAPSES.values() if c.within is not None}):
        judged = [
            s
            for s in pick(ours, group="early")
            if s["case"] in COLLAPSES and s["sd"] <= 0.02 and s["phi"] <= 0.5 and COLLAPSES[s["case"]].within == within
        ]
        worst = max(judged, key=lambda s: s["delay"] or ROUNDS)
        missing = sum(s["misses"] for s in judged)
        words = f"early collapses within {within:g} rounds, none missed: {delay_words(worst)} ({worst['case']})"
        found.append((words, (worst["delay"] or ROUNDS) <= within and not missing))
    missed = [s for s in ours if s["group"] == "fault" and s["sd"] <= 0.02 and s["phi"] <= 0.5]
    # A run from scratch rises over a jump again, so that it need not halt.
    both = [s for s in missed if not s["case"].startswith(("proxy only", "jump, from scratch"))]
    found.append(
        (
            f"no miss in 500 rounds: {sum(s['misses'] for s in both)} of {sum(s['runs'] for s in both)}",
            not any(s["misses"] for s in both),
        )
    )
    proxy = [s for s in missed if s["case"].startswith("proxy only")]
    words = f"no proxy-only hack missed: {sum(s['misses'] for s in proxy)} of {sum(s['runs'] for s in proxy)}"
    found.append((words, not any(s["misses"] for s in proxy)))
    fleets = pick(ours, group="fleet")
    worst = max((s for s in fleets if not s["fault"] and FLEETS[s["case"]].liars), key=rate)
    words = f"at most 1 false halts per 1000 rounds, whatever 2 of 8 report: {rate_words(worst)} ({worst['case']})"
    found.append((words, interval(worst["halts"])[1] * 1000 / worst["lived"] <= 1))
    for fault in BOTH_MOVE:
        honest, *others = sorted(pick(fleets, fault=fault), key=lambda s: s["case"] != "all honest")
        latest = max((s for s in others if FLEETS[s["case"]].liars), key=lambda s: s["delay"] or ROUNDS)
        times_later = (latest["delay"] or ROUNDS) / honest["delay"]
        words = f"{fault}: 2 of 8 delay it {times_later:.2f} times at most ({latest['case']}), less than 2"
        found.append((words, times_later < 2 and not latest["misses"]))
    kept = min(s["least_kept"] for s in ours if s["group"] == "gao" and s["sd"] <= 0.02 and s["phi"] <= 0.5)
    found.append((f"Gao curves keep at least half of the gold peak: {kept:.0%} at least", kept >= 0.5))
    return found


def report(session: dict[str, Any], samples: Sequence[Sample]) -> str:
    runs = sum(s["runs"] for s in pick(samples, rule=RULES[-1]))
    checked = pick(samples, group="check")[0]["runs"]
    demands = "\n".join(f"- {'met' if met else 'NOT MET'}: {words}" for words, met in bar(samples))
    return (
        f"{runs:,} simulated runs, {session['settings']['runs']} a cell, seed {session['settings']['seed']}; the twins "
        f"equal the product's folds on {checked} trajectories. Measured {session['session'][:10]} on "
        f"{session['machine']}.\n\n```\nPYTHONPATH=. .venv/bin/python {session['command']}\n```\n\n"
        f"{table(samples)}\n\n**The bar for `SequentialGuard`**\n\n{demands}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="simulated runs in a cell; default 300")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-guard.jsonl")
    parser.add_argument("--table", action="store_true", help="simulate nothing: print the newest session's tables")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into docs/kill-switch.md")
    given = parser.parse_args()
    results = Results("guard", given.results)
    if not given.table:
        began = time.monotonic()
        results.begin([], vars(given))
        measure(given, results)
        print(f"{time.monotonic() - began:.0f} s\n")
    session, samples = results.newest()
    text = report(session, samples)
    print(text)
    if given.docs:
        for name, picture in guard_pictures.pictures(given.seed).items():
            _PICTURES.mkdir(exist_ok=True)
            (_PICTURES / f"{name}.svg").write_text(picture)
        publish("guard", text, guard_pictures.overview(samples), _DOCUMENT, _PICTURES)


if __name__ == "__main__":
    main()
