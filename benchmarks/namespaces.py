"""Network namespaces of this machine, joined by a bridge: each process of a fleet gets a link of its own.

The kernel's token bucket filter shapes what leaves a namespace (up) and what the bridge sends to it (down). Needs root,
iproute2 and a kernel with veth, bridge and tbf. There is no delay: many kernels come without netem.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "wan0"  # in every namespace
_BURST = "128kb"
_NETWORK = "10.91.0"


@dataclass(frozen=True)
class Namespace:
    """A network namespace. `prefix`: of a command that runs in it."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]


def why_none() -> str:
    """Reason why this machine has no such links; empty if it has."""
    if os.geteuid() != 0:
        return "namespaces need root"
    trial = "ip link add name a type veth peer name b && tc qdisc add dev a root tbf rate 1mbit burst 64kb latency 1ms"
    done = subprocess.run(["unshare", "-n", "sh", "-c", trial], capture_output=True, text=True, check=False)
    return done.stderr.strip()


@contextmanager
def linked(count: int, up_mb: float, down_mb: float) -> Iterator[list[Namespace]]:
    """`count` namespaces that reach each other through links of `up_mb` and `down_mb` Mb/s."""
    hub = f"dl{os.getpid()}-hub"
    found = [Namespace(f"dl{os.getpid()}-{i}", f"{_NETWORK}.{i + 1}") for i in range(count)]
    try:
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "name", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "dev", "br0", "up")
        for i, each in enumerate(found):
            _run("ip", "netns", "add", each.name)
            _run(*f"ip -n {hub} link add name h{i} type veth peer name {INTERFACE} netns {each.name}".split())
            _run(*f"ip -n {hub} link set dev h{i} master br0 up".split())
            _run(*f"ip -n {each.name} addr add {each.address}/24 dev {INTERFACE}".split())
            for device in (INTERFACE, "lo"):
                _run(*f"ip -n {each.name} link set dev {device} up".split())
            for where, device, mb in ((each.name, INTERFACE, up_mb), (hub, f"h{i}", down_mb)):
                limit = f"root tbf rate {mb}mbit burst {_BURST} latency 100ms"
                _run(*f"tc -n {where} qdisc add dev {device} {limit}".split())
        yield found
    finally:
        for name in (hub, *(each.name for each in found)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
