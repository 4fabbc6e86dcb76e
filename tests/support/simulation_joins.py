"""Machines that join a simulated run: `Machine` and `JoinExecutor` as they are, over processes of virtual time.

A machine that is lost (`Plan.machine_kills`) goes with the process on it, one that is told to leave (`machine_notices`)
asks that process to end. Another one joins in its place, as a user's spot pool replaces machines.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from virtual_time import Process, VirtualClock

from diloco_orchestrator.join.attempt import AttemptProcess
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.join.machine import Identity, JoinSettings, Machine
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.retrying import RetryPolicy
from executors.process_contract import EXIT_ERROR

if TYPE_CHECKING:
    from simulation import Simulation

EXECUTOR_RETRY, MACHINE_RETRY = RetryPolicy(total_s=2.0), RetryPolicy(total_s=5.0, first_call_s=10.0)


def join_executor(simulation: "Simulation", clock: VirtualClock, machines: str = "") -> JoinExecutor:
    """A coordinator's executor. Machines have the code, so that none is sent. `machines`: public identities."""
    executor = JoinExecutor(machines=machines or (), clock=clock)
    executor.shares_machine = True
    executor._stamp = simulation.stamp(clock)
    executor._url = simulation.bucket.url
    executor._opened = {simulation.bucket.url: simulation.network(clock, EXECUTOR_RETRY)}
    return executor


class VirtualAttempt(AttemptProcess):
    """A replica's process on a joined machine. `who`: replica and attempt."""

    pid = 1

    def __init__(self, simulation: "Simulation", clock: VirtualClock, who: tuple[int, int]) -> None:
        self._simulation, self._clock, self.who = simulation, clock, who
        simulation.launch(*who)
        self.process: Process = simulation.replicas[who]

    def exit_code(self, wait_s: float) -> int | None:
        until = self._clock.now() + wait_s
        while not (self.process.killed or self.process.ended) and (left_s := until - self._clock.now()) > 0:
            self._clock.sleep(min(1.0, left_s))
        if self.process.killed:
            return -9
        return self._simulation.exit_codes.get(self.who, EXIT_ERROR) if self.process.ended else None

    def ask_to_end(self) -> None:
        self._simulation.noticed.add(self.who)

    def kill(self) -> None:
        if not self.process.ended:
            self._simulation.time.kill(self.process)


class JoinedMachines:
    """As many machines as the plan says, from now until the newest leg has its result."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._machines: dict[int, tuple[Process, Machine]] = {}
        self._attempts: dict[int, VirtualAttempt] = {}  # the last one of each machine
        self._settings: dict[int, JoinSettings] = {}  # where they are not the usual ones
        self._joined = 0
        for _ in range(simulation.plan.machines):
            self._join(after_s=0.0)

    def lose(self, number: int) -> None:
        """Take a machine and what runs on it away at once; another one joins later."""
        if (found := self._machines.pop(number, None)) is None or found[0].ended:
            return
        self._simulation.time.kill(found[0])
        if number in self._attempts:
            self._attempts[number].kill()
        self._join(after_s=20.0)

    def tell_to_leave(self, number: int) -> None:
        """SIGTERM for a machine."""
        if number in self._machines and not self._machines[number][0].ended:
            self._machines[number][1].leave("SIGTERM")

    def join(self, settings: JoinSettings) -> None:
        """One machine more, now, that has other settings than a user's, such as those of a link."""
        self._settings[self._joined] = settings
        self._join(after_s=0.0)

    def _join(self, after_s: float) -> None:
        number, time = self._joined, self._simulation.time
        self._joined += 1
        wait_s = random.Random(f"{self._simulation.plan.seed} machine {number}").uniform(0.0, 5.0)
        begin = time.now + after_s + wait_s
        process = time.spawn(f"machine {number}", lambda clock: self._run(number, clock), at=begin)
        self._machines[number] = process, self._machine(number, VirtualClock(time, process))

    def _machine(self, number: int, clock: VirtualClock) -> Machine:
        def start(command: Sequence[str], env: Mapping[str, str], output: Path) -> VirtualAttempt:
            options = dict(pairwise(command))
            who = int(options["--replica-id"]), int(options["--attempt"])
            self._simulation.given[who] = env
            self._attempts[number] = VirtualAttempt(self._simulation, clock, who)
            return self._attempts[number]

        return Machine(
            self._simulation.network(clock, MACHINE_RETRY),
            self._settings.get(number, JoinSettings()),
            Identity(f"machine {number}", "host", number),
            environ={},
            clock=clock,
            stamp=self._simulation.stamp(clock),
            say=lambda words: None,
            start=start,
        )

    def _run(self, number: int, clock: VirtualClock) -> None:
        self._machines[number][1].run()
        log = RunLog(self._simulation.bucket)
        if log.result(log.newest_leg()) is None:  # it was told to leave, or gave up after several failures
            self._join(after_s=20.0)
