"""One attempt of a replica, from claim to exit record: the process around the user's training function.

This is a process entry: it reads the environment, owns signals, threads and the clock, and is the one place that
catches every error, to record how the attempt ended. `replica.context` has the API of the training function.
"""

import gc
import json
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Self, TextIO

from diloco_orchestrator.clock import Background, Clock, random_token
from diloco_orchestrator.errors import (
    BaseDiverged,
    ConfigError,
    DilocoError,
    HeldoutItemInTraining,
    ModelMismatch,
    Preempted,
    RecordTooNew,
    RecordTooOld,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Superseded,
    WorkloadEndedEarly,
)
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, reason_of
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import (
    ENV_STORAGE_OPTIONS,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
    EXIT_SUPERSEDED,
    KEY_VARIABLES,
)
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.replica.attempt.attempt import Attempt, claim_attempt, cpu_threads
from diloco_orchestrator.replica.attempt.heartbeat import HeartbeatWriter
from diloco_orchestrator.replica.process.stuck import STUCK, StuckWatch, stuck_before
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.open_store import LASTING, open_store

log = logging.getLogger(__name__)

LoadEntrypoint = Callable[[str], Callable[[Any], None]]

# Exit code and reason, which may name fields of the error, by error type; the first matching row decides. Any other
# error is worth another attempt.
_ENDINGS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], int, str], ...] = (
    (Preempted, EXIT_PREEMPTED, "preempted"),
    (Superseded, EXIT_SUPERSEDED, "superseded"),
    ((ModelMismatch, BaseDiverged, ConfigError, RecordTooNew, RecordTooOld), EXIT_PERMANENT, "permanent"),
    ((StoreDenied, StoreFull), EXIT_PERMANENT, "permanent"),
    (HeldoutItemInTraining, EXIT_PERMANENT, "held-out item {error.item!r} in training"),
    (WorkloadEndedEarly, EXIT_PERMANENT, "ended early"),
)


@dataclass(frozen=True)
class Ending:
    """The end of an attempt: exit code, reason, and the traceback of a failure."""

    code: int
    reason: str
    error: str | None = None  # traceback
    unrecorded: str = ""  # the error in one line, if no record holds it: without a claim, or with a store that refuses


class EntrypointInvalid(ConfigError):
    """The entrypoint cannot be imported or called. Permanent: a relaunch would fail in the same way."""


class LeavingNotice:
    """Callable that returns whether this process should leave as soon as its finished work is published.

    True after SIGTERM, or once `leave_after_s` seconds have passed, because some providers end a process at its time
    limit without a signal.
    """

    def __init__(self, clock: Clock, leave_after_s: float | None = None) -> None:
        self._given = False
        self._is_unheard: Callable[[], bool] = lambda: False
        self._clock = clock
        self._deadline = math.inf if leave_after_s is None else clock.now() + leave_after_s

    def __call__(self) -> bool:
        return self._given or self._clock.now() >= self._deadline

    def install(self) -> None:
        """Install a SIGTERM handler that gives the notice to leave: from then on calls of this object return True.

        Within `interrupting` the handler may also raise `Preempted`. Raises `ValueError` outside the main thread.
        """
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextmanager
    def interrupting(self, is_unheard: Callable[[], bool]) -> Iterator[None]:
        """Context in which SIGTERM raises `Preempted` in the main thread if `is_unheard()` returns True on its arrival.

        `is_unheard` returns True while the training function does not poll this object and would miss the notice.
        """
        self._is_unheard = is_unheard
        try:
            yield
        finally:
            self._is_unheard = lambda: False

    def _on_signal(self, *_: Any) -> None:
        self._given = True
        if self._is_unheard():
            raise Preempted("asked to leave; the training loop had taken no step and no batch, so nothing is lost.")


def _refuse_ranks(attempt: Attempt, ranks: int) -> Ending:
    raise ConfigError(f"replica {attempt.replica_id} has several ranks, which this process does not start.")


