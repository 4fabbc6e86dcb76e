"""`SignalLines`: connections over which rank 0 of a replica sends signals to the other ranks.

They are beside torch.distributed: a broadcast of gloo wakes several threads in each rank, which takes a noticeable part
of a short inner step where ranks share cores (`benchmarks/island_steps.py`). For the same reason a message is one call
of the system to each side, and an answer one more.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from diloco_orchestrator.clock import random_token

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_STRANGER_S = 10  # for which rank 0 waits for a connected process to show the key
_LENGTH = struct.Struct("<q")  # of a message, before it
_LEAST = 24  # bytes after the length: a shorter message is filled up, so that most messages are read by one call
_TAKEN = b"\1"


class SignalLines:
    """In rank 0 the connections to all other ranks, in another rank the one to rank 0.

    Rank 0 is at most one message ahead: it sends the next once every rank has received the last, and waits for that
    without limit. A rank that has ended makes the methods of the others raise `RuntimeError`.
    """

    def __init__(self, connections: Sequence[socket.socket]) -> None:
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
            connection = socket.create_connection((host, port))
            with _as_connection(connection) as shown:
                answer_challenge(shown, key)
                deliver_challenge(shown, key)
            return cls([connection])
        key = (random_token() + random_token()).encode()
        with _listening(host, ranks) as server:
            everyone((server.getsockname()[1], key))
            return cls([_accepted(server, key) for _ in range(1, ranks)])

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to every other rank."""
        framed = _LENGTH.pack(len(message)) + message.ljust(_LEAST, b"\0")
        with _named_ends():
            for connection in self._connections if self._has_sent else ():
                _received(connection, 1)
            for connection in self._connections:
                connection.sendall(framed)
            self._has_sent = True

    def receive(self) -> bytes:
        """The next message of rank 0, in another rank. Waits for it without limit."""
        with _named_ends():
            framed = _received(self._connections[0], _LENGTH.size + _LEAST)
            (length,) = _LENGTH.unpack_from(framed)
            if length > _LEAST:
                framed += _received(self._connections[0], length - _LEAST)
            self._connections[0].sendall(_TAKEN)
            return framed[_LENGTH.size : _LENGTH.size + length]

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


def _accepted(server: socket.socket, key: bytes) -> socket.socket:
    """The next connection of a process that knows the key; one of anybody else, who may also be silent, is closed."""
    while True:
        connection = server.accept()[0]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STRANGER_S, 0))
        with suppress(AuthenticationError, EOFError, OSError), _as_connection(connection) as shown:
            deliver_challenge(shown, key)
            answer_challenge(shown, key)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            return connection
        connection.close()


def _as_connection(connected: socket.socket) -> "Connection[Any, Any]":
    """The form in which `multiprocessing` shows a key over a socket; closing it leaves the socket open."""
    connected.settimeout(None)  # whatever `socket.setdefaulttimeout` says
    return Connection(os.dup(connected.fileno()))


def _received(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Raises `EOFError` where the other side ends before."""
    data = b""
    while len(data) < size:  # a signal may cut a call short
        part = connection.recv(size - len(data), socket.MSG_WAITALL)
        if not part:
            raise EOFError
        data += part
    return data


@contextmanager
def _named_ends() -> Iterator[None]:
    """Raise what an ended rank does to a connection as the `RuntimeError` that gloo's collectives raise."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("Connection closed by peer: another rank of this replica has ended") from error
