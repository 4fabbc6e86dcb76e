"""`SignalLines`: connections over which rank 0 of a replica sends signals to the other ranks, which may answer.

They are beside torch.distributed: a broadcast of gloo wakes several threads in each rank, which takes a noticeable part
of a short inner step where ranks share cores (`benchmarks/island_steps.py`). For the same reason a message is one call
of the system on each side.
"""

import os
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from diloco_orchestrator.clock import random_token

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_STRANGER_S = 10  # for which rank 0 waits for a connected process to show the key
_NUMBER = struct.Struct("<q")  # the length of a message, before it; and of a rank that has shown the key its number
_LEAST = 24  # bytes after the length: a shorter message is filled up, so that most messages are read by one call


class SignalLines:
    """In rank 0 the connections to all other ranks, in another rank the one to rank 0.

    A message waits in its connection until it is received. A rank that has ended makes the methods of the others raise
    `RuntimeError`, with its number.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = connections  # by number of the rank at the other end

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
            connection.sendall(_NUMBER.pack(rank))
            return cls({0: connection})
        key = (random_token() + random_token()).encode()
        with _listening(host, ranks) as server:
            everyone((server.getsockname()[1], key))
            return cls(dict(_accepted(server, key) for _ in range(1, ranks)))

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to every other rank, or from another rank to rank 0."""
        framed = _NUMBER.pack(len(message)) + message.ljust(_LEAST, b"\0")
        for rank, connection in self._connections.items():
            try:
                connection.sendall(framed)
            except ConnectionError as error:
                raise _ended(rank) from error

    def receive(self, rank: int = 0) -> bytes:
        """The next message of rank 0, in another rank; in rank 0 that of `rank`. Waits for it without limit."""
        try:
            framed = _received(self._connections[rank], _NUMBER.size + _LEAST)
            (length,) = _NUMBER.unpack_from(framed)
            if length > _LEAST:
                framed += _received(self._connections[rank], length - _LEAST)
        except (EOFError, ConnectionError) as error:
            raise _ended(rank) from error
        return framed[_NUMBER.size : _NUMBER.size + length]

    def first_of(self, ranks: Collection[int], within_s: float | None) -> int | None:
        """In rank 0: the one of `ranks` whose message came first, or which has ended; None if there is none in time.

        `within_s`: seconds; None waits without limit.
        """
        numbers = {self._connections[rank]: rank for rank in ranks}
        return next((numbers[each] for each in wait(list(numbers), within_s) if isinstance(each, socket.socket)), None)

    def close(self) -> None:
        """Close the connections. Called in every rank, after the last message."""
        for connection in self._connections.values():
            connection.close()


def _listening(host: str, ranks: int) -> socket.socket:
    """A socket on a free port: of a loopback address if `host` is one, else of all addresses, IPv4 and IPv6."""
    own = host if host in _LOOPBACK else ""
    both = not own and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in own else socket.AF_INET
    return socket.create_server((own, 0), family=family, backlog=ranks, dualstack_ipv6=both)


def _accepted(server: socket.socket, key: bytes) -> tuple[int, socket.socket]:
    """The next rank that knows the key, with its connection; one of anybody else, who may also be silent, is closed."""
    while True:
        connection = server.accept()[0]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STRANGER_S, 0))
        with suppress(AuthenticationError, EOFError, OSError), _as_connection(connection) as shown:
            deliver_challenge(shown, key)
            answer_challenge(shown, key)
            (rank,) = _NUMBER.unpack(_received(connection, _NUMBER.size))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            return rank, connection
        connection.close()


def _as_connection(connected: socket.socket) -> "Connection[Any, Any]":
    """The form in which `multiprocessing` shows a key over a socket; closing it leaves the socket open."""
    connected.settimeout(None)  # whatever `socket.setdefaulttimeout` says
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each may wait for the receipt of the last
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


def _ended(rank: int) -> RuntimeError:
    """The error for a connection that an ended rank has closed, in the words of gloo's collectives."""
    return RuntimeError(f"Connection closed by peer: rank {rank} of this replica has ended")
