"""`Participant`: one replica's part in the rounds of a run, kept over a bucket. Its promises are those of `RunRounds`.

Per round there is at most one `publish` and one `close`. The work is done in `tip`, `base_claims`, `timing`,
`contribute` and `close_round`. Knows no training loop.

**Threads.** All of these objects have one owner at a time. It is the thread that calls the participant, except while a
round is in flight: from `publish(in_background=True)` or `close_beside_training` until `close` returns, they belong to
the background, which moves the base, the position, the carry and the times. Meanwhile the caller may use `open`, which
does not move, and `close_beside_training`, `await_published`, `close`, `give_up` and `leave`. So training never sees a
round move between two inner steps: only `close` makes the next round the open one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer.adapter_products import with_residuals
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.golden_arithmetic import check_arithmetic
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Contribution, HeldoutSet
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.base_claims import BaseClaims
from diloco_orchestrator.replica.rounds.close_round import RoundCloser
from diloco_orchestrator.replica.rounds.contribute import Contributor
from diloco_orchestrator.replica.rounds.first_base import agree_on_first_base
from diloco_orchestrator.replica.rounds.interface import ClosedRound, ContributionFields
from diloco_orchestrator.replica.rounds.replica_buffers import ReplicaBuffers
from diloco_orchestrator.replica.rounds.reupload import ReuploadRequests
from diloco_orchestrator.replica.rounds.segment_writer import SegmentWriter
from diloco_orchestrator.replica.rounds.snapshot_writer import SnapshotWriter
from diloco_orchestrator.replica.rounds.start_check import check_start
from diloco_orchestrator.replica.rounds.timing import RoundTiming
from diloco_orchestrator.replica.rounds.tip import HeldTip, OpenRound
from diloco_orchestrator.replica.rounds.transfer import Transfer
from diloco_orchestrator.snapshots.layout import ModelFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _InFlight:
    """A round that is carried out in the background, and the position before it."""

    open: OpenRound
    transfer: Transfer


class Participant:
    """Takes part in rounds, one call at a time. `Participant.join` makes one.

    A contribution to a round that was committed meanwhile is published all the same, so that no trained step is lost.
    """

    def __init__(self, attempt: Attempt, tip: HeldTip, requests: ReuploadRequests, files: ModelFiles) -> None:
        self._attempt = attempt
        self._tip = tip
        self._claims = BaseClaims(attempt, tip, requests)
        self._requests = requests
        self._timing = RoundTiming(attempt, tip)
        self._contributor = Contributor(attempt, tip, self._claims, self._timing, requests.payloads)
        self._closer = RoundCloser(attempt, tip, self._claims, requests, self._timing, self._contributor)
        self._snapshots = SnapshotWriter(attempt, tip, self._claims, files)
        self._segments = SegmentWriter(attempt, tip)
        self._in_flight: _InFlight | None = None
        self.history = self._contributor.history
        self.buffers = ReplicaBuffers(attempt, tip, self.history, files)
        self._contributor.recover()
        attempt.pulse.round = self.open.round

    @classmethod
    def join(
        cls,
        attempt: Attempt,
        parameters: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        files: ModelFiles,
        heldout: HeldoutSet | None = None,
    ) -> "Participant":
        """Agree on the first base with the other replicas, then rebuild the newest base from the bucket.

        `parameters`: the trainable parameters of this replica's model, any float dtype. `fragments`: their names, in
        name order. `heldout`: the held-out set that this replica scores; None if it scores nothing. Raises
        `ModelMismatch` if any of them is not the run's, `ConfigError` if the run averages adapters that are absent, and
        `BaseDiverged` if the arithmetic of this machine differs from all others'.
        """
        check_arithmetic()
        if attempt.config.adapters == "exact" and not files.adapters:
            raise ConfigError(
                'the run averages adapters="exact", which needs ctx.attach: this loop joins without adapters. Use '
                'adapters="mean" in a new run, or ctx.attach.'
            )
        if files.adapters:
            parameters, fragments = with_residuals(parameters, fragments, files.adapters)
        own = tuple(tuple(names) for names in fragments)
        found, first = agree_on_first_base(attempt, parameters, own, files, heldout)
        check_start(found.record, parameters, own, heldout, files, attempt)
        requests = ReuploadRequests(attempt)
        tip = HeldTip(attempt, requests.rebuild(first=first), own)
        if not tip.position.round and not tip.base.holds(parameters):
            log.warning("this replica's first values differ from the run's first base; it takes those of snapshot 0")
        return cls(attempt, tip, requests, files)

    @property
    def open(self) -> OpenRound:
        """The open round, which stays the same while it is in flight."""
        return self._in_flight.open if self._in_flight else self._tip.open

    @property
    def base(self) -> Base:
        """The base that the open round starts from."""
        return self._tip.base

    @property
    def digest(self) -> str:
        """The digest of the base."""
        return self._claims.digest

    @property
    def own(self) -> Contribution | None:
        """This replica's manifest of the open round, of whichever attempt came first; None if it has none."""
        return self._contributor.own

    @property
    def elastic(self) -> bool:
        """Whether a round may end without this replica."""
        return self._timing.elastic

    # -- a round -------------------------------------------------------------------------------------------------

    def publish(self, form: Callable[[], Vector], fields: ContributionFields, *, in_background: bool = False) -> None:
        """The promise of `Rounds`. The model's buffers are published too, as they are now."""
        fields = replace(fields, buffers=self.buffers.changed())
        if in_background:
            self._begin(lambda: self._contributor.contribute_delta(form(), fields))
        else:
            self._contributor.contribute_delta(form(), fields)

    def close_beside_training(self, then: Callable[[], None] = lambda: None, *, keep_average: bool = False) -> None:
        """The promise of `Rounds`. Raises the error of publishing, of `close`, or of `then`."""
        flight = self._in_flight or self._begin(lambda: None)
        flight.transfer.raise_error()
        flight.transfer.close(lambda: self._close(then, keep_average))

    def await_published(self) -> None:
        """The promise of `RunRounds`."""
        if self._in_flight is not None:
            self._in_flight.transfer.wait_published()

    def close(self, *, keep_average: bool = False) -> ClosedRound:
        """Commit the open round or wait for its commit, and take the base after it. Errors: `RoundCloser.close`.

        The next round's times begin here, when training can take its base.
        """
        self._attempt.pulse.phase = "waiting"
        flight = self._in_flight
        if flight is None:
            closed = self._close(keep_average=keep_average)
        else:
            flight.transfer.close(lambda: self._close(keep_average=keep_average))
            try:
                closed = flight.transfer.wait()
            finally:
                self._in_flight = None
            self._timing.open_round()
        self._attempt.pulse.round, self._attempt.pulse.round_s = self.open.round, self._timing.usual_s
        return closed

    def give_up(self) -> None:
        """Let a round in flight end with `Preempted` where it would wait, because nobody will take its base."""
        self._closer.give_up()

    def leave(self) -> None:
        """Give up a round in flight, and block until the background has ended: after the request that it makes now, and
        the snapshot that it writes.

        Called before the interpreter exits, which a thread within a library's code may not survive.
        """
        self.give_up()
        if self._in_flight is not None:
            self._in_flight.transfer.wait_ended()
        self._snapshots.wait_ended()

    def _begin(self, contribute: Callable[[], object]) -> _InFlight:
        attempt, opened = self._attempt, self._tip.open
        self._in_flight = _InFlight(opened, Transfer(attempt.background, attempt.clock, opened.round, contribute))
        return self._in_flight

    def _close(self, then: Callable[[], None] = lambda: None, keep_average: bool = False) -> ClosedRound:
        self._snapshots.wait()  # a snapshot is written of the base that closing steps in place
        closed = self._closer.close(keep_average=keep_average)
        self._segments.write_if_due()
        then()
        return closed

    def publish_scores(self, fields: ContributionFields) -> None:
        """Contribute this replica's scores to the final evaluation round."""
        self._contributor.contribute_scores(fields)

    # -- rounds that go on without this replica ------------------------------------------------------------------

    def committed(self, *, if_due: bool = False) -> bool:
        """Whether the open round was committed without waiting for this replica. One GET request, where it is due."""
        asks = not self.open.stopped and (not if_due or self._timing.poll_due())
        return asks and self._closer.committed()

    def is_behind(self, steps: int) -> bool:
        """Whether this replica, after `steps` inner steps, should publish a partial contribution now."""
        return self._timing.is_behind(steps)

    def announce(self) -> None:
        """Put this replica on the roster of the next round, unless rounds wait for it anyway."""
        self._contributor.announce()

    def reopen(self, round_: int) -> None:
        """Rebuild the base and carry from when a closed round of this leg was open, to continue from there."""
        self._claims.rebuild(until=round_ - 1)
        self._attempt.pulse.round = self.open.round
        self._timing.open_round()
        self._contributor.recover()

    # -- snapshots and the end -----------------------------------------------------------------------------------

    def write_snapshot_if_due(self) -> bool:
        """Begin to write the last round's snapshot in the background, if it is due and this replica's turn.

        Errors of writing it are raised by the next round's `close`. Returns whether a replay before it gave another
        base, which this replica holds then.
        """
        return self._snapshots.write_if_due()

    def finish_leg(self) -> bool:
        """After the stop: write the last base's snapshot, after a halt by the guard the best one's, and the leg's
        result, unless they exist.

        Returns whether a replay before it gave another base, which this replica holds then.
        """
        last = self._tip.value.last
        assert last is not None
        healed = self._snapshots.write_last()
        self._snapshots.write_default()
        self._segments.wait()
        self._attempt.writer.create(rounds.result_of(last.commit, last.sha256, self._attempt.stamp()))
        return healed
