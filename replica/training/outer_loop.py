"""DiLoCo's inner and outer loop: torchft's `DiLoCo` class, driven. All contact with torchft is in this file.

Chosen over a loop of our own because it brings streaming fragments, delay and alpha as tested elsewhere; what it costs
is two things added here: facade modules that show it only trainable parameters, and fp32 shadows on the CPU for
models in other dtypes or on a GPU, so that the base keeps fp32 precision and the outer step has the same bits on every
machine. `use_bucketization` stays off (it loses what lies past its cap), `should_quantize` too (compression is the
codecs' business), and each fragment has an outer optimizer of its own (a shared one applies inner gradients at the
outer learning rate to the fragments that are not being synchronised). Buffers are never synchronised.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torchft.local_sgd import DiLoCo

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import ConfigError, ModelMismatch, unknown_name
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import Nesterov
from diloco_orchestrator.replica.interop.torchft import MockManager, ObjectStoreManager
from diloco_orchestrator.snapshots.layout import ModelFiles, trainable

Manager = ObjectStoreManager | MockManager


class _Fragment(torch.nn.Module):
    """The parameters of one fragment as torchft sees them: fp32 on the CPU, in name order, frozen ones left out.

    A parameter that is fp32 on the CPU is shown itself, any other by a shadow.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self.names = tuple(parameters)
        self._real = list(parameters.values())
        self.shown = [p if _is_plain(p) else _shadow(p) for p in self._real]
        for index, shown in enumerate(self.shown):
            self.register_parameter(f"{index:06d}", shown)  # module names may hold no dots

    @torch.no_grad()
    def copy_in(self) -> None:
        """Bring the shadows up to date with what training did to the real parameters."""
        for real, shown in self._shadowed():
            if real.dtype == torch.float32:
                shown.copy_(real)
            else:
                # Only what training changed: the base keeps the digits that the model's dtype cannot hold.
                shown.add_(real.to("cpu", torch.float32) - shown.to(real.dtype).to(torch.float32))

    @torch.no_grad()
    def copy_out(self) -> None:
        """Bring the real parameters up to date with the shadows."""
        for real, shown in self._shadowed():
            real.copy_(shown)

    def values(self) -> list[torch.Tensor]:
        """Copies of the real parameters' values."""
        return [real.detach().clone() for real in self._real]

    @torch.no_grad()
    def restore(self, values: list[torch.Tensor]) -> None:
        """Undo what was done to the real parameters since `values`."""
        for real, value in zip(self._real, values, strict=True):
            real.copy_(value)

    @torch.no_grad()
    def show(self, base: Base) -> None:
        """Set the real parameters to the base; shadows keep what training did, where there are any."""
        for name, real in zip(self.names, self._real, strict=True):
            real.copy_(base.parameters[name])

    @torch.no_grad()
    def load(self, base: Base) -> None:
        """Set shadows and real parameters to the base."""
        for name, shown in zip(self.names, self.shown, strict=True):
            shown.copy_(base.parameters[name])
        self.copy_out()

    def _shadowed(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return [(real, shown) for real, shown in zip(self._real, self.shown, strict=True) if real is not shown]


def _is_plain(parameter: torch.nn.Parameter) -> bool:
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()


def _shadow(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True).contiguous())


class _OuterStep(Nesterov):
    """torchft's outer slot: installs the base that the commit named; without a log computes the step."""

    def __init__(self, fragment: _Fragment, outer: OuterConfig, committed_base: Callable[[], Base | None]) -> None:
        super().__init__(fragment.shown, outer)
        self._fragment = fragment
        self._committed_base = committed_base

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        base = self._committed_base()
        if base is None:
            super().step()
        else:
            self.load(base)

    def load(self, base: Base) -> None:
        """Take parameters and momenta from a base."""
        for name, parameter in zip(self._fragment.names, self._fragment.shown, strict=True):
            self.install(parameter, base.parameters[name], base.momenta.get(name))


