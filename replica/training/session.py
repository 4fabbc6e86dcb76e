"""`TrainingSession`: one attempt's training. Counts inner steps, opens and closes rounds, resumes.

Synchronisation is left to `DiLoCoLoop`, rounds to `Participant`. The user's training function sees a session as
`replica.context.ReplicaSession`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import Preempted
from diloco_orchestrator.protocol.records import Contribution, Progress
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.close_round import ClosedRound
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.attached_model import AttachedModel
from diloco_orchestrator.replica.training.checkpoint import Checkpoint, ResumePoint, SavedState, resume_point
from diloco_orchestrator.replica.training.diloco_loop import DiLoCoLoop
from diloco_orchestrator.replica.training.exact_adapters import ExactAdapters
from diloco_orchestrator.replica.training.fp32_shadow import Fp32View, views_of
from diloco_orchestrator.replica.training.fragments import SyncSchedule, split_fragments
from diloco_orchestrator.replica.training.guard_evidence import GuardEvidence
from diloco_orchestrator.replica.training.heldout_scorer import SIGN
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers, StepWatch
from diloco_orchestrator.replica.training.position import TrainingPosition
from diloco_orchestrator.replica.training.round_hooks import RoundHooks
from diloco_orchestrator.replica.training.round_metrics import RoundMetrics
from diloco_orchestrator.snapshots.layout import ModelFiles

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class TrainingSession:
    """The training of one attempt. The constructor joins the run; raises `ModelMismatch` for another model."""

    def __init__(
        self,
        attempt: Attempt,
        model: AttachedModel,
        optimizers: InnerOptimizers,
        evidence: GuardEvidence,
        in_loop: str,
        tokenizer: Any,
        stateful: Mapping[str, Any],
    ) -> None:
        config, parameters = attempt.config, model.parameters
        model.check_optimized(optimizers, stateful)
        names = split_fragments(parameters, config.fragments)
        schedule = SyncSchedule(
            config.sync_every, config.fragments, config.fragment_sync_delay, config.fragment_update_alpha
        )
        self.metrics = RoundMetrics(in_loop)
        self.preempted = False
        self._attempt, self._attached, self._model = attempt, model, model.module
        self._optimizers, self._evidence = optimizers, evidence
        files, views = _files_and_views(config, model, names, schedule, tokenizer)
        self._participant = Participant.join(attempt, parameters, names, files, evidence.set)
        self._loop = DiLoCoLoop(views, self._participant, schedule, self._fields)
        self._checkpoint = Checkpoint(self._participant, self._loop, optimizers, stateful)
        self._hooks = optimizers.watch(self._process_steps, self._count_step)
        self._watch = StepWatch(optimizers)
        self._unprocessed = 0  # inner steps that the loop has not counted yet
        self._position = TrainingPosition(self.metrics, config.seed + 1 + attempt.replica_id)
        self.hooks = RoundHooks(self._participant, SIGN[in_loop])
        self._going = False  # between `begin` and the end
        self._has_contributed = False  # this attempt, to any round

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

    @property
    def step_count(self) -> int:
        """Inner steps of all outer steps in the base, whoever took them, and of the open round."""
        steps = self._participant.outer_step * self._attempt.config.round_steps
        return steps + self._loop.inner_step + self._unprocessed

    def begin(self) -> None:
        """Continue from this replica's newest manifest, and open the round. Scores its base."""
        try:
            self._resume()
            self._open_round()
            self._leave_if_asked()
            self._going = True
            self._end_if_stopped()
        except Preempted as notice:
            self._end_preempted(notice)

    def step(self) -> bool:
        """Process the optimizer steps taken since the last call; rounds are closed here. False: training has ended.

        Raises `ConfigError` after many calls without a single step of the attached optimizer.
        """
        if not self._going:
            return False
        try:
            self._process_steps()
            self._end_round_early()
            self._leave_if_asked()
            self._end_if_stopped()
        except Preempted as notice:
            self._end_preempted(notice)
        if self._going:
            self._watch.batch_done()
        return self._going

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """Batches until the leg stops or this process is preempted; `step` is called between two batches."""
        cursor = self._position.take(data)
        while self._going:
            yield cursor.next()
            self.step()

    def _end_preempted(self, notice: Preempted) -> None:
        log.warning("%s", notice)
        self.preempted, self._going = True, False

    def _end_if_stopped(self) -> None:
        """After the leg's stop: write what is written then, and hold the last base."""
        if self.stopped:
            self._going = False
            if self._participant.finish_leg():
                self._loop.load_base()

    # -- inner steps ---------------------------------------------------------------------------------------------

    def _count_step(self) -> None:
        """Record one inner step. It is processed later, because `observe` is called after the optimizer's step."""
        if not self._going:
            return
        self._unprocessed += 1
        self._watch.stepped()
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
                break
            self._participant.contributor.contribute_scores(self._fields())
            self._participant.close()
        self.hooks.tell()

    def _score(self) -> None:
        if self._evidence.is_of(self._participant):
            return
        self._attempt.pulse.phase = "scoring"
        with self._loop.showing_base(), self._participant.buffers.showing_base():
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
        """Continue after a closed round as the attempt does that contributed to it in place of this one.

        Local parameters that it saved with an earlier contribution are not those after this one: after an abstention,
        or a contribution from a wrong base, that attempt has taken the base.
        """
        state = self._checkpoint.read_newest()
        local = state.local if state and state.contribution == contribution else {}
        if local and self._loop.schedule.overlaps:  # that attempt has trained between its contribution and the close
            self._continue_from(ResumePoint(contribution.round, progress, state, local))
            self._loop.continue_after_publishing()
        else:
            self._continue_from(ResumePoint(self.round, progress, state, local, frozenset({contribution.fragment})))

    def _go_back(self, state: SavedState | None, reset: Callable[[], None]) -> None:
        """Reset model, buffers and inner optimizer: to the base, the newest own ones, a saved state or by `reset`."""
        self._loop.load_base()
        self._participant.buffers.resume()
        self._optimizers.zero_grad()
        if state is None:
            reset()
        else:
            self._checkpoint.go_back(state)

    def _write_snapshot_if_due(self) -> None:
        if self._participant.write_snapshot_if_due():  # its replay gave another base
            self._go_back(self._checkpoint.read_newest(), self._checkpoint.reset)

    def _fields(self) -> ContributionFields:
        """The fields of this replica's contribution to the open round beside the pseudo-gradient. Resets the counts."""
        self._attached.check_unchanged()
        if not self._has_contributed and (self._evidence.set is not None or self.metrics.metric == "reward"):
            self.metrics.warn_of_never_observed()
        self._has_contributed = True
        if self.round == 1:
            self.metrics.warn_of_sequence_sums(self._attempt.config.guard.kl_hard_stop)
        return replace(
            self._evidence.added_to(self.metrics.take(), None if self._participant.closing else self._model),
            progress=self._position.progress(self._checkpoint.small.encode()),
            state=self._checkpoint.encode_if_due(),
        )

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
        """Load cursor, random generators, counters, optimizer, buffers and local parameters from a resume point."""
        self._checkpoint.resume(point.progress, point.state)
        self._position.continue_from(point.progress)
        if point.round < self.round:
            self._participant.reopen_round(point.round)
        if point.local:
            self._loop.load_local(point.local, point.from_base)

    def _leave_if_asked(self) -> None:
        if not self.stopped and self._attempt.should_leave():
            _leave(self._participant, self._loop, self.metrics.inner_steps)


