"""Held-out loss from a run's own records, against data-parallel training at equal tokens: docs/inside/quality.md.

    PYTHONPATH=.:tests/support python benchmarks/quality.py --docs

Every arm trains the same small transformer on as many bytes, five seeds each, in `quality_runs`. One rule tunes all
arms, with plain loops on a seed that is not reported: the inner learning rate for each number of replicas, then the
outer one for each N and H. Every run goes to runs/bench-quality.jsonl at once, and what is there is not measured again,
so a benchmark that was cut off goes on. `--fresh` measures all again, as after a change of the packages.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measuring import ROOT, Results, Sample, markdown, publish, sources_of
from quality_runs import Arm, Size, play
from svg_chart import Curve, Dot, DotGroup, dots, lines

_DOCUMENT, _PICTURES = ROOT / "docs" / "inside" / "quality.md", ROOT / "docs" / "inside" / "quality"
SEEDS = 5
TUNING_SEED = 9
INNER_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
OUTER_RATES = (0.1, 0.2, 0.4, 0.8)
_INNER_TRIALS_OUTER = 0.4  # the outer learning rate of trials of inner ones
# Two-sided 95 % of Student's t, by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

ALONE = Arm("data-parallel", program="data-parallel")
USUAL = Arm("N=4, H=30")
LOOP = Arm("plain loop, N=4, H=30", program="reference")
REPLICAS = (Arm("N=1, H=30", 1), Arm("N=2, H=30", 2), USUAL, Arm("N=8, H=30", 8))
INTERVALS = (Arm("N=4, H=10", 4, 10), USUAL, Arm("N=4, H=120", 4, 120))
PARTS = (
    Arm("3 fragments", settings={"fragments": 3}),
    Arm("3 fragments, delay 5", settings={"fragments": 3, "fragment_sync_delay": 5}),
    Arm(
        "3 fragments, delay 5, alpha .5",
        settings={"fragments": 3, "fragment_sync_delay": 5, "fragment_update_alpha": 0.5},
    ),
    *(Arm(f"{codec} payloads", settings={"codec": codec}) for codec in ("bf16", "int8", "int4")),
)
TROUBLE = (
    Arm("one replica three times slower", slow=3.0),
    Arm("one replica four times slower", slow=4.0),
    Arm("one replica four times slower, equal_time", slow=4.0, settings={"steps": "equal_time"}),
    # Weighted by tokens, the replicas of this arm take .945 of 30 steps in a round: .4 / .945.
    Arm(
        "one replica four times slower, equal_time, outer lr .423",
        slow=4.0,
        settings={"steps": "equal_time", "outer": {"lr": 0.423}},
    ),
    Arm("a tenth of rounds stall, carried", stalls=0.1),
    Arm("a tenth of rounds stall, dropped", stalls=0.1, settings={"late": "drop"}),
    Arm("a replica killed every three rounds", kills=3),
)
_SPARSE = {"outer": {"lr": 1.0, "momentum": 0.0}}  # the outer optimizer of arXiv 2508.15706
_CONTRIBUTORS = {**_SPARSE, "aggregate": "contributors_mean"}  # outer="sparse"
FEW_BITS = (
    Arm("few bits: 2bit", settings={"codec": "2bit"}),
    Arm("few bits: 2bit, what it loses is dropped", settings={"codec": "2bit"}, forgets=True),
    Arm("few bits: fp32, outer lr 1 without momentum", settings=_SPARSE),
    Arm("few bits: topk64, outer lr 1 without momentum", settings={"codec": "topk64", **_SPARSE}),
    Arm("few bits: topk128, outer lr 1 without momentum", settings={"codec": "topk128", **_SPARSE}),
    Arm("few bits: topk64, outer=sparse", settings={"codec": "topk64", **_CONTRIBUTORS}),
    Arm("few bits: topk128, outer=sparse", settings={"codec": "topk128", **_CONTRIBUTORS}),
    Arm("few bits: 2bit, killed every three rounds", settings={"codec": "2bit"}, kills=3),
    Arm("few bits: 2bit, killed, states saved", settings={"codec": "2bit", "replica_state": "round"}, kills=3),
    Arm("few bits: fp32, killed, states saved", settings={"replica_state": "round"}, kills=3),
)
# Averages by scatter-reduce are encoded too, in the payloads' codec, or in int8 where that needs error feedback.
BOTH_WAYS = tuple(
    Arm(f"both ways: {codec}", settings={"codec": codec, "path": "scatter_reduce", **settings})
    for codec, settings in (("int8", {}), ("int4", {}), ("2bit", {}), ("topk128", _CONTRIBUTORS))
)
# A tenth of rounds stall for so long that the work is averaged one, two or three rounds late.
STALE = tuple(
    Arm(f"stale {late}: {codec}", settings={"codec": codec}, stalls=0.1, stall=late + 0.3)
    for codec in ("fp32", "int4", "2bit")
    for late in (1, 2, 3)
)
PRESETS = (
    Arm("preset: N=1, H=30, outer lr .7, momentum .5", 1, settings={"outer": {"lr": 0.7, "momentum": 0.5}}),
    Arm("preset: Muon, outer lr .8", settings={"outer": {"lr": 0.8}}, muon=True),
    Arm("preset: Muon, outer lr .9", settings={"outer": {"lr": 0.9}}, muon=True),
    Arm("preset: Muon, outer lr as tuned for AdamW", muon=True),
)
_EIGHT = {"max_replicas": 8}  # data is dealt over eight, a batch of each has an eighth of the windows
SCALED = (
    Arm("scaled: 2 of 8 replicas", 2, settings=_EIGHT),
    Arm("scaled: 2, from step 320 on 8, from 640 on 3", 2, settings=_EIGHT, scales=((320, 8), (640, 3))),
    Arm("scaled: 8 of 8 replicas", 8),
)
GROUPS: Mapping[str, Sequence[Arm]] = {
    "Number of replicas": (ALONE, *REPLICAS),
    "Inner steps between outer steps": INTERVALS,
    "Fragments and payloads": (USUAL, *PARTS),
    "Payloads of few bits": (USUAL, *FEW_BITS),
    "Few bits both ways": (USUAL, *BOTH_WAYS),
    "Late, lost and restarted": (USUAL, *TROUBLE),
    "Late work by codec": (USUAL, *STALE),
    "Presets": (USUAL, REPLICAS[0], *PRESETS),
    "Scaled while it trains": SCALED,
    "Against a plain loop": (USUAL, LOOP),
}
ARMS = tuple({arm.name: arm for group in GROUPS.values() for arm in group}.values())
# Of published results at equal tokens: each arm is better than the next one.
ORDERS: Mapping[str, Sequence[Arm]] = {
    "one replica with an outer optimizer is better than data-parallel (arXiv 2503.09799)": (REPLICAS[0], ALONE),
    "fewer replicas are better (arXiv 2503.09799)": REPLICAS,
    "more frequent outer steps are better (arXiv 2311.08105, 2503.09799)": INTERVALS,
}


# -- measuring ---------------------------------------------------------------------------------------------------------


Task = tuple[Arm, Size, int]  # with the seed


def measure(tasks: Mapping[str, Task], pool: Executor, results: Results, known: dict[str, Sample]) -> None:
    """Take the samples that are not known, and add them to `known`."""
    commit = sources_of(None)[0].commit()
    missing = {key: task for key, task in tasks.items() if key not in known}
    running = {pool.submit(play, *task): key for key, task in missing.items()}
    for done in as_completed(running):
        results.add(key=running[done], commit=commit, **done.result())
        sample = known[running[done]] = results.samples[-1]
        print(f"{sample['cpu_s']} s, seed {sample['seed']}: {sample['arm']} {sample['heldout']:.4f}", flush=True)


def keyed(tasks: Sequence[Task]) -> dict[str, Task]:
    """Tasks by what their samples depend on, beside the packages."""
    return {json.dumps([arm.key(), asdict(size), seed], sort_keys=True): (arm, size, seed) for arm, size, seed in tasks}


def wanted(given: argparse.Namespace, tuning: "Tuning") -> dict[str, Task]:
    """The arms and seeds that the options choose, by key; one seed of all arms after another."""
    return keyed([tuning.task(arm, seed) for seed in range(given.seeds) for arm in chosen_arms(given)])


def chosen_arms(given: argparse.Namespace) -> list[Arm]:
    return [arm for arm in ARMS if not given.only or any(word in arm.name for word in given.only)]


def known_samples(path: Path) -> dict[str, Sample]:
    """The samples in a file of results, by key."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["key"]: {n: v for n, v in line.items() if n != "session"} for line in lines if "key" in line}


