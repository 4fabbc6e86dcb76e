"""Payload shards in a folder: verified and averaged where they lie, without a copy."""

from pathlib import Path

import pytest
import torch

from diloco_orchestrator.allreduce.payload import publish
from diloco_orchestrator.allreduce.payload_cache import OPEN_FILES, PayloadCache
from diloco_orchestrator.allreduce.shards import NotFinite, PayloadGone, fetch, open_verified
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.codecs import table as codecs
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Payload, Shard
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.obstore_engine import ObstoreEngine, open_local
from diloco_orchestrator.store.open_store import open_store

VALUES = torch.arange(300_000, dtype=torch.float32)
KEY = "rounds/00000001/payload/0.1.0.bin"


def published(store: Store, values: torch.Tensor = VALUES) -> Payload:
    return publish(store, lambda index: KEY, FlatTensors([values]), "fp32", values.numel(), PayloadCache())


def files_open() -> list[str]:
    opened = Path("/proc/self/fd")
    return [str(each.readlink()) for each in opened.iterdir() if each.is_symlink()]


def test_a_shard_in_a_folder_is_verified_in_its_file_which_outlives_the_object(tmp_path: Path):
    store = open_store(str(tmp_path))
    payload = published(store)
    file = open_verified(store, KEY, payload, 0)
    assert file is not None
    cache, shard = PayloadCache(), payload.shards[0]
    cache.put_file((KEY, shard.digest), file, shard.size)
    store.delete(KEY)
    assert cache.get((KEY, shard.digest)) == codecs.encode(VALUES, "fp32")
    assert cache.memory_bytes == 0 and (KEY, shard.digest) in cache
    cache.spill()
    assert cache.get((KEY, shard.digest)) == codecs.encode(VALUES, "fp32")
    cache.clear()
    assert file.closed and (KEY, shard.digest) not in cache
    with pytest.raises(PayloadGone, match="is gone although a manifest names it"):
        open_verified(store, KEY, payload, 0)


def test_other_bytes_are_left_to_who_says_what_is_wrong(tmp_path: Path):
    store = open_store(str(tmp_path))
    payload, path, before = published(store), tmp_path / KEY, files_open()
    right = path.read_bytes()
    for wrong in (b"", right[:-1], right + b"x", b"X" + right[1:], right[:-4] + b"abcd"):
        path.write_bytes(wrong)
        assert open_verified(store, KEY, payload, 0) is None
        with pytest.raises(PayloadCorrupt, match="They are not used"):
            fetch(store, KEY, payload, 0)
    assert files_open() == before


def test_numbers_that_are_not_finite_are_refused_in_the_file(tmp_path: Path):
    store, before = open_store(str(tmp_path)), files_open()
    values = VALUES.clone()
    values[7] = torch.inf
    data = codecs.encode(values, "fp32")
    store.put(KEY, data)
    shard = Shard(digest=bulk_digest(data), size=len(data))
    payload = Payload(codec="fp32", numel=values.numel(), shard_numel=values.numel(), shards=(shard,))
    with pytest.raises(NotFinite, match="holds 1 elements that are not finite"):
        open_verified(store, KEY, payload, 0)
    assert files_open() == before


def test_stores_without_files_are_read(tmp_path: Path):
    local = open_local(tmp_path)
    on_a_network = ObstoreEngine(local._store, str(tmp_path), gives_files=False)
    for store in (MemoryStore(), on_a_network):
        payload = published(store)
        assert open_verified(store, KEY, payload, 0) is None
        assert fetch(store, KEY, payload, 0) == codecs.encode(VALUES, "fp32")


def test_files_beyond_the_limit_are_copied(tmp_path: Path):
    cache, before = PayloadCache(), len(files_open())
    names = [(f"{index}", "digest") for index in range(OPEN_FILES + 3)]
    for name in names:
        (tmp_path / name[0]).write_bytes(name[0].encode())
        cache.put_file(name, (tmp_path / name[0]).open("rb"), len(name[0]))
    assert len(files_open()) == before + OPEN_FILES
    assert [bytes(cache.get(name) or b"") for name in names] == [name[0].encode() for name in names]
    assert cache.memory_bytes == sum(len(name[0]) for name in names[OPEN_FILES:])
    cache.close()
    assert len(files_open()) == before


def test_a_file_that_is_known_already_is_closed(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"bytes")
    cache, file = PayloadCache(), (tmp_path / "file").open("rb")
    cache.put(("file", "digest"), b"bytes")
    cache.put_file(("file", "digest"), file, 5)
    assert file.closed and cache.get(("file", "digest")) == b"bytes"