def run_attempt(
    url: str,
    replica_id: int,
    number: int,
    launched: Launched,
    *,
    clock: Clock,
    background: Background,
    environ: Mapping[str, str],
    load_libraries: Callable[[], None],
    load_entrypoint: LoadEntrypoint,
    notice: LeavingNotice | None = None,
    ranks: int | None = None,
    train_in_ranks: Callable[[Attempt, int], Ending] = _refuse_ranks,
    dump_stacks_after: Callable[[float], None] = lambda _: None,
    end_process: Callable[[Ending], None] = lambda _: None,
) -> Ending:
    """Claim attempt `number` of a replica, train, and write its exit record. Returns how the attempt ended.

    Args:
        url: the run's folder.
        launched: digests that the run's configuration must have.
        environ: this process's environment, with storage options and names of secrets.
        load_libraries: imports what training needs, in this thread, while the attempt is claimed in the background.
        load_entrypoint: returns the user's training function named "module:function".
        notice: says when this process should leave; None: never.
        ranks: number of ranks of the replica on this machine; None: that of the configuration.
        train_in_ranks: trains in so many other processes, in a run of ranks.
        dump_stacks_after: called before every heartbeat with a number of seconds: if they pass without another call, so
            that heartbeats have ceased, it has to print the stacks of all threads.
        end_process: ends this process at once, from the heartbeat's thread, after the exit record of an attempt whose
            training thread is stuck.

    Raises nothing: errors of imports and training are recorded. If the attempt cannot be claimed, because the store
    cannot be opened or refuses, no record can be written: its error is printed.
    """
    notice = notice or LeavingNotice(clock)
    try:
        options = json.loads(environ.get(ENV_STORAGE_OPTIONS) or "{}")
        store = of_run(open_store(url, options, clock=clock, retry=LASTING, is_leaving=notice), environ)
    except Exception as error:  # without a store no record can hold it, of whatever kind it is
        return _unclaimed(error, environ)
    stamp = Stamp(random_token(), clock.wall_time)
    training_thread = threading.get_ident()
    output = OutputTail()

    def record(attempt: Attempt, ending: Ending) -> Ending:
        if ending.error:
            print(redact(ending.error, environ), file=sys.stderr)
        return replace(ending, unrecorded=write_exit_record(attempt, ending, output.text(), environ))

    def join() -> _Joined:
        attempt = claim_attempt(store, replica_id, number, clock, stamp, notice, background, launched)
        heartbeat_stamp = Stamp(random_token(), clock.wall_time)
        writer = HeartbeatWriter(store, replica_id, number, attempt.pulse, heartbeat_stamp, attempt.config)
        silent_s = attempt.config.retry.hung_after_s / 2  # before a coordinator counts it as hung and reads the output
        before = partial(stuck_before, attempt)
        watch = StuckWatch(attempt.pulse, attempt.config, clock, training_thread, stuck_before=before)

        def beat() -> None:
            dump_stacks_after(silent_s)
            writer.beat()
            if stack := watch.stack():
                end_process(record(attempt, Ending(EXIT_ERROR, STUCK, stack)))

        stop_beating = background.every(attempt.config.timing.heartbeat_s, beat)
        return _Joined(attempt, stop_beating, caught(lambda: _ended_before(attempt)))

    with output:
        configure_logging(replica_id, number)
        joining = background.start(join)
        not_loaded = caught(load_libraries)
        try:
            joined = joining.result()
        except Superseded as error:
            log.warning("%s", error)
            return Ending(EXIT_SUPERSEDED, "superseded")  # another process wrote the claim, and writes the records
        except Exception as error:  # of any kind: without a claim there is no attempt to write records for
            return _unclaimed(error, environ)
        ending = joined.ended or not_loaded
        count = joined.attempt.config.ranks_of(replica_id) if ranks is None else ranks
        if ending is None and (ranks is not None or joined.attempt.config.in_ranks):
            ending = caught(lambda: train_in_ranks(joined.attempt, count))
            assert ending is not None, "training has an ending"
        elif ending is None:
            ending = call_entrypoint(joined.attempt, load_entrypoint, notice)
        if ending.code == EXIT_PREEMPTED and joined.attempt.pulse.vacated:
            ending = replace(ending, reason="vacated: the run was scaled down")
        joined.stop_beating()
        return record(joined.attempt, ending)


