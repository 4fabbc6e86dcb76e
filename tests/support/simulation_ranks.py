"""Replicas of several ranks in a simulation: each rank a process on virtual time, which may die at any line.

Ranks, owners of shards, followers and the choice of the rank that is named are real; messages between the ranks of one
attempt go through queues in memory in place of gloo. As in `RankProcesses` the process above claims the attempt, starts
its ranks, ends all of them once one has failed, and writes the exit record; ranks die with it.
"""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from virtual_time import Killed, Process, VirtualBackground, VirtualClock

from diloco_orchestrator.protocol.launched import Launched, settings_sha256
from replica.attempt.attempt import Attempt, adopted_attempt
from replica.process.rank_processes import RankState, ending_of
from replica.process.run_attempt import Ending, call_entrypoint
from replica.training.rank_objects import RankObjects
from replica.training.rank_owners import RankOwners
from replica.training.ranks import CALL, Ranks, Signal

if TYPE_CHECKING:
    from simulation import Simulation

_LOOK_S = 0.2  # between two looks at the ranks
_SETTLE_S = 1.0  # after a failure, for those that it brings about
_POLLS_S = (0.001, 0.3)  # first and longest pause of one that waits for a message


@dataclass
class Wire:
    """The queues between the ranks of one attempt. `timeout_s`: the limit of a message of "data" and "tensors"."""

    timeout_s: float
    processes: list[Process] = field(default_factory=list)
    queues: dict[tuple[str, int, int], deque[bytes]] = field(default_factory=lambda: defaultdict(deque))

    def send(self, group: str, source: int, target: int, value: Any) -> None:
        self.queues[group, source, target].append(pickle.dumps(value))

    def receive(self, clock: VirtualClock, group: str, source: int, target: int) -> Any:
        """The next message. Raises `RuntimeError`, worded as gloo's, if the sender has died or takes too long."""
        queue, since, pause_s = self.queues[group, source, target], clock.now(), _POLLS_S[0]
        while not queue:
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLLS_S[1])
            if not queue and self.is_gone(source):
                raise RuntimeError("[gloo] Connection closed by peer")
            if not queue and group in ("data", "tensors") and clock.now() - since > self.timeout_s:
                raise RuntimeError(f"[gloo] Timed out waiting {self.timeout_s} s")
        return pickle.loads(queue.popleft())

    def is_gone(self, rank: int) -> bool:
        return self.processes[rank].killed or self.processes[rank].ended


class _Turns:
    """A lock and a condition for virtual threads, of which one runs at a time."""

    def __init__(self, clock: VirtualClock, *, excludes: bool) -> None:
        self._clock, self._excludes, self._taken = clock, excludes, False

    def __enter__(self) -> None:
        self.wait_for(lambda: not self._taken)
        self._taken = self._excludes

    def __exit__(self, *_: object) -> None:
        self._taken = False

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._clock.sleep(_POLLS_S[0])

    def notify_all(self) -> None:
        pass


@dataclass
class _Lines:
    """`SignalLines` over a `Wire`, for calls to the threads of shards."""

    rank: int
    ranks: int
    wire: Wire
    clock: VirtualClock

    def send(self, body: bytes) -> None:
        for rank in [0] if self.rank else range(1, self.ranks):
            self.wire.send("shards", self.rank, rank, body)

    def receive(self, rank: int = 0) -> bytes:
        body: bytes = self.wire.receive(self.clock, "shards", rank, self.rank)
        return body

    def first_of(self, ranks: Collection[int], within_s: float | None) -> int | None:
        since, pause_s = self.clock.now(), _POLLS_S[0]
        while within_s is None or self.clock.now() - since < within_s:
            for rank in sorted(ranks):
                if self.wire.queues["shards", rank, 0] or self.wire.is_gone(rank):
                    return rank
            self.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLLS_S[1])
        return None


class SimOwners(RankOwners):
    """`RankOwners` over a `Wire`, whose other ranks serve in a virtual thread."""

    def __init__(self, rank: int, ranks: int, wire: Wire, clock: VirtualClock, **own: object) -> None:
        lines: Any = _Lines(rank, ranks, wire, clock)
        super().__init__(0, ranks, None, lines, wire.timeout_s)  # as rank 0, which starts no real thread
        self.rank, self._wire, self._clock = rank, wire, clock
        self.objects = RankObjects(rank, {"owners": self, "clock": clock, **own})
        self._one_call = _Turns(clock, excludes=True)  # type: ignore[assignment]
        self.objects._changed = _Turns(clock, excludes=False)  # type: ignore[assignment]
        if rank:
            clock.world.spawn(f"{clock.process.name} shards", lambda _: self._serve(), owner=clock.process)

    def close(self) -> None:
        """Nothing: the thread ends with its process."""

    def send(self, data: torch.Tensor, to: int) -> None:
        self._wire.send("tensors", self.rank, to, data.clone())

    def receive(self, data: torch.Tensor, source: int) -> None:
        with self._named(source):
            data.copy_(self._wire.receive(self._clock, "tensors", source, self.rank))


