"""A TCP proxy with the bandwidth and the round-trip time of a real link: a token bucket for each direction, and delay.

All connections through one `ShapedLink` share its bandwidth, as the connections of one machine do. A new connection
costs one round trip before its first byte, as TCP's handshake does; TLS and slow start are left out.
"""

import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

_CHUNK = 32 * 1024
_AHEAD_S = 0.02  # how far a sender's bytes may be ahead of the link; it stands for the buffers of a real one


class Direction:
    """One direction of a link: when bytes that arrive now have left it. Thread-safe."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s  # None: unlimited; may be changed at any time
        self.passed = 0  # bytes so far
        self._free_at = 0.0
        self._lock = threading.Lock()

    def send(self, size: int) -> float:
        """Take the link for `size` bytes. Returns when the last of them has left, on the monotonic clock."""
        with self._lock:
            self.passed += size
            now = time.monotonic()
            if self.bytes_per_s is None:
                return now
            self._free_at = max(self._free_at, now) + size / self.bytes_per_s
            return self._free_at


class ShapedLink:
    """Forwards `127.0.0.1:port` to a server through one link. `rtt_s` may be changed at any time."""

    def __init__(
        self, target: tuple[str, int], up_bytes_per_s: float | None, down_bytes_per_s: float | None, rtt_s: float
    ) -> None:
        self.rtt_s = rtt_s
        self.up, self.down = Direction(up_bytes_per_s), Direction(down_bytes_per_s)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            opens_at = time.monotonic() + self.rtt_s
            threading.Thread(target=self._serve, args=(client, opens_at), daemon=True).start()

    def _serve(self, client: socket.socket, opens_at: float) -> None:
        with suppress(OSError), client, socket.create_connection(self._target) as server:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=self._pump, args=(server, client, self.down, opens_at), daemon=True)
            back.start()
            self._pump(client, server, self.up, opens_at)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction, opens_at: float) -> None:
        """Forward until the source ends: one thread takes the link, another delivers half a round trip later."""
        on_the_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        delivering = threading.Thread(target=_deliver, args=(on_the_way, sink), daemon=True)
        delivering.start()
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                left_at = max(direction.send(len(data)), opens_at)
                on_the_way.put((left_at + self.rtt_s / 2, data))
                _wait_until(left_at - _AHEAD_S)
        on_the_way.put((0.0, b""))
        delivering.join()


def _deliver(on_the_way: "queue.SimpleQueue[tuple[float, bytes]]", sink: socket.socket) -> None:
    with suppress(OSError):
        while True:
            due, data = on_the_way.get()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            _wait_until(due)
            sink.sendall(data)


def _wait_until(due: float) -> None:
    pause = due - time.monotonic()
    if pause > 0:
        time.sleep(pause)


@contextmanager
def links_before(
    url: str,
    count: int,
    *,
    up_bytes_per_s: float | None = None,
    down_bytes_per_s: float | None = None,
    rtt_s: float = 0.0,
) -> Iterator[Sequence[ShapedLink]]:
    """Links of their own to the server at `url`, one for each of `count` machines."""
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        links = [ShapedLink((host, int(port)), up_bytes_per_s, down_bytes_per_s, rtt_s) for _ in range(count)]
        for link in links:
            stack.callback(link.close)
        yield links
