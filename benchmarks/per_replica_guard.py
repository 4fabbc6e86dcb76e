"""How often the per-replica guard leaves out a healthy contribution, and how late a faulty one: simulated fleets.

    PYTHONPATH=. .venv/bin/python benchmarks/per_replica_guard.py --runs 200 --seed 1

A gain is a level of its replica's (harder data: three times the noise), a common trend, and noise; from round 40 on the
faulty replica gains less by the given number of the noise's standard deviations.
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from diloco_orchestrator.guard.per_replica import LocalGain, fold_local

ROUNDS, SINCE, UNTIL = 300, 40, 140
FLEETS = (4, 8, 16)
NOISES = (("white", 0.0, 0.0), ("AR(1) 0.5", 0.5, 0.0), ("2 % of 4 times the size", 0.0, 0.02), ("both", 0.5, 0.02))
FALLS = (2.0, 3.0, 5.0, 20.0)


def fleet(
    replicas: int, rounds: int, draw: random.Random, ar: float, outliers: float, fall: float = 0.0
) -> Iterator[tuple[int, ...]]:
    """Who is left out, round by round. `fall`: of replica 0, from round `SINCE` on."""
    levels, noise = [draw.gauss(0, 3) for _ in range(replicas)], [0.0] * replicas
    state: dict[str, Any] | None = None
    for round_ in range(1, rounds + 1):
        fresh = [draw.gauss(0, 1) * (4 if draw.random() < outliers else 1) for _ in range(replicas)]
        noise = [ar * old + math.sqrt(1 - ar * ar) * new for old, new in zip(noise, fresh, strict=True)]
        lost = [fall if i == 0 and round_ >= SINCE else 0.0 for i in range(replicas)]
        gains = [LocalGain(i, 50 / round_ + levels[i] + noise[i] - lost[i]) for i in range(replicas)]
        state, quarantined = fold_local(state, gains)
        yield tuple(each.replica_id for each in quarantined)


def false_starts(found: Sequence[tuple[int, ...]]) -> int:
    """Times at which a contribution is left out whose author was in the average in the round before."""
    return sum(len(set(now) - set(before)) for before, now in zip([(), *found], found, strict=False))


def healthy_row(replicas: int, runs: int, seed: int) -> str:
    cells = []
    for _, ar, outliers in NOISES:
        draw = random.Random(f"{seed} {replicas} {ar} {outliers}")
        wrong = sum(false_starts(list(fleet(replicas, ROUNDS, draw, ar, outliers))) for _ in range(runs))
        # The upper end is that of a Poisson count: wrong + 2 sqrt(wrong + 1) + 2.
        upper = wrong + 2 * math.sqrt(wrong + 1) + 2
        cells.append(f"{1000 * wrong / (runs * ROUNDS):.2f} (below {1000 * upper / (runs * ROUNDS):.2f})")
    return f"| {replicas} | {' | '.join(cells)} |"


def faulty_row(replicas: int, runs: int, seed: int) -> str:
    cells = []
    for fall in FALLS:
        draw = random.Random(f"{seed} {replicas} {fall}")
        delays = []
        for _ in range(runs):
            found = enumerate(fleet(replicas, UNTIL, draw, 0.0, 0.0, fall), 1)
            delays += [next((round_ - SINCE + 1 for round_, ids in found if 0 in ids and round_ >= SINCE), None)]
        caught = [delay for delay in delays if delay is not None]
        mean = f"{sum(caught) / len(caught):.1f}" if caught else "never"
        cells.append(mean if len(caught) == runs else f"{mean}, {runs - len(caught)} of {runs} missed")
    return f"| {replicas} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("Healthy contributions left out by mistake, in 1000 rounds of the whole fleet\n")
    print(f"| replicas | {' | '.join(name for name, *_ in NOISES)} |\n|---|{'---|' * len(NOISES)}")
    for replicas in FLEETS:
        print(healthy_row(replicas, args.runs, args.seed), flush=True)
    print(f"\nRounds until a faulty contribution is left out, in at most {UNTIL - SINCE + 1}\n")
    print(f"| replicas | {' | '.join(f'{fall:g} sigmas' for fall in FALLS)} |\n|---|{'---|' * len(FALLS)}")
    for replicas in FLEETS:
        print(faulty_row(replicas, args.runs, args.seed), flush=True)


if __name__ == "__main__":
    main()
