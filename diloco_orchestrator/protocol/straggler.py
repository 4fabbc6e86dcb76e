"""How long a round waits for slower replicas: `StragglerDeadline`, from the train times of the last rounds.

Pure rules over published train times. When a round ends is decided by `protocol.rounds`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from diloco_orchestrator.protocol.records import Answer, Contribution

_ROUNDS = 9  # rounds whose train times count
_MADS = 4.0  # median absolute deviations by which a replica may exceed the median
_LEAST_SLACK = 0.5  # as a fraction of the median
_LEAST_SLACK_S, _MOST_SLACK_S = 2.0, 600.0
_MOST_GRACE_S = 60.0


@dataclass(frozen=True)
class StragglerDeadline:
    """How long a round usually takes, and when it ends without those who take longer. Seconds from its opening."""

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


class RoundTimes:
    """Train times of the last rounds, late ones included. `round_steps`: inner steps of a whole round."""

    def __init__(self, round_steps: int) -> None:
        self._round_steps = round_steps
        self._times_s: dict[tuple[int, int], float] = {}  # by round and replica

    def record(self, manifests: Iterable[Contribution]) -> None:
        """Add the train times of contributions. A contribution that was recorded before changes nothing."""
        for manifest in manifests:
            self._add(manifest.round, manifest)
        self._forget_old()

    def record_answers(self, round_: int, answers: Iterable[Answer]) -> None:
        """Add the train times that the commit of a round holds. Late contributions are not among them."""
        for answer in answers:
            if answer.train_s:  # 0: its manifest could not be read
                self._add(round_, answer)
        self._forget_old()

    def _add(self, round_: int, source: Contribution | Answer) -> None:
        steps = sum(origin.steps for origin in source.origins if origin.round == round_)
        if source.kind == "delta" and steps:
            # A partial contribution took the time of a part of a round.
            whole = max(1.0, self._round_steps / steps)
            self._times_s[round_, source.replica_id] = source.train_s * whole

    def _forget_old(self) -> None:
        newest = max((round_ for round_, _ in self._times_s), default=0)
        self._times_s = {at: time for at, time in self._times_s.items() if at[0] > newest - _ROUNDS}

    def deadline(self) -> StragglerDeadline | None:
        """The deadline that follows from the recorded times; None before the first."""
        return StragglerDeadline.of([self._times_s[at] for at in sorted(self._times_s)])
