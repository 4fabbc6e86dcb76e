"""`StragglerDeadline`: how long a round waits for slower replicas, from the train times of the last rounds.

Pure functions of published train times. `protocol.rounds` decides when a round ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from diloco_orchestrator.protocol.records import Answer, Contribution

_ROUNDS = 9  # rounds whose train times count
_MADS = 4.0  # median absolute deviations by which a replica may exceed the median
_LEAST_SLACK = 0.5  # as a fraction of the median
_LEAST_SLACK_S, _MOST_SLACK_S = 2.0, 600.0
_MOST_GRACE_S = 60.0
_MOST_TIMES = 8.0  # the usual time that a report counts for, unless others waited so long; machines differ by so much


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
    """One train time that a replica reports, and how long the reader saw that round take."""

    train_s: float  # as it counts for deadlines
    whole_s: float  # that a whole round takes at this speed
    seen_s: float | None  # from the round's opening until the manifest was there; None: read from a commit


@dataclass(frozen=True)
class RoundTimes:
    """Train times of the last rounds, late ones included, without outliers that would delay a round.

    A time that another replica reports counts as at most eight times the usual one, or as the time that this replica
    has waited itself if that is more. So no false report makes a round wait long. The usual time is this replica's
    median, or the median of the others' medians if that is more. If only one other replica reports times, they are not
    used.

    What follows from the times is computed once: a replica that waits asks for it at every poll.

    Args:
        round_steps: inner steps of a whole round.
        own: id of this replica, whose own times are used as they are.
        equal_time: whether replicas take as many steps as fit a round. Then a time counts for deadlines as it was
            reported; otherwise that of a partial contribution is scaled to a whole round.
        reported: the times, by round and replica.
    """

    round_steps: int
    own: int
    equal_time: bool = False
    reported: Mapping[tuple[int, int], _Reported] = field(default_factory=dict)

    def with_manifests(self, manifests: Iterable[Contribution], seen_s: float | None = None) -> "RoundTimes":
        """A copy of these times with the train times of `manifests` that were not among them.

        `seen_s`: seconds since this replica saw their round open, up to which a reported time is believed; None:
        unknown.
        """
        return self._with([(manifest.round, manifest) for manifest in manifests], seen_s)

    def with_answers(self, round_: int, answers: Iterable[Answer]) -> "RoundTimes":
        """A copy of these times with those in `answers`, the responses that the commit of `round_` lists."""
        readable = [answer for answer in answers if answer.train_s]  # 0: its manifest could not be read
        return self._with([(round_, answer) for answer in readable], None)

    def _with(self, sources: Iterable[tuple[int, Contribution | Answer]], seen_s: float | None) -> "RoundTimes":
        """A copy of these times with the new ones in `sources`: (round, manifest, or response as a commit lists it)."""
        new: dict[tuple[int, int], _Reported] = {}
        for round_, source in sources:
            steps = sum(origin.steps for origin in source.origins if origin.round == round_)
            if source.kind == "delta" and steps and (round_, source.replica_id) not in self.reported:
                # A partial contribution took the time of a part of a round.
                whole_s = source.train_s * max(1.0, self.round_steps / steps)
                counted_s = source.train_s if self.equal_time else whole_s
                new.setdefault((round_, source.replica_id), _Reported(counted_s, whole_s, seen_s))
        if not new:
            return self
        times = {**self.reported, **new}
        newest = max(round_ for round_, _ in times)
        return replace(self, reported={at: time for at, time in times.items() if at[0] > newest - _ROUNDS})

    @cached_property
    def _by_replica(self) -> Mapping[int, list[_Reported]]:
        found: dict[int, list[_Reported]] = {}
        for (_, replica_id), reported in self.reported.items():
            found.setdefault(replica_id, []).append(reported)
        return found

    @cached_property
    def fastest_s(self) -> float | None:
        """Seconds that a whole round takes on the fastest replica, by the median of its reports; None before any.

        A replica counts as at most eight times as fast as the median of all, so that false reports of fewer than half
        of them shorten no round further.
        """
        typical = [median(each.whole_s for each in its) for its in self._by_replica.values()]
        return max(min(typical), median(typical) / _MOST_TIMES) if typical else None

    @cached_property
    def typical_s(self) -> Mapping[int, float]:
        """The median of each replica's train times, by replica id, as they count for deadlines."""
        return {replica_id: median(each.train_s for each in its) for replica_id, its in self._by_replica.items()}

    @cached_property
    def spread_s(self) -> float:
        """Median difference in seconds of a replica's train times from their median; 0 before the first."""
        typical, by_replica = self.typical_s, self._by_replica
        found = [median(abs(each.train_s - typical[i]) for each in its) for i, its in by_replica.items()]
        return median(found) if found else 0.0

    @cached_property
    def deadline(self) -> StragglerDeadline | None:
        """The straggler deadline that follows from the train times; None while none counts (see `RoundTimes`)."""
        most = {i: _MOST_TIMES * _usual(self.typical_s, i, self.own) for i in self.typical_s}
        believed = [
            reported.train_s if at[1] == self.own else min(reported.train_s, max(most[at[1]], reported.seen_s or 0.0))
            for at, reported in sorted(self.reported.items(), key=lambda each: each[0])
            if at[1] == self.own or most[at[1]] or reported.seen_s is not None
        ]
        return StragglerDeadline.of(believed)


def _usual(typical: Mapping[int, float], replica_id: int, own: int) -> float:
    """The time (s) that a replica's reports are compared with; 0 if no other replica has reported one.

    It is the lower median of the other replicas' times, at least this replica's own (`own`: its id).
    """
    others = sorted(time for i, time in typical.items() if i != replica_id)
    return max(others[(len(others) - 1) // 2], typical.get(own, 0.0)) if others else 0.0
