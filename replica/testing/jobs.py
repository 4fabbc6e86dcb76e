"""`Jobs`: runs the processes of a training function's check through an attempt server, and reads their results."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import error_line
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, Intent
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Run
from diloco_orchestrator.protocol.version import VERSION
from diloco_orchestrator.replica.testing.attempt_server import OUTPUT, Job
from diloco_orchestrator.replica.testing.watched import Notes, Tensors, Watch, read_tensors
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.open_store import open_store

_LAST_LINES = 15  # of the output of a server that died


@dataclass(frozen=True)
class Seen:
    """The result of a check's process: how it ended, its observations, and its run's log as far as written then."""

    notes: Notes
    code: int | None = None  # exit code; None for a process that was killed
    late: bool = False  # killed because it took longer than the limit
    reason: str = ""  # of the exit record
    error: str = ""  # type and message of what it raised, in one line
    digests: Sequence[str | None] = ()  # of each commit's base; the final evaluation round's is the last base
    rounds: Sequence[Contribution] = ()  # this replica's manifests of the rounds that took training
    model: Tensors | None = None  # trainable parameters once the training function has returned
    base: Tensors | None = None  # trainable parameters when the run had ended: the last base
    next: Tensors | None = None  # trainable parameters one step after the first round; plain only
    moved: Tensors | None = None  # by how much each parameter was moved before that step; disturbed only

    @property
    def completed(self) -> bool:
        return self.code == 0

    @property
    def was_killed(self) -> bool:
        return self.code is None and not self.late

    def words(self) -> str:
        """A phrase about how the process ended."""
        if self.late:
            return "took longer than the limit and was killed"
        return self.error or self.reason or ("was killed" if self.code is None else f"ended with exit code {self.code}")


@dataclass(frozen=True)
class Wanted:
    """One process of a check to start. `run`: name of its run; processes with one name take part in one run.

    `after`: the name of another process in the same call that must end first; empty for none.
    """

    name: str
    run: str
    watch: Mapping[str, Any]
    config: RunConfig
    replica_id: int = 0
    attempt: int = 1
    after: str = ""


class Jobs:
    """Context manager that runs the processes of a check in an attempt server. `folder`: for runs and observations."""

    def __init__(self, folder: Path, entrypoint: str, most: int, limit_s: float) -> None:
        self._folder = folder
        self._runs: dict[str, str] = {}  # sha256 of run.json, by the run's name
        self._count = 0
        given = {"entrypoint": entrypoint, "path": sys.path, "most": most, "limit_s": limit_s}
        # One thread, so that a fork is safe, and bits do not depend on how many processes compute.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._log = (folder / "server.txt").open("w+")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "diloco_orchestrator.replica.testing.attempt_server", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._log.close()

    def run(self, wanted: Sequence[Wanted]) -> dict[str, Seen]:
        """Run these processes, several at a time, each after the one it waits for; returns their results by name."""
        numbers = {self._submit(each): each for each in wanted if not each.after}
        found: dict[str, Seen] = {}
        while numbers:
            reply = self._reply()
            each = numbers.pop(reply["number"])
            found[each.name] = self._seen(each, reply["status"], reply["late"])
            numbers |= {self._submit(other): other for other in wanted if other.after == each.name}
        return found

    def _submit(self, wanted: Wanted) -> int:
        folder = self._folder / wanted.name
        folder.mkdir()
        watch = Watch(**{"folder": str(folder), **wanted.watch})
        self._intend(wanted)
        self._count += 1
        job = Job(
            number=self._count,
            url=self._url(wanted.run),
            replica_id=wanted.replica_id,
            attempt=wanted.attempt,
            watch=asdict(watch),
            run_sha256=self._runs[wanted.run],
        )
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(asdict(job)) + "\n")
        self._server.stdin.flush()
        return self._count

    def _intend(self, wanted: Wanted) -> None:
        """Create the intent, which announces an attempt, as a coordinator does, and before it the run if missing."""
        stamp, store = Stamp("check", SystemClock().wall_time), open_store(self._url(wanted.run))
        if wanted.run not in self._runs:
            run = Run(**stamp(), run_id="check", config=wanted.config, package_version=VERSION)
            self._runs[wanted.run] = create_run(store, run, "check", stamp).run_sha256
        intent = Intent(
            **stamp(),
            replica_id=wanted.replica_id,
            attempt=wanted.attempt,
            leg=1,
            executor="check",
            why="to check the training function",
            claim_token=stamp.unforeseen(),
        )
        Writer(store, Role.COORDINATOR).create(intent)

    def _url(self, run: str) -> str:
        return str(self._folder / "runs" / run)

    def _reply(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            self._server.wait()
            self._log.seek(0)
            last = "".join(self._log.readlines()[-_LAST_LINES:])
            raise RuntimeError(f"the process that starts attempts died (exit code {self._server.returncode}):\n{last}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _seen(self, wanted: Wanted, status: int, late: bool) -> Seen:
        folder, code = self._folder / wanted.name, os.waitstatus_to_exitcode(status)
        notes = Notes.read(folder)
        seen = Seen(
            notes=notes,
            code=None if code == -signal.SIGKILL else code,
            late=late,
            error=error_line("" if code == 0 else _output(folder)),
            model=read_tensors(folder, "model"),
            base=read_tensors(folder, "base"),
            next=read_tensors(folder, "next"),
            moved=read_tensors(folder, "moved"),
        )
        return self._with_log(seen, wanted)

    def _with_log(self, seen: Seen, wanted: Wanted) -> Seen:
        """`seen`, the result of a process, with the commits and manifests that its run's bucket has now."""
        store = open_store(self._url(wanted.run))
        ended: Exit | None = AttemptRecords(store).exit(wanted.replica_id, wanted.attempt)
        commits = list(RunLog(store).commits())
        found = [keys.contribution(commit.round, wanted.replica_id) for commit in commits]
        manifests = [Contribution.from_bytes(store.get(key), key) for key in found]
        return replace(
            seen,
            reason=ended.reason if ended else "",
            error=error_line(ended.error or "") if ended else seen.error,
            digests=[commit.base_digest for commit in commits],
            rounds=[manifest for manifest in manifests if manifest.kind != "scores"],
        )


def _output(folder: Path) -> str:
    path = folder / OUTPUT
    return path.read_text(errors="replace") if path.exists() else ""
