"""Facts about the machine, or the container, of this process: its memory, GPUs and processes.

Standard library only: a launcher must not import torch, and must not open the GPUs that its replicas need.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1
VISIBLE = "CUDA_VISIBLE_DEVICES"
_LISTED = re.compile(r"(?P<mig>\s+MIG )?.*\(UUID: (?P<uuid>(GPU|MIG)-[^)]+)\)")
_PATIENCE_S = 30.0  # a driver that has to load first takes seconds
_PROC = Path("/proc")


def machine_memory() -> int:
    """Bytes of memory of the machine, or the container's limit if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CGROUP_LIMITS):
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():
            limits.append(int(limit))
    return min(limits)


def memory_share(replicas: int) -> int:
    """MiB that each of `replicas` on this machine may use by default, beside the user's training.

    Together they get half of the memory: the user's model, gradients and optimizer use the other half.
    """
    return machine_memory() // 2 // replicas // 2**20


# -- GPUs, by the names that CUDA_VISIBLE_DEVICES takes ---------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process with this environment may use, each as its number or UUID.

    They are those in `CUDA_VISIBLE_DEVICES`, else the UUIDs of all that `nvidia-smi` lists, of a partitioned GPU (MIG)
    its parts. Empty without a GPU, and if `nvidia-smi` is missing, fails or does not respond.
    """
    given = environ.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        ends = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:ends])  # CUDA ignores what comes after such a name
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return ()
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()  # the program is there without a driver or a GPU
    return listed_gpus(listing.stdout)


def listed_gpus(listing: str) -> tuple[str, ...]:
    """The UUIDs in the output of `nvidia-smi -L`, which identify a GPU in every order of devices."""
    found: list[str] = []
    divided: str | None = None  # the GPU whose parts follow
    for match in filter(None, map(_LISTED.fullmatch, listing.splitlines())):
        uuid = match["uuid"]
        if match["mig"] and found and found[-1] == divided:
            found.pop()
        found.append(uuid)
        divided = None if match["mig"] else uuid
    return tuple(found)


def gpus_of(first: int, ranks: int, gpus: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for a replica of `ranks` processes: its GPUs are those from number `first` on, modulo all.

    At most all GPUs, each once: the replica refuses more ranks than it sees GPUs.
    """
    mine = dict.fromkeys(gpus[(first + rank) % len(gpus)] for rank in range(ranks)) if gpus else {}
    return {VISIBLE: ",".join(mine)} if gpus else {}


def sharing_words(replicas: int, gpus: Sequence[str]) -> str | None:
    """The warning that several of `replicas` on this machine share a GPU; None if each has its own or there is none."""
    if not gpus or replicas <= len(gpus):
        return None
    most = -(-replicas // len(gpus))
    return (
        f"{replicas} replicas share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({', '.join(gpus)}), up to {most} on "
        "one: their models, gradients and optimizers must fit into its memory together, and they take turns computing"
    )


# -- processes of Linux -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessId:
    """A process of one host; boot and start time in ticks since boot distinguish it from a later one with its pid."""

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
    """The kernel's random id of the current boot of this machine."""
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
