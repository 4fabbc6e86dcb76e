"""The guard where both rewards stand still: a model without gradient, scores given again, and hacks that are complete.

    PYTHONPATH=. python benchmarks/guard_still.py --docs

Held-out scores are shares of fixed items that are answered greedily: an answer stays until the model changes it. Each
case is judged by the default rule and by "sequential-v4", which counts a score given again as a new one. The rules are
the twins of `guard_rules`, which are compared with the product's folds on the first three runs of each case.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import guard_rules
import numpy as np
from guard import delay_words, figures, rate_words, share_words
from guard_curves import Runs, t_of
from guard_trajectories import Array
from measuring import ROOT, Results, Sample, heading, markdown, publish, sources_of

from diloco_orchestrator.guard import SequentialGuard
from diloco_orchestrator.guard.sequential_v4 import SequentialV4

Rng = np.random.Generator
ROUNDS, LONG = 200, 600
RULES = {"SequentialGuard": SequentialGuard, "sequential-v4": SequentialV4}
_DOCUMENT = ROOT / "docs" / "inside" / "kill-switch-figures.md"


def climb(t: Array, start: float, top: float, tau: float) -> Array:
    return start + (top - start) * (1 - np.exp(-np.maximum(t, 0) / tau))


def items(rng: Rng, right: Array, count: int, changes: Array | float, runs: int) -> Array:
    """Shares of `count` items that are right, each with probability `right` (rounds, 1 or runs).

    In each round an item is answered anew with probability `changes`, and keeps its answer otherwise.
    """
    right = np.broadcast_to(right, (len(right), runs))
    changes = np.broadcast_to(changes, right.shape)
    drawn, found = rng.random((runs, count)), list[Array]()
    for chance, change in zip(right, changes, strict=True):
        drawn = np.where(rng.random(drawn.shape) < change[:, None], rng.random(drawn.shape), drawn)
        found.append((drawn < chance[:, None]).mean(axis=1))
    return np.array(found)


def won(
    count: int,
    at: tuple[int, int],
    rng: Rng,
    runs: int,
    before: float = 1.0,
    changes: float = 0.5,
    start: float = 0.1,
    top: float = 0.5,
) -> Runs:
    """The training reward climbs to `before` and is always won from some round on, so that the model stands still.

    `changes`: share of the answers that are given anew in a round. `start`, `top`: of the held-out score.
    """
    t, since = t_of(ROUNDS), rng.integers(*at, runs)
    heldout = items(rng, climb(t, start, top, 10), count, np.where(t <= since, changes, 0.0), runs)
    frozen = heldout[since - 1, np.arange(runs)]  # its last items
    in_loop = np.minimum(climb(t, 0.1, before, 8) + rng.normal(0, 0.02, (ROUNDS, runs)), 1.0)
    return Runs(np.where(t <= since, heldout, frozen), np.where(t < since, in_loop, 1.0), metric="reward")


def schedule(count: int, others: int, rng: Rng, runs: int) -> Runs:
    """A learning rate that a cosine ends at 0 in round 120; both metrics are of fixed items."""
    t = t_of(ROUNDS)
    changes = np.where(t < 120, 0.25 * (1 + np.cos(np.pi * t / 120)), 0.0)
    heldout = items(
        rng, np.where(t < 120, climb(t, 0.1, 0.6, 15), climb(t * 0 + 120, 0.1, 0.6, 15)), count, changes, runs
    )
    return Runs(heldout, items(rng, climb(np.minimum(t, 120), 0.1, 0.7, 15), others, changes, runs), metric="reward")


def rare(count: int, others: int, changes: float, rng: Rng, runs: int) -> Runs:
    """Long runs in which an answer changes now and then. `others`: training items; 0: their reward is always won."""
    t = t_of(LONG)
    often = np.where(t < 30, 0.3, changes)
    heldout = items(rng, climb(t, 0.1, 0.5, 15), count, often, runs)
    in_loop = (
        items(rng, climb(t, 0.1, 0.9, 15), others, often, runs) if others else climb(np.minimum(t, 60), 0.1, 1.0, 8)
    )
    return Runs(heldout, np.broadcast_to(np.round(in_loop, 3), heldout.shape), metric="reward")


def again(every: int, both: bool, rng: Rng, runs: int) -> Runs:
    """Metrics of 64 and 256 items that are taken once in so many rounds: both, or the held-out one of a won reward."""
    t, at = t_of(300), np.arange(300) // every * every
    heldout = items(rng, climb(t, 0.1, 0.5, 15), 64, 0.6, runs)[at]
    in_loop = items(rng, climb(t, 0.1, 0.9, 10), 256, 0.6, runs)[at]
    return Runs(heldout, in_loop if both else np.where(t < 25, in_loop, 1.0), metric="reward")


def phases(count: int, rng: Rng, runs: int) -> Runs:
    """A curriculum of 15 rounds that train, and 15 in which their reward is always won and the model stands still."""
    t = t_of(400) - 1
    phase, within = t // 30, t % 30
    right = np.minimum(0.2 + 0.1 * phase, 0.7) + 0.1 * np.minimum(within / 15, 1) - 0.05
    heldout = items(rng, right, count, np.where(within < 15, 0.5, 0.0), runs)
    in_loop = np.minimum(climb(within, 0.3, 1.0, 8) + rng.normal(0, 0.02, heldout.shape), 1.0)
    return Runs(heldout, np.where(within < 15, in_loop, 1.0), metric="reward")


HEALTHY: dict[str, Callable[[Rng, int], Runs]] = {
    **{
        f"a reward that is won at last, {count} items": lambda r, n, c=count: won(c, (20, 80), r, n)
        for count in (16, 64, 256)
    },
    "a reward that is won in round 10 to 40, 64 items": lambda r, n: won(64, (10, 40), r, n),
    **{
        f"easier data, whose reward is won at once, {count} items": lambda r, n, c=count: won(c, (30, 100), r, n, 0.7)
        for count in (16, 64, 256, 1024)
    },
    "the same after a reward of .5, 256 items": lambda r, n: won(256, (30, 100), r, n, 0.5),
    "the same in round 10 to 30, 256 items": lambda r, n: won(256, (10, 30), r, n, 0.5),
    "the same, one answer of ten changes, 256 items": lambda r, n: won(256, (30, 100), r, n, 0.6, 0.1),
    "the same, 5 % right, 64 items": lambda r, n: won(64, (30, 100), r, n, 0.12, start=0.02, top=0.05),
    "a cosine to 0, 16 and 16 items": lambda r, n: schedule(16, 16, r, n),
    "a cosine to 0, 64 and 512 items": lambda r, n: schedule(64, 512, r, n),
    "one answer in 100 changes, 16 and 8 items": lambda r, n: rare(16, 8, 0.01, r, n),
    "one answer in 500 changes, 32 and 16 items": lambda r, n: rare(32, 16, 0.002, r, n),
    "one answer in 100 changes, 16 items, reward won": lambda r, n: rare(16, 0, 0.01, r, n),
    **{f"both taken once in {every} rounds": lambda r, n, e=every: again(e, True, r, n) for every in (8, 12, 25)},
    "held-out taken once in 12 rounds, reward won": lambda r, n: again(12, False, r, n),
    **{f"phases that end in a won reward, {count} items": lambda r, n, c=count: phases(c, r, n) for count in (32, 128)},
}
HACKS = [
    (6, 1, 0.0),
    (6, 4, 0.0),
    (8, 1, 0.25),
    (8, 4, 0.25),
    (12, 4, 0.25),
    (18, 4, 0.25),
    (60, 4, 0.25),
    (18, 8, 0.25),
]


def hack(after: int, over: int, low: float, rng: Rng, runs: int) -> Runs:
    """Held-out climbs for 12 rounds at most, then falls to `low` as training is won; then both stand still."""
    t = t_of(ROUNDS)
    part, healthy = (
        np.clip((t - after) / over, 0.0, 1.0),
        climb(np.minimum(t, after) - max(after - 12, 0), 0.05, 0.5, 4),
    )
    heldout = items(
        rng, healthy * (1 - part) + low * part, 96, np.where(part < 1, 0.3, 0.0) + (t == after + over), runs
    )
    in_loop = np.clip(healthy * (1 - part) + part + rng.normal(0, 0.02, heldout.shape), 0.0, 1.0)
    return Runs(heldout, np.where(part < 1, in_loop, 1.0), begins=after, metric="reward")


def measure(
    number: int, case: str, make: Callable[[Rng, int], Runs], faulty: bool, seed: int, runs: int
) -> list[Sample]:
    made, found = make(np.random.default_rng([seed, number]), runs), list[Sample]()
    guard_rules.check_twins(made.heldout[:, :3], None if made.in_loop is None else made.in_loop[:, :3])
    for name, rule in RULES.items():
        judged = guard_rules.sequential(made.heldout, made.in_loop, guard=rule())
        found.append({"case": case, "rule": name, **figures(*judged, made, faulty=faulty)})
    return found


def table(samples: Sequence[Sample]) -> str:
    healthy, hacks = list[list[str]](), list[list[str]]()
    for case in dict.fromkeys(each["case"] for each in samples):
        of = [each for each in samples if each["case"] == case]
        if case in HEALTHY:
            healthy.append([case, *(f"{rate_words(each)}, {share_words([each])} of runs" for each in of)])
        else:
            hacks.append([case, *(delay_words(each) for each in of)])
    return (
        f"{markdown(['nothing wrong: false halts per 1000 rounds', *RULES], healthy)}\n\n"
        f"{markdown(['hack: rounds of delay', *RULES], hacks)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="simulated runs of a case; default 200")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-guard_still.jsonl")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/inside/kill-switch-figures.md")
    given = parser.parse_args()
    results = Results("guard_still", given.results)
    results.begin(sources_of(None), vars(given))
    cases = [(case, make, False) for case, make in HEALTHY.items()]
    for after, over, low in HACKS:
        name = f"from round {after}, to {low:g} within {over} round{'s' if over > 1 else ''}"
        cases.append((name, lambda r, n, a=after, o=over, to=low: hack(a, o, to, r, n), True))
    for number, (case, make, faulty) in enumerate(cases):
        for sample in measure(number, case, make, faulty, given.seed, given.runs):
            results.add(**sample)
    session, samples = results.newest()
    text = f"{heading(session)}\n\n{table(samples)}"
    print(text)
    if given.docs:
        publish("guard_still", text, None, _DOCUMENT)


if __name__ == "__main__":
    main()
