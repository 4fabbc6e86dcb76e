"""Machines that join and their executor in one process: programs that only seem to run, and time that they pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.join.machine import Identity, JoinSettings, Machine
from diloco_orchestrator.protocol.attempt_records import Offer
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.open_store import open_store
from executors.contract import LaunchRequest


@dataclass
class Program:
    """A process that ends by itself, and what is done to it. It is given to `Machine` as `start`, too."""

    clock: ManualClock
    code: int | None = 0  # None: it runs until it is asked to end
    waits: int = 1  # before it ends by itself
    on_wait: Callable[[], None] = lambda: None
    asked_code: int | None = 75  # of one that was asked to end; None: it does not end for that
    output: str = ""
    started: list[Mapping[str, str]] = field(default_factory=list)
    signals: list[str] = field(default_factory=list)
    pid: int = 4711
    _end: int | None = None

    def __call__(self, command: tuple[str, ...], env: Mapping[str, str], output: Path) -> "Program":
        self.started.append(env)
        self._waited, self._end = 0, None
        output.write_text(self.output)
        return self

    def exit_code(self, wait_s: float) -> int | None:
        self.clock.sleep(wait_s)
        self.on_wait()
        self._waited += 1
        if self._end is None and self.code is not None and self._waited > self.waits:
            self._end = self.code
        return self._end

    def ask_to_end(self) -> None:
        self.signals.append("TERM")
        self._end = self.asked_code

    def kill(self) -> None:
        if self._end is None:
            self.signals.append("KILL")
            self._end = -9


class Scene:
    """An executor, its folder in memory, and machines whose time passes when they sleep."""

    def __init__(self) -> None:
        self.url = f"memory://{uuid4().hex}"
        self.clock = ManualClock()
        self.executor = JoinExecutor(clock=self.clock)
        self.executor.use_store(self.url, {})
        self.store = open_store(self.url)
        self.said: list[str] = []

    def request(self, attempt: int = 1, **fields: object) -> LaunchRequest:
        given = {"run_id": "run-1", "replica_id": 0, "attempt": attempt, "command": ["python", "-c", "pass"], **fields}
        return LaunchRequest(**given)  # type: ignore[arg-type]

    def machine(
        self,
        program: Program,
        environ: Mapping[str, str] | None = None,
        why_not: Callable[[Offer], str] = lambda offer: "",
        **settings: object,
    ) -> Machine:
        token = uuid4().hex
        return Machine(
            self.store,
            JoinSettings(**{"once": True, "hours": 1.0, **settings}),  # type: ignore[arg-type]
            Identity(token, "box", 7),
            environ=environ or {},
            clock=self.clock,
            stamp=Stamp(token, self.clock.wall_time),
            say=self.said.append,
            why_not=why_not,
            start=program,
        )

    def program(self, **fields: object) -> Program:
        return Program(self.clock, **fields)  # type: ignore[arg-type]
