"""`Participant`: one replica's part in the rounds of a run, as the training loop uses it.

Per round there is at most one `publish` and one `close`. The work is done in `global_model`, `timing`, `contribute` and
`close_round`. Knows no training loop.

**Threads.** All of these objects have one owner at a time. It is the thread that calls the participant, except while a
round is in flight: from `publish(in_background=True)` or `close_beside_training` until `close` returns, they belong to
the background, which moves the base, the position, the carry and the times. Meanwhile the caller may use what is of
`OpenRound`, which does not move, and `close_beside_training`, `await_published`, `close`, `give_up` and `leave`. So
training never sees a round move between two inner steps: only `close` makes the next round the open one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Contribution, HeldoutSet
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.close_round import ClosedRound, RoundCloser
from diloco_orchestrator.replica.rounds.contribute import Contributor
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields
from diloco_orchestrator.replica.rounds.dealing import everything
from diloco_orchestrator.replica.rounds.global_model import GlobalModel, guard_state
from diloco_orchestrator.replica.rounds.inbox import RoundInbox
from diloco_orchestrator.replica.rounds.replica_buffers import ReplicaBuffers
from diloco_orchestrator.replica.rounds.segment_writer import SegmentWriter
from diloco_orchestrator.replica.rounds.snapshot_writer import SnapshotWriter
from diloco_orchestrator.replica.rounds.timing import RoundTiming
from diloco_orchestrator.replica.rounds.transfer import Transfer
from diloco_orchestrator.snapshots.layout import ModelFiles

FormVector = Callable[[], Vector]


@dataclass(frozen=True)
class OpenRound:
    """The position of the log that the training thread goes by: of the round that it takes part in."""

    round: int  # its number
    fragment: int  # index of the fragment that it synchronises
    roster: tuple[int, ...]  # the replicas that it waits for
    outer_step: int  # number of outer steps in its base
    closing: bool  # whether it is the closing one, which takes only scores
    stopped: bool  # whether the leg is over, so that no round is open

    @classmethod
    def of(cls, model: GlobalModel) -> "OpenRound":
        return cls(
            round=model.round,
            fragment=model.fragment,
            roster=model.roster,
            outer_step=model.position.outer_step,
            closing=model.closing,
            stopped=model.stopped,
        )


@dataclass(frozen=True)
class _InFlight:
    """A round that is carried out in the background, and the position before it."""

    open: OpenRound
    transfer: Transfer


class Participant:
    """Takes part in rounds, one call at a time. `Participant.join` makes one.

    A contribution to a round that was committed meanwhile is published all the same, so that no trained step is lost.
    """

    def __init__(self, model: GlobalModel, files: ModelFiles) -> None:
        self.model = model
        self.files = files
        self.timing = RoundTiming(model)
        self.contributor = Contributor(model, self.timing, model.requests.payloads)
        attempt, payloads = model.attempt, model.requests.payloads
        inbox = RoundInbox(attempt.store, attempt.background, payloads, attempt.authors, everything)
        self._closer = RoundCloser(model, self.timing, self.contributor, inbox)
        self._snapshots = SnapshotWriter(model, files)
        self.buffers = ReplicaBuffers(self.contributor.history, model, files)
        self._segments = SegmentWriter(model)
        self._in_flight: _InFlight | None = None
        self.contributor.recover()
        model.attempt.pulse.round = model.round

    @classmethod
    def join(
        cls,
        attempt: Attempt,
        parameters: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        files: ModelFiles,
        heldout: HeldoutSet | None = None,
    ) -> "Participant":
        """Agree on the first base with the other replicas and rebuild the newest one.

        `parameters`: the trainable parameters of this replica's model, any float dtype. `fragments`: their names, in
        name order. `heldout`: the held-out set that this replica scores; None if it scores nothing. Raises
        `ModelMismatch` if any of them is not the run's.
        """
        return cls(GlobalModel.join(attempt, parameters, fragments, files, heldout), files)

    @property
    def attempt(self) -> Attempt:
        return self.model.attempt

    @property
    def base(self) -> Base:
        """The base that the open round starts from."""
        return self.model.base

    @property
    def digest(self) -> str:
        """The digest of the base."""
        return self.model.digest

    @property
    def guard_state(self) -> Mapping[str, Any] | None:
        """The guard's state before the open round."""
        return guard_state(self.model)

    @property
    def position(self) -> rounds.Position:
        return self.model.position

    @property
    def open(self) -> OpenRound:
        """The open round, which stays the same while it is in flight."""
        return self._in_flight.open if self._in_flight else OpenRound.of(self.model)

    @property
    def outer_step(self) -> int:
        """Number of outer steps in the base."""
        return self.open.outer_step

    @property
    def round(self) -> int:
        """Number of the open round."""
        return self.open.round

    @property
    def roster(self) -> tuple[int, ...]:
        """The replicas that the open round waits for."""
        return self.open.roster

    @property
    def fragment(self) -> int:
        """Index of the fragment that the open round synchronises."""
        return self.open.fragment

    @property
    def closing(self) -> bool:
        """Whether the open round is the closing one, which takes only scores."""
        return self.open.closing

    @property
    def stopped(self) -> bool:
        """Whether the leg is over, so that no round is open."""
        return self.open.stopped

    @property
    def contribution(self) -> Contribution | None:
        """This replica's manifest of the open round, of whichever attempt came first; None if it has none."""
        return self.contributor.own

    # -- a round -------------------------------------------------------------------------------------------------

    def publish(self, form: FormVector, fields: ContributionFields, *, in_background: bool = False) -> None:
        """Contribute the pseudo-gradient that `form` returns: base - local, of the fragment that the open round moves.

        The vector is flat, in name order. The model's buffers go with it, as they are now. In the background `form` is
        called there, and the round is in flight until `close` returns: nothing that the vector is computed from may
        change until then.
        """
        fields = replace(fields, buffers=self.buffers.changed())
        if in_background:
            self._begin(lambda: self.contributor.contribute_delta(form(), fields))
        else:
            self.contributor.contribute_delta(form(), fields)

    def close_beside_training(self, then: Callable[[], None] = lambda: None, *, keep_average: bool = False) -> None:
        """Begin to close the open round in the background, unless that has begun, and to call `then` there afterwards.

        This replica has contributed, or is about to in the background. `keep_average`: as in `close`. Raises the error
        with which the background has ended, if it has: of publishing, of `close`, or of `then`.
        """
        flight = self._in_flight or self._begin(lambda: None)
        flight.transfer.raise_error()
        flight.transfer.close(lambda: self._close(then, keep_average))

    def await_published(self) -> None:
        """Block until a contribution published in the background is in the bucket. Raises the errors of publishing."""
        if self._in_flight is not None:
            self._in_flight.transfer.wait_published()

    def close(self, *, keep_average: bool = False) -> ClosedRound:
        """Commit the open round or wait for its commit, and take the base after it. Errors: `RoundCloser.close`.

        A round in flight is waited for. The next round's times begin here, when training can take its base.
        `keep_average`: return the average, which takes the memory of another fragment. For a round that is closed
        beside training, what `close_beside_training` was given counts.
        """
        self.attempt.pulse.phase = "waiting"
        flight = self._in_flight
        if flight is None:
            closed = self._close(keep_average=keep_average)
        else:
            flight.transfer.close(lambda: self._close(keep_average=keep_average))
            try:
                closed = flight.transfer.wait()
            finally:
                self._in_flight = None
            self.timing.open_round()
        self.attempt.pulse.round = self.round
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
        attempt, opened = self.attempt, OpenRound.of(self.model)
        self._in_flight = _InFlight(opened, Transfer(attempt.background, attempt.clock, opened.round, contribute))
        return self._in_flight

    def _close(self, then: Callable[[], None] = lambda: None, keep_average: bool = False) -> ClosedRound:
        self.model.keep_average = keep_average
        self._snapshots.wait()  # a snapshot is written of the base that closing steps in place
        closed = self._closer.close()
        self._segments.write_if_due()
        then()
        return closed

    def committed(self) -> bool:
        """Whether the open round was committed without waiting for this replica. One GET request."""
        return not self.stopped and self._closer.committed()

    def reopen_round(self, round_: int) -> None:
        """Rebuild the base and carry from when a closed round of this leg was open, to continue from there."""
        self.model.rebuild(until=round_ - 1)
        self.attempt.pulse.round = self.round
        self.timing.open_round()
        self.contributor.recover()

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
        last = self.model.last
        assert last is not None
        healed = self._snapshots.write_last()
        self._snapshots.write_offered()
        self._segments.wait()
        self.attempt.writer.create(rounds.result_of(last.commit, last.sha256, self.attempt.stamp()))
        return healed
