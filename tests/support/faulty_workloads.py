"""A training function with faults planted by `args["fault"]`, whose runs end in seconds: logistic regression."""

import math
from typing import Any

import torch

from diloco_orchestrator import ReplicaContext

FEATURES, HELDOUT_ITEMS, BATCH = 16, 256, 128
FAULT_FROM, FAULT_UNTIL = 22 * 10, 23 * 10  # inner steps of a replica: round 23 of 10 steps


def truth() -> torch.Tensor:
    return torch.randn(FEATURES, generator=torch.Generator().manual_seed(1))


def batch_of(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels, which the truth gives but for noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    y = (torch.rand(size, generator=generator) < torch.sigmoid(x @ truth())).float()
    return x, y


def heldout(model: torch.nn.Module, items: list[Any]) -> list[float]:
    """Nats per item; an item is an index into one fixed set."""
    x, y = batch_of(9, HELDOUT_ITEMS)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")
    return [losses[item].item() for item in items]


class Steps:
    """Numbers of inner steps, without end; goes on from a position that was written down."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def train(ctx: ReplicaContext) -> None:
    """`args["fault"]`: "" for a healthy run; "spike": for three rounds every replica's labels are wrong; "nan": one
    replica's data hold NaN from a step on; "hack": one replica's labels are wrong from a step on, and its training
    loss says that all is well.
    """
    fault = str(ctx.args["fault"])
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.ReLU(), torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(ctx.args["lr"]))  # type: ignore[arg-type]
    items = list(range(HELDOUT_ITEMS))
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=items, in_loop="loss") as replica:
        for step in replica.batches(Steps()):
            x, y = batch_of(100_000 * (1 + ctx.replica_id) + step, BATCH)
            since = step >= FAULT_FROM
            if fault == "spike" and FAULT_FROM <= step < FAULT_UNTIL:
                x, y = 300 * x, 1 - y
            if fault == "nan" and since and ctx.replica_id == 2:
                x = x * math.nan
            hacking = fault == "hack" and since and ctx.replica_id == 2
            optimizer.zero_grad()
            logits = model(x)[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, 1 - y if hacking else y)
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item() if not hacking else 0.1)
