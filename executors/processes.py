"""Processes of this machine: an identity that outlives a pid's reuse, and finding one by its environment.

Linux's /proc is read where there is one. Elsewhere, on macOS, psutil answers the same questions.
"""

import os
import platform
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self/stat").exists()


@dataclass(frozen=True)
class ProcessId:
    """A process of one host; boot and start time distinguish it from a later process with its pid.

    `start_ticks` counts ticks since the boot on Linux, microseconds since 1970 elsewhere, where `boot_id` is empty.
    """

    host: str
    boot_id: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The identity of the living process `pid`; None if there is none. A zombie counts as living."""
        found = _state_and_start(pid)
        return None if found is None else cls(platform.node(), boot_id(), pid, found[1])

    @classmethod
    def from_native(cls, native: Any) -> "ProcessId":
        return cls(native["host"], native["boot_id"], native["pid"], native["start_ticks"])

    def is_alive(self) -> bool:
        """Whether the process still runs; False for a zombie. Only meaningful on its own host."""
        if self.boot_id != boot_id():
            return False
        found = _state_and_start(self.pid)
        return found is not None and found[1] == self.start_ticks and found[0] not in "ZX"


def signal_name(number: int) -> str:
    """The name of a signal, "SIGKILL"; "signal 35" for one that has none, such as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def boot_id() -> str:
    """The kernel's random id of the current boot of this machine; empty where there is no /proc."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip() if _HAS_PROC else ""


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """State letter (Z: zombie) and start time of a process, as `ProcessId` counts it; None if there is none."""
    if not _HAS_PROC:
        import psutil

        try:
            process = psutil.Process(pid)
            letter = "Z" if process.status() == psutil.STATUS_ZOMBIE else "R"
            return letter, round(process.create_time() * 1e6)
        except psutil.NoSuchProcess:
            return None
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])


def _stat(pid: int) -> list[str]:
    """The fields of Linux's `stat` of a process from its state on. The name before them may be any bytes."""
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode().split()


def find_by_environment(name: str, value: str) -> int | None:
    """The pid of a living session leader of this user whose environment has `name=value`, or None.

    Children of a replica inherit its environment, but do not lead its session.
    """
    for pid, environment in _environments():
        if environment.get(name) == value:
            process = ProcessId.of(pid)
            if process is not None and process.is_alive() and _leads_its_session(pid):
                return pid
    return None


def commands_by_environment(name: str) -> Iterator[tuple[int, list[str]]]:
    """The pid and command line of every living session leader whose environment, which we may read, has `name`."""
    for pid, environment in _environments():
        process = ProcessId.of(pid) if name in environment else None
        if process is not None and process.is_alive() and _leads_its_session(pid):
            yield pid, _command(pid)


def is_same_folder(pid: int, theirs: str, ours: str) -> bool:
    """Whether the path `theirs`, as the process `pid` sees it, perhaps with other mounts, is our folder `ours`.

    `pid`: the process.
    """
    root = f"/proc/{pid}/root" if _HAS_PROC else ""
    try:
        return Path(f"{root}{theirs}").samefile(ours)
    except OSError:  # one of them, or the process, is gone
        return False


def launcher_of(pid: int) -> int | None:
    """The pid of the process that started `pid`, if it lives and is another one than this; None if `pid` was adopted.

    Whoever started a replica runs the same interpreter; whoever adopts processes, as process 1 does, does not.
    """
    if not _HAS_PROC:
        import psutil

        with suppress(psutil.Error):
            parent = psutil.Process(pid).parent()
            if parent is not None and parent.pid not in (1, os.getpid()) and parent.exe() == psutil.Process(pid).exe():
                return int(parent.pid)
        return None
    with suppress(OSError):
        parent_pid = int(_stat(pid)[1])
        if parent_pid not in (1, os.getpid()) and (_PROC / str(pid) / "exe").samefile(_PROC / f"{parent_pid}/exe"):
            return parent_pid
    return None


def _command(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    if not _HAS_PROC:
        import psutil

        with suppress(psutil.Error):
            return list(psutil.Process(pid).cmdline())
        return []
    with suppress(OSError):
        return os.fsdecode((_PROC / str(pid) / "cmdline").read_bytes()).split("\0")
    return []


def _leads_its_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    """The pid and environment of every other process whose environment this user may read."""
    if not _HAS_PROC:
        import psutil

        for process in psutil.process_iter():
            if process.pid != os.getpid():
                with suppress(psutil.Error, OSError):
                    yield process.pid, process.environ()
        return
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                pairs = os.fsdecode((entry / "environ").read_bytes()).split("\0")
                yield int(entry.name), dict(pair.split("=", 1) for pair in pairs if "=" in pair)
