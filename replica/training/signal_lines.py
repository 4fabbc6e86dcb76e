"""`SignalLines`: connections over which rank 0 of a replica sends signals to the other ranks.

They are beside torch.distributed: a broadcast of gloo wakes several threads in each rank, which takes some twenty times
as long as a message through a socket where ranks share cores (`benchmarks/island_steps.py`).
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from diloco_orchestrator.clock import random_token

_LOOPBACK = "127.0.0.1"
_TAKEN = b""


class SignalLines:
    """In rank 0 the connections to all other ranks, in another rank the one to rank 0.

    Rank 0 is at most one message ahead: it sends the next once every rank has received the last, and waits for that
    without limit. A rank that has ended makes the methods of the others raise `RuntimeError`.
    """

    def __init__(self, connections: Sequence["Connection[Any, Any]"]) -> None:
        self._connections = connections
        self._has_sent = False

    @classmethod
    def joined(cls, rank: int, ranks: int, everyone: Callable[[Any], Sequence[Any]]) -> "SignalLines":
        """The connections of this rank. Every rank calls it at the same time.

        `everyone`: called with an object in every rank, it returns those of all, in rank order. Where ranks are on
        several hosts, the others reach rank 0 by the name in `MASTER_ADDR`, or else by its host's.
        """
        on_one_host = len(set(everyone(socket.gethostname()))) == 1
        if rank:
            address, key = everyone(None)[0]
            return cls([Client(address, authkey=key)])
        key = (random_token() + random_token()).encode()
        with Listener((_LOOPBACK if on_one_host else "", 0), backlog=ranks, authkey=key) as listener:
            host = _LOOPBACK if on_one_host else os.environ.get("MASTER_ADDR") or socket.gethostname()
            everyone(((host, listener.address[1]), key))
            return cls([_accepted(listener) for _ in range(1, ranks)])

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to every other rank."""
        with _named_ends():
            for connection in self._connections if self._has_sent else ():
                connection.recv_bytes()
            for connection in self._connections:
                connection.send_bytes(message)
            self._has_sent = True

    def receive(self) -> bytes:
        """The next message of rank 0, in another rank. Waits for it without limit."""
        with _named_ends():
            message = self._connections[0].recv_bytes()
            self._connections[0].send_bytes(_TAKEN)
            return message

    def close(self) -> None:
        """Close the connections. Called in every rank, after the last message."""
        for connection in self._connections:
            connection.close()


def _accepted(listener: Listener) -> "Connection[Any, Any]":
    """The next connection of a process that knows the listener's key; one of anybody else is closed."""
    while True:
        try:
            return listener.accept()
        except (AuthenticationError, EOFError, ConnectionError):
            continue


@contextmanager
def _named_ends() -> Iterator[None]:
    """Raise what an ended rank does to a connection as the `RuntimeError` that gloo's collectives raise."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("Connection closed by peer: another rank of this replica has ended") from error
