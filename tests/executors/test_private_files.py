"""What another user of the machine prepares in the folder of local replicas is neither written to nor believed."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from diloco_orchestrator.store.open_store import open_store
from executors import attempt_folder
from executors.attempt_folder import AttemptFolder, make_private, open_private, state_folder
from executors.contract import ExecutorError, ReplicaHandle
from executors.local_process import LocalProcessExecutor
from executors.testing import request_of


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def executor(tmp_path: Path) -> LocalProcessExecutor:
    return LocalProcessExecutor(tmp_path / "local")


def attempt_of(executor: LocalProcessExecutor) -> AttemptFolder:
    folder = Path(str(executor.plan(request_of("pass"))["dir"]))
    for each in (*reversed(folder.parents[:3]), folder):
        each.mkdir(mode=0o700, exist_ok=True)
    return AttemptFolder(folder)


def test_logs_and_handles_are_their_users_alone(executor: LocalProcessExecutor, tmp_path: Path):
    handle = executor.launch(request_of("pass"))
    executor.collect([handle], timeout=60.0)
    found = [tmp_path / "local", *(tmp_path / "local").rglob("*")]
    assert {mode(path) for path in found if path.is_dir()} == {0o700}
    assert {mode(path) for path in found if path.is_file()} == {0o600}


def test_the_folder_is_below_the_users_state_and_not_in_tmp(monkeypatch: pytest.MonkeyPatch):
    assert state_folder({"XDG_STATE_HOME": "/x"}) == Path("/x/diloco-orchestrator/local")
    assert state_folder({"HOME": "/home/me"}) == Path.home() / ".local/state/diloco-orchestrator/local"
    where = str(LocalProcessExecutor().plan(request_of("pass"))["dir"])
    assert where.startswith(os.environ["XDG_STATE_HOME"])


def test_a_folder_that_others_may_write_to_is_refused(executor: LocalProcessExecutor, tmp_path: Path):
    (tmp_path / "local").mkdir()
    (tmp_path / "local").chmod(0o777)
    with pytest.raises(ExecutorError, match="writable for others"):
        executor.launch(request_of("pass"))
    assert list((tmp_path / "local").iterdir()) == []


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_private(tmp_path / "theirs")
    monkeypatch.setattr(attempt_folder.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ExecutorError, match="another user's"):
        make_private(tmp_path / "theirs")
    (tmp_path / "file").touch()
    with pytest.raises(ExecutorError, match="somebody else planted it"):
        open_private(tmp_path / "file", os.O_RDONLY)


def test_a_link_to_a_folder_is_refused(tmp_path: Path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ExecutorError, match="a link"):
        make_private(tmp_path / "link")


@pytest.mark.parametrize("planted", ["lock", "output.log"])
def test_a_planted_link_truncates_and_extends_no_file(executor: LocalProcessExecutor, tmp_path: Path, planted: str):
    victim = tmp_path / "diary"
    victim.write_text("dear diary")
    (attempt_of(executor).path / planted).symlink_to(victim)
    with pytest.raises(ExecutorError, match="somebody planted it"):
        executor.launch(request_of("print('x')"))
    assert victim.read_text() == "dear diary"


def test_a_planted_handle_is_not_adopted(executor: LocalProcessExecutor, tmp_path: Path):
    native: dict[str, Any] = {"pid": os.getpid(), "host": "x", "boot_id": "x", "start_ticks": 1, "dir": str(tmp_path)}
    (tmp_path / "planted").write_text(json.dumps(ReplicaHandle("local", "r", 0, 1, "x", native).to_json()))
    (attempt_of(executor).path / "handle.json").symlink_to(tmp_path / "planted")
    with pytest.raises(ExecutorError, match="somebody planted it"):
        executor.launch(request_of("pass"))


def test_a_new_runs_folder_is_its_users_alone_and_an_old_one_stays_as_it_is(tmp_path: Path):
    open_store(str(tmp_path / "runs" / "a"))
    assert mode(tmp_path / "runs" / "a") == 0o700
    (tmp_path / "shared").mkdir(mode=0o750)
    open_store(str(tmp_path / "shared"))
    assert mode(tmp_path / "shared") == 0o750
