"""The process of an attempt on a machine that joined: started, waited for, asked to end, killed with its children."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

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
    """The process of an attempt, as `join.machine` needs it. All methods are safe to call after its end."""

    pid: int  # on this machine

    def exit_code(self, wait_s: float) -> int | None:
        """The exit code, negative for a signal; None if the process still runs after `wait_s` seconds."""
        ...

    def ask_to_end(self) -> None:
        """Send SIGTERM. Does nothing once the process has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        ...


class LocalProcess:
    """An `AttemptProcess` of this machine, leader of a session of its own, with no standard input.

    On Linux it gets SIGTERM when this process dies.

    Args:
        command: program and arguments, at least the program; "python" means this Python.
        env: its whole environment.
        output: file to which stdout and stderr are appended.

    Raises OSError if Python cannot be started or `output` not be written; a program that cannot be executed is the
    process's own end, with a traceback in `output`.
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
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it ended in between
