"""Machines that have joined a run's folder: real `diloco join` processes of this machine, which can be lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Taken
from diloco_orchestrator.store.base import Store
from executors.contract import ReplicaHandle
from executors.processes import ProcessId

EVERY_S = 0.1  # pause between a machine's requests
ROOT = Path(__file__).parent.parent.parent


class Machines:
    """`diloco join` processes for one folder. `store`: the same folder, for what a machine wrote there."""

    def __init__(self, url: str, store: Store, environ: Mapping[str, str]) -> None:
        self.url = url
        self.store = store
        self._environ = {**os.environ, **environ, "PYTHONPATH": str(ROOT)}
        self.processes: list[subprocess.Popen[bytes]] = []

    def join(self, *options: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "diloco_orchestrator.cli.main", "join", self.url, "--trust-bucket"]
        process = subprocess.Popen([*command, "--every", str(EVERY_S), *options], env=self._environ)
        self.processes.append(process)
        return process

    def of(self, handle: ReplicaHandle) -> "subprocess.Popen[bytes]":
        """The machine that has taken an attempt."""
        key = keys.join_record(handle.native_id, handle.native["offer"], keys.JOIN_TAKEN)
        pid = Taken.from_bytes(self.store.get(key), key).pid
        return next(process for process in self.processes if process.pid == pid)

    def lose(self, machine: "subprocess.Popen[bytes]") -> None:
        """A power cut: the machine and what runs on it are gone at once."""
        machine.send_signal(signal.SIGSTOP)  # so that it can start nothing more
        for child in children_of(machine.pid):
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        machine.kill()
        machine.wait()
        self.processes.remove(machine)

    def leave(self, machine: "subprocess.Popen[bytes]") -> int:
        """SIGTERM, as a cloud sends it before it takes a machine. Returns the exit code."""
        machine.terminate()
        self.processes.remove(machine)
        return machine.wait()

    def running(self) -> list[int]:
        """The processes of the machines that are still there."""
        return [each.pid for each in self.processes if each.poll() is None]

    def close(self) -> None:
        for machine in [each for each in self.processes if each.poll() is None]:
            self.lose(machine)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    found = ProcessId.of(pid)
    return found is None or not found.is_alive()


@contextmanager
def running_machines(url: str, store: Store, environ: Mapping[str, str], number: int) -> Iterator[Machines]:
    machines = Machines(url, store, environ)
    try:
        for _ in range(number):
            machines.join()
        yield machines
    finally:
        machines.close()
