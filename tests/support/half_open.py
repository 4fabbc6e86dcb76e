"""Servers on loopback that accept connections and never finish an answer, as the end of a half-open connection."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_HALF = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"id": "half", '


@contextmanager
def half_open(fault: str) -> Iterator[str]:
    """The URL of a server that never answers ("silent"), or answers a head and half of a body ("half").

    Its connections stay open until the context ends.
    """
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, fault, connections), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.close()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()


def _serve(listener: socket.socket, fault: str, connections: list[socket.socket]) -> None:
    with suppress(OSError):
        while True:
            connection = listener.accept()[0]
            connections.append(connection)
            threading.Thread(target=_read, args=(connection, fault), daemon=True).start()


def _read(connection: socket.socket, fault: str) -> None:
    with suppress(OSError):
        while connection.recv(65536):
            if fault == "half":
                connection.sendall(_HALF)
                fault = "silent"
