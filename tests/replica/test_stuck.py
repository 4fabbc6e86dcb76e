"""A training thread that is stuck is told from one that computes, downloads, takes steps, or waits for this package."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from protocol_fleet import Fleet

from diloco_orchestrator.clock import ManualClock, ThreadBackground
from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, fault_in
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.replica.attempt.heartbeat import Pulse
from diloco_orchestrator.replica.process.stuck import PHASES_OF_RANK_0, STUCK, StuckWatch, stuck_before
from diloco_orchestrator.replica.process.work import Work, WorkMeter
from diloco_orchestrator.store.fsspec_engine import FsspecEngine

STAMP = Stamp("replica", lambda: 0.0)
HALF_AN_HOUR = 60  # samples, thirty seconds apart


def waits_for_ever(opened: threading.Event) -> None:
    opened.wait()


class Replica:
    """A real thread that waits in `function`, seen by a watch on a clock that is moved by hand."""

    def __init__(self, function: Callable[[threading.Event], None]) -> None:
        self.opened, begun = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: (begun.set(), function(self.opened)))
        self.thread.start()
        begun.wait()
        self.clock, self.pulse, self.work = ManualClock(), Pulse(phase="training", round=3, inner_step=7), Work()
        config = make_config({"entrypoint": "m:f"})
        self.watch = StuckWatch(self.pulse, config, self.clock, self.thread.ident or 0, lambda: self.work)
        self.watch.stack()

    def after(self, samples: int, between: Callable[[int], None] = lambda _: None) -> str | None:
        for number in range(samples):
            between(number)
            self.clock.sleep(30.0)
            if stack := self.watch.stack():
                return stack
        return None


@pytest.fixture
def waiting() -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(function: Callable[[threading.Event], None] = waits_for_ever) -> Replica:
        made.append(Replica(function))
        return made[-1]

    yield make
    for each in made:
        each.opened.set()
        each.thread.join()


def test_half_an_hour_without_a_step_cpu_time_or_a_byte_ends_in_a_traceback_of_the_thread(waiting):
    replica = waiting()
    assert replica.after(HALF_AN_HOUR - 1) is None
    error = replica.after(1)
    assert "in waits_for_ever" in error and "opened.wait()" in error and "TrainingStuck: no step for 1800 s" in error
    ended = Exit(**STAMP(), replica_id=0, attempt=1, code=1, reason="TrainingStuck", round=2, error=error)
    assert fault_in(ended) == ""  # a server that never answered may answer the next attempt


def test_before_its_first_step_an_attempt_has_twice_as_long_for_each_that_ended_so_before_it(waiting):
    replica = waiting()
    replica.watch._stuck_before, replica.pulse.inner_step, replica.watch._stepped = lambda: 2, 0, False
    assert replica.after(4 * HALF_AN_HOUR - 1) is None and "no step for 7200 s" in replica.after(2)


def test_an_attempt_that_takes_steps_has_half_an_hour_whatever_those_before_it_had(waiting):
    replica = waiting()
    replica.watch._stuck_before = lambda: 2
    assert replica.after(HALF_AN_HOUR) is not None


def test_steps_that_wait_for_long_and_go_on_make_a_longer_limit(waiting):
    replica = waiting()
    assert replica.after(50) is None
    replica.pulse.inner_step += 1
    assert replica.after(101) is None and "no step for 3060 s" in replica.after(2)


@pytest.mark.parametrize(("reasons", "count"), [(["stuck", "stuck"], 2), (["stuck", "other"], 0), (["stuck"] * 5, 3)])
def test_attempts_that_were_stuck_are_counted_from_the_newest_until_one_that_was_not(reasons, count):
    fleet = Fleet(replicas=1)
    attempt = fleet.join(0, len(reasons) + 1)._attempt
    for number, reason in enumerate(reasons, 1):
        said = {"code": 1, "round": 0, "reason": f"rank 0 of 2: {STUCK}" if reason == "stuck" else "ValueError"}
        record = Exit(**STAMP(), replica_id=0, attempt=number, **said)
        fleet.store.create(keys.exit_record(0, number), record.to_bytes())
    assert stuck_before(attempt) == count


def step(replica: Replica, number: int) -> None:
    replica.pulse.inner_step += number % 50 == 0


def compute(replica: Replica, _: int) -> None:
    replica.work = Work(replica.work.cpu_s + 0.9, 0)


def lose_a_child(replica: Replica, number: int) -> None:
    replica.work = Work(100.0 - number // 50, 0)


def download(replica: Replica, _: int) -> None:
    replica.work = Work(0.0, replica.work.moved + 600_000)


def publish(replica: Replica, _: int) -> None:
    replica.pulse.phase = "publishing"


@pytest.mark.parametrize("happens", [step, compute, lose_a_child, download, publish])
def test_who_steps_computes_moves_bytes_or_publishes_is_not_stuck(waiting, happens):
    replica = waiting()
    assert replica.after(3 * HALF_AN_HOUR, lambda number: happens(replica, number)) is None


def test_heartbeats_and_polling_are_no_work(waiting):
    replica = waiting()

    def beat(_: int) -> None:
        replica.work = Work(replica.work.cpu_s + 0.3, replica.work.moved + 60_000)

    assert replica.after(HALF_AN_HOUR + 1, beat)


def test_a_child_that_ends_takes_what_it_has_moved_along_which_is_no_work(waiting):
    replica = waiting()

    def end(number: int) -> None:
        replica.work = Work(0.0, 20_000_000 - 300 * number)

    assert replica.after(HALF_AN_HOUR + 2, end)


def test_a_wait_of_this_package_has_limits_of_its_own(waiting):
    def call_us(opened: threading.Event) -> None:
        ThreadBackground().every(0.0, opened.wait)()

    assert waiting(call_us).after(2 * HALF_AN_HOUR) is None


def test_a_wait_for_the_run_s_store_is_one_whatever_library_it_is_in(waiting):
    """A store that takes heartbeats, and does not answer a listing: fsspec gives each call a quarter of an hour."""

    def read(opened: threading.Event) -> None:
        class Silent(MemoryFileSystem):
            def find(self, *_: Any, **__: Any) -> dict[str, Any]:
                opened.wait()
                return {}

        list(FsspecEngine(Silent(), "run", "fsspec+memory://run").list("contributions/"))

    assert waiting(read).after(2 * HALF_AN_HOUR) is None


def test_an_hour_in_which_the_machine_slept_counts_as_a_minute_and_a_half(waiting):
    replica = waiting()
    replica.clock.sleep(3600.0)
    assert replica.watch.stack() is None and replica.after(HALF_AN_HOUR - 4) is None and replica.after(1)


def test_work_that_cannot_be_read_is_no_proof(waiting):
    def refused() -> Work:
        raise psutil.AccessDenied

    replica = waiting()
    replica.watch._work = refused
    assert replica.after(2 * HALF_AN_HOUR) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count bytes of a connection")
def test_bytes_that_came_over_connections_are_work_also_once_these_are_closed():
    """They are not written anywhere where a library downloads into memory, by a connection for each request."""
    meter = WorkMeter()
    before = meter().moved
    for _ in range(3):
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as ours,
            server.accept()[0] as theirs,
        ):
            theirs.sendall(bytes(50_000))
            theirs.close()
            while ours.recv(1 << 16):
                pass
            meter()
    assert meter().moved - before >= 149_000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count bytes of a process")
def test_bytes_that_another_thread_reads_without_a_disk_are_work():
    """As from a bucket that is mounted; what the sampling thread reads are the system's files about processes."""

    def read() -> None:
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            zeros.read(10**6)

    meter = WorkMeter()
    before = meter().moved
    read()
    assert meter().moved - before < 500_000
    other = threading.Thread(target=read)
    other.start()
    other.join()
    assert meter().moved - before >= 990_000


