"""`Participant`: one replica's part in the rounds of a run, as the training loop uses it.

Per round there is at most one `publish` and one `close`. The work is done in `global_model`, `timing`, `contribute` and
`close_round`. Knows no training loop.
"""

from collections.abc import Mapping, Sequence

import torch

from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.replica.rounds.close_round import ClosedRound, RoundCloser
from diloco_orchestrator.replica.rounds.contribute import Contributor
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields
from diloco_orchestrator.replica.rounds.global_model import GlobalModel
from diloco_orchestrator.replica.rounds.inbox import RoundInbox
from diloco_orchestrator.replica.rounds.segment_writer import SegmentWriter
from diloco_orchestrator.replica.rounds.snapshot_writer import SnapshotWriter
from diloco_orchestrator.replica.rounds.timing import RoundTiming
from diloco_orchestrator.replica.rounds.transfer import Transfer
from diloco_orchestrator.snapshots.layout import ModelFiles


class Participant:
    """Takes part in rounds, one call at a time. `Participant.join` makes one.

    A contribution to a round that was committed meanwhile is published all the same, so that no trained step is lost.
    """

    def __init__(self, model: GlobalModel, files: ModelFiles) -> None:
        self.model = model
        self.timing = RoundTiming(model)
        cache = PayloadCache()
        self.contributor = Contributor(model, self.timing, cache)
        inbox = RoundInbox(model.attempt.store, model.attempt.background, cache)
        self._closer = RoundCloser(model, self.timing, self.contributor, inbox)
        self._snapshots = SnapshotWriter(model, files)
        self._segments = SegmentWriter(model)
        self._transfer: Transfer | None = None  # publishes the open round's contribution in the background
        self.contributor.recover()
        model.attempt.pulse.round = model.round

    @classmethod
    def join(
        cls,
        attempt: Attempt,
        parameters: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        files: ModelFiles,
    ) -> "Participant":
        """Agree on the first base with the other replicas and rebuild the newest one.

        `parameters`: the trainable parameters of this replica's model, any float dtype. `fragments`: their names, in
        name order. Raises `ModelMismatch` if either is not the run's.
        """
        return cls(GlobalModel.join(attempt, parameters, fragments, files), files)

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
    def position(self) -> rounds.Position:
        return self.model.position

    @property
    def outer_step(self) -> int:
        """Number of outer steps in the base."""
        return self.model.position.outer_step

    @property
    def round(self) -> int:
        """Number of the open round."""
        return self.model.round

    @property
    def roster(self) -> tuple[int, ...]:
        """The replicas that the open round waits for."""
        return self.model.roster

    @property
    def fragment(self) -> int:
        """Index of the fragment that the open round synchronises."""
        return self.model.fragment

    @property
    def closing(self) -> bool:
        """Whether the open round is the closing one, which takes only scores."""
        return self.model.closing

    @property
    def stopped(self) -> bool:
        """Whether the leg is over, so that no round is open."""
        return self.model.stopped

    @property
    def contribution(self) -> Contribution | None:
        """This replica's manifest of the open round, of whichever attempt came first; None if it has none."""
        return self.contributor.own

    # -- a round -------------------------------------------------------------------------------------------------

    def publish(self, pseudo_gradient: Vector, fields: ContributionFields, *, in_background: bool = False) -> None:
        """Contribute a pseudo-gradient, base - local, of the fragment that the open round moves.

        `pseudo_gradient`: flat, in name order. In the background the transfer overlaps with training, and `close` waits
        for it; nothing that the pseudo-gradient is computed from may change until then.
        """
        if not in_background:
            self.contributor.contribute_delta(pseudo_gradient, fields)
            return
        self._transfer = Transfer(
            self.attempt.background,
            lambda: self.contributor.contribute_delta(pseudo_gradient, fields),
            poll=self._closer.poll,
            poll_s=self.attempt.config.timing.poll_s,
        )

    def await_published(self) -> None:
        """Block until a contribution published in the background is in the bucket. Raises the errors of publishing."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()

    def close(self, *, keep_average: bool = False) -> ClosedRound:
        """Commit the open round or wait for its commit, and take the base after it. Errors: `RoundCloser.close`.

        `keep_average`: return the average, which takes the memory of another fragment.
        """
        self.await_published()
        self.model.keep_average = keep_average
        closed = self._closer.close()
        self._segments.write_if_due()
        return closed

    def committed(self) -> bool:
        """Whether the open round was committed without waiting for this replica. One GET request."""
        return not self.stopped and self._closer.committed()

    def reopen_round(self, round_: int) -> None:
        """Rebuild the base and carry from when a closed round of this leg was open, to continue from there."""
        self.model.rebuild(until=round_ - 1)
        self.timing.open_round()
        self.contributor.recover()

    # -- snapshots and the end -----------------------------------------------------------------------------------

    def write_snapshot_if_due(self) -> bool:
        """Write the last round's snapshot if it is due and this replica's turn.

        Returns whether a replay before it gave another base, which this replica holds then.
        """
        return self._snapshots.write_if_due()

    def finish_leg(self) -> None:
        """After the stop: write the last base's snapshot and the leg's result, unless they exist."""
        last = self.model.last
        assert last is not None
        self._snapshots.write_last()
        self._segments.wait()
        result = rounds.result_of(last.commit, last.sha256, self.attempt.stamp())
        self.attempt.store.create(keys.result(result.leg), result.to_bytes())
