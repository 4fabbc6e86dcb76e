"""The connections over which rank 0 of a replica signals the others."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ranks_in_threads import Everyone, everyone_of, joined_lines

from diloco_orchestrator.replica.training.signal_lines import SignalLines

RANKS = 3


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[list[SignalLines]]:
    """Parametrized by the host of rank 0, where that is not 127.0.0.1."""
    joined = joined_lines(RANKS, getattr(request, "param", "127.0.0.1"))
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


def test_rank_0_is_answered_by_the_number_of_each_rank_in_any_order(lines: list[SignalLines]):
    assert lines[0].first_of({1, 2}, 0) is None
    lines[2].send(b"of 2" * 20)
    assert lines[0].first_of({1}, 0) is None, "only 2 has answered"
    assert (lines[0].first_of({1, 2}, 10), lines[0].receive(2)) == (2, b"of 2" * 20)
    lines[1].send(b"of 1")
    assert (lines[0].first_of({1, 2}, None), lines[0].receive(1)) == (1, b"of 1")
    lines[2].close()
    assert lines[0].first_of({1, 2}, None) == 2
    with pytest.raises(RuntimeError, match="rank 2 of this replica has ended"):
        lines[0].receive(2)


def test_a_rank_that_has_ended_ends_the_wait_of_the_others(lines: list[SignalLines]):
    lines[1].close()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 of this replica"):
        while True:  # the system may take a message or two
            lines[0].send(b"1")
    lines[0].close()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0 of this replica"):
        while True:
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
    of_rank, known = everyone_of(RANKS), threading.Event()
    strangers: list[socket.socket] = []

    def stranger_first(rank: int) -> Everyone:
        everyone = of_rank(rank)

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

    lines = joined_lines(RANKS, everyone=stranger_first)
    lines[0].send(b"1")
    assert [each.receive() for each in lines[1:]] == [b"1", b"1"]
    for each in [*lines, *strangers]:
        each.close()
