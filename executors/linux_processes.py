"""Identity of Linux processes: distinguishes a process from a later one with the same pid. Reads /proc only."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessId:
    """A process of one host, distinguished from all others by boot, pid and start time in clock ticks since boot."""

    host: str
    boot_id: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The identity of the living process `pid`; None if there is none. A zombie counts as living."""
        stat = _stat(pid)
        return None if stat is None else cls(platform.node(), boot_id(), pid, stat[1])

    @classmethod
    def from_native(cls, native: Any) -> "ProcessId":
        return cls(native["host"], native["boot_id"], native["pid"], native["start_ticks"])

    def is_alive(self) -> bool:
        """Whether the process still runs; False for a zombie. Only meaningful on its own host."""
        if self.boot_id != boot_id():
            return False
        stat = _stat(self.pid)
        return stat is not None and stat[1] == self.start_ticks and stat[0] not in "ZX"


def boot_id() -> str:
    """The kernel's random id of the current boot of this machine, which every reboot changes."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time in ticks of a process, or None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command's name before it may hold spaces
    return fields[0], int(fields[19])


def find_by_environment(name: str, value: str) -> int | None:
    """The pid of a living session leader of this user whose environment has `name=value`, or None.

    Children of a replica inherit its environment, but do not lead its session.
    """
    wanted = f"{name}={value}".encode()
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and wanted in _environment(entry):
            process = ProcessId.of(int(entry.name))
            if process is not None and process.is_alive() and _leads_its_session(process.pid):
                return process.pid
    return None


def _leads_its_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
