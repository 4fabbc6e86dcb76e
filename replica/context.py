"""What the user's training function touches: `ctx`, `ctx.attach(...)`, `replica.batches(...)`, `replica.observe(...)`.

Ties the training loop to the rounds: scores the base at a round's opening, counts inner steps, lets torchft's loop
synchronise between two batches, and carries cursor and random state in every manifest.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from pydantic import JsonValue

from diloco_orchestrator.errors import ConfigError, Preempted, unknown_name
from diloco_orchestrator.protocol.records import Progress, Score
from diloco_orchestrator.replica.interop.torchft import ObjectStoreManager
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.checkpoint import OwnState, Saved
from diloco_orchestrator.replica.training.data_cursor import DataCursor
from diloco_orchestrator.replica.training.heldout_scorer import SIGN, HeldoutFn, Scorer
from diloco_orchestrator.replica.training.outer_loop import make_diloco_outer_loop
from diloco_orchestrator.replica.training.round_metrics import Observations

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class ReplicaContext:
    """Handed to the training function."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.session: Session | None = None

    @property
    def replica_id(self) -> int:
        return self._attempt.replica_id

    @property
    def replicas(self) -> int:
        return self._attempt.config.replicas

    @property
    def seed(self) -> int:
        return self._attempt.config.seed

    @property
    def args(self) -> dict[str, JsonValue]:
        """What `launch(args=...)` or `--arg k=v` gave."""
        return dict(self._attempt.config.args)

    @property
    def heldout_items(self) -> Sequence[Any]:
        """The held-out items given to `launch(heldout_items=...)`."""
        return self._attempt.config.heldout_items

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        heldout: HeldoutFn | None = None,
        heldout_items: Sequence[Any] | None = None,
        in_loop: str = "loss",
        tokenizer: Any = None,
        stateful: Mapping[str, Any] | None = None,
    ) -> "Session":
        """Join the run with this model: loads the newest base into it.

        Args:
            model: its `requires_grad` parameters are trained together; buffers stay local.
            optimizer: the inner optimizer.
            heldout: `heldout(model, items)` gives one number per item, mean nats per token or reward, as `in_loop`
                says. Without it the kill-switch is off.
            heldout_items: the whole set, the same on all replicas; each scores its share. Default: `ctx.heldout_items`.
            in_loop: what `observe` brings and `heldout` measures: "loss" or "reward".
            tokenizer: saved beside the model in snapshots.
            stateful: what else a restarted replica goes on with, by name: objects with `state_dict` and
                `load_state_dict`, such as a learning-rate scheduler.
        """
        if self.session is not None:
            raise ConfigError("attach was called twice: one replica trains one model.")
        if in_loop not in SIGN:
            raise ConfigError(unknown_name("in_loop", in_loop, SIGN))
        scorer = None
        if heldout is not None:
            items = self.heldout_items if heldout_items is None else heldout_items
            scorer = Scorer(heldout, items, self.replicas, in_loop)
        elif self.replica_id == 0:
            log.warning("no heldout function was given: the kill-switch is off")
        self.session = Session(self._attempt, model, optimizer, scorer, in_loop, tokenizer, stateful or {})
        return self.session


class _StepSignal(torch.optim.Optimizer):
    """An optimizer that moves nothing: its hooks let torchft synchronise between two batches, after `observe`."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Tell torchft that one inner step is done."""


