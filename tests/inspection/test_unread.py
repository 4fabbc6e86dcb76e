"""`verify` where this machine cannot read or hold what is there: an error of its own, and no word about the run."""

import tarfile
from pathlib import Path

import pytest
import torch

from diloco_orchestrator.allreduce import spool
from diloco_orchestrator.errors import ConfigError, StoreDenied, StoreError, StoreFull, StoreUnavailable
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.store.memory import MemoryStore

KEPT = Path(__file__).parents[1] / "fixtures" / "kept_runs" / "runs.tar.xz"


class Away(MemoryStore):
    """A store that cannot be read at keys which hold `part`."""

    part = ""
    error: type[StoreError] = StoreError
    memory = False  # whether it is this machine's memory that such a key has no room in

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if self.part and self.part in key:
            if self.memory:
                torch.empty(2**50)
            raise self.error(f"cannot read {key}: it is away")
        return super().get(key, start, end)


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """A run in a bucket, with payloads, saved states and snapshots."""
    with tarfile.open(KEPT, "r:xz") as packed:
        files = [(each.name.removeprefix("joined/"), packed.extractfile(each)) for each in packed if each.isfile()]
        return {name: file.read() for name, file in files if file is not None and not name.startswith("voted/")}


def bucket(objects: dict[str, bytes]) -> Away:
    store = Away("memory://run")
    for key, body in objects.items():
        assert store.create(key, body)
    return store


@pytest.mark.parametrize("error", [StoreUnavailable, StoreDenied, StoreFull, StoreError])
@pytest.mark.parametrize("part", ["payload/1", "replicas/0/state", "model.safetensors", "outer.safetensors", "README"])
def test_an_object_that_this_machine_cannot_read_is_no_disagreement(objects, part: str, error: type[StoreError]):
    store = bucket(objects)
    assert verify_run(store).agrees
    store.part, store.error = part, error
    with pytest.raises(error, match="it is away"):
        verify_run(store)


@pytest.mark.parametrize("part", ["payload/1", "model.safetensors"])
def test_a_machine_without_memory_for_an_object_calls_no_run_false(objects, part: str):
    store = bucket(objects)
    store.part, store.memory = part, True
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        verify_run(store)


def test_an_object_that_is_gone_is_one(objects):
    store = bucket(objects)
    store.delete("snapshots/00000006/model.safetensors")
    found = verify_run(store).disagreement
    assert found is not None and found.key.startswith("snapshots/00000006/")


def test_a_wrong_memory_budget_of_this_machine_is_no_disagreement(objects, monkeypatch):
    monkeypatch.setenv(spool.ENV_MEMORY, "4G")
    spool.budget.cache_clear()
    try:
        with pytest.raises(ConfigError, match="'4G' is not a number of MiB"):
            verify_run(bucket(objects))
    finally:
        spool.budget.cache_clear()
