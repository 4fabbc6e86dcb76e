"""GPUs of this machine, by the names that CUDA_VISIBLE_DEVICES takes, and which one a replica gets.

Standard library only: a launcher must not import torch, and must not open the GPUs that its replicas need.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LISTED = re.compile(r"(?P<mig>\s+MIG )?.*\(UUID: (?P<uuid>(GPU|MIG)-[^)]+)\)")
_PATIENCE_S = 30.0  # a driver that has to load first takes seconds


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process with this environment may use; empty if there is none.

    Those that `CUDA_VISIBLE_DEVICES` names, else all that `nvidia-smi` lists. Where a GPU is divided (MIG), its parts.
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
    """The UUIDs in the output of `nvidia-smi -L`, which name the same GPU in every order of devices."""
    found: list[str] = []
    divided: str | None = None  # the GPU whose parts follow
    for match in filter(None, map(_LISTED.fullmatch, listing.splitlines())):
        uuid = match["uuid"]
        if match["mig"] and found and found[-1] == divided:
            found.pop()
        found.append(uuid)
        divided = None if match["mig"] else uuid
    return tuple(found)


def gpu_of(replica_id: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment variable that shows a replica its GPU: number `replica_id` modulo their number."""
    return {VISIBLE: gpus[replica_id % len(gpus)]} if gpus else {}


def sharing_words(replicas: int, gpus: Sequence[str]) -> str | None:
    """The warning about several replicas on one GPU; None if each has one of its own, or there is none."""
    if not gpus or replicas <= len(gpus):
        return None
    most = -(-replicas // len(gpus))
    return (
        f"{replicas} replicas share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({', '.join(gpus)}), up to {most} on "
        "one: their models, gradients and optimizers must fit into its memory together, and they take turns computing"
    )
