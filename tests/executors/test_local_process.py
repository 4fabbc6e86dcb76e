"""Real processes: launched once, watched, adopted, cancelled, timed out, told apart from strangers."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from in_processes import WAIT_FOR_EVER, in_processes, launch_and_die, request
from patience import PATIENCE_S

from executors import (
    CollectTimeout,
    ExecutorError,
    LocalProcessExecutor,
    ReplicaFailed,
    ReplicaHandle,
    ReplicaState,
)
from executors.attempt_folder import AttemptFolder
from executors.machine import machine_memory


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    made = LocalProcessExecutor(tmp_path / "executor", grace_s=0.3)
    yield made
    for handle_file in (tmp_path / "executor").glob("*/*/*/handle.json"):
        handle = ReplicaHandle.from_json(json.loads(handle_file.read_text()))
        if not made.poll(handle).state.ended:
            os.killpg(handle.native["pid"], signal.SIGKILL)


def until(condition: Callable[[], object], what: str) -> None:
    while not condition():
        time.sleep(0.01)


def ended(executor: LocalProcessExecutor, handle: ReplicaHandle):
    until(lambda: executor.poll(handle).state.ended, "the process ends")
    return executor.poll(handle)


def is_zombie(pid: int) -> bool:
    """Whether `pid` has ended unreaped: an orphan's new parent is whatever the machine runs as process 1."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return False
    except ProcessLookupError:
        return True


def ready(executor: LocalProcessExecutor, handle: ReplicaHandle) -> None:
    until(lambda: "ready" in list(executor.logs(handle)), "the process says that it is ready")


# -- the low-level form -----------------------------------------------------------------------------------------------


def test_any_function_runs_n_times_and_its_results_come_back(executor):
    handles = executor.launch_replicas(n_replicas=4, entrypoint="entrypoints:add", entrypoint_args={"a": 2, "b": 3})
    results = executor.collect(handles)
    assert [r.value["sum"] for r in results] == [5] * 4
    assert [r.value["rank"] for r in results] == [0, 1, 2, 3] and results[0].value["world_size"] == 4
    assert all(r.status.state is ReplicaState.SUCCEEDED and r.status.exit_code == 0 for r in results)
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert {r.value["threads"] for r in results} == {str(threads)} == {handles[0].native["OMP_NUM_THREADS"]}


@pytest.mark.parametrize("users", [None, "700"])
def test_children_share_half_of_the_machines_memory_unless_the_user_has_set_it(executor, monkeypatch, users):
    name = "DILOCO_MEMORY_MIB"
    monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(name, users)
    handles = executor.launch_replicas(n_replicas=2, entrypoint="entrypoints:variable", entrypoint_args={"name": name})
    values = [int(result.value) for result in executor.collect(handles)]
    assert values == ([700, 700] if users else [machine_memory() // 4 // 2**20] * 2)


def test_a_crashed_child_is_never_a_silent_success(executor):
    handles = executor.launch_replicas(2, "entrypoints:fail", {"words": "no such shelf"})
    with pytest.raises(ReplicaFailed, match=r"LookupError: no such shelf") as caught:
        executor.collect(handles)
    assert "replica 0, attempt 1" in str(caught.value) and "replica 1, attempt 1" in str(caught.value)
    assert "in fail" in str(caught.value)  # the child's own traceback
    results = executor.collect(handles, check=False)
    assert [r.status.exit_code for r in results] == [1, 1]


@pytest.mark.parametrize(
    ("entrypoint", "args", "state", "code", "words"),
    [
        ("entrypoints:hard_exit", {"code": 7}, ReplicaState.FAILED, 7, "exit code 7"),
        ("entrypoints:exit_with", {"code": 3}, ReplicaState.FAILED, 3, "the entrypoint exited: 3"),
        ("entrypoints:nothing", {}, ReplicaState.FAILED, 78, "has no 'nothing'"),
        ("no_such_module:f", {}, ReplicaState.FAILED, 78, "No module named 'no_such_module'"),
        ("entrypoints:NOT_A_FUNCTION", {}, ReplicaState.FAILED, 78, "is a int, which cannot be called"),
        ("entrypoints:add", {"c": 1}, ReplicaState.FAILED, 1, "unexpected keyword argument 'c'"),
    ],
)
def test_every_way_to_fail_is_told_in_the_childs_words(executor, entrypoint, args, state, code, words):
    handles = executor.launch_replicas(1, entrypoint, args)
    with pytest.raises(ReplicaFailed) as caught:
        executor.collect(handles)
    assert words in str(caught.value)
    assert (caught.value.results[0].status.state, caught.value.results[0].status.exit_code) == (state, code)


def test_success_does_not_depend_on_a_printable_result(executor):
    handles = executor.launch_replicas(1, "entrypoints:return_unjsonable", {})
    assert executor.collect(handles)[0].value is None
    handles = executor.launch_replicas(1, "entrypoints:exit_with", {"code": 0})
    assert executor.collect(handles)[0].status.state is ReplicaState.SUCCEEDED


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((1, "my_pkg.train.main", {}), ValueError, "Write 'my_pkg.train:main'"),
        ((1, "justaname", {}), ValueError, "package.module:function"),
        ((0, "m:f", {}), ValueError, "n_replicas=0"),
        ((1, "m:f", {"x": object()}), ValueError, "entrypoint_args are not JSON"),
    ],
)
def test_arguments_that_cannot_be_meant_launch_nothing(executor, tmp_path, arguments, error, words):
    with pytest.raises(error, match=words):
        executor.launch_replicas(*arguments)
    assert not (tmp_path / "executor").exists()


