"""`InnerOptimizers`: the optimizers of one training loop, whose steps together are its inner steps; and `StepWatch`.

Almost always one optimizer. `checkpoint` saves its state, `small_state` its learning rates.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.exchange import is_sharded, local_part
from diloco_orchestrator.replica.training.tensor_tree import check_packable, whole_tree

log = logging.getLogger(__name__)

_SEVERAL = "optimizers"


class InnerOptimizers:
    """The inner optimizers passed to `attach`, as one. Raises `ConfigError` for anything but torch optimizers."""

    def __init__(self, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        self.all = [_unwrapped(each) for each in (given if isinstance(given, Sequence) else [given])]
        for each in self.all:
            if not isinstance(each, torch.optim.Optimizer):
                raise ConfigError(
                    f"attach got a {type(each).__name__} as optimizer: give it a torch.optim.Optimizer, or a list of "
                    "those that the loop steps."
                )
        if not self.all:
            raise ConfigError("attach got an empty list of optimizers: nothing would count the inner steps.")
        for each in self.all:
            self._check_saves_inner(each)

    def _check_saves_inner(self, optimizer: torch.optim.Optimizer) -> None:
        for name, inner in _inside(optimizer) if _saves_as_torch(optimizer) else ():
            if inner.state is not optimizer.state and all(inner is not each for each in self.all):
                outer, kind = type(optimizer).__name__, type(inner).__name__
                raise ConfigError(
                    f"the optimizer {outer} holds another one, {name} ({kind}), and its state_dict is torch's, which "
                    f"saves nothing of that: a restarted replica would lose the state of {kind}. Attach both, as in "
                    f"attach(model, [optimizer, optimizer.{name}]), or give {outer} a state_dict and load_state_dict "
                    "that hold both states."
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in the order given."""
        return [group for each in self.all for group in each.param_groups]

    @property
    def names(self) -> str:
        """The optimizers' class names, as text."""
        return ", ".join(type(each).__name__ for each in self.all)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self) -> None:
        for each in self.all:
            each.zero_grad()

    def watch(self, before: Callable[[], object], after: Callable[[], object]) -> list[RemovableHandle]:
        """From now on call `before` before each optimizer's step, and `after` once all of them have stepped.

        Steps that a GradScaler skips do not count. Returns the handles that remove the hooks.
        """
        stepped: set[int] = set()
        running: dict[int, FrameType] = {}  # the outermost step of an optimizer, until it returns

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            step = sys._getframe(1)
            if not _is_called_by(step, running.get(id(optimizer))):  # an earlier one has raised, or there is none
                running[id(optimizer)] = step
                before()

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if running.get(id(optimizer)) is not sys._getframe(1):
                return
            del running[id(optimizer)]
            if was_skipped(optimizer):
                return
            stepped.add(id(optimizer))
            if len(stepped) == len(self.all):
                stepped.clear()
                after()

        hooked = [(each.register_step_pre_hook(begin), each.register_step_post_hook(end)) for each in self.all]
        return [handle for pair in hooked for handle in pair]

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the only optimizer as it saves it; of several optimizers a list of these."""
        return self.local_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, as it is or stored (`stored_tree`).

        Raises `ConfigError` if it is of another number of optimizers.
        """
        self.check_number(state)
        self.load_local_state_dict(whole_tree(state))

    def local_state_dict(self) -> dict[str, Any]:
        """The state as this process holds it: with sharded tensors where parameters are sharded."""
        return self.joined_states([each.state_dict() for each in self.all])

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `local_state_dict`: this rank's pieces of sharded tensors; other ranks load their own."""
        for each, saved in zip(self.all, self.states_in(state), strict=True):
            each.load_state_dict(dict(saved))
            if _saves_as_torch(each):
                _restore_dtypes(each, saved)

    @staticmethod
    def states_in(state: Mapping[str, Any]) -> list[Any]:
        """The state of each optimizer in a result of `state_dict`."""
        found: list[Any] = state.get(_SEVERAL, [state])
        return found

    @staticmethod
    def joined_states(states: list[Any]) -> dict[str, Any]:
        """The states of all optimizers as one: the inverse of `states_in`."""
        return states[0] if len(states) == 1 else {_SEVERAL: states}

    def check_number(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a result of `state_dict` is of another number of optimizers."""
        if (saved := len(self.states_in(state))) != len(self.all):
            raise ConfigError(
                f"this attempt attaches {len(self.all)} optimizers, and the saved state of this replica holds "
                f"{saved}: give attach the same ones in every attempt."
            )

    def numbered_parameters(self) -> dict[tuple[int, int], torch.Tensor]:
        """The parameters by number of the optimizer and number within it, as torch numbers them in a `state_dict`."""
        groups = [[p for group in each.param_groups for p in group["params"]] for each in self.all]
        return {(number, index): p for number, each in enumerate(groups) for index, p in enumerate(each)}

    def check_state(self) -> None:
        """After the first step: warn of an optimizer without state; raise `ConfigError` for one that is not savable."""
        for each in self.all:
            state = each.state_dict()
            of_parameters = state.get("state")
            tree = {**state, "state": _of_this_rank(of_parameters)} if isinstance(of_parameters, dict) else state
            check_packable(tree, f"the state of the optimizer {type(each).__name__}")
            if not state.get("state") and not _is_plain_sgd(each):
                log.warning(
                    "the optimizer %s has no state after its first step, so that none is saved. If it keeps moments "
                    "elsewhere than in optimizer.state, a restarted replica loses them: give it a state_dict and "
                    "load_state_dict that hold them.",
                    type(each).__name__,
                )

    def clear(self) -> None:
        """Drop the optimizers' state."""
        self.clear_local()

    def clear_local(self) -> None:
        """Drop the state of this process's optimizers; other ranks of the replica keep theirs."""
        for each in self.all:
            each.state.clear()

    def clear_not_finite(self) -> int:
        """Drop the state of every parameter for which it is not finite. Returns the number of such parameters."""
        return self.clear_numbers(self.not_finite())

    def not_finite(self) -> set[tuple[int, int]]:
        """The numbers (`numbered_parameters`) of the parameters whose state in this process is not finite."""
        numbered = self.numbered_parameters().items()
        return {key for key, p in numbered if not _all_finite(self.all[key[0]].state.get(p, {}))}

    def clear_numbers(self, numbers: set[tuple[int, int]]) -> int:
        """Drop the state of the parameters with these numbers (`numbered_parameters`). Returns how many had some."""
        numbered = self.numbered_parameters()
        found = [(self.all[key[0]].state, numbered[key]) for key in sorted(numbers)]
        found = [(state, parameter) for state, parameter in found if parameter in state]
        for state, parameter in found:
            del state[parameter]
        return len(found)


def _unwrapped(given: Any) -> Any:
    """The optimizer inside wrappers of Lightning and accelerate, which share its state and replace it on loading."""
    inner = getattr(given, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer) and inner.state is given.state:
        given, inner = inner, getattr(inner, "optimizer", None)
    return given


def _inside(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Optimizers that `optimizer` holds in its attributes, each by the expression that reaches it."""
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            yield name, value
        elif isinstance(value, list | tuple):
            inner = ((f"{name}[{i}]", each) for i, each in enumerate(value))
            yield from ((name, each) for name, each in inner if isinstance(each, torch.optim.Optimizer))


def _saves_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's `state_dict` is torch's own, so that it holds `optimizer.state` and nothing else."""
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore the dtypes and bits of saved state that `load_state_dict` has cast.

    torch casts every state tensor of a floating-point parameter to the parameter's dtype, and so rounds the fp32
    moments of a bf16 model.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], saved["state"][number])


