"""Facts of a replica's machine in its claim, so that another process can judge whether it computes the same bits."""

import platform
from collections.abc import Mapping
from pathlib import Path

from diloco_orchestrator.protocol.process import installed_versions

_VERSIONS_OF = ("diloco-orchestrator", "torch", "torchft", "transformers", "obstore")
# Kernels are chosen by the processor, whose vector units and caches decide in which order numbers are added, and by the
# versions of what computes. How the bucket is reached (obstore) changes no bit.
_OF_CLASS = ("python", "machine", "diloco-orchestrator", "torch", "torchft", "transformers")


def versions_here() -> dict[str, str]:
    """The versions of this process: Python, machine type, and the packages that training depends on."""
    system = {"python": platform.python_version(), "machine": platform.machine()}
    return {**system, **installed_versions(_VERSIONS_OF)}


def hardware_here(proc: Path = Path("/proc")) -> dict[str, str]:
    """The names of the processor and of all NVIDIA GPUs, as Linux gives them below `proc`. No library is loaded."""
    lines = _read(proc / "cpuinfo").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    listed = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    gpus = [line.partition(":")[2].strip() for each in listed for line in _read(each).splitlines()[:1]]
    return {"cpu": model or platform.processor() or platform.machine(), "gpu": ", ".join(gpus)}


def differences(versions: Mapping[str, str], hardware: Mapping[str, str]) -> list[str]:
    """In words, each fact by which the machine of a claim is of another class than this one; empty for the same class.

    The number of threads is none of them: who trains again sets the recorded one.
    """
    here = {**{name: versions_here()[name] for name in _OF_CLASS}, **hardware_here()}
    there = {**versions, **hardware}
    return [
        f"{name} {there.get(name) or 'none'} there, {value or 'none'} here"
        for name, value in here.items()
        if there.get(name, "") != value
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
