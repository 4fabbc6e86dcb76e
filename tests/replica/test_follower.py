"""The training loop of a rank other than 0: the position in its data, which rank 0 decides."""

import json
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


def follower_of(island: Any) -> Follower:
    """A rank other than 0 that trains. `island`: gets what rank 0 calls."""
    signals = SimpleNamespace(next_signal=lambda: Signal(GO, 0, 0))
    vars(island).update(ranks=signals, reseed=lambda: None, seed=lambda words: None, replica="")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    follower = Follower(island, InnerOptimizers(optimizer), "loss", None)
    follower.serve()
    return follower


@pytest.mark.parametrize("data", [range(100), Stateful()], ids=["iterable", "with a state"])
def test_a_rank_goes_to_the_batch_of_rank_0_from_wherever_it_is(data: Any):
    island: Any = SimpleNamespace()
    batches = follower_of(island).batches(data)
    assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4]
    island.seek(0, 3)
    assert [next(batches) for _ in range(2)] == [3, 4]
    island.seek(0, 1)
    assert next(batches) == 1


def test_a_restarted_rank_with_fewer_batches_than_rank_0_goes_on_in_its_next_epoch():
    """It ended the replica for good, as if the data had changed."""
    island: Any = SimpleNamespace()
    follower = follower_of(island)
    island.seek(0, 5)  # before the training function gives its data
    batches = follower.batches([0, 1, 2])
    assert [next(batches) for _ in range(3)] == [2, 0, 1]


class Resumes(torch.utils.data.DataLoader[int]):
    """Goes on in the order of a loaded state, as torchdata's loader does."""

    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(range(5))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["order"]

    def __iter__(self) -> Any:
        order, self.loaded = self.loaded, None
        return super().__iter__() if order is None else iter(order)


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, Resumes], ids=["plain", "with a state"])
def test_the_generators_of_a_ranks_data_go_on_after_a_restart_and_where_it_goes_back(kind: Any):
    """They began anew, or went on where they were: items of the epoch were trained twice and others never."""

    def loader() -> Any:
        generator = torch.Generator().manual_seed(2)
        return kind(range(5), sampler=torch.utils.data.RandomSampler(range(5), generator=generator))

    island: Any = SimpleNamespace()
    straight = follower_of(island).batches(loader())
    [next(straight) for _ in range(7)]
    drawn = json.loads(json.dumps(island.take_metrics().drawn))
    after = [int(next(straight)) for _ in range(8)]
    island.seek(1, 2, drawn)
    assert [int(next(straight)) for _ in range(8)] == after
    follower = follower_of(island)
    island.seek(1, 2, drawn)  # before the training function gives its data
    restarted = follower.batches(loader())
    assert [int(next(restarted)) for _ in range(8)] == after
