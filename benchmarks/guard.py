"""How often the guard's default rule halts healthy runs, how late the others: docs/inside/kill-switch-figures.md.

    PYTHONPATH=. python benchmarks/guard.py --quick            # two minutes
    PYTHONPATH=. python benchmarks/guard.py --runs 300 --docs

Rules are judged by twins on arrays (`guard_rules`), which are first compared with the product's own folds, run by run.
False halts are per 1000 rounds lived, with 95 % Poisson intervals; delays are means over runs that were alive when the
fault began. "before" is the rule of the version before, "sequential-v3", on the same runs.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import guard_pictures
import guard_rules
import numpy as np
from guard_curves import (
    BASES,
    CURVES,
    GAPS,
    HELD_BACK,
    HELD_BACK_FALLS,
    ODD,
    OF_LOSSES,
    SCORES,
    UNPROMISED,
    Runs,
    bump,
    falling,
    falls,
    gap,
    restarts,
)
from guard_trajectories import (
    BOTH_MOVE,
    CHANGE,
    CLIMBS,
    COLLAPSES,
    FAULTS,
    HEALTHY,
    LIES,
    LOSSES,
    Fleet,
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

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import RoundReports, SequentialGuard, fold, items_needed
from diloco_orchestrator.guard.sequential_v3 import SequentialV3
from diloco_orchestrator.protocol.records import Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet

Rng = np.random.Generator
NOISES = ((0.5, 0.0025), (0.5, 0.005), (0.0, 0.01), (0.5, 0.02), (0.7, 0.02), (0.5, 0.05))
FLEETS = {
    "all honest": Fleet(),
    "unequal, a fifth drops out": Fleet(dropout=0.2, unequal=True),
    "16 shares, half of them missing for 20 rounds": Fleet(shares=16, dropout=0.5, stays=20, unequal=True),
    "1 of 8 lies: down by 1 sd": Fleet(liars=1, lie="down by 1 sd"),
    **{f"2 of 8 lie: {lie}": Fleet(liars=2, lie=lie) for lie in LIES},
    "2 of 8 lie: up by .2 in the first 8 rounds": Fleet(liars=2, at_first=0.2),
    "each score given 4 times": Fleet(repeated=4),
    "each score given 8 times": Fleet(repeated=8),
}
SIZES = (8, 15, 30, 60)  # rounds of delay that `items_needed` is asked for
DROP, ITEM_SD = 0.05, 0.5
_AT_ONCE = 4000  # runs
_MOVED = 8  # cells before those of "score" that are in `guard_public` now: the others keep their streams
RULES = ("SequentialGuard", "before", "patience 3", "patience 6")  # the last two: `HeldOutGuard`
_DOCUMENT, _PICTURES = ROOT / "docs" / "inside" / "kill-switch-figures.md", ROOT / "docs" / "inside" / "kill-switch"


@dataclass(frozen=True)
class Cell:
    """Runs of one kind, made by `make`. `share`: of the number of runs that is asked for."""

    group: str
    case: str
    make: Callable[[Rng, int], Runs]
    phi: float = 0.0
    sd: float = 1.0
    fault: str = ""
    share: float = 1.0


def cells() -> Iterator[Cell]:
    for phi in (0.5, 0.7):
        for rounds, share in ((50, 6.0), (100, 6.0), (600, 1.0), (5000, 0.1)):
            yield Cell(
                "plateau", f"{rounds}", lambda r, n, p=phi, t=rounds: Runs(noise(r, t, n, p, 1.0)), phi, share=share
            )
    for phi, sd in NOISES:
        for family in HEALTHY:
            yield Cell(
                "healthy", family, lambda r, n, f=family, p=phi, s=sd: _pair(healthy(r, f, n, p, s, 300), f), phi, sd
            )
        for fault in FAULTS:
            yield Cell("fault", fault, lambda r, n, f=fault, p=phi, s=sd: _faulty(r, f, n, p, s), phi, sd, fault)
        for case in (*COLLAPSES, *CLIMBS):
            yield Cell(
                "early", case, lambda r, n, c=case, p=phi, s=sd: _collapsing(r, c, n, p, s), phi, sd, "collapse", 0.5
            )
        yield Cell("gao", "Gao curve", lambda r, n, p=phi, s=sd: _gao(r, n, p, s), phi, sd, "gao", 0.5)
    for case, make in SCORES.items():
        yield Cell("score", case, lambda r, n, m=make: Runs(m(r, n)))
    for phi in (0.0, 0.5):
        for case, odd in ODD.items():
            yield Cell("odd", case, lambda r, n, o=odd, p=phi: Runs(o(r, n, p)), phi)
    for tau in (1.5, 4.0, 8.0):
        for base in BASES:
            for height in (0.05, 0.1, 0.3):
                for rise in (0, 2):
                    words = f"{height:g} {base}, {'within 2 rounds' if rise else 'at once'}"
                    yield Cell(
                        "bump", words, lambda r, n, b=base, h=height, t=tau, u=rise: bump(r, b, h, t, u, n), sd=tau
                    )
        for height in (0.05, 0.1):
            yield Cell(
                "bump",
                f"{height:g}, restart every 40 rounds",
                lambda r, n, h=height, t=tau: restarts(r, h, t, 40, n),
                sd=tau,
            )
    for case in GAPS:
        for sd in (0.005, 0.02):
            yield Cell("gap", case, lambda r, n, c=case, s=sd: gap(r, c, s, n), 0.3, sd, share=0.5)
    for phi in (0.0, 0.5):
        for curve, onset, fall in falls():
            name = f"{curve}; {onset}; {fall[0]} sd in {fall[1]}"
            yield Cell(
                "fall",
                name,
                lambda r, n, c=curve, o=onset, f=fall, p=phi: falling(r, CURVES[c], o, f, p, n, c not in OF_LOSSES),
                phi,
                fault=curve,
                share=0.15,
            )
    for case in FLEETS:
        for fault in ("", *BOTH_MOVE):
            yield Cell("fleet", case, lambda r, n, c=case, f=fault: _fleet(r, FLEETS[c], f, n), 0.5, 0.02, fault)
    for rounds in SIZES:
        for phi in (0.0, 0.5):
            yield Cell("size", f"{rounds}", lambda r, n, t=rounds, p=phi: _drop(r, t, p, n), phi, 0.0, "drop", 0.5)
    for case, make_runs in HELD_BACK.items():
        yield Cell("held back", case, make_runs)
    for case, make_runs in HELD_BACK_FALLS.items():
        yield Cell("held-back fall", case, make_runs, fault=case)


def streams() -> Iterator[tuple[int, Cell]]:
    """Every cell with the number of its stream."""
    moved = 0
    for number, cell in enumerate(cells()):
        moved = _MOVED if cell.group == "score" else moved
        yield number + moved, cell


def _pair(pair: tuple[guard_rules.Array, guard_rules.Array], family: str) -> Runs:
    return Runs(*pair, metric="loss" if family in LOSSES else "reward")


def _faulty(rng: Rng, fault: str, runs: int, phi: float, sd: float) -> Runs:
    pair = faulty(rng, fault, runs, phi, sd, rounds=420)
    clean = FAULTS[fault].heldout(times(420)[1])[:, None]
    return Runs(*pair, clean=clean, begins=CHANGE, metric="reward")


def _collapsing(rng: Rng, case: str, runs: int, phi: float, sd: float) -> Runs:
    pair = collapsing(rng, case, runs, phi, sd, 240)
    return Runs(*pair, begins={**COLLAPSES, **CLIMBS}[case].after, metric="reward")


def _gao(rng: Rng, runs: int, phi: float, sd: float) -> Runs:
    pair, gold = gao(rng, runs, phi, sd)
    return Runs(*pair, clean=gold[:, None], metric="reward")


def _drop(rng: Rng, rounds: int, phi: float, runs: int) -> Runs:
    sd = ITEM_SD / sqrt(items_needed(DROP, item_sd=ITEM_SD, rounds=rounds, autocorrelation=phi))
    u = times(500)[1][:, None]
    return Runs(noise(rng, 500, runs, phi, sd) - DROP * (u > 0), begins=CHANGE)


def _fleet(rng: Rng, fleet: Fleet, fault: str, runs: int) -> Runs:
    u = times(400)[1][:, None]
    held, trained = (FAULTS[fault].heldout(u), FAULTS[fault].in_loop(u)) if fault else (0 * u, 0 * u)
    in_loop = repeat(trained + noise(rng, 400, runs, 0.5, 0.02), fleet.repeated)
    if fleet.repeated > 1:
        return Runs(repeat(held + noise(rng, 400, runs, 0.5, 0.02), fleet.repeated), in_loop, begins=CHANGE)
    scores, weight, gains = through_shares(rng, held, 0.5, 0.02, fleet, runs)
    return Runs(scores, in_loop, None, CHANGE, weight, gains)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_cells(numbers: Sequence[int], seed: int, runs: int) -> list[Sample]:
    """A sample of each of these cells for each rule. The rule before is judged on a third of the runs.

    Each cell draws from its own stream, so that its runs do not depend on the other cells.
    """
    every = dict(streams())
    cut = [every[number] for number in numbers]
    made = [
        cell.make(np.random.default_rng([seed, number]), max(4, round(runs * cell.share)))
        for number, cell in zip(numbers, cut, strict=True)
    ]
    few = [_first(each, max(4, each.heldout.shape[1] // 3)) for each in made]
    judged = {"SequentialGuard": (_together(made, lambda m: guard_rules.sequential(*_series(m), _guard(m))), made)}
    group, phi = cut[0].group, cut[0].phi
    if group == "fall":
        known = sqrt((1 + phi) / (1 - phi))
        judged["noise known"] = (
            _together(made, lambda m: guard_rules.sequential(*_series(m), _guard(m), known=known)),
            made,
        )
    judged["before"] = (_together(few, lambda m: guard_rules.sequential(*_series(m), _guard(m, SequentialV3))), few)
    found: list[Sample] = []
    for rule, (halts, of) in judged.items():
        for cell, each, one in zip(cut, of, halts, strict=True):
            found.append(_sample(cell, rule, one, each))
    for cell, each in zip(cut, few, strict=True):
        if each.in_loop is None or group not in ("healthy", "fault", "early", "gao", "fleet"):
            continue
        limit = 0.5 if cell.case in LOSSES else 0.10
        for patience in (3, 6):
            halts = guard_rules.heldout_guard(each.heldout, each.in_loop, patience, limit)
            found.append(_sample(cell, f"patience {patience}", (halts, np.zeros_like(halts)), each))
    return found


_Halts = tuple[guard_rules.Rounds, guard_rules.Rounds]


def _sample(cell: Cell, rule: str, halts: _Halts, made: Runs) -> Sample:
    given = {"group": cell.group, "case": cell.case, "phi": cell.phi, "sd": cell.sd, "fault": cell.fault}
    measured = {**given, "rule": rule, **figures(*halts, made, faulty=bool(cell.fault))}
    if rule == RULES[0] and cell.group in ("fall", "fault") and made.clean is not None:
        measured["lost"] = _lost_at(halts[0], made)
    return measured


def _series(made: Runs) -> tuple[guard_rules.Array, Any, Any, Any]:
    return made.heldout, made.in_loop, made.weight, made.gains


def _together(made: Sequence[Runs], rule: Callable[[Runs], _Halts]) -> list[_Halts]:
    """What `rule` says of each of these cells, all judged at once: their arrays differ in the number of runs alone."""
    numbers = [each.heldout.shape[1] for each in made]
    joined = [
        None if parts[0] is None else np.concatenate(parts, axis=-1)
        for parts in zip(*(_series(each) for each in made), strict=True)
    ]
    halts, channels = rule(Runs(joined[0], joined[1], None, 0, joined[2], joined[3], made[0].metric))
    ends = np.cumsum(numbers)[:-1]
    return [*zip(np.split(halts, ends), np.split(channels, ends), strict=True)]


def batches(seed: int, runs: int, only: Sequence[str] | None = None) -> list[list[int]]:
    """Cells that can be judged at once, at most `_AT_ONCE` runs of them. `only`: groups of cells; default all."""
    found: dict[Any, list[list[int]]] = {}
    every = dict(streams())
    for number, cell in every.items():
        if only and cell.group not in only:
            continue
        made = cell.make(np.random.default_rng([seed, number]), 2)
        kind = (cell.group, cell.phi, len(made.heldout), made.metric, *(part is None for part in _series(made)))
        groups = found.setdefault((*kind, None if made.gains is None else made.gains.shape[1]), [[]])
        if sum(max(4, runs * every[each].share) for each in groups[-1]) > _AT_ONCE:
            groups.append([])
        groups[-1].append(number)
    return [batch for groups in found.values() for batch in groups]


def _guard(made: Runs, rule: type[SequentialGuard] = SequentialGuard) -> SequentialGuard:
    return rule(gap_sigmas=5.0 if made.metric == "reward" else None)


def _first(made: Runs, runs: int) -> Runs:
    rest = [None if part is None else part[..., :runs] for part in (made.in_loop, made.clean, made.weight, made.gains)]
    return Runs(made.heldout[:, :runs], rest[0], rest[1], made.begins, rest[2], rest[3], made.metric)


def figures(halts: guard_rules.Rounds, channels: guard_rules.Rounds, made: Runs, *, faulty: bool) -> dict[str, Any]:
    """Halts and rounds lived; with a fault: halts before it, misses and delays."""
    rounds, runs = made.heldout.shape
    figures: dict[str, Any] = {
        "runs": runs,
        "halts": int((halts > 0).sum()),
        "lived": int(np.where(halts > 0, halts, rounds).sum()),
        "gaps": int((channels == guard_rules.CHANNELS.index("gap")).sum()),
        "gaps_at_best": _gaps_at_best(halts, channels, made.heldout),
    }
    if not faulty:
        return figures
    late = halts[halts > made.begins] - made.begins
    alive = int(((halts == 0) | (halts > made.begins)).sum())
    figures |= {
        "early": int(((halts > 0) & (halts <= made.begins)).sum()),
        "misses": int((halts == 0).sum() if rounds - made.begins < 200 else alive - (late <= 200).sum()),
        "delay": float(late.mean()) if len(late) else None,
        "delay_error": float(late.std(ddof=1) / sqrt(len(late))) if len(late) > 1 else None,
        "delays": [int(each) for each in late],
    }
    if made.clean is not None:
        figures |= _kept(halts, made)
    return figures


def _kept(halts: guard_rules.Rounds, made: Runs) -> dict[str, Any]:
    """At the halt: the score without noise as a share of its best."""
    assert made.clean is not None
    clean = np.broadcast_to(made.clean, made.heldout.shape)[:, 0]
    at = clean[np.where(halts > 0, halts, len(clean)) - 1]
    top = float(clean.max())
    return {"kept": float((at / top).mean()) if top > 0 else None, "stopped": float(np.mean(halts))}


def _lost_at(halts: guard_rules.Rounds, made: Runs) -> list[float]:
    """The share of the fall that is in the model to which the product's verdict goes back, for two halted runs."""
    assert made.clean is not None
    clean, found = np.broadcast_to(made.clean, made.heldout.shape)[:, 0], list[float]()
    for run in np.flatnonzero(halts > made.begins)[:2]:
        until = int(halts[run])
        in_loop = None if made.in_loop is None else made.in_loop[:until, run]
        verdict = guard_rules.folded(made.heldout[:until, run], in_loop, guard=_guard(made))[1]
        assert verdict is not None and verdict.rollback_to is not None, "its twin halts there"
        best, back = int(clean[:until].argmax()), verdict.rollback_to  # model n is scored in round n + 1
        fall = clean[best] - clean[until - 1]
        found += [float((clean[best] - clean[back]) / fall) if back > best else 0.0] if fall > 0 else []
    return found


