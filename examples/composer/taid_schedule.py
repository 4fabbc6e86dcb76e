"""The schedule of TAID's interpolation time, shared by the replicas of a run. The loss is `losses.taid_loss`."""

import math
from collections.abc import Mapping
from typing import Any


def in_unit_interval(name: str, value: float) -> None:
    """Raise `ValueError` for a value outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value!r} is not in [0, 1].")


class TAIDScheduler:
    """TAID's interpolation time t, which rises faster while the loss falls: arXiv 2501.16937, algorithm 1.

    t = min(t_end, max(linear(step), t + alpha sigmoid(m) (1 - t))), m = beta m + (1 - beta) (prev - loss) / prev. Below
    some 4,000 steps the linear floor is always the larger one, so nothing adapts. A step that is not after the last one
    is ignored, because a restarted attempt is shown the newest round again. All replicas of a run must call `update_t`
    with the same numbers, those of `on_round`, and not with their own loss.
    """

    def __init__(
        self,
        num_train_steps: int,
        t_start: float = 0.4,
        t_end: float = 1.0,
        alpha: float = 5e-4,
        beta: float = 0.99,
        disable_adaptive: bool = False,
    ) -> None:
        if num_train_steps < 1:
            raise ValueError(f"num_train_steps={num_train_steps!r} is not above 0.")
        in_unit_interval("t_start", t_start)
        in_unit_interval("t_end", t_end)
        self.num_train_steps, self.t_start, self.t_end = num_train_steps, t_start, t_end
        self.alpha, self.beta, self.disable_adaptive = alpha, beta, disable_adaptive
        self.t, self.momentum = t_start, 0.0
        self._previous: float | None = None
        self._last_step = -1

    def update_t(self, loss: float, global_step: int) -> float:
        """t after a step with this loss. The first call only keeps the loss, unless `disable_adaptive`."""
        if not math.isfinite(loss):
            raise ValueError(f"loss={loss!r} at step {global_step} is not finite: t would be lost with it.")
        if global_step <= self._last_step:
            return self.t
        self._last_step = global_step
        linear = self.t_start + (self.t_end - self.t_start) * global_step / self.num_train_steps
        if self.disable_adaptive:
            self.t = min(self.t_end, linear)
        elif self._previous is not None:
            change = (self._previous - loss) / (self._previous + 1e-15)
            self.momentum = self.beta * self.momentum + (1 - self.beta) * change
            adaptive = self.t + self.alpha / (1 + math.exp(-self.momentum)) * (1 - self.t)
            self.t = min(self.t_end, max(linear, adaptive))
        self._previous = loss
        return self.t

    def state_dict(self) -> dict[str, float | int | None]:
        return {"t": self.t, "momentum": self.momentum, "previous": self._previous, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.t, self.momentum = state["t"], state["momentum"]
        self._previous, self._last_step = state["previous"], state["last_step"]
