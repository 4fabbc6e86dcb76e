"""The connections over which rank 0 of a replica signals the others."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from patience import PATIENCE_S

from diloco_orchestrator.replica.training.signal_lines import SignalLines

RANKS = 3


def _everyone(rank: int, barrier: threading.Barrier, said: dict[int, Any]) -> Callable[[Any], list[Any]]:
    """What `Ranks.everyone` does, for ranks that are threads."""

    def everyone(value: Any) -> list[Any]:
        said[rank] = value
        barrier.wait(10)
        found = [said[each] for each in range(RANKS)]
        barrier.wait(10)
        return found

    return everyone


def _joined(everyone: Callable[[int], Callable[[Any], list[Any]]], host: str = "127.0.0.1") -> list[SignalLines]:
    with ThreadPoolExecutor(RANKS) as pool:
        made = [pool.submit(SignalLines.joined, rank, RANKS, host, everyone(rank)) for rank in range(RANKS)]
        return [each.result(PATIENCE_S) for each in made]


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[list[SignalLines]]:
    """Parametrized by the host of rank 0, where that is not 127.0.0.1."""
    barrier, said = threading.Barrier(RANKS), {}
    joined = _joined(lambda rank: _everyone(rank, barrier, said), getattr(request, "param", "127.0.0.1"))
    yield joined
    for each in joined:
        each.close()


@pytest.mark.parametrize("lines", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::"], indirect=True)
def test_every_rank_receives_every_message_of_any_length_in_order(lines: list[SignalLines]):
    def sent() -> None:
        for number in range(50):
            lines[0].send(bytes([number]) * number)

    with ThreadPoolExecutor(RANKS) as pool:
        sending = pool.submit(sent)
        received = [pool.submit(lambda each: [each.receive() for _ in range(50)], each) for each in lines[1:]]
        assert [each.result(10) for each in received] == [[bytes([number]) * number for number in range(50)]] * 2
        sending.result(10)


def test_rank_0_is_one_message_ahead_of_the_slowest_rank_and_no_more(lines: list[SignalLines]):
    lines[0].send(b"1")  # nobody has to receive it yet
    second_is_sent = threading.Event()

    def second() -> None:
        lines[0].send(b"2")
        second_is_sent.set()

    sending = threading.Thread(target=second)
    sending.start()
    assert lines[1].receive() == b"1"
    assert not second_is_sent.wait(0.1), "rank 2 has not received the first"
    assert lines[2].receive() == b"1"
    assert second_is_sent.wait(10)
    sending.join()


def test_a_rank_that_has_ended_ends_the_wait_of_the_others(lines: list[SignalLines]):
    lines[0].send(b"1")
    assert lines[2].receive() == b"1"
    lines[1].close()
    with pytest.raises(RuntimeError, match="Connection closed by peer: another rank"):
        lines[0].send(b"2")
    lines[0].close()
    with pytest.raises(RuntimeError, match="Connection closed by peer: another rank"):
        lines[2].receive()


@pytest.mark.parametrize(
    "said",
    [
        b"\0\0\0\5hello",
        b"GET / HTTP/1.1\r\n\r\n",
        pytest.param(b"", marks=pytest.mark.slow, id="nothing, and stays"),
    ],
)
def test_a_process_without_the_key_is_no_rank(said: bytes):
    barrier, known = threading.Barrier(RANKS), threading.Event()
    ports: dict[int, Any] = {}
    strangers: list[socket.socket] = []

    def stranger_first(rank: int) -> Callable[[Any], list[Any]]:
        everyone = _everyone(rank, barrier, ports)

        def called(value: Any) -> list[Any]:
            found = everyone(value)
            if rank == 1:
                strangers.append(socket.create_connection(("127.0.0.1", found[0][0]), timeout=10))
                strangers[0].sendall(said)
                known.set()
            elif rank == 2:
                known.wait(10)
            return found

        return called

    lines = _joined(stranger_first)
    lines[0].send(b"1")
    assert [each.receive() for each in lines[1:]] == [b"1", b"1"]
    for each in [*lines, *strangers]:
        each.close()