def _unclaimed(error: Exception, environ: Mapping[str, str]) -> Ending:
    """The ending of an attempt that could not be claimed because of `error`, the current error; prints it.

    An error about store or settings is one line, because its text has the remedy; others are a traceback.
    """
    code, reason = _row_of(error) or (EXIT_ERROR, type(error).__name__)
    words = " ".join(redact(f"{type(error).__name__}: {error}", environ).split())
    print(words if isinstance(error, DilocoError) else redact(traceback.format_exc(), environ), file=sys.stderr)
    return Ending(code, reason, unrecorded=words)


@dataclass(frozen=True)
class _Joined:
    """An attempt that this process has claimed, what stops its heartbeat, and how it ended if the run is over."""

    attempt: Attempt
    stop_beating: Callable[[], None]
    ended: Ending | None


def train(attempt: Attempt, load_entrypoint: LoadEntrypoint) -> Ending:
    """Call the user's training function unless the run is over. Every error becomes an `Ending`; none is raised."""
    return caught(lambda: _ended_before(attempt)) or call_entrypoint(attempt, load_entrypoint)


def caught(call: Callable[[], Ending | None]) -> Ending | None:
    """The result of `call`, or the `Ending` for the error that it raises, of any type: nothing is raised."""
    try:
        return call()
    except BaseException as error:  # whatever ends the process is its ending
        return _ending_of(error)


def _ended_before(attempt: Attempt) -> Ending | None:
    """The ending of an attempt that began after the run's end; None if there is work to do. One GET request."""
    if attempt.log.result(attempt.begin.leg) is None:
        return None
    return Ending(EXIT_DONE, "the run had ended before this attempt began")


def call_entrypoint(
    attempt: Attempt,
    load_entrypoint: LoadEntrypoint,
    notice: LeavingNotice | None = None,
    ranks: Any = None,
) -> Ending:
    """Load and call the user's training function. Raises nothing: every error becomes an `Ending`.

    `ranks`: this process's place in a replica of several processes (`Ranks`); None in a replica of one.
    """
    try:
        return _train_or_raise(attempt, load_entrypoint, notice or LeavingNotice(attempt.clock), ranks)
    except StoreUnavailable as error:
        if attempt.should_leave():
            log.warning("asked to leave while the store is away, so that nothing could be published: %s", error)
            return Ending(EXIT_PREEMPTED, "preempted while the store was away")
        return _ending_of(error)
    except BaseException as error:  # whatever ends the training is the ending of the attempt
        return _ending_of(error)


def _ending_of(error: BaseException) -> Ending:
    row = _row_of(error)
    if row is None:
        return Ending(EXIT_ERROR, type(error).__name__, traceback.format_exc())
    log.warning("%s: %s", type(error).__name__, error)
    return Ending(*row, traceback.format_exc() if row[0] == EXIT_PERMANENT else None)


def _row_of(error: BaseException) -> tuple[int, str] | None:
    """Exit code and reason of an error that `_ENDINGS` lists; None for any other error."""
    found = ((code, reason) for kind, code, reason in _ENDINGS if isinstance(error, kind))
    code, reason = next(found, (None, ""))
    return None if code is None else (code, reason.format(error=error))


def _train_or_raise(attempt: Attempt, load_entrypoint: LoadEntrypoint, notice: LeavingNotice, ranks: Any) -> Ending:
    entrypoint = attempt.config.entrypoint
    try:
        function = load_entrypoint(entrypoint)
    except Exception as error:  # the user's module runs here
        raise EntrypointInvalid(f"the entrypoint {entrypoint!r} does not load: {error}") from error
    # Imported late: torch takes a second to import, which `load_libraries` spends while the attempt is claimed.
    from diloco_orchestrator.replica.context import ReplicaContext
    from diloco_orchestrator.replica.training import rng

    rng.seed_all(attempt.config.seed)  # the same on all replicas, so that they build the same model
    context = ReplicaContext(attempt, ranks)
    try:
        with (
            notice.interrupting(lambda: context.session is not None and context.session.is_unheard),
            _ending_forks(),
        ):
            function(context)
    except ValueError as error:
        if "another FSDP group" not in str(error):
            raise
        raise ConfigError(
            f"{error}\nTied weights, such as an embedding and its head, belong into one group: "
            "fully_shard([model.embedding, model.head])."
        ) from error
    session = context.session
    if session is not None and session.preempted:
        return Ending(EXIT_PREEMPTED, "preempted")
    if session is None or not session.stopped:
        where = "without calling ctx.attach" if session is None else f"in round {session.round}"
        raise WorkloadEndedEarly(
            f"{entrypoint} returned {where}, before the run's end. Loop over replica.batches(data) until it ends, "
            "or until replica.step(...) returns False."
        )
    return Ending(EXIT_DONE, "the run ended")


