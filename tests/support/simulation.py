"""A whole run in one process and on virtual time, with faults from one seed: `simulate(seed=…)`.

Everything is real but the machine: the coordinator and its supervision, attempts from claim to exit record, sessions,
the loop, participants, guard and retries run as they are. The store is memory behind a faulty network, the
executor starts virtual processes, training is a gradient that depends on replica and batch alone, so that what every
contribution must hold is known.
"""

import hashlib
import logging
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from virtual_time import Killed, Process, VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.config import OuterConfig, RunConfig, make_config
from diloco_orchestrator.errors import DilocoError, PayloadCorrupt, StoreUnavailable
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base, BaseShard
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.claims import wrong_bases
from diloco_orchestrator.protocol.codecs import decode
from diloco_orchestrator.protocol.process import EXIT_PERMANENT, EXIT_SUPERSEDED
from diloco_orchestrator.protocol.records import Commit, Contribution, Halt, Run, Stamp
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots import rebuild as rebuild_module
from diloco_orchestrator.snapshots.rebuild import rebuild
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import LASTING
from diloco_orchestrator.store.retrying import RetryingStore
from diloco_orchestrator.supervision.coordinator import Coordinator
from executors.contract import (
    ExecutorError,
    LaunchRequest,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
)
from replica.context import ReplicaContext
from replica.process.attempt import Attempt, claim_attempt
from replica.process.heartbeat import HeartbeatWriter
from replica.process.run_attempt import train, write_exit_record
from replica.rounds import snapshot_writer
from replica.training.checkpoint import Checkpoint, SavedState
from replica.training.session import TrainingSession

LEARNING_RATE = 1 / 64
STEP_S = 1.0
DAY_S = 86400.0


# Where a bit may flip: in the base at once; or in the next average, base before or after a step, rebuilt base, or base
# while a snapshot of it is written.
FLIPS = ("parameters", "momenta", "average", "before step", "after step", "rebuild", "snapshot")


class InvariantBroken(AssertionError):
    """Names the invariant (I1 to I10) and the seed."""


# -- what may go wrong ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One run and its misfortunes, all drawn from the seed."""

    seed: int
    replicas: int
    rounds: int
    settings: Mapping[str, Any]
    paces: tuple[float, ...]  # s per inner step, by replica
    fail: float = 0.0  # share of calls that fail before they take effect
    lose_reply: float = 0.0  # share of calls that take effect and then fail
    twice: float = 0.0  # share of creates that are sent twice
    latency_s: float = 0.05
    listing_lag_s: float = 0.0
    storms: tuple[tuple[float, float], ...] = ()  # (from, until) in which nearly every call is answered 503
    no_writes: tuple[tuple[float, float], ...] = ()  # (from, until) in which every write is refused
    kills: tuple[tuple[float, int], ...] = ()  # (when, which replica); -1: the coordinator, -2: everybody
    stops: tuple[tuple[float, int, float], ...] = ()  # SIGSTOP: (when, which, for how long)
    notices: tuple[tuple[float, int], ...] = ()  # SIGTERM
    vendor_down: tuple[tuple[float, float], ...] = ()  # (from, until) in which every call to the vendor fails
    no_network: tuple[tuple[float, float], ...] = ()  # (from, until) in which nobody reaches the bucket or the vendor
    no_machine: tuple[tuple[float, float, int], ...] = ()  # (from, until, replica): the vendor has no machine for it
    lies: tuple[tuple[float, int], ...] = ()  # (when, which): from then on its vendor calls a living attempt dead
    corrupt_payloads: tuple[tuple[int, int], ...] = ()  # (round, replica) whose payload goes bad after it is written
    nan: tuple[tuple[int, int], ...] = ()  # (batch, replica) with a gradient that is not finite
    flips: tuple[tuple[float, int, str], ...] = ()  # (when, which; -1: the coordinator, where of FLIPS): one bit
    rots: tuple[tuple[float, int, int], ...] = ()  # (when, round, replica) whose payload is damaged at that time
    lost_payloads: tuple[tuple[int, int], ...] = ()  # (round, replica): the store acknowledges it and does not keep it
    other_arithmetic: tuple[int, ...] = ()  # replicas whose outer step gives other bits, always
    no_commits: tuple[tuple[int, bytes], ...] = ()  # (round, bytes) under its commit's key before anybody starts
    collapse: bool = False
    halt_at: float | None = None
    reference: bool = False  # the undisturbed twin of another run

    @property
    def strict(self) -> bool:
        return self.settings["quorum"] == "all"

    @property
    def exact(self) -> bool:
        """Whether the run must end with the undisturbed run's bits."""
        lasting = (
            self.flips
            or self.other_arithmetic
            or self.collapse
            or self.nan
            or self.halt_at is not None
            or self.corrupt_payloads
            or self.no_commits
        )
        return self.strict and not lasting and not self.reference

    @property
    def outnumbers(self) -> bool:
        """Whether the replicas whose arithmetic is everybody's are the larger group."""
        return 2 * len(self.other_arithmetic) < self.replicas

    def undisturbed(self) -> "Plan":
        return Plan(0, self.replicas, self.rounds, self.settings, self.paces, reference=True)