class OuterLoop:
    """A context in which every `sync_every` steps of the inner optimizer end in an outer step."""

    def __init__(
        self,
        fragments: list[_Fragment],
        outer_optimizers: list[_OuterStep],
        diloco: DiLoCo,
        inner_optimizer: torch.optim.Optimizer,
        manager: Manager,
        fragment_update_alpha: float,
    ) -> None:
        self.manager = manager
        self.outer_optimizers: Sequence[Nesterov] = outer_optimizers
        self._fragments = fragments
        self._outer_steps = outer_optimizers
        self._diloco = diloco
        self._alpha = fragment_update_alpha
        self._inner_optimizer = inner_optimizer
        self._hooks: list[Any] = []

    @property
    def local_step(self) -> int:
        """Inner steps since the last outer step."""
        return int(self._diloco._local_step)

    def load(self, base: Base) -> None:
        """Leave off what was trained since the last outer step and go on from `base`."""
        for fragment, outer_step in zip(self._fragments, self._outer_steps, strict=True):
            fragment.load(base)
            outer_step.load(base)
        self._diloco._save_parameters()
        self._diloco._local_step = 0

    def catch_up(self, manager: ObjectStoreManager, followed: Callable[[], None]) -> bool:
        """Follow the rounds that were committed without this replica; `followed` is called after each. Any at all?

        The cut: what was trained is published to the round that it was trained for, to be carried into the next one,
        and the new base is taken, so that this replica is in step with the others again. It goes around torchft's
        schedule, which knows rounds of a whole length only.
        """
        before = manager.participant.round
        while manager.closed():
            self.end_round(manager)
            followed()
        return manager.participant.round > before

    def end_round(self, manager: ObjectStoreManager) -> None:
        """Answer the open round with what there is, before its last inner step, and take the base after it."""
        self.answer_now(manager)
        moved, before = manager.participant.fragment, manager.participant.round
        manager.follow()
        if manager.participant.round == before + 1:
            self._install(moved, manager.participant.base)
        else:  # over rounds whose payloads were collected
            self.load(manager.participant.base)
        self._diloco._local_step = 0

    def answer_now(self, manager: ObjectStoreManager) -> None:
        """Publish what was trained of the open round's fragment so far; nothing if it still is the base."""
        index = manager.participant.fragment
        self._fragments[index].copy_in()
        originals = self._diloco._fragments[index].original_parameters.values()
        with torch.no_grad():
            moved = [old - shown for old, shown in zip(originals, self._fragments[index].shown, strict=True)]
        if any(bool(tensor.count_nonzero()) for tensor in moved):
            manager.answer(moved)

    @property
    def keeps_local_values(self) -> bool:
        """Whether a replica's parameters differ from the base between rounds, or when it publishes."""
        return len(self._fragments) > 1 or bool(self._alpha) or self._diloco._fragment_sync_delay > 0

    def local_values(self) -> dict[str, torch.Tensor]:
        """The model's parameters as training left them."""
        pairs = (zip(fragment.names, fragment.values(), strict=True) for fragment in self._fragments)
        return {name: value for pair in pairs for name, value in pair}

    def load_local(self, values: Mapping[str, torch.Tensor], moved: Collection[int], base: Base) -> None:
        """Go on from a replica's own values, but in the fragments that `moved` since from the base."""
        self.load(base)
        for index, fragment in enumerate(self._fragments):
            if index not in moved:
                fragment.restore([values[name] for name in fragment.names])

    def go_to_answer(self) -> None:
        """Stand one inner step before the point where the open round is answered."""
        self._diloco._local_step = self._diloco._sync_every - self._diloco._fragment_sync_delay - 1

    def _install(self, index: int, base: Base) -> None:
        """Go on from the base in one fragment; the others keep what they were trained to."""
        self._fragments[index].load(base)
        self._outer_steps[index].load(base)
        self._diloco._fragments[index].save_parameters()

    @contextmanager
    def showing(self, base: Base) -> Iterator[None]:
        """The model holds the base meanwhile: between rounds, fragments that did not move differ from it."""
        if len(self._fragments) == 1 and not self._alpha:
            yield
            return
        local = [fragment.values() for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.show(base)
        try:
            yield
        finally:
            for fragment, values in zip(self._fragments, local, strict=True):
                fragment.restore(values)

    def __enter__(self) -> Self:
        # Hooks run in the order of their registration: shadows in, torchft's own, shadows out.
        self._hooks.append(self._inner_optimizer.register_step_post_hook(self._before_torchft))
        self._diloco.__enter__()
        self._hooks.append(self._inner_optimizer.register_step_post_hook(self._after_torchft))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._diloco.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_torchft(self, *_: Any) -> None:
        step = self.local_step + 1
        if step in (self._diloco._sync_every - self._diloco._fragment_sync_delay, self._diloco._sync_every):
            self._fragments[self._diloco._current_fragment()].copy_in()
            self._moving = self._diloco._current_fragment()

    def _after_torchft(self, *_: Any) -> None:
        if self.local_step == 0:  # torchft has just synchronised
            self._fragments[self._moving].copy_out()


def make_diloco_outer_loop(
    model: torch.nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    manager: Manager,
    sync_every: int,
    outer: OuterConfig | None = None,
    *,
    fragments: int | Sequence[Sequence[str]] = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    tokenizer: Any = None,
) -> OuterLoop:
    """DiLoCo (arXiv 2311.08105; streaming: 2501.18512) around `model`'s trainable parameters.

    Args:
        inner_optimizer: its steps are counted; it must hold `model`'s parameters.
        manager: who averages; an `ObjectStoreManager` brings the run's newest base, which is loaded into `model`.
        sync_every: inner steps between outer steps of the same fragment (H); a multiple of the number of fragments.
        outer: the outer optimizer; with an `ObjectStoreManager` it must be the run's, and is by default.
        fragments: how many parts to synchronise in turn, or the parameter names of each.
        fragment_sync_delay: inner steps between publishing a fragment and waiting for its average.
        fragment_update_alpha: share of the local values kept when a fragment is synchronised.
        tokenizer: saved beside the model in snapshots.

    Raises:
        ConfigError: for settings that do not fit together.
        ModelMismatch: the model is not the run's.
    """
    parameters = trainable(model)
    if not parameters:
        raise ModelMismatch("the model has no parameter with requires_grad=True: there is nothing to train.")
    names = _split(parameters, fragments)
    _check_schedule(sync_every, len(names), fragment_sync_delay, fragment_update_alpha)
    outer = _outer_of(manager, outer)
    base = manager.start(parameters, names, ModelFiles.of(model, tokenizer))
    shown = [_Fragment({name: parameters[name] for name in part}) for part in names]
    outer_steps = [_OuterStep(fragment, outer, manager.committed_base) for fragment in shown]
    diloco = DiLoCo(
        manager,  # type: ignore[arg-type]  # stands in for torchft.Manager
        [*shown],
        inner_optimizer,
        [*outer_steps],
        sync_every,
        backup_device=torch.device("cpu"),
        pin_memory=False,
        fragment_sync_delay=fragment_sync_delay,
        fragment_update_alpha=fragment_update_alpha,
    )
    loop = OuterLoop(shown, outer_steps, diloco, inner_optimizer, manager, fragment_update_alpha)
    manager.overlap = fragment_sync_delay > 0
    if base is not None:
        loop.load(base)
    return loop


def _outer_of(manager: Manager, outer: OuterConfig | None) -> OuterConfig:
    of_run = manager.outer_config()
    if of_run is not None and outer is not None and of_run != outer:
        raise ConfigError(
            f"outer={outer!r} is not the run's ({of_run!r}); a run has one outer optimizer. Leave it out."
        )
    return of_run or outer or OuterConfig()


def _check_schedule(sync_every: int, fragments: int, delay: int, alpha: float) -> None:
    if sync_every < 1 or sync_every % fragments:
        raise ConfigError(f"sync_every={sync_every} is not a multiple of the {fragments} fragments. Choose one.")
    if not 0 <= delay < sync_every // fragments:
        raise ConfigError(f"fragment_sync_delay={delay} must be in 0..{sync_every // fragments - 1}.")
    if not 0 <= alpha <= 1:
        raise ConfigError(f"fragment_update_alpha={alpha} must be between 0 and 1.")


def _split(
    parameters: dict[str, torch.nn.Parameter], fragments: int | Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Parameter names per fragment, each in name order."""
    if isinstance(fragments, int):
        if not 1 <= fragments <= len(parameters):
            raise ConfigError(f"fragments={fragments}: choose 1..{len(parameters)}, the number of parameters.")
        return _contiguous(parameters, fragments)
    given = [name for part in fragments for name in part]
    for name in given:
        if name not in parameters:
            raise ConfigError(unknown_name("trainable parameter", name, parameters))
    if sorted(given) != sorted(parameters):
        raise ConfigError("fragments must hold every trainable parameter exactly once.")
    return [tuple(sorted(part)) for part in fragments]


def _contiguous(parameters: dict[str, torch.nn.Parameter], fragments: int) -> list[tuple[str, ...]]:
    """Runs of names with about equally many elements, none empty."""
    total, seen = sum(p.numel() for p in parameters.values()), 0
    parts: list[list[str]] = [[]]
    for index, (name, parameter) in enumerate(parameters.items()):
        left = len(parameters) - index
        missing = fragments - len(parts)
        if parts[-1] and missing and (seen * fragments >= total * len(parts) or left == missing):
            parts.append([])
        parts[-1].append(name)
        seen += parameter.numel()
    return [tuple(part) for part in parts]