@contextmanager
def _ending_forks() -> Iterator[None]:
    """Context that ends a process which was forked within it and comes to its end, as a program's end would.

    It would go on as the attempt, and record the end of one that its parent still trains.
    """
    parent, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:  # whatever ends the forked process is its end
        if os.getpid() == parent:
            raise
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            code = error.code or 0
        else:
            traceback.print_exc()
            code = 1
    if os.getpid() != parent:
        sys.stdout.flush()
        os._exit(code)


def write_exit_record(attempt: Attempt, ending: Ending, output: str, environ: Mapping[str, str]) -> str:
    """Write the attempt's `log.txt`, then its exit record, both redacted.

    Returns the error of a failed attempt whose records could not be written, with the reason, in one line; else "".
    """
    record = Exit(
        **attempt.stamp(),
        replica_id=attempt.replica_id,
        attempt=attempt.number,
        code=ending.code,
        reason=ending.reason,
        round=max(0, attempt.pulse.round - 1),
        error=_encodable(redact(ending.error, environ)) if ending.error else None,
    )
    text = redact(output, environ).encode(errors="backslashreplace")
    try:
        attempt.store.create(keys.log_text(attempt.replica_id, attempt.number), text)
        attempt.writer.create(record)
    except StoreError as error:
        log.error("the exit record was not written: %s", error)
        if ending.code != EXIT_DONE:
            words = f"{reason_of(record)} No exit record: {type(error).__name__}: {error}"
            return " ".join(redact(words, environ).split())
    return ""


def _encodable(text: str) -> str:
    """The text with lone surrogates escaped: Python reads undecodable bytes as these, and UTF-8 cannot hold them."""
    return text.encode(errors="backslashreplace").decode()


def configure_logging(replica_id: int, number: int) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s replica {replica_id}.{number} %(levelname)s %(message)s",
        force=True,
    )
    for noisy in ("torchft", "httpx", "urllib3", "filelock", "botocore", "boto3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def load_training_libraries(environ: Mapping[str, str]) -> None:
    """Import torch and the training loop; set torch's threads to OMP_NUM_THREADS, on which bits depend."""
    # The collector would traverse what an import has made again and again, a sixth of the CPU time of importing torch
    # and making the first optimizer. What is imported stays: no later collection need traverse it either.
    gc.disable()
    try:
        import torch

        import_module("diloco_orchestrator.replica.context")
    finally:
        gc.freeze()
        gc.enable()
    if environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(cpu_threads(environ))


def process_environment() -> Mapping[str, str]:
    """A copy of the environment, read once at process entry. Private keys of a signed run are removed from the
    original.

    So neither training nor the processes that it starts inherit them.
    """
    environ = dict(os.environ)
    for name in KEY_VARIABLES:
        os.environ.pop(name, None)
    return environ


TAIL_CHARACTERS = 65_536


class OutputTail:
    """The end of this process's output: while entered as a context, text printed through sys.stdout and sys.stderr."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        """Append printed text; the oldest text is dropped beyond the limit."""
        self._pieces.append(text)
        self._size += len(text)
        if self._size > 2 * TAIL_CHARACTERS:
            self._pieces = [self.text()]
            self._size = len(self._pieces[0])

    def text(self) -> str:
        """The last 65,536 characters of the output."""
        return "".join(self._pieces)[-TAIL_CHARACTERS:]

    def __enter__(self) -> Self:
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(sys.stdout, self), _Tee(sys.stderr, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout, sys.stderr = self._streams


class _Tee:
    """A text stream that writes to another stream and adds the text to an `OutputTail`.

    Text that the other stream does not take, as on a full disk, is in the tail alone: nobody's training ends for it.
    """

    def __init__(self, stream: TextIO, tail: OutputTail) -> None:
        self._stream = stream
        self._tail = tail

    def write(self, text: str) -> int:
        self._tail.add(text)
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