def _gaps_at_best(halts: guard_rules.Rounds, channels: guard_rules.Rounds, heldout: guard_rules.Array) -> int:
    """Gap alarms in a round whose last eight held-out scores have the best mean of all."""
    found = 0
    for run in np.flatnonzero(channels == guard_rules.CHANNELS.index("gap")):
        scores = heldout[: halts[run], run]
        means = np.convolve(scores, np.ones(8) / 8, "valid")
        found += bool(means[-1] >= means.max())
    return found


def check(seed: int, quick: bool) -> int:
    """Compare the twin with the product's folds on runs of every kind; returns their number."""
    checked = 0
    for number, cell in streams():
        if number % (10 if quick else 5) or cell.case == "5000":
            continue
        made = cell.make(np.random.default_rng([seed, 10**6 + number]), 2)
        rounds = 150
        weight = None if made.weight is None else np.round(made.weight[:rounds] * 1e9) / 1e9
        in_loop = None if made.in_loop is None else made.in_loop[:rounds]
        gains = None if made.gains is None else made.gains[:rounds]
        checked += guard_rules.check_twins(made.heldout[:rounds], in_loop, weight, gains, _guard(made))
        if in_loop is not None and cell.group == "fault":
            guard_rules.check_heldout(made.heldout[:rounds], in_loop)
    return checked


