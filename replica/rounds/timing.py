"""`RoundTiming`: the times of the open round on this replica's clock: when to poll for its commit, and when it is late.

The rules are in `protocol.straggler` and `protocol.rounds`; this class holds their inputs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from diloco_orchestrator.protocol import keys, pace, rounds
from diloco_orchestrator.protocol.records import Answer, Contribution
from diloco_orchestrator.protocol.straggler import RoundTimes, StragglerDeadline
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.run_log.attempts import AttemptRecords

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_FROM = 0.9  # of the deadline; other replicas may have opened the round a little earlier
_OUTAGE_S = 30.0  # a poll that takes longer counts as an outage of the store
_ROUNDS_READ = 3  # rounds that a restarted attempt reads to learn how long a round takes


class RoundTiming:
    """Times of the open round and of the rounds before it, in seconds on this replica's monotonic clock."""

    def __init__(self, attempt: Attempt, tip: HeldTip) -> None:
        self.policy = rounds.Policy.of(attempt.config)
        self._apart_s = pace.apart_s(attempt.config, attempt.store.requests_allowed)
        self._attempt = attempt
        self._tip = tip
        config = attempt.config
        self._equal_time = config.steps == "equal_time"
        self._times = RoundTimes(config.round_steps, attempt.replica_id, equal_time=self._equal_time)
        self._next_poll = self._next_list = 0.0
        self._first_opened: dict[int, float] = {}  # of the open round and the one before: when this replica opened it
        self.open_round()

    def open_round(self) -> None:
        """Measure times from now on, because a new round has opened."""
        self._opened_at = self._waiting_since = self._first_waiting_since = self._now()
        self._quorum_since: float | None = None
        kept = {r: at for r, at in self._first_opened.items() if r in (self._tip.open.round - 1, self._tip.open.round)}
        self._first_opened = {self._tip.open.round: self._opened_at, **kept}

    def start_waiting(self) -> None:
        """Mark the end of this replica's training in the round, from which `round_timeout_s` counts."""
        self._waiting_since = self._first_waiting_since = self._now()

    def waits_on(self, missing: Iterable[int]) -> bool:
        """Whether to wait for a quorum for `round_timeout_s` more, because a missing replica is being launched.

        True while the replica's newest attempt has an intent and no claim: the provider is down or has no machine, or
        the coordinator is gone, which leaves the same records. A process that gave up now would be relaunched only to
        wait again. False after `retry.unavailable_for_s`, when a coordinator stops trying too. Two LIST requests for
        each replica.
        """
        config, records = self._attempt.config, AttemptRecords(self._attempt.store)
        if self._now() - self._first_waiting_since >= config.retry.unavailable_for_s:
            return False
        # Whoever of those that a scale-up may launch comes, may complete the quorum.
        awaited = sorted({*missing, *range(self.policy.replicas, self.policy.most_replicas)})
        launching = [i for i in awaited if max(records.numbers(i), default=0) > records.newest_claim(i)]
        if launching:
            log.warning(
                "round %d: no quorum for %.0f s, but replicas %s are being launched: waiting on",
                self._tip.open.round,
                self._now() - self._first_waiting_since,
                launching,
            )
            self._waiting_since = self._now()
        return bool(launching)

    def without_outages(self, poll: Callable[[bool], T], waited: bool) -> T:
        """The result of `poll(waited)`. A call longer than `_OUTAGE_S`, a store's outage, does not count as waiting.

        `waited`: passed on to `poll`: whether this replica has waited in the open round already.
        """
        began = self._now()
        found = poll(waited)
        if (took_s := self._now() - began) > _OUTAGE_S:
            self._waiting_since += took_s
        return found

    def record(self, manifests: Iterable[Contribution]) -> None:
        """Add the train times of contributions to this or earlier rounds, which have just been read."""
        for manifest in manifests:
            if not self._counts(manifest.replica_id):
                continue
            opened_at = self._first_opened.get(manifest.round)
            seen_s = None if opened_at is None else self._now() - opened_at
            self._times = self._times.with_manifests([manifest], seen_s)

    def recover(self) -> None:
        """Load the train times of the last closed rounds from their commits, which have no late contributions."""
        for round_ in self._tip.closed_rounds[:_ROUNDS_READ]:
            answers = [each for each in self._tip.commit_of(round_).answers if self._counts(each.replica_id)]
            self._times = self._times.with_answers(round_, answers)

    def _counts(self, replica_id: int) -> bool:
        """Whether a replica's train times count here: of strangers none do, who may be most and say anything."""
        return replica_id == self._attempt.replica_id or replica_id not in self._attempt.config.invited

    @property
    def elastic(self) -> bool:
        """Whether a round may end without this replica, as the run's quorum setting says."""
        return not self.policy.strict and self.policy.most_replicas > 1

    @property
    def train_s(self) -> float:
        """Seconds since this replica opened the round, scoring of the base included."""
        return self._now() - self._opened_at

    def deadline(self) -> StragglerDeadline | None:
        """The straggler deadline of the open round; None in the first after a start or resume, which waits for all."""
        first = self._tip.open.round == self._attempt.begin.after_round + 1
        return None if first else self._times.deadline

    @property
    def usual_s(self) -> float:
        """Seconds that a round usually takes, from its opening to its manifests; 0 while that is not known."""
        deadline = self._times.deadline
        return deadline.median_s if deadline is not None else 0.0

    def pauses(self) -> Iterator[float]:
        """The growing pauses in seconds between polls of a waiting replica, without end (`pace.waiting`).

        Before a round has ended they follow from the time that the open one has taken so far.
        """
        round_s = self.usual_s or self.train_s
        return pace.waiting(self._attempt.config, round_s, self._times.spread_s, self._apart_s).pauses()

    @property
    def longest_pause_s(self) -> float:
        """The longest pause in seconds between two polls of a replica that waits for others' responses."""
        return pace.longest_wait_s(self._attempt.config, self.usual_s or self.train_s, self._apart_s)

    @property
    def seldom_s(self) -> float:
        """Seconds between two requests of a waiting replica for rare events, such as a replica given up."""
        return max(pace.waits_long_s(self.usual_s), self._apart_s)

    def until_expected_s(self, missing: Iterable[int]) -> float:
        """Seconds until the next missing replica usually responds, at most `pace.EXPECTED_S`; 0 if all are late.

        0 in the final evaluation round too, in which nobody trains.
        """
        deadline, typical, now_s = self.deadline(), self._times.typical_s, self.train_s
        if deadline is None or self._tip.open.final_evaluation:
            return 0.0
        known = [typical[replica_id] for replica_id in missing if replica_id in typical]
        # Who cannot finish by the deadline publishes a part at about the median.
        arrivals = (each if each <= deadline.deadline_s else deadline.median_s for each in known)
        return min((min(each - now_s, pace.EXPECTED_S) for each in arrivals if each > now_s), default=0.0)

    def poll_due(self) -> bool:
        """Whether to spend a request now to check for the open round's commit. True counts as that poll.

        False if the last poll was within the longest pause of a waiting replica, and, where others wait for this
        replica, until 90 % of the straggler deadline. In the first round of all, which may have been opened long ago,
        the pause grows with the time that this replica has trained.
        """
        now = self._now()
        if now < self._next_poll or not self.may_be_committed():
            return False
        usual_s, config = self.usual_s, self._attempt.config
        pause_s = pace.longest_wait_s(config, usual_s) if usual_s else pace.starts_read_s(self.train_s)
        self._next_poll = now + max(pause_s, self._apart_s)
        return True

    def may_be_committed(self) -> bool:
        """Whether others may end the open round without this replica: they do not wait for it, or not much longer."""
        if not self.elastic or self._tip.open.final_evaluation:
            return False
        deadline = self.deadline()
        if deadline is None or self._attempt.replica_id not in self._tip.open.roster:
            return True
        return self.train_s > _POLL_FROM * deadline.deadline_s

    def is_behind(self, steps: int, steps_s: float) -> bool:
        """Whether this replica, after `steps` inner steps of the round, should publish a partial contribution now.

        `steps_s`: seconds that these steps took. Scoring before them, which may take most of a round, says nothing of
        the speed of those to come.

        True if at its speed the whole round would miss the deadline, and its next step would end after the median. A
        partial contribution that is averaged is worth more than a whole one that is late every time.

        With `steps="equal_time"`: True if its next step would end more than half a step of the fastest replica after
        that one's whole round; in a first round, whose length is not known, once another replica has contributed.
        """
        whole = self._attempt.config.round_steps
        if not self.elastic or not 0 < steps < whole:
            return False
        deadline, elapsed = self.deadline(), self.train_s
        step_s = steps_s / steps
        if self._equal_time:
            if (round_s := self._times.fastest_s) is None:
                return self._another_has_contributed()
            return elapsed + step_s > round_s * (1 + 0.5 / whole)
        if deadline is None or elapsed + step_s <= deadline.median_s:
            return False
        return elapsed + step_s * (whole - steps) > deadline.deadline_s

    def _another_has_contributed(self) -> bool:
        """Whether the open round has a manifest. Lists at most once a second, later less often; False in between."""
        now = self._now()
        if now < self._next_list or not self.train_s:  # no time passes while a range is trained again
            return False
        self._next_list = now + max(pace.starts_read_s(self.train_s), self._apart_s)
        return any(True for _ in self._attempt.store.list(keys.contributions(self._tip.open.round)))

    def view(self, answers: Sequence[Answer], out: Sequence[int] = (), vacated: Sequence[int] = ()) -> rounds.View:
        """The open round as input of `rounds.decide`. `out`, `vacated`: as in `rounds.View`."""
        if self._quorum_since is None and sum(map(rounds.contributes, answers)) >= self.policy.quorum:
            self._quorum_since = self._now()
        return rounds.View(
            answers=answers,
            roster=self._tip.open.roster,
            opened_at=self._opened_at,
            waiting_since=self._waiting_since,
            quorum_since=self._quorum_since,
            deadline=self.deadline(),
            out=out,
            vacated=vacated,
        )

    def _now(self) -> float:
        return self._attempt.clock.now()
