"""One attempt of a replica, from claim to exit record: the process around the user's training function.

This is a process entry: it reads the environment, owns signals, threads and the clock, and is the one place that
catches everything, to write down how the attempt ended.
"""

import json
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_orchestrator.clock import Background, Clock, random_token
from diloco_orchestrator.errors import (
    BaseDiverged,
    ConfigError,
    ModelMismatch,
    Preempted,
    RecordTooNew,
    StoreDenied,
    StoreError,
    StoreFull,
    Superseded,
    WorkloadEndedEarly,
)
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.process import (
    ENV_STORAGE_OPTIONS,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
    EXIT_SUPERSEDED,
)
from diloco_orchestrator.protocol.records import Exit, Heartbeat, Stamp
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.replica.process.attempt import Seat, take_seat
from diloco_orchestrator.replica.process.output_tail import OutputTail
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

log = logging.getLogger(__name__)

# What no relaunch mends; the first matching row decides. Anything else is an error worth another attempt.
_CODES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], int, str], ...] = (
    (Preempted, EXIT_PREEMPTED, "preempted"),
    (Superseded, EXIT_SUPERSEDED, "superseded"),
    ((ModelMismatch, BaseDiverged, ConfigError, RecordTooNew, StoreDenied, StoreFull), EXIT_PERMANENT, "permanent"),
    (WorkloadEndedEarly, EXIT_PERMANENT, "ended early"),
)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    code: int
    reason: str
    error: str | None = None  # traceback


class EntrypointInvalid(ConfigError):
    """The entrypoint does not import or cannot be called. Permanent."""


class LeavingNotice:
    """Set by SIGTERM, or once `leave_after_s` seconds have passed: the process should leave as soon as what is
    finished is published. The second is for providers that end a process at their time limit without a notice."""

    def __init__(self, clock: Clock, leave_after_s: float | None = None) -> None:
        self._given = False
        self._clock = clock
        self._deadline = math.inf if leave_after_s is None else clock.now() + leave_after_s

    def __call__(self) -> bool:
        return self._given or self._clock.now() >= self._deadline

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self._given = True


def run_attempt(
    url: str,
    replica_id: int,
    attempt: int,
    *,
    clock: Clock,
    background: Background,
    environ: Mapping[str, str],
    should_leave: Callable[[], bool],
    load_entrypoint: Callable[[str], Callable[[Any], None]],
) -> int:
    """Run the attempt and write its exit record. Returns the exit code."""
    options = json.loads(environ.get(ENV_STORAGE_OPTIONS) or "{}")
    store = open_store(url, options, clock=clock)
    stamp = Stamp(random_token(), clock.wall_time)
    with OutputTail() as output:
        _configure_logging(replica_id, attempt)
        try:
            seat = take_seat(store, replica_id, attempt, clock, stamp, should_leave, background)
        except Superseded as error:
            log.warning("%s", error)
            return EXIT_SUPERSEDED  # another process wrote the claim, so its records are not ours to write
        except Exception as error:
            print(redact(traceback.format_exc(), environ), file=sys.stderr)
            return _ending_of(error).code  # without a seat there is nobody to write records for
        heartbeat = background.every(seat.config.timing.heartbeat_s, Heart(seat).beat)
        ending = attend(seat, load_entrypoint)
        heartbeat.stop()
        if ending.error:
            print(redact(ending.error, environ), file=sys.stderr)
        write_exit(seat, ending, output.text(), environ)
    return ending.code


def attend(seat: Seat, load_entrypoint: Callable[[str], Callable[[Any], None]]) -> Ending:
    """Call the training function; every way out becomes an `Ending`."""
    try:
        return _train_or_raise(seat, load_entrypoint)
    except BaseException as error:
        return _ending_of(error)


