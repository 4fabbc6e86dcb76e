"""`Ranks`: this process among the ranks of its replica, and the messages between them; `Exchange` moves tensors.

Messages go through gloo groups of our own, on the CPU, so that they mix with no collective of the user's training. The
groups live as long as the process. A replica of one process is `Ranks.alone()`: no message is ever sent.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from diloco_orchestrator.allreduce.vectors import empty
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.exchange import (
    ExchangePlan,
    Move,
    exchange_plan,
    local_part,
    messages,
    ranges_in,
)

T = TypeVar("T")

_MOST_BYTES = 64 * 2**20  # of a message, beside the tensors that it is made of
_NO_LIMIT = timedelta(days=365)
GO, END, CALL = range(3)  # the signals of rank 0 to the others, at a step boundary


class Signal(NamedTuple):
    """A signal of rank 0: `GO`, `END` or `CALL`, with two numbers, and for a call its name and arguments."""

    kind: int
    first: int
    second: int
    call: tuple[str, tuple[Any, ...]] | None = None


class Ranks:
    """One rank of a replica. `rank` of `ranks`, `local_rank` on this host; only rank 0 writes records.

    Args:
        calls: the group in which rank 0 signals the others what to do. They wait there without limit while rank 0 is
            busy with the bucket: the process above them watches that rank 0 lives.
        data: the group of tensors and small objects, with the replica's time-out.
    """

    def __init__(self, rank: int, ranks: int, local_rank: int, calls: Any = None, data: Any = None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.local_rank = local_rank
        self._calls = calls
        self._data = data

    @classmethod
    def alone(cls) -> "Ranks":
        """The only rank of a replica of one process."""
        return cls(0, 1, 0)

    @classmethod
    def joined(cls, local_rank: int, timeout_s: float) -> "Ranks":
        """This process's rank in the default process group, which must exist. Every rank calls it at the same time."""
        calls = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        data = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, calls, data)

    def await_all(self, what: str) -> None:
        """Block until every rank has called this. Raises `ConfigError` in rank 0, naming those that did not in time.

        `what`: the call of the user that brings a rank here, such as "ctx.attach".
        """
        if self.ranks == 1:
            return
        try:
            dist.monitored_barrier(self._data, wait_all_ranks=True)
        except RuntimeError as error:
            if self.rank:
                raise
            raise ConfigError(
                f"not every rank of this replica reached {what}, which all {self.ranks} must call: {error}. Call it in "
                "every rank, not under `if rank == 0`."
            ) from None

    # -- signals of rank 0 -----------------------------------------------------------------------------------------

    def signal(self, kind: int, first: int = 0, second: int = 0) -> None:
        """In rank 0: send all others `GO` or `END`, with two numbers. One broadcast."""
        if self.ranks > 1:
            dist.broadcast(torch.tensor([kind, first, second]), 0, self._calls)

    def signal_call(self, name: str, args: Sequence[Any]) -> None:
        """In rank 0: make all others call a method with these arguments, as this rank is about to."""
        if self.ranks > 1:
            body = bytearray(pickle.dumps((name, tuple(args))))
            self.signal(CALL, len(body))
            dist.broadcast(torch.frombuffer(body, dtype=torch.uint8), 0, self._calls)

    def next_signal(self) -> Signal:
        """In the other ranks: block until rank 0 sends a signal, without limit, and return it."""
        header = torch.zeros(3, dtype=torch.int64)
        dist.broadcast(header, 0, self._calls)
        kind, first, second = map(int, header.tolist())
        if kind != CALL:
            return Signal(kind, first, second)
        body = torch.empty(first, dtype=torch.uint8)
        dist.broadcast(body, 0, self._calls)
        return Signal(kind, first, second, pickle.loads(body.numpy().tobytes()))

    # -- objects and bytes -----------------------------------------------------------------------------------------

    def everyone(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, in every rank. All of them call it."""
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, self._data)
        return found

    def shared(self, value: T) -> T:
        """Rank 0's value, in every rank. All of them call it."""
        found: list[Any] = [value]
        if self.ranks > 1:
            dist.broadcast_object_list(found, 0, self._data)
        return found[0]  # type: ignore[no-any-return]

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send a flat tensor of bytes on the CPU to a rank, which calls `receive`."""
        dist.send(data, to, self._data)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Fill a flat tensor of bytes on the CPU by what a rank sends."""
        dist.recv(data, source, self._data)


class Exchange:
    """Moves tensors between rank 0, which has them whole on the CPU, and the ranks that hold them or parts of them.

    Made by all ranks together. `tensors`: this rank's, by name, the same names and shapes in every rank; they are read
    and written whenever this object's methods are called, by all ranks together.
    """

    def __init__(self, ranks: Ranks, tensors: Mapping[str, torch.Tensor], plan: ExchangePlan | None = None) -> None:
        self._ranks = ranks
        self._tensors = tensors
        self._sizes = {name: tensor.element_size() for name, tensor in tensors.items()}
        numels = {name: tensor.numel() for name, tensor in tensors.items()}
        self._plan = plan or exchange_plan(
            ranks.everyone({name: ranges_in(tensor, name) for name, tensor in tensors.items()}), numels
        )

    def gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """In rank 0: these tensors whole, by name; elsewhere nothing.

        A tensor that rank 0 holds whole is the tensor itself, not a copy; any other is new, on the CPU.
        """
        whole: dict[str, torch.Tensor] = {}
        wanted = set(names)
        if not self._ranks.rank:
            for name in names:
                tensor = self._tensors[name]
                if local_part(tensor).numel() == tensor.numel():
                    whole[name] = local_part(tensor).view(tensor.shape)
                else:
                    whole[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for move in self._plan.gathered[0]:
                if move.name in wanted and whole[move.name].data_ptr() != self._flat(move.name).data_ptr():
                    whole[move.name].view(-1)[move.start : move.stop].copy_(self._piece(move))
        for rank in range(1, self._ranks.ranks):
            for message in self._messages(self._plan.gathered[rank], wanted):
                if self._ranks.rank == rank:
                    data = self._room(message)
                    for move, part in self._parts(message, data):
                        part.copy_(self._piece(move))
                    self._ranks.send(data, 0)
                elif not self._ranks.rank:
                    data = self._room(message)
                    self._ranks.receive(data, rank)
                    for move, part in self._parts(message, data):
                        whole[move.name].view(-1)[move.start : move.stop].copy_(part)
        return whole

    @torch.no_grad()
    def scatter(self, names: Sequence[str], read: Callable[[str, int, int], torch.Tensor]) -> None:
        """Set these tensors in all ranks to the values that rank 0 has.

        `read(name, start, stop)`: in rank 0, elements [start, stop) of a tensor, flat on the CPU, in any dtype; the
        others never call it.
        """
        wanted = set(names)
        for rank in range(self._ranks.ranks):
            for message in self._messages(self._plan.scattered[rank], wanted):
                if rank == 0:
                    if not self._ranks.rank:
                        for move in message:
                            self._set(move, read(move.name, move.start, move.stop))
                elif not self._ranks.rank:
                    data = self._room(message)
                    for move, part in self._parts(message, data):
                        part.copy_(read(move.name, move.start, move.stop))
                    self._ranks.send(data, rank)
                elif self._ranks.rank == rank:
                    data = self._room(message)
                    self._ranks.receive(data, 0)
                    for move, part in self._parts(message, data):
                        self._set(move, part)

    def _messages(self, moves: Sequence[Move], wanted: set[str]) -> list[list[Move]]:
        return list(messages([move for move in moves if move.name in wanted], self._sizes, _MOST_BYTES))

    def _room(self, message: Sequence[Move]) -> torch.Tensor:
        size = sum((move.stop - move.start) * self._sizes[move.name] for move in message)
        # float32, which `vectors.empty` allocates; 8 bytes more for each part keep the parts aligned.
        return empty(-(-size // 4) + 2 * len(message)).view(torch.uint8)

    def _parts(self, message: Sequence[Move], data: torch.Tensor) -> list[tuple[Move, torch.Tensor]]:
        """Each move of a message with its place in the message's bytes, in the tensor's dtype."""
        found, at = [], 0
        for move in message:
            size = (move.stop - move.start) * self._sizes[move.name]
            found.append((move, data[at : at + size].view(self._tensors[move.name].dtype)))
            at += -(-size // 8) * 8
        return found

    def _flat(self, name: str) -> torch.Tensor:
        return local_part(self._tensors[name]).reshape(-1)

    def _piece(self, move: Move) -> torch.Tensor:
        return self._flat(move.name)[move.at : move.at + move.stop - move.start]

    def _set(self, move: Move, values: torch.Tensor) -> None:
        held = local_part(self._tensors[move.name])
        if held.is_contiguous():
            held.view(-1)[move.at : move.at + values.numel()].copy_(values)
            return
        flat = held.reshape(-1)
        flat[move.at : move.at + values.numel()].copy_(values)
        held.copy_(flat.view(held.shape))
