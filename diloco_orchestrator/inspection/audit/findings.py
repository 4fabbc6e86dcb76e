"""The rules of an audit: which ranges are drawn, how a re-run is judged, and a summary of the findings. Pure.

A *range* is one replica's training in one round. Ranges to draw from are all whose inner steps an outer step averaged,
according to the commits alone. On a machine of the replica's hardware class every bit of a re-run must be equal; on
another one sums are rounded in another order, and distances are compared with a bound.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import comb
from typing import Any

from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.replica.process.rerun_result import RerunResult


@dataclass(frozen=True, order=True)
class TrainingRange:
    """One replica's training in one round."""

    round: int
    replica_id: int
    manifest_sha256: str | None = None  # of its manifest, as its round's commit names it; None: it came late

    def __str__(self) -> str:
        return f"round {self.round}, replica {self.replica_id}"


def ranges_of(commits: Iterable[Commit], void: Collection[int] = ()) -> list[TrainingRange]:
    """The ranges (one replica's training in one round) whose inner steps an outer step averaged, in order.

    Ordered by round and replica. Work carried into a later contribution counts once that was averaged. Commits that
    were not applied add none: their contributions changed no base, or are carried. A range of
    a round in `void`, whose commit contradicts the log and may name any manifest, has the manifest that is there.
    """
    named: dict[tuple[int, int], str] = {}
    moved: set[tuple[int, int]] = set()
    for commit in commits:
        for answer in commit.answers:
            if commit.round not in void:
                named[commit.round, answer.replica_id] = answer.manifest_sha256
            if commit.applied and answer.averaged:
                moved |= {(origin.round, answer.replica_id) for origin in answer.origins}
    return [TrainingRange(*each, named.get(each)) for each in sorted(moved)]


def drawn(ranges: Sequence[TrainingRange], draw: int, seed: int, head: Head) -> list[TrainingRange]:
    """`draw` different ranges (one replica's round each), each equally likely, in the order of the draw.

    A function of seed and `head`, the newest commit, alone: ranges are ordered by the sha256 of
    `<seed>:<head>:<round>:<replica>`. Nobody who wrote the run knew a seed chosen later, and a truncated or continued
    log has another head.
    """

    def place(range_: TrainingRange) -> str:
        return sha256_hex(f"{seed}:{head}:{range_.round}:{range_.replica_id}".encode())

    return sorted(ranges, key=place)[:draw]


def caught_probability(ranges: int, dishonest: int, draw: int) -> float:
    """The probability that an audit draws at least one of `dishonest` ranges (one replica's round each).

    Without replacement, 1 - C(ranges - dishonest, draw) / C(ranges, draw): never below 1 - (1 - f)^draw with f =
    dishonest / ranges.
    """
    draw = min(draw, ranges)
    return 1.0 - comb(ranges - dishonest, draw) / comb(ranges, draw) if ranges else 0.0


def fraction_caught(ranges: int, draw: int, probability: float = 0.95) -> int | None:
    """The fewest dishonest ranges (one replica's round each) of which an audit finds one with at least `probability`.

    None if even all of them would not suffice. `draw`: number of ranges that the audit repeats, of `ranges`.
    """
    enough = (each for each in range(1, ranges + 1) if caught_probability(ranges, each, draw) >= probability)
    return next(enough, None)


_CONFIDENT = 0.95


class AuditOutcome(StrEnum):
    """The result of comparing one replica's training in one round with a repetition of it."""

    EQUAL = "equal"  # bit for bit
    WITHIN_BOUND = "within the bound"  # another hardware class, or training that is not deterministic
    DIFFERS = "DIFFERS"
    NOT_AUDITABLE = "not auditable"


@dataclass(frozen=True)
class RangeFinding:
    """The result of repeating one replica's training in one round."""

    range_: TrainingRange
    outcome: AuditOutcome
    words: str  # what differs, or why it was not audited; empty for equal bits
    steps: int = 0  # inner steps of the round that were trained again
    follows: int = 0  # round whose saved state training began from; 0: from the start
    distance: float | None = None  # of the payload, relative; None if it was not measured
    bound: float | None = None  # the largest distance that counts as rounding; None where bits must be equal
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "range_"}
        return {"round": self.range_.round, "replica": self.range_.replica_id, **fields}


