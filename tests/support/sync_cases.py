"""torchft's own regression cases for DiLoCo, and a small training with AdamW, through our loop or torchft's class.

Every function is one replica; run several in threads of their own.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torchft.local_sgd import DiLoCo, LocalSGD

from diloco_orchestrator import Nesterov, ObjectStoreManager, OuterConfig, make_diloco_outer_loop
from diloco_orchestrator.testing import MockManager

Manager = ObjectStoreManager | MockManager
History = list[list[torch.Tensor]]  # after every inner step, every parameter

PLAIN = OuterConfig(lr=2.0, momentum=0.0)
CASES = list(product((0, 1), (0.0, 0.5, 1.0)))  # fragment_sync_delay, fragment_update_alpha

# -- two scalars, gradient 2, inner lr 1, outer lr 2, a fragment every 3 steps, a first --------------------------------


class TwoScalars(torch.nn.Module):
    """Two fragments of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))

    def modules_of_fragments(self) -> list[torch.nn.Module]:
        """The fragments as torchft wants them."""
        parts = [torch.nn.Module(), torch.nn.Module()]
        parts[0].a, parts[1].b = self.a, self.b  # type: ignore[assignment]
        return parts


def history_by_hand(syncs: int, delay: int, alpha: float) -> list[tuple[float, float]]:
    """(a, b) after every inner step, worked out from the rule."""
    base, local, history = [1.0, 1.0], [1.0, 1.0], []
    for sync in range(syncs):
        fragment = sync % 2
        for step in (1, 2, 3):
            local = [value - 2 for value in local]
            if step == 3 - delay:
                pseudo_gradient = base[fragment] - local[fragment]  # equal on both replicas, so also their mean
            if step == 3:
                base[fragment] -= 2 * pseudo_gradient
                local[fragment] = (1 - alpha) * base[fragment] + alpha * local[fragment]
            history.append((local[0], local[1]))
    return history


def scalars_through_our_loop(manager: Manager, syncs: int, delay: int, alpha: float) -> list[tuple[float, float]]:
    model = TwoScalars()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loop = make_diloco_outer_loop(
        model,
        optimizer,
        manager,
        sync_every=6,
        outer=PLAIN,
        fragments=[["a"], ["b"]],
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    )
    return _scalar_steps(model, optimizer, loop, syncs)


def scalars_through_torchft(manager: Manager, syncs: int, delay: int, alpha: float) -> list[tuple[float, float]]:
    """With torch's SGD as outer optimizer, as torchft's own test has it."""
    model = TwoScalars()
    optimizer, parts = torch.optim.SGD(model.parameters(), lr=1.0), model.modules_of_fragments()
    manager.attach(model, parts)
    outer = [torch.optim.SGD(part.parameters(), lr=2.0) for part in parts]
    options = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    return _scalar_steps(model, optimizer, DiLoCo(manager, parts, optimizer, outer, 6, **options), syncs)


def _scalar_steps(
    model: TwoScalars, optimizer: torch.optim.Optimizer, loop: Any, syncs: int
) -> list[tuple[float, float]]:
    history = []
    with loop:
        for _ in range(3 * syncs):
            for parameter in model.parameters():
                parameter.grad = torch.full((1,), 2.0)
            optimizer.step()
            history.append((model.a.item(), model.b.item()))
    return history


# -- a training: two layers, a fragment each --------------------------------------------------------------------------

OUTER = OuterConfig(lr=0.7, momentum=0.9, nesterov=True)
FRAGMENTS = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def network() -> torch.nn.Sequential:
    """The same values in every thread: torch's global generator would be shared."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def training_through_our_loop(manager: Manager, replica_id: int, syncs: int, **schedule: Any) -> History:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = make_diloco_outer_loop(model, optimizer, manager, 6, OUTER, fragments=FRAGMENTS, **schedule)
    return _training_steps(model, optimizer, loop, replica_id, 3 * syncs)


def nesterov_of(part: torch.nn.Module) -> torch.optim.Optimizer:
    return Nesterov(list(part.parameters()), OUTER)


def sgd_of(part: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def training_through_torchft(
    manager: Manager,
    replica_id: int,
    syncs: int,
    outer_of: Callable[[torch.nn.Module], torch.optim.Optimizer] = nesterov_of,
    **schedule: Any,
) -> History:
    model = network()
    optimizer, parts = torch.optim.AdamW(model.parameters(), lr=0.01), [model[0], model[2]]
    manager.attach(model, parts)
    loop = DiLoCo(manager, parts, optimizer, [outer_of(part) for part in parts], 6, **schedule)
    return _training_steps(model, optimizer, loop, replica_id, 3 * syncs)


def training_through_local_sgd(manager: Manager, replica_id: int, syncs: int) -> History:
    """Parameters averaged every three steps by torchft's LocalSGD."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model)
    return _training_steps(model, optimizer, LocalSGD(manager, model, optimizer, 3), replica_id, 3 * syncs)


def _training_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Any, replica_id: int, steps: int
) -> History:
    history = []
    with loop:
        for step in range(steps):
            elementwise_step(model, optimizer, 1000 * replica_id + step)
            history.append([parameter.detach().clone() for parameter in model.parameters()])
    return history


def elementwise_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """An inner step whose gradient is computed element by element: the bits of a matrix product may depend on what
    else the machine does, and Adam would make large differences of them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 0.5 * parameter.detach() + torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def same_bits(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> bool:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def largest_difference(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> float:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)
