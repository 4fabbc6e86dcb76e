"""`Owners`: the processes that hold the shards of a replica's base between them, and calls that each makes on its own.

A replica of one process owns every shard: `ALONE`. In a replica of R ranks each shard, with base, momenta, payload and
average, is in one of them and nowhere else. Rank 0 decides what is done, and all do it together: `Owners.each` and
`Owners.make` call one function in every rank (`replica.training.rank_owners`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_orchestrator.allreduce.shards import shard_ranges

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
K = TypeVar("K")


def owner_of(fragment: int, index: int, ranks: int) -> int:
    """The rank that owns shard `index` of a fragment: in turn, so that each owns a part of every fragment."""
    return (fragment + index) % ranks


class Owners:
    """The assignment of a base's shards to the ranks of one replica, as rank `rank` of `ranks` sees it.

    This class serves a replica of one process, which owns every shard; a subclass serves several ranks.
    """

    rank = 0
    ranks = 1

    def owns(self, fragment: int, index: int) -> bool:
        """Whether shard `index` of a fragment is in this process."""
        return owner_of(fragment, index, self.ranks) == self.rank

    def shards(self, fragment: int, numel: int, shard_numel: int) -> list[tuple[int, int, int]]:
        """(index, start, stop) of this process's shards of a fragment of `numel` elements, in order."""
        ranges = enumerate(shard_ranges(numel, shard_numel))
        return [(index, *each) for index, each in ranges if self.owns(fragment, index)]

    def each(self, task: Callable[..., T], *args: Any) -> list[T]:
        """Call `task(*args)` in every rank at the same time; returns the results in rank order.

        Only rank 0 may call it, from any thread. `task`: a function of a module, or a partial of one. Arguments and
        results are pickled, except objects of which every rank has its own: results of `make`, this object, and the
        attempt's store, log and threads; each rank gets its own of these. Raises the error of the lowest rank in which
        the task failed, once all have ended.
        """
        return [task(*args)]

    def make(self, task: Callable[..., T], *args: Any) -> T:
        """Call `task(*args)` in every rank, where the result stays; returns rank 0's own.

        Rank 0's object stands for each rank's own as an argument of later calls. Other ranks delete theirs once rank
        0's is deleted. Raises the error of the lowest rank in which the task failed.
        """
        return task(*args)

    def send(self, data: "torch.Tensor", to: int) -> None:
        """Send a flat tensor of bytes on the CPU to another rank, which calls `receive`. Only in a task of `each`."""
        raise AssertionError("a single rank sends nothing")

    def receive(self, data: "torch.Tensor", source: int) -> None:
        """Fill a flat tensor of bytes on the CPU with those that the rank `source` sends. Only in a task of `each`."""
        raise AssertionError("a single rank receives nothing")


ALONE = Owners()


def merged(found: Iterable[Mapping[K, T]]) -> dict[K, T]:
    """One mapping with the entries of all in `found`, which share no key."""
    return {key: value for each in found for key, value in each.items()}
