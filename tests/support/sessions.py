"""Training functions' side of a run in this process: contexts over the store of a `Fleet`, and a workload to watch."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
from protocol_fleet import Fleet

from diloco_orchestrator.clock import Clock, ManualClock
from diloco_orchestrator.protocol.record_format import Stamp
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext

_tokens = count()


def context_of(
    fleet: Fleet, replica_id: int, clock: Clock | None = None, should_leave: Callable[[], bool] = lambda: False
) -> ReplicaContext:
    """What the training function of this replica's next attempt is given."""
    clock = clock or ManualClock()
    stamp = Stamp(f"context{next(_tokens)}", clock.wall_time)
    return ReplicaContext(claim_attempt(fleet.store, replica_id, None, clock, stamp, should_leave))


class Counted:
    """Batches 0, 1, 2, … without end; goes on from a position that was written down."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def constant_steps(
    context: ReplicaContext,
    model: torch.nn.Module,
    gradient: Callable[[int], float],
    data: Iterable[Any] | None = None,
    lr: float = 0.5,
    take_s: Callable[[], None] = lambda: None,
    **attach: Any,
) -> Any:
    """Train with SGD until the run ends; every element of the gradient of batch i is `gradient(i)`.

    `take_s` is called in every step: it sleeps on the replica's clock.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with context.attach(model, optimizer, **attach) as session:
        for batch in session.batches(Counted() if data is None else data):
            take_s()
            value = gradient(batch)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            optimizer.step()
            session.observe(loss=1.0, tokens=1)
    return session
