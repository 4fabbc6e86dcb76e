"""`RankOwners`: the ranks (processes) of a replica, each holding some shards of the base, the parameters that a round
starts from.

Rank 0 sends a function and its arguments; each other rank runs it in a thread of its own, beside its training, and
sends back the result. Connections and gloo process group are separate from those of training, so that shards move
between replica and bucket while the ranks train. `rank_objects` has the objects that stay in the ranks from call to
call.
"""

import logging
import pickle
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.outer.arithmetic import denormals_kept
from diloco_orchestrator.replica.training.rank_objects import RankObjects
from diloco_orchestrator.replica.training.signal_lines import SignalLines

T = TypeVar("T")

log = logging.getLogger(__name__)

_Answer = tuple[Any, BaseException | None]  # of a task in one rank: its result, and the error if it raised one
_TIMED_OUT = "Timed out waiting"  # in an error of gloo
_SETTLE_S = 5.0  # after a rank was found to be missing: others find it at about the same time, and answer


class RankMissing(RuntimeError):
    """A rank has ended, or moved no tensor in time, so that a task in all ranks cannot be completed."""


class RankOwners(Owners):
    """The assignment of a base's shards to several ranks, and calls in all of them, as one rank sees them.

    A task may take any time, in which it moves bytes to or from the bucket; a tensor that it moves to or from another
    rank `timeout_s`.

    Args:
        group: of torch.distributed, with all ranks, gloo, with the time-out `timeout_s`, in seconds.
        lines: the connections over which rank 0 sends calls and gets their answers.
        own: objects of which every rank has its own, by the names under which they are sent.
    """

    def __init__(self, rank: int, ranks: int, group: Any, lines: SignalLines, timeout_s: float, **own: object) -> None:
        self.rank = rank
        self.ranks = ranks
        self._group = group
        self._lines = lines
        self._timeout_s = timeout_s
        self._missing: RankMissing | None = None  # in rank 0, once a rank is: no task can be called any more
        self._one_call = threading.Lock()
        self.objects = RankObjects(rank, {"owners": self, **own})
        self._server = threading.Thread(target=self._serve, name="shards", daemon=True)
        if rank:
            self._server.start()

    # -- in rank 0 -------------------------------------------------------------------------------------------------

    def each(self, task: Callable[..., T], *args: Any) -> list[T]:
        return self._call(None, task, args)

    def make(self, task: Callable[..., T], *args: Any) -> T:
        number = self.objects.new_number()
        try:
            made = self._call(number, task, args)[0]
        except BaseException:  # whatever ended it: some ranks may have made theirs
            self.objects.delete(number)
            raise
        self.objects.keep(number, made)
        return made

    def _call(self, number: int | None, task: Callable[..., T], args: tuple[Any, ...]) -> list[T]:
        assert not self.rank, "rank 0 alone begins calls"
        with self._one_call:
            if self._missing is not None:
                raise RankMissing(str(self._missing))
            self._lines.send(self.objects.dumps((self.objects.take_deleted(), number, task, args)))
            answers = self._answers(_answer(task, args))
        errors = {rank: error for rank, (_, error) in answers.items() if error is not None}
        for rank, error in errors.items():
            if not isinstance(error, RankMissing):
                if rank:
                    error.add_note(f"This happened in rank {rank} of the replica.")
                raise error
        if self._missing is not None:
            raise self._missing
        return [found for found, _ in answers.values()]

    def _answers(self, own: _Answer) -> dict[int, _Answer]:
        """The answers of all ranks to a call, by rank, `own` being rank 0's.

        Sets `_missing` if some rank is found to be missing: one that has ended, else those whose answers do not come
        soon after the first that says so. The others may only have waited for each other.
        """
        found, waiting, ended = {0: own}, set(range(1, self.ranks)), list[RankMissing]()
        while True:
            missing = [error for _, error in found.values() if isinstance(error, RankMissing)]
            within_s = min(_SETTLE_S, self._timeout_s) if missing else None
            if not waiting or (rank := self._lines.first_of(waiting, within_s)) is None:
                break
            waiting.remove(rank)
            answer = self._answer_of(rank)
            if answer is None:
                ended.append(self._ended(rank))
            found[rank] = answer or (None, ended[-1])
        if missing:
            self._missing = [*ended, *([self._not_in_time(sorted(waiting))] if waiting else []), *missing][0]
        return dict(sorted(found.items()))

    def _ended(self, rank: int) -> RankMissing:
        return RankMissing(f"rank {rank} of {self.ranks} has ended in a task of all ranks")

    def _not_in_time(self, ranks: Collection[int]) -> RankMissing:
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self.ranks}"
        return RankMissing(
            f"{who} moved no tensor between ranks for {self._timeout_s:.0f} s (retry.hung_after_s): it hangs, or is "
            "stopped. See its stack in the attempt's log."
        )

    def close(self) -> None:
        """End the thread in which each other rank runs the functions that rank 0 sends. Called in every rank, after the
        last call.
        """
        if self.rank:
            self._server.join()
        else:
            with self._one_call:
                self._lines.send(b"")
        self._lines.close()

    # -- in the others ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """In ranks other than 0: run the functions that rank 0 sends, until it ends."""
        with denormals_kept():
            while True:
                try:
                    body = self._lines.receive()
                except RuntimeError as error:
                    log.debug("rank 0 has ended: %s", error)
                    return
                if not body:
                    return
                self._do(body)

    def _do(self, body: bytes) -> None:
        deleted, number, task, args = self.objects.loads(body)
        self.objects.delete_all(deleted)
        found, error = _answer(task, args)
        if number is not None and error is None:
            self.objects.keep(number, found)
            found = None
        self._reply(found, error)

    def send(self, data: torch.Tensor, to: int) -> None:
        with self._named(to):
            dist.send(data, to, self._group)

    def receive(self, data: torch.Tensor, source: int) -> None:
        with self._named(source):
            dist.recv(data, source, self._group)

    @contextmanager
    def _named(self, other: int) -> Iterator[None]:
        """Raise what gloo raises if a rank is missing as `RankMissing`, with the rank `other` that was waited for."""
        try:
            yield
        except RuntimeError as error:
            raise self._not_in_time([other]) if _TIMED_OUT in str(error) else self._ended(other) from None

    # -- messages --------------------------------------------------------------------------------------------------

    def _reply(self, found: Any, error: BaseException | None) -> None:
        try:
            body = pickle.dumps((found, error))
            pickle.loads(body)
        except Exception:  # an error of somebody's library, which cannot be sent
            body = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
        self._lines.send(body)

    def _answer_of(self, rank: int) -> _Answer | None:
        """The next answer of a rank; None if it has ended."""
        try:
            found, error = pickle.loads(self._lines.receive(rank))
        except RuntimeError:
            return None
        return found, error


def _answer(task: Callable[..., T], args: tuple[Any, ...]) -> tuple[T, BaseException | None]:
    """The result of `task(*args)`, and the error if it raised one."""
    try:
        return task(*args), None
    except BaseException as error:  # it is raised in rank 0 once every rank has answered
        return None, error  # type: ignore[return-value]
