"""Simulated runs at several places whose vendors lie about prices, capacity and states."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from simulation import SimExecutor, Simulation, played
from simulation_plan import Plan, scaled_plan_of
from simulation_store import InvariantBroken
from virtual_time import VirtualClock

from diloco_orchestrator.supervision.attempt_types import Alive, Cancelling
from diloco_orchestrator.supervision.coordinator import Coordinator
from diloco_orchestrator.supervision.placing import ROUNDS_BETWEEN_MOVES
from executors.contract import (
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    Unavailable,
)
from executors.places import Places
from executors.prices import Price

_PRICES = (0.0, math.nan, math.inf, -1.0, 1e9, 0.01, 50.0, None)  # of a vendor that lies, beside what it said first
_STATES = tuple(ReplicaState(each) for each in ("running", "pending", "unknown", "preempted", "failed"))
_REFUSALS: Sequence[Exception] = (
    NoCapacity("none today"),
    Unavailable("HTTP 503"),
    ExecutorDenied("no credit"),
    ExecutorError("HTTP 500"),
    ValueError("no such kind of machine"),
)


class SimPlace(SimExecutor):
    """A vendor of a `PlacedSimulation`. `lies`: of which kinds it lies: "price", "capacity", "states", "launches"."""

    def __init__(self, simulation: "PlacedSimulation", name: str, usd: float, lies: Sequence[str]) -> None:
        super().__init__(simulation)
        self.name, self._usd, self.lies = name, usd, lies
        self._placed = simulation

    def _draw(self, *what: object) -> random.Random:
        """Random numbers of a minute: an answer is the same for whoever asks twice in it."""
        return random.Random(f"{self._placed.plan.seed} {self.name} {int(self._simulation.time.now // 60)} {what}")

    def price(self, request: LaunchRequest) -> Price | None:
        draw = self._draw("price")
        usd = draw.choice(_PRICES) if "price" in self.lies and draw.random() < 0.5 else self._usd
        return None if usd is None else Price(usd, "its list")

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        self._call()
        draw, who = self._draw("launch", request.replica_id), (request.replica_id, request.attempt)
        if "capacity" in self.lies and draw.random() < 0.7:
            raise draw.choice(_REFUSALS)
        if "launches" in self.lies and draw.random() < 0.5:
            self._placed.never_started.add(who)
        else:
            self._simulation.launch(*who)
        return ReplicaHandle(self.name, request.run_id, *who, native_id="here")

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        who = handle.replica_id, handle.attempt
        draw = self._draw("state", who)
        if "states" in self.lies and draw.random() < 0.2:
            return ReplicaStatus(draw.choice(_STATES), message="so it says")
        if who in self._placed.never_started:
            return ReplicaStatus(ReplicaState.RUNNING)
        return super().poll(handle)

    def cancel(self, handle: ReplicaHandle) -> None:
        if (handle.replica_id, handle.attempt) not in self._placed.never_started:
            super().cancel(handle)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        return iter(("nothing to see here",))


class PlacedSimulation(Simulation):
    """A run at an honest place and two that may lie. Looks after each step of a coordinator at what it has decided."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        draw = random.Random(f"places {plan.seed}")
        self.never_started: set[tuple[int, int]] = set()
        kinds = ("price", "capacity", "states", "launches")
        usd = {"a": 1.0, "b": draw.choice([0.3, 0.9, 2.0]), "c": draw.choice([0.1, 0.5, 3.0])}
        lies = {"a": (), **{name: draw.sample(kinds, draw.randint(1, 3)) for name in "bc"}}
        self.places = {name: SimPlace(self, name, usd[name], lies[name]) for name in usd}
        leg = plan.next_leg
        most = max(plan.replicas, (leg and leg.replicas) or 0)  # a leg whose replicas the limit cannot pay is refused
        self.usd_per_hour = draw.choice([None, most * 1.0, most * 2.5, 20.0])
        self.opened = 0  # launches that were looked at
        self._known: dict[int, int] = {}  # the newest attempt of each replica
        self._moved: list[int] = []  # rounds
        self._cancelled: set[tuple[int, int]] = set()

    def executor(self, clock: VirtualClock) -> ServerlessExecutor:
        self._moved.clear()  # a new coordinator counts anew
        return Places(self.places, usd_per_hour=self.usd_per_hour)

    def look_at(self, coordinator: Coordinator) -> None:
        book, views = coordinator._book, coordinator._fleet.views
        assert book is not None
        alive = [view for view in views if isinstance(view.state, Alive)]
        prices = {name: price.hourly_usd for name, price in book._prices.items() if price is not None}
        rate = math.fsum(prices.get(view.place, 0.0) for view in alive)
        new = [view for view in alive if view.attempt > self._known.get(view.replica_id, 0)]
        if new and self._known and self.usd_per_hour is not None and rate > self.usd_per_hour + 1e-6:
            raise InvariantBroken(f"${rate:.2f} an hour of {self.usd_per_hour} after a launch: {prices}")
        if len(alive) > self.plan.most_replicas:
            raise InvariantBroken(f"{len(alive)} attempts of {self.plan.most_replicas} ids")
        self.opened += len(new)
        self._known |= {view.replica_id: view.attempt for view in views}
        for view in alive:
            if isinstance(view.state, Cancelling) and view.who not in self._cancelled:
                self._cancelled.add(view.who)
                if "moves from" in view.state.why:
                    self._moved.append(book._round)
        for before, after in pairwise(self._moved):
            if after - before < ROUNDS_BETWEEN_MOVES:
                raise InvariantBroken(f"moves after rounds {before} and {after}")


def placed_plan_of(seed: int) -> Plan:
    """A run that nobody scales, with killed replicas and coordinators, at places that `PlacedSimulation` draws."""
    plan = scaled_plan_of(seed)
    retry = {"max_errors": 3, "hung_after_s": 60.0, "backoff_s": 1.0, "max_no_capacity": 3}
    settings = {**plan.settings, "retry": retry, "max_hours": None, "max_cost_usd": None}
    settings |= {"timing": {**dict(plan.settings.get("timing", {})), "startup_timeout_s": 120.0}}
    calm = {"scales": (), "machines": 0, "machine_kills": (), "no_machine": (), "lies": (), "coordinators": ()}
    return replace(plan, settings={**settings, "rounds": 24}, rounds=24, **calm)


def simulate_placed(seed: int) -> PlacedSimulation:
    """Play the run of a seed. Raises `InvariantBroken` with a line that reproduces it."""
    simulation = played(placed_plan_of(seed), f"make simulate PLACED=1 SEED={seed}", PlacedSimulation)
    assert isinstance(simulation, PlacedSimulation)
    return simulation
