"""Which ranges an audit trains again, and how probable it is that one of a liar's is among them. Pure functions.

A *range* is one replica's training in one round. Those that can be drawn are all whose inner steps an outer step
contains, as the commits say, so that the list follows from the log alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.records import Commit


@dataclass(frozen=True, order=True)
class TrainingRange:
    """One replica's training in one round."""

    round: int
    replica_id: int
    manifest_sha256: str | None = None  # of its manifest, as its round's commit names it; None: it came late

    def __str__(self) -> str:
        return f"round {self.round}, replica {self.replica_id}"


def ranges_of(commits: Iterable[Commit]) -> list[TrainingRange]:
    """The ranges whose inner steps an outer step contains, in the order of rounds and replicas.

    Carried work counts once a later contribution with it was averaged. Commits that were not applied add none: their
    contributions moved no base, or are carried.
    """
    named: dict[tuple[int, int], str] = {}
    moved: set[tuple[int, int]] = set()
    for commit in commits:
        for answer in commit.answers:
            named[commit.round, answer.replica_id] = answer.manifest_sha256
            if commit.applied and answer.averaged:
                moved |= {(origin.round, answer.replica_id) for origin in answer.origins}
    return [TrainingRange(*each, named.get(each)) for each in sorted(moved)]


def drawn(ranges: Sequence[TrainingRange], draw: int, seed: int, head: Head) -> list[TrainingRange]:
    """`draw` different ranges (all, if there are fewer), each as probable as any other, in the order of the draw.

    A function of seed and head alone: the ranges come in the order of the sha256 of `<seed>:<head>:<round>:
    <replica>`. Who wrote the run knew no later seed, and a log that is cut or continued has another head.
    """

    def place(range_: TrainingRange) -> str:
        return sha256_hex(f"{seed}:{head}:{range_.round}:{range_.replica_id}".encode())

    return sorted(ranges, key=place)[:draw]


def caught_probability(ranges: int, dishonest: int, draw: int) -> float:
    """The probability that at least one of `dishonest` ranges is among `draw` of all `ranges`.

    Without replacement, 1 - C(ranges - dishonest, draw) / C(ranges, draw): never below 1 - (1 - f)^draw with
    f = dishonest / ranges.
    """
    draw = min(draw, ranges)
    return 1.0 - comb(ranges - dishonest, draw) / comb(ranges, draw) if ranges else 0.0


def fraction_caught(ranges: int, draw: int, probability: float = 0.95) -> int | None:
    """The fewest dishonest ranges of which one is drawn with at least this probability; None if none suffice."""
    enough = (each for each in range(1, ranges + 1) if caught_probability(ranges, each, draw) >= probability)
    return next(enough, None)
