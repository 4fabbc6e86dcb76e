"""What every store promises, run over every store."""

import errno
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from in_processes import create, in_processes
from obstore.exceptions import GenericError
from s3_server import S3Server

from diloco_orchestrator.clock import ManualClock, SystemClock
from diloco_orchestrator.errors import ConfigError, NoSuchRun, ObjectMissing, StoreDenied, StoreFull, StoreUnavailable
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.obstore_engine import open_local
from diloco_orchestrator.store.open_store import open_store, readable_url
from diloco_orchestrator.store.probe import probe
from diloco_orchestrator.store.retrying import RetryingStore
from diloco_orchestrator.store.s3 import open_s3

Opener = Callable[[], Store]
# A genuine Azurite and a fake-gcs-server, where they are installed.
OPTIONAL = [pytest.param(name, marks=pytest.mark.slow) for name in ("az", "gs", "gs by gcsfs")]


@pytest.fixture(params=["memory", "folder", "folder by fsspec", "s3", "s3 in parts", "s3 by s3fs", "hf", *OPTIONAL])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the same empty store again and again, as several users of it would."""
    if request.param == "memory":
        shared = MemoryStore()
        return lambda: shared
    if request.param == "az":
        azurite = request.getfixturevalue("azurite")
        place = f"az://{azurite.make_container(f'container-{uuid4().hex[:12]}')}/some/folder"
        return lambda: open_store(place, azurite.options())
    if request.param == "hf":
        gateway = request.getfixturevalue("hf_gateway")
        place = gateway.url(f"bucket-{uuid4().hex[:12]}")
        return lambda: open_store(place, gateway.options())
    if request.param.startswith("gs"):
        gcs = request.getfixturevalue("gcs")
        scheme = "fsspec+gs" if "gcsfs" in request.param else "gs"
        place = f"{scheme}://{gcs.make_bucket(f'bucket-{uuid4().hex[:12]}')}/some/folder"
        return lambda: open_store(place, gcs.options(place))
    prefix = "fsspec+" if request.param in ("folder by fsspec", "s3 by s3fs") else ""
    if "folder" in request.param:
        return lambda: open_store(f"{prefix}file://{tmp_path}/bucket")
    options = request.getfixturevalue("s3_server").options()
    bucket = request.getfixturevalue("bucket")
    url = f"{prefix}s3://{bucket}/some/folder"
    if request.param == "s3 in parts":
        return lambda: RetryingStore(open_s3(url, options, single_put_limit=0), SystemClock(), random.Random(0))
    return lambda: open_store(url, options)


@pytest.fixture
def store(reopen: Opener) -> Store:
    return reopen()


def keys(store: Store, prefix: str = "", start_after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, start_after)]


def test_what_was_put_is_what_everyone_gets(reopen: Opener):
    data = os.urandom(3 * 2**20)
    reopen().put("a/b.bin", data)
    assert reopen().get("a/b.bin") == data


def test_an_object_that_is_a_file_has_the_bytes_that_everyone_gets(reopen: Opener):
    store = reopen()
    store.put("a/b.bin", b"bytes")
    file = store.open_file("a/b.bin")
    if file is None:
        return  # no folder, or one of another machine
    with file:
        store.put("a/b.bin", b"other")
        assert file.read() == b"bytes"
    with pytest.raises(ObjectMissing, match=r"a/c\.bin does not exist"):
        store.open_file("a/c.bin")


def test_put_replaces_and_may_be_repeated(store: Store):
    for data in (b"first", b"second and longer", b"3", b"3", b""):
        store.put("key", data)
        assert store.get("key") == data


def test_a_large_object_comes_back_whole(reopen: Opener):
    """Larger than what an engine reads or writes in one piece."""
    data = os.urandom(11 * 2**20 + 7)
    assert reopen().create("large", data) is True
    assert reopen().get("large") == data
    assert reopen().get("large", 5 * 2**20, 5 * 2**20 + 3) == data[5 * 2**20 :][:3]
    assert reopen().create("large", data[1:]) is False
    assert reopen().get("large") == data


def test_an_object_that_is_overwritten_is_read_whole_up_to_a_limit(reopen: Opener):
    """A heartbeat may change between two requests, so that there must be one."""
    bodies = [b"short", b"a longer body"]
    writer, reader = reopen(), reopen()
    writer.put("beat.json", bodies[0])
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [writer.put("beat.json", bodies[turn % 2]) for turn in range(60)])
        seen = [reader.get("beat.json", 0, 1000) for _ in range(40)]
        writing.result()
    assert set(seen) <= set(bodies)
    writer.put("beat.json", b"")
    assert reader.get("beat.json", 0, 10) == b""


def test_ranges_are_half_open_and_end_where_the_object_ends(store: Store):
    store.put("key", b"0123456789")
    cases = {
        (2, 5): b"234",
        (0, 3): b"012",
        (7, None): b"789",
        (7, 99): b"789",
        (10, 12): b"",
        (12, 14): b"",
        (5, 5): b"",
    }
    assert {bounds: store.get("key", *bounds) for bounds in cases} == cases


def test_a_missing_object_says_which_one(store: Store):
    with pytest.raises(ObjectMissing, match=r"rounds/7/commit\.json"):
        store.get("rounds/7/commit.json")
    with pytest.raises(ObjectMissing):
        store.get("rounds/7/commit.json", 1, 2)


def test_create_keeps_the_first(store: Store):
    assert store.create("key", b"first") is True
    assert store.create("key", b"second") is False
    assert store.get("key") == b"first"


@pytest.mark.slow
def test_of_many_racing_creates_exactly_one_wins(reopen: Opener):
    stores, reader = [reopen() for _ in range(8)], reopen()
    for contest in range(20):
        bodies = [f"{contest}-{i}".encode() for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            races = [pool.submit(s.create, f"race/{contest}", b) for s, b in zip(stores, bodies, strict=True)]
            won = [race.result() for race in races]
        assert won.count(True) == 1
        assert reader.get(f"race/{contest}") == bodies[won.index(True)]


def test_listing_is_complete_sorted_and_below_the_prefix(store: Store):
    for key in ("b/2", "b/10", "a", "b/1/x", "bb/1", "c"):
        store.put(key, key.encode())
    assert keys(store) == ["a", "b/1/x", "b/10", "b/2", "bb/1", "c"]
    assert keys(store, "b/") == ["b/1/x", "b/10", "b/2"]
    assert keys(store, "b/", start_after="b/10") == ["b/2"]
    assert keys(store, "nothing/") == []
    assert [info.size for info in store.list("b/")] == [5, 4, 3]
    with pytest.raises(AssertionError, match="no folder"):  # an engine would find "b/2" below "b", or nothing
        store.list("b/1")


def test_a_write_is_listed_as_soon_as_it_returned(store: Store):
    for index in range(15):
        store.create(f"seen/{index:03d}", b"x")
        assert keys(store, "seen/")[-1] == f"seen/{index:03d}"


def test_delete_removes_and_may_be_repeated(store: Store):
    store.put("a/key", b"x")
    store.delete("a/key")
    store.delete("a/key")
    store.delete("never/there")
    assert keys(store) == []
    assert store.create("a/key", b"again") is True


def test_keys_with_odd_letters_come_back(store: Store):
    odd = ["a b/c+d", "ü/ß.json", "100%/x", "q?s=1&t", "a=b,c"]
    for key in odd:
        store.put(key, key.encode())
    assert keys(store) == sorted(odd)
    assert all(store.get(key) == key.encode() for key in odd)


def test_a_store_can_be_opened_again_by_its_own_url(reopen: Opener, request: pytest.FixtureRequest):
    first = reopen()
    if first.url == "memory://":
        return
    first.put("key", b"x")
    scheme = first.url.removeprefix("fsspec+").partition("://")[0]
    server = {"s3": "s3_server", "az": "azurite", "hf": "hf_gateway", "gs": "gcs"}.get(scheme)
    given = [first.url] if scheme == "gs" else []
    options = request.getfixturevalue(server).options(*given) if server else None
    assert open_store(first.url, options).get("key") == b"x"


def test_a_usable_store_passes_the_probe_and_is_left_clean(store: Store):
    probe(store)
    assert keys(store) == []


# -- the folder alone -------------------------------------------------------------------------------------------------


def test_racing_processes_have_one_winner_too(tmp_path: Path):
    bodies = [str(i).encode() * 1000 for i in range(3)]
    won = in_processes(create, *((tmp_path, "key", body) for body in bodies))
    assert won.count(True) == 1
    assert open_local(tmp_path).get("key") == bodies[won.index(True)]


def test_a_writer_killed_in_mid_write_leaves_nothing_that_counts(tmp_path: Path):
    """The writer opens its staging file through obstore's own engine and dies before the end."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "key#1").write_bytes(b"half of it")
    store = open_local(tmp_path)
    assert keys(store) == []
    with pytest.raises(ObjectMissing):
        store.get("a/key")
    assert store.create("a/key", b"whole") is True
    assert store.get("a/key") == b"whole"


