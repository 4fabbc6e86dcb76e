"""`TrainingSession`: one attempt's training: counts inner steps, opens and closes rounds, restores saved state.

`DiLoCoLoop` synchronises, `Participant` has the rounds. The user's training function sees a session as
`replica.context.ReplicaSession`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TypeVar

from diloco_orchestrator.errors import Preempted
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import Contribution, Progress
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.interface import ClosedRound, ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.attached_model import ModelParts
from diloco_orchestrator.replica.training.checkpoint import Checkpoint, ResumePoint, SavedState, resume_point
from diloco_orchestrator.replica.training.consumed_items import together
from diloco_orchestrator.replica.training.dealt_batches import DealtBatches
from diloco_orchestrator.replica.training.dealt_order import dealt_in
from diloco_orchestrator.replica.training.diloco_loop import DiLoCoLoop
from diloco_orchestrator.replica.training.follower import signal_state
from diloco_orchestrator.replica.training.guard_evidence import GuardEvidence
from diloco_orchestrator.replica.training.heldout_scorer import SIGN, ShownBase
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers, StepWatch
from diloco_orchestrator.replica.training.island import Island
from diloco_orchestrator.replica.training.observed_metrics import ObservedMetrics
from diloco_orchestrator.replica.training.position import TrainingPosition, drawn_by_ranks
from diloco_orchestrator.replica.training.round_hooks import RoundHooks
from diloco_orchestrator.replica.training.schedule_counts import catch_up, earlier_rates, go_back

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_MOST_ITEMS = 256  # training items of each kind on which a stranger's contribution is scored
_MOST_MANIFESTS = 3  # of this replica in which a schedule's steps are looked for; that of a partial round has too few


class TrainingSession:
    """The training of one attempt. `rounds`: the run's rounds, joined with the model `parts`.

    `island`: the ranks of this replica, of which this process is rank 0 and which it signals what to do.
    """

    def __init__(
        self,
        attempt: Attempt,
        rounds: Participant,
        parts: ModelParts,
        optimizers: InnerOptimizers,
        evidence: GuardEvidence,
        in_loop: str,
        stateful: Mapping[str, Any],
        island: Island,
    ) -> None:
        self.metrics = ObservedMetrics(in_loop)
        self.preempted = False
        self._attempt, self._rounds = attempt, rounds
        self._stateful = stateful
        self._attached, self._model = parts.attached, parts.attached.module
        self._optimizers, self._evidence = optimizers, evidence
        self._loop = DiLoCoLoop(parts.views, rounds, parts.schedule, self._fields)
        self._checkpoint = Checkpoint(attempt, rounds, self._loop, optimizers, stateful)
        self._first_rates = self._checkpoint.small.rates()  # as the training function made them
        self._island, self._has_others = island, island.ranks.ranks > 1
        self._hooks = optimizers.watch(self._before_step, self._count_step)
        self._watch = StepWatch(optimizers)
        self._unprocessed = 0  # inner steps that the loop has not counted yet
        self._training_since = attempt.clock.now()  # of the open round, once its base is scored
        seed = attempt.config.seed + 1 + attempt.replica_id
        self._position = TrainingPosition(self.metrics, seed, partial(dealt_in, stateful))
        self.hooks = RoundHooks(attempt, rounds, SIGN[in_loop])
        if evidence.set is not None:
            rounds.score_strangers_by(self._values_of)
        self._going = False  # between `begin` and the end
        self._has_contributed = False  # this attempt, to any round

    @property
    def round(self) -> int:
        """Number of the open round."""
        return self._rounds.open.round

    @property
    def stopped(self) -> bool:
        """Whether the run has stopped for all replicas."""
        return self._rounds.open.stopped

    def detach(self) -> None:
        """Remove the hooks that count optimizer steps; end a round in flight where it would wait for others."""
        self._rounds.give_up()
        for hook in self._hooks:
            hook.remove()

    @property
    def step_count(self) -> int:
        """Number of inner steps in all outer steps of the base, by whichever replicas, and in the open round."""
        steps = self._rounds.open.outer_step * self._attempt.config.round_steps
        return steps + self._loop.inner_step + self._unprocessed

    def begin(self) -> None:
        """Restore the state of this replica's newest manifest, open the round, and score its base."""
        try:
            self._resume()
            if self._has_others:
                self.hooks.add(lambda view: self._island.call("show", view))
            self._open_round()
            self._leave_if_asked()
            self._going = True
            self._end_if_stopped()
        except Preempted as notice:
            self._end_preempted(notice)
        self._signal_others()

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
        self._signal_others()
        return self._going

    def _signal_others(self) -> None:
        """Let the other ranks of this replica, which wait at this step boundary, continue or end."""
        if self._has_others:
            said = {"stopped": self.stopped, "preempted": self.preempted}
            signal_state(self._island.ranks, self._going, self.step_count, self.round, **said)

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """Batches until the run stops or this process is preempted; `step` is called between two batches."""
        if self._attempt.config.deal == "open":
            dealt = self._position.take_dealt(DealtBatches(self._attempt, data))
            if self._evidence.set is not None and self._evidence.items is not None:
                self._rounds.score_strangers_by(self._values_of, partial(self._dealt_values_of, dealt))
            while self._going:
                yield dealt.take(self.round, self._loop.inner_step, self.metrics.total_inner_steps)
                self.step()
            return
        cursor = self._position.take(data)
        while self._going:
            yield cursor.next()
            self.step()

    def _end_preempted(self, notice: Preempted) -> None:
        log.warning("%s", notice)
        self.preempted, self._going = True, False

    def _end_if_stopped(self) -> None:
        """After the run's stop: write the last snapshot and result if due, and load the last base."""
        if self.stopped:
            self._going = False
            if self._rounds.finish_leg():
                self._loop.load_base()

    # -- inner steps ---------------------------------------------------------------------------------------------

    def _count_step(self) -> None:
        """Record one inner step. It is processed later, because users call `observe` after the optimizer's step."""
        if not self._going:
            return
        self._unprocessed += 1
        if not self._watch.has_stepped:
            self._checkpoint.check()
        self._watch.stepped()
        self.metrics.count_step()
        self._attempt.pulse.inner_step = self._loop.inner_step + self._unprocessed

    def _before_step(self) -> None:
        """Process earlier inner steps that no step boundary has processed; called before an optimizer's step."""
        if self._unprocessed:
            self._process_steps()
            self._signal_others()

    def _process_steps(self) -> None:
        """Pass the recorded inner steps to the loop, which synchronises at a round's end."""
        while self._unprocessed:
            self._unprocessed -= 1
            closed = self._loop.after_inner_step()
            if closed is not None:
                outcome = self._outcome(closed)
                del closed  # it holds the average, which is as large as the model
                self._settle(*outcome)
                self._open_round()

    # -- rounds --------------------------------------------------------------------------------------------------

    def _open_round(self) -> None:
        """Score the base of a new round unless scored; take part in the final evaluation, which trains nothing."""
        self._write_snapshot_if_due()
        while not self.stopped:
            # A round with a contribution of an earlier attempt needs no scores, and the model is ahead of its base.
            if not self._loop.published:
                self._score()
            self._attempt.pulse.phase, self._attempt.pulse.inner_step = "training", 0
            if not self._rounds.open.final_evaluation:
                break
            self._rounds.publish_scores(self._fields())
            self._rounds.close()
        self._training_since = self._attempt.clock.now()
        self._catch_up()
        self.hooks.call_due()
        if self._has_others:
            self._island.call("opened", self.metrics.total_inner_steps)

    def _catch_up(self) -> None:
        """Let schedules in `stateful` make the steps of rounds that the run has taken without this replica, and take
        back those of rounds that were not applied.
        """
        if self.stopped:
            return
        round_steps, delay = self._attempt.config.round_steps, self._loop.schedule.delay
        history, small = self._rounds.history, self._checkpoint.small
        outer_step = self._rounds.open.outer_step
        newest = islice(history.before_repeated(), _MOST_MANIFESTS)
        own = ((manifest, steps * round_steps - delay) for manifest, steps in newest)
        rates = earlier_rates(own, None if outer_step else self._first_rates)
        moved = go_back(self._stateful, small, self.step_count, rates)
        published_at = outer_step * round_steps - delay
        moved |= catch_up(self._stateful, self.step_count, history.of_base, published_at)
        if moved and self._has_others:
            self._island.call("follow", small.encode(), {}, -1, 0)

    def _score(self) -> None:
        opened = self._rounds.open
        if self._evidence.is_of(opened):
            return
        self._attempt.pulse.phase = "scoring"
        with self._loop.showing_base(), self._rounds.buffers.showing_base():
            self._evidence.measure(ShownBase(self._model, self._attempt, opened, self._loop.holding))

    def _values_of(self, base: Base) -> list[float]:
        """Held-out scores of a base on the items that the open round deals to this replica."""
        self._attempt.pulse.phase = "scoring"
        with self._rounds.buffers.showing_base(), self._loop.holding(base):
            shown = ShownBase(self._model, self._attempt, self._rounds.open, self._loop.holding)
            values = self._evidence.values(shown)
        self._attempt.pulse.phase = "waiting"
        return values

    def _dealt_values_of(
        self, dealt: DealtBatches, base: Base, contribution: Contribution
    ) -> tuple[list[float], list[float]]:
        """Scores of a base on training items that the open round deals to a contribution's author and to others."""
        assert self._evidence.items is not None
        most = min(self._evidence.items_scored, _MOST_ITEMS)
        how = self._rounds.open.roster, self._evidence.items.items_of, most
        own, others = dealt.items_beside(contribution, *how)
        self._attempt.pulse.phase = "scoring"
        with self._rounds.buffers.showing_base(), self._loop.holding(base):
            values = self._evidence.values_of(self._model, [*own, *others])
        self._attempt.pulse.phase = "waiting"
        return values[: len(own)], values[len(own) :]

    def _end_round_early(self) -> None:
        """Between inner steps: apply rounds committed without this replica; if late, publish the steps taken so far."""
        if self._loop.published:
            return
        round_, trained = self.round, self._loop.inner_step
        if self._rounds.committed(if_due=True):
            self._cut()
            log.info("round %d went on without us, after %d inner steps; we are cut", round_, trained)
            self._rounds.announce()
            self._open_round()
        elif self._rounds.is_behind(trained, self._attempt.clock.now() - self._training_since):
            log.info("round %d: too slow for a whole round, contributing %d inner steps", round_, trained)
            self._synchronise()
            self._open_round()

    def _cut(self) -> None:
        """While the open round is committed already, contribute the steps so far, late, and continue from the next
        base.

        The late work is carried into the next contribution.
        """
        while True:
            self._synchronise()
            self._write_snapshot_if_due()
            if not self._rounds.committed():
                return

    def _synchronise(self) -> None:
        """Contribute the inner steps so far, which may be none, close the open round, and continue from its outcome.

        Where this attempt had nothing to publish, another attempt of this replica may have contributed to the round.
        """
        round_, continued = self.round, self._loop.published  # behind that attempt's contribution
        contribution, healed = self._outcome(self._loop.synchronise())
        if contribution is None and not continued:
            contribution = self._rounds.history.of(round_)
        self._settle(contribution, healed)

    def _outcome(self, closed: ClosedRound) -> tuple[Contribution | None, bool]:
        """The contribution of a closed round and whether the base was rebuilt with other bits.

        Raises `ConfigError` if replicas that share batches mostly draw them in another order. What strangers say of
        their data does not count.
        """
        invited = self._attempt.config.invited
        others = [manifest for manifest in closed.received if manifest.replica_id not in invited]
        self._position.compare_order(self._attempt.replica_id, others)
        return closed.contribution, closed.healed

    def _settle(self, contribution: Contribution | None, healed: bool) -> None:
        """Restore, after a round, the training state that fits its outcome.

        If another attempt wrote the contribution, that is the state in its manifest; after an abstention, the last
        finite one; after a rebuild that gave another base, the one trained on the right base. The data cursor stays, so
        that no batch is repeated.
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
        """Continue after a closed round like the other attempt of this replica, which contributed to it.

        Local parameters saved with an earlier contribution are not used after an abstention or a contribution from a
        wrong base: that attempt has loaded the base.
        """
        state = self._checkpoint.read_newest()
        local = state.local if state and state.contribution == contribution else {}
        if local and self._loop.schedule.overlaps:  # that attempt has trained between its contribution and the close
            self._continue_from(ResumePoint(contribution.round, progress, state, local))
            self._loop.continue_after_publishing()
        else:
            self._continue_from(ResumePoint(self.round, progress, state, local, frozenset({contribution.fragment})))

    def _go_back(self, state: SavedState | None, reset: Callable[[], None]) -> None:
        """Reset the model to the base, its buffers to the last published ones, and the optimizers to `state`.

        `reset`: called instead if `state` is None.
        """
        self._loop.load_base()
        self._rounds.buffers.resume()
        self._optimizers.zero_grad()
        if state is None:
            reset()
        else:
            self._checkpoint.go_back(state)
        self._send_state()

    def _write_snapshot_if_due(self) -> None:
        if self._rounds.write_snapshot_if_due():  # its replay gave another base
            self._go_back(self._checkpoint.read_newest(), self._checkpoint.reset)

    def _fields(self) -> ContributionFields:
        """The training loop's part of the manifest for the open round. Resets the counts of steps and metrics."""
        self._attached.check_unchanged()
        if not self._has_contributed and (self._evidence.set is not None or self.metrics.metric == "reward"):
            self.metrics.warn_of_never_observed()
        self._has_contributed = True
        others = self._island.call("metrics")[1:] if self._has_others else []
        self.metrics.add_of_ranks([(each.values, each.tokens) for each in others])
        if self.round == 1:
            self.metrics.warn_of_sequence_sums(self._attempt.config.guard.kl_hard_stop)
        local = None if self._rounds.open.final_evaluation else self._model
        fields = self._evidence.added_to(self.metrics.take(), local)
        return replace(
            fields,
            consumed=together(fields.consumed, *(each.consumed for each in others)),
            progress=self._position.progress(self._checkpoint.small.encode(), [each.drawn for each in others]),
            state=self._checkpoint.encode_if_due(),
        )

    # -- beginning and leaving -----------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Restore the state of this replica's newest manifest in the bucket."""
        if self.stopped:
            return
        point = resume_point(self._attempt, self._rounds, self._checkpoint, overlaps=self._loop.schedule.overlaps)
        self._continue_from(point)
        if point.already_contributed:
            log.info("round %d: an earlier attempt of this replica has contributed to it", point.round)
            if point.local:
                self._loop.continue_after_publishing()
            else:
                self._rounds.close()
                self._loop.load_base()
        self._rounds.announce()

    def _continue_from(self, point: ResumePoint) -> None:
        """Load the saved state at `point`: data cursor, generators, counters, optimizer, buffers, parameters."""
        self._checkpoint.resume(point.progress, point.state, point.rates)
        self._position.continue_from(point.progress)
        if point.round < self.round:
            self._rounds.reopen(point.round)
        if point.local:
            self._loop.load_local(point.local, point.from_base)
        if point.progress is not None:
            cursor = point.progress.cursor
            place = int(cursor.get("epoch", 0)), int(cursor.get("batches", 0))  # type: ignore[arg-type]
            self._send_state(*place, drawn_by_ranks(cursor))

    def _send_state(self, epoch: int = -1, batches: int = 0, drawn: Sequence[Mapping[str, Any]] = ()) -> None:
        """Send the other ranks stateful objects, learning rates and, unless negative, position in the data."""
        if self._has_others:
            small = self._checkpoint.small
            self._island.call("follow", small.encode(), small.large(), epoch, batches, drawn)

    def _leave_if_asked(self) -> None:
        if not self.stopped and self._attempt.should_leave():
            self._leave()

    def _leave(self) -> NoReturn:
        """Publish the steps so far as a partial contribution if a round may count one, and raise `Preempted`."""
        attempt, rounds, trained = self._attempt, self._rounds, self._loop.inner_step
        whole = attempt.config.round_steps
        notice = f"asked to leave in mid-round {self.round}, after {trained} of {whole} inner steps; "
        if self._loop.published:
            rounds.await_published()
            raise Preempted(notice + f"{self.metrics.inner_steps} of them after its pseudo-gradient was published.")
        if rounds.elastic and trained:
            self._loop.publish_part()
        if rounds.own is None or rounds.own.attempt != attempt.number:
            raise Preempted(notice + "they are not published, the next attempt takes them again.")
        raise Preempted(notice + f"they are published as they are ({rounds.own.kind}).")
