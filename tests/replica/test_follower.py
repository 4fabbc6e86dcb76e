"""The training loop of a rank other than 0: the position in its data, which rank 0 decides."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco_orchestrator.replica.training.follower import Follower
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.ranks import GO, Signal


class Stateful:
    """Numbers without end, which go on where the state is, however often they are iterated."""

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


@pytest.mark.parametrize("data", [range(100), Stateful()], ids=["iterable", "with a state"])
def test_a_rank_goes_to_the_batch_of_rank_0_from_wherever_it_is(data: Any):
    signals = SimpleNamespace(next_signal=lambda: Signal(GO, 0, 0))
    island: Any = SimpleNamespace(ranks=signals, reseed=lambda: None, seed=lambda words: None, replica="")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    follower = Follower(island, InnerOptimizers(optimizer), "loss", None)
    follower.serve()
    batches = follower.batches(data)
    assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4]
    island.seek(0, 3)
    assert [next(batches) for _ in range(2)] == [3, 4]
    island.seek(0, 1)
    assert next(batches) == 1
