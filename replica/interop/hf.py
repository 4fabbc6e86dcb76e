"""`train_as_replica`: makes a transformers `Trainer`, or a trainer of TRL, a replica of a run.

Only the trainer's settings (`trainer_settings`) and three of its methods are changed, which are wrapped: the one that
makes its data loader (`loader_stream`), the one that computes a loss, and its reward functions (`reward_taps`).
Everything else happens in callbacks. transformers is imported; TRL, PEFT, accelerate and datasets are not.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco_orchestrator.errors import ConfigError, WorkloadEndedEarly, unknown_name
from diloco_orchestrator.replica.context import ReplicaContext, ReplicaSession
from diloco_orchestrator.replica.interop.loader_stream import Deal, LoaderStream
from diloco_orchestrator.replica.interop.reward_taps import RewardTap, take
from diloco_orchestrator.replica.interop.reward_taps import tap as tap
from diloco_orchestrator.replica.interop.trainer_settings import (
    adapt_trainer,
    batches_in_a_row,
    check_not_trained,
    check_trainer,
)
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.consumed_items import ItemsOf
from diloco_orchestrator.replica.training.heldout_scorer import SIGN, HeldoutFn
from diloco_orchestrator.replica.training.kl_probe import KLProbe
from diloco_orchestrator.split.manifest import HeldoutManifest

log = logging.getLogger(__name__)


class GuardedBy(TypedDict, total=False):
    """Arguments of `ctx.attach` about the guard, which judges the global model's held-out score."""

    heldout: HeldoutFn | None
    heldout_items: Sequence[Any] | None
    vault_items: Sequence[Any] | None
    heldout_manifest: HeldoutManifest | str | Path | None
    items_of: ItemsOf | None
    kl_probe: KLProbe | None


def train_as_replica(
    trainer: Any,
    ctx: ReplicaContext,
    *,
    in_loop: Literal["loss", "reward"] | None = None,
    shard: bool = True,
    **guarded: Unpack[GuardedBy],
) -> None:
    """Train this trainer as a replica, until the run has ended. Call it in place of `trainer.train()`.

    Args:
        trainer: a new `transformers.Trainer` or a subclass, such as TRL's; on one device, or in a replica of several
            ranks in DistributedDataParallel, or sharded by `fsdp=True` (FSDP2).
        ctx: the training function's argument.
        in_loop: the training metric; by default "reward" for trainers with reward functions, else "loss".
        shard: deal the batches of the train dataset over the replicas. False if the dataset is this replica's part.
        guarded: what the kill-switch judges by, as for `ctx.attach`: heldout, heldout_items, vault_items,
            heldout_manifest, items_of (of what the data collator returns) and kl_probe.

    Raises `ConfigError` for a trainer that cannot be a replica, and a round's errors, such as `QuorumLost`.
    """
    callback = ReplicaCallback(trainer, ctx, in_loop=in_loop, shard=shard, **guarded)
    trainer.add_callback(callback)
    try:
        trainer.train()
    finally:
        callback.close()


