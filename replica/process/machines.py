"""Machines of one replica: the process above the ranks on machine 0, and those of the others, connected to it.

On every machine the executor starts the same command. Machine 0 waits until the others have connected, claims the
attempt, sends each the ranks to start, and judges them (`rank_processes`). The others claim and write nothing: they
start their ranks, pass on what those print, report and how they die, and end them when machine 0 says so or is gone.
"""

import fcntl
import hmac
import ipaddress
import json
import logging
import selectors
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.errors import Preempted
from diloco_orchestrator.protocol.process import (
    ENV_MACHINE,
    ENV_MACHINES,
    ENV_MEETING,
    ENV_MEETING_KEY,
    EXIT_DONE,
    EXIT_PREEMPTED,
)
from diloco_orchestrator.replica.process.rank import RankPlace
from diloco_orchestrator.replica.process.rank_children import LOOK_S, RankChildren, RankProgram

log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # between two tries to reach machine 0, whose name or process need not be there yet
_CONNECT_S = 5.0
_HELLO_BYTES = 1 << 12  # of a first line, which is shorter
_SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of a network interface


@dataclass(frozen=True)
class MachinePlace:
    """One machine among those of a replica: its number, their count, and where machine 0 waits for the others."""

    number: int
    count: int
    host: str
    port: int
    key: str = field(repr=False)  # by which machine 0 knows the others: a secret of the attempt

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "MachinePlace | None":
        """The place in the environment that the executor set; None for a replica on one machine."""
        if (count := int(environ.get(ENV_MACHINES) or 1)) == 1:
            return None
        host, _, port = environ[ENV_MEETING].rpartition(":")
        return cls(int(environ[ENV_MACHINE]), count, host, int(port), environ[ENV_MEETING_KEY])


class Link:
    """A connection between the processes of two machines: JSON objects in both directions, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def own_address(self) -> str:
        """The address of this machine by which the other one reaches it."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send an object. Does nothing once the other side is gone, which `read` shows."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The objects that have arrived, without waiting; None once the other side has closed or is gone.

        Raises ValueError for what is no JSON.
        """
        try:
            data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def number_by(self, key: str) -> int | None:
        """The number of the machine that has connected, from its first line; None if that is not whole yet.

        `key`: the attempt's. Raises ValueError for anybody else, such as a port scanner.
        """
        try:
            said = self.read()
        except RecursionError:  # of JSON that is nested without end
            raise ValueError("no machine of this attempt") from None
        if said == [] and len(self._rest) < _HELLO_BYTES:
            return None
        first = said[0] if said else None
        # Texts that are not ASCII could not be compared, bytes can.
        if not isinstance(first, dict) or not hmac.compare_digest(str(first.get("key")).encode(), key.encode()):
            raise ValueError("no machine of this attempt")
        return int(first["machine"])

    def close(self) -> None:
        self._connection.close()


def other_machines(place: MachinePlace, clock: Clock, should_leave: Callable[[], bool]) -> list[Link]:
    """In machine 0: wait, without limit, until all others have connected. Their links, by ascending number.

    No attempt is claimed until then, so that machines which wait for the last one count as one attempt in the queue of
    their provider. Raises `Preempted` if this machine is asked to leave before, OSError if it cannot listen.
    """
    log.info("machine 0 of %d waits for the others at %s:%d", place.count, place.host, place.port)
    found: dict[int, Link] = {}
    with _listening(place, clock, should_leave) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(found) < place.count - 1:
            for key, _ in selector.select(LOOK_S):
                if key.fileobj is server:
                    selector.register(Link(server.accept()[0]), selectors.EVENT_READ)
                    continue
                link: Any = key.fileobj
                try:
                    number = link.number_by(place.key)
                except ValueError:
                    selector.unregister(link)
                    link.close()
                    continue
                if number is not None:
                    selector.unregister(link)
                    found[number] = link
                    log.info("machine %d of %d is there", number, place.count)
            if should_leave():
                raise Preempted(f"asked to leave while {len(found) + 1} of the replica's {place.count} machines ran")
    return [found[number] for number in sorted(found)]


def _listening(place: MachinePlace, clock: Clock, should_leave: Callable[[], bool]) -> socket.socket:
    """A socket on this machine's own address, of the name by which the others know it."""
    for _ in _tries(clock, should_leave):
        with suppress(socket.gaierror):  # the name of a pod is known some seconds after its start
            family, _, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family)
    raise Preempted(f"asked to leave while {place.host}, the name of this machine, was not known yet")


def _tries(clock: Clock, should_leave: Callable[[], bool]) -> Iterator[None]:
    while not should_leave():
        yield
        clock.sleep(_AGAIN_S)


def serve_machine_0(place: MachinePlace, program: RankProgram, clock: Clock, should_leave: Callable[[], bool]) -> int:
    """In another machine: run the ranks that machine 0 names, until it ends them or is gone. Returns the exit code.

    How the attempt ends is machine 0's to say: this one exits with 0 once the two were connected, and with
    EXIT_PREEMPTED if it was asked to leave before.
    """
    log.info("machine %d of %d connects to machine 0 at %s:%d", place.number, place.count, place.host, place.port)
    link = next(filter(None, (_connected(place) for _ in _tries(clock, should_leave))), None)
    if link is None:
        return EXIT_PREEMPTED
    link.send({"machine": place.number, "key": place.key})
    children = RankChildren(program, link.send)
    served = _Served(link, children)
    children.also_read(link, served.obey)
    was_asked = False
    try:
        while not served.is_over:
            children.look(LOOK_S)
            if should_leave() and not was_asked:
                was_asked = True
                link.send({"asked": True})  # rank 0 publishes what is trained, and all leave
    finally:
        children.close()
        link.close()
    log.info("machine 0 has ended the attempt, or is gone: this machine's ranks are ended")
    return EXIT_DONE


class _Served:
    """Does what machine 0 says. `is_over`: it has said that the attempt ends, or is gone."""

    def __init__(self, link: Link, children: RankChildren) -> None:
        self.is_over = False
        self._link = link
        self._children = children

    def obey(self) -> bool:
        """Do what has arrived. Returns False once nothing more will."""
        said = self._link.read()
        messages: Sequence[Mapping[str, Any]] = [{"end": True}] if said is None else said
        for message in messages:
            if "end" in message:
                self.is_over = True
            elif "signal" in message:
                self._children.signal(*message["signal"])
            else:
                interface = interface_of(self._link.own_address)
                for place in message["start"]:
                    self._children.start(RankPlace(**place), interface)
        return said is not None


def _connected(place: MachinePlace) -> Link | None:
    """A connection to machine 0; None while its name, or the process behind it, is not there."""
    try:
        connection = socket.create_connection((place.host, place.port), timeout=_CONNECT_S)
    except OSError:
        return None
    connection.settimeout(None)
    return Link(connection)


def start_message(places: Sequence[RankPlace]) -> dict[str, Any]:
    """The message that makes another machine start the ranks at `places`."""
    return {"start": [asdict(place) for place in places]}


def interface_of(address: str) -> str:
    """The name of this machine's network interface with an IPv4 or IPv6 address; empty if none has it."""
    if address.startswith("127."):
        return "lo"
    if ":" in address:
        packed = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        known = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((words[-1] for words in known if words[0] == packed), "")
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
            found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
