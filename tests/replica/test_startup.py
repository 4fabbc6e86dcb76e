"""The start of a replica's process: what is imported when, and in which order its first requests come."""

import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_orchestrator.clock import ManualClock, NoBackground, SystemClock, ThreadBackground
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import StoreFull, StoreUnavailable
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, Intent
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import (
    ENV_STORAGE_OPTIONS,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
)
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Result, Run
from diloco_orchestrator.run_log.append import create_run, request_halt
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from replica.attempt.attempt import claim_attempt
from replica.process.run_attempt import (
    Ending,
    OutputTail,
    load_training_libraries,
    run_attempt,
    train,
    write_exit_record,
)

STAMP = Stamp("founder", lambda: 0.0)


def new_run(folder: Path, **settings: Any) -> RunLog:
    config = make_config({"entrypoint": "m:f", "replicas": 1, "rounds": 1, **settings})
    run = Run(**STAMP(), run_id="run-1", config=config, package_version="0")
    log = create_run(open_store(str(folder)), run, "test", STAMP)
    intent = Intent(**STAMP(), replica_id=0, attempt=1, leg=1, executor="test", why="test")
    log.store.create(keys.intent(0, 1), intent.to_bytes())
    return log


def attempt(
    folder: Path, load_libraries: Callable[[], None], dump_stacks_after: Callable[[float], None] = lambda _: None
) -> int:
    def load_entrypoint(_: str) -> Callable[[object], None]:
        raise AssertionError("nobody should have come this far")

    return run_attempt(
        str(folder),
        0,
        1,
        Launched(RunLog(open_store(str(folder))).run_sha256),
        clock=SystemClock(),
        background=ThreadBackground(),
        environ={},
        load_libraries=load_libraries,
        load_entrypoint=load_entrypoint,
        dump_stacks_after=dump_stacks_after,
    ).code


def test_an_attempt_is_claimed_while_libraries_are_loaded(tmp_path: Path):
    """Loading ends only once the claim is there: an attempt that loaded first would wait for ever."""
    log = new_run(tmp_path)
    request_halt(log, "test", "enough", STAMP)
    result = Result(**STAMP(), leg=1, status="halted", round=0, outer_steps=0, reason="enough")
    log.store.create(keys.result(1), result.to_bytes())

    def load() -> None:
        while AttemptRecords(log.store).newest_claim(0) == 0:
            pass

    assert attempt(tmp_path, load) == EXIT_DONE


def test_stacks_are_to_be_printed_where_half_of_the_time_until_a_replica_counts_as_hung_passes_without_heartbeat(
    tmp_path,
):
    asked: list[float] = []

    def load() -> None:
        while not asked:
            pass
        raise ImportError("enough")

    new_run(tmp_path)
    assert attempt(tmp_path, load, asked.append) == EXIT_ERROR and set(asked) == {90.0}


def test_libraries_that_cannot_be_loaded_are_in_the_exit_record(tmp_path: Path):
    log = new_run(tmp_path)

    def load() -> None:
        raise ImportError("libtorch_cpu.so: cannot open shared object file")

    assert attempt(tmp_path, load) == EXIT_ERROR
    ended = Exit.from_bytes(log.store.get(keys.exit_record(0, 1)), "")
    assert ended.reason == "ImportError" and "libtorch_cpu.so" in (ended.error or "")


@pytest.mark.parametrize(
    ("of_run", "given", "trained"),
    [([1, 2], None, 1), (1, 1, 1), (1, None, None)],
    ids=["of a run of ranks", "told", "alone"],
)
def test_a_replica_of_one_rank_trains_in_a_process_group_where_the_run_or_its_command_is_of_ranks(
    tmp_path: Path, of_run: Any, given: int | None, trained: int | None
):
    """A training function that shards its model found no group there."""
    log, found = new_run(tmp_path, replicas=2, ranks_per_replica=of_run), list[int]()

    def train_in_ranks(_: object, ranks: int) -> Ending:
        found.append(ranks)
        return Ending(EXIT_ERROR, "enough")

    run_attempt(
        str(tmp_path),
        0,
        1,
        Launched(log.run_sha256),
        clock=SystemClock(),
        background=ThreadBackground(),
        environ={},
        load_libraries=lambda: None,
        load_entrypoint=lambda _: lambda __: None,
        ranks=given,
        train_in_ranks=train_in_ranks,
    )
    assert found == ([] if trained is None else [trained])


def test_a_store_that_cannot_be_opened_is_permanent_and_one_line(capfd: pytest.CaptureFixture[str]):
    """Its credentials and settings would be the same in another attempt."""
    options = json.dumps({"keey": "x"})
    ended = run_attempt(
        "s3://bucket/run",
        0,
        1,
        Launched("0" * 64),
        clock=SystemClock(),
        background=ThreadBackground(),
        environ={ENV_STORAGE_OPTIONS: options},
        load_libraries=lambda: None,
        load_entrypoint=lambda _: lambda __: None,
    )
    assert ended.code == EXIT_PERMANENT and "did you mean 'key'?" in ended.unrecorded
    assert capfd.readouterr().err.strip() == ended.unrecorded


