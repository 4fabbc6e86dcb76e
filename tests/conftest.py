"""Fixtures that several folders of tests share, and the watchdog over every test."""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import pytest
from genuine_azurite import Azurite, running_azurite
from genuine_ceph import running_ceph
from genuine_gcs import Gcs, running_gcs
from hf_gateway import HfGateway, running_hf_gateway
from hypothesis import settings
from patience import PATIENCE_S
from real_runs import FAST
from s3_server import S3Server, running_server

from diloco_orchestrator import LocalProcessExecutor, Run, launch

# What this user launched is remembered in a folder of the tests' own, for child processes too.
_STATE = tempfile.TemporaryDirectory(prefix="diloco-tests-state-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _STATE.name

# No launch asks a package index: uv, where it is installed, finds nothing, whatever is in this user's cache.
os.environ |= {"UV_OFFLINE": "1", "UV_NO_CACHE": "1"}

# Threads of torch that have nothing to do sleep: spinning, they take the cores from the other processes of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No verdict hangs on the wall clock: an example of a property may take as long as a busy machine needs for it.
settings.register_profile("busy machines", deadline=None, max_examples=50)  # others in each run
settings.load_profile("busy machines")

_LAST_RESORT_S = 1.5 * PATIENCE_S  # for a test that hangs where no Python runs, so that no exception can reach it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported stays: the collector traverses it neither now, which is a quarter of the time, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _watchdog():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _watchdog():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    with _watchdog():
        return (yield)


@contextmanager
def _watchdog() -> Iterator[None]:
    """Fails what takes longer than `PATIENCE_S`, with the stack of every thread; fixtures are torn down as usual."""
    before = signal.signal(signal.SIGALRM, _bark)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S, 10.0)  # again and again, should something swallow the failure
    faulthandler.dump_traceback_later(_LAST_RESORT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _bark(*_: int | FrameType | None) -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = (
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
    pytest.fail(f"nothing ended within {PATIENCE_S:g} s. Beside the stack above:\n" + "\n".join(stacks))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests of this process; with S3_SERVER=ceph in the environment a genuine Ceph."""
    if os.environ.get("S3_SERVER") == "ceph":
        with tempfile.TemporaryDirectory(prefix="ceph-") as folder, running_ceph(Path(folder) / "c") as ceph:
            yield ceph
        return
    with running_server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """A new empty bucket on `s3_server`."""
    return s3_server.make_bucket(f"bucket-{uuid4().hex[:12]}")


@pytest.fixture(scope="session")
def hf_gateway() -> Iterator[HfGateway]:
    """One server for all tests of this process."""
    with running_hf_gateway() as gateway:
        yield gateway


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """One server for all tests of this process, which are skipped without."""
    with running_azurite() as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[Gcs]:
    """One server for all tests of this process, which are skipped without."""
    with running_gcs() as server:
        yield server


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for about 256 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small disk here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    made = LocalProcessExecutor(tmp_path / "executor", grace_s=0.5)
    yield made
    for handle in (h for folder in (tmp_path / "executor").glob("*") for h in made.find(folder.name)):
        if not made.poll(handle).state.ended:
            os.killpg(handle.native["pid"], signal.SIGKILL)


@pytest.fixture
def start(executor: LocalProcessExecutor, tmp_path: Path) -> Callable[..., Run]:
    def launched(entrypoint: str = "train", store: Path | None = None, **settings: Any) -> Run:
        settings = {"replicas": 2, "rounds": 3, "sync_every": 3, **FAST, **settings}
        store = store or tmp_path / "bucket"
        return launch(f"tiny_workloads:{entrypoint}", store=str(store), executor=executor, **settings)

    return launched


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch with one thread: several only wait for each other over tensors as small as those of most tests."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
