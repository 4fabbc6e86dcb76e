"""`HeldOutGuardCallback`: the guard alone on one transformers or TRL trainer, without a run or a bucket."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco_orchestrator.errors import ConfigError, unknown_name
from diloco_orchestrator.guard.heldout import CollapseStopError, HeldOutGuard, TripwireStatus
from diloco_orchestrator.replica.training.heldout_scorer import SIGN, undisturbed

log = logging.getLogger(__name__)


class HeldOutGuardCallback(TrainerCallback):  # type: ignore[misc]
    """Passes each logged training metric, with the model's held-out score, to a guard, and stops a collapsing training.

    One update per `logging_steps`, whatever the gradient accumulation: the trainer logs once after an optimizer step. A
    log without the training metric is ignored. Each update is a record in `state.log_history`, with `killswitch/fire`,
    written before the callback acts.

    Args:
        guard: its settings decide; see `HeldOutGuard`.
        heldout_eval_fn: `heldout_eval_fn(model)` returns a number in the training metric's unit; for losses, a loss.
        strict: raise `CollapseStopError` when the guard fires; if False, only end the training.
        in_loop: "reward" for TRL's reward trainers, or "loss": the name of the metric in the trainer's logs.

    Raises `ValueError` without `heldout_eval_fn`.
    """

    def __init__(
        self,
        guard: HeldOutGuard,
        heldout_eval_fn: Callable[[torch.nn.Module], float] | None = None,
        strict: bool = True,
        in_loop: Literal["loss", "reward"] = "reward",
    ) -> None:
        if heldout_eval_fn is None:
            raise ValueError("heldout_eval_fn is None: a guard without a held-out score watches nothing. Pass one.")
        if in_loop not in SIGN:
            raise ConfigError(unknown_name("in_loop", in_loop, SIGN))
        self.guard = guard
        self._evaluate = heldout_eval_fn
        self._strict = strict
        self._metric = in_loop

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the training again if the guard has fired before: transformers resets the flag ahead of this call."""
        if self.guard.should_halt():
            self._act(control, self.guard.last_status)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Pass the logged metric to the guard, unless this is a log of an evaluation or the training's summary."""
        last = self.guard.last_status
        if not logs or self._metric not in logs or (last is not None and state.global_step <= last.step):
            return
        model, sign = kwargs["model"], SIGN[self._metric]
        with undisturbed(model):
            heldout = float(self._evaluate(model))
        status = self.guard.update(
            state.global_step,
            sign * float(logs[self._metric]),
            sign * heldout,
            kl_to_init=_number(logs.get("kl")),
            entropy=_number(logs.get("entropy")),
            reward_std=_number(logs.get("reward_std")),
        )
        record = {
            "killswitch/fire": float(status.fire),
            "killswitch/heldout": heldout,
            "killswitch/gap": status.proxy_real_gap,
        }
        log.info("step %d: %s %s", state.global_step, record, status.reason)
        state.log_history.append({**record, "step": state.global_step})
        if status.fire:
            self._act(control, status)

    def _act(self, control: TrainerControl, status: TripwireStatus | None) -> None:
        control.should_training_stop = True
        if self._strict:
            raise CollapseStopError(status)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