def cost(replicas: int = 32, rounds: int = 90) -> float:
    """Median milliseconds of CPU to fold a round of so many replicas: shares, means, the rule, the verdict."""
    rng, took, state = np.random.default_rng(1), [], None
    heldout = HeldoutSet(metric="reward", shares=(64,) * replicas, digest="0" * 64)
    for round_ in range(1, rounds + 1):
        scores = [Score(share=i, sum=64 * float(rng.normal(0.5, 0.05)), count=64) for i in range(replicas)]
        in_loop = [Metric(sum=float(rng.normal(0.5, 0.05)), count=1) for _ in range(replicas)]
        began = time.process_time()
        state = fold(state, GuardConfig(), heldout, RoundReports(round_, scores, dict(enumerate(in_loop)))).state
        took.append(1000 * (time.process_time() - began))
    return float(np.median(took))


def measure(given: argparse.Namespace, results: Results) -> None:
    every = batches(given.seed, given.runs, given.groups)
    if given.processes == 1:
        _compare(given, results)
        for numbers in every:
            for sample in measure_cells(numbers, given.seed, given.runs):
                results.add(**sample)
        return
    with ProcessPoolExecutor(given.processes) as pool:
        found = pool.map(measure_cells, every, [given.seed] * len(every), [given.runs] * len(every))
        _compare(given, results)  # meanwhile
        for samples in found:
            for sample in samples:
                results.add(**sample)


