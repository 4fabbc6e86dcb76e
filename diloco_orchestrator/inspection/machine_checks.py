"""Checks of the machine that this process runs on: memory, disk, shared memory, GPU and driver, torch and its CUDA.

Each check gives a finding with what to do about a problem. Stores are checked in `doctor`.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.executors.machine import machine_memory
from diloco_orchestrator.protocol.process import installed_versions

_PACKAGES = ("diloco-orchestrator", "torch", "torchft", "transformers", "obstore", "fsspec", "s3fs", "boto3")
_LITTLE_MEMORY = 2 * 2**30  # bytes; torch alone takes about half a GiB
_LITTLE_DISK = 2 * 2**30  # bytes; payloads that memory does not hold go to files
_LITTLE_SHARED = 2**30  # bytes; worker processes of a DataLoader pass batches through it
_WRITTEN_BYTES = 64 * 2**20
_GPU_FIELDS = "name,driver_version,memory.total"
_GPU_QUERY = ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # what was checked
    ok: bool
    detail: str  # what was measured, or what is wrong
    todo: str = ""  # what to do about it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine_machine(clock: Clock, *, gpu_wanted: bool = False) -> Iterator[Finding]:
    """Findings about this machine. `gpu_wanted`: a machine without a usable GPU is not ok."""
    yield Finding("machine", True, f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    yield _memory(machine_memory())
    yield _disk(clock)
    yield _shared_memory()
    gpus = gpus_of_driver()
    yield gpu_finding(gpus, gpu_wanted)
    yield _torch(bool(gpus), gpu_wanted)
    versions = installed_versions(_PACKAGES)
    yield Finding("packages", True, ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield _arithmetic()


def _memory(size: int) -> Finding:
    if size >= _LITTLE_MEMORY:
        return Finding("memory", True, f"{size / 2**30:.1f} GiB")
    todo = "Ask for more: torch, a model and its optimizer need some GiB (memory=…, or larger hardware)."
    return Finding("memory", False, f"{size / 2**30:.1f} GiB", todo)


def _disk(clock: Clock) -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    words = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < _LITTLE_DISK:
        return Finding(
            "disk", False, words, "Free some space, or set TMPDIR to a larger disk: large rounds go to files."
        )
    began = clock.now()
    with tempfile.TemporaryFile() as file:
        file.write(os.urandom(_WRITTEN_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return Finding("disk", True, f"{words}, {_WRITTEN_BYTES / max(clock.now() - began, 1e-9) / 1e6:.0f} MB/s written")


def _shared_memory(path: str = "/dev/shm") -> Finding:
    if not Path(path).is_dir():
        return Finding("shared memory", True, f"there is no {path}", "Use num_workers=0 in a DataLoader.")
    size = shutil.disk_usage(path).total
    words = f"{size / 2**20:.0f} MiB in {path}"
    if size >= _LITTLE_SHARED:
        return Finding("shared memory", True, words)
    todo = "Workers of a DataLoader may need more: num_workers=0 needs none."
    return Finding("shared memory", True, words, todo)


def gpus_of_driver() -> list[str]:
    """Name, driver version and memory of every NVIDIA GPU, one line each; empty without driver or GPU."""
    try:
        asked = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()] if asked.returncode == 0 else []


def gpu_finding(gpus: list[str], wanted: bool) -> Finding:
    """The finding about the GPUs that the driver reports. `wanted`: none is not ok, and more than one is a waste."""
    if not gpus:
        todo = "Check the machine's type, and that the image may use its GPU (NVIDIA driver, device plugin)."
        return Finding("GPU", not wanted, "none that nvidia-smi reports", todo if wanted else "")
    todo = "A replica trains on one: ask for one, and launch more replicas." if len(gpus) > 1 else ""
    counts = {each: gpus.count(each) for each in gpus}
    words = "; ".join(f"{count} x {each}" for each, count in counts.items())
    return Finding("GPU", True, f"{words} (name, driver, memory)", todo)


def _torch(has_gpu: bool, wanted: bool) -> Finding:
    """Whether torch computes on the GPU: a version for another CUDA or another GPU imports, and fails at its first
    kernel.
    """
    try:
        import torch
    except ImportError as error:
        return Finding("torch", False, f"it does not import: {error}", "Use an image that has torch.")
    words = f"torch {torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}"
    if not has_gpu and not wanted:
        return Finding("torch", True, f"{words}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        todo = "Use an image whose torch is built for the CUDA version that this driver has (pytorch/pytorch:…-cuda…)."
        return Finding("torch", False, f"{words}; it sees no GPU", todo)
    try:
        ones = torch.ones(256, 256, device="cuda")
        right = bool((ones @ ones).sum().item() == 256.0**3)
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        return Finding("torch", False, f"{words}; its first kernel fails: {cause}", "Use a newer torch for this GPU.")
    memory = torch.cuda.mem_get_info()
    words = f"{words}; {torch.cuda.get_device_name()}, {memory[0] / 2**30:.1f} of {memory[1] / 2**30:.1f} GiB free"
    return Finding("torch", right, words, "" if right else "Its products are wrong: use another machine.")


def _arithmetic() -> Finding:
    from diloco_orchestrator.outer.golden_arithmetic import is_golden

    if is_golden():
        return Finding("arithmetic", True, "averages and outer steps have the bits that every machine computes")
    words = "this machine computes other bits than all others: its replicas would stop as diverged"
    return Finding("arithmetic", False, words, "Use another machine.")
