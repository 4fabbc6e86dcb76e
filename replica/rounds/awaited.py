"""`AwaitedReplicas`: the replicas whose responses the open round waits for, and so the roster of the next round.

A round waits for the replicas on its roster, except those that are given up, or vacated while enough others respond.
`protocol.rounds` decides when it ends without some of them.
"""

import logging
from collections.abc import Collection

from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.received import ReceivedResponses
from diloco_orchestrator.replica.rounds.timing import RoundTiming
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.run_log.attempts import AttemptRecords

log = logging.getLogger(__name__)


class AwaitedReplicas:
    """The replicas that one replica waits for in the open round, as it knows from the bucket. Not thread-safe."""

    def __init__(self, attempt: Attempt, tip: HeldTip, received: ReceivedResponses, timing: RoundTiming) -> None:
        self._attempt = attempt
        self._tip = tip
        self._received = received
        self._timing = timing
        self._attempts = AttemptRecords(attempt.store)
        self._late: set[int] = set()  # replicas whose manifest of the last closed round is not in its commit
        self._read_of_last: set[int] = set()  # replicas whose manifest of that round was read after its commit
        self._out: dict[int, int] = {}  # replicas that are given up or vacated, and the open round when that was read
        self._back: set[int] = set()  # replicas in `_out` that have responded to a later round
        self._vacated: set[int] = set()  # replicas in `_out` that may be launched again
        self.start_waiting()

    def open_round(self) -> None:
        """Forget the late manifests of the round before the last one, because a new round is open."""
        self._late, self._read_of_last = set(), set()

    def start_waiting(self) -> None:
        """Mark the end of this replica's training, from which pauses between polls count."""
        self._out_polled_at = self._attempt.clock.now()

    def missing(self, unread: Collection[int]) -> set[int]:
        """The replicas that the round waits for, without those that responded or have a manifest in `unread`."""
        responded = {answer.replica_id for answer in self._received.answers()}.union(unread)
        return set(self._tip.open.roster) - responded - set(self._gone())

    def out(self) -> tuple[int, ...]:
        """Replicas that were given up, except those that have since responded to a later round."""
        return tuple(each for each in self._gone() if each not in self._vacated)

    def vacated(self) -> tuple[int, ...]:
        """Replicas that were vacated and not given up, except those that have since responded to a later round."""
        return tuple(each for each in self._gone() if each in self._vacated)

    def _gone(self) -> tuple[int, ...]:
        """The union of both."""
        round_, now_there = self._tip.open.round, {answer.replica_id for answer in self._received.answers()}
        for replica_id, since in dict(self._out).items():  # `read_out`, in another thread, may add one meanwhile
            if (replica_id in now_there and round_ > since) or (replica_id in self._late and round_ > since + 1):
                self._back.add(replica_id)
        return tuple(sorted(self._out.keys() - self._back))

    def next_roster(self) -> tuple[int, ...]:
        """The replicas that the next round waits for: those that responded to this round or late to the last one."""
        answered = [answer.replica_id for answer in self._received.answers()]
        return rounds.next_roster(self._timing.policy, answered, sorted(self._late))

    def read_late(self) -> None:
        """Find manifests of the last closed round that came after its commit; the next round waits for their authors.

        Does nothing with quorum "all", and if that commit averages or quarantines every replica.
        """
        last, replicas = self._tip.last, self._attempt.config.most_replicas
        decided = last.decided_about() if last else set()
        if last is None or not self._timing.elastic or len(decided) == replicas:
            return
        self._read_of_last |= decided
        found = self._received.late_in(last.round, replicas, self._read_of_last)
        self._late |= {manifest.replica_id for manifest in found}
        self._timing.record(found)

    def read_out(self) -> None:
        """Find replicas that are given up until the next resume (`Out`), or vacated by a scale-down."""
        attempt, now, round_ = self._attempt, self._attempt.clock.now(), self._tip.open.round
        if now - self._out_polled_at < self._timing.seldom_s:
            return
        self._out_polled_at = now
        for replica_id, out in attempt.log.out(attempt.begin.leg).items():
            if replica_id not in self._out or replica_id in self._vacated:
                self._out[replica_id] = round_
                self._vacated.discard(replica_id)
                log.warning("round %d: nobody waits for replica %d any more: it %s", round_, replica_id, out.reason)
        if attempt.config.max_replicas is None:
            return
        for replica_id in sorted(self.missing(())):
            number = max(self._attempts.numbers(replica_id), default=0)
            if number and (cancel := self._attempts.cancel(replica_id, number)) is not None and cancel.vacates:
                self._out[replica_id] = round_
                self._back.discard(replica_id)
                self._vacated.add(replica_id)
                log.info("round %d: nobody waits for replica %d: %s", round_, replica_id, cancel.reason)
