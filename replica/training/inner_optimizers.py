"""`InnerOptimizers`: the optimizers of one training loop, whose steps together are its inner steps; and `StepWatch`.

Almost always one optimizer. Its state is saved in `checkpoint`, its learning rates in `small_state`.
"""

import weakref
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


# Gradients in a row that were computed and dropped without a step. A GradScaler drops those of its first batches while
# it halves its scale: at most 40 times from its start at 2^16 to the smallest scale that makes a difference.
MOST_DROPPED = 64
# Batches without a step while gradients are kept, or none is seen: twice the largest accumulation in use, of 512
# micro-batches, and loops that keep gradients elsewhere (`main_grad`) look the same.
MOST_BATCHES = 1024


class NeverStepped(ConfigError):
    """No optimizer step after so many batches that none will come. `diloco check` has a row for it."""


class StepWatch:
    """Notices a training loop whose attached optimizers never step, before it trains for nothing for days.

    Counts batches, or calls of `replica.step`, until the first step of the attempt. Afterwards nothing is watched: a
    loop that has stepped once is attached to the right optimizers.
    """

    def __init__(self, optimizers: InnerOptimizers) -> None:
        self._optimizers = optimizers
        self._batches = 0
        self._dropped = 0
        self._gradient: weakref.ref[torch.Tensor] | None = None  # the one that was there after the last batch
        self._has_stepped = False

    def stepped(self) -> None:
        """Count a step: from now on nothing is watched."""
        self._has_stepped, self._gradient = True, None

    def batch_done(self) -> None:
        """Count a batch. Raises `NeverStepped` after too many without a step."""
        if self._has_stepped:
            return
        self._batches += 1
        # Accumulation adds to the same tensor; zero_grad without a step leaves another one, or none.
        newest = next((p.grad for p in self._optimizers.parameters() if p.grad is not None), None)
        kept = self._gradient is not None and self._gradient() is newest
        self._dropped = 0 if kept else self._dropped + (self._gradient is not None)
        self._gradient = None if newest is None else weakref.ref(newest)
        if self._dropped >= MOST_DROPPED or self._batches >= MOST_BATCHES:
            dropped = ", and dropped their gradients" if self._dropped >= MOST_DROPPED else ""
            raise NeverStepped(
                f"the training loop took {self._batches} batches{dropped}, and no optimizer.step() of the attached "
                f"optimizer ({self._optimizers.names}) came: nothing would ever be trained together. Give attach the "
                f"optimizer that the loop steps, and step it at least every {MOST_BATCHES - 1} batches."
            )