class SimRanks(Ranks):
    """`Ranks` over a `Wire`."""

    def __init__(self, wire: Wire, clock: VirtualClock, owners: SimOwners) -> None:
        super().__init__(owners.rank, owners.ranks, owners.rank, owners=owners)
        self._wire, self._clock = wire, clock

    def await_all(self, what: str, within_s: float = 1800.0) -> None:
        self.everyone(None)

    def signal(self, kind: int, first: int = 0, second: int = 0) -> None:
        self._tell((kind, first, second))

    def signal_call(self, name: str, args: Sequence[Any], number: int | None = None) -> None:
        assert self._owners is not None
        self._tell(self._owners.objects.dumps_call((name, tuple(args), number)))

    def next_signal(self) -> Signal:
        said = self._wire.receive(self._clock, "calls", 0, self.rank)
        assert self._owners is not None
        return Signal(CALL, 0, 0, self._owners.objects.loads_call(said)) if isinstance(said, bytes) else Signal(*said)

    def _tell(self, said: Any) -> None:
        for rank in range(1, self.ranks):
            self._wire.send("calls", 0, rank, said)

    def everyone(self, value: Any) -> list[Any]:
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        for rank in others:
            self._wire.send("data", self.rank, rank, value)
        found = {rank: self._wire.receive(self._clock, "data", rank, self.rank) for rank in others}
        return [found.get(rank, value) for rank in range(self.ranks)]

    def shared(self, value: Any) -> Any:
        if self.rank:
            return self._wire.receive(self._clock, "data", 0, self.rank)
        for rank in range(1, self.ranks):
            self._wire.send("data", 0, rank, value)
        return value

    def swap(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> None:
        if len(sent):
            self._wire.send("data", self.rank, to, sent)
        if len(received):
            received.copy_(self._wire.receive(self._clock, "data", source, self.rank))


def trained_in_ranks(simulation: "Simulation", attempt: Attempt, clock: VirtualClock, ranks: int) -> Ending:
    """Start the ranks of an attempt, and return how it ended once none of them lives."""
    world, who = clock.world, (attempt.replica_id, attempt.number)
    hung_s = attempt.config.retry.hung_after_s
    wire, states = Wire(hung_s), [RankState(rank, heard_at=clock.now(), is_ready=True) for rank in range(ranks)]

    def train_rank(own: VirtualClock, rank: int) -> None:
        ending = _trained(simulation, attempt, own, wire, rank, ranks)
        if own.process.killed:
            raise Killed(own.process.name)
        states[rank].ending = ending
        while rank and not ending.error and not wire.processes[0].ended:  # which still asks for digests of the base
            own.sleep(_LOOK_S)

    for rank in range(ranks):
        name = f"{clock.process.name} rank {rank}"
        process = world.spawn(name, lambda own, rank=rank: train_rank(own, rank), parent=clock.process)
        wire.processes.append(process)
    simulation.ranks[who] = wire.processes

    def look() -> list[RankState]:
        """Note which ranks have died, and return those that are stopped for too long."""
        clock.sleep(_LOOK_S)
        for state, process in zip(states, wire.processes, strict=True):
            state.died = -9 if process.killed else 0 if process.ended else None
            if process.stopped_until <= clock.now():
                state.heard_at = clock.now()
        return [each for each in states if each.is_silent(clock.now(), hung_s, hung_s)]

    try:
        silent: list[RankState] = []
        while any(each.died is None for each in states) and not silent and not any(s.has_failed for s in states):
            silent = look()
        if not silent and not any(each.has_failed for each in states):
            assert states[0].ending is not None
            return states[0].ending
        until = clock.now() + _SETTLE_S
        while clock.now() < until:
            look()  # as the product does, it goes on with the ranks that were silent, though one may be heard again
        return ending_of(states, silent, hung_s)
    finally:
        for process in wire.processes:
            world.kill(process)


def _trained(
    simulation: "Simulation", above: Attempt, clock: VirtualClock, wire: Wire, rank: int, ranks: int
) -> Ending:
    """Train as one rank of the attempt that the process above has claimed."""
    stamp, background = simulation.stamp(clock), VirtualBackground(clock)
    attempt = adopted_attempt(
        simulation.network(clock),
        above.replica_id,
        above.number,
        above.begin.leg,
        above.claim_sha256,
        clock,  # type: ignore[arg-type]
        stamp,
        above.should_leave,
        background,
        Launched(above.log.run_sha256, settings_sha256(above.begin.settings)),
    )
    owners = SimOwners(rank, ranks, wire, clock, store=attempt.store, background=background)
    pulse = above.pulse if rank == 0 else attempt.pulse
    attempt = replace(attempt, owners=owners, pulse=pulse)
    return call_entrypoint(attempt, lambda _: simulation._train, ranks=SimRanks(wire, clock, owners))
