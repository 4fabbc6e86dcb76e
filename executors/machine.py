"""Facts about the machine, or the container, of this process: its memory, cores and GPUs.

Standard library only: a launcher must not import torch, and must not open the GPUs that its replicas need.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1
VISIBLE = "CUDA_VISIBLE_DEVICES"
_LISTED = re.compile(r"(?P<mig>\s+MIG )?.*\(UUID: (?P<uuid>(GPU|MIG)-[^)]+)\)")
_PATIENCE_S = 30.0  # a driver that has to load first takes seconds


def machine_memory() -> int:
    """Bytes of memory of the machine, or the container's limit if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CGROUP_LIMITS):
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():
            limits.append(int(limit))
    return min(limits)


def usable_cores() -> int:
    """The number of cores that this process may run on; all of the machine's where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """CUDA_VISIBLE_DEVICES for a replica of `ranks` processes: consecutive GPUs from `first` on.

    After the last GPU the first one follows. Each is named once at most: the replica refuses more ranks than GPUs.
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
