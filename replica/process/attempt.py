"""A seat in a run: which run, which leg, which replica, which attempt; and the claim that makes an attempt ours."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_orchestrator.clock import Background, Clock, NoBackground
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError, Superseded
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.process import installed_versions
from diloco_orchestrator.protocol.records import Begin, Claim, Stamp
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import Entry, RunLog
from diloco_orchestrator.store.base import Store

_VERSIONS_OF = ("diloco-orchestrator", "torch", "torchft", "transformers", "obstore")


@dataclass
class Pulse:
    """What the heartbeat tells; written by the training thread, read by the heartbeat's."""

    phase: str = "starting"
    round: int = 0
    inner_step: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class Seat:
    """One attempt's place in a run, and what it was handed to work with."""

    log: RunLog
    leg: Entry[Begin]
    replica_id: int
    attempt: int
    clock: Clock
    stamp: Stamp
    should_leave: Callable[[], bool] = lambda: False  # a preemption notice came
    background: Background = field(default_factory=NoBackground)
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def config(self) -> RunConfig:
        return self.log.run.config

    @property
    def begin(self) -> Begin:
        """How the leg began."""
        return self.leg.record

    @property
    def outer_steps(self) -> int:
        """Outer steps of the whole run at the end of this leg."""
        return self.begin.from_outer_step + self.begin.outer_steps


def take_seat(
    store: Store,
    replica_id: int,
    attempt: int | None,
    clock: Clock,
    stamp: Stamp,
    should_leave: Callable[[], bool] = lambda: False,
    background: Background | None = None,
) -> Seat:
    """Claim `attempt` (None: the first one free). Raises `Superseded` if another process holds it."""
    log = RunLog(store)
    replicas = log.run.config.replicas
    if not 0 <= replica_id < replicas:
        raise ConfigError(f"replica {replica_id} is outside 0..{replicas - 1} of the run in {store.url}.")
    leg = log.newest_begin()
    taken = _claim_first_free(store, replica_id, stamp) if attempt is None else attempt
    if attempt is not None and not _claim(store, replica_id, attempt, stamp):
        raise Superseded(f"attempt {attempt} of replica {replica_id} is claimed by another process; this one leaves.")
    return Seat(
        log=log,
        leg=leg,
        replica_id=replica_id,
        attempt=taken,
        clock=clock,
        stamp=stamp,
        should_leave=should_leave,
        background=background or NoBackground(),
    )


def _claim_first_free(store: Store, replica_id: int, stamp: Stamp) -> int:
    attempt = AttemptRecords(store).newest_claim(replica_id) + 1
    while not _claim(store, replica_id, attempt, stamp):
        attempt += 1
    return attempt


def _claim(store: Store, replica_id: int, attempt: int, stamp: Stamp) -> bool:
    claim = Claim(
        **stamp(),
        replica_id=replica_id,
        attempt=attempt,
        host=platform.node(),
        pid=os.getpid(),
        versions={
            "python": platform.python_version(),
            "machine": platform.machine(),
            **installed_versions(_VERSIONS_OF),
        },
        threads=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
    )
    return store.create(keys.claim(replica_id, attempt), claim.to_bytes())
