"""`Work`: CPU time and moved bytes of this process and its descendants, as the system counts them."""

import ctypes
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_TCP_INFO_BYTES = 136  # of Linux's `tcp_info`, up to and with `tcpi_bytes_received`


@dataclass(frozen=True)
class Work:
    """CPU seconds taken, and bytes moved, by a process and its living descendants.

    Bytes moved are those written, those read from a disk, and those that came over TCP connections that the process
    itself has open: what is downloaded into memory is not written.
    """

    cpu_s: float = 0.0
    moved: int = 0

    @classmethod
    def of_this_process(cls) -> "Work":
        """The sum over this process and its descendants. Bytes are 0 where they are not counted: macOS, gVisor."""
        this = psutil.Process()
        cpu_s, moved = 0.0, _received() if sys.platform == "linux" else 0
        for process in [this, *this.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # it has ended
                times = process.cpu_times()
                cpu_s += times.user + times.system
                if sys.platform == "linux" and hasattr(process, "io_counters"):
                    moved += process.io_counters().write_chars + process.io_counters().read_bytes
        return cls(cpu_s, moved)


def _received() -> int:
    """Bytes that came over the TCP connections that this process has open."""
    received = 0
    for each in Path("/proc/self/fd").iterdir():
        info, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint(_TCP_INFO_BYTES)
        where = int(each.name), socket.IPPROTO_TCP, socket.TCP_INFO
        # Not by a Python socket of the same file, which may make it non-blocking: by `socket.setdefaulttimeout`.
        if not ctypes.CDLL(None).getsockopt(*where, info, ctypes.byref(size)) and size.value == _TCP_INFO_BYTES:
            received += int.from_bytes(info.raw[-8:], sys.byteorder)
    return received
