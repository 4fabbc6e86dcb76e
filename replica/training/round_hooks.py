"""`RoundHooks`: calls the user's functions with a `RoundView` after each commit that this replica has applied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco_orchestrator.protocol.records import Commit, RoundMetrics
from diloco_orchestrator.protocol.verdict import Verdict
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.participant import Participant


@dataclass(frozen=True)
class RoundView:
    """A commit and its round's metrics, the same on every replica. Metrics are as observed: losses are not negated.

    `in_loop` is the training metric near the base before the round: the mean over the replicas of each one's mean over
    the first eighth of the round's inner steps; None if no replica observed it. With a held-out set outliers are
    clipped, and replicas whose contribution is not averaged do not count.
    """

    round: int
    commit: Commit
    verdict: Verdict | None  # None in a run without a held-out set
    heldout: float | None  # score of the base before the round; None if too few items were scored
    in_loop: float | None  # training metric of the same model, nats per token or reward
    gap: float | None  # training gain minus held-out gain; None without a verdict
    extra: Mapping[str, float]  # mean over the replicas of what was passed to `observe(extra=...)`


RoundFn = Callable[[RoundView], None]


class RoundHooks:
    """The user's functions to call with a `RoundView` after each commit. `sign`: -1 if the metric is a loss."""

    def __init__(self, attempt: Attempt, rounds: Participant, sign: float) -> None:
        self._attempt = attempt
        self._rounds = rounds
        self._sign = sign
        self._functions: list[RoundFn] = []
        self._told = 0  # the last round whose commit was shown

    def add(self, function: RoundFn) -> None:
        """Call this function after each commit from now on, and at once with the newest commit if there is one."""
        newest = self._newest()
        if not self._functions:
            self._told = newest
        self._functions.append(function)
        if newest:
            function(self._view(newest))

    def call_due(self) -> None:
        """Call every function, whose errors are raised, with each commit applied since the last call, in order."""
        if not self._functions:
            return
        newest = self._newest()
        while self._told < newest:
            self._told += 1
            view = self._view(self._told)
            for function in self._functions:
                function(view)

    def _newest(self) -> int:
        """The last round whose commit this replica has applied; 0 if there is none."""
        return self._rounds.open.round - 1

    def _view(self, round_: int) -> RoundView:
        entry = self._attempt.log.commit(round_)
        assert entry is not None
        commit, verdict = entry.commit, entry.commit.verdict
        figures = commit.figures or RoundMetrics()
        judged = verdict.in_loop if verdict else None
        return RoundView(
            round=round_,
            commit=commit,
            verdict=verdict,
            heldout=self._signed(verdict.value if verdict else None),
            in_loop=self._signed(figures.in_loop if judged is None else judged),
            gap=verdict.proxy_real_gap if verdict else None,
            extra=figures.extra,
        )

    def _signed(self, value: float | None) -> float | None:
        return None if value is None else self._sign * value
