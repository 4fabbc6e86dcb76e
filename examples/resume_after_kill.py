"""A launcher dies with kill -9 in mid-run, a replica too; `attach` finishes the run from the bucket alone.

python examples/resume_after_kill.py
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from diloco_orchestrator import RunReader, attach, open_store

LAUNCH = """
import sys
from diloco_orchestrator import launch
sys.path.insert(0, sys.argv[2])  # where plain_loop lies; replicas look where their launcher looks
# quorum="all": every round waits for every replica, so not one contribution is missing afterwards
settings = {"replicas": 2, "rounds": 30, "sync_every": 20, "args": {"lr": 3e-3}, "quorum": "all"}
launch("plain_loop:train", store=sys.argv[1], **settings).wait()
"""

if __name__ == "__main__":
    store = tempfile.mkdtemp() + "/run"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, store, sys.path[0]])
    while not Path(store, "rounds/00000002/commit.json").exists():
        assert launcher.poll() is None, "the launcher failed"
        time.sleep(0.1)
    launcher.kill()
    reader = RunReader(open_store(store))
    os.kill(reader.attempts.claim(1, attempt=1).pid, signal.SIGKILL)
    print(f"killed the launcher and replica 1 after round {len(reader.commits())}")

    result = attach(store).wait()
    print(
        f"{result.status} after {result.outer_steps} outer steps; attempts of replica 1: {reader.attempts.numbers(1)}"
    )
    assert result.status == "completed" and all(row.contributors == [0, 1] for row in result.metrics[:-1])