def test_an_unknown_option_is_refused_with_the_nearest(executor):
    with pytest.raises(TypeError, match=r"unknown option 'runid' of launch_replicas: did you mean 'run_id'\?"):
        executor.launch_replicas(1, "m:f", {}, runid="x")


def test_collect_gives_up_in_time_and_cancels_nothing(executor):
    handles = executor.launch_replicas(2, "entrypoints:print_and_wait", {})
    with pytest.raises(CollectTimeout, match=r"replicas \[0, 1\] still run") as caught:
        executor.collect(handles, timeout=0.5)
    assert caught.value.running == [0, 1]
    assert all(s.state is ReplicaState.RUNNING for s in executor.poll_many(handles))


# -- one attempt, one process -----------------------------------------------------------------------------------------


def test_the_same_attempt_launched_twice_is_one_process(executor, tmp_path):
    first = executor.launch(request(WAIT_FOR_EVER))
    assert executor.launch(request(WAIT_FOR_EVER)) == first
    assert LocalProcessExecutor(tmp_path / "executor").launch(request(WAIT_FOR_EVER)) == first


def test_the_same_attempt_is_one_process_after_it_ended_too(executor):
    first = executor.launch(request("print('once')"))
    ended(executor, first)
    assert executor.launch(request("print('once')")) == first
    assert list(executor.logs(first)) == ["once"]


def test_a_process_whose_launcher_died_before_writing_it_down_is_adopted(executor, tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(BrokenProcessPool):
        in_processes(launch_and_die, (str(tmp_path / "executor"), str(marker)))
    until(marker.exists, "the orphan starts")
    handle = executor.launch(request("raise SystemExit('a second process')"))
    ready(executor, handle)
    assert executor.poll(handle).state is ReplicaState.RUNNING
    assert marker.read_text() == "x"


def test_a_helper_that_outlived_its_replica_is_not_adopted(executor, tmp_path):
    """The replica is gone, its launcher too, and a process that it had started still has its environment."""
    marker, helper = tmp_path / "marker", "import time; time.sleep(600)"
    code = (
        f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {helper!r}]); "
        f"open({str(marker)!r}, 'w').write(str(os.getpid()))"
    )
    with pytest.raises(BrokenProcessPool):
        in_processes(launch_and_die, (str(tmp_path / "executor"), str(tmp_path / "unused"), code))
    until(lambda: marker.exists() and marker.read_text(), "the replica has started its helper")
    replica = int(marker.read_text())
    until(lambda: is_gone(replica), "the replica ends")
    handle = executor.launch(request("print('launched anew')"))
    ended(executor, handle)
    os.killpg(replica, signal.SIGKILL)  # the helper, which is of the replica's group and ran all along
    assert "launched anew" in list(executor.logs(handle))


