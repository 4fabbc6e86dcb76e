"""The training function of a run folder in `tests/fixtures/kept_runs`, which names it: it must never change.

Its arithmetic gives the same bits on every machine: it is elementwise, with powers of two as factors. Each batch of the
data set is one whole number; the batches are dealt by the run's log. The vector has three shards of 4,096 elements for
three replicas, which repeat eight values, so that payloads take little room in an archive.
"""

from typing import Any

import torch

ELEMENTS = 3 * 4096
BATCHES = list(range(1, 25))


class Values(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(ELEMENTS))


def truth() -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 0.5, 3.0, -0.25, 0.75, -1.5, 2.5]).repeat(ELEMENTS // 8)


def train(ctx: Any) -> None:
    """Pull the values towards `truth`, further by batches with greater numbers."""
    model = Values()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=list(range(6))) as replica:
        for number in replica.batches(BATCHES):
            difference = model.values.detach() - truth()
            model.values.grad = difference * number
            optimizer.step()
            replica.observe(loss=float(difference[number % 8] ** 2), tokens=1)


def heldout(model: Values, items: list[int]) -> list[float]:
    """One squared error per item; an item is an index."""
    values, wanted = model.values.tolist(), truth().tolist()
    return [(values[item] - wanted[item]) ** 2 for item in items]
