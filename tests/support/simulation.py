"""A whole run in one process and on virtual time, with faults from one seed: `simulate(seed=…)`.

Everything is real but the machine: the coordinator and its supervision, attempts from claim to exit record, sessions,
the loop, participants, guard and retries run as they are. The store is memory behind a faulty network
(`simulation_store`), the executor starts virtual processes, training is a gradient that depends on replica and batch
alone, so that what every contribution must hold is known. What goes wrong is in `simulation_plan`, what must hold all
the same in `simulation_checks`, and the arithmetic that it is compared with in `simulation_oracle`.
"""

import dataclasses
import hashlib
import logging
import random
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from simulation_checks import check
from simulation_forgeries import forge
from simulation_gradients import LEARNING_RATE, Model, gradient, pattern
from simulation_joins import JoinedMachines, join_executor
from simulation_machines import flip_bit, machines_of
from simulation_plan import Plan, flips_of, forged_plan_of, islands_of, plan_of, scaled_plan_of, wide_plan_of
from simulation_ranks import trained_in_ranks
from simulation_residuals import WIDEST
from simulation_store import Bucket, InvariantBroken, Network
from virtual_time import Killed, Process, VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.errors import ConfigError, DilocoError, ModelMismatch
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.process import EXIT_SUPERSEDED
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Contribution, Halt, Run
from diloco_orchestrator.protocol.signatures import SignedBy
from diloco_orchestrator.run_log.append import create_run, request_scale
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import LASTING
from diloco_orchestrator.store.retrying import RetryingStore, RetryPolicy
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from executors.contract import (
    ExecutorError,
    LaunchRequest,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    Unavailable,
)
from replica.attempt.attempt import Attempt, claim_attempt
from replica.attempt.heartbeat import HeartbeatWriter
from replica.context import ReplicaContext
from replica.process.run_attempt import train, write_exit_record
from replica.training.session import TrainingSession

DAY_S = 86400.0

# These machines have no accelerator. Torch keeps every seed for one, with the stack of its caller, until it is used.
torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None  # type: ignore[assignment]

# What ends a run that gets nowhere, with the names of the calls that it repeats.
MOST_CLOSES = 2  # of a round by one attempt: it may reopen the round before its first, and the one it lost, once
MOST_CALLS = 15_000  # for each process since the last commit


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


