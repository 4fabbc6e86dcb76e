"""The connections over which rank 0 of a replica signals the others."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

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


@pytest.fixture
def lines() -> Iterator[list[SignalLines]]:
    barrier, said = threading.Barrier(RANKS), {}
    with ThreadPoolExecutor(RANKS) as pool:
        made = [
            pool.submit(SignalLines.joined, rank, RANKS, "127.0.0.1", _everyone(rank, barrier, said))
            for rank in range(RANKS)
        ]
        joined = [each.result(10) for each in made]
    yield joined
    for each in joined:
        each.close()


def test_every_rank_receives_every_message_in_order(lines: list[SignalLines]):
    def sent() -> None:
        for number in range(50):
            lines[0].send(b"%d" % number)

    with ThreadPoolExecutor(RANKS) as pool:
        sending = pool.submit(sent)
        received = [pool.submit(lambda each: [each.receive() for _ in range(50)], each) for each in lines[1:]]
        assert [each.result(10) for each in received] == [[b"%d" % number for number in range(50)]] * 2
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


def test_a_process_without_the_key_is_no_rank():
    barrier, said = threading.Barrier(RANKS), {}
    known = threading.Event()

    def stranger_first(rank: int) -> Callable[[Any], list[Any]]:
        everyone = _everyone(rank, barrier, said)

        def called(value: Any) -> list[Any]:
            found = everyone(value)
            if found[0] is not None:
                if rank == 1:
                    stranger = socket.create_connection(("127.0.0.1", found[0][0]), timeout=10)
                    stranger.sendall(b"\0\0\0\5hello")
                    stranger.close()
                    known.set()
                elif rank == 2:
                    known.wait(10)
            return found

        return called

    with ThreadPoolExecutor(RANKS) as pool:
        made = [
            pool.submit(SignalLines.joined, rank, RANKS, "127.0.0.1", stranger_first(rank)) for rank in range(RANKS)
        ]
        lines = [each.result(10) for each in made]
    lines[0].send(b"1")
    assert [each.receive() for each in lines[1:]] == [b"1", b"1"]
    for each in lines:
        each.close()
