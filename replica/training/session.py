"""`TrainingSession`: one attempt's training. Counts inner steps, opens and closes rounds, resumes.

Synchronisation is left to `DiLoCoLoop`, rounds to `Participant`. The user's training function sees a session as
`replica.context.ReplicaSession`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from diloco_orchestrator.errors import Preempted
from diloco_orchestrator.protocol.records import Contribution, Progress
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.replica.rounds.close_round import ClosedRound
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.checkpoint import Checkpoint, SavedState
from diloco_orchestrator.replica.training.data_cursor import DataCursor
from diloco_orchestrator.replica.training.diloco_loop import DiLoCoLoop, trainable_parameters
from diloco_orchestrator.replica.training.fp32_shadow import views_of
from diloco_orchestrator.replica.training.fragments import SyncSchedule, split_fragments
from diloco_orchestrator.replica.training.guard_evidence import GuardEvidence
from diloco_orchestrator.replica.training.resume import ResumePoint, resume_point
from diloco_orchestrator.replica.training.round_metrics import RoundMetrics
from diloco_orchestrator.snapshots.layout import ModelFiles

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class TrainingSession:
    """The training of one attempt. The constructor joins the run; raises `ModelMismatch` for another model."""

    def __init__(
        self,
        attempt: Attempt,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        evidence: GuardEvidence,
        in_loop: str,
        tokenizer: Any,
        stateful: Mapping[str, Any],
    ) -> None:
        config, parameters = attempt.config, trainable_parameters(model)
        names = split_fragments(parameters, config.fragments)
        schedule = SyncSchedule(
            config.sync_every, config.fragments, config.fragment_sync_delay, config.fragment_update_alpha
        )
        self.metrics = RoundMetrics(in_loop)
        self.preempted = False
        self._attempt = attempt
        self._model = model
        self._optimizer = optimizer
        self._evidence = evidence
        self._participant = Participant.join(attempt, parameters, names, ModelFiles.of(model, tokenizer), evidence.set)
        views = views_of(parameters, names, mixes=schedule.alpha > 0, in_background=schedule.delay > 0)
        self._loop = DiLoCoLoop(views, self._participant, schedule, self._fields)
        self._checkpoint = Checkpoint(self._participant, self._loop, optimizer, stateful)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._process_steps()),
            optimizer.register_step_post_hook(lambda *_: self._count_step()),
        ]
        self._unprocessed = 0  # inner steps that the loop has not counted yet
        self._cursor: DataCursor | None = None

    @property
    def round(self) -> int:
        """Number of the open round."""
        return self._participant.round

    @property
    def stopped(self) -> bool:
        """Whether the leg is over for all replicas."""
        return self._participant.stopped

    def detach(self) -> None:
        """Remove the hooks that count the optimizer's steps; give up a round in flight where it would wait."""
        self._participant.give_up()
        for hook in self._hooks:
            hook.remove()

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """Batches until the leg stops or this process is preempted; rounds are closed between two batches."""
        self._cursor = DataCursor(data)
        try:
            self._resume()
            self._open_round()
            while not self.stopped:
                if self._attempt.should_leave():
                    self._leave()
                yield self._cursor.next()
                self._process_steps()
                self._end_round_early()
        except Preempted as notice:
            log.warning("%s", notice)
            self.preempted = True
            return
        if self._participant.finish_leg():
            self._loop.load_base()

    # -- inner steps ---------------------------------------------------------------------------------------------

    def _count_step(self) -> None:
        """Record one inner step. It is processed later, because `observe` is called after the optimizer's step."""
        self._unprocessed += 1
        self.metrics.count_step()
        self._attempt.pulse.inner_step = self._loop.inner_step + self._unprocessed

    def _process_steps(self) -> None:
        """Pass the recorded inner steps to the loop, which synchronises at a round's end."""
        while self._unprocessed:
            self._unprocessed -= 1
            closed = self._loop.after_inner_step()
            if closed is not None:
                outcome = _outcome(closed)
                del closed  # it holds the average, which is as large as the model
                self._settle(*outcome)
                self._open_round()

    # -- rounds --------------------------------------------------------------------------------------------------

    def _open_round(self) -> None:
        """Score the base of a new round unless it is scored; take part in the closing round, which has no training."""
        self._write_snapshot_if_due()
        while not self.stopped:
            # A round with a contribution of an earlier attempt needs no scores, and the model is ahead of its base.
            if not self._loop.published:
                self._score()
            self._attempt.pulse.phase, self._attempt.pulse.inner_step = "training", 0
            if not self._participant.closing:
                return
            self._participant.contributor.contribute_scores(self._fields())
            self._participant.close()

    def _score(self) -> None:
        if self._evidence.is_of(self._participant):
            return
        self._attempt.pulse.phase = "scoring"
        with self._loop.showing_base():
            self._evidence.measure(self._model, self._participant)

    def _end_round_early(self) -> None:
        """Between inner steps: follow rounds committed without this replica, or publish a partial contribution if
        behind.
        """
        if self._loop.published:
            return
        round_, trained = self.round, self._loop.inner_step
        if self._participant.timing.poll_due() and self._cut():
            log.info("round %d went on without us, after %d inner steps; we are cut", round_, trained)
            self._participant.contributor.announce()
            self._open_round()
        elif self._participant.timing.is_behind(trained):
            log.info("round %d: too slow for a whole round, contributing %d inner steps", round_, trained)
            self._settle(*_outcome(self._loop.synchronise()))
            self._open_round()

    def _cut(self) -> bool:
        """Contribute what was trained to every round that is committed already, and take the base after it.

        The work is carried into the next contribution. Returns whether there was such a round.
        """
        before = self.round
        while self._participant.committed():
            self._settle(*_outcome(self._loop.synchronise()))
            self._write_snapshot_if_due()
        return self.round > before

    def _settle(self, contribution: Contribution | None, healed: bool) -> None:
        """After a round: continue from its manifest if another attempt wrote that; go back after an abstention, to
        finite values, and after a rebuild that gave another base, to what was trained on the right one.

        The data cursor stays, so that no batch is repeated.
        """
        if contribution is not None and contribution.attempt != self._attempt.number:
            self._attempt.check_superseded()
            if contribution.progress is not None:  # else an announcement of being back, not training
                self._continue_after(contribution, contribution.progress)
        if healed:
            self._go_back(self._checkpoint.read_newest(), self._checkpoint.reset)
        elif contribution is not None and contribution.kind == "abstention" and contribution.progress is not None:
            saved = self._checkpoint.read_newest() if self._attempt.config.saves_state == "round" else None
            self._go_back(saved, self._checkpoint.reset_not_finite)

    def _continue_after(self, contribution: Contribution, progress: Progress) -> None:
        """Continue after a closed round as the attempt does that contributed to it in place of this one."""
        state = self._checkpoint.read_newest()
        local = state.local if state else {}
        if local and self._loop.schedule.overlaps:  # that attempt has trained between its contribution and the close
            self._continue_from(ResumePoint(contribution.round, progress, state, local))
            self._loop.continue_after_publishing()
        else:
            self._continue_from(ResumePoint(self.round, progress, state, local, frozenset({contribution.fragment})))

    def _go_back(self, state: SavedState | None, reset: Callable[[], None]) -> None:
        """Reset the model to the base, and the inner optimizer to a saved state, or by `reset` where none is saved."""
        self._loop.load_base()
        self._optimizer.zero_grad()
        if state is None:
            reset()
        else:
            self._checkpoint.load(state)

    def _write_snapshot_if_due(self) -> None:
        if self._participant.write_snapshot_if_due():  # its replay gave another base
            self._go_back(self._checkpoint.read_newest(), self._checkpoint.reset)

    def _fields(self) -> ContributionFields:
        """The fields of this replica's contribution to the open round beside the pseudo-gradient. Resets the counts."""
        assert self._cursor is not None
        seen = self.metrics
        steps, tokens = seen.total_inner_steps, seen.total_tokens
        progress = Progress(cursor=self._cursor.position(), rng=rng.capture(), inner_steps=steps, tokens=tokens)
        if self.round == 1:
            seen.warn_of_sequence_sums(self._attempt.config.guard.kl_hard_stop)
        fields = ContributionFields(
            steps=seen.inner_steps,
            tokens=seen.tokens,
            in_loop=seen.in_loop(),
            scores=self._evidence.scores,
            local_scores=() if self._participant.closing else self._evidence.local_scores(self._model),
            metrics={**seen.metrics(), **self._evidence.metrics()},
            consumed=self._evidence.consumed(),
            progress=progress,
            state=self._checkpoint.encode_if_due(),
        )
        seen.begin_round()
        return fields

    # -- beginning and leaving -----------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Continue from this replica's newest manifest in the bucket."""
        if self.stopped:
            return
        point = resume_point(self._participant, self._checkpoint, overlaps=self._loop.schedule.overlaps)
        self._continue_from(point)
        if point.already_contributed:
            log.info("round %d: an earlier attempt of this replica has contributed to it", point.round)
            if point.local:
                self._loop.continue_after_publishing()
            else:
                self._participant.close()
                self._loop.load_base()
        self._participant.contributor.announce()

    def _continue_from(self, point: ResumePoint) -> None:
        """Load cursor, random generators, counters, optimizer and local parameters from a resume point."""
        assert self._cursor is not None
        if point.progress is None:
            # Data order and dropout differ between replicas from here on; the model was built from the same seed.
            rng.seed_all(self._attempt.config.seed + 1 + self._attempt.replica_id)
        else:
            self._cursor.seek(point.progress.cursor)
            rng.restore(point.progress.rng)
            self.metrics.resume(point.progress)
        if point.state is not None:
            self._checkpoint.load(point.state)
        if point.round < self.round:
            self._participant.reopen_round(point.round)
        if point.local:
            self._loop.load_local(point.local, point.from_base)

    def _leave(self) -> None:
        """Publish a partial contribution if a round may count one, and raise `Preempted`."""
        trained, whole = self._loop.inner_step, self._attempt.config.round_steps
        notice = f"asked to leave in mid-round {self.round}, after {trained} of {whole} inner steps; "
        if self._loop.published:
            self._participant.await_published()
            raise Preempted(notice + f"{self.metrics.inner_steps} of them after its pseudo-gradient was published.")
        if self._participant.timing.elastic and trained:
            self._loop.publish_part()
        contribution = self._participant.contribution
        if contribution is None or contribution.attempt != self._attempt.number:
            raise Preempted(notice + "they are not published, the next attempt takes them again.")
        raise Preempted(notice + f"they are published as they are ({contribution.kind}).")


def _outcome(closed: ClosedRound) -> tuple[Contribution | None, bool]:
    """What a session needs of a closed round, without the average."""
    return closed.contribution, closed.healed
