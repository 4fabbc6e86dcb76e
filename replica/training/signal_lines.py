"""`SignalLines`: connections over which rank 0 of a replica sends signals to the other ranks.

They are beside torch.distributed: a broadcast of gloo wakes several threads in each rank, which takes a noticeable part
of a short inner step where ranks share cores (`benchmarks/island_steps.py`).
"""

import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from diloco_orchestrator.clock import random_token

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_STRANGER_S = 10  # for which rank 0 waits for a connected process to show the key
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
    def joined(cls, rank: int, ranks: int, host: str, everyone: Callable[[Any], Sequence[Any]]) -> "SignalLines":
        """The connections of this rank. Every rank calls it at the same time.

        `host`: name or address by which all ranks reach the machine of rank 0; from a loopback address rank 0 is
        reached by ranks of its own machine alone. `everyone`: called with an object in every rank, it returns those of
        all, in rank order.
        """
        if rank:
            port, key = everyone(None)[0]
            connection: Connection[Any, Any] = Connection(socket.create_connection((host, port)).detach())
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            return cls([connection])
        key = (random_token() + random_token()).encode()
        with _listening(host, ranks) as server:
            everyone((server.getsockname()[1], key))
            return cls([_accepted(server, key) for _ in range(1, ranks)])

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


def _listening(host: str, ranks: int) -> socket.socket:
    """A socket on a free port: of a loopback address if `host` is one, else of all addresses, IPv4 and IPv6."""
    own = host if host in _LOOPBACK else ""
    both = not own and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in own else socket.AF_INET
    return socket.create_server((own, 0), family=family, backlog=ranks, dualstack_ipv6=both)


def _accepted(server: socket.socket, key: bytes) -> "Connection[Any, Any]":
    """The next connection of a process that knows the key; one of anybody else, who may also be silent, is closed."""
    while True:
        with server.accept()[0] as joined:
            connection: Connection[Any, Any] = Connection(os.dup(joined.fileno()))
            joined.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STRANGER_S, 0))
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
            except (AuthenticationError, EOFError, OSError):
                connection.close()
                continue
            joined.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            return connection


@contextmanager
def _named_ends() -> Iterator[None]:
    """Raise what an ended rank does to a connection as the `RuntimeError` that gloo's collectives raise."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("Connection closed by peer: another rank of this replica has ended") from error