# -- tuning ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """Held-out losses of the trials on `TUNING_SEED`, and what they choose; without trials everything keeps its own."""

    size: Size
    inner: Mapping[int, Mapping[float, float]]  # by N, 0 = data-parallel, then by inner learning rate
    outer: Mapping[tuple[int, int], Mapping[float, float]]  # by N and H, then by outer learning rate

    def size_of(self, arm: Arm) -> Size:
        """The size with the inner learning rate of the arm's N."""
        trials = self.inner.get(batches_of(arm), {})
        return replace(self.size, learning_rate=best(trials)) if trials else self.size

    def task(self, arm: Arm, seed: int) -> Task:
        """The arm with its inner learning rate, and with the outer one of its N and H."""
        trials = self.outer.get((arm.replicas, arm.sync_every), {}) if batches_of(arm) else {}
        tuned = replace(arm, settings={"outer": {"lr": best(trials)}, **arm.settings}) if trials else arm
        return tuned, self.size_of(arm), seed


def batches_of(arm: Arm) -> int:
    """N, or 0 for data-parallel training."""
    return 0 if arm.program == "data-parallel" else arm.replicas


def best(trials: Mapping[float, float]) -> float:
    return min(trials, key=lambda rate: trials[rate])


def inner_trials(given: argparse.Namespace, size: Size) -> dict[str, Task]:
    """Plain loops with H=30 for every N of the chosen arms, and data-parallel training."""
    settings = {"outer": {"lr": _INNER_TRIALS_OUTER}}
    loops = {
        count: Arm(f"trial, N={count}, H=30", count, 30, settings, "reference")
        if count
        else Arm("trial, data-parallel", program="data-parallel")
        for count in sorted({batches_of(arm) for arm in chosen_arms(given)})
    }
    rates = [(arm, replace(size, learning_rate=rate), TUNING_SEED) for arm in loops.values() for rate in INNER_RATES]
    return keyed(rates)


