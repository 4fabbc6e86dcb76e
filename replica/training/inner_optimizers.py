"""`InnerOptimizers`: the optimizers of one training loop, whose steps together are its inner steps.

Almost always one. Its state is saved in `checkpoint`, its learning rates in `small_state`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from diloco_orchestrator.errors import ConfigError

_SEVERAL = "optimizers"


class InnerOptimizers:
    """The optimizers that were given to `attach`. Raises `ConfigError` for anything else than optimizers of torch."""

    def __init__(self, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        self._all = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
        for each in self._all:
            if not isinstance(each, torch.optim.Optimizer):
                raise ConfigError(
                    f"attach got a {type(each).__name__} as optimizer: give it a torch.optim.Optimizer, or a list of "
                    "those that the loop steps."
                )
        if not self._all:
            raise ConfigError("attach got an empty list of optimizers: nothing would count the inner steps.")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all, in the order given."""
        return [group for each in self._all for group in each.param_groups]

    @property
    def names(self) -> str:
        """Their classes, for people."""
        return ", ".join(type(each).__name__ for each in self._all)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self) -> None:
        for each in self._all:
            each.zero_grad()

    def watch(self, before: Callable[[], None], after: Callable[[], None]) -> list[RemovableHandle]:
        """Call `before` ahead of every step of any optimizer, and `after` once each one has stepped.

        A step that a GradScaler skips, because a gradient is not finite, is none.
        """
        stepped: set[int] = set()

        def on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if was_skipped(optimizer):
                return
            stepped.add(id(optimizer))
            if len(stepped) == len(self._all):
                stepped.clear()
                after()

        return [
            handle
            for each in self._all
            for handle in (
                each.register_step_pre_hook(lambda *_: before()),
                each.register_step_post_hook(on_step),
            )
        ]

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the only optimizer as it saves it, or of several as a list."""
        states = [each.state_dict() for each in self._all]
        return states[0] if len(states) == 1 else {_SEVERAL: states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises `ConfigError` if the number of optimizers was another."""
        states = state.get(_SEVERAL, [state])
        if len(states) != len(self._all):
            raise ConfigError(
                f"this attempt attaches {len(self._all)} optimizers, and the saved state of this replica holds "
                f"{len(states)}: give attach the same ones in every attempt."
            )
        for each, saved in zip(self._all, states, strict=True):
            each.load_state_dict(dict(saved))

    def clear(self) -> None:
        """Drop all state."""
        for each in self._all:
            each.state.clear()

    def clear_not_finite(self) -> int:
        """Drop the state of every parameter whose state is not finite. Returns how many there were."""
        poisoned = [(each.state, p) for each in self._all for p in each.state if not _all_finite(each.state[p])]
        for state, parameter in poisoned:
            del state[parameter]
        return len(poisoned)


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step just taken changed nothing, called in its post hook.

    A GradScaler does not call the step of most optimizers when a gradient is not finite. Fused ones are called, and
    skip by themselves when the attribute `found_inf` says so, which exists during the call.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _all_finite(state: Mapping[str, Any]) -> bool:
    floats = (v for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
    return all(bool(torch.isfinite(value).all()) for value in floats)