def plan_of(seed: int, replicas: int | None = None, rounds: int | None = None, **settings: Any) -> Plan:
    """Everything about the run of a seed. What is given is not drawn."""
    draw = random.Random(seed)
    replicas = replicas or draw.choice([1, 2, 2, 3, 3, 4])
    rounds = rounds or draw.choice([3, 4, 5])
    quorum = draw.choice(["all", "all", None, None, 1])
    fragments, delay = draw.choice([(1, 0), (1, 0), (1, 0), (1, 1), (2, 0), (2, 1)])
    drawn = {
        "quorum": quorum,
        "sync_every": 4 * fragments,
        "fragments": fragments,
        "fragment_sync_delay": delay,
        "late": draw.choice(["carry", "carry", "drop"]),
        "snapshot_every": draw.choice([1, 2, 3]),
        "retention": draw.choice([{}, {}, {"payloads": "needed", "snapshots": 2}]),
    }
    drawn.update(settings)
    length = 5.0 * STEP_S * 4 * rounds  # kills and storms fall into the run, mostly

    def some(most: int) -> int:
        return draw.randint(0, most)

    def when() -> float:
        return round(draw.uniform(0.5, length), 2)

    def spans(most: int, longest: float) -> tuple[tuple[float, float], ...]:
        begun = [when() for _ in range(some(most))]
        return tuple((begin, begin + draw.uniform(1.0, longest)) for begin in begun)

    rough = draw.random() < 0.7
    return Plan(
        seed=seed,
        replicas=replicas,
        rounds=rounds,
        settings=drawn,
        paces=tuple(STEP_S * draw.choice([1.0, 1.0, 1.05, 1.3, 3.0]) for _ in range(replicas)),
        fail=draw.choice([0.0, 0.02, 0.1]) if rough else 0.0,
        lose_reply=draw.choice([0.0, 0.02, 0.1]) if rough else 0.0,
        twice=draw.choice([0.0, 0.05]) if rough else 0.0,
        latency_s=draw.choice([0.01, 0.05, 0.5]),
        listing_lag_s=draw.choice([0.0, 0.0, 2.0]) if rough else 0.0,
        storms=spans(1, 60.0) if rough else (),
        no_writes=spans(1, draw.choice([30.0, 3600.0])) if draw.random() < 0.15 else (),
        kills=tuple((when(), draw.randint(-2, replicas - 1)) for _ in range(some(3))),
        stops=tuple((when(), draw.randrange(replicas), draw.choice([3.0, 40.0, 300.0])) for _ in range(some(1))),
        notices=tuple((when(), draw.randrange(replicas)) for _ in range(some(1))),
        lies=tuple((when(), draw.randrange(replicas)) for _ in range(some(1))) if rough else (),
        corrupt_payloads=((draw.randint(1, rounds), draw.randrange(replicas)),) if draw.random() < 0.1 else (),
        nan=((draw.randint(0, 4 * rounds), draw.randrange(replicas)),) if draw.random() < 0.1 else (),
        collapse=draw.random() < 0.1,
        halt_at=when() if draw.random() < 0.1 else None,
        flips=tuple((8.0 + when(), draw.randrange(replicas), draw.choice(FLIPS)) for _ in range(some(2)))
        if draw.random() < 0.2
        else (),
    )


CALM = Plan(seed=1, replicas=3, rounds=4, settings={"quorum": None, "sync_every": 4}, paces=(1.0, 1.0, 1.0))


def calm(**changes: Any) -> Plan:
    """Three replicas and four rounds without misfortunes, but for `changes`; `settings` are added."""
    settings = {"fragments": 1, "fragment_sync_delay": 0, "late": "carry", "snapshot_every": 2, "retention": {}}
    return replace(CALM, **{**changes, "settings": {**settings, **CALM.settings, **changes.get("settings", {})}})


