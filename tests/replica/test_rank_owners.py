"""Objects of which every rank of a replica has its own: when the other ranks delete theirs."""

from typing import Any

import pytest

from diloco_orchestrator.replica.training.rank_owners import RankOwners


class Owned:
    """An object that every rank makes."""


class Receiver(RankOwners):
    """Another rank, whose messages the test carries."""

    def __init__(self) -> None:
        super().__init__(0, 2, None)  # as rank 0, which starts no thread
        self.rank = 1

    def _reply(self, found: Any, error: BaseException | None) -> None:
        assert error is None


@pytest.mark.parametrize("loads_first", [True, False])
def test_an_object_stays_until_every_call_that_names_it_is_loaded(loads_first: bool):
    """The call goes to the training thread, the news that rank 0 has deleted the object to another, which may be
    first."""
    sender, receiver, theirs = RankOwners(0, 2, None), Receiver(), Owned()
    number = sender.new_number()
    sender.keep(number, ours := Owned())
    receiver.keep(number, theirs)
    call = sender.dumps_call(("install", (ours,)))
    del ours
    news = sender.dumps((list(sender._dropped), None, len, ("",)))
    found = [receiver.loads_call(call)] if loads_first else []
    receiver._do(news)
    assert loads_first or number in receiver._objects
    assert (found or [receiver.loads_call(call)])[0] == ("install", (theirs,))
    assert number not in receiver._objects and not receiver._dropped
