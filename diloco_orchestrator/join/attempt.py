"""`TakenAttempt`: an attempt that a joined machine runs: its process, its signs of life, its output and its end
record.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.errors import StoreError, StoreFull, StoreUnavailable
from diloco_orchestrator.executors.contract import BY_EXIT_CODE, ReplicaState, ReplicaStatus
from diloco_orchestrator.executors.process_contract import EXIT_DONE
from diloco_orchestrator.join.grants import Lent
from diloco_orchestrator.join.offers import name_of
from diloco_orchestrator.join.output import OutputPieces
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import JoinEnd, Lease, Offer
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 60.0  # from SIGTERM to SIGKILL: a replica publishes what it has, and a large optimizer's state
_LAST_WORDS_S = 20.0  # how long a machine that leaves tries to record the end while the bucket cannot be reached
# Asks the kernel for SIGTERM when `diloco join` dies, then becomes the command: a replica whose lease nobody renews
# any more publishes what it has and leaves. Linux only; elsewhere it trains on until a later attempt's claim ends it.
# Not a `preexec_fn`, which must not run in a process with threads.
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit(75)  # it died before the call above
os.execvp(sys.argv[2], sys.argv[2:])
"""


class AttemptProcess(Protocol):
    """The process of an attempt on a joined machine. All methods are safe to call after its end."""

    pid: int  # on this machine

    def exit_code(self, wait_s: float) -> int | None:
        """The process's exit code, negative for a signal; None if it still runs after `wait_s` seconds."""
        ...

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process. Does nothing once it has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        ...


Start = Callable[[Sequence[str], Mapping[str, str], Path], AttemptProcess]  # as `LocalProcess`


