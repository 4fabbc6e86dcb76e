"""A sound training function to check, and one fault for each row of the check: `args["fault"]` is the row's name."""

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from own_optimizers import Shifting

from diloco_orchestrator import HeldoutItemInTraining, ReplicaContext

ITEMS = [f"held-out {i}" for i in range(8)]


class Model(torch.nn.Module):
    """Regression with values near one, so that rounding in an outer step is exact, and a frozen copy of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 1)
        self.teacher = torch.nn.Parameter(torch.ones(1, 4), requires_grad=False)
        torch.nn.init.ones_(self.body.weight)
        torch.nn.init.ones_(self.body.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Source:
    """Batches without end, of one named item each."""

    def __init__(self, replica_id: int) -> None:
        self.replica_id, self.next = replica_id, 0

    def __iter__(self) -> Iterator[str]:
        while True:
            self.next += 1
            yield f"item {self.replica_id}.{self.next}"

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Count:
    """A number that is saved."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def features(item: str) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(sum(map(ord, item)) * 1009 + len(item)))


def loss_of(model: torch.nn.Module, item: str) -> torch.Tensor:
    x = features(item)
    return (model(x) - x.sum(1, keepdim=True) * 1.5).square().mean()


def train(ctx: ReplicaContext) -> None:
    fault = ctx.args.get("fault")
    model, source, scored, average = Model(), Source(ctx.replica_id), Count(), 0.0
    held = copy.deepcopy(model) if fault == "another model" else model  # what is attached
    stepped = list(held.body.parameters())
    if fault == "kept":  # attach refuses an optimizer of copies alone
        stepped[1:] = [parameter.detach().clone() for parameter in stepped[1:]]
    optimizer = (Shifting if fault == "saved" else torch.optim.AdamW)(stepped, lr=1e-3)
    other = torch.optim.AdamW(model.body.parameters(), lr=1e-3)

    def heldout(model: torch.nn.Module, items: Any) -> list[float]:
        scored.value += fault == "evaluation"
        return [float(loss_of(model, item)) for item in items]

    options: dict[str, Any] = {"heldout": heldout, "heldout_items": ITEMS, "items_of": lambda item: [item]}
    if fault == "nothing declared":
        options["items_of"] = None
        options["heldout_manifest"] = manifest()
    with ctx.attach(held, optimizer, stateful={"scored": scored, "source": source}, **options) as replica:
        if fault == "kept":
            for master, parameter in zip(stepped[1:], list(model.body.parameters())[1:], strict=True):
                master.copy_(parameter.detach())
        last_round = 0
        for item in batches_of(replica, source, fault):
            new_round, last_round = replica.round != last_round, replica.round
            if fault == "completes" and replica.round == 2:
                raise ZeroDivisionError("a bug of the user's own")
            if fault == "plain" and new_round:
                optimizer.state.clear()
            if fault == "digests" and new_round:
                with torch.no_grad():
                    model.body.bias += 0.01 * ctx.replica_id
            rate = 1e-3 * (1 + 0.1 * scored.value)
            if fault == "resumed":
                rate *= 1 + average
            if fault == "repeatable":
                rate *= 1 + os.urandom(1)[0] / 256
            optimizer.param_groups[0]["lr"] = rate
            loss = loss_of(model, item)
            model.zero_grad()
            loss.backward()
            average = 0.9 * average + 0.1 * loss.item()
            if fault in ("steps", "another model"):
                other.step()
            if fault == "kept":
                step_masters(optimizer, stepped, list(model.body.parameters()))
            elif fault != "steps":
                optimizer.step()
            if fault == "frozen":
                with torch.no_grad():
                    model.teacher.lerp_(model.body.weight, 0.1)
            if fault != "observed":
                replica.observe(loss=loss.item(), tokens=8)


def batches_of(replica: Any, source: Source, fault: Any) -> Iterator[str]:
    if fault == "nothing declared":
        items = iter(source)
        yield next(items)
        while replica.step(loss=1.0):
            yield next(items)
        return
    if fault != "planted":
        yield from replica.batches(source)
        return
    batches = iter(replica.batches(source))
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except HeldoutItemInTraining:
            continue


def step_masters(optimizer: Any, masters: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
    """A step of copies, whose values overwrite the parameters."""
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = parameter.grad
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)


def manifest() -> Any:
    from diloco_orchestrator import HeldoutManifest

    return HeldoutManifest.of(ITEMS)
