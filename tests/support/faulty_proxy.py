"""A TCP proxy that breaks what passes through it: resets, 503s, lost and truncated answers, stalls, slow links."""

import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_503 = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 89\r\nConnection: close\r\n\r\n"
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected  </Message></Error>   "
)
_403 = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: 61\r\nConnection: close\r\n\r\n"
    b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
)
_STALL_S = 2.0
_SLOW_BYTES_PER_S = 200_000


@dataclass(frozen=True)
class Faults:
    """Shares of requests that meet each fault."""

    reset: float = 0.0  # the connection dies before the request reaches the server
    lost_reply: float = 0.0  # the server acts, the answer never comes
    refused: float = 0.0  # 503
    truncated: float = 0.0  # half of the answer's first bytes, then nothing
    stalled: float = 0.0  # nothing for some seconds, then all is well
    slow: float = 0.0  # a thin link
    forbidden: float = 0.0  # 403

    @classmethod
    def all_at(cls, share: float) -> "Faults":
        """Each that is an outage with the same share of requests."""
        return cls(share, share, share, share, share, share)


class FaultyProxy:
    """Forwards `127.0.0.1:port` to a server. `faults` may be changed at any time."""

    def __init__(self, target: tuple[str, int], faults: Faults, seed: int = 0) -> None:
        self.faults = faults
        self.met: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()  # by request line, digits and query left out
        self._target = target
        self._chance = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._target) as server:
            state = {"fault": ""}
            threading.Thread(target=self._answers, args=(server, client, state), daemon=True).start()
            while data := client.recv(65536):
                if data[:4] in (b"GET ", b"PUT ", b"POST", b"DELE", b"HEAD"):  # a request begins
                    self.requests[_kind(data)] += 1
                    state["fault"] = self._draw()
                match state["fault"]:
                    case "reset":
                        return _reset(client)
                    case "refused":
                        client.sendall(_503)
                        return None
                    case "forbidden":
                        client.sendall(_403)
                        return None
                    case "stalled":
                        threading.Event().wait(_STALL_S)
                        state["fault"] = ""
                    case "slow":
                        threading.Event().wait(len(data) / _SLOW_BYTES_PER_S)
                server.sendall(data)
        return None

    def _answers(self, server: socket.socket, client: socket.socket, state: dict[str, str]) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                match state["fault"]:
                    case "lost_reply":
                        return _reset(client)
                    case "truncated":
                        client.sendall(data[: len(data) // 2])
                        return _reset(client)
                    case "slow":
                        threading.Event().wait(len(data) / _SLOW_BYTES_PER_S)
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        return None

    def _draw(self) -> str:
        roll = self._chance.random()
        for name, share in vars(self.faults).items():
            if roll < share:
                self.met[name] += 1
                return name
            roll -= share
        self.met["passed"] += 1
        return ""


def _kind(data: bytes) -> str:
    """`PUT /bucket/run/rounds/#/commit.json`, `LIST /bucket`."""
    method, _, rest = data.split(b"\r\n", 1)[0].decode(errors="replace").partition(" ")
    path, _, query = rest.removesuffix(" HTTP/1.1").partition("?")
    listing = method == "GET" and "list-type" in query
    return f"{'LIST' if listing else method} {re.sub(r'[0-9a-f]{8,}|[0-9]+', '#', path)}"


def _reset(connection: socket.socket) -> None:
    """Close at once, as a crashed middlebox does; shut down first, because another thread may be reading."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def proxy_before(url: str, faults: Faults, seed: int = 0) -> Iterator[tuple[FaultyProxy, str]]:
    """The proxy and its URL."""
    host, port = url.removeprefix("http://").split(":")
    proxy = FaultyProxy((host, int(port)), faults, seed)
    try:
        yield proxy, f"http://127.0.0.1:{proxy.port}"
    finally:
        proxy.close()