class LocalProcess:
    """An `AttemptProcess` of this machine, leader of a session of its own, with no standard input.

    On Linux it gets SIGTERM when this process dies.

    Args:
        command: program and arguments, at least the program; "python" means this Python.
        env: its whole environment.
        output: file to which stdout and stderr are appended.

    Raises OSError if Python cannot be started or `output` not be written. A program that cannot be executed ends the
    process with a traceback in `output`.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        argv = [sys.executable if command[0] == "python" else command[0], *command[1:]]
        with output.open("ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _TIED_TO_PARENT, str(os.getpid()), *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def exit_code(self, wait_s: float) -> int | None:
        try:
            return self._popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it ended in between
            os.killpg(self.pid, signal.SIGKILL)


def end_of(code: int, asked: ReplicaStatus | None) -> ReplicaStatus:
    """The end of an attempt on a joined machine whose process exited with `code`.

    `asked`: the reason for which it was asked to end, or None. A process with the exit code for success has succeeded,
    whatever it was asked. The replica's own exit code for a preemption is kept if its machine leaves.
    """
    state, reason = BY_EXIT_CODE.get(code, (ReplicaState.FAILED, "exit"))
    if asked is None or code == EXIT_DONE:
        words = "" if code == EXIT_DONE else f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        return ReplicaStatus(state, reason, code, message=words)
    if state is asked.state is ReplicaState.PREEMPTED:
        return ReplicaStatus(state, reason, code, message=asked.message)
    return replace(asked, exit_code=code)


class TakenAttempt:
    """Runs an attempt (process of a replica) in `folder` that this machine has taken from an offer in the bucket.

    Renews a lease in the bucket while the process lives, and ends it if the coordinator cancels the attempt. `begin`,
    `attend` and `record` are called once each, in this order; `ask_to_end` and `kill` at any time.

    Args:
        store: the run's folder.
        offer: of the attempt, which this machine has taken.
        offer_sha256: digest of its bytes.
        folder: on this machine, for its code and output; exists, and is removed by the caller.
        arguments: of this machine, behind those that the offered command has.
        env: of this machine, which the replica inherits; secrets in it are redacted in the output.
        clock: time, in seconds.
        stamp: author, ids and times for records.
        every_s: pause between two requests to the bucket, seconds.
        leaving: returns why the machine leaves, "" while it stays.
        start: starts the process.
        lent: temporary access to the store by an invitation's link, renewed here; None: the machine has an account.
    """

    def __init__(
        self,
        store: Store,
        offer: Offer,
        offer_sha256: str,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        env: Mapping[str, str],
        clock: Clock,
        stamp: Stamp,
        every_s: float,
        leaving: Callable[[], str],
        start: Start,
        lent: Lent | None = None,
    ) -> None:
        self._store = store
        self._writer = Writer(store, Role.MACHINE)
        self._offer = offer
        self._offer_sha256 = offer_sha256
        self._name = name_of(offer)
        self._folder = folder
        self._command = [*offer.command, *arguments]
        code = {bootstrap.ENV_URL: str(folder / "code.zip")} if offer.code is not None else {}
        self._env = {**env, "PYTHONUNBUFFERED": "1", **offer.env, **code}
        self._clock = clock
        self._stamp = stamp
        self._every_s = every_s
        self._leaving = leaving
        self._start = start
        self._file = folder / "output.log"
        self._lent = lent
        self._output = OutputPieces(store, self._name, self._file, lambda text: redact(text, self._secrets()))
        self._counter = 0
        self._process: AttemptProcess | None = None
        self._is_asked = False
        self._is_offered = True  # when last looked; nothing is written about an attempt whose offer is gone

    @property
    def pid(self) -> int | None:
        """The id of the attempt's process; None before its start."""
        return None if self._process is None else self._process.pid

    def ask_to_end(self) -> None:
        """Send SIGTERM to the attempt's process, once. Safe in a signal's handler."""
        if self._process is not None and not self._is_asked:
            self._is_asked = True
            self._process.ask_to_end()

    def kill(self) -> None:
        """Send SIGKILL to the attempt's process. Safe in a signal's handler, and after its end."""
        if self._process is not None:
            self._process.kill()

    def begin(self) -> None:
        """Fetch the attempt's code and start its process. Raises OSError if that fails, and the store's errors."""
        self._file.touch(mode=0o600)
        self._patiently(self._renew)
        if (key := self._offer.code) is not None:
            archive = self._patiently(lambda: self._store.get(key))
            (self._folder / "code.zip").write_bytes(archive)
        self._process = self._start(self._command, self._env, self._file)

    def attend(self) -> ReplicaStatus:
        """Wait for the process's end; ask for it if this machine leaves, a coordinator cancels, or the time is over.

        A minute after that request (`GRACE_S`) it is killed. The store's errors are logged and not raised.
        """
        assert self._process is not None
        began, asked, asked_at = self._clock.now(), None, 0.0
        while (code := self._process.exit_code(self._every_s)) is None:
            try:
                asked = self._asked_for(self._clock.now() - began, asked)
                if self._lent is not None:
                    self._lent.look(self._store)
                if self._is_offered:
                    self._renew()
                    self._output.write()
            except StoreError as error:  # the replica waits an outage out by itself, and ends if it is denied
                log.warning("%s", error)
                asked = asked or self._asked_here(self._clock.now() - began)
            if asked is not None and not asked_at:
                asked_at = self._clock.now()
                self.ask_to_end()
            elif asked is not None and self._clock.now() - asked_at > GRACE_S:
                self._process.kill()
        return end_of(code, asked or self._asked_here(0.0))

    def record(self, end: ReplicaStatus) -> bool:
        """Write the rest of the attempt's output and its end record; False if another end was recorded first, which
        counts.

        Nothing is written, and False returned, if the attempt's offer was deleted. Raises `StoreUnavailable` or
        `StoreFull` if the bucket cannot be reached or is full while the machine leaves.
        """
        self._patiently(self._look)
        if not self._is_offered:
            return False
        self._patiently(lambda: self._output.write(to_end=True))
        record = JoinEnd(**self._stamp(), state=end.state, reason=end.reason, code=end.exit_code, message=end.message)
        return self._patiently(lambda: self._writer.create(record, self._key(keys.JOIN_END))) is not None

    def _secrets(self) -> Mapping[str, str]:
        """Variables whose values must not be in the output, if their names say that these are secret."""
        return self._env if self._lent is None else {**self._env, **self._lent.secrets}

    def _key(self, record: str) -> str:
        return keys.join_record(self._name, self._offer_sha256, record)

    def _renew(self) -> None:
        self._counter += 1
        self._writer.overwrite(Lease(**self._stamp(), counter=self._counter), self._key(keys.JOIN_LEASE))

    def _asked_here(self, ran_s: float) -> ReplicaStatus | None:
        """Reason why this machine ends the attempt after `ran_s` seconds; None if it does not."""
        if why := self._leaving():
            return ReplicaStatus(ReplicaState.PREEMPTED, "lost", message=f"its machine left: {why}")
        if self._offer.timeout_s is not None and ran_s > self._offer.timeout_s:
            return ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", message=f"it ran for {self._offer.timeout_s:g} s")
        return None

    def _look(self) -> set[str]:
        """The keys of the records about the attempt, and whether its offer is there. One LIST request and a GET.

        In a folder that was emptied and used anew, another attempt may have the same name.
        """
        key = keys.join_offer(self._name)
        offer = read_optional(self._store, key)
        self._is_offered = offer is not None and sha256_hex(offer) == self._offer_sha256
        return {info.key for info in self._store.list(key.removesuffix(keys.JOIN_OFFER))}

    def _asked_for(self, ran_s: float, asked: ReplicaStatus | None) -> ReplicaStatus | None:
        """Reason why the attempt has to end, `asked` if one was known before; None if it goes on."""
        there = self._look()
        if asked is not None:
            return asked
        if self._key(keys.JOIN_CANCEL) in there:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", message="cancelled")
        if self._key(keys.JOIN_END) in there or not self._is_offered:
            return ReplicaStatus(ReplicaState.PREEMPTED, "lost", message="its coordinator has given it up")
        return self._asked_here(ran_s)

    def _patiently(self, call: Callable[[], T]) -> T:
        """The result of `call`, repeated while the bucket is out of reach or full; briefly if the machine leaves."""
        left_at: float | None = None
        while True:
            try:
                return call()
            except (StoreUnavailable, StoreFull) as error:
                log.warning("%s", error)
                if self._leaving():
                    left_at = self._clock.now() if left_at is None else left_at
                    if self._clock.now() - left_at > _LAST_WORDS_S:
                        raise
            self._clock.sleep(self._every_s)
