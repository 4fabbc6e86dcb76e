"""`launch` with real processes over a folder: whole runs, deaths, collapses, stops, and bad input."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from real_runs import FAST, Strike, digests, launcher, reader_of, wait_for

from diloco_orchestrator import CollapseStopError, LocalProcessExecutor, Run, RunReader, RunResult, launch
from diloco_orchestrator.clock import ThreadBackground
from diloco_orchestrator.errors import ConfigError, RunFailed, RunFolderTaken, StoreDenied
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store
from executors import LaunchRequest, ReplicaHandle

# -- healthy runs -----------------------------------------------------------------------------------------------------


def test_a_run_completes_and_its_result_says_so(finished):
    run, result = finished.run, finished.result
    assert (result.status, result.rounds, result.outer_steps, result.verdict) == ("completed", 4, 3, None)
    assert run.metrics() == [asdict(row) for row in result.metrics] and json.dumps(run.metrics())
    assert Path(result.snapshot, "model.safetensors").exists() and result.snapshot.endswith("/snapshots/00000003")
    assert [row.contributors for row in result.metrics] == [[0, 1]] * 3 + [[]]
    assert result.metrics[-1].heldout < result.metrics[0].heldout
    json.dumps(result.to_json())
    status = reader_of(finished.folder).status()
    assert status.state == "completed" and [r.exit_code for r in status.replicas] == [0, 0]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_digests(start, tmp_path):
    for name in ("a", "b"):
        start(store=tmp_path / name, seed=3, codec="bf16").wait()
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_what_replicas_print_and_how_they_ended_is_in_the_bucket(finished):
    store = open_store(str(finished.folder))
    assert "round 1: committed by" in store.get(keys.log_text(0, 1)).decode()
    assert any("round 3: committed by" in line for line in finished.run.logs(1))
    reader = RunReader(store)
    claim, ended = reader.attempts.claim(1, 2), reader.attempts.exit(1, 2)
    assert claim is not None and claim.versions["torch"] and claim.threads >= 1
    assert ended is not None and (ended.code, ended.reason, ended.error) == (0, "the run ended", None)


@pytest.mark.slow
def test_a_run_goes_on_without_the_process_that_launched_it(executor, tmp_path):
    assert launcher(tmp_path, rounds=3, wait=False).wait() == -signal.SIGKILL
    wait_for(lambda: reader_of(tmp_path / "bucket").log.result(1), "the run ends")
    assert [c.stop for c in reader_of(tmp_path / "bucket").commits()] == ["none", "none", "none", "completed"]


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_a_killed_replica_is_relaunched_and_the_run_ends_with_the_undisturbed_bits(finished, undisturbed):
    check_survived(finished.run, finished.result, finished.folder, [1], undisturbed)


@pytest.mark.slow
def test_replicas_killed_all_at_once_are_relaunched_and_the_run_ends_with_the_undisturbed_bits(
    start, tmp_path, undisturbed
):
    strike = Strike(tmp_path, [0, 1], signal.SIGKILL)
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [0, 1]})
    result = run.wait(on_poll=strike)
    assert strike.done
    check_survived(run, result, tmp_path / "bucket", [0, 1], undisturbed)


def check_survived(run: Run, result: RunResult, folder: Path, killed: list[int], undisturbed: list[str]) -> None:
    assert result.status == "completed" and [row.contributors for row in result.metrics[:3]] == [[0, 1]] * 3
    assert digests(folder) == undisturbed
    attempts = {r.replica_id: r.attempt for r in run.status().replicas}
    assert attempts == {i: 2 if i in killed else 1 for i in (0, 1)}
    assert [o.steps for c in reader_of(folder).commits()[:3] for a in c.answers for o in a.origins] == [3] * 6


@pytest.mark.slow
def test_sigterm_in_mid_round_publishes_nothing_partial_and_leaves_as_preempted(start, tmp_path):
    strike = Strike(tmp_path, [1], signal.SIGTERM)
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [1]})
    result = run.wait(on_poll=strike)
    assert strike.done and result.status == "completed"
    reader = reader_of(tmp_path / "bucket")
    ended = reader.attempts.exit(1, 1)
    assert ended is not None and (ended.code, ended.reason, ended.round) == (75, "preempted", 1)
    assert reader.commits()[1].answers[1].attempt == 2
    assert [o.steps for c in reader.commits()[:3] for a in c.answers for o in a.origins] == [3] * 6


@pytest.mark.slow
def test_an_error_that_passes_is_survived(start, tmp_path):
    run = start("train_failing_once", args={"marker": str(tmp_path / "marker")})
    assert run.wait().status == "completed"
    ended = reader_of(tmp_path / "bucket").attempts.exit(1, 1)
    assert ended is not None and ended.code == 1 and "a hiccup of the user's file system" in (ended.error or "")


@pytest.mark.slow
def test_an_error_that_stays_fails_the_run_with_the_users_own_traceback(start):
    run = start("train_failing", retry={"max_errors": 5, "backoff_s": 0.0})
    with pytest.raises(RunFailed) as caught:
        run.wait()
    text = str(caught.value)
    assert re.search(r"replica 1 failed twice in a row in the same way, ZeroDivisionError at \w+\.py:\d+: Zero", text)
    assert "ZeroDivisionError: a bug in the user's own code" in text and "in train_failing" in text
    status = run.status()
    assert status.state == "failed" and status.outer_step == 1 and 1 in status.snapshots


class DyingReplicas(LocalProcessExecutor):
    """Starts processes that end as by a crash in native code: something is printed, then the process is gone."""

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        code = "import os; print('the cause: CUDA error 700', flush=True); os.kill(os.getpid(), 11)"
        return super().launch(replace(request, command=["python", "-c", code]))


def test_the_last_lines_of_a_replica_that_died_without_a_word_are_told(tmp_path):
    executor, settings = DyingReplicas(tmp_path / "executor"), {**FAST, "retry": {"max_errors": 0}}
    run = launch("tiny_workloads:train", store=str(tmp_path / "bucket"), executor=executor, replicas=1, **settings)
    with pytest.raises(RunFailed, match=r"(?s)killed by SIGSEGV.*the cause: CUDA error 700"):
        run.wait()


@pytest.mark.slow
def test_a_nan_in_one_replica_costs_one_round(start):
    result = start("train_nan_once").wait()
    assert result.status == "completed" and result.outer_steps == 3
    assert [row.applied for row in result.metrics] == [True, False, True, True, False]
    assert "replica 1: abstention" in result.metrics[1].reason


# -- the kill-switch --------------------------------------------------------------------------------------------------

COLLAPSE: dict[str, Any] = {"guard": {"min_steps": 2, "ema_alpha": 0.0}, "rounds": 20}


@pytest.mark.slow
def test_a_collapse_stops_every_replica_at_the_same_round_and_raises(start, tmp_path):
    run = start("train_collapsing", **COLLAPSE)
    with pytest.raises(CollapseStopError, match="Hacking Gap") as caught:
        run.wait()
    assert caught.value.status.fire
    status = run.status()
    last = status.rounds[-1]
    assert (status.state, last.stop, last.applied) == ("halted", "halted", False)
    assert [r.exit_code for r in status.replicas] == [0, 0]
    store = open_store(str(tmp_path / "bucket"))
    assert not [i.key for i in store.list("rounds/") if i.key > f"rounds/{last.round + 1:08d}"]
    log = RunLog(store)  # the base before the round that fired is the one that everybody keeps
    assert log.snapshot(log.snapshots()[-1]).base_digest == digests(tmp_path / "bucket")[-1]


@pytest.mark.slow
def test_a_soft_run_returns_the_verdict(start):
    result = start("train_collapsing", strict=False, **COLLAPSE).wait()
    assert result.status == "halted" and result.verdict is not None and result.verdict.fire


@pytest.mark.slow
def test_launch_is_patient_and_warns_when_the_guard_cannot_fire(start, caplog):
    with caplog.at_level(logging.WARNING):
        run = start(rounds=1, guard={})
    run.wait()
    words = "1 rounds are fewer than the guard's min_steps=20"  # said where a held-out function is known: by replica 0
    assert words in open_store(run.url).get(keys.log_text(0, 1)).decode() and words not in caplog.text
    config = RunReader(open_store(run.url)).run.config
    assert config.guard.decline_patience == 6


# -- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_halt_is_applied_and_never_raises(start):
    run = start(rounds=1000)
    run.halt("seen enough")
    run.halt("seen enough twice")
    result = run.wait()
    assert (result.status, result.reason, result.verdict) == ("halted", "halt requested: seen enough", None)
    assert result.outer_steps == result.rounds == 1


@pytest.mark.slow
def test_ctrl_c_halts_after_the_open_round_and_leaves_nothing_running(executor, tmp_path):
    started = launcher(tmp_path, args={"pause_s": 0.01})
    wait_for(lambda: len(reader_of(tmp_path / "bucket").commits()) > 1, "two rounds")
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate()
    assert started.returncode == -signal.SIGINT and "halting after the open round" in errors
    assert errors.splitlines()[-1] == f"KeyboardInterrupt: halted; to go on: diloco resume {tmp_path / 'bucket'}"
    reader = reader_of(tmp_path / "bucket")
    status = reader.status()
    assert (status.state, status.reason) == ("halted", "halt requested: Ctrl-C")
    assert status.rounds[-1].applied and status.snapshots[-1] == status.round
    assert all(executor.poll(h).state.ended for h in executor.find(reader.run.run_id))


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_without_the_open_round(executor, tmp_path):
    started = launcher(tmp_path, args={"pause_s": 0.5})
    wait_for(lambda: len(reader_of(tmp_path / "bucket").commits()) >= 1, "a round")
    started.send_signal(signal.SIGINT)
    wait_for((tmp_path / "bucket" / "legs/1/halt.json").exists, "the first Ctrl-C is heard")
    started.send_signal(signal.SIGINT)
    started.communicate()
    status = reader_of(tmp_path / "bucket").status()
    assert status.state == "halted" and status.snapshots[-1] == status.outer_step
    run_id = reader_of(tmp_path / "bucket").run.run_id
    assert all(executor.poll(h).state.ended for h in executor.find(run_id))


INTERRUPTED = """
import os, signal
from diloco_orchestrator import LocalProcessExecutor, launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
class Interrupted(LocalProcessExecutor):
    def launch(self, request):
        handle = super().launch(request)
        if request.replica_id == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return handle
    def cancel(self, handle):
        super().cancel(handle)
        os.kill(os.getpid(), signal.SIGINT)
