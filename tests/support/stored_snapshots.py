"""Snapshots in a bucket as tests look at them."""

import torch

from diloco_orchestrator.run_log.run_log import complete_takes
from diloco_orchestrator.snapshots.tensor_file import views
from diloco_orchestrator.store.base import Store

OUTER = "outer.safetensors"


def complete_snapshots(store: Store) -> list[int]:
    """The rounds with a complete snapshot, oldest first; 0 is the first base."""
    return sorted(complete_takes(store))


def read_tensors(store: Store, key: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors object, by name."""
    return views(store.get(key), key)
