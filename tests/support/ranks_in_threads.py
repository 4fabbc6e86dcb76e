"""The connections between the ranks of a replica, which are threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from patience import PATIENCE_S

from diloco_orchestrator.replica.training.signal_lines import SignalLines

Everyone = Callable[[Any], list[Any]]


def everyone_of(ranks: int) -> Callable[[int], Everyone]:
    """What `Ranks.everyone` does, by rank, for ranks that are threads."""
    barrier, said = threading.Barrier(ranks), dict[int, Any]()

    def of_rank(rank: int) -> Everyone:
        def everyone(value: Any) -> list[Any]:
            said[rank] = value
            barrier.wait(PATIENCE_S)
            found = [said[each] for each in range(ranks)]
            barrier.wait(PATIENCE_S)
            return found

        return everyone

    return of_rank


def joined_lines(ranks: int, host: str = "127.0.0.1", everyone: Callable[[int], Everyone] | None = None) -> Any:
    """The connections of each rank, in rank order. `everyone`: as of `everyone_of`."""
    of_rank = everyone or everyone_of(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        made = [pool.submit(SignalLines.joined, rank, ranks, host, of_rank(rank)) for rank in range(ranks)]
        return [each.result(PATIENCE_S) for each in made]
