"""Facts about the machine, or the container, that this process runs on. Standard library only."""

import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1


def machine_memory() -> int:
    """Bytes of memory that the machine has, or that the container may use if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CGROUP_LIMITS):
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():
            limits.append(int(limit))
    return min(limits)


def memory_share(replicas: int) -> int:
    """MiB that each of `replicas` on this machine may hold by default, beside the user's training.

    Together they get half of the memory: training has its model, gradients and optimizer in the other half.
    """
    return machine_memory() // 2 // replicas // 2**20
