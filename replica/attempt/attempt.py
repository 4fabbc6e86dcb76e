"""`Attempt`: one launched process of a replica, the objects it works with, and how it claims its attempt number.

`replica.process.run_attempt` decides what the process does.
"""

import functools
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diloco_orchestrator.allreduce.owners import ALONE, Owners
from diloco_orchestrator.clock import Background, Clock, NoBackground
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError, FirstBaseOutvoted, Superseded
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import BY_HAND, Claim, Intent
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import installed_versions
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.replica.attempt.heartbeat import Pulse
from diloco_orchestrator.run_log.attempts import AttemptRecords, Authors
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import may_commit
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import OBJECT_LIMIT, Store


@dataclass(frozen=True)
class Attempt:
    """A claimed attempt (process) of a replica: its leg (start or resume to stop), the run's log, clock and threads."""

    log: RunLog
    leg: Entry[Begin]
    replica_id: int
    number: int
    clock: Clock
    stamp: Stamp
    claim_sha256: str  # of the claim's bytes, which manifests name
    authors: Authors
    should_leave: Callable[[], bool] = lambda: False  # whether a preemption notice has come, or its id was vacated
    background: Background = field(default_factory=NoBackground)
    pulse: Pulse = field(default_factory=Pulse)
    object_limit: int = OBJECT_LIMIT  # bytes; of snapshot files and of pieces of a saved state
    owners: Owners = ALONE  # the ranks of the replica, which hold the shards of its base

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def writer(self) -> Writer:
        """The writer for records of this attempt."""
        return Writer.of_attempt(self.store, self.replica_id, self.number)

    @functools.cached_property
    def config(self) -> RunConfig:
        """The configuration of the leg (start or resume to stop) in which this attempt trains."""
        return self.log.configs.of(self.begin.leg)

    @property
    def is_invited(self) -> bool:
        """Whether a stranger runs this replica by an invitation: it contributes, and writes no commit or snapshot."""
        return self.replica_id in self.config.invited

    @functools.cached_property
    def committing(self) -> set[int]:
        """Ids of the replicas that may commit rounds: no strangers', and none that wrote void commits in other legs."""
        ids = set(range(self.config.most_replicas)).difference(self.config.invited)
        return {each for each in ids if may_commit(self.store, each)}

    @property
    def begin(self) -> Begin:
        """The record of the start or resume after which this attempt trains."""
        return self.leg.record

    @property
    def outer_steps(self) -> int:
        """Number of outer steps of the whole run at the end of this leg (start or resume to stop)."""
        return self.begin.from_outer_step + self.begin.outer_steps

    def check_superseded(self) -> None:
        """Raise `Superseded` if a process has claimed a later attempt of this replica. One LIST request.

        Raises `FirstBaseOutvoted` if more than half of the replicas adopted another first base: another LIST request,
        until more than half have adopted this one.
        """
        if (other := self.log.starts.outvoted_by()) is not None:
            raise FirstBaseOutvoted(
                f"replica {self.replica_id} began with other values than more than half of the replicas of "
                f"{self.store.url}, which follow start {other[:12]}. Its next attempt begins with theirs; compare "
                "`diloco doctor` on the machines: seeded alike, they should build the same model."
            )
        newest = AttemptRecords(self.store).newest_claim(self.replica_id, self.number)
        if newest > self.number:
            raise Superseded(f"attempt {newest} of replica {self.replica_id} took over from attempt {self.number}.")


def claim_attempt(
    store: Store,
    replica_id: int,
    number: int | None,
    clock: Clock,
    stamp: Stamp,
    should_leave: Callable[[], bool] = lambda: False,
    background: Background | None = None,
    launched: Launched | None = None,
) -> Attempt:
    """Make this process attempt `number` of a replica in the newest leg, by creating the attempt's claim record.

    The coordinator that launched the attempt has created its intent, the record that announces it. `number=None`, for
    replicas that their user starts: the next free number, with an intent of its own. `should_leave`: whether a
    preemption notice has come. `launched`: digests that the configuration must have; None for replicas that their user
    starts.

    Raises `Superseded` if another process has claimed that number, `ConfigError` if the run has no such replica, no
    intent of the attempt can be read, or the configuration is another.
    """
    run_json = read_optional(store, keys.RUN)
    if launched is not None and run_json is not None:
        launched.check_run(run_json, store.url)
    log = RunLog(store, run_json=run_json)
    store = log.store
    replicas = log.run.config.most_replicas
    if not 0 <= replica_id < replicas:
        raise ConfigError(f"replica {replica_id} is outside 0..{replicas - 1} of the run in {store.url}.")
    leg = log.newest_begin()
    if launched is not None:
        launched.check_leg(leg.record, store.url)
    if number is None:
        intent = _intend_first_free(store, replica_id, leg.record.leg, stamp)
    else:
        intent = _intended(store, replica_id, number)
    claimed, key = intent.attempt, keys.claim(replica_id, intent.attempt, intent.claim_token)
    claim = Writer.of_attempt(store, replica_id, claimed).create(_claim(replica_id, claimed, stamp), key)
    if claim is None:
        raise Superseded(f"attempt {claimed} of replica {replica_id} is claimed by another process; this one leaves.")
    authors = Authors(store, background or NoBackground())
    authors.know(replica_id, claimed, claim.sha256)
    pulse = Pulse()
    return Attempt(
        log=log,
        leg=leg,
        replica_id=replica_id,
        number=claimed,
        clock=clock,
        stamp=stamp,
        claim_sha256=claim.sha256,
        authors=authors,
        should_leave=lambda: pulse.vacated or should_leave(),
        background=background or NoBackground(),
        pulse=pulse,
    )