def _as_saved(loaded: Any, saved: Any) -> Any:
    match loaded, saved:
        case torch.Tensor(), torch.Tensor() if loaded.dtype != saved.dtype:
            return saved.to(loaded.device, copy=True)
        case dict(), dict():
            return {key: _as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
        case (list(), list()) | (tuple(), tuple()) if len(loaded) == len(saved):
            return type(loaded)(map(_as_saved, loaded, saved))
    return loaded


def _is_called_by(frame: FrameType, caller: FrameType | None) -> bool:
    found = frame.f_back if caller is not None else None
    while found is not None and found is not caller:
        found = found.f_back
    return found is not None


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler made the optimizer skip the step just taken; called in the optimizer's post hook.

    A GradScaler does not call the step of most optimizers if a gradient is not finite. It does call fused ones, which
    skip by themselves if the attribute `found_inf`, set during the call, says so.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _all_finite(state: Mapping[str, Any]) -> bool:
    floats = (v for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
    return all(bool(torch.isfinite(local_part(value)).all()) for value in floats)


def _of_this_rank(value: Any) -> Any:
    """An optimizer state where sharded tensors are replaced by this rank's pieces, so that it can be saved."""
    match value:
        case dict():
            return {key: _of_this_rank(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(_of_this_rank, value))
    return local_part(value) if is_sharded(value) else value


# Gradients in a row that were computed and dropped without a step. A GradScaler drops those of its first batches while
# it halves its scale: at most 40 times from its start at 2^16 to the smallest scale that makes a difference.
MOST_DROPPED = 64
# Batches without a step while gradients are kept, or none is seen: twice the largest accumulation in use, of 512
# micro-batches, and loops that keep gradients elsewhere (`main_grad`) look the same.
MOST_BATCHES = 1024


class NeverStepped(ConfigError):
    """No attached optimizer has stepped after so many batches that none will any more."""


class StepWatch:
    """Detects a training loop whose attached optimizers never step, or no more, so that it does not run in vain.

    Counts batches, or calls of `replica.step`, since the last step. Gradients are read until the first one.
    """

    def __init__(self, optimizers: InnerOptimizers) -> None:
        self._optimizers = optimizers
        self._batches = 0
        self._dropped = 0
        self._gradient: weakref.ref[torch.Tensor] | None = None  # the gradient tensor after the last batch
        self.has_stepped = False  # in this attempt

    def stepped(self) -> None:
        """Record an optimizer step, after which batches are counted anew."""
        self.has_stepped, self._gradient, self._batches, self._dropped = True, None, 0, 0

    def batch_done(self) -> None:
        """Count a batch. Raises `NeverStepped` after too many without an optimizer step."""
        self._batches += 1
        if not self.has_stepped:
            self._count_dropped()
        if self._dropped >= MOST_DROPPED or self._batches >= MOST_BATCHES:
            what = ", and dropped their gradients" if self._dropped >= MOST_DROPPED else ""
            what = " since its last step" if self.has_stepped else what
            raise NeverStepped(
                f"the training loop took {self._batches} batches{what}, and no optimizer.step() of the attached "
                f"optimizer ({self._optimizers.names}) came: nothing would ever be trained together. Give attach the "
                f"optimizer that the loop steps, and step it at least every {MOST_BATCHES - 1} batches."
            )

    def _count_dropped(self) -> None:
        """Count the batches in a row whose gradients were dropped."""
        # Accumulation adds to the same tensor; zero_grad without a step leaves another one, or none.
        newest = next((p.grad for p in self._optimizers.parameters() if p.grad is not None), None)
        kept = self._gradient is not None and self._gradient() is newest
        self._dropped = 0 if kept else self._dropped + (self._gradient is not None)
        self._gradient = None if newest is None else weakref.ref(newest)