# -- watching from anywhere -------------------------------------------------------------------------------------------


def test_a_handle_is_plain_json_that_any_process_can_use(executor, tmp_path):
    handle = executor.launch(request(WAIT_FOR_EVER, secrets={"API_KEY": "hunter2-hunter2"}, env={"COLOUR": "blue"}))
    ready(executor, handle)
    text = json.dumps(handle.to_json())
    assert "hunter2" not in text
    elsewhere = ReplicaHandle.from_json(json.loads(text))
    assert elsewhere == handle
    other = LocalProcessExecutor(tmp_path / "executor", grace_s=0.3)
    assert other.poll(elsewhere).state is ReplicaState.RUNNING
    other.cancel(elsewhere)
    assert ended(other, elsewhere).state is ReplicaState.CANCELLED


def test_handles_of_another_schema_or_with_missing_parts_are_refused(executor):
    body = executor.launch(request("pass")).to_json()
    with pytest.raises(ExecutorError, match="has schema 2, this version reads 1"):
        ReplicaHandle.from_json({**body, "schema": 2})
    del body["native_id"]
    with pytest.raises(ExecutorError, match="this handle is damaged"):
        ReplicaHandle.from_json(body)


def test_the_pid_in_the_handle_is_the_process_itself(executor):
    handle = executor.launch(request("import os; print(os.getpid())"))
    ended(executor, handle)
    assert list(executor.logs(handle)) == [str(handle.native["pid"])]


def test_kill_9_is_seen_and_named(executor):
    handle = executor.launch(request(WAIT_FOR_EVER))
    ready(executor, handle)
    os.kill(handle.native["pid"], signal.SIGKILL)
    status = ended(executor, handle)
    assert (status.state, status.exit_code) == (ReplicaState.FAILED, -9) and "SIGKILL" in status.message


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (0, ReplicaState.SUCCEEDED, "exit"),
        (1, ReplicaState.FAILED, "exit"),
        (75, ReplicaState.PREEMPTED, "exit"),
        (76, ReplicaState.FAILED, "superseded"),
        (78, ReplicaState.FAILED, "permanent"),
        (99, ReplicaState.FAILED, "exit"),
    ],
)
def test_exit_codes_become_states(executor, code, state, reason):
    status = ended(executor, executor.launch(request(f"raise SystemExit({code})")))
    assert (status.state, status.reason, status.exit_code) == (state, reason, code)