def adopted_attempt(
    store: Store,
    replica_id: int,
    number: int,
    leg: int,
    claim_sha256: str,
    clock: Clock,
    stamp: Stamp,
    should_leave: Callable[[], bool],
    background: Background,
    launched: Launched,
) -> Attempt:
    """The attempt that the parent process has claimed, for this process, a rank of the replica. Writes nothing.

    `leg`: number of the leg that it was claimed in. `claim_sha256`: digest of its claim record. The other arguments are
    those of `claim_attempt`. Raises `ConfigError` if the configuration is another than the parent was launched for.
    """
    run_json = read_optional(store, keys.RUN)
    if run_json is not None:
        launched.check_run(run_json, store.url)
    log = RunLog(store, run_json=run_json)
    store = log.store
    begin = log.begin_of(leg)
    launched.check_leg(begin.record, store.url)
    authors = Authors(store, background)
    authors.know(replica_id, number, claim_sha256)
    return Attempt(
        log=log,
        leg=begin,
        replica_id=replica_id,
        number=number,
        clock=clock,
        stamp=stamp,
        claim_sha256=claim_sha256,
        authors=authors,
        should_leave=should_leave,
        background=background,
    )


def _intended(store: Store, replica_id: int, number: int) -> Intent:
    """The intent (the record that announces an attempt) with which a coordinator launched attempt `number`.

    Raises `ConfigError` if it cannot be read, or if an earlier attempt of the replica has none.
    """
    records = AttemptRecords(store)
    intent = records.intent(replica_id, number) if number in records.numbers(replica_id) else None
    if intent is None:
        raise ConfigError(
            f"attempt {number} of replica {replica_id} of {store.url} has no {keys.INTENT} that can be read, or one "
            "before it has none: no coordinator launched it. Use launch, attach or resume, or join without a number."
        )
    return intent


def _intend_first_free(store: Store, replica_id: int, leg: int, stamp: Stamp) -> Intent:
    """Create the record that announces the replica's next attempt, under the first number without one."""
    number = len(AttemptRecords(store).numbers(replica_id))
    created = None
    while created is None:
        number += 1
        intent = Intent(
            **stamp(),
            replica_id=replica_id,
            attempt=number,
            leg=leg,
            executor=BY_HAND,
            why="started by its user",
            claim_token=stamp.unforeseen(),
        )
        created = Writer(store, Role.LAUNCHER).create(intent)
    return created.record


def _claim(replica_id: int, number: int, stamp: Stamp) -> Claim:
    """The record by which this process claims the attempt, with its machine's name, hardware and package versions."""
    return Claim(
        **stamp(),
        replica_id=replica_id,
        attempt=number,
        host=platform.node(),
        pid=os.getpid(),
        versions=versions_here(),
        threads=cpu_threads(os.environ),
        hardware=hardware_here(),
    )


def cpu_threads(environ: Mapping[str, str]) -> int:
    """Threads that torch takes: the first number of OMP_NUM_THREADS ("4,2" in OpenMP: 2 inside one another).

    Without one as many as the cores that this process may use, fewer than the machine's under Slurm or taskset.
    """
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if first.isdecimal() and int(first):
        return int(first)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_VERSIONS_OF = ("diloco-orchestrator", "torch", "torchft", "transformers", "obstore")
# Kernels are chosen by the processor, whose vector units and caches decide in which order numbers are added, and by the
# versions of what computes. How the bucket is reached (obstore) changes no bit.
_OF_CLASS = ("python", "machine", "diloco-orchestrator", "torch", "torchft", "transformers")


def versions_here() -> dict[str, str]:
    """The versions that affect training in this process: Python, machine type, and packages."""
    system = {"python": platform.python_version(), "machine": platform.machine()}
    return {**system, **installed_versions(_VERSIONS_OF)}


def hardware_here(proc: Path = Path("/proc")) -> dict[str, str]:
    """The names of the processor and of all NVIDIA GPUs, from Linux's `proc`. No library is loaded."""
    lines = _read(proc / "cpuinfo").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    listed = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    gpus = [line.partition(":")[2].strip() for each in listed for line in _read(each).splitlines()[:1]]
    return {"cpu": model or platform.processor() or platform.machine(), "gpu": ", ".join(gpus)}


def differences(versions: Mapping[str, str], hardware: Mapping[str, str]) -> list[str]:
    """Each recorded version or hardware name that differs from this machine's, as a phrase with both; empty if none.

    `versions`, `hardware`: as an attempt's claim records them. Thread counts are not compared.
    """
    here = {**{name: versions_here()[name] for name in _OF_CLASS}, **hardware_here()}
    there = {**versions, **hardware}
    return [
        f"{name} {there.get(name) or 'none'} there, {value or 'none'} here"
        for name, value in here.items()
        if there.get(name, "") != value
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