launch('tiny_workloads:train', store={store!r}, executor=Interrupted({folder!r}, grace_s=0.5), **{settings!r})
"""


def interrupted(tmp_path: Path, **args: Any) -> subprocess.Popen[str]:
    """A process that gets Ctrl-C while it launches a run in `tmp_path / "bucket"`, and one at every cancel."""
    settings = {"replicas": 2, "rounds": 1000, "sync_every": 3, "args": args, **FAST}
    where = {"store": str(tmp_path / "bucket"), "folder": str(tmp_path / "executor")}
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", INTERRUPTED.format(**where, settings=settings)]
    return subprocess.Popen(program, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ctrl_c_while_replicas_are_launched_leaves_nothing_running(executor, tmp_path):
    _, errors = interrupted(tmp_path).communicate()
    assert errors.splitlines()[-1] == f"KeyboardInterrupt: halted; to go on: diloco resume {tmp_path / 'bucket'}"
    reader = reader_of(tmp_path / "bucket")
    assert reader.status().state == "halted"
    assert len(handles := executor.find(reader.run.run_id)) == 2 and all(executor.poll(h).state.ended for h in handles)


@pytest.mark.slow
def test_a_third_ctrl_c_leaves_at_once_and_says_how_to_end_what_still_runs(tmp_path):
    started = interrupted(tmp_path, pause_s=0.5)
    wait_for((tmp_path / "bucket" / "legs/1/halt.json").exists, "the first Ctrl-C is heard")
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate()
    attach = f"diloco attach {tmp_path / 'bucket'} ends those that are left"
    assert errors.splitlines()[-1] == f"KeyboardInterrupt: left before all replicas had ended: {attach}"


@pytest.mark.slow
def test_waiting_with_a_timeout_stops_nothing(start, tmp_path):
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [0]}, rounds=2)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.1 s"):
        run.wait(timeout=0.1)
    (tmp_path / "release").touch()
    assert run.wait().status == "completed"


# -- bad input --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    inner: float = 0.01


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync_evry": 3}, r"unknown setting 'sync_evry': did you mean 'sync_every'\?"),
        ({"guard": {"min_step": 3}}, r"unknown setting 'guard.min_step': did you mean 'guard.min_steps'\?"),
        ({"replicas": 0}, "'replicas' = 0"),
        ({"replicas": -1}, "'replicas' = -1"),
        ({"rounds": 0}, "'rounds' = 0"),
        ({"sync_every": 4, "fragments": 3}, "sync_every=4 is not divisible by fragments=3.*such as 6"),
        ({"sync_every": 4, "fragments": 2, "fragment_sync_delay": 2}, "fragment_sync_delay=2 must be below .* = 2"),
        ({"quorum": 3}, r"quorum=3: choose 1\.\.2"),
        ({"quorum": "al"}, "quorum"),
        ({"outer": "spars"}, "unknown outer optimizer 'spars': did you mean 'sparse'"),
        ({"steps": "equal_tme"}, "'steps' = 'equal_tme'"),
        ({"steps": "equal_time", "quorum": "all"}, 'steps="equal_time" with quorum="all": .* Set quorum=2'),
        ({"steps": "equal_time", "replicas": 4, "aggregate": "median"}, 'aggregate="median" with steps="equal_time"'),
        ({"ranks_per_replica": 2, "fragment_update_alpha": 0.5}, "fragment_update_alpha=0.5: it needs the whole model"),
        ({"ranks_per_replica": [1, 2], "adapters": "exact"}, 'adapters="exact": it needs the whole model'),
        ({"late": "carri"}, "'late' = 'carri'"),
        ({"outer": {"lr": float("nan")}}, "'outer.lr' = nan"),
        ({"codec": "int9"}, "unknown codec 'int9'"),
        ({"args": {"x": object()}}, r"'args.x' = .*of a dataclass, asdict\(it\)"),
        ({"args": {"x": Rates()}}, r"'args.x' = Rates.*of a dataclass, asdict\(it\)"),
        ({"args": Rates()}, r"'args' = Rates.*of a dataclass, asdict\(it\)"),
        ({"seed": -1}, "'seed' = -1"),
    ],
)
def test_settings_that_cannot_be_meant_start_nothing(start, tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        start(**settings)
    assert not (tmp_path / "bucket").exists() and not (tmp_path / "executor").exists()


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("tiny_workloads.train", "Write 'tiny_workloads:train'"),
        ("no_such_pkg.mod:train", "there is no module 'no_such_pkg.mod'"),
        ("tiny_workload:train", "there is no module 'tiny_workload'"),
        ("__main__:train", "Put the function into a file of its own"),
        ("tiny_workloads:NOT_A_FUNCTION", "NOT_A_FUNCTION in tiny_workloads.py is a value"),
    ],
)
def test_entrypoints_that_cannot_be_found_start_nothing(tmp_path, entrypoint, words):
    with pytest.raises(ConfigError, match=words):
        launch(entrypoint, store=str(tmp_path / "bucket"))
    assert not (tmp_path / "bucket").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("attach.trian", "module tiny_workloads has no 'attach.trian'"),
        ("train_leaving_early", "returned in round 1, before the run's end"),
    ],
)
def test_a_workload_that_cannot_work_fails_the_run_at_once_and_is_not_relaunched(start, entrypoint, words):
    run = start(entrypoint)
    with pytest.raises(RunFailed, match=words):
        run.wait()
    assert {r.attempt for r in run.status().replicas} == {1}


@pytest.mark.slow
def test_replicas_that_build_different_models_are_told(start):
    run = start("train_different")
    with pytest.raises(RunFailed, match=r"differs from the run's first base at parameter 'bias': here float32\[\d\]"):
        run.wait()


def test_a_folder_that_holds_a_run_is_not_taken(start, finished):
    before = sorted(finished.folder.rglob("*"))
    with pytest.raises(RunFolderTaken, match=r"already holds a run.*diloco status"):
        start(store=finished.folder, rounds=1)
    assert sorted(finished.folder.rglob("*")) == before


def test_stores_that_no_replica_could_use_are_refused(start, tmp_path):
    with pytest.raises(ConfigError, match="memory:// is gone with this process"):
        launch("tiny_workloads:train", store="memory://x")
    with pytest.raises(StoreDenied, match="Choose a folder that you may write"):
        start(store=Path("/proc/nothing/here"))


@pytest.mark.slow
def test_a_run_of_four_goes_on_once_its_full_disk_has_room_again(start, small_disk, tmp_path):
    run = start(store=small_disk / "bucket", replicas=4, rounds=12, sync_every=1)

    def somebody_makes_room() -> None:
        outputs = tmp_path / "executor"
        wait_for(lambda: "Waiting since" in "".join(map(Path.read_text, outputs.rglob("output.log"))), "a replica")
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)

    helper = ThreadBackground().start(somebody_makes_room)
    assert run.wait().outer_steps == 12
    helper.result()
    assert all(replica.attempt == 1 for replica in run.status().replicas)


@pytest.mark.slow
def test_no_credential_reaches_a_record_or_a_log_in_the_bucket(start, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hunter2-hunter2-hunter2")
    run = start("train_telling_secrets", retry={"max_errors": 0})
    with pytest.raises(RunFailed, match="cannot log in with <MY_API_TOKEN redacted>"):
        run.wait()
    for path in (tmp_path / "bucket").rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    logs = [path.read_text() for path in (tmp_path / "bucket").glob("replicas/*/attempts/1/log.txt")]
    assert any(
        "using <MY_API_TOKEN redacted>" in log for log in logs
    )  # the other one may be cancelled before it prints


def test_every_published_contribution_names_the_base_it_was_trained_from(finished):
    store = open_store(str(finished.folder))
    bases = digests(finished.folder)  # each of the base before its round
    assert bases[0] == json.loads(store.get(keys.START))["base_digest"] and len(set(bases)) == len(bases)
    for round_ in (1, 2, 3, 4):
        for replica_id in (0, 1):
            key = keys.contribution(round_, replica_id)
            assert Contribution.from_bytes(store.get(key), key).base_digest == bases[round_ - 1]


@pytest.mark.slow
def test_no_thread_of_a_run_is_left_in_the_launcher(start):
    before = threading.active_count()
    start(rounds=1).wait()
    assert threading.active_count() <= before


def test_a_misspelt_function_is_refused_before_the_folder_is_taken(start, tmp_path):
    with pytest.raises(ConfigError, match=r"tiny_workloads\.py defines no 'trian'\. Did you mean 'train'\?"):
        start("trian")
    assert not (tmp_path / "bucket").exists()