def test_the_error_is_in_the_exit_line_where_the_store_takes_no_record(small_disk: Path):
    new_run(small_disk / "bucket")

    def train_until_the_disk_fails(_: object) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        raise RuntimeError("the workload's own error")

    ended = run_attempt(
        str(small_disk / "bucket"),
        0,
        1,
        Launched(RunLog(open_store(str(small_disk / "bucket"))).run_sha256),
        clock=ManualClock(),
        background=NoBackground(),
        environ={},
        load_libraries=lambda: None,
        load_entrypoint=lambda _: train_until_the_disk_fails,
    )
    assert ended.code == EXIT_ERROR
    assert "RuntimeError: the workload's own error No exit record: StoreFull: cannot create" in ended.unrecorded
    assert "The file system is read-only" in ended.unrecorded and "Tried" in ended.unrecorded


@pytest.mark.parametrize(
    ("ends", "code"),
    [(lambda: None, 0), (sys.exit, 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("no"), 1), (lambda: 1 / 0, 1)],
)
def test_a_process_forked_by_the_training_function_ends_without_a_record(tmp_path: Path, ends: Callable, code: int):
    log, this = new_run(tmp_path), os.getpid()

    def fork(_: object) -> None:
        if (child := os.fork()) == 0:
            return ends()
        status = os.waitpid(child, 0)[1]
        assert AttemptRecords(log.store).exit(0, 1) is None
        raise RuntimeError(f"the child ended with {os.waitstatus_to_exitcode(status)}")

    try:
        ended = run_attempt(
            str(tmp_path),
            0,
            1,
            Launched(log.run_sha256),
            clock=ManualClock(),
            background=NoBackground(),
            environ={},
            load_libraries=lambda: None,
            load_entrypoint=lambda _: fork,
        )
    finally:
        if os.getpid() != this:
            os._exit(99)
    assert ended.code == EXIT_ERROR and f"the child ended with {code}\n" in (ended.error or "")


def test_an_attempt_whose_end_cannot_be_recorded_says_it_in_its_exit_line():
    """The coordinator reads that line where there is no record; it would know an exit code alone."""

    class Full(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            if key.endswith(("log.txt", "exit.json")):
                raise StoreFull(f"no room left for {key}.")
            return super().create(key, data)

    store = Full()
    config = make_config({"entrypoint": "m:f", "replicas": 1, "rounds": 1})
    create_run(store, Run(**STAMP(), run_id="run-1", config=config, package_version="0"), "test", STAMP)
    full = Ending(
        EXIT_PERMANENT, "permanent", "Traceback\n  File x\ndiloco_orchestrator.errors.StoreFull: the disk is full."
    )
    claimed = claim_attempt(store, 0, None, SystemClock(), STAMP)
    line = write_exit_record(claimed, full, "", {})
    assert line.startswith("permanent: StoreFull: the disk is full. No exit record: StoreFull: no room left for ")
    assert write_exit_record(claimed, Ending(EXIT_DONE, "the run ended"), "", {}) == ""


def test_the_process_imports_no_torch_before_it_can_claim_and_all_of_training_before_the_users_code():
    code = (
        "import gc, sys\n"
        "import diloco_orchestrator.replica.__main__\n"
        "assert 'torch' not in sys.modules\n"
        "from diloco_orchestrator.replica.process.run_attempt import load_training_libraries\n"
        "load_training_libraries({})\n"
        "assert {'torch', 'diloco_orchestrator.replica.training.session'} <= set(sys.modules)\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_loading_leaves_the_garbage_collector_on():
    load_training_libraries({})
    gc.unfreeze()
    assert gc.isenabled()


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__("counting")
        self.read: list[str] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.read.append(key)
        return super().get(key, start, end)


def test_a_launcher_reads_nothing_that_it_has_just_created():
    store = Counting()
    config = make_config({"entrypoint": "m:f", "replicas": 1, "rounds": 1})
    run = Run(**STAMP(), run_id="run-1", config=config, package_version="0")
    log = create_run(store, run, "test", STAMP)
    assert log.newest_begin().record.leg == 1 and store.read == []
    again = RunLog(store)
    assert (again.run, again.run_sha256, again.begin(1)) == (log.run, log.run_sha256, log.begin(1))


@pytest.mark.parametrize(("leaves", "code"), [(True, EXIT_PREEMPTED), (False, EXIT_ERROR)])
def test_who_is_asked_to_leave_while_the_store_is_away_was_preempted(tmp_path: Path, leaves: bool, code: int):
    """It can publish nothing, which is no error of its own."""
    claimed = claim_attempt(new_run(tmp_path).store, 0, 1, SystemClock(), STAMP, lambda: leaves, ThreadBackground())

    def entrypoint(_: object) -> None:
        raise StoreUnavailable("no route to host.")

    assert train(claimed, lambda _: entrypoint).code == code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_what_a_full_disk_under_the_output_does_not_take_is_in_the_tail_and_ends_no_training(monkeypatch):
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with (output := OutputTail()):
            print("step 1")
            print("step 2", flush=True)
        monkeypatch.undo()
    assert output.text() == "step 1\nstep 2\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_an_attempt_keeps_its_exit_code_though_its_last_line_cannot_be_printed():
    code = (
        "from diloco_orchestrator.executors.process_contract import print_exit_line\n"
        "from diloco_orchestrator.replica.__main__ import _leave\n"
        "print_exit_line(75)\n"
        "_leave(75)\n"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (75, b"")
