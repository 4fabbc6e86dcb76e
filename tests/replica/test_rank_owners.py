"""Calls in all ranks of a replica: when the other ranks delete the objects that they have of their own, and what
becomes of a call in which a rank is missing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from patience import PATIENCE_S
from ranks_in_threads import joined_lines
from tasks_of_ranks import error_in_rank_0

from diloco_orchestrator.replica.training.rank_objects import RankObjects
from diloco_orchestrator.replica.training.rank_owners import RankMissing, RankOwners


class Owned:
    """An object that every rank makes."""


@pytest.mark.parametrize("loads_first", [True, False])
def test_an_object_stays_until_every_call_that_names_it_is_loaded(loads_first: bool):
    """The call goes to the training thread, the news that rank 0 has deleted the object to another, which may be
    first."""
    sender, receiver, theirs = RankObjects(0, {}), RankObjects(1, {}), Owned()
    number = sender.new_number()
    sender.keep(number, ours := Owned())
    receiver.keep(number, theirs)
    call = sender.dumps_call(("install", (ours,)))
    del ours
    found = [receiver.loads_call(call)] if loads_first else []
    receiver.delete_all(sender.take_deleted())
    assert loads_first or number in receiver._objects
    assert (found or [receiver.loads_call(call)])[0] == ("install", (theirs,))
    assert number not in receiver._objects and not receiver._deleted


@contextmanager
def _owners(ranks: int) -> Iterator[list[RankOwners]]:
    """The owners of a replica whose ranks are threads, without a group to move tensors."""
    lines = joined_lines(ranks)
    made = [RankOwners(rank, ranks, None, lines[rank], 1.0) for rank in range(ranks)]
    yield made
    for each in made:
        each.close()


_CALLED: dict[int, Callable[[], Any]] = {}  # by rank


def _task(owners: RankOwners) -> Any:
    return _CALLED[owners.rank]()


def _raises(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def test_the_rank_that_does_not_answer_is_named_and_not_those_that_wait_for_it():
    """Rank 1 waits for rank 2, and rank 0 for rank 1: both find another rank missing."""
    ends = threading.Event()
    missing = [RankMissing(f"rank {rank} of 3") for rank in (1, 2)]
    _CALLED.update({0: _raises(missing[0]), 1: _raises(missing[1]), 2: lambda: ends.wait(PATIENCE_S)})
    with _owners(3) as owners:
        with pytest.raises(RankMissing, match=r"^rank 2 of 3 moved no tensor"):
            owners[0].each(_task, owners[0])
        _CALLED[2] = _CALLED[1] = _CALLED[0] = lambda: None
        ends.set()
        with pytest.raises(RankMissing, match=r"^rank 2 of 3"):  # its late answer would be taken for that of this call
            owners[0].each(_task, owners[0])


def test_the_error_of_a_rank_is_raised_and_not_that_of_those_that_wait_for_it():
    errors = RankMissing("rank 2 of 3"), MemoryError("of rank 2")
    _CALLED.update({0: _raises(errors[0]), 1: lambda: None, 2: _raises(errors[1])})
    with _owners(3) as owners:
        with pytest.raises(MemoryError, match="of rank 2") as raised:
            owners[0].each(_task, owners[0])
        assert raised.value.__notes__ == ["This happened in rank 2 of the replica."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank", "expected"),
    [
        ("SIGSTOP", 2, "RankMissing: rank 2 of 3 moved no tensor between ranks for 2 s (retry.hung_after_s)"),
        ("sleep", 1, "RankMissing: rank 1 of 3 moved no tensor between ranks for 2 s (retry.hung_after_s)"),
        ("SIGKILL", 2, "RankMissing: rank 2 of 3 has ended"),
        ("raise", 2, "MemoryError: planted"),
    ],
)
def test_a_rank_that_is_missing_while_tensors_move_between_ranks_ends_the_call(tmp_path, what, rank, expected):
    assert error_in_rank_0(tmp_path, what, rank).startswith(expected)