def _files_and_views(
    config: RunConfig, model: AttachedModel, names: Sequence[Sequence[str]], schedule: SyncSchedule, tokenizer: Any
) -> tuple[ModelFiles, Sequence[Fp32View]]:
    """What snapshots need of a model, and a view of each fragment."""
    views = views_of(model.parameters, names, mixes=schedule.alpha > 0, in_background=schedule.delay > 0)
    if config.adapters == "mean":
        return ModelFiles.of(model.module, tokenizer), views
    exact = ExactAdapters(model.module, model.parameters)
    return exact.model_files(tokenizer), [exact.view(views[0])]


def _leave(participant: Participant, loop: DiLoCoLoop, steps: int) -> NoReturn:
    """Publish a partial contribution if a round may count one, and raise `Preempted`.

    `steps`: inner steps since the last contribution.
    """
    attempt, trained = participant.attempt, loop.inner_step
    whole = attempt.config.round_steps
    notice = f"asked to leave in mid-round {participant.round}, after {trained} of {whole} inner steps; "
    if loop.published:
        participant.await_published()
        raise Preempted(notice + f"{steps} of them after its pseudo-gradient was published.")
    if participant.timing.elastic and trained:
        loop.publish_part()
    contribution = participant.contribution
    if contribution is None or contribution.attempt != attempt.number:
        raise Preempted(notice + "they are not published, the next attempt takes them again.")
    raise Preempted(notice + f"they are published as they are ({contribution.kind}).")


def _outcome(closed: ClosedRound) -> tuple[Contribution | None, bool]:
    """What a session needs of a closed round, without the average."""
    return closed.contribution, closed.healed
