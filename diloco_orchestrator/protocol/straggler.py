"""The time that a round waits for slower replicas: `StragglerDeadline`, from the train times of the last rounds.

Pure rules over published train times. When a round ends is decided by `protocol.rounds`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from diloco_orchestrator.protocol.records import Answer, Contribution

_ROUNDS = 9  # rounds whose train times count
_MADS = 4.0  # median absolute deviations by which a replica may exceed the median
_LEAST_SLACK = 0.5  # as a fraction of the median
_LEAST_SLACK_S, _MOST_SLACK_S = 2.0, 600.0
_MOST_GRACE_S = 60.0
_MOST_TIMES = 8.0  # what is usual, as which a report counts that nobody has waited for; replicas differ by so much


@dataclass(frozen=True)
class StragglerDeadline:
    """The usual duration of a round, and when it ends without those who take longer. Seconds from its opening."""

    median_s: float
    deadline_s: float

    @classmethod
    def of(cls, train_times_s: Sequence[float]) -> "StragglerDeadline | None":
        """The deadline for the train times of the last rounds, in seconds, late contributions included; None if there
        are none.

        It is the median plus slack: 4 median absolute deviations, at least half of the median. The slack, not the
        deadline, is bounded to 2..600 s, so that rounds of any length leave room for stragglers.
        """
        if not train_times_s:
            return None
        middle = median(train_times_s)
        deviation = median(abs(time - middle) for time in train_times_s)
        slack = max(_MADS * deviation, _LEAST_SLACK * middle)
        return cls(middle, middle + min(max(slack, _LEAST_SLACK_S), _MOST_SLACK_S))

    @property
    def grace_s(self) -> float:
        """Seconds that a round still waits for stragglers after its quorum is reached: at most 60."""
        return min(self.deadline_s - self.median_s, _MOST_GRACE_S)


@dataclass(frozen=True)
class _Reported:
    """A train time as its author reports it, of a whole round, and how long its reader saw the round take."""

    train_s: float
    seen_s: float | None  # from the round's opening until the manifest was there; None: read from a commit


class RoundTimes:
    """Train times of the last rounds, late ones included, as one replica believes them.

    What another replica reports counts at most as eight times what is usual, or as the time that this replica has seen
    pass, whichever is more. So nobody makes a round wait for long that has never waited for it. Usual is this replica's
    own median, or the median of the others' where that is more. What one other replica reports, with nothing to compare
    it with, counts for nothing.

    Args:
        round_steps: inner steps of a whole round.
        own: id of the replica whose own times are believed.
    """

    def __init__(self, round_steps: int, own: int) -> None:
        self._round_steps = round_steps
        self._own = own
        self._times: dict[tuple[int, int], _Reported] = {}  # by round and replica

    def record(self, manifests: Iterable[Contribution], seen_s: float | None = None) -> None:
        """Add the train times of contributions. A contribution that was recorded before changes nothing.

        `seen_s`: seconds that have passed since this replica opened their round; None if it did not see it open.
        """
        for manifest in manifests:
            self._add(manifest.round, manifest, seen_s)
        self._forget_old()

    def record_answers(self, round_: int, answers: Iterable[Answer]) -> None:
        """Add the train times that the commit of a round holds. Late contributions are not among them."""
        for answer in answers:
            if answer.train_s:  # 0: its manifest could not be read
                self._add(round_, answer, None)
        self._forget_old()

    def _add(self, round_: int, source: Contribution | Answer, seen_s: float | None) -> None:
        steps = sum(origin.steps for origin in source.origins if origin.round == round_)
        if source.kind == "delta" and steps:
            # A partial contribution took the time of a part of a round.
            whole = max(1.0, self._round_steps / steps)
            self._times.setdefault((round_, source.replica_id), _Reported(source.train_s * whole, seen_s))

    def _forget_old(self) -> None:
        newest = max((round_ for round_, _ in self._times), default=0)
        self._times = {at: time for at, time in self._times.items() if at[0] > newest - _ROUNDS}

    def _by_replica(self) -> dict[int, list[float]]:
        times: dict[int, list[float]] = {}
        for (_, replica_id), reported in self._times.items():
            times.setdefault(replica_id, []).append(reported.train_s)
        return times

    def typical_s(self) -> dict[int, float]:
        """The median of the train times that each replica has reported, by replica id, as it reported them."""
        return {replica_id: median(each) for replica_id, each in self._by_replica().items()}

    def spread_s(self) -> float:
        """By how much a replica's train times differ from its own median, as a rule; 0 before the first."""
        found = [median(abs(time - median(each)) for time in each) for each in self._by_replica().values()]
        return median(found) if found else 0.0

    def deadline(self) -> StragglerDeadline | None:
        """The deadline that follows from the recorded times; None before the first that is believed."""
        typical = self.typical_s()
        most = {i: _MOST_TIMES * _usual(typical, i, self._own) for i in typical}
        believed = [
            reported.train_s if at[1] == self._own else min(reported.train_s, max(most[at[1]], reported.seen_s or 0.0))
            for at, reported in sorted(self._times.items(), key=lambda each: each[0])
            if at[1] == self._own or most[at[1]] or reported.seen_s is not None
        ]
        return StragglerDeadline.of(believed)


def _usual(typical: Mapping[int, float], replica_id: int, own: int) -> float:
    """The time that a report of a replica is compared with; 0 where nobody else has reported one.

    The median over the others, of an even number the lower one, and at least the own time.
    """
    others = sorted(time for i, time in typical.items() if i != replica_id)
    return max(others[(len(others) - 1) // 2], typical.get(own, 0.0)) if others else 0.0