def outer_trials(given: argparse.Namespace, tuning: Tuning) -> dict[str, Task]:
    """Plain loops for every N and H of the chosen arms."""
    pairs = sorted({(arm.replicas, arm.sync_every) for arm in chosen_arms(given) if batches_of(arm)})
    loops = [
        Arm(f"trial, N={n}, H={h}", n, h, {"outer": {"lr": rate}}, "reference")
        for n, h in pairs
        for rate in OUTER_RATES
    ]
    return keyed([(arm, tuning.size_of(arm), TUNING_SEED) for arm in loops])


def tune(given: argparse.Namespace, size: Size, known: Mapping[str, Sample]) -> Tuning:
    """What the known trials choose."""
    inner: dict[int, dict[float, float]] = {}
    for key, (arm, own, _) in inner_trials(given, size).items():
        if key in known:
            inner.setdefault(batches_of(arm), {})[own.learning_rate] = known[key]["heldout"]
    outer: dict[tuple[int, int], dict[float, float]] = {}
    for key, (arm, _, _) in outer_trials(given, Tuning(size, inner, {})).items():
        if key in known:
            outer.setdefault((arm.replicas, arm.sync_every), {})[arm.outer_lr] = known[key]["heldout"]
    return Tuning(size, inner, outer)


def tuning_table(tuning: Tuning) -> str:
    """Held-out losses of all trials; the chosen ones are bold."""
    inner = [
        [f"N={count}, H=30" if count else "data-parallel", *_trial_cells(trials, INNER_RATES)]
        for count, trials in tuning.inner.items()
    ]
    outer = [[f"N={n}, H={h}", *_trial_cells(trials, OUTER_RATES)] for (n, h), trials in tuning.outer.items()]
    tables = [
        markdown([name, *(f"{rate:g}" for rate in rates)], rows)
        for name, rates, rows in (
            ("Inner learning rate", INNER_RATES, inner),
            ("Outer learning rate", OUTER_RATES, outer),
        )
        if rows
    ]
    return "\n\n".join([f"Trials on seed {TUNING_SEED}; the rates of the arms are bold:", *tables])


