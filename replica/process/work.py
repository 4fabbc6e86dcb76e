"""`WorkMeter`: CPU time and moved bytes of this process and its descendants, as the system counts them."""

import ctypes
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_TCP_INFO_BYTES = 136  # of Linux's `tcp_info`, up to and with `tcpi_bytes_received`


@dataclass(frozen=True)
class Work:
    """CPU seconds taken, and bytes moved, by a process and its living descendants."""

    cpu_s: float = 0.0
    moved: int = 0


class WorkMeter:
    """Measures the work of this process and its living descendants, each time that it is called, by one thread.

    Bytes moved are those written, those read, those read from a disk (also by a memory map), and those that came over
    TCP connections that the process itself has open: what is downloaded into memory is not written. A connection that
    opens and closes between two calls is not seen. What the calling thread reads does not count: it reads the system's
    files about all processes. Bytes are 0 where they are not counted: macOS, gVisor.
    """

    def __init__(self) -> None:
        self._connections: dict[int, int] = {}  # bytes that came over each, at the last call
        self._received = 0

    def __call__(self) -> Work:
        """The sum over this process and its descendants."""
        this = psutil.Process()
        processes = [this, *this.children(recursive=True)]  # for which this thread reads a file of each process
        cpu_s, moved = 0.0, self._received_by_now() - _read_here() if sys.platform == "linux" else 0
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it has ended
                times = process.cpu_times()
                cpu_s += times.user + times.system
                if sys.platform == "linux" and hasattr(process, "io_counters"):
                    counted = process.io_counters()
                    moved += counted.write_chars + counted.read_chars + counted.read_bytes
        return Work(cpu_s, moved)

    def _received_by_now(self) -> int:
        """Bytes that came over TCP connections since the first call, also those that were closed since."""
        before, self._connections = self._connections, _received()
        self._received += sum(size - min(size, before.get(each, 0)) for each, size in self._connections.items())
        return self._received


def _read_here() -> int:
    """Bytes that this thread has read; 0 where the system does not count them."""
    with suppress(OSError):
        for line in Path("/proc/thread-self/io").read_text().splitlines():
            if line.startswith("rchar:"):
                return int(line.split()[1])
    return 0


def _received() -> dict[int, int]:
    """Bytes that came over each of the TCP connections that this process has open, by the connection's inode."""
    received = {}
    for each in Path("/proc/self/fd").iterdir():
        info, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint(_TCP_INFO_BYTES)
        where = int(each.name), socket.IPPROTO_TCP, socket.TCP_INFO
        # Not by a Python socket of the same file, which may make it non-blocking: by `socket.setdefaulttimeout`.
        if not ctypes.CDLL(None).getsockopt(*where, info, ctypes.byref(size)) and size.value == _TCP_INFO_BYTES:
            with suppress(OSError):  # it was closed
                received[os.fstat(int(each.name)).st_ino] = int.from_bytes(info.raw[-8:], sys.byteorder)
    return received
