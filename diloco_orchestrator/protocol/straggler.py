"""`StragglerDeadline`: how long a round waits for slower replicas, from the train times of the last rounds.

Pure functions of published train times. `protocol.rounds` decides when a round ends.
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
    """Median train time of a round and the deadline for stragglers, in seconds from the round's opening."""

    median_s: float
    deadline_s: float

    @classmethod
    def of(cls, train_times_s: Sequence[float]) -> "StragglerDeadline | None":
        """The deadline that follows from `train_times_s`, those of the last rounds, late ones too; None without any.

        It is the median plus a slack of 4 median absolute deviations, at least half of the median. The slack, not the
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
    """A train time that a replica reports, and how long the reader saw that round take."""

    train_s: float  # as it counts for deadlines
    whole_s: float  # that a whole round takes at this speed
    seen_s: float | None  # from the round's opening until the manifest was there; None: read from a commit


class RoundTimes:
    """Train times of the last rounds, late ones included, without outliers that would delay a round.

    A time that another replica reports counts as at most eight times the usual one, or as the time that this replica
    has waited itself if that is more. So no false report makes a round wait long. The usual time is this replica's
    median, or the median of the others' medians if that is more. If only one other replica reports times, they are not
    used.

    Args:
        round_steps: inner steps of a whole round.
        own: id of this replica, whose own times are used as they are.
        equal_time: whether replicas take as many steps as fit a round. Then a time counts for deadlines as it was
            reported; otherwise that of a partial contribution is scaled to a whole round.
    """

    def __init__(self, round_steps: int, own: int, *, equal_time: bool = False) -> None:
        self._round_steps = round_steps
        self._own = own
        self._equal_time = equal_time
        self._times: dict[tuple[int, int], _Reported] = {}  # by round and replica

    def record(self, manifests: Iterable[Contribution], seen_s: float | None = None) -> None:
        """Add the train times of `manifests`, once each.

        `seen_s`: seconds since this replica saw their round open, up to which a reported time is believed; None: it
        has not seen that.
        """
        for manifest in manifests:
            self._add(manifest.round, manifest, seen_s)
        self._forget_old()

    def record_answers(self, round_: int, answers: Iterable[Answer]) -> None:
        """Add the train times in a commit's list of responses, which has no late contributions."""
        for answer in answers:
            if answer.train_s:  # 0: its manifest could not be read
                self._add(round_, answer, None)
        self._forget_old()

    def _add(self, round_: int, source: Contribution | Answer, seen_s: float | None) -> None:
        steps = sum(origin.steps for origin in source.origins if origin.round == round_)
        if source.kind == "delta" and steps:
            # A partial contribution took the time of a part of a round.
            whole_s = source.train_s * max(1.0, self._round_steps / steps)
            counted_s = source.train_s if self._equal_time else whole_s
            self._times.setdefault((round_, source.replica_id), _Reported(counted_s, whole_s, seen_s))

    def _forget_old(self) -> None:
        newest = max((round_ for round_, _ in self._times), default=0)
        self._times = {at: time for at, time in self._times.items() if at[0] > newest - _ROUNDS}

    def _by_replica(self) -> dict[int, list[float]]:
        times: dict[int, list[float]] = {}
        for (_, replica_id), reported in self._times.items():
            times.setdefault(replica_id, []).append(reported.train_s)
        return times

    def fastest_s(self) -> float | None:
        """Seconds that a whole round takes on the fastest replica, by the median of its reports; None before any.

        A replica counts as at most eight times as fast as is usual for the others, so that a false report shortens no
        round further.
        """
        times: dict[int, list[float]] = {}
        for (_, replica_id), reported in self._times.items():
            times.setdefault(replica_id, []).append(reported.whole_s)
        typical = {replica_id: median(each) for replica_id, each in times.items()}
        return min((max(typical[i], _usual(typical, i, self._own) / _MOST_TIMES) for i in typical), default=None)

    def typical_s(self) -> dict[int, float]:
        """The median of each replica's train times, by replica id, as they count for deadlines."""
        return {replica_id: median(each) for replica_id, each in self._by_replica().items()}

    def spread_s(self) -> float:
        """Median difference in seconds of a replica's train times from their median; 0 before the first."""
        found = [median(abs(time - median(each)) for time in each) for each in self._by_replica().values()]
        return median(found) if found else 0.0

    def deadline(self) -> StragglerDeadline | None:
        """The straggler deadline that follows from the recorded train times; None while none of these is used."""
        typical = self.typical_s()
        most = {i: _MOST_TIMES * _usual(typical, i, self._own) for i in typical}
        believed = [
            reported.train_s if at[1] == self._own else min(reported.train_s, max(most[at[1]], reported.seen_s or 0.0))
            for at, reported in sorted(self._times.items(), key=lambda each: each[0])
            if at[1] == self._own or most[at[1]] or reported.seen_s is not None
        ]
        return StragglerDeadline.of(believed)


def _usual(typical: Mapping[int, float], replica_id: int, own: int) -> float:
    """The time (s) that a replica's reports are compared with; 0 if no other replica has reported one.

    It is the lower median of the other replicas' times, at least this replica's own (`own`: its id).
    """
    others = sorted(time for i, time in typical.items() if i != replica_id)
    return max(others[(len(others) - 1) // 2], typical.get(own, 0.0)) if others else 0.0
