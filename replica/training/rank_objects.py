"""`RankObjects`: objects of which every rank of a replica has its own, such as its shards of the base.

Rank 0 names them in the calls that it sends (`rank_owners`, `ranks`): where one of its own is pickled there is a key,
for which each other rank takes its own. The key is a name for an object that is there from the start, and a number for
one that all ranks make together. The other ranks delete theirs once rank 0's own is deleted. Rank 0 says so with its
next call to the thread of shards, which may come to it before an earlier call to the thread of training that names the
object: so it says as well how many calls of the latter it had sent by then, and the object stays until as many are
loaded.
"""

import io
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any

_Key = int | str
Deleted = tuple[int, int]  # the number of an object, and of calls to the others' training threads before it was deleted


class RankObjects:
    """The objects of rank `rank` of which every rank has its own. `named`: those that are there from the start."""

    def __init__(self, rank: int, named: Mapping[str, object]) -> None:
        self._rank = rank
        # In rank 0 the named ones only: it keeps no other alive.
        self._objects = dict[_Key, Any](named.items())
        self._keys: dict[int, _Key] = {id(each): key for key, each in named.items()}  # in rank 0, of all; by `id`
        self._changed = threading.Condition()
        self._numbers = count(1)
        self._deleted: deque[Deleted] = deque()  # in rank 0 not sent yet; in the others may still be named by a call
        self._calls = 0  # of the others' training threads: sent by rank 0, or loaded here
        self._unmade: set[int] = set()  # numbers whose object was deleted in rank 0 before this rank made its own

    def new_number(self) -> int:
        """A number for an object that every rank is about to make; `keep` stores the object under it."""
        return next(self._numbers)

    def keep(self, number: int, made: Any) -> None:
        """Store `made` as this rank's object of number `number`, in rank 0 as long as somebody else there holds it."""
        if not self._rank:
            self._keys[id(made)] = number
            weakref.finalize(made, self._forget, id(made), number).atexit = False
            return
        with self._changed:
            if number in self._unmade:
                self._unmade.remove(number)
            else:
                self._objects[number] = made
                self._changed.notify_all()

    # -- in rank 0 -------------------------------------------------------------------------------------------------

    def _forget(self, address: int, number: int) -> None:
        del self._keys[address]
        self.delete(number)

    def delete(self, number: int) -> None:
        """Have the other ranks delete their objects of this number, which some of them may not have made."""
        self._deleted.append((number, self._calls))

    def take_deleted(self) -> list[Deleted]:
        """The objects deleted since the last call of this method, for `delete_all` of the other ranks."""
        return [self._deleted.popleft() for _ in range(len(self._deleted))]

    def dumps(self, value: Any) -> bytes:
        """Pickle a value for the other ranks. An object of which every rank has its own is replaced by its key."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.persistent_id = lambda each: self._keys.get(id(each))  # type: ignore[method-assign]
        pickler.dump(value)
        return file.getvalue()

    def dumps_call(self, value: Any) -> bytes:
        """Pickle a call for the training threads of the other ranks, which may come to it much later."""
        self._calls += 1
        return self.dumps(value)

    # -- in the others ---------------------------------------------------------------------------------------------

    def delete_all(self, deleted: list[Deleted]) -> None:
        """Delete the objects that rank 0 has deleted, except those that a call not yet loaded here may name."""
        with self._changed:
            self._deleted.extend(deleted)
            self._delete_unnamed()

    def loads(self, data: bytes) -> Any:
        """Unpickle a value of rank 0. A key becomes this rank's own object; blocks until this rank has made that."""

        def own(key: _Key) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: key in self._objects)
                return self._objects[key]

        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = own  # type: ignore[method-assign]
        return unpickler.load()

    def loads_call(self, data: bytes) -> Any:
        """Unpickle a result of `dumps_call` in the training thread: each result, in the order sent."""
        value = self.loads(data)
        with self._changed:
            self._calls += 1
            self._delete_unnamed()
        return value

    def _delete_unnamed(self) -> None:
        for number, calls in self.take_deleted():
            if calls > self._calls:
                self._deleted.append((number, calls))
            elif self._objects.pop(number, None) is None:
                self._unmade.add(number)