class Session:
    """One attempt's training. A context manager; leaving it early leaves the open round to the next attempt."""

    def __init__(
        self,
        attempt: Attempt,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scorer: Scorer | None,
        in_loop: str,
        tokenizer: Any,
        stateful: Mapping[str, Any],
    ) -> None:
        self._attempt = attempt
        self._model = model
        self._optimizer = optimizer
        self._scorer = scorer
        self._observations = Observations(in_loop)
        self._manager = ObjectStoreManager(attempt, self._report)
        self._signal = _StepSignal([torch.zeros(())], {})
        self._loop = make_diloco_outer_loop(
            model,
            self._signal,
            self._manager,
            attempt.config.sync_every,
            fragments=attempt.config.fragments,
            fragment_sync_delay=attempt.config.fragment_sync_delay,
            fragment_update_alpha=attempt.config.fragment_update_alpha,
            tokenizer=tokenizer,
        )
        self._participant: Participant = self._manager.participant
        self._state = OwnState(self._participant, self._loop, optimizer, stateful)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._signal_steps()),
            optimizer.register_step_post_hook(lambda *_: self._count_step()),
        ]
        self._unsignalled = 0  # inner steps that torchft has not been told of
        self._inner_steps = 0
        self._reported_steps = 0  # of them, those that a manifest told of
        self._relived = 0  # the round whose answer by an earlier attempt this one goes on from
        self._cursor: DataCursor | None = None
        self._scores: tuple[Score, ...] = ()
        self._scored: tuple[str, tuple[int, ...]] = ("", ())  # the base that `_scores` are of, and the roster
        self._entered = False
        self.preempted = False

    def __enter__(self) -> Self:
        self._entered = True
        self._loop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()

    # -- what the training loop calls ----------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The open round."""
        return self._participant.round

    @property
    def stopped(self) -> bool:
        """Whether the run is over for everybody."""
        return self._participant.stopped

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """Batches until the run completes or halts, or this process is asked to leave.

        `data` starts again at its end. Outer steps happen between two batches, so take at most one optimizer step per
        batch (fewer is fine); with more, the one after an outer step uses gradients from before it.
        """
        if not self._entered:
            raise ConfigError("nothing is synchronised yet: write `with ctx.attach(...) as replica:` around the loop.")
        if self._cursor is not None:
            raise ConfigError("replica.batches was called twice: one loop runs through the whole training.")
        self._cursor = DataCursor(data)
        try:
            self._resume()
            self._open_round()
            while not self.stopped:
                if self._attempt.should_leave():
                    self._leave()
                yield self._cursor.next()
                self._signal_steps()
                self._look_around()
        except Preempted as notice:
            log.warning("%s", notice)
            self.preempted = True
            return
        self._participant.finish_leg()

    def observe(
        self,
        loss: float | None = None,
        reward: float | None = None,
        kl_to_init: float | None = None,
        entropy: float | None = None,
        reward_std: float | None = None,
        tokens: int = 0,
    ) -> None:
        """Tell the metrics of the inner step just taken: loss in mean nats per token, kl_to_init likewise."""
        self._observations.add(
            {"loss": loss, "reward": reward, "kl_to_init": kl_to_init, "entropy": entropy, "reward_std": reward_std},
            tokens,
        )
        self._attempt.pulse.loss = loss if loss is not None else reward

    # -- rounds --------------------------------------------------------------------------------------------------

    def _count_step(self) -> None:
        self._unsignalled += 1
        self._inner_steps += 1
        self._attempt.pulse.inner_step = self._loop.local_step + self._unsignalled

    def _signal_steps(self) -> None:
        """Let torchft count the inner steps taken; at the round's end this publishes, waits, and takes the new base."""
        while self._unsignalled:
            self._unsignalled -= 1
            before = self.round
            self._signal.step()
            if self.round > before + 1:  # over rounds whose payloads were collected
                self._loop.load(self._participant.base)
            if self.round != before:
                self._after_round()

    def _look_around(self) -> None:
        """Between inner steps: was the open round committed without us, or will it be?"""
        before, trained = self.round, self._loop.local_step
        if self._manager.in_flight:
            return
        if self._participant.timing.poll_due() and self._loop.catch_up(self._manager, self._followed):
            log.info("round %d went on without us, after %d inner steps; we are cut", before, trained)
            self._participant.contributor.announce()
            self._open_round()
            return
        if self._participant.timing.is_behind(trained):
            log.info("round %d: too slow for a whole round, answering with %d inner steps", before, trained)
            self._loop.end_round(self._manager)
            self._after_round()

    def _followed(self) -> None:
        """A round that went on without us is followed."""
        self._settle_answer()
        self._participant.write_snapshot_if_due()

    def _leave(self) -> None:
        """Publish what is trained, where a round may count a part of it, and go."""
        trained, whole = self._loop.local_step, self._attempt.config.round_steps
        words = f"asked to leave in mid-round {self.round}, after {trained} of {whole} inner steps; "
        if self._manager.in_flight:
            self._manager.await_published()
            raise Preempted(words + f"{self._unreported_steps} of them after its pseudo-gradient was published.")
        if self._participant.timing.elastic and trained:
            self._loop.answer_now(self._manager)
        answered = self._manager.answered
        if answered is None or answered.attempt != self._attempt.number:
            raise Preempted(words + "they are not published, the next attempt takes them again.")
        raise Preempted(words + f"they are published as they are ({answered.kind}).")

    @property
    def _unreported_steps(self) -> int:
        return self._inner_steps - self._reported_steps

    def _resume(self) -> None:
        """Go on where this replica's newest manifest stands; settle an answer that an earlier attempt left."""
        if self.stopped:
            return
        newest = self._participant.contributor.history.newest(self.round)
        if newest is None or newest.progress is None:
            rng.seed_all(
                self._attempt.config.seed + 1 + self._attempt.replica_id
            )  # data order and dropout differ from here
        else:
            self._take(newest.progress)
        saved = self._state.load()
        standing = self._participant.contributor.existing()
        relived = saved is not None and self._relive(saved)
        if standing is not None and not relived:
            log.info("round %d: attempt %d of this replica answered it; waiting", self.round, standing.attempt)
            self._participant.close()
            self._loop.load(self._participant.base)
        if newest is not None and saved is None and self._attempt.config.fragments > 1:
            log.warning(
                "what was trained in fragments since each of them moved last is dropped: no state was saved with the "
                'newest contribution. replica_state="round" saves one every time.'
            )
        self._participant.contributor.announce()

    def _relive(self, saved: Saved) -> bool:
        """Bring back what this replica's model was beside the base. False where the base is all there is to it.

        Where its answer is not yet followed by its own outer step, it stands again right behind that answer.
        """
        taking, manifest = self._participant, saved.manifest
        if not saved.local:
            return False
        answered_last = manifest.leg == self._attempt.begin.leg and manifest.round >= taking.round - 1
        overlaps = self._attempt.config.fragment_sync_delay > 0 or self._attempt.config.fragment_update_alpha > 0
        if manifest.round == taking.round or (overlaps and answered_last):
            if manifest.round < taking.round:
                taking.reopen_round(manifest.round)
            log.info("round %d: attempt %d of this replica answered it", self.round, manifest.attempt)
            self._loop.load_local(saved.local, (), taking.base)
            self._manager.already_answered, self._relived = True, manifest.round
            self._loop.go_to_answer()
            self._signal.step()
            self._settle_answer()
            return True
        if manifest.round in (taking.round - 1, self._attempt.begin.from_round):
            self._loop.load_local(saved.local, {manifest.fragment}, taking.base)
        return False

    def _take(self, progress: Progress) -> None:
        assert self._cursor is not None
        self._cursor.seek(progress.cursor)
        rng.restore(progress.rng)
        self._inner_steps = self._reported_steps = progress.inner_steps
        self._observations.total_tokens = progress.tokens

    def _after_round(self) -> None:
        self._settle_answer()
        self._open_round()

    def _settle_answer(self) -> None:
        """Become what this replica's manifest says, where that is not what this attempt did."""
        answered, self._manager.answered = self._manager.answered, None
        if answered and answered.attempt < self._attempt.number and answered.round == self._relived:
            return  # an earlier attempt's, whose state this one has loaded
        if answered and answered.attempt != self._attempt.number:
            self._attempt.check_superseded()
            if answered.progress is None:  # it only announced itself
                return
            self._take(answered.progress)
            if (saved := self._state.load()) is not None and saved.local:
                self._loop.load_local(saved.local, {answered.fragment}, self._participant.base)
        if answered and answered.kind == "abstention":
            self._go_back_to_finite()

    def _go_back_to_finite(self) -> None:
        """After an abstention: the model is the base, the inner optimizer its last saved state.

        Where none is saved every round, what is not finite in it starts anew.
        """
        self._loop.load(self._participant.base)
        self._optimizer.zero_grad()
        if self._attempt.config.saves_state != "round" or self._state.load() is None:
            self._state.drop_poisoned()

    def _open_round(self) -> None:
        """Score the new base, and go through rounds that need no training."""
        self._participant.write_snapshot_if_due()
        while not self.stopped:
            self._score()
            self._attempt.pulse.phase, self._attempt.pulse.inner_step = "training", 0
            if not self._participant.closing:
                return
            self._participant.contributor.contribute_scores(self._report())
            self._participant.close()

    def _score(self) -> None:
        scored = (self._participant.digest, self._participant.roster)
        if self._scorer is not None and self._scored != scored:
            self._attempt.pulse.phase = "scoring"
            with self._loop.showing(self._participant.base):
                self._scores = self._scorer.score(self._model, self._attempt.replica_id, self._participant.roster)
            self._scored = scored

    def _report(self) -> ContributionFields:
        """What this replica's answer to the open round says beside the pseudo-gradient."""
        assert self._cursor is not None
        seen = self._observations
        progress = Progress(
            cursor=self._cursor.position(),
            rng=rng.capture(),
            inner_steps=self._inner_steps,
            tokens=seen.total_tokens,
        )
        in_loop = seen.in_loop()
        steps, self._reported_steps = self._inner_steps - self._reported_steps, self._inner_steps
        report = ContributionFields(
            steps=steps,
            state=self._state.to_save(),
            tokens=seen.tokens,
            metric=seen.metric,
            in_loop=in_loop,
            scores=self._scores,
            heldout_items=self._scorer.items if self._scorer else 0,
            metrics=seen.metrics(),
            progress=progress,
        )
        seen.begin_round()  # what is observed while the answer is on its way belongs to the next one
        return report
