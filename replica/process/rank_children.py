"""`RankChildren`: the rank processes on one machine, started, read, signalled and ended by the process above them.

What they print, report and how they die is passed on as messages, to the judge of the attempt in this process
(`rank_processes`) or on another machine (`machines`).
"""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any

from diloco_orchestrator.protocol.process import (
    ENV_LEAVE_AFTER,
    ENV_MACHINE,
    ENV_MACHINES,
    ENV_MEETING,
    ENV_MEETING_KEY,
)
from diloco_orchestrator.replica.attempt.attempt import cpu_threads
from diloco_orchestrator.replica.process.rank import RankPlace

RANK = "diloco_orchestrator.replica.process.rank"
LOOK_S = 0.2  # between two polls of the ranks
_LONGEST = 1 << 16  # bytes of a line of output, beyond which its parts are passed on as lines
# Variables that only the process above reads, which watches the time and talks to the other machines.
_NOT_OF_RANKS = {ENV_LEAVE_AFTER, ENV_MACHINE, ENV_MACHINES, ENV_MEETING, ENV_MEETING_KEY}

Message = Mapping[str, Any]  # {"rank": number} with "output": a line, "event": an object, or "died": an exit code


@dataclass(frozen=True)
class RankProgram:
    """The command of every rank of an attempt, on each of its machines.

    `arguments`: of the process above: store, replica, attempt and digests, which every rank gets too. `module`: that
    each rank runs.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    module: str = RANK


@dataclass
class _Child:
    """The process of one rank."""

    number: int
    process: subprocess.Popen[bytes]
    rest: dict[str, bytes] = field(default_factory=dict)  # of an incomplete line, by stream
    is_dead: bool = False


class RankChildren:
    """Starts ranks on this machine and passes on what becomes of them.

    `said`: called with each `Message`, in the order in which the rank printed or sent; "died" is a rank's last.
    """

    def __init__(self, program: RankProgram, said: Callable[[Message], None]) -> None:
        self._program = program
        self._said = said
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()

    def also_read(self, source: Any, call: Callable[[], bool]) -> None:
        """Call `call` within `look` whenever `source`, which has a file descriptor, can be read, until it is False."""
        self._selector.register(source, selectors.EVENT_READ, (source, call))

    def start(self, place: RankPlace, interface: str) -> None:
        """Start the rank at `place`, whose events come here. `interface`: the network interface to the other ranks."""
        read_end, write_end = os.pipe()
        here = replace(place, events=write_end, parent=os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._program.module, *self._program.arguments, "--place", here.to_text()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(self._program.environ, here, interface),
            pass_fds=[each for each in (write_end, here.listener) if each >= 0],
            process_group=0,  # a signal to this process's group must not reach ranks, nor their data loaders
        )
        os.close(write_end)
        child = _Child(place.rank, process)
        self._children.append(child)
        assert process.stdout is not None
        for name, stream in (("output", process.stdout), ("events", os.fdopen(read_end, "rb", buffering=0))):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (child, name))

    def look(self, seconds: float) -> None:
        """Read output and events of the ranks, waiting up to `seconds` for some; notice which ranks have ended."""
        for key, _ in self._selector.select(seconds):
            owner, what = key.data
            if isinstance(owner, _Child):
                self._read(key.fileobj, owner, what)  # type: ignore[arg-type]
            elif not what():
                self._selector.unregister(owner)
        for child in self._children:
            if not child.is_dead and child.process.poll() is not None:
                self._read_rest(child)
                child.is_dead = True
                self._said({"rank": child.number, "died": child.process.returncode})

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal to the process of a rank, if it is one of this machine that lives."""
        for child in self._children:
            if child.number == number:
                child.process.send_signal(signal_number)

    def kill(self) -> None:
        """End all ranks that live, with their children, and wait until they are gone."""
        for child in self._children:
            if child.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
        for child in self._children:
            child.process.wait()
        self.look(0.0)

    def close(self) -> None:
        """End all ranks, and read no more."""
        self.kill()
        self._selector.close()

    def _read(self, stream: IO[bytes], child: _Child, name: str) -> bool:
        """Read once from a stream of a rank. Returns whether there was data, so that more may follow."""
        data = stream.read(1 << 16)
        if data is None:  # nothing there
            return False
        if not data:
            self._selector.unregister(stream)
            stream.close()
        *lines, rest = (child.rest.get(name, b"") + data).split(b"\n")
        # A progress bar may end no line for hours. An event that is cut off is of a rank that was killed.
        if name == "output" and rest and (not data or len(rest) >= _LONGEST):
            lines, rest = [*lines, rest], b""
        child.rest[name] = rest
        for line in lines:
            text = line.decode(errors="backslashreplace")
            said = {"output": text} if name == "output" else {"event": json.loads(text)}
            self._said({"rank": child.number, **said})
        return bool(data)

    def _read_rest(self, child: _Child) -> None:
        """Read what a rank that has ended left in its pipes, which a child of it may still hold open."""
        for key in list(self._selector.get_map().values()):
            owner, name = key.data
            while owner is child and self._read(key.fileobj, child, name):  # type: ignore[arg-type]
                pass


def _environment(environ: Mapping[str, str], place: RankPlace, interface: str) -> dict[str, str]:
    """The environment of the rank at `place`: torch's variables, its share of the threads, and the import path."""
    return {
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),  # else gloo looks this machine's own name up
        **{name: value for name, value in environ.items() if name not in _NOT_OF_RANKS},
        "OMP_NUM_THREADS": str(max(1, cpu_threads(environ) // place.on_machine)),  # bits depend on it
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_WORLD_SIZE": str(place.on_machine),
    }