def _trial_cells(trials: Mapping[float, float], rates: Sequence[float]) -> list[str]:
    cells = [f"{trials[rate]:.4f}" if rate in trials else "–" for rate in rates]
    cells[rates.index(best(trials))] = f"**{trials[best(trials)]:.4f}**"
    return cells


# -- tables ------------------------------------------------------------------------------------------------------------


def by_seed(samples: Sequence[Sample], arm: Arm, field: str = "heldout") -> dict[int, float]:
    return {s["seed"]: s[field] for s in samples if s["arm"] == arm.name and s.get(field) is not None}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return mean(values), _STUDENT[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def paired(samples: Sequence[Sample], arm: Arm, other: Arm) -> tuple[float, float]:
    """The mean difference arm - other over the seeds that both have, and half the width of its interval."""
    ours, theirs = by_seed(samples, arm), by_seed(samples, other)
    return interval([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def table(samples: Sequence[Sample]) -> str:
    parts = []
    for name, arms in GROUPS.items():
        rows = [_row(samples, arm) for arm in arms if by_seed(samples, arm)]
        if rows:
            columns = [
                *(name, "held-out, nats per byte", "against data-parallel", "against N=4, H=30"),
                *("contributions", "of them late", "duration", "seeds"),
            ]
            parts.append(markdown(columns, rows))
    return "\n\n".join(parts)


def _row(samples: Sequence[Sample], arm: Arm) -> list[str]:
    values = list(by_seed(samples, arm).values())
    middle, half = interval(values)
    half_words = "" if math.isnan(half) else f" ± {half:.4f}"
    counts = [mean(found.values()) if (found := by_seed(samples, arm, f)) else None for f in ("averaged", "carried")]
    duration = by_seed(samples, arm, "duration")
    return [
        arm.name,
        f"{middle:.4f}{half_words}",
        _difference(samples, arm, ALONE),
        _difference(samples, arm, USUAL),
        *("–" if count is None else f"{count:.0f}" for count in counts),
        f"{mean(duration.values()):.0f}" if duration else "–",
        str(len(values)),
    ]


def _difference(samples: Sequence[Sample], arm: Arm, other: Arm) -> str:
    middle, half = paired(samples, arm, other)
    if arm == other or math.isnan(middle):
        return "–"
    digits = 4 if abs(middle) >= 1e-4 else 8
    return f"{middle:+.{digits}f}" if math.isnan(half) else f"{middle:+.{digits}f} ± {half:.{digits}f}"


def orders(samples: Sequence[Sample]) -> str:
    """Whether the published orders are there, pair by pair."""
    found = []
    for claim, arms in ORDERS.items():
        there = [arm for arm in arms if by_seed(samples, arm)]
        pairs = []
        ends = [(there[0], there[-1])] if len(there) > 2 else []
        for better, worse in [*pairwise(there), *ends]:
            middle, half = paired(samples, worse, better)
            if math.isnan(half):
                continue
            sure = "" if middle > half else " (not beyond its interval)" if middle > -half else " (the opposite)"
            pairs.append(f"{better.name} to {worse.name} {middle:+.4f} ± {half:.4f}{sure}")
        if pairs:
            found.append(f"- {claim}: {'; '.join(pairs)}.")
    return "\n".join(found)


def against_loop(samples: Sequence[Sample]) -> str:
    ours, theirs = by_seed(samples, USUAL), by_seed(samples, LOOP)
    gaps = [abs(ours[seed] - theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    return (
        f"Largest difference from the plain loop over {len(gaps)} seeds: {max(gaps):.1e} nats per byte." if gaps else ""
    )


def report(session: Mapping[str, Any], samples: Sequence[Sample], trials: Sequence[Sample], tuning: Tuning) -> str:
    size = tuning.size
    cores = sum(sample["cpu_s"] for sample in [*samples, *trials])
    seeds = len({sample["seed"] for sample in samples})
    missing = f", {len(ARMS) * seeds - len(samples)} missing" if len(samples) < len(ARMS) * seeds else ""
    commits = ", ".join(sorted({sample["commit"] for sample in samples}))
    return (
        f"{len(samples)} runs{missing}, {seeds} seeds, {size.steps} steps of {size.batch} windows of {size.context} "
        f"bytes after {size.pretraining} of pre-training, and {len(trials)} trials; "
        f"{cores / 60:.0f} minutes of one core. Measured {session['session'][:10]} on {session['machine']}; "
        f"{commits}.\n\n"
        f"```\nPYTHONPATH=.:tests/support .venv/bin/python {session['command']}\n```\n\n"
        f"{tuning_table(tuning)}\n\n{table(samples)}\n\n{against_loop(samples)}\n\n"
        f"Published orders, as paired differences:\n\n{orders(samples)}"
    )


# -- pictures ----------------------------------------------------------------------------------------------------------


def picture(samples: Sequence[Sample]) -> str:
    """Paired differences from data-parallel, with their intervals."""
    groups = []
    for name, arms in GROUPS.items():
        found = [(arm, paired(samples, arm, ALONE)) for arm in arms if arm not in (ALONE, LOOP)]
        shown = [Dot(arm.name, middle, half) for arm, (middle, half) in found if not math.isnan(half)]
        if shown:
            groups.append(DotGroup(name, shown))
    return dots("Held-out loss less that of data-parallel training at equal tokens", groups, "nats per byte")


def curves(samples: Sequence[Sample], size: Size) -> str:
    """Mean held-out loss against inner steps, from a third of the training on."""
    shown = []
    for arm in (ALONE, REPLICAS[0], USUAL, REPLICAS[3], INTERVALS[0], INTERVALS[-1]):
        found = [sample["curve"] for sample in samples if sample["arm"] == arm.name]
        if found and all(len(curve) == len(found[0]) for curve in found):
            points = [
                (found[0][i][0] * arm.sync_every, mean(curve[i][1] for curve in found))
                for i in range(len(found[0]))
                if found[0][i][0] * arm.sync_every >= size.steps // 3
            ]
            points = [point for i, point in enumerate(points) if i == 0 or point[0] > points[i - 1][0]]
            shown.append(Curve(arm.name, points, dashed=arm == ALONE))
    return lines("Held-out loss while training", shown, "inner steps", "nats per byte", ticks=5, from_zero=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default {SEEDS}, at most {TUNING_SEED}")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="arms with one of these in their name")
    parser.add_argument("--steps", type=int, default=Size.steps, help=f"default {Size.steps}")
    parser.add_argument(
        "--pretraining", type=int, default=Size.pretraining, help=f"steps before; default {Size.pretraining}"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is known")
    parser.add_argument("--table", action="store_true", help="measure nothing: print the table of what is known")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-quality.jsonl")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into docs/inside/quality.md")
    given = parser.parse_args()
    results, known = Results("quality", given.results), {}
    size = Size(steps=given.steps, warm_up=min(Size.warm_up, given.steps // 4), pretraining=given.pretraining)
    if not given.fresh:
        known = known_samples(results.path)
    if not given.table:
        began = time.monotonic()
        results.begin(sources_of(None), vars(given))
        with ProcessPoolExecutor(given.processes) as pool:
            measure(inner_trials(given, size), pool, results, known)
            measure(outer_trials(given, tune(given, size, known)), pool, results, known)
            measure(wanted(given, tune(given, size, known)), pool, results, known)
        print(f"{time.monotonic() - began:.0f} s on {given.processes} processes")
    session, _ = results.newest()
    tuning = tune(given, size, known)
    samples = [known[key] for key in wanted(given, tuning) if key in known]
    trials = [known[key] for key in inner_trials(given, size) | outer_trials(given, tuning) if key in known]
    text = report(session, samples, trials, tuning)
    print(text)
    if given.docs:
        text += "\n\n![while training](quality/quality_curves.svg)"
        publish("quality", text, picture(samples), _DOCUMENT, _PICTURES)
        (_PICTURES / "quality_curves.svg").write_text(curves(samples, tuning.size))


if __name__ == "__main__":
    main()
