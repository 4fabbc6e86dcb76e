"""What it costs to weigh the contributions that agree least by their agreement, instead of leaving them out.

    PYTHONPATH=tests/support python benchmarks/weighed_agreement.py      # some three minutes of one core

A trial of a default aggregate, which the product does not have: the quarter that agrees least with the others is
weighed by its agreement over the usual one and, as a second form, contributions whose cosine is more than three times
the usual one of the round, and above .3, count together as one. Norms are clipped to twice the median, as by default.
Attackers are those of benchmarks/attackers.py, two of eight, honest replicas those of benchmarks/other_data.py.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import mean, median

import attackers
from hostile_replicas import HostileFleet
from measuring import markdown
from other_data import REPLICAS, ROUNDS, OtherData

from diloco_orchestrator.allreduce import aggregate, agreement
from diloco_orchestrator.allreduce.mean import ShardBlocks, WeightedMean
from diloco_orchestrator.codecs.table import Encoded

ATTACKS = ("drift: a constant direction added", "replay of its first payload", "sign flip, just below the limit")
HONEST = (
    "nobody's data differ",
    "60 % of the last one's labels are another teacher's",
    "everybody lacks two of four classes",
)
FORMS = {"left out": None, "weighed": False, "weighed, and alike ones as one": True}
ALIKE, LEAST = 3.0, 0.3  # times the usual cosine of two contributions; and at the least


class WeighedAgreement(agreement.AgreeingMean):
    """The mean in which the quarter that agrees least counts by its agreement. `as_one`: alike ones share a weight."""

    as_one = False

    def shard(self, index: int) -> ShardBlocks:
        held = [agreement._once_read(part, index) for part in self._parts]
        values = [Encoded(part.read(index), part.payload.codec, self._lengths[index]) for part in held]
        norms = [part.payload.norms[index] for part in held]
        judged = sorted((each, i) for i, each in enumerate(agreement.agreements(values, norms)) if each is not None)
        weights = dict.fromkeys(range(len(held)), 1.0)
        for each, i in judged[: len(judged) // 4]:
            usual = judged[(len(judged) - 1) // 2][0]
            weights[i] = min(1.0, max(0.0, each / usual)) if usual > 0 else 1.0
        if self.as_one:
            scales = [agreement._scale(norm, vector.numel) for norm, vector in zip(norms, values, strict=True)]
            products = agreement._products(values, scales)
            alike = {i: _alike(products, i) for i in weights}
            weights = {i: weight / (1 + alike[i]) for i, weight in weights.items()}
        kept = [replace(part, weight=part.weight * weights[i]) for i, part in enumerate(held) if weights[i] > 0]
        return WeightedMean(kept, self._lengths).shard(index)


def _alike(products: list[list[int]], i: int) -> int:
    """The number of other contributions that are far more alike to contribution `i` than usual."""

    def cosine(j: int, k: int) -> float:
        both = products[j][j] * products[k][k]
        return products[j][k] / math.sqrt(both) if both else 0.0

    count = range(len(products))
    usual = median(cosine(j, k) for j in count for k in range(j)) if len(products) > 1 else 0.0
    return sum(cosine(i, j) > max(ALIKE * usual, LEAST) for j in count if j != i)


@contextmanager
def form(as_one: bool | None) -> Iterator[dict[str, object]]:
    """The settings of runs by one form; within it `agreeing_mean` is that form. None: the product's own."""
    own = aggregate.AgreeingMean
    if as_one is None:
        yield {"aggregate": "agreeing_mean"}
        return
    aggregate.AgreeingMean = type("Form", (WeighedAgreement,), {"as_one": as_one})  # type: ignore[misc]
    try:
        yield {"aggregate": "agreeing_mean", "clip_factor": 2.0}
    finally:
        aggregate.AgreeingMean = own  # type: ignore[misc]


def honest(kind: str, settings: dict[str, object], rounds: int, seed: int) -> float:
    """Held-out loss of a run of honest replicas, over everybody's items."""
    task = OtherData(seed, kind)
    fleet = HostileFleet(REPLICAS, rounds, seed, 0, lambda _: None, task=task, **settings)
    fleet.play()
    return float(task.losses(fleet.deciders[0].base.parameters).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    attackers.quiet()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    clean = [attackers.played(None, 0, given.rounds, {}, seed) for seed in seeds]
    mean_of = {kind: [honest(kind, {}, given.rounds, seed) for seed in seeds] for kind in HONEST}
    columns = {}
    for name, as_one in FORMS.items():
        with form(as_one) as settings:
            play = partial(attackers.played, attackers=2, rounds=given.rounds, settings=settings)
            cells = [attackers.cell([play(attack, seed=seed) for seed in seeds], clean) for attack in ATTACKS]
            for kind in HONEST:
                losses = [honest(kind, settings, given.rounds, seed) for seed in seeds]
                above = [100 * (loss / own - 1) for loss, own in zip(losses, mean_of[kind], strict=True)]
                cells.append(f"{mean(above):+.1f} % ({min(above):+.1f} to {max(above):+.1f})")
            columns[name] = cells
    what = [*(f"two of eight: {attack}" for attack in ATTACKS), *(f"honest: {kind}" for kind in HONEST)]
    rows = [[each, *(columns[name][i] for name in FORMS)] for i, each in enumerate(what)]
    print(markdown(["", *FORMS], rows))


if __name__ == "__main__":
    main()