@dataclass
class Audit:
    """An audit: the ranges drawn (each one replica's training in one round), and the findings about them."""

    url: str
    head: str  # of the log that it drew from
    seed: int
    ranges: int  # from which it drew
    left_out: Mapping[str, int]  # responses in the log that moved no base, by why; none of them can be drawn
    findings: list[RangeFinding] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether no repeated training differs from what its replica published."""
        return all(each.outcome is not AuditOutcome.DIFFERS for each in self.findings)

    @property
    def audited(self) -> int:
        """Number of ranges (one replica's training in one round) that were repeated and compared."""
        return sum(each.outcome is not AuditOutcome.NOT_AUDITABLE for each in self.findings)

    def words(self) -> str:
        """A summary of the findings in two or three sentences."""
        counts = {outcome: sum(each.outcome is outcome for each in self.findings) for outcome in AuditOutcome}
        parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        lines = [f"{len(self.findings)} of {self.ranges} ranges drawn: {parts or 'none'}."]
        fewest = fraction_caught(self.ranges, self.audited, _CONFIDENT)
        if not self.agrees:
            lines.append(
                "What a replica published is not what the run's training function gives from the state that it named, "
                "or that state was removed or changed."
            )
        elif self.audited == self.ranges:
            lines.append("All of the run's training was repeated.")
        elif fewest is not None:
            half = max(1, self.ranges // 2)
            lines.append(
                f"Had {fewest} or more of them been dishonest ({100 * fewest / self.ranges:.0f} %), one would have "
                f"been among the {self.audited} audited with at least {100 * _CONFIDENT:.0f} % probability; with half "
                f"of them dishonest, {100 * caught_probability(self.ranges, half, self.audited):.1f} %."
            )
        if 0 < self.audited < len(self.findings):
            lines.append("Of those that could not be audited nothing is known; each has the reason in its line.")
        if self.left_out:
            listed = ", ".join(f"{count} {why}" for why, count in self.left_out.items())
            lines.append(f"Not drawn from, because no base contains them: {listed}.")
        return " ".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "head": self.head,
            "seed": self.seed,
            "segments": self.ranges,
            "left_out": dict(self.left_out),
            "agrees": self.agrees,
            "audited": self.audited,
            "caught": {
                f"{percent}%": caught_probability(self.ranges, -(-self.ranges * percent // 100), self.audited)
                for percent in (10, 25, 50)
            },
            "findings": [each.to_json() for each in self.findings],
        }


# What must be equal on every machine, because no rounding is in it; `replica.process.range_comparison` names them.
_EXACT = frozenset(("base", "steps", "dropped work", "tokens", "cursor", "counters", "items"))
_PLACE = frozenset(("cursor", "counters", "random state"))  # where training ended, beside what it computed
_SHARE = 0.25  # of one inner step's share of the pseudo-gradient
_NOISES = 4.0  # a distance above this multiple of that between two re-runs is no noise


def bound_of(round_steps: int) -> float:
    """The largest relative distance of a repeated payload, or of a tensor of the state, that counts as rounding.

    A pseudo-gradient is the sum of H steps. Leaving out one changes it by 1/H of its norm if all steps have one
    direction, and by more if not; the bound is a quarter of that. Rounding alone stays far below (docs/recipes/audit.md
    has measured distances).
    """
    return _SHARE / round_steps


def judged(
    found: RerunResult,
    bound: float,
    again: RerunResult | None = None,
    *,
    partial: bool = False,
    after_cut: bool = False,
) -> tuple[AuditOutcome, str]:
    """The outcome for a range (one replica's training in one round), and a sentence with the reason.

    Args:
        found: the result of training it again.
        bound: largest relative distance that counts as rounding.
        again: a second repetition, made if the first one differs on a machine of the same hardware class.
        partial: whether the range has fewer steps than a round: its author was cut or left between two batches.
        after_cut: whether the contribution before the range was partial.
    """
    if found.lost:
        return AuditOutcome.DIFFERS, found.lost
    if found.not_auditable:
        return AuditOutcome.NOT_AUDITABLE, found.not_auditable
    differing = set(found.differing)
    if partial and found.micro_batches:
        differing -= _PLACE  # the cut fell between two batches of one step, of which the record has no number
    if not differing:
        return AuditOutcome.EQUAL, ""
    if after_cut and found.micro_batches:
        return AuditOutcome.NOT_AUDITABLE, (
            "the round before was cut, perhaps between two batches of one step: gradients in memory are in no record"
        )
    words = f"{', '.join(each for each in found.differing if each in differing)} differ"
    if differing & _EXACT:
        return AuditOutcome.DIFFERS, words
    distance = max(found.distance or 0.0, found.state_distance or 0.0)
    if found.other_class:
        return _by_distance(distance, bound, differing, f"another hardware class ({'; '.join(found.other_class)})")
    if again is None or again.payload == found.payload:
        return AuditOutcome.DIFFERS, words
    noise = again.noise or 0.0
    why = f"training is not deterministic here (two re-runs are {noise:.2g} apart)"
    outcome, why = _by_distance(distance, bound, differing, why)
    if outcome is AuditOutcome.DIFFERS and distance <= _NOISES * noise:
        return AuditOutcome.NOT_AUDITABLE, f"{why}, which is more than the bound tolerates"
    return outcome, why


def _by_distance(distance: float, bound: float, differing: set[str], why: str) -> tuple[AuditOutcome, str]:
    if "payload" not in differing and "state" not in differing:
        return AuditOutcome.WITHIN_BOUND, why
    if distance <= bound:
        return AuditOutcome.WITHIN_BOUND, why
    return AuditOutcome.DIFFERS, f"{why}; a distance of {distance:.2g} is above {bound:.2g}"
