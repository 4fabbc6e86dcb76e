"""Machines that join and their executor in one process: programs that only seem to run, and time that they pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from diloco_orchestrator.cli.join_command import of_link, only_code_of
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.join.grants import Lent
from diloco_orchestrator.join.invitations import create_invitation
from diloco_orchestrator.join.link import Link
from diloco_orchestrator.join.machine import Identity, JoinSettings, Machine
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Offer
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.protocol.signatures import to_text
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.run_store import keep_key, of_run
from diloco_orchestrator.signing.keys import RunKey
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from executors.contract import LaunchRequest, ReplicaHandle


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
        lent: Lent | None = None,
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
            lent=lent,
        )

    def program(self, **fields: object) -> Program:
        return Program(self.clock, **fields)  # type: ignore[arg-type]


KEY = RunKey(bytes([7] * 32))
STAMP = Stamp("test", lambda: 1000.0)
HOUR = 3600.0


class Invited(Scene):
    """A signed run of four replicas, of which the last is a stranger's, in memory."""

    def __init__(self, machines: tuple[str, ...] = (), clock_s: float = 1000.0) -> None:
        super().__init__()
        self.executor = JoinExecutor(machines=machines, clock=self.clock)
        self.executor._stamp = Stamp("coordinator", lambda: clock_s)
        self.executor.use_store(self.url, {})
        keep_key(KEY)
        config = make_config({"entrypoint": "m:f", "replicas": 4, "invited": [3]})
        run = Run(
            **STAMP(), run_id="run-1", config=config, package_version="0", signed_by=KEY.signed_by, code_sha256="1" * 64
        )
        self.log = create_run(of_run(self.store), run, "test", STAMP)
        self.store.create(keys.code("1" * 64), b"an archive")

    def offer(self, attempt: int = 1) -> ReplicaHandle:
        operator = KEY.operator(self.log.run_sha256)
        launched = Launched(self.log.run_sha256)
        requests = LaunchRequests(self.log.run, launched, self.log.store.url, dry=True, operator=operator)
        return self.executor.launch(requests.request(3, attempt, False))

    def link(self, lasts_s: float = HOUR) -> Link:
        user, invitation = create_invitation(self.log, 3, lasts_s, STAMP)
        return Link(
            url=self.url,
            run_sha256=self.log.run_sha256,
            code_sha256="1" * 64,
            signed_by=KEY.signed_by.key,
            replica_id=3,
            seed=to_text(user.seed),
            not_after=invitation.not_after,
        )

    def run_by(self, link: Link, program: Any, lent: Lent | None = None, **fields: Any) -> int:
        """A machine with the link and nothing else."""
        given = of_link(link, JoinSettings(**{"once": True, "hours": 0.1, **fields}))
        settings = {name: getattr(given, name) for name in vars(given)}
        return self.machine(program, why_not=only_code_of(link, of_run(self.store, {})), lent=lent, **settings).run()