def test_rank_0_may_wait_for_other_ranks_before_it_trains(waiting):
    replica = waiting()
    replica.watch._phases, replica.pulse.phase = PHASES_OF_RANK_0, "starting"
    assert replica.after(2 * HALF_AN_HOUR) is None
    replica.pulse.phase = "training"
    assert replica.after(HALF_AN_HOUR + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory has files on Linux")
def test_shared_memory_of_an_attempt_that_is_ended_is_freed():
    """By a child process of Python's own, which must outlive the attempt's for that."""
    code = (
        "from multiprocessing import shared_memory; from diloco_orchestrator.replica import __main__ as process\n"
        "print(shared_memory.SharedMemory(create=True, size=4096).name, flush=True); input()\n"
        "process._end(process.Ending(1, 'TrainingStuck'))"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        path = Path("/dev/shm", process.stdout.readline().decode().strip())
        assert path.exists()
        process.communicate(b"\n")  # until both processes have closed the pipes
    assert process.returncode == 1 and not path.exists()


def test_the_work_of_a_descendant_counts():
    code = "import sys; sum(range(5 * 10**6)); open('/dev/null', 'w').write('x' * 10**6); print(flush=True); input()"
    child = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"]
    meter = WorkMeter()
    before = meter()
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        after = meter()
        process.communicate(b"\n")
    assert after.cpu_s > before.cpu_s + 0.02
    if sys.platform == "linux":
        assert after.moved - before.moved > 10**6