class ReplicaCallback(TrainerCallback):  # type: ignore[misc]
    """Callback by which a Hugging Face trainer trains as a replica of a run; `train_as_replica` adds it to a trainer.

    Add it yourself if you call `trainer.train()` yourself; the arguments are those of `train_as_replica`. It joins the
    run when training begins, synchronises at the end of each round, and leaves the run when training ends. If `train`
    raises, call `close`, which leaves the run. Raises `ConfigError` for a trainer that cannot be a replica.
    """

    def __init__(
        self,
        trainer: Any,
        ctx: ReplicaContext,
        *,
        in_loop: Literal["loss", "reward"] | None = None,
        shard: bool = True,
        **guarded: Unpack[GuardedBy],
    ) -> None:
        for name in guarded:
            if name not in GuardedBy.__annotations__:
                raise ConfigError(unknown_name("argument", name, ["in_loop", "shard", *GuardedBy.__annotations__]))
        reward_functions = getattr(trainer, "reward_funcs", None) or []
        self._metric: Literal["loss", "reward"] = in_loop or ("reward" if reward_functions else "loss")
        if self._metric not in SIGN:
            raise ConfigError(unknown_name("in_loop", self._metric, SIGN))
        config = ctx._attempt.config
        check_trainer(trainer, config, ctx.ranks, config.ranks_of(ctx.replica_id) if shard else None)
        adapt_trainer(trainer, ctx.total_steps)
        self.session: ReplicaSession | None = None  # from the beginning of `train` on
        self._trainer = trainer
        self._ctx = ctx
        self._guarded = guarded
        self._shard = shard
        self._taps: list[RewardTap] = []
        self._losses: list[torch.Tensor] = []  # of the open accumulation window
        self._tokens: Any = 0  # of the open window, a number or a tensor
        self._tokens_before = 0  # that the trainer had counted at the last inner step
        self._stream: LoaderStream | None = None
        self._chance: dict[str, Any] | None = None  # the random state at a round's end, until the next batch is made
        self._make_loader, self._compute = trainer.get_train_dataloader, trainer.training_step
        trainer.get_train_dataloader, trainer.training_step = self._get_train_dataloader, self._training_step
        weights = getattr(trainer, "reward_weights", None)
        for index, function in enumerate(reward_functions):
            weight = 1.0 if weights is None else float(weights[index])
            reward_functions[index] = tap(function, self, weight)

    def close(self) -> None:
        """Leave the run: end the `ReplicaSession` that `train` has opened, if any. Safe to repeat."""
        if self.session is not None:
            self.session.__exit__(None, None, None)

    # -- the trainer's methods -----------------------------------------------------------------------------------

    def _get_train_dataloader(self) -> LoaderStream:
        loader, ctx = self._make_loader(), self._ctx
        if self._shard and ctx.replicas > 1 and not ctx.rank:
            log.info(
                "the train dataset is dealt over the %d replicas, batch by batch: this one takes batches %d, %d, ... "
                "If the dataset is this replica's part already, pass shard=False.",
                ctx.replicas,
                ctx.replica_id,
                ctx.replica_id + ctx.replicas,
            )
        if self._shard:
            ranks = list(map(ctx._attempt.config.ranks_of, range(ctx.replicas)))
            part, seed = ctx.replica_id, ctx.seed
        else:
            ranks, part, seed = [ctx.ranks], 0, ctx.seed + 1 + ctx.replica_id
        deal = Deal.over(ranks, part, ctx.rank, batches_in_a_row(self._trainer))
        self._stream = LoaderStream(loader, deal, seed, ended=lambda: self._ended, begin=self._undo_draws)
        passes = self._passes(ctx.total_steps)
        if passes is not None and not ctx.rank:
            whose = "the train dataset" if self._shard else "this replica's dataset"
            log.info("the run's %d inner steps are %.3g passes over %s", ctx.total_steps, passes, whose)
        return self._stream

    def _passes(self, steps: int) -> float | None:
        """Passes over the data in `steps` inner steps of each replica; None for a dataset without a length."""
        assert self._stream is not None
        return self._stream.passes(steps * self._trainer.args.gradient_accumulation_steps)

    def _undo_draws(self) -> None:
        """Restore the state of the random generators at the round's end, before the next batch is made.

        A restarted attempt continues from that state, without the evaluation, logs and other callbacks that the trainer
        runs after `on_step_end` and that may have drawn random numbers.
        """
        if self._chance is not None:
            rng.restore(self._chance)
            self._chance = None

    def _training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.session is not None and self.session.compares_items:
            self.session.checked(inputs)
        loss = self._compute(model, inputs, num_items_in_batch)
        # Divided by the number of micro-batches already, or by the items of the whole window: the sum is its loss.
        self._losses.append(loss.detach())
        if num_items_in_batch is not None:
            counts_all = self._trainer.args.average_tokens_across_devices
            # Tokens are summed over the ranks: a number that is the whole replica's counts in one of them.
            self._tokens = num_items_in_batch if not (counts_all and self._ctx.rank) else 0
        elif isinstance(inputs, dict) and isinstance(mask := inputs.get("attention_mask"), torch.Tensor):
            self._tokens = self._tokens + mask.sum()
        return loss

    # -- callbacks -----------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the run, and continue from an earlier attempt of this replica if there was one."""
        check_not_trained(state.global_step)
        optimizer, schedule, processor = kwargs["optimizer"], kwargs["lr_scheduler"], kwargs.get("processing_class")
        self.session = self._ctx.attach(
            kwargs["model"],
            optimizer,
            in_loop=self._metric,
            tokenizer=processor if hasattr(processor, "save_pretrained") else None,
            stateful={"schedule": schedule, "data": self._stream},
            **self._guarded,
        )
        self.session.__enter__()
        state.global_step = self.session.step_count
        # The trainer divides by the steps since then, and has noted them before this callback.
        self._trainer._globalstep_last_logged = self._trainer._initial_global_step = state.global_step
        self._follow_run(schedule)
        # transformers resets this flag before.
        control.should_training_stop = self._ended

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the inner step, and synchronise at a round's end, after optimizer and schedule have stepped."""
        assert self.session is not None and self._stream is not None
        seen, tokens = self._observed(), self._count_tokens(state)
        going = self.session.step(
            seen.get("loss"), seen.get("reward"), reward_std=seen.get("reward_std"), tokens=tokens
        )
        self._follow_run(kwargs["lr_scheduler"])
        if self.session.step_count % self._ctx._attempt.config.round_steps == 0:
            self._chance = rng.capture()
        passes = self._passes(self.session.step_count)
        state.epoch = float(self._stream.epoch) if passes is None else passes
        if not going:
            control.should_training_stop = True
        elif state.global_step >= state.max_steps:  # rounds that were not applied are trained again
            control.should_training_stop = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        ended = self._ended
        self.close()
        if not ended:
            raise WorkloadEndedEarly(
                f"the trainer stopped at global_step={state.global_step}, before the run's {self._ctx.total_steps} "
                "inner steps: a callback, such as EarlyStoppingCallback, has set control.should_training_stop. Take it "
                "out: replicas end together, by the kill-switch, `guard={'max_extra': ...}` or `diloco halt`."
            )

    @property
    def _ended(self) -> bool:
        return self.session is not None and (self.session.stopped or self.session.preempted)

    def _follow_run(self, schedule: Any) -> None:
        """Step a `LambdaLR` schedule until it has made as many steps as the run has inner steps per replica so far.

        A schedule has made fewer after rounds that were committed without this replica. Others are left unchanged.
        """
        assert self.session is not None
        if isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            while schedule.last_epoch < self.session.step_count:
                schedule.step()

    # -- observations --------------------------------------------------------------------------------------------

    @property
    def in_training(self) -> bool:
        return bool(self._trainer.model.training)

    def new_tap(self, weight: float) -> RewardTap:
        self._taps.append(RewardTap(weight))
        return self._taps[-1]

    def _observed(self) -> dict[str, float]:
        """The training metric of the inner step just taken, by name: the sum of its losses, or statistics of its
        rewards.

        Empty if no loss was computed or no completion was rewarded in it.
        """
        losses, self._losses = self._losses, []
        if self._metric == "reward":
            return take(self._taps)
        return {"loss": float(torch.stack([each.float() for each in losses]).sum())} if losses else {}

    def _count_tokens(self, state: TrainerState) -> int:
        counted, self._tokens = int(self._tokens), 0
        seen, self._tokens_before = state.num_input_tokens_seen - self._tokens_before, state.num_input_tokens_seen
        return counted or max(0, int(seen) if not self._ctx.rank else 0)  # the trainer's number is of all ranks
