"""Ranks of one replica on several machines: how these find each other, die together, and pass on what ranks say."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import Preempted
from diloco_orchestrator.protocol.process import (
    ENV_MACHINE,
    ENV_MACHINES,
    ENV_MEETING,
    ENV_MEETING_KEY,
    EXIT_DONE,
    EXIT_PREEMPTED,
)
from diloco_orchestrator.replica.attempt.heartbeat import Pulse
from diloco_orchestrator.replica.process.machines import (
    Link,
    MachinePlace,
    interface_of,
    other_machines,
    serve_machine_0,
)
from diloco_orchestrator.replica.process.rank_children import RankProgram
from diloco_orchestrator.replica.process.rank_processes import RankProcesses
from diloco_orchestrator.replica.process.run_attempt import Ending

KEY = "key-of-the-attempt"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def places(count: int, host: str = "127.0.0.1") -> list[MachinePlace]:
    port = free_port()
    return [MachinePlace(number, count, host, port, KEY) for number in range(count)]


def hello(place: MachinePlace, text: bytes) -> socket.socket:
    connection = _connect(place)
    connection.sendall(text)
    return connection


def _connect(place: MachinePlace) -> socket.socket:
    while True:
        try:
            return socket.create_connection((place.host, place.port), timeout=10)
        except ConnectionRefusedError:
            continue


def test_the_place_of_a_machine_is_read_from_its_environment():
    environ = {ENV_MACHINES: "2", ENV_MACHINE: "1", ENV_MEETING: "fd00::1:29500", ENV_MEETING_KEY: KEY}
    assert MachinePlace.of(environ) == MachinePlace(1, 2, "fd00::1", 29500, KEY)
    assert KEY not in repr(MachinePlace.of(environ))
    assert MachinePlace.of({}) is None and MachinePlace.of({ENV_MACHINES: "1"}) is None


def test_machines_come_in_any_order_and_strangers_are_left_out():
    place = places(3)[0]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(other_machines, place, SystemClock(), lambda: False)
        scanner = hello(place, b"GET / HTTP/1.1\r\n\r\n")
        silent = _connect(place)
        liar = hello(place, b'{"machine": 1, "key": "guessed"}\n')
        odd = [
            hello(place, text + b"\n")
            for text in (b'{"key": "\\u00e9"}', b'{"key": "\\ud800"}', b"\xff", b"[" * 4000, b"null", b'"key"')
        ]
        second = hello(place, b'{"machine": 2, "key": "key-of-')
        first = hello(place, b'{"machine": 1, "key": "key-of-the-attempt"}\n')
        second.sendall(b'the-attempt"}\n')
        found = waiting.result(timeout=10)
        assert liar.recv(1) == scanner.recv(1) == b"" and [each.recv(1) for each in odd] == [b""] * len(odd)
        for number, connection in enumerate((first, second)):
            found[number].send({"it": number})
            assert connection.recv(100) == b'{"it": %d}\n' % number
    for each in (scanner, silent, liar, second, first, *odd):
        each.close()


def test_a_machine_that_is_asked_to_leave_before_the_others_are_there_claims_nothing():
    first, second = places(2)
    answers = iter([False, True])  # the first is asked for before the machine listens
    with pytest.raises(Preempted, match=r"while 1 of the replica's 2 machines ran"):
        other_machines(first, SystemClock(), lambda: next(answers))
    assert serve_machine_0(second, RankProgram([], {}), SystemClock(), lambda: True) == EXIT_PREEMPTED


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == interface_of("127.0.3.4") == interface_of("::1") == "lo"
    assert interface_of("203.0.113.9") == interface_of("2001:db8::9") == interface_of("fe80::9%lo") == ""


@contextmanager
def island(
    folder: Path, *do: str, others: int = 1, host: str = "127.0.0.1"
) -> Iterator[tuple[RankProcesses, SimpleNamespace, Any]]:
    """The judge of an island of two ranks a machine, what it is asked to do, and the futures of the other machines."""
    first, *rest = places(1 + others, host)
    environ = {"OMP_NUM_THREADS": "2", ENV_MEETING_KEY: KEY}
    program = RankProgram(["--folder", str(folder), *do], environ, "rank_program")
    notices = SimpleNamespace(here=False, there=False)
    ranks, serving = 2 * (1 + others), list[Future[int]]()
    config = RunConfig(entrypoint="any:function", replicas=1, rounds=1, sync_every=1, ranks_per_replica=ranks)
    begin, pulse = SimpleNamespace(leg=1), Pulse()

    def should_leave() -> bool:
        return pulse.vacated or notices.here

    known = {"begin": begin, "claim_sha256": "", "pulse": pulse, "should_leave": should_leave}
    attempt: Any = SimpleNamespace(config=config, replica_id=0, **known)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(other_machines, first, SystemClock(), lambda: False)
        _connect(first).close()  # it listens
        there = program, SystemClock(), lambda: notices.there
        serving.extend(threads.submit(serve_machine_0, each, *there) for each in rest)
        links = waiting.result(timeout=10)
        judge = RankProcesses(attempt, ranks, program, SystemClock(), links)
        yield judge, notices, (serving, links, pulse)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_of_two_machines_run_and_end_as_one_island(tmp_path: Path, capfd: pytest.CaptureFixture[str], host: str):
    with island(tmp_path, "--do", '{"3": "end"}', host=host) as (judge, _, (serving, _, pulse)):
        assert judge.run() == Ending(0, "done")
        assert [each.result(timeout=10) for each in serving] == [EXIT_DONE]
    assert pulse.round == 7  # of rank 0
    printed = sorted(line for line in capfd.readouterr().err.splitlines() if line.startswith("[rank"))
    assert printed == [
        f"[rank {rank}] RANK={rank} LOCAL_RANK={rank % 2} LOCAL_WORLD_SIZE=2 DILOCO_MEETING_KEY=None own group"
        for rank in range(4)
    ]


def test_a_notice_to_any_machine_reaches_rank_0(tmp_path: Path):
    with island(tmp_path) as (judge, notices, (serving, _, _)):
        notify = threading.Thread(target=_when, args=(lambda: (tmp_path / "ready-3").exists(), notices))
        notify.start()
        assert judge.run() == Ending(75, "preempted")
        assert serving[0].result(timeout=10) == EXIT_DONE
        notify.join()


def test_ranks_of_an_id_that_is_vacated_leave_by_themselves(tmp_path: Path):
    with island(tmp_path) as (judge, _, (_, _, pulse)):
        vacating = threading.Thread(
            target=_when, args=(lambda: pulse.round == 7 and (tmp_path / "ready-3").exists(), pulse, "vacated")
        )
        vacating.start()
        assert judge.run() == Ending(75, "preempted") and pulse.vacated  # by which the attempt's end is told
        vacating.join()


def _when(happened: Callable[[], bool], told: Any, what: str = "there") -> None:
    while not happened():
        time.sleep(0.01)
    setattr(told, what, True)


@pytest.mark.slow
def test_a_rank_that_dies_on_another_machine_is_named_and_all_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with island(tmp_path, "--do", '{"3": "die"}') as (judge, _, (serving, _, _)):
        assert judge.run().reason.startswith("rank 3 of 4 was killed by signal 9")
        assert serving[0].result(timeout=10) == EXIT_DONE
    printed = capfd.readouterr().err
    assert [f"[rank {rank}] my stacks" in printed for rank in range(4)] == [True, True, True, False]


@pytest.mark.slow
def test_a_machine_that_is_lost_is_named_with_its_first_rank(tmp_path: Path):
    with island(tmp_path, others=2) as (judge, _, (serving, links, _)):
        cut = threading.Thread(target=_cut, args=(tmp_path, links[1]))
        cut.start()
        found = judge.run()
        cut.join()
        assert found.code == 1
        assert found.reason == (
            "rank 4 of 6 was lost with machine 2 of this replica, whose connection to machine 0 has ended"
        )
        assert [each.result(timeout=10) for each in serving] == [EXIT_DONE, EXIT_DONE]


def _cut(folder: Path, link: Link) -> None:
    """What both sides see when the network between them, or a machine, is gone."""
    while len(list(folder.glob("ready-*"))) < 6:
        time.sleep(0.01)
    link._connection.shutdown(socket.SHUT_RDWR)
