"""The executor that run.json names is made again only for who launched the run, on the machine where that was."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from cli_support import diloco_here
from protocol_fleet import Fleet
from scripted import ScriptedExecutor

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ConfigError, StoreFull
from diloco_orchestrator.executors.contract import ReplicaHandle
from diloco_orchestrator.inspection.logs import executor_of_run, log_lines
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.launching.run import attach
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Handle
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.launched_here import head_seen_here, note_head, remember
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/diloco-orchestrator/runs"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Fleet(replicas=1, store=open_store(str(tmp_path / "bucket"))).store


def name_executor(store: Store, marker: Path) -> None:
    """Name an executor in run.json whose kubeconfig runs a command on the machine of whoever makes it."""
    kubeconfig = marker.with_name("kubeconfig")
    kubeconfig.write_text(json.dumps(_kubeconfig(marker)))
    body = json.loads(store.get(keys.RUN))
    body["executor"] = {"name": "kubernetes", "options": {"kubeconfig": str(kubeconfig)}}
    store.put(keys.RUN, json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n")


def _kubeconfig(marker: Path) -> dict[str, object]:
    login = {"apiVersion": "client.authentication.k8s.io/v1", "command": "touch", "args": [str(marker)]}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "evil",
        "contexts": [{"name": "evil", "context": {"cluster": "evil", "user": "evil"}}],
        "clusters": [{"name": "evil", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "evil", "user": {"exec": {**login, "interactiveMode": "Never"}}}],
    }


def test_a_run_of_somebody_else_is_not_supervised_with_the_executor_that_its_bucket_names(store, state, tmp_path):
    marker = tmp_path / "executed"
    name_executor(store, marker)
    with pytest.raises(ConfigError, match="you did not launch this run on this machine"):
        attach(store.url)
    assert not marker.exists()


def test_nor_is_its_output_read_with_it(store, state, tmp_path):
    marker = tmp_path / "executed"
    name_executor(store, marker)
    handle = ReplicaHandle("kubernetes", "run-1", 0, 1, "job").to_json()
    record = Handle(**Stamp("test", lambda: 0.0)(), replica_id=0, attempt=1, handle=handle)
    store.put(keys.handle(0, 1), record.to_bytes())
    store.put(keys.intent(0, 1), b"{}")
    with pytest.raises(ConfigError, match="the output of an attempt that runs needs the executor"):
        list(log_lines(RunReader(store), 0, 1))
    assert not marker.exists()


def test_a_run_that_was_launched_here_is(store, state):
    remember(RunLog(store))
    assert executor_of_run(RunReader(store), "attach", trust_bucket=False).name == "local"


def test_but_not_once_its_run_json_is_another(store, state, tmp_path):
    remember(RunLog(store))
    name_executor(store, tmp_path / "executed")
    with pytest.raises(ConfigError, match=r"run\.json was changed since you launched the run"):
        attach(store.url)


def test_a_bucket_can_be_trusted(store, state):
    assert executor_of_run(RunReader(store), "attach", trust_bucket=True).name == "local"


def test_only_this_user_can_write_what_is_remembered(store, state):
    remember(RunLog(store))
    (record,) = state.iterdir()
    assert record.stat().st_mode & 0o777 == 0o600 and state.stat().st_mode & 0o777 == 0o700
    state.chmod(0o777)
    with pytest.raises(ConfigError):
        attach(store.url)


def test_a_launch_goes_on_where_nothing_can_be_remembered(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    remember(RunLog(store))
    assert "attach will need executor=" in caplog.text


def test_a_home_that_was_full_for_a_moment_is_written_to_again(store, small_disk: Path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", str(small_disk))
    log = RunLog(store)
    remember(log)
    with pytest.raises(OSError, match="No space left"), (small_disk / "others").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    note_head(log, "1:ab")
    assert "this launch is not remembered" in caplog.text
    caplog.clear()
    (small_disk / "others").unlink()
    note_head(log, "2:cd")
    assert head_seen_here(store) == "2:cd" and not caplog.text
    assert len(list((small_disk / "diloco-orchestrator/runs").iterdir())) == 1


def test_why_supervision_ended_is_in_the_users_state_folder_where_the_bucket_takes_no_record(state, small_disk: Path):
    store = Fleet(replicas=1, store=open_store(str(small_disk / "bucket"))).store
    remember(RunLog(store), head="1:ab")
    run = attach(store.url, executor=ScriptedExecutor(), clock=ManualClock())
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreFull, match="The file system is read-only"):
        run.wait()
    (record,) = state.iterdir()
    told = json.loads(record.read_bytes())["failure"]
    assert told.startswith("StoreFull: cannot create replicas/0/") and "Tried" in told
    shown = diloco_here("status", store.url, cwd=state).stdout
    assert "supervision on this machine ended: StoreFull: cannot create" in " ".join(shown.split())
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with pytest.raises(TimeoutError):
        run.wait(timeout=1.0)
    assert json.loads(record.read_bytes()) == {**json.loads(record.read_bytes()), "failure": "", "head": "1:ab"}