def flips_of(seed: int) -> Plan:
    """A run in which one or two bits flip anywhere and at any time, with a kill in some, all drawn from the seed."""
    draw = random.Random(f"flips {seed}")
    replicas, rounds = draw.choice([1, 2, 2, 3, 4]), draw.choice([4, 6, 8])
    fragments, delay = draw.choice([(1, 0), (1, 0), (1, 1), (2, 0), (2, 1)])
    length = 4.5 * rounds + 8.0
    settings = {
        "quorum": draw.choice([None, None, "all", 1]),
        "fragments": fragments,
        "fragment_sync_delay": delay,
        "sync_every": 4 * fragments,
        "snapshot_every": draw.choice([1, 2, 3]),
    }

    def when() -> float:
        return round(draw.uniform(8.0, length), 2)

    flips = [(when(), draw.randrange(replicas), draw.choice(FLIPS))]
    # A second one after the first is healed: of two faults in a lone replica's two rebuilds nobody could tell.
    if draw.random() < 1 / 3:
        flips.append((flips[0][0] + 40.0, draw.randrange(replicas), draw.choice(FLIPS)))
    return calm(
        seed=seed,
        replicas=replicas,
        rounds=rounds,
        paces=tuple(draw.choice([1.0, 1.0, 1.05, 1.3]) for _ in range(replicas)),
        settings=settings,
        flips=tuple(flips),
        kills=tuple((when(), draw.randrange(replicas)) for _ in range(draw.choice([0, 0, 1]))),
    )


# -- the bucket and the network before it -----------------------------------------------------------------------------


class Bucket(MemoryStore):
    """The truth. Remembers when each object was written, and that no object of the log ever changes."""

    def __init__(self, time: VirtualTime, plan: Plan) -> None:
        super().__init__("memory://simulation")
        self._time = time
        self._plan = plan
        self.written_at: dict[str, float] = {}
        self.commits: dict[str, bytes] = {}
        self.lost: set[str] = set()  # keys whose first write was acknowledged and not kept

    def rot(self, round_: int, replica_id: int) -> None:
        """Damage a payload that is there now."""
        for info in list(self.list(f"{keys.payloads(round_)}{replica_id}/")):
            data = self.get(info.key)
            super().put(info.key, bytes([data[0] ^ 1]) + data[1:])

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._note(key, data)

    def create(self, key: str, data: bytes) -> bool:
        if any(key.startswith(f"{keys.payloads(r)}{i}/") for r, i in self._plan.lost_payloads if key not in self.lost):
            self.lost.add(key)
            return True
        made = super().create(key, data)
        if made:
            self._note(key, data)
            self._maybe_corrupt(key, data)
        return made

    def _note(self, key: str, data: bytes) -> None:
        self.written_at[key] = self._time.now
        if key.endswith("commit.json") and self.commits.setdefault(key, data) != data:
            raise InvariantBroken(f"I1: {key} was written twice")

    def _maybe_corrupt(self, key: str, data: bytes) -> None:
        for round_, replica_id in self._plan.corrupt_payloads:
            shard = keys.parse_payload(key)
            if shard is not None and (shard.round, shard.replica_id, shard.take) == (round_, replica_id, 1):
                super().put(key, bytes([data[0] ^ 1]) + data[1:])


class Network:
    """One process's way to the bucket: takes time, fails, loses replies, repeats itself. A `Store`."""

    def __init__(self, bucket: Bucket, plan: Plan, clock: VirtualClock, chance: random.Random, trace: Any) -> None:
        self.url = bucket.url
        self._bucket = bucket
        self._plan = plan
        self._clock = clock
        self._chance = chance
        self._trace = trace

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._call("get", key, lambda: self._bucket.get(key, start, end))

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, lambda: self._bucket.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        def send() -> bool:
            made = self._bucket.create(key, data)
            if self._chance.random() < self._plan.twice:
                return self._bucket.create(key, data)  # the client's own library sent it again
            return made

        return self._call("create", key, send)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        seen = self._call("list", prefix, lambda: list(self._bucket.list(prefix, start_after)))
        newest = self._clock.now() - self._plan.listing_lag_s
        lagging = self._plan.listing_lag_s and self._chance.random() < 0.5
        return iter([i for i in seen if not lagging or self._bucket.written_at.get(i.key, 0.0) <= newest])

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self._bucket.delete(key))

    def _call(self, verb: str, key: str, call: Any) -> Any:
        plan, now = self._plan, self._clock.now()
        self._clock.sleep(self._chance.uniform(0, plan.latency_s))
        stormy = any(begin <= now < end for begin, end in plan.storms) and self._chance.random() < 0.9
        refused = verb in ("put", "create") and any(begin <= now < end for begin, end in plan.no_writes)
        cut = any(begin <= now < end for begin, end in plan.no_network)
        if cut or stormy or refused or self._chance.random() < plan.fail:
            raise StoreUnavailable(f"cannot {verb} {key}: 503 (simulated)")
        result = call()
        self._trace(self._clock, verb, key)
        self._clock.sleep(self._chance.uniform(0, plan.latency_s))
        if self._chance.random() < plan.lose_reply:
            raise StoreUnavailable(f"no reply to {verb} {key} (simulated)")
        return result


# -- processes --------------------------------------------------------------------------------------------------------