class Simulation:
    """One run. `run()` plays it and checks the invariants."""

    make_bucket: type[Bucket] = Bucket
    signed_by: SignedBy | None = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.time = VirtualTime()
        self.bucket = self.make_bucket(self.time, plan)
        self.digest = hashlib.sha256()  # of the trace
        self.events = 0
        self.config = self._config()
        self.replicas: dict[tuple[int, int], Process] = {}
        self.coordinator: Process | None = None
        self.ranks: dict[tuple[int, int], list[Process]] = {}  # of attempts of several, by replica and attempt
        self.ranks_hit = 0  # ranks that were killed or stopped while they lived
        self.given: dict[
            tuple[int, int], Mapping[str, str]
        ] = {}  # by attempt: the environment on a machine that joined
        self.exit_codes: dict[tuple[int, int], int] = {}
        self.sessions: dict[tuple[int, int], TrainingSession] = {}
        self.last_digests: dict[int, str] = {}  # by replica: of the base that its training ended with
        self.noticed: set[tuple[int, int]] = set()  # (replica, attempt) that got SIGTERM
        self.lied: set[tuple[int, int]] = set()  # (replica, attempt) that lives, though its vendor says otherwise
        self.flipped: list[tuple[float, int, int]] = []  # (when, which replica, open round) of flips that hit
        self.trained: dict[tuple[int, int, int], NDArray[np.float32]] = {}  # by replica, attempt, batch: values
        self.paid = 0  # residuals that were in a payload (`check_residuals`)
        self.hit_in_flight = 0  # kills of a replica whose round was in flight in the background
        self.loaded: list[Contribution] = []  # manifests whose saved state a replica went on from
        self.held: list[tuple[int, str]] = []  # for each of these the open round, and its base as the replica held it
        self.coming: list[tuple[int, str]] = []  # (which replica, where) of flips whose moment has not come yet
        self.refused_calls = 0  # calls that the vendor did not answer
        self.leg = 1  # the newest
        self._closes: Counter[tuple[int, int, int]] = Counter()  # by replica, attempt and round
        self._recent: deque[str] = deque(maxlen=400)  # calls to the store
        self._calls = 0  # since the last commit
        self._commits = 0
        self._tokens = 0
        stamp = Stamp("founder", lambda: 0.0)
        signed = {"signed_by": self.signed_by, "signed_rules": self.signed_by and 2}
        run = Run(**stamp(), run_id="simulation", config=self.config, package_version="0", **signed)
        create_run(self.bucket, run, "simulate", stamp)
        for round_, data in plan.no_commits:
            self.bucket.create(keys.commit(round_), data)
        self.forged_keys: set[str] = set()  # of objects that somebody forged
        for round_, replica_id in plan.forged:
            self.bucket.create(keys.contribution(round_, replica_id), b"forged")
            self.forged_keys.add(keys.contribution(round_, replica_id))

    def _config(self) -> RunConfig:
        values = {
            "entrypoint": "simulation:train",
            "replicas": self.plan.replicas,
            "rounds": self.plan.rounds,
            "guard": {"min_steps": 2, "ema_alpha": 0.0},
            "timing": {"poll_s": 0.5, "heartbeat_s": 5.0, "round_timeout_s": 900.0, "startup_timeout_s": 120.0},
            # Few where a payload may be lost for good: every attempt waits for it for as long as a round may take.
            "retry": {
                "max_errors": 6 if self.plan.harms else 1000,
                "hung_after_s": 60.0,
                "backoff_s": 1.0,
                "max_no_capacity": 1000,
            },
        }
        return make_config(values | dict(self.plan.settings))

    # -- playing -------------------------------------------------------------------------------------------------

    def run(self) -> list[Commit]:
        """Play the run and check the invariants."""
        self.play()
        return check(self, undisturbed_digests)

    def play(self) -> None:
        self._plan_kills(self.plan.kills)
        for when, replica_id, seconds in self.plan.stops:
            self.time.at(when, lambda i=replica_id, s=seconds: self._stop(i, s))
        for when, replica_id, rank in self.plan.rank_kills:
            self.time.at(when, lambda i=replica_id, r=rank: [self.time.kill(each) for each in self._rank(i, r)])
        for when, replica_id, rank, seconds in self.plan.rank_stops:
            self.time.at(
                when, lambda i=replica_id, r=rank, s=seconds: [self.time.stop(each, s) for each in self._rank(i, r)]
            )
        for when, replica_id in self.plan.notices:
            self.time.at(when, lambda i=replica_id: self.noticed.update(self._newest(i)))
        for when, replica_id in self.plan.lies:
            self.time.at(when, lambda i=replica_id: self.lied.update(self._newest(i)))
        for when, replica_id, tensors in self.plan.flips:
            self.time.at(when, lambda i=replica_id, t=tensors: self._flip(i, t))
        for when, what, replica_id in self.plan.forgeries:
            self.time.at(when, lambda w=what, i=replica_id: forge(self, w, i))
        if self.plan.halt_at is not None:
            halt = Halt(write_id="halt", at=0.0, leg=1, by="simulate", reason="enough")
            self.time.at(self.plan.halt_at, lambda: self.bucket.create(keys.halt(1), halt.to_bytes()) and None)
        for when, replicas in self.plan.scales:
            self.time.at(when, lambda n=replicas: self._scale(n))
        for when, number in self.plan.machine_kills:
            self.time.at(when, lambda n=number: self.machines.lose(n))
        for when, number in self.plan.machine_notices:
            self.time.at(when, lambda n=number: self.machines.tell_to_leave(n))
        self._start_machines()
        self._start_coordinator(0.0)
        for when in self.plan.coordinators:
            self.time.spawn("another coordinator", self._supervise, at=when)
        for when, round_, replica_id in self.plan.rots:
            self.time.at(when, lambda r=round_, i=replica_id: self.bucket.rot(r, i))
        with machines_of(self):
            self.time.run(limit_s=DAY_S)
            if self.plan.next_leg is not None and RunLog(self.bucket).start() is not None:
                self._begin_next_leg()
                self.time.run(limit_s=2 * DAY_S)

    def _scale(self, replicas: int) -> None:
        with suppress(ConfigError):  # the run has ended
            request_scale(RunLog(self.bucket), replicas, "u", Stamp(f"scale{self.time.now}", lambda: self.time.now))

    def _plan_kills(self, kills: Sequence[tuple[float, int]]) -> None:
        for when, whom in kills:
            self.time.at(self.time.now + when, lambda whom=whom: self._kill(whom))

    def _begin_next_leg(self) -> None:
        leg = self.plan.next_leg
        assert leg is not None
        change = ({} if leg.lr is None else {"outer.lr": leg.lr}) | (
            {} if leg.replicas is None else {"replicas": leg.replicas}
        )
        stamp, log = Stamp("resumed", lambda: self.time.now), RunLog(self.bucket)
        try:
            begin_next_leg(log, rounds=leg.rounds, from_round=None, by="u", why="w", stamp=stamp, change=change)
        except ConfigError:  # the base cannot be rebuilt any more
            if not self.plan.harms:
                raise
            return
        self.leg += 1
        self.last_digests.clear()
        self._plan_kills(leg.kills)
        self._start_machines()
        self._start_coordinator(self.time.now + self.plan.listing_lag_s)  # it must see the leg

    def note_closed(self, replica_id: int, attempt: int, round_: int) -> None:
        """An attempt closes a round. I10: it goes back to one only to close it as the attempt did that won it."""
        self._closes[replica_id, attempt, round_] += 1
        if self._closes[replica_id, attempt, round_] > MOST_CLOSES:
            self._fail_in_loop(f"attempt {attempt} of replica {replica_id} closes round {round_} again and again")

    def note_loaded(self, manifest: Contribution) -> None:
        """A replica loads the state that was saved with a manifest."""
        name = re.fullmatch(r"replica (\d+)\.(\d+)", self.time.current.root.name)
        session = self.sessions.get((int(name[1]), int(name[2]))) if name else None
        self.loaded.append(manifest)
        self.held.append((0, "") if session is None else (session.round, session._rounds.base.digest()))

    def _fail_in_loop(self, what: str) -> None:
        calls = ", ".join(f"{call} ({times} times)" for call, times in Counter(self._recent).most_common(6))
        self.time.fail(InvariantBroken(f"I10: {what}. Of the last {len(self._recent)} calls most are {calls}"))

    def trace(self, clock: VirtualClock, verb: str, key: str) -> None:
        self.events += 1
        self._recent.append(f"{clock.world.current.name}: {verb} {key}")
        self._calls += 1
        if len(self.bucket.commits) > self._commits:
            self._commits, self._calls = len(self.bucket.commits), 0
        # Where a payload is gone for good every attempt asks for it as long as a round may take, then the next one.
        attempts = self.config.retry.max_errors if self.plan.harms else 1
        if self._calls > MOST_CALLS * (self.plan.most_replicas + self.plan.machines + 1) * attempts:
            self._fail_in_loop(f"no commit in {self._calls} calls")
        self.digest.update(f"{clock.now():.6f} {clock.world.current.name} {verb} {key}\n".encode())

    def network(self, clock: VirtualClock, retry: RetryPolicy = LASTING) -> Store:
        self._tokens += 1
        chance = random.Random(f"{self.plan.seed} {self._tokens}")
        faulty = Network(self.bucket, self.plan, clock, chance, self.trace)
        return RetryingStore(faulty, clock, random.Random(self._tokens), retry)

    def stamp(self, clock: VirtualClock) -> Stamp:
        self._tokens += 1
        chance = random.Random(f"{self.plan.seed} stamp {self._tokens}")
        return Stamp(f"token{self._tokens}", clock.wall_time, lambda: f"{chance.getrandbits(64):016x}")

    def _kill(self, whom: int) -> None:
        if whom in (-1, -2) and self.coordinator is not None:
            self.time.kill(self.coordinator)
            self._start_coordinator(self.time.now + 20.0)
        for pair, process in self.replicas.items():
            if whom in (pair[0], -2):
                self.hit_in_flight += not process.dead and not process.ended and self._in_flight(pair)
                self.time.kill(process)

    def _in_flight(self, pair: tuple[int, int]) -> bool:
        return pair in self.sessions and self.sessions[pair]._rounds._in_flight is not None

    def _stop(self, replica_id: int, seconds: float) -> None:
        for pair in self._newest(replica_id):
            self.time.stop(self.replicas[pair], seconds)

    def _rank(self, replica_id: int, rank: int) -> list[Process]:
        """The process of a rank of a replica's newest attempt, if there is one that lives."""
        found = [self.ranks[pair][rank] for pair in self._newest(replica_id) if pair in self.ranks]
        living = [each for each in found if not each.dead and not each.ended]
        self.ranks_hit += len(living)
        return living

    def _flip(self, replica_id: int, where: str) -> None:
        """One mantissa bit in a replica's memory: of its base now, or when it next computes something.

        The coordinator computes nothing but rebuilds.
        """
        if replica_id == -1:
            self.coming.append((-1, where))
        for pair in self._newest(replica_id):
            if pair in self.sessions and not self.replicas[pair].ended and not self.sessions[pair].stopped:
                if where in ("parameters", "momenta"):
                    base = self.sessions[pair]._rounds.base
                    tensors = base.momenta if where == "momenta" and base.momenta else base.parameters
                    flip_bit(tensors[min(tensors)], len(self.flipped))
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

    def _start_machines(self) -> None:
        self.machines = JoinedMachines(self)

    def _start_coordinator(self, at: float) -> None:
        self.coordinator = self.time.spawn("coordinator", self._supervise, at=at)

    def executor(self, clock: VirtualClock) -> ServerlessExecutor:
        """The executor of a new coordinator."""
        return join_executor(self, clock) if self.plan.machines else SimExecutor(self)

    def look_at(self, coordinator: Coordinator) -> None:
        """Called after each step of a coordinator."""

    def _supervise(self, clock: VirtualClock) -> None:
        """A user's terminal: attaches again when the connection to the bucket was lost."""
        while True:
            try:
                means = Means(self.executor(clock), clock, self.stamp(clock))
                coordinator = Coordinator(RunReader(self.network(clock)), means)
                while not coordinator.step():
                    self.look_at(coordinator)
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
        if (ranks := attempt.config.ranks_of(replica_id)) > 1:
            ending = trained_in_ranks(self, attempt, clock, ranks)
        else:
            ending = train(attempt, lambda _: self._train)
        heartbeat.killed = True
        if clock.process.killed:
            raise Killed(clock.process.name)
        by_another = ending.error and "[gloo]" in ending.error and self.ranks_hit  # an error because a rank has died
        if ending.error and not by_another and "\ndiloco_orchestrator." not in ending.error:
            raise InvariantBroken(f"I10: an attempt ended with an error that has no type:\n{ending.error[-1500:]}")
        write_exit_record(attempt, ending, "", {})
        self.exit_codes[replica_id, number] = ending.code

    def _send_heartbeats(self, clock: VirtualClock, attempt: Attempt) -> None:
        stamp = Stamp("heartbeat", clock.wall_time)
        who = attempt.replica_id, attempt.number
        writer = HeartbeatWriter(self.network(clock), *who, attempt.pulse, stamp, attempt.config)
        while not clock.process.killed:
            writer.beat()
            clock.sleep(attempt.config.timing.heartbeat_s)

    def _train(self, ctx: ReplicaContext) -> None:
        """The workload."""
        replica_id, plan = ctx.replica_id, self.plan
        if replica_id in plan.refused:
            raise ModelMismatch("another model (simulated)")
        clock, tokens = ctx._attempt.clock, plan.tokens[ctx.replica_id] if plan.tokens else 1
        model = Model(plan.width, plan.buffer, plan.adapted)
        parameters = [each for _, each in sorted(model.named_parameters()) if each.requires_grad]
        patterns = [(parameter, pattern(replica_id, parameter)) for parameter in model.trained()]
        optimizer = torch.optim.SGD(model.trained(), lr=LEARNING_RATE, momentum=0.0)
        with ctx.attach(
            model, optimizer, heldout=self._score, heldout_items=list(range(max(8, plan.most_replicas)))
        ) as replica:
            session = replica._training
            if isinstance(session, TrainingSession):  # not of another rank, which follows this one
                self.sessions[replica_id, ctx._attempt.number] = session
            for batch in replica.batches(Batches()):
                clock.sleep(self.step_s(replica_id))
                value = gradient(replica_id, batch)
                if (batch, replica_id) in plan.nan:
                    value = float("nan")
                for parameter, factors in patterns:
                    parameter.grad = value * factors
                optimizer.step()
                model.count_step()
                if plan.width <= WIDEST:
                    trained = torch.cat([parameter.detach().flatten() for parameter in parameters])
                    self.trained[replica_id, ctx._attempt.number, batch] = trained.numpy()
                falling = plan.collapse and session.round > 2
                replica.observe(loss=1.0 - (0.7 if falling else 0.001) * session.round, tokens=tokens)
        if session.stopped and isinstance(session, TrainingSession):
            self.last_digests[replica_id] = session._rounds._claims.hash()

    def step_s(self, replica_id: int) -> float:
        """Seconds of a replica's next inner step."""
        return self.plan.paces[replica_id]

    def _score(self, model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
        return [1.0 + 0.001 * float(item) for item in items]


class SimExecutor(ServerlessExecutor):
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

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        return {}

    def launch_replicas(self, *args: Any, **options: Any) -> list[ReplicaHandle]:
        raise NotImplementedError

    def collect(self, *args: Any, **options: Any) -> list[Any]:
        raise NotImplementedError

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        self._call()
        now = self._simulation.time.now
        for begin, end, replica_id in self._simulation.plan.no_machine:
            if replica_id == request.replica_id and begin <= now < end:
                raise NoCapacity("no machine (simulated)")
        self._simulation.launch(request.replica_id, request.attempt)
        return ReplicaHandle(self.name, request.run_id, request.replica_id, request.attempt, native_id="here")

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
        return [ReplicaHandle(self.name, run_id, *who, native_id="here") for who in self._simulation.replicas]

    def cancel(self, handle: ReplicaHandle) -> None:
        self._call()
        process = self._simulation.replicas.get((handle.replica_id, handle.attempt))
        if process is None:
            raise ExecutorError("never launched")
        if process.stopped_until <= self._simulation.time.now:  # one that hangs cannot be reached
            self._simulation.time.kill(process)


_undisturbed: dict[str, list[str | None]] = {}


def undisturbed_digests(plan: Plan) -> list[str | None]:
    """Base digests of the same run when nothing goes wrong, which do not depend on what it keeps."""
    twin = plan.undisturbed()
    twin = dataclasses.replace(twin, settings={**twin.settings, "snapshot_every": 2, "retention": {}, "late": "carry"})
    if repr(twin) not in _undisturbed:
        _undisturbed[repr(twin)] = [commit.base_digest for commit in Simulation(twin).run()]
    return _undisturbed[repr(twin)]


def simulate(seed: int, replicas: int | None = None, rounds: int | None = None, **settings: Any) -> Simulation:
    """Play the run of a seed. Raises `InvariantBroken` with a line that reproduces it."""
    return played(plan_of(seed, replicas, rounds, **settings), f"make simulate SEED={seed}")


def simulate_islands(seed: int) -> Simulation:
    """Play the run of a seed whose replicas have several ranks. Raises `InvariantBroken`, likewise."""
    return played(islands_of(seed), f"make simulate ISLANDS=1 SEED={seed}")


def simulate_flips(seed: int) -> Simulation:
    """Play the run with flipped bits of a seed. Raises `InvariantBroken` with a line that reproduces it."""
    return played(flips_of(seed), f"make simulate FLIPS=1 SEED={seed}")


def simulate_wide(seed: int) -> Simulation:
    """Play the run of a seed with more settings and faults. Raises `InvariantBroken`, likewise."""
    return played(wide_plan_of(seed), f"make simulate WIDE=1 SEED={seed}")


def simulate_scaled(seed: int) -> Simulation:
    """Play the run of a seed that is scaled up and down. Raises `InvariantBroken`, likewise."""
    return played(scaled_plan_of(seed), f"make simulate SCALED=1 SEED={seed}")


def simulate_forged(seed: int) -> Simulation:
    """Play the run of a seed with forged records. Raises `InvariantBroken`, likewise."""
    return played(forged_plan_of(seed), f"make simulate FORGED=1 SEED={seed}")


def played(plan: Plan, command: str, of: type[Simulation] = Simulation) -> Simulation:
    simulation = of(plan)
    try:
        simulation.run()
    except (AssertionError, Killed) as error:
        raise InvariantBroken(f"seed {plan.seed}: {error}\nreproduce: {command}\n{plan}") from error
    return simulation
