"""`python -m diloco_orchestrator.replica.testing.attempt_server`: runs the processes of a check as its own forks.

The libraries and the user's module are imported once. Then every line of JSON on standard input is one `Job` for a
fork, and every line on standard output reports the end of a job. A fork starts from the state after the imports, so
jobs do not affect each other. On a machine with a GPU each fork imports the user's module itself, because a CUDA
context does not survive a fork. The ranks of a replica of several are new processes, each with imports of its own.
"""

import json
import os
import selectors
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from diloco_orchestrator.clock import SystemClock, ThreadBackground
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import load_entrypoint
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.process.rank_children import RankProgram
from diloco_orchestrator.replica.process.rank_processes import RankProcesses
from diloco_orchestrator.replica.process.run_attempt import (
    Ending,
    load_training_libraries,
    process_environment,
    run_attempt,
)

OUTPUT = "output.txt"  # of a job's process, in its folder
WATCH = "DILOCO_CHECK_WATCH"  # environment variable of a job's ranks: the fields of `watched.Watch`, as JSON
WATCHED_RANK = "diloco_orchestrator.replica.testing.watched_rank"


@dataclass(frozen=True)
class Job:
    """One process to run: an attempt of a replica in the run at `url`."""

    number: int
    url: str
    replica_id: int
    attempt: int
    watch: dict[str, Any]  # the fields of `watched.Watch`
    run_sha256: str  # of run.json


@dataclass
class _Server:
    """Forks one process for each job, at most `most` at a time; kills those that take longer than `limit_s`."""

    most: int
    limit_s: float
    replies: TextIO
    waiting: list[Job] = field(default_factory=list)
    running: dict[int, tuple[Job, float]] = field(default_factory=dict)  # by process: the job, and its deadline
    clock: SystemClock = field(default_factory=SystemClock)

    def serve(self) -> None:
        """Run jobs until standard input ends; then kill running ones."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        selector = selectors.DefaultSelector()
        selector.register(woken, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        received = b""
        while True:
            deadlines = [deadline for _, deadline in self.running.values()]
            pause = max(0.0, min(deadlines) - self.clock.now()) if deadlines else None
            ready = {key.fd for key, _ in selector.select(pause)}
            if woken in ready:
                os.read(woken, 4096)
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    break
                *lines, received = (received + data).split(b"\n")
                self.waiting += [Job(**json.loads(line)) for line in lines]
            self._reap()
            self._start(selector)
        for process in self.running:
            _kill_group(process)

    def _start(self, selector: selectors.BaseSelector) -> None:
        while self.waiting and len(self.running) < self.most:
            job = self.waiting.pop(0)
            process = os.fork()
            if process == 0:
                selector.close()
                _in_fork(job)
            self.running[process] = job, self.clock.now() + self.limit_s

    def _reap(self) -> None:
        for process, (job, deadline) in list(self.running.items()):
            if self.clock.now() >= deadline:
                _kill_group(process)
            ended, status = os.waitpid(process, os.WNOHANG if self.clock.now() < deadline else 0)
            if ended:
                del self.running[process]
                _kill_group(process)  # workers of a loader that outlive it
                late = self.clock.now() >= deadline
                self.replies.write(json.dumps({"number": job.number, "status": status, "late": late}) + "\n")
                self.replies.flush()


def _kill_group(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _in_fork(job: Job) -> None:
    """Run a job in this process, which is a fork, and exit."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder = Path(job.watch["folder"])
        output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(old, new)
        code = _take_part(job)
    except BaseException:  # a fork ends here whatever happens
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_part(job: Job) -> int:
    """Run an attempt of the job's run, as a replica's process does, with its ranks. Returns the exit code."""
    from diloco_orchestrator.replica.testing.watched import Watch, watched

    clock, launched = SystemClock(), Launched(job.run_sha256)
    environ = {**process_environment(), WATCH: json.dumps(job.watch)}
    arguments = ["--store", job.url, "--replica-id", str(job.replica_id), "--attempt", str(job.attempt)]
    arguments += launched.arguments()

    def train_in_ranks(attempt: Attempt, ranks: int) -> Ending:
        return RankProcesses(attempt, ranks, RankProgram(arguments, environ, WATCHED_RANK), clock).run()

    ending = run_attempt(
        job.url,
        job.replica_id,
        job.attempt,
        launched,
        clock=clock,
        background=ThreadBackground(),
        environ=environ,
        load_libraries=lambda: None,
        load_entrypoint=watched(Watch(**job.watch)),
        train_in_ranks=train_in_ranks,
    )
    return ending.code


def main() -> None:
    """Import the libraries and the user's module, then run jobs from standard input until it ends.

    Its command line argument is a JSON object: `entrypoint`, `path` (the module search path), `most` (jobs at a time),
    and `limit_s` (seconds until a job is killed).
    """
    given = json.loads(sys.argv[1])
    sys.path[:] = given["path"]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's module prints is not a reply
    load_training_libraries(process_environment())
    import torch

    from diloco_orchestrator.replica.testing import watched  # noqa: F401 - imported once for all forks

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # torch imports its compiler for the first optimizer
    if not torch.cuda.is_available():
        try:
            load_entrypoint(given["entrypoint"])
        except BaseException:  # each attempt fails alike, and says so
            traceback.print_exc()
    sys.stdout.flush()
    _Server(given["most"], given["limit_s"], replies).serve()


if __name__ == "__main__":
    main()