def test_kill_9_never_leaves_a_torn_object(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from diloco_orchestrator.store.obstore_engine import open_local\n"
        "store = open_local(Path(sys.argv[1]))\n"
        "while True:\n"
        "    for body in (b'a', b'b'): store.put('key', body * 2**22)\n"
        "    print('round', flush=True)\n"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline()
        writer.kill()
        writer.wait()
        writer.stdout.close()
        data = open_local(tmp_path).get("key")
        assert len(data) == 2**22 and len(set(data)) == 1


def test_a_full_disk_is_told_and_leaves_nothing_half_written(small_disk: Path):
    store = open_local(small_disk / "bucket")
    store.put("small", b"x")
    for write in (store.put, store.create):
        with pytest.raises(StoreFull, match=r"big.*Free some space"):
            write("big", bytes(2**20))
    assert keys(store) == ["small"]
    assert store.get("small") == b"x"


class Repaired(ManualClock):
    """A clock by which somebody mends a disk while a process waits for the third time."""

    def __init__(self, disk: Path, options: str) -> None:
        super().__init__()
        self.disk, self.options, self.slept = disk, options, 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.slept += 1
        if self.slept == 3:
            remount(self.disk, self.options)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_disk_that_is_read_only_for_a_while_is_waited_for(small_disk: Path, engine: str):
    clock = Repaired(small_disk, "rw")
    store = open_store(f"file://{small_disk}/bucket", engine=engine, clock=clock, rng=random.Random(1))
    store.put("key", b"1")
    remount(small_disk, "ro")
    store.put("key", b"2")
    assert clock.slept == 3 and store.create("other", b"x") and store.get("key") == b"2"
    remount(small_disk, "ro")
    with pytest.raises(StoreFull, match=r"cannot delete key in .*The file system is read-only: see why.* in 9\d s"):
        store.delete("key")


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_disk_that_is_full_for_a_while_is_waited_for(small_disk: Path, engine: str):
    clock = Repaired(small_disk, "size=8m")
    store = open_store(f"file://{small_disk}/bucket", engine=engine, clock=clock, rng=random.Random(1))
    store.put("key", b"1")
    assert store.create("big", bytes(2**20)) and clock.slept == 3
    assert store.get("big") == bytes(2**20) and keys(store) == ["big", "key"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_moment_is_tried_again(tmp_path: Path, number: int):
    """The errors as the system raises them, and as obstore words them."""
    store = open_local(tmp_path)
    words = os.strerror(number)
    for error in (OSError(number, words), GenericError(f"Generic LocalFileSystem error: {words} (os error {number})")):
        assert isinstance(store._translated(error, "key", "read"), StoreUnavailable)
    assert not isinstance(store._translated(GenericError("x (os error 52)"), "key", "read"), StoreUnavailable)


def test_a_folder_that_cannot_be_made_is_refused():
    with pytest.raises(StoreDenied, match=r"/proc/nothing.*Choose a folder"):
        open_store("/proc/nothing/here")


def test_urls_that_cannot_be_meant_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="empty"):
        open_store("")
    with pytest.raises(ConfigError, match=r"unknown store scheme 'fiel': did you mean 'file'\?"):
        open_store("fiel:///tmp/x")
    with pytest.raises(ConfigError, match="storage_options"):
        open_store(str(tmp_path), {"key": "secret-value"})
    with pytest.raises(NoSuchRun, match="there is no folder"):
        open_store(str(tmp_path / "typo"), must_exist=True)
    assert not (tmp_path / "typo").exists()


def test_paths_and_file_urls_are_the_same_store(tmp_path: Path):
    open_store(str(tmp_path / "a b")).put("key", b"x")
    assert open_store(f"file://{tmp_path}/a b").get("key") == b"x"


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_presigned_url_reads_one_object_until_it_expires(s3_server: S3Server, bucket: str, scheme: str):
    url, options = f"{scheme}://{bucket}/x", s3_server.options()
    store = open_store(url, options)
    store.create("code/a.zip", b"hello")
    found = readable_url(url, options, "code/a.zip", 600.0)
    with urllib.request.urlopen(found) as answer:
        assert answer.read() == b"hello"
    for broken in (found.replace("a.zip", "b.zip"), found.replace("Expires=600", "Expires=601")):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(broken)
    late = found.replace(found[found.index("X-Amz-Date=") :][11:27], "20200101T000000Z")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(late)


def test_a_folders_object_has_a_path_and_memory_has_nothing_to_give(tmp_path):
    open_store(str(tmp_path)).create("code/a.zip", b"hello")
    assert Path(readable_url(str(tmp_path), None, "code/a.zip", 60.0)).read_bytes() == b"hello"
    with pytest.raises(ConfigError, match="Use a bucket"):
        readable_url("memory://x", None, "code/a.zip", 60.0)