def _ending_of(error: BaseException) -> Ending:
    """What an error that is being handled means for the attempt."""
    for kind, code, reason in _CODES:
        if isinstance(error, kind):
            log.warning("%s: %s", type(error).__name__, error)
            return Ending(code, reason, traceback.format_exc() if code == EXIT_PERMANENT else None)
    return Ending(EXIT_ERROR, type(error).__name__, traceback.format_exc())


def _train_or_raise(seat: Seat, load_entrypoint: Callable[[str], Callable[[Any], None]]) -> Ending:
    if (ended := _run_is_over(seat)) is not None:
        return ended
    entrypoint = seat.config.entrypoint
    try:
        function = load_entrypoint(entrypoint)
    except Exception as error:
        raise EntrypointInvalid(f"the entrypoint {entrypoint!r} does not load: {error}") from error
    from diloco_orchestrator.replica.context import ReplicaContext
    from diloco_orchestrator.replica.training import rng

    rng.seed_all(seat.config.seed)  # the same on all replicas, so that they build the same model
    context = ReplicaContext(seat)
    function(context)
    session = context.session
    if session is not None and session.preempted:
        return Ending(EXIT_PREEMPTED, "preempted")
    if session is None or not session.stopped:
        where = "without calling ctx.attach" if session is None else f"in round {session.round}"
        raise WorkloadEndedEarly(
            f"{entrypoint} returned {where}, before the run's end. Loop over replica.batches(data) until it ends."
        )
    return Ending(EXIT_DONE, "the run ended")


def _run_is_over(seat: Seat) -> Ending | None:
    result = seat.log.result(seat.begin.leg)
    return None if result is None else Ending(EXIT_DONE, "the run had ended before this attempt began")


class Heart:
    """Writes the heartbeat; a failed beat is only a missed one."""

    def __init__(self, seat: Seat, store: Store | None = None) -> None:
        self._seat = seat
        self._store = store or seat.store
        self._counter = 0
        self._stamp = Stamp(random_token(), seat.clock.wall_time)  # its own: this runs in another thread

    def beat(self) -> None:
        seat, pulse = self._seat, self._seat.pulse
        self._counter += 1
        beat = Heartbeat(
            **self._stamp(),
            replica_id=seat.replica_id,
            attempt=seat.attempt,
            counter=self._counter,
            phase=pulse.phase,
            round=pulse.round,
            inner_step=pulse.inner_step,
            loss=pulse.loss if pulse.loss is not None and abs(pulse.loss) < float("inf") else None,
        )
        try:
            self._store.put(keys.heartbeat(seat.replica_id, seat.attempt), beat.to_bytes())
        except StoreError as error:
            log.warning("a heartbeat was not written: %s", error)


def write_exit(seat: Seat, ending: Ending, output: str, environ: Mapping[str, str]) -> None:
    record = Exit(
        **seat.stamp(),
        replica_id=seat.replica_id,
        attempt=seat.attempt,
        code=ending.code,
        reason=ending.reason,
        round=max(0, seat.pulse.round - 1),
        error=_encodable(redact(ending.error, environ)) if ending.error else None,
    )
    try:
        seat.store.create(
            keys.log_text(seat.replica_id, seat.attempt), redact(output, environ).encode(errors="backslashreplace")
        )
        seat.store.create(keys.exit_record(seat.replica_id, seat.attempt), record.to_bytes())
    except StoreError as error:
        log.error("the exit record was not written: %s", error)


def _encodable(text: str) -> str:
    """Without the lone surrogates that stand for odd bytes in file names."""
    return text.encode(errors="backslashreplace").decode()


def _configure_logging(replica_id: int, attempt: int) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s replica {replica_id}.{attempt} %(levelname)s %(message)s",
        force=True,
    )
    for noisy in ("torchft", "httpx", "urllib3", "filelock", "botocore", "boto3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def fix_threads(environ: Mapping[str, str]) -> None:
    """Use exactly OMP_NUM_THREADS threads, so that bits do not depend on load."""
    import torch

    if count := environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(count))


def process_environment() -> Mapping[str, str]:
    """The environment, read once at the process's door."""
    return dict(os.environ)