_FOREIGN_LAUNCHER = """
import sys
from executors import LaunchRequest, LocalProcessExecutor
executor = LocalProcessExecutor(sys.argv[1])
executor.launch(LaunchRequest("run", 0, 1, ["python", "-c", sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("code", "state", "exit_code"),
    [
        ("print('DILOCO_EXIT {\"code\": 0}')", ReplicaState.SUCCEEDED, 0),
        ("print('DILOCO_EXIT {\"code\": 75}')", ReplicaState.PREEMPTED, 75),
        ("import os; os.kill(os.getpid(), 9)", ReplicaState.FAILED, None),
        ("print('DILOCO_EXIT {}')", ReplicaState.FAILED, None),
    ],
)
def test_a_process_that_nobody_reaped_is_judged_by_its_last_line(executor, tmp_path, code, state, exit_code):
    """Its launcher is gone, so the system keeps no exit code for anybody."""
    subprocess.run([sys.executable, "-c", _FOREIGN_LAUNCHER, str(tmp_path / "executor"), code], check=True)
    (handle,) = executor.find("run")
    status = ended(executor, handle)
    assert (status.state, status.exit_code) == (state, exit_code)


def test_a_later_process_with_the_same_pid_is_a_stranger(executor):
    mine = executor.launch(request(WAIT_FOR_EVER))
    native = {**mine.native, "start_ticks": mine.native["start_ticks"] - 1}
    stranger = replace(mine, native=native)
    assert executor.poll(stranger).state.ended
    executor.cancel(stranger)
    assert executor.poll(mine).state is ReplicaState.RUNNING
    after_reboot = replace(mine, native={**mine.native, "boot_id": "another boot"})
    assert executor.poll(after_reboot).state.ended


def test_a_name_that_is_no_text_hides_no_process(executor):
    renamed = f"import ctypes; ctypes.CDLL(None).prctl(15, b'r\\xc3'); {WAIT_FOR_EVER}"
    handle = executor.launch(request(code=renamed))
    ready(executor, handle)
    assert executor.poll(handle).state is ReplicaState.RUNNING
    os.killpg(handle.native["pid"], signal.SIGRTMIN + 1)
    assert ended(executor, handle).message == f"killed by signal {signal.SIGRTMIN + 1}"


def test_a_process_of_another_host_is_unknown_not_failed(executor):
    handle = executor.launch(request("pass"))
    away = replace(handle, native={**handle.native, "host": "elsewhere"})
    assert executor.poll(away).state is ReplicaState.UNKNOWN
    with pytest.raises(ExecutorError, match="runs on elsewhere"):
        executor.cancel(away)


# -- ending ------------------------------------------------------------------------------------------------------------


def test_cancel_asks_first_and_may_be_repeated(tmp_path):
    executor = LocalProcessExecutor(tmp_path / "executor", grace_s=PATIENCE_S)  # it leaves by itself, however slowly
    code = "import signal, sys, threading\nsignal.signal(15, lambda *_: sys.exit(75))\n" + WAIT_FOR_EVER
    handle = executor.launch(request(code))
    ready(executor, handle)
    executor.cancel(handle)
    executor.cancel(handle)
    assert ended(executor, handle).state is ReplicaState.CANCELLED
    executor.cancel(handle)
    assert executor.poll(handle).exit_code == 75


def test_who_does_not_listen_is_killed_after_the_grace(executor):
    handles = executor.launch_replicas(1, "entrypoints:print_and_wait", {"stubborn": True})
    ready(executor, handles[0])
    executor.cancel(handles[0])
    status = ended(executor, handles[0])
    assert (status.state, status.exit_code) == (ReplicaState.CANCELLED, -9)


def test_cancelling_ends_the_children_of_the_process_too(executor):
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    handle = executor.launch(request(code + "print(p.pid, flush=True); print('ready', flush=True); p.wait()"))
    ready(executor, handle)
    child = int(next(iter(executor.logs(handle))))
    executor.cancel(handle)
    ended(executor, handle)
    until(lambda: is_zombie(child) or is_gone(child), "the child dies")


def test_a_deadline_ends_the_process(executor):
    handle = executor.launch(request(WAIT_FOR_EVER, timeout_s=0.2))
    status = ended(executor, handle)
    assert (status.state, status.reason) == (ReplicaState.TIMED_OUT, "deadline")


def test_a_process_that_had_finished_is_a_success_even_when_cancelled_late(executor):
    handle = executor.launch(request("print('done')"))
    until(lambda: is_zombie(handle.native["pid"]), "the process ends, unreaped")
    executor.cancel(handle)
    assert ended(executor, handle).state is ReplicaState.SUCCEEDED


def test_replicas_outlive_their_launcher_and_ctrl_c_is_not_theirs(executor, tmp_path):
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it\n"
        f"{_FOREIGN_LAUNCHER}print('launched', flush=True)\nsignal.pause()\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "executor"), WAIT_FOR_EVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert launcher.stdout is not None and launcher.stdout.readline()
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.wait()
    launcher.stdout.close()
    (handle,) = executor.find("run")
    ready(executor, handle)
    assert executor.poll(handle).state is ReplicaState.RUNNING


# -- logs, plan, find --------------------------------------------------------------------------------------------------


def test_logs_are_there_while_it_runs_and_after(executor):
    handles = executor.launch_replicas(1, "entrypoints:chatter", {"lines": 100})
    followed = list(executor.logs(handles[0], follow=True))
    assert [line for line in followed if line.startswith("line ")] == [f"line {i}" for i in range(100)]
    assert list(executor.logs(handles[0])) == followed
    lines = [line for line in executor.logs(handles[0], tail=3) if line]
    assert lines[-1].startswith("DILOCO_EXIT ") and lines[:-1] == ["line 98", "line 99"]
    assert list(executor.logs(handles[0], tail=0)) == []


def test_what_is_written_until_an_attempt_is_found_to_have_ended_is_followed_too(tmp_path):
    folder = AttemptFolder(tmp_path)

    def has_ended() -> bool:
        with folder.output.open("a") as output:
            output.write("its last\nline")
        return True

    assert list(folder.logs(True, None, has_ended, lambda: None)) == ["its last", "line"]


def test_a_result_of_any_length_comes_back(executor):
    handles = executor.launch_replicas(1, "entrypoints:of_length", {"length": 10**6})
    assert [len(each.value) for each in executor.collect(handles)] == [10**6]


def test_a_line_that_is_being_written_is_followed_whole(tmp_path):
    folder, polls = AttemptFolder(tmp_path), iter([False, True])
    folder.output.write_text("first\nsec")

    def pause() -> None:
        with folder.output.open("a") as output:
            output.write("ond\n")

    assert list(folder.logs(True, 5, lambda: next(polls), pause)) == ["first", "second"]


def test_each_state_of_a_progress_bar_is_a_line_of_the_log_however_it_is_read(tmp_path):
    folder, shown = AttemptFolder(tmp_path), ["begins", " 50 %", "100 %", "ends"]
    folder.output.write_bytes(b"begins\n 50 %\r100 %\r\nends")
    ways = [(False, None), (True, None), (False, 9), (True, 9)]
    for follow, tail in ways:
        assert list(folder.logs(follow, tail, lambda: True, lambda: None)) == shown


def test_a_plan_shows_what_would_be_sent_and_no_secret(executor, tmp_path):
    plan = executor.plan(request("pass", env={"A": "1"}, secrets={"API_KEY": "hunter2-hunter2"}, timeout_s=5.0))
    assert plan["command"] == [sys.executable, "-c", "pass"]
    assert plan["env"]["A"] == "1" and plan["env"]["API_KEY"] == "<redacted>"
    assert "hunter2" not in repr(plan) + repr(request("pass", secrets={"API_KEY": "hunter2-hunter2"}))
    assert not (tmp_path / "executor").exists()


def test_secrets_reach_the_process_by_environment(executor):
    handle = executor.launch(request("import os; print(os.environ['API_KEY'])", secrets={"API_KEY": "s3cret"}))
    ended(executor, handle)
    assert list(executor.logs(handle)) == ["s3cret"]


def test_find_lists_every_attempt_of_a_run_in_order(executor):
    for replica_id, attempt in ((10, 1), (2, 2), (2, 1), (2, 10)):
        executor.launch(request("pass", replica_id=replica_id, attempt=attempt))
    executor.launch(request("pass", run_id="another"))
    assert [(h.replica_id, h.attempt) for h in executor.find("run")] == [(2, 1), (2, 2), (2, 10), (10, 1)]
    assert executor.find("unheard of") == []


def test_forget_removes_what_has_ended_only(executor, tmp_path):
    alive = executor.launch(request(WAIT_FOR_EVER))
    with pytest.raises(ExecutorError, match=r"replicas \[0\] of run still run"):
        executor.forget("run")
    executor.cancel(alive)
    ended(executor, alive)
    executor.forget("run")
    assert executor.find("run") == []


def test_a_users_module_shadows_nothing_of_ours(executor, tmp_path, monkeypatch):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "executors.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "user" / "my_module.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    handles = executor.launch_replicas(1, "my_module:answer", {})
    assert executor.collect(handles)[0].value == 42


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path):
    """Such as on a full disk, where an attempt's end is tried again with every poll."""
    folder, (soft, hard) = AttemptFolder(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.write_exit_code(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    folder.write_exit_code(1)
    assert folder.ended_status().exit_code == 1