def _compare(given: argparse.Namespace, results: Results) -> None:
    if not given.groups:
        results.add(group="check", runs=check(given.seed, given.quick))
        results.add(group="cost", ms=cost())


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


def share_words(samples: Sequence[Sample]) -> str:
    """Share of runs halted, with a 95 % interval (Wilson)."""
    halted, n = sum(s["halts"] for s in samples), sum(s["runs"] for s in samples)
    p, z = halted / n, 1.96
    middle, half = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (100 * (middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return f"{100 * p:.1f} % [{low:.1f}, {high:.1f}]"


def delay_words(sample: Sample) -> str:
    """Mean delay, its interval, and what was missed in 200 rounds or in the run."""
    missed = f", {sample['misses']} of {sample['runs']} missed" if sample["misses"] else ""
    if sample["delay"] is None:
        return f"none halted{missed}"
    error = f" ± {1.96 * sample['delay_error']:.1f}" if sample["delay_error"] is not None else ""
    return f"{sample['delay']:.1f}{error}{missed}"


def fall_words(samples: Sequence[Sample]) -> str:
    """Mean, 95th percentile and misses of lasting falls; one missed counts as 200 rounds."""
    delays = [min(delay, 200) for s in samples for delay in s["delays"]]
    misses = sum(s["misses"] for s in samples)
    delays += [200] * (sum(s["runs"] - s["early"] for s in samples) - len(delays))
    mean, error = float(np.mean(delays)), 1.96 * float(np.std(delays)) / sqrt(len(delays))
    missed = 1000 * misses / len(delays)
    return f"{mean:.1f} ± {error:.1f}, p95 {np.percentile(delays, 95):.0f}, {missed:.0f} in 1000 missed"


def noise_words(phi: float, sd: float) -> str:
    return f"{'white' if not phi else f'AR(1) {phi:g}'}, sd {sd:g}"


def worst(samples: Sequence[Sample]) -> str:
    found = max(samples, key=rate)
    return f"{rate_words(found)} ({found['case']})"


def bar(samples: Sequence[Sample]) -> str:
    """The bar's lines: what was asked, what was measured, and the same of the rule before."""
    both = [pick(samples, rule=rule) for rule in RULES[:2]]
    rows = []

    def line(what: str, asked: str, words: Callable[[Sequence[Sample]], str]) -> None:
        rows.append([what, asked, *map(words, both)])

    for phi, asked in ((0.5, "1"), (0.7, "2")):
        line(
            f"plateaus of 50 to 5000 rounds, AR(1) {phi:g}: halts per 1000",
            asked,
            lambda s, p=phi: worst(pick(s, group="plateau", phi=p)),
        )
    for phi, asked in ((0.5, "5 %"), (0.7, "8 %")):
        line(
            f"plateaus of 100 rounds, AR(1) {phi:g}: runs halted",
            asked,
            lambda s, p=phi: share_words(pick(s, group="plateau", phi=p, case="100")),
        )
    for phi, asked in ((0.0, "1"), (0.5, "1"), (0.7, "2")):
        line(
            f"12 healthy families, sd .0025 to .05, AR(1) {phi:g}: halts per 1000",
            asked,
            lambda s, p=phi: worst(pick(s, group="healthy", phi=p)),
        )
    for prefix, what in (
        ("success", "sampled scores of 8 to 256 items"),
        ("rises", "sparse, then a rise"),
        ("greedy", "greedy scores of fixed items"),
    ):
        line(
            f"{what}: halts per 1000",
            "1",
            lambda s, p=prefix: worst([c for c in pick(s, group="score") if c["case"].startswith(p)]),
        )
    line(
        "a gap alarm while the newest held-out block is the best",
        "0",
        lambda s: f"{sum(c['gaps_at_best'] for c in s)} of {sum(c['runs'] for c in s)} runs",
    )
    line(
        "training leaves a held-out score that does not fall: runs halted by a gap",
        "0",
        lambda s: f"{sum(c['gaps'] for c in pick(s, group='gap'))} of {sum(c['runs'] for c in pick(s, group='gap'))}",
    )
    for words, taus, asked in (("up to 4", (1.5, 4.0), "5 %"), ("of 8", (8.0,), "20 %")):
        for what, part in (
            ("bumps on a plateau", "plateau"),
            ("bumps on a falling loss", "loss"),
            ("restarts", "restart"),
        ):
            line(
                f"{what} that heal, tau {words} rounds, sd .005: runs halted",
                asked,
                lambda s, t=taus, p=part: share_words(
                    [c for c in pick(s, group="bump") if c["sd"] in t and p in c["case"]]
                ),
            )
    for case, asked in zip([c for c in ODD if c not in UNPROMISED], ("1", "1.5", "1.5", "1", "1", "3"), strict=True):
        line(
            f"noise: {case}: halts per 1000",
            asked,
            lambda s, c=case: rate_words(max(pick(s, group="odd", case=c), key=rate)),
        )
    for words, steep, size in (
        ("lasting falls of 5, 15 and 40 sd, after any but steep curves", False, " sd"),
        ("of these, those of 5 sd", False, "; 5 sd"),
        ("falls of 5, 15 and 40 sd after curves of 2 to 8 sd a round", True, " sd"),
    ):
        line(
            f"{words}: delay",
            "12, p95 25, 0",
            lambda s, w=steep, z=size: fall_words(
                [c for c in pick(s, group="fall") if c["fault"].endswith("steep") == w and z in c["case"]]
            ),
        )
    for fault in (*BOTH_MOVE, "divergence"):
        line(
            f"{fault} on a plateau, AR(1) .5, sd .02: delay",
            f"{FAULTS[fault].within:g}",
            lambda s, f=fault: delay_words(pick(s, group="fault", case=f, phi=0.5, sd=0.02)[0]),
        )
    line(
        "these four, any noise: missed",
        "0",
        lambda s: str(
            sum(
                c["misses"]
                for c in pick(s, group="fault")
                if c["case"] in (*BOTH_MOVE, "divergence") and c["sd"] < 0.05
            )
        ),
    )
    line(
        "2 of 8 lie: halts per 1000",
        "1",
        lambda s: worst([c for c in pick(s, group="fleet", fault="") if c["case"].startswith("2 of")]),
    )
    for fault in BOTH_MOVE:
        line(f"2 of 8 lie, {fault}: times later than honest", "2", lambda s, f=fault: _later(s, f))
    line("share of the fall in the model to go back to", ".1", _lost)
    line(
        "Gao curves, AR(1) .5, sd .02: gold score kept",
        "half",
        lambda s: f"{pick(s, group='gao', phi=0.5, sd=0.02)[0]['kept']:.0%}",
    )
    return markdown(["what", "asked", "SequentialGuard", "the rule before"], rows)


def _later(samples: Sequence[Sample], fault: str) -> str:
    fleets = pick(samples, group="fleet", fault=fault)
    honest = pick(fleets, case="all honest")[0]
    found = max((s for s in fleets if s["case"].startswith("2 of")), key=lambda s: s["delay"] or 400)
    return f"{(found['delay'] or 400) / honest['delay']:.2f} ({found['case']})"


def _lost(samples: Sequence[Sample]) -> str:
    lost = [share for s in samples if s["group"] in ("fall", "fault") for share in s.get("lost", ())]
    if not lost:
        return "none of the few runs halted"
    return f"{np.mean(lost):.3f} in the mean, {np.percentile(lost, 95):.2f} at p95"


def _by_noise(samples: Sequence[Sample], group: str, words: Callable[[Sample], str]) -> str:
    """A row for each case of a group, a column for each noise."""
    ours = pick(samples, group=group, rule=RULES[0])
    noises = list(dict.fromkeys((s["phi"], s["sd"]) for s in ours))
    rows = [
        [case, *(words(pick(ours, case=case, phi=phi, sd=sd)[0]) for phi, sd in noises)]
        for case in dict.fromkeys(s["case"] for s in ours)
    ]
    return markdown(["", *(noise_words(*each) for each in noises)], rows)


def _falls(samples: Sequence[Sample]) -> str:
    rules = (RULES[0], "noise known")
    rows = [
        [
            curve,
            *(fall_words(pick(samples, group="fall", rule=r, fault=curve, phi=p)) for r in rules for p in (0.0, 0.5)),
        ]
        for curve in CURVES
    ]
    return markdown(["curve", "white", "AR(1) 0.5", "white, were sigma known", "AR(1) 0.5, were sigma known"], rows)


def _cases(samples: Sequence[Sample], group: str, words: Callable[[Sample], str]) -> str:
    """A row for each case of a group, the worst of its noises."""
    ours = pick(samples, group=group, rule=RULES[0])
    cases = dict.fromkeys(s["case"] for s in ours)
    return markdown(["", ""], [[case, words(max(pick(ours, case=case), key=rate))] for case in cases])


def _callbacks(samples: Sequence[Sample]) -> str:
    """`SequentialGuard` beside a callback with patience: `HeldOutGuard` at its defaults, and with a patience of 6."""
    rows = []
    for phi, sd in NOISES:
        for rule in RULES:
            found = max(pick(samples, group="healthy", phi=phi, sd=sd, rule=rule), key=rate)
            late = [
                pick(samples, group="fault", case=c, phi=phi, sd=sd, rule=rule)[0] for c in (*BOTH_MOVE, "divergence")
            ]
            name = {"before": "the rule before", "patience 3": "HeldOutGuard", "patience 6": "HeldOutGuard, patience 6"}
            rows.append(
                [
                    noise_words(phi, sd),
                    name.get(rule, rule),
                    f"{rate_words(found)} ({found['case']})",
                    *map(delay_words, late),
                ]
            )
    return markdown(
        ["noise", "rule", "false halts, worst family", "fast .02", "medium .005", "slow .001", "divergence"], rows
    )


def _fleets(samples: Sequence[Sample]) -> str:
    rows = []
    for case in FLEETS:
        by_fault = {s["fault"]: s for s in pick(samples, group="fleet", case=case, rule=RULES[0])}
        rows.append([case, rate_words(by_fault[""]), *(delay_words(by_fault[fault]) for fault in BOTH_MOVE)])
    return markdown(["fleet", "false halts per 1000", "fast .02", "medium .005", "slow .001"], rows)


def _sizes(samples: Sequence[Sample]) -> str:
    rows = []
    for s in pick(samples, group="size", rule=RULES[0]):
        items = items_needed(DROP, item_sd=ITEM_SD, rounds=int(s["case"]), autocorrelation=s["phi"])
        rows.append([s["case"], "white" if not s["phi"] else f"AR(1) {s['phi']:g}", str(items), delay_words(s)])
    return markdown(["rounds asked for", "noise", "items", "rounds of delay"], rows)


def table(samples: Sequence[Sample]) -> str:
    held = pick(samples, group="held-back fall", rule=RULES[0])
    parts = {
        "The bar": bar(samples),
        "Held back: families that no constant was chosen on, halts per 1000 healthy rounds": _cases(
            samples, "held back", lambda s: f"{rate_words(s)}, {share_words([s])} of runs"
        ),
        f"Held back: {len(HELD_BACK_FALLS)} lasting falls, rounds of delay": fall_words(held),
        "Beside single-process callbacks with patience": _callbacks(samples),
        "Healthy families: false halts per 1000 rounds": _by_noise(samples, "healthy", lambda s: f"{rate(s):.2f}"),
        "Faults after 100 rounds of a plateau: rounds of delay": _by_noise(samples, "fault", delay_words),
        "Lasting falls after a curve: rounds of delay, from 3 sd below the best score without noise": _falls(samples),
        "Collapses in the first rounds: rounds of delay": _by_noise(samples, "early", delay_words),
        "Bumps that heal: runs halted, of tau 1.5 / 4 / 8 rounds": _bumps(samples),
        "Other noise: false halts per 1000, the worse of white and AR(1) .5": _cases(samples, "odd", rate_words),
        "Scores of few items: false halts per 1000": _cases(samples, "score", rate_words),
        "Training leaves held-out behind: runs halted": _cases(samples, "gap", lambda s: share_words([s])),
        "Fleets of 8 replicas, AR(1) .5, sd .02": _fleets(samples),
        f"A drop of {DROP:g} in a score of as many items as `items_needed` says": _sizes(samples),
    }  # fmt: skip
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts.items())


def rows_of(samples: Sequence[Sample]) -> str:
    """A row for each cell of the default rule."""
    rows = []
    for s in pick(samples, rule=RULES[0]):
        words = fall_words([s]) if "delays" in s else f"{rate_words(s)}, {share_words([s])} of runs"
        rows.append([s["group"], s["case"], s["fault"], noise_words(s["phi"], s["sd"]), words])
    falls = pick(samples, group="held-back fall", rule=RULES[0])
    if falls:
        rows.append(["held-back fall", "all", "", "", fall_words(falls)])
    return markdown(["group", "case", "fault", "noise", "halts per 1000 rounds, or rounds of delay"], rows)


def _bumps(samples: Sequence[Sample]) -> str:
    ours = pick(samples, group="bump", rule=RULES[0])
    rows = []
    for case in dict.fromkeys(s["case"] for s in ours):
        shares = [f"{100 * s['halts'] / s['runs']:.0f} %" for s in sorted(pick(ours, case=case), key=lambda s: s["sd"])]
        rows.append([case, " / ".join(shares)])
    return markdown(["bump, nats", "runs halted"], rows)


def report(session: dict[str, Any], samples: Sequence[Sample]) -> str:
    runs = sum(s["runs"] for s in pick(samples, rule=RULES[0]))
    return (
        f"{runs:,} simulated runs of the default rule, seed {session['settings']['seed']}; the twin equals the "
        f"product's folds on {pick(samples, group='check')[0]['runs']} of them. Folding a round of 32 replicas takes "
        f"{pick(samples, group='cost')[0]['ms']:.1f} ms. Measured {session['session'][:10]} on {session['machine']}."
        f"\n\n```\nPYTHONPATH=. .venv/bin/python {session['command']}\n```\n\n{table(samples)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="simulated runs in a cell; default 300")
    parser.add_argument("--quick", action="store_true", help="24 runs in a cell, and fewer runs of the product's folds")
    parser.add_argument("--groups", nargs="+", choices=sorted({c.group for c in cells()}), help="of cells; default all")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-guard.jsonl")
    parser.add_argument("--table", action="store_true", help="simulate nothing: print the newest session's tables")
    parser.add_argument(
        "--docs", action="store_true", help="write tables and pictures into docs/inside/kill-switch-figures.md"
    )
    given = parser.parse_args()
    given.runs = min(given.runs, 24) if given.quick else given.runs
    results = Results("guard", given.results)
    if not given.table:
        began = time.process_time()
        results.begin([], vars(given))
        measure(given, results)
        print(f"{time.process_time() - began:.0f} s of CPU time here\n")
    session, samples = results.newest()
    if given.groups:
        print(rows_of(samples))
        return
    text = report(session, samples)
    print(text)
    if given.docs:
        for name, picture in guard_pictures.pictures(given.seed).items():
            _PICTURES.mkdir(exist_ok=True)
            (_PICTURES / f"{name}.svg").write_text(picture)
        publish("guard", text, guard_pictures.overview(samples), _DOCUMENT, _PICTURES)


if __name__ == "__main__":
    main()
