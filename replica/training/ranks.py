"""`Ranks`: this process's place among the ranks of its replica, and messages between them; `Exchange` moves tensors.

Messages go through sockets and gloo groups of our own, on the CPU, so that they mix with no collective of the user's
training. The groups live as long as the process. A replica of one process is `Ranks.alone()`: no message is ever sent.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from diloco_orchestrator.allreduce.owners import ALONE, Owners
from diloco_orchestrator.allreduce.vectors import empty
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.exchange import (
    Move,
    Owned,
    Pieces,
    exchange_plan,
    local_part,
    messages,
    ranges_in,
)
from diloco_orchestrator.replica.training.rank_owners import RankOwners
from diloco_orchestrator.replica.training.signal_lines import SignalLines
from diloco_orchestrator.snapshots.pieces_of_ranks import PiecesOfRanks

T = TypeVar("T")

_MOST_BYTES = 2**20  # of a message, unless one range has more; larger ones were no faster over gloo on one machine
GO, END, CALL = range(3)  # the signals of rank 0 to the others, at a step boundary
_HEADER = struct.Struct("<3q")  # of a signal: its kind and two numbers; the arguments of a call follow it


class Signal(NamedTuple):
    """A message of rank 0 to the other ranks: to continue training (`GO`), to end it (`END`) or to run a method
    (`CALL`).

    `first`, `second`: for `GO` and `END` the inner steps so far, and the round with flags (`follower`). `call`: name
    and arguments of the method, and the number under which its result is stored, if it is.
    """

    kind: int
    first: int
    second: int
    call: tuple[str, tuple[Any, ...], int | None] | None = None


class Ranks:
    """One process's place in its replica: rank `rank` of `ranks`, `local_rank` on this host. Only rank 0 writes
    records.

    Args:
        lines: the connections over which rank 0 signals the others what to do. They wait there without limit while
            rank 0 is busy with the bucket: the parent process watches that rank 0 lives.
        data: the group of tensors and small objects, with the replica's time-out.
        owners: the assignment of the base's shards to the ranks; None for a single rank, which owns all.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        local_rank: int,
        lines: SignalLines | None = None,
        data: Any = None,
        owners: RankOwners | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.local_rank = local_rank
        self.owners: Owners = owners or ALONE
        self._owners = owners
        self._lines = lines
        self._data = data

    @classmethod
    def alone(cls) -> "Ranks":
        """The only rank of a replica of one process."""
        return cls(0, 1, 0)

    @classmethod
    def joined(cls, local_rank: int, host: str, timeout_s: float, **own: object) -> "Ranks":
        """This process's rank in torch's default process group, which must exist. Every rank calls it at the same time.

        `host`: name or address by which all ranks reach rank 0's machine. `timeout_s`: the limit of a collective, in
        seconds. `own`: objects of which every rank has its own, by name, such as its connection to the bucket
        (`RankObjects`).
        """
        data, shards = (dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) for _ in range(2))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        everyone = cls(rank, ranks, local_rank, data=data).everyone
        signals, calls = (SignalLines.joined(rank, ranks, host, everyone) for _ in range(2))
        owners = RankOwners(rank, ranks, shards, calls, timeout_s, **own)
        return cls(rank, ranks, local_rank, signals, data, owners)

    def await_all(self, what: str, within_s: float = 1800.0) -> None:
        """Block until every rank has called this method. Raises `ConfigError` in rank 0, naming those that did not in
        time.

        `what`: the call of the user that brings a rank here, such as "ctx.attach". `within_s`: how long rank 0 waits,
        in seconds; others may prepare their data meanwhile, which takes longer than a collective.
        """
        if self.ranks == 1:
            return
        try:
            dist.monitored_barrier(self._data, timedelta(seconds=within_s), wait_all_ranks=True)
        except RuntimeError as error:
            if self.rank:
                raise
            raise ConfigError(
                f"not every rank of this replica reached {what}, which all {self.ranks} must call: {error}. Call it in "
                "every rank, not under `if rank == 0`."
            ) from None

    def close(self) -> None:
        """End the threads of this rank that exchange messages with other ranks. Called in every rank, after the last
        call.
        """
        if self._owners is not None:
            self._owners.close()
        if self._lines is not None:
            self._lines.close()

    # -- signals of rank 0 -----------------------------------------------------------------------------------------

    def signal(self, kind: int, first: int = 0, second: int = 0) -> None:
        """Send the signal `kind`, `GO` (continue training) or `END`, from rank 0 to all other ranks.

        `first`, `second`: the inner steps so far, and the number of the round with flags (see `follower`).
        """
        if self._lines is not None:
            self._lines.send(_HEADER.pack(kind, first, second))

    def signal_call(self, name: str, args: Sequence[Any], number: int | None = None) -> None:
        """In rank 0: make all other ranks call the method `name` with these arguments, as this rank is about to.

        Objects of which every rank has its own are replaced by that (`RankObjects`). `number`: under which each keeps
        the result.
        """
        if self._owners is not None and self._lines is not None:
            body = self._owners.objects.dumps_call((name, tuple(args), number))
            self._lines.send(_HEADER.pack(CALL, 0, 0) + body)

    def next_signal(self) -> Signal:
        """In the other ranks: block until rank 0 sends a signal, without limit, and return it."""
        assert self._owners is not None and self._lines is not None, "a single rank gets no signals"
        message = self._lines.receive()
        kind, first, second = _HEADER.unpack_from(message)
        if kind != CALL:
            return Signal(kind, first, second)
        return Signal(kind, first, second, self._owners.objects.loads_call(message[_HEADER.size :]))

    def kept(self, number: int | None, made: T) -> T:
        """Store `made` in this rank under `number`, by which later calls from rank 0 name it in every rank.

        Stores nothing if `number` is None. Returns `made`.
        """
        if self._owners is not None and number is not None:
            self._owners.objects.keep(number, made)
        return made

    def new_number(self) -> int | None:
        """In rank 0: a number for an object that every rank is about to make; None for a single rank."""
        return None if self._owners is None else self._owners.objects.new_number()

    # -- objects and bytes -----------------------------------------------------------------------------------------

    def everyone(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, in every rank. All ranks have to call it."""
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, self._data)
        return found

    def shared(self, value: T) -> T:
        """Rank 0's `value`, in every rank. All ranks have to call it."""
        found: list[Any] = [value]
        if self.ranks > 1:
            dist.broadcast_object_list(found, 0, self._data)
        return found[0]  # type: ignore[no-any-return]

    def swap(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> None:
        """Send a flat tensor of bytes on the CPU to a rank and fill another by what a rank sends, at the same time.

        The other rank of each message calls this too; an empty tensor is no message.
        """
        under_way = [dist.isend(sent, to, self._data)] if len(sent) else []
        under_way += [dist.irecv(received, source, self._data)] if len(received) else []
        for each in under_way:
            assert each is not None, "this rank is in the group"
            each.wait()


class Exchange:
    """Moves tensors between the ranks that hold them, or parts of them, and those that own ranges of them.

    Every rank makes one and calls its methods at the same time. `tensors`: this rank's, by name, the same names and
    shapes in every rank; they are read and written whenever the methods are called. `pieces`: what each rank holds, as
    `pieces_in` finds it. `owned`: the owners of their ranges.
    """

    def __init__(
        self, ranks: Ranks, tensors: Mapping[str, torch.Tensor], pieces: Sequence[Pieces], owned: Owned
    ) -> None:
        self._ranks = ranks
        self._tensors = tensors
        self._sizes = {name: tensor.element_size() for name, tensor in tensors.items()}
        self._plan = exchange_plan(pieces, owned)

    def collect(self, names: Sequence[str], put: Callable[[Move, torch.Tensor], None]) -> None:
        """Send every owner the values of its ranges of the tensors `names`.

        `put(move, values)` is called for each: `values` are flat, in the tensor's dtype, and share the memory of this
        rank's tensor where it holds the range itself; else they are on the CPU.
        """
        for move in self._own(self._plan.gathered, names):
            put(move, self._piece(move))
        ends = [(move, move.holder, move.owner) for move in self._plan.gathered]
        for move, part in self._exchanged(ends, names, self._piece):
            put(move, part)

    @torch.no_grad()
    def spread(self, names: Sequence[str], read: Callable[[str, int, int], torch.Tensor]) -> None:
        """Set the tensors `names` in all ranks to the values that the owners of their ranges have.

        `read(name, start, stop)`: elements [start, stop) of a tensor, flat on the CPU, in any dtype; of ranges that
        this rank owns.
        """
        for move in self._own(self._plan.scattered, names):
            self._set(move, read(move.name, move.start, move.stop))
        ends = [(move, move.owner, move.holder) for move in self._plan.scattered]
        for move, part in self._exchanged(ends, names, lambda move: read(move.name, move.start, move.stop)):
            self._set(move, part)

    def _own(self, moves: Sequence[Move], names: Sequence[str]) -> list[Move]:
        wanted, me = set(names), self._ranks.rank
        return [move for move in moves if move.holder == move.owner == me and move.name in wanted]

    def _exchanged(
        self,
        moves: Sequence[tuple[Move, int, int]],
        names: Sequence[str],
        values: Callable[[Move], torch.Tensor],
    ) -> Iterator[tuple[Move, torch.Tensor]]:
        """Send and receive all moves between this rank and others, each with its sender and receiver.

        Yields what was received, flat on the CPU in the tensor's dtype. `values`: of a move, to be sent. In turn k
        every rank sends to the k-th after it, in messages of bounded size.
        """
        wanted, me, ranks = set(names), self._ranks.rank, self._ranks.ranks
        by_pair: dict[tuple[int, int], list[Move]] = {}
        for move, sender, receiver in moves:
            if move.name in wanted and sender != receiver and me in (sender, receiver):
                by_pair.setdefault((sender, receiver), []).append(move)
        for turn in range(1, ranks):
            source, target = (me - turn) % ranks, (me + turn) % ranks
            pairs = by_pair.get((me, target), []), by_pair.get((source, me), [])
            cut = (messages(each, self._sizes, _MOST_BYTES) for each in pairs)
            for outgoing, incoming in zip_longest(*cut, fillvalue=()):
                sent, received = self._filled(outgoing, values), self._room(incoming)
                self._ranks.swap(sent, target, received, source)
                del sent
                yield from self._parts(incoming, received)
                del received

    def _filled(self, message: Sequence[Move], values: Callable[[Move], torch.Tensor]) -> torch.Tensor:
        data = self._room(message)
        for move, part in self._parts(message, data):
            part.copy_(values(move))
        return data

    def _room(self, message: Sequence[Move]) -> torch.Tensor:
        size = sum((move.stop - move.start) * self._sizes[move.name] for move in message)
        # float32, which `vectors.empty` allocates; 8 bytes more for each part keep the parts aligned.
        return empty(-(-size // 4) + 2 * len(message)).view(torch.uint8)

    def _parts(self, message: Sequence[Move], data: torch.Tensor) -> list[tuple[Move, torch.Tensor]]:
        """Each range in a message, with its part of the message's bytes `data`, in the tensor's dtype."""
        found, at = [], 0
        for move in message:
            size = (move.stop - move.start) * self._sizes[move.name]
            found.append((move, data[at : at + size].view(self._tensors[move.name].dtype)))
            at += -(-size // 8) * 8
        return found

    def _piece(self, move: Move) -> torch.Tensor:
        return local_part(self._tensors[move.name]).reshape(-1)[move.at : move.at + move.stop - move.start]

    def _set(self, move: Move, values: torch.Tensor) -> None:
        held = local_part(self._tensors[move.name])
        if held.is_contiguous():
            held.view(-1)[move.at : move.at + values.numel()].copy_(values)
            return
        flat = held.reshape(-1)
        flat[move.at : move.at + values.numel()].copy_(values)
        held.copy_(flat.view(held.shape))


def pieces_in(ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> list[Pieces]:
    """The ranges that each rank holds of tensors of the same names. Every rank calls it at the same time."""
    return ranks.everyone({name: ranges_in(tensor, name) for name, tensor in tensors.items()})


def read_in_parts(ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> PiecesOfRanks:
    """Tensors of the same names in each rank, which no rank will have whole. Every rank calls it at the same time."""
    plan = exchange_plan(pieces_in(ranks, tensors), {name: [(0, each.numel(), 0)] for name, each in tensors.items()})
    ranges: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in tensors}
    for move in sorted(plan.gathered, key=lambda each: each.start):
        ranges[move.name].append((move.start, move.stop, move.holder, move.at))
    return PiecesOfRanks(ranks.owners, ranges, {name: local_part(each) for name, each in tensors.items()})
