"""Real runs of tiny workloads in local processes, and ways to disturb them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from patience import PATIENCE_S

from diloco_orchestrator import Run, RunReader
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.store.open_store import open_store

FAST: dict[str, Any] = {
    "timing": {"poll_s": 0.02, "heartbeat_s": 0.1, "round_timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S},
    "retry": {"backoff_s": 0.0},
    "guard": {"rule": "heldout", "min_steps": 1000},
    "quorum": "all",  # what is compared bit by bit must not depend on who was late
}


def digests(folder: Path | str) -> list[str]:
    return [commit.base_digest for commit in RunReader(open_store(str(folder))).commits()]


def pid_of(folder: Path, replica_id: int) -> int:
    claim = RunReader(open_store(str(folder))).attempts.claim(replica_id, 1)
    assert claim is not None
    return claim.pid


class Strike:
    """For `on_poll`: sends a signal once all replicas in `victims` are held in the middle of round 2."""

    def __init__(self, folder: Path, victims: list[int], number: signal.Signals) -> None:
        self.folder, self.victims, self.number, self.done = folder, victims, number, False

    def __call__(self) -> None:
        if not self.done and all((self.folder / f"held-{victim}").exists() for victim in self.victims):
            for victim in self.victims:
                os.kill(pid_of(self.folder / "bucket", victim), self.number)
            self.done = True
            (self.folder / "release").touch()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Return once `condition` holds. `what` says for whom reads the stack of a test that hangs; see `patience`."""
    while not condition():
        time.sleep(0.05)


def reader_of(folder: Path | str) -> RunReader:
    return RunReader(open_store(str(folder)))


def taken_away_in_mid_round(run: Run, bucket: Path, take_away: Callable[[AttemptRecords], object]) -> None:
    """Wait for a run, whose round 1 has 10,000 steps, and have replica 0 leave in it. Checks that what it had trained
    is published, and that its next attempt ends well."""
    attempts = reader_of(bucket).attempts
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(run.wait)

        def is_training() -> bool:
            beat = attempts.heartbeat(0, 1)
            return beat is not None and beat.inner_step > 5

        wait_for(is_training, "an inner step")
        take_away(attempts)
        waiting.result()
    ended, again = attempts.exit(0, 1), attempts.exit(0, 2)
    assert ended is not None and (ended.code, ended.reason) == (75, "preempted")
    manifest = json.loads((bucket / "rounds/00000001/contributions/0.json").read_text())
    assert 5 < manifest["origins"][0]["steps"] < 10_000
    assert again is not None and again.code == 0


def launcher(tmp_path: Path, entrypoint: str = "train", wait: bool = True, **settings: Any) -> subprocess.Popen[str]:
    """A process that launches a run in `tmp_path / "bucket"`, says so, and waits for it."""
    settings = {"replicas": 2, "rounds": 1000, "sync_every": 3, **FAST, **settings}
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it\n"
        "from diloco_orchestrator import LocalProcessExecutor, launch\n"
        f"run = launch('tiny_workloads:{entrypoint}', store={str(tmp_path / 'bucket')!r},\n"
        f"             executor=LocalProcessExecutor({str(tmp_path / 'executor')!r}, grace_s=0.5), **{settings!r})\n"
        "print('launched', flush=True)\n"
        f"{'run.wait()' if wait else 'import os; os.kill(os.getpid(), 9)'}\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None and started.stdout.readline() == "launched\n"
    return started