class Batches:
    """Batch numbers, for ever; the position is the next number."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next = state["next"]


def gradient(replica_id: int, batch: int) -> float:
    """A whole number, so that sums of steps are nearly exact."""
    return float(1 + (7 * batch + 3 * replica_id) % 5)


class Simulation:
    """One run. `run()` plays it and checks the invariants."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.time = VirtualTime()
        self.bucket = Bucket(self.time, plan)
        self.digest = hashlib.sha256()  # of the trace
        self.events = 0
        self.config = self._config()
        self.replicas: dict[tuple[int, int], Process] = {}
        self.coordinator: Process | None = None
        self.exit_codes: dict[tuple[int, int], int] = {}
        self.sessions: dict[tuple[int, int], TrainingSession] = {}
        self.last_digests: dict[int, str] = {}  # by replica: of the base that its training ended with
        self.noticed: set[tuple[int, int]] = set()  # (replica, attempt) that got SIGTERM
        self.lied: set[tuple[int, int]] = set()  # (replica, attempt) that lives, though its vendor says otherwise
        self.flipped: list[tuple[float, int, int]] = []  # (when, which replica, open round) of flips that hit
        self.hit_in_flight = 0  # kills of a replica whose round was in flight in the background
        self.loaded: list[Contribution] = []  # manifests whose saved state a replica went on from
        self.coming: list[tuple[int, str]] = []  # (which replica, where) of flips whose moment has not come yet
        self.refused_calls = 0  # calls that the vendor did not answer
        self._tokens = 0
        stamp = Stamp("founder", lambda: 0.0)
        run = Run(**stamp(), run_id="simulation", config=self.config, package_version="0")
        create_run(self.bucket, run, "simulate", stamp)
        for round_, data in plan.no_commits:
            self.bucket.create(keys.commit(round_), data)

    def _config(self) -> RunConfig:
        values = {
            "entrypoint": "simulation:train",
            "replicas": self.plan.replicas,
            "rounds": self.plan.rounds,
            "guard": {"min_steps": 2, "ema_alpha": 0.0},
            "timing": {"poll_s": 0.5, "heartbeat_s": 5.0, "round_timeout_s": 900.0, "startup_timeout_s": 120.0},
            # Few where a payload may be lost for good: every attempt waits for it for as long as a round may take.
            "retry": {
                "max_errors": 6 if self.plan.corrupt_payloads else 1000,
                "hung_after_s": 60.0,
                "backoff_s": 1.0,
            },
        }
        return make_config(values | dict(self.plan.settings))

    # -- playing -------------------------------------------------------------------------------------------------

    def run(self) -> list[Commit]:
        """Play the run and check the invariants."""
        self.play()
        return check(self)

    def play(self) -> None:
        for when, whom in self.plan.kills:
            self.time.at(when, lambda whom=whom: self._kill(whom))
        for when, replica_id, seconds in self.plan.stops:
            self.time.at(when, lambda i=replica_id, s=seconds: self._stop(i, s))
        for when, replica_id in self.plan.notices:
            self.time.at(when, lambda i=replica_id: self.noticed.update(self._newest(i)))
        for when, replica_id in self.plan.lies:
            self.time.at(when, lambda i=replica_id: self.lied.update(self._newest(i)))
        for when, replica_id, tensors in self.plan.flips:
            self.time.at(when, lambda i=replica_id, t=tensors: self._flip(i, t))
        if self.plan.halt_at is not None:
            halt = Halt(write_id="halt", at=0.0, leg=1, by="simulate", reason="enough")
            self.time.at(self.plan.halt_at, lambda: self.bucket.create(keys.halt(1), halt.to_bytes()) and None)
        self._start_coordinator(0.0)
        for when, round_, replica_id in self.plan.rots:
            self.time.at(when, lambda r=round_, i=replica_id: self.bucket.rot(r, i))
        with arithmetic_of_machines(self):
            self.time.run(limit_s=DAY_S)

    def trace(self, clock: VirtualClock, verb: str, key: str) -> None:
        self.events += 1
        self.digest.update(f"{clock.now():.6f} {clock.world.current.name} {verb} {key}\n".encode())

    def network(self, clock: VirtualClock) -> Store:
        self._tokens += 1
        chance = random.Random(f"{self.plan.seed} {self._tokens}")
        faulty = Network(self.bucket, self.plan, clock, chance, self.trace)
        return RetryingStore(faulty, clock, random.Random(self._tokens), LASTING)

    def stamp(self, clock: VirtualClock) -> Stamp:
        self._tokens += 1
        return Stamp(f"token{self._tokens}", clock.wall_time)

    def _kill(self, whom: int) -> None:
        if whom in (-1, -2) and self.coordinator is not None:
            self.time.kill(self.coordinator)
            self._start_coordinator(self.time.now + 20.0)
        for pair, process in self.replicas.items():
            if whom in (pair[0], -2):
                self.hit_in_flight += not process.dead and not process.ended and self._in_flight(pair)
                self.time.kill(process)

    def _in_flight(self, pair: tuple[int, int]) -> bool:
        return pair in self.sessions and self.sessions[pair]._participant._in_flight is not None

    def _stop(self, replica_id: int, seconds: float) -> None:
        for pair in self._newest(replica_id):
            self.time.stop(self.replicas[pair], seconds)

    def _flip(self, replica_id: int, where: str) -> None:
        """One mantissa bit in a replica's memory: of its base now, or when it next computes something.

        The coordinator computes nothing but rebuilds.
        """
        if replica_id == -1:
            self.coming.append((-1, where))
        for pair in self._newest(replica_id):
            if pair in self.sessions and not self.replicas[pair].ended and not self.sessions[pair].stopped:
                if where in ("parameters", "momenta"):
                    base = self.sessions[pair]._participant.base
                    flip_bit(getattr(base, where)["bias"], len(self.flipped))
                    self.flipped.append((self.time.now, replica_id, self.sessions[pair].round))
                else:
                    self.coming.append((replica_id, where))

    def computing(self) -> int:
        """The replica whose process runs; -1 if it is the coordinator."""
        found = re.fullmatch(r"replica (\d+)\.\d+", self.time.current.root.name)
        return int(found[1]) if found else -1

    def maybe_flip(self, where: str, tensor: torch.Tensor) -> bool:
        """Flip a bit of a tensor if one is coming to where the replica that runs is now."""
        replica_id = self.computing()
        if (replica_id, where) not in self.coming:
            return False
        self.coming.remove((replica_id, where))
        flip_bit(tensor, len(self.flipped))
        self.flipped.append((self.time.now, replica_id, 0))
        return True

    def _newest(self, replica_id: int) -> list[tuple[int, int]]:
        """The newest attempt of a replica, if there is one."""
        return sorted(pair for pair in self.replicas if pair[0] == replica_id)[-1:]

    # -- the coordinator -----------------------------------------------------------------------------------------

    def _start_coordinator(self, at: float) -> None:
        self.coordinator = self.time.spawn("coordinator", self._supervise, at=at)

    def _supervise(self, clock: VirtualClock) -> None:
        """A user's terminal: attaches again when the connection to the bucket was lost."""
        while True:
            try:
                coordinator = Coordinator(self.network(clock), SimExecutor(self), clock, self.stamp(clock))
                while not coordinator.step():
                    clock.sleep(1.0)
                return
            except DilocoError as error:
                logging.getLogger(__name__).info("coordinator: %s", error)
                clock.sleep(30.0)

    # -- replicas ------------------------------------------------------------------------------------------------

    def launch(self, replica_id: int, attempt: int) -> None:
        if (replica_id, attempt) in self.replicas:
            return
        self._tokens += 1
        start = random.Random(f"{self.plan.seed} start {self._tokens}").uniform(0.5, 8.0)
        name = f"replica {replica_id}.{attempt}"
        process = self.time.spawn(name, lambda clock: self._attempt(clock, replica_id, attempt), self.time.now + start)
        self.replicas[replica_id, attempt] = process

    def _attempt(self, clock: VirtualClock, replica_id: int, number: int) -> None:
        try:
            attempt = claim_attempt(
                self.network(clock),
                replica_id,
                number,
                clock,
                self.stamp(clock),
                lambda: (replica_id, number) in self.noticed,
                VirtualBackground(clock),
            )
        except DilocoError as error:
            self.exit_codes[replica_id, number] = EXIT_SUPERSEDED if "claimed" in str(error) else 1
            return
        name = f"heartbeat {replica_id}.{number}"
        heartbeat = self.time.spawn(name, lambda c: self._send_heartbeats(c, attempt), owner=clock.process)
        ending = train(attempt, lambda _: self._train)
        heartbeat.killed = True
        if clock.process.killed:
            raise Killed(clock.process.name)
        if ending.error and "\ndiloco_orchestrator." not in ending.error:
            raise InvariantBroken(f"I10: an attempt ended with an error that has no type:\n{ending.error[-1500:]}")
        write_exit_record(attempt, ending, "", {})
        self.exit_codes[replica_id, number] = ending.code

    def _send_heartbeats(self, clock: VirtualClock, attempt: Attempt) -> None:
        stamp = Stamp("heartbeat", clock.wall_time)
        writer = HeartbeatWriter(self.network(clock), attempt.replica_id, attempt.number, attempt.pulse, stamp)
        while not clock.process.killed:
            writer.write()
            clock.sleep(attempt.config.timing.heartbeat_s)

    def _train(self, ctx: ReplicaContext) -> None:
        """The workload."""
        replica_id, plan = ctx.replica_id, self.plan
        clock = ctx._attempt.clock
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(1.0), model.bias.fill_(2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.0)
        with ctx.attach(model, optimizer, heldout=self._score, heldout_items=list(range(8))) as replica:
            session = replica._training
            self.sessions[replica_id, ctx._attempt.number] = session
            for batch in replica.batches(Batches()):
                clock.sleep(plan.paces[replica_id])
                value = gradient(replica_id, batch)
                if (batch, replica_id) in plan.nan:
                    value = float("nan")
                model.weight.grad, model.bias.grad = torch.full((1, 1), value), torch.full((1,), value)
                optimizer.step()
                falling = plan.collapse and session.round > 2
                replica.observe(loss=1.0 - (0.7 if falling else 0.001) * session.round, tokens=1)
        if session.stopped:
            self.last_digests[replica_id] = session._participant.model.hash()

    def _score(self, model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
        return [1.0 + 0.001 * float(item) for item in items]


class SimExecutor:
    """Starts virtual processes. Knows what it launched, as a vendor does, whoever asks."""

    name = "simulated"
    shares_machine = True

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def _call(self) -> None:
        now, plan = self._simulation.time.now, self._simulation.plan
        if any(begin <= now < end for begin, end in (*plan.vendor_down, *plan.no_network)):
            self._simulation.refused_calls += 1
            raise Unavailable("503 (simulated)")

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        self._call()
        now = self._simulation.time.now
        for begin, end, replica_id in self._simulation.plan.no_machine:
            if replica_id == request.replica_id and begin <= now < end:
                raise NoCapacity("no machine (simulated)")
        self._simulation.launch(request.replica_id, request.attempt)
        return ReplicaHandle(self.name, request.run_id, request.replica_id, request.attempt, {})

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        process = self._simulation.replicas.get((handle.replica_id, handle.attempt))
        if process is None:
            return ReplicaStatus(ReplicaState.UNKNOWN)
        lied = (handle.replica_id, handle.attempt) in self._simulation.lied
        if process.killed or lied:
            return ReplicaStatus(ReplicaState.FAILED, exit_code=-9, message="killed by SIGKILL")
        if not process.ended:
            return ReplicaStatus(ReplicaState.RUNNING)
        code = self._simulation.exit_codes.get((handle.replica_id, handle.attempt), 1)
        return ReplicaStatus(ReplicaState.SUCCEEDED if code == 0 else ReplicaState.FAILED, exit_code=code)

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        self._call()
        return [self.poll(handle) for handle in handles]

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        return iter(())

    def find(self, run_id: str) -> list[ReplicaHandle]:
        self._call()
        return [ReplicaHandle(self.name, run_id, *who, {}) for who in self._simulation.replicas]

    def cancel(self, handle: ReplicaHandle) -> None:
        self._call()
        process = self._simulation.replicas.get((handle.replica_id, handle.attempt))
        if process is None:
            raise ExecutorError("never launched")
        if process.stopped_until <= self._simulation.time.now:  # one that hangs cannot be reached
            self._simulation.time.kill(process)


def flip_bit(tensor: torch.Tensor, number: int) -> None:
    """Flip a mantissa bit of the first element, another one for each of a run's first flips."""
    bits = tensor.view(-1)[:1].view(torch.int32)
    bits ^= 1 << (15 - number % 8)


@contextmanager
def arithmetic_of_machines(simulation: Simulation) -> Iterator[None]:
    """Within it outer steps of `plan.other_arithmetic` differ in their last bits, as with another CPU's rounding, and
    bits flip where `Simulation.coming` says.
    """
    step, load = outer_step.step_shard, Checkpoint.load
    rebuilt, write = rebuild_module._rebuild, snapshot_writer.write_snapshot

    def step_of_this_machine(shard: BaseShard, gradient: Iterable[torch.Tensor], outer: OuterConfig) -> None:
        simulation.maybe_flip("before step", shard.parameters)
        step(shard, (average_of_this_machine(block) for block in gradient), outer)
        simulation.maybe_flip("after step", shard.parameters)
        if simulation.computing() in simulation.plan.other_arithmetic:
            shard.parameters.copy_(torch.nextafter(shard.parameters, shard.parameters + 1))

    def average_of_this_machine(block: torch.Tensor) -> torch.Tensor:
        simulation.maybe_flip("average", block)
        return block

    def rebuilt_by_this_machine(*args: Any) -> Any:
        tip = rebuilt(*args)
        simulation.maybe_flip("rebuild", tip.base.parameters["bias"])
        return tip

    def write_by_this_machine(store: Store, round_: int, base: Base, *args: Any, **given: Any) -> str | None:
        number, held = len(simulation.flipped), base.parameters["bias"].clone()
        if not simulation.maybe_flip("snapshot", base.parameters["bias"]):
            return write(store, round_, base, *args, **given)
        try:
            return write(store, round_, base, *args, **given)
        finally:  # the bit was wrong in the copy that was written
            flip_bit(base.parameters["bias"], number)
            assert torch.equal(base.parameters["bias"], held)

    def load_and_note(self: Checkpoint, saved: SavedState) -> None:
        simulation.loaded.append(saved.contribution)
        load(self, saved)

    Checkpoint.load = load_and_note  # type: ignore[method-assign]
    outer_step.step_shard = step_of_this_machine
    rebuild_module._rebuild, snapshot_writer.write_snapshot = rebuilt_by_this_machine, write_by_this_machine
    try:
        yield
    finally:
        outer_step.step_shard = step
        Checkpoint.load = load  # type: ignore[method-assign]
        rebuild_module._rebuild, snapshot_writer.write_snapshot = rebuilt, write


# -- what must hold ---------------------------------------------------------------------------------------------------


def check(simulation: Simulation) -> list[Commit]:
    """The invariants, from what is in the bucket at the end. Returns the commits."""
    plan, store = simulation.plan, simulation.bucket
    reader = RunReader(store)
    commits = reader.commits()
    result = reader.log.result(1)
    if result is None:
        raise InvariantBroken("I10: the run ended without a result")
    done = verify_run(store)  # I1, I3, I6, I8, and that no work counts twice
    # What the store harmed is put again if somebody needs it: two replicas may believe their own payload and jump.
    harmed = {*plan.corrupt_payloads, *plan.lost_payloads}
    unread = [f"{keys.payloads(round_)}{replica_id}/" for round_, replica_id in harmed]
    unread += [keys.commit(round_) for round_, _ in plan.no_commits]
    if done.disagreement is not None and plan.outnumbers and not done.disagreement.key.startswith(tuple(unread)):
        raise InvariantBroken(f"I1/I3/I6/I8: {done.disagreement.key}: {done.disagreement.words}")
    _check_verdicts(commits)
    _check_nothing_after_the_stop(store, commits)
    if plan.corrupt_payloads and result.status == "failed" and _is_lost(store):
        return commits
    _check_steps(simulation, commits)
    _check_bases(simulation, commits)
    if not plan.collapse and plan.halt_at is None and plan.outnumbers and result.status != "completed":
        raise InvariantBroken(f"I10: the run ended as {result.status}: {result.reason}")
    if plan.exact:
        expected = undisturbed_digests(plan)
        if [c.base_digest for c in commits] != expected:
            raise InvariantBroken("I5: killed and faulty, the run ended with other bits than undisturbed")
    return commits


def _is_lost(store: Store) -> bool:
    """Whether replicas have ended because a payload is damaged that nobody holds any more: its author wrote the commit,
    which averages it, and was killed before anybody read it."""
    exits = [info.key for info in store.list(keys.REPLICAS) if info.key.endswith("exit.json")]
    return any("No running replica has put it again" in store.get(key).decode() for key in exits)


def _check_verdicts(commits: Sequence[Commit]) -> None:
    for commit in commits:
        if commit.applied and commit.fired:
            raise InvariantBroken(f"I7: round {commit.round} was applied though its verdict fired")


def _check_bases(simulation: Simulation, commits: Sequence[Commit]) -> None:
    """I2: whoever is in at the end holds the base that the log gives; a flipped bit removes nobody, and costs its own
    machine two rounds at most."""
    log = RunLog(simulation.bucket)
    expected = rebuild(log, log.newest_begin().record).digest if commits else ""
    different = simulation.plan.other_arithmetic
    for replica_id, digest in simulation.last_digests.items():
        if digest != expected and simulation.plan.outnumbers:
            raise InvariantBroken(
                f"I2: replica {replica_id} ends with base {digest[:12]}, the log gives {expected[:12]}"
            )
    if len(set(simulation.last_digests.values())) > 1:
        raise InvariantBroken(f"I2: replicas end with different bases: {simulation.last_digests}")
    if different and not simulation.plan.outnumbers:
        return
    left = {i for (i, _), code in simulation.exit_codes.items() if code == EXIT_PERMANENT}
    if left - set(different):
        raise InvariantBroken(f"I2: replicas {sorted(left)} left for good")
    if different:
        return
    for manifest in simulation.loaded:
        closed = manifest.round <= len(commits)
        if closed and not simulation.plan.settings["retention"] and not _claims_right(simulation, manifest):
            raise InvariantBroken(
                f"I2: replica {manifest.replica_id} goes on from a state that was trained from a wrong base in round "
                f"{manifest.round}"
            )
    for replica_id in range(simulation.plan.replicas):
        flips = sum(i == replica_id for _, i, _ in simulation.flipped)
        wrong = wrong_bases(commits, replica_id)
        if wrong > 2 * flips:
            raise InvariantBroken(
                f"I2: replica {replica_id} started {wrong} rounds from a wrong base, flipped {flips} times"
            )


def _check_nothing_after_the_stop(store: Store, commits: Sequence[Commit]) -> None:
    later = keys.contributions(commits[-1].round + 1) if commits else None
    if later and commits[-1].stop != "none":
        for info in store.list(later):
            raise InvariantBroken(f"I7: {info.key} was published after the stop in round {commits[-1].round}")


def _check_steps(simulation: Simulation, commits: Sequence[Commit]) -> None:
    """I4: every batch is in one manifest of its replica; and every payload holds just the steps that it names."""
    plan, reader = simulation.plan, ContributionReader(simulation.bucket)
    averaged = {(c.round, a.replica_id) for c in commits for a in c.answers if a.averaged}
    for replica_id in range(plan.replicas):
        position, owed = 0, None
        for commit in commits:
            manifest = reader.of(commit.round, replica_id)
            if manifest is None or manifest.progress is None or manifest.kind == "scores":
                continue
            end = int(manifest.progress.cursor["state"]["next"])  # type: ignore[index, call-overload, arg-type]
            own = [o for o in manifest.origins if o.round == manifest.round]
            begin = end - own[0].steps if own else position
            if begin != position:
                raise InvariantBroken(
                    f"I4: replica {replica_id}'s batches {begin} to {end} in round {commit.round} follow on {position}"
                )
            position = end
            if simulation.flipped and not _claims_right(simulation, manifest):
                continue  # its payload holds the flipped bit, and is not carried
            if manifest.kind == "delta" and plan.settings["fragments"] == 1:
                _check_payload(simulation, reader, manifest, begin, end, owed)
                owed = None if (commit.round, replica_id) in averaged else manifest


def _check_payload(
    simulation: Simulation,
    reader: ContributionReader,
    manifest: Contribution,
    begin: int,
    end: int,
    owed: Contribution | None,
) -> None:
    found = _value(reader, manifest)
    delay = simulation.plan.settings["fragment_sync_delay"]
    if found is None or delay or any(i == manifest.replica_id for _, i in simulation.plan.nan):
        return
    expected = LEARNING_RATE * sum(gradient(manifest.replica_id, batch) for batch in range(begin, end))
    if len(manifest.origins) > 1:
        before = None if owed is None else _value(reader, owed)
        if owed is None:
            raise InvariantBroken(
                f"I4: replica {manifest.replica_id} carries in round {manifest.round} what it did not owe"
            )
        if before is None:
            return
        expected += carry_weight(max(1, manifest.round - owed.round)) * before
    if abs(found - expected) > 1e-4:
        raise InvariantBroken(
            f"I4: round {manifest.round}, replica {manifest.replica_id}: the payload holds {found:.5f}, its steps make "
            f"{expected:.5f}"
        )


def _claims_right(simulation: Simulation, manifest: Contribution) -> bool:
    log = RunLog(simulation.bucket)
    try:
        before = rebuild(log, log.newest_begin().record, until=manifest.round - 1)
    except PayloadCorrupt:  # retention has deleted what it needs
        return False
    return before.digest == manifest.base_digest


def _value(reader: ContributionReader, manifest: Contribution) -> float | None:
    """The number that fills a payload; None if it was collected or went bad."""
    assert manifest.payload is not None
    try:
        values = decode(reader.shard(manifest, 0), manifest.payload.codec, manifest.payload.numel)
    except PayloadCorrupt:
        return None
    return float(values[0])


_undisturbed: dict[str, list[str]] = {}


def undisturbed_digests(plan: Plan) -> list[str]:
    """Base digests of the same run when nothing goes wrong."""
    name = repr((plan.replicas, plan.rounds, sorted(plan.settings.items(), key=str)))
    if name not in _undisturbed:
        commits = Simulation(plan.undisturbed()).run()
        _undisturbed[name] = [commit.base_digest for commit in commits]
    return _undisturbed[name]


def simulate(seed: int, replicas: int | None = None, rounds: int | None = None, **settings: Any) -> Simulation:
    """Play the run of a seed. Raises `InvariantBroken` with a line that reproduces it."""
    return played(plan_of(seed, replicas, rounds, **settings), f"make simulate SEED={seed}")


def simulate_flips(seed: int) -> Simulation:
    """Play the run with flipped bits of a seed. Raises `InvariantBroken` with a line that reproduces it."""
    return played(flips_of(seed), f"make simulate FLIPS=1 SEED={seed}")


def played(plan: Plan, command: str) -> Simulation:
    simulation = Simulation(plan)
    try:
        simulation.run()
    except (AssertionError, Killed) as error:
        raise InvariantBroken(f"seed {plan.seed}: {error}\nreproduce: {command}\n{plan}") from error
    return simulation
