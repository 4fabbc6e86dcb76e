"""How often the per-replica guard leaves out a healthy contribution, and how late a faulty one: simulated fleets.

    PYTHONPATH=. .venv/bin/python benchmarks/per_replica_guard.py --runs 200 --seed 1

A gain is a level of its replica's (harder data: three times the noise), a common trend, and noise; from round 40 on the
faulty replica gains less by the given number of the noise's standard deviations. In the third table gains and noise
shrink, and it does so from round 26 on. In the last one gains of honest replicas differ by factors, as where data or
learning rates differ.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diloco_orchestrator.guard.per_replica import LocalGain, fold_local

ROUNDS, SINCE, UNTIL = 300, 40, 140
FLEETS = (4, 8, 16)
NOISES = (("white", 0.0, 0.0), ("AR(1) 0.5", 0.5, 0.0), ("2 % of 4 times the size", 0.0, 0.02), ("both", 0.5, 0.02))
FALLS = (2.0, 3.0, 5.0, 20.0)
SHRINKING_SINCE, SHRINKING_UNTIL, SHRINKING_ROUNDS, SHRINKING_FALLS = 26, 60, 150, (5.0, 10.0, 20.0)
Gain = Callable[[int, float, float], float]  # of one replica, by the round, its own level, and its noise of size 1
_SHAPES: dict[str, Callable[[int], tuple[float, float]]] = {  # gains, standard deviation of the noise, by the round
    "exp(-round / 6) and a hundredth": lambda t: (0.8 * math.exp(-t / 6) + 0.008, 0.1 * math.exp(-t / 6) + 0.002),
    "exp(-round / 12) and a hundredth": lambda t: (0.8 * math.exp(-t / 12) + 0.008, 0.1 * math.exp(-t / 12) + 0.002),
    "1 / round": lambda t: (0.8 / t, 0.1 / t),
    "round^-1.5": lambda t: (0.8 / t**1.5, 0.2 / t**1.5 + 0.0005),
    "half a cosine": lambda t: (0.002 + 0.05 * _cosine(t), 0.001 + 0.01 * _cosine(t)),
    "a third each 50 rounds": lambda t: (0.1 / 3 ** ((t - 1) // 50), 0.02 / 3 ** ((t - 1) // 50)),
    "1 / round, noise stays": lambda t: (0.8 / t, 0.01),
}
FACTORS = {  # of the gains of each of so many replicas
    "one twice": lambda n: [2.0] + [1.0] * (n - 1),
    "one five times": lambda n: [5.0] + [1.0] * (n - 1),
    "one a fifth": lambda n: [0.2] + [1.0] * (n - 1),
    "half of them half": lambda n: [0.5] * (n // 2) + [1.0] * (n - n // 2),
    "from once to five times": lambda n: [1 + 4 * i / (n - 1) for i in range(n)],
}
LEVELS = {  # of gains by the round, in standard deviations of the noise
    "50 / round": lambda t: 50 / t,
    "20 exp(-round / 40)": lambda t: 20 * math.exp(-t / 40),
    "10, from round 100 on 3": lambda t: 10.0 if t <= 100 else 3.0,
    "4, from round 100 on 12": lambda t: 4.0 if t <= 100 else 12.0,
    "restarts every 50 rounds": lambda t: 3 + 10 * math.exp(-(t % 50) / 10),
}


def _usual(t: int, own: float, noise: float) -> float:
    return 50 / t + own + noise


def _cosine(t: int) -> float:
    return 1 + math.cos(math.pi * min(t, 150) / 150)


def fleet(
    replicas: int,
    rounds: int,
    draw: random.Random,
    ar: float,
    outliers: float,
    fall: float = 0.0,
    since: int = SINCE,
    gain: Gain = _usual,
) -> Iterator[tuple[int, ...]]:
    """Who is left out, round by round. `fall`: of replica 0, from round `since` on, in sizes of the noise."""
    levels, noise = [draw.gauss(0, 3) for _ in range(replicas)], [0.0] * replicas
    state: dict[str, Any] | None = None
    for round_ in range(1, rounds + 1):
        fresh = [draw.gauss(0, 1) * (4 if draw.random() < outliers else 1) for _ in range(replicas)]
        noise = [ar * old + math.sqrt(1 - ar * ar) * new for old, new in zip(noise, fresh, strict=True)]
        lost = [fall if i == 0 and round_ >= since else 0.0 for i in range(replicas)]
        gains = [LocalGain(i, gain(round_, levels[i], noise[i] - lost[i])) for i in range(replicas)]
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


def shrinking_row(name: str, runs: int, seed: int) -> str:
    """Mistakes in 1000 rounds, and of faulty contributions the share that is found and after how many rounds."""

    def gain(t: int, own: float, noise: float) -> float:
        level, size = _SHAPES[name](t)
        return math.exp(own / 20) * level + size * noise

    cells = []
    for replicas in (4, 8):
        draw, wrong = random.Random(f"{seed} {name} {replicas}"), 0
        for _ in range(runs):
            wrong += false_starts(list(fleet(replicas, SHRINKING_ROUNDS, draw, 0.5, 0.02, gain=gain)))
        cells.append(f"{1000 * wrong / (runs * SHRINKING_ROUNDS):.2f}")
        for fall in SHRINKING_FALLS:
            delays = []
            for _ in range(runs):
                found = enumerate(fleet(replicas, SHRINKING_UNTIL, draw, 0.0, 0.0, fall, SHRINKING_SINCE, gain), 1)
                delays += [t - SHRINKING_SINCE + 1 for t, ids in found if 0 in ids and t >= SHRINKING_SINCE][:1]
            mean = f" in {sum(delays) / len(delays):.1f}" if delays else ""
            cells.append(f"{100 * len(delays) / runs:.0f} %{mean}")
    return f"| {name} | {' | '.join(cells)} |"


def factor_row(name: str, runs: int, seed: int) -> str:
    """The share of honest contributions that are left out, worst of 4 and 8 replicas, noise alike or by the factor."""
    cells = []
    for level in LEVELS.values():
        shares = []
        for replicas, scaled in ((4, False), (4, True), (8, False), (8, True)):
            draw, left = random.Random(f"{seed} {name} {replicas} {scaled}"), 0
            factors = FACTORS[name](replicas)
            for _ in range(runs):
                state: dict[str, Any] | None = None
                for t in range(1, 201):
                    noise = [draw.gauss(0, factor if scaled else 1.0) for factor in factors]
                    gains = [LocalGain(i, factors[i] * level(t) + noise[i]) for i in range(replicas)]
                    state, quarantined = fold_local(state, gains)
                    left += len(quarantined)
            shares.append(100 * left / (runs * 200 * replicas))
        cells.append(f"{max(shares):.2f} %")
    return f"| {name} | {' | '.join(cells)} |"


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
    print(
        "\nWhere gains and noise shrink: mistakes in 1000 rounds; faulty contributions found, and in how many rounds\n"
    )
    found = [f"{fall:g} sigmas" for fall in SHRINKING_FALLS]
    heads = [f"{n} replicas: {head}" for n in (4, 8) for head in ("mistakes", *found)]
    print(f"| gains | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name in _SHAPES:
        print(shrinking_row(name, args.runs, args.seed), flush=True)
    print("\nHonest contributions left out, where gains differ by factors\n")
    print(f"| gains | {' | '.join(LEVELS)} |\n|---|{'---|' * len(LEVELS)}")
    for name in FACTORS:
        print(factor_row(name, max(args.runs // 20, 1), args.seed), flush=True)


if __name__ == "__main__":
    main()
