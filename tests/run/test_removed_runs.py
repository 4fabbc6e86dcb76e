"""A folder from which a run was removed while its replicas were alive, as by a closed terminal and `rm -r`."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S
from real_runs import launcher, wait_for

from diloco_orchestrator import Run
from diloco_orchestrator.errors import RunFolderTaken
from diloco_orchestrator.executors.local_process import replicas_in
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.open_store import open_store


@pytest.fixture(params=["launcher killed", "launcher waits"])
def left(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The launcher and the pids of two replicas in round 2 or later."""
    launched = launcher(tmp_path, wait=request.param == "launcher waits", args={"pause_s": 0.1})
    bucket = tmp_path / "bucket"
    wait_for((bucket / keys.commit(1)).exists, "round 1")
    if request.param == "launcher killed":
        launched.wait()
    found = replicas_in(str(bucket))
    assert len(found) == 2
    yield launched, found
    launched.kill()
    launched.communicate()
    for pid in replicas_in(str(bucket)):
        os.killpg(pid, signal.SIGKILL)


def test_a_launch_names_the_replicas_of_a_removed_run_and_what_to_do_and_that_is_enough(
    start: Callable[..., Run], tmp_path: Path, left: tuple[subprocess.Popen[str], list[int]]
):
    bucket, (launched, pids) = tmp_path / "bucket", left
    bucket.rename(tmp_path / "removed")  # what is written meanwhile does not disturb it, unlike rm
    with pytest.raises(RunFolderTaken, match="removed while its replicas were alive") as refused:
        start(store=bucket, rounds=2)
    # One may have ended by itself: it reads what is not there any more.
    assert set(replicas_in(str(bucket))) <= set(pids) and not (bucket / keys.RUN).exists()
    assert (f"Process {launched.pid} launches them again" in str(refused.value)) is (launched.poll() is None)

    launched.kill()
    launched.wait()
    command = str(refused.value).partition("launch again: ")[2].partition(". Or ")[0]
    # A heartbeat at least: the round waits for its deadline where the answer of one of them was removed.
    wait_for(lambda: any(each.is_file() for each in bucket.rglob("*")), "replicas that go on writing")
    subprocess.run(command, shell=True, check=False, timeout=PATIENCE_S)
    assert start(store=bucket, rounds=2).wait().status == "completed"
    assert verify_run(open_store(str(bucket))).agrees


@pytest.mark.parametrize("left", ["launcher killed"], indirect=True)
def test_replicas_are_those_of_the_folder_by_whatever_path(
    tmp_path: Path, left: tuple[subprocess.Popen[str], list[int]]
):
    (tmp_path / "link").symlink_to(tmp_path / "bucket")
    (tmp_path / "bucket2").mkdir()
    assert replicas_in(str(tmp_path / "link")) == left[1]
    assert replicas_in(str(tmp_path / "bucket2")) == replicas_in(str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("key", [keys.heartbeat(0, 1), keys.commit(4)])
def test_a_folder_without_a_run_in_which_replicas_have_written_is_not_taken(
    start: Callable[..., Run], tmp_path: Path, key: str
):
    store = open_store(str(tmp_path / "bucket"))
    store.put(key, b"{}")
    with pytest.raises(RunFolderTaken, match=rf"holds {key} and no run\.json: a run was removed"):
        start(store=tmp_path / "bucket", rounds=1)
    assert [info.key for info in store.list("")] == [key]
