"""A genuine Ceph: races of creates, what every store promises, and a run that loses a replica and its coordinator."""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from genuine_ceph import running_ceph
from real_runs import FAST, digests
from s3_server import S3Server

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch
from diloco_orchestrator.errors import ObjectMissing, StoreDenied
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.probe import probe
from diloco_orchestrator.store.s3 import open_s3

pytestmark = pytest.mark.slow

ROUNDS, WRITERS = 20, 8


@pytest.fixture(scope="module")
def ceph() -> Iterator[S3Server]:
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, running_ceph(Path(folder) / "c") as server:
        yield server


@pytest.fixture
def url(ceph: S3Server) -> str:
    return f"s3://{ceph.make_bucket(f'bucket-{uuid4().hex[:12]}')}/some/folder"


@pytest.mark.parametrize("engine", ["", "fsspec+"], ids=["obstore", "s3fs"])
def test_of_eight_writers_at_once_one_creates_the_object_and_its_bytes_stay(engine: str, ceph: S3Server, url: str):
    store = open_store(engine + url, ceph.options())
    probe(store)
    racing = store.without_read_back()
    with ThreadPoolExecutor(WRITERS) as threads:
        for number in range(ROUNDS):
            bodies = [f"{number} {writer}".encode() * 100 for writer in range(WRITERS)]
            won = list(threads.map(lambda body, key=f"races/{number:02}": racing.create(key, body), bodies))
            assert won.count(True) == 1, f"race {number}: {won}"
            assert store.get(f"races/{number:02}") == bodies[won.index(True)]
    names = [info.key for info in store.list("races/")]
    assert len(names) == ROUNDS and names == sorted(names)


@pytest.mark.parametrize("folder", ["a b~*%20c", "ü/a+b=c&d,e;it's (one)!:@$"])
def test_a_folder_with_unusual_letters_is_one_folder_by_every_engine(ceph: S3Server, folder: str):
    url, options = f"s3://{ceph.make_bucket(f'bucket-{uuid4().hex[:12]}')}/{folder}", ceph.options()
    stores = [open_store(engine + url, options) for engine in ("", "fsspec+")]
    for number, store in enumerate(stores):
        assert store.create(f"k/{number}/{folder}", b"0123") and not store.create(f"k/{number}/{folder}", b"other")
    for store in stores:
        assert [info.key for info in store.list("k/")] == [f"k/{number}/{folder}" for number in (0, 1)]
        assert store.get(f"k/0/{folder}", 1, 3) == store.get(f"k/1/{folder}", 1, 3) == b"12"


def test_of_two_uploads_in_parts_one_after_the_other_the_first_stays(ceph: S3Server, url: str):
    """So objects above 1 GiB go up. In a race this version lets several win: docs/places/clouds.md."""
    store = open_s3(url, ceph.options(), single_put_limit=0)
    assert store.create("key", b"first") and not store.create("key", b"second")
    assert store.get("key") == b"first"


def test_ranges_listings_overwrites_and_refusals_are_as_of_every_store(ceph: S3Server, url: str):
    store = open_store(url, ceph.options())
    data = os.urandom(3 * 2**20)
    store.put("a/b.bin", data)
    assert store.get("a/b.bin", 5, 2**20) == data[5 : 2**20]
    store.put("a/b.bin", b"shorter")
    assert store.get("a/b.bin") == b"shorter"
    store.put("a/c.bin", b"")
    assert [info.key for info in store.list("a/", start_after="a/b.bin")] == ["a/c.bin"]
    store.delete("a/b.bin")
    with pytest.raises(ObjectMissing):
        store.get("a/b.bin")
    wrong = open_store(url, ceph.options(secret="another-secret-0011223344"))
    with pytest.raises(StoreDenied, match="SignatureDoesNotMatch"):
        wrong.put("a/d.bin", b"")


def test_a_run_that_loses_a_replica_has_the_bits_of_an_undisturbed_one(ceph: S3Server, url: str, tmp_path: Path):
    settings = {**FAST, "replicas": 2, "rounds": 3, "sync_every": 3, "replica_state": "round"}
    given = {**settings, "env": {"OMP_NUM_THREADS": "1"}, "executor": LocalProcessExecutor(tmp_path / "executor")}
    calm = {"folder": str(tmp_path), "hold": []}
    launch("tiny_workloads:train_holding", store=str(tmp_path / "bucket"), args=calm, **given).wait()
    held = tmp_path / "held"
    held.mkdir()

    def strike() -> None:
        """kill -9 of replica 1 in the middle of round 2."""
        if (held / "held-1").exists() and not (held / "release").exists():
            handle = RunReader(open_store(url, ceph.options())).attempts.handle(1, 1)
            assert handle is not None
            os.kill(handle.handle["native"]["pid"], signal.SIGKILL)
            (held / "release").touch()

    args = {"folder": str(held), "hold": [1]}
    run = launch("tiny_workloads:train_holding", store=url, storage_options=ceph.options(), args=args, **given)
    assert run.wait(on_poll=strike).status == "completed"
    reader = RunReader(open_store(url, ceph.options()))
    assert [commit.base_digest for commit in reader.commits()] == digests(tmp_path / "bucket")
    assert reader.attempts.numbers(1) == [1, 2] and verify_run(reader.store).agrees
