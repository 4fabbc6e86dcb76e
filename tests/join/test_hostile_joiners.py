"""Hostile strangers as real machines: a signed run on an S3 server that checks signatures, joined by eight links."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from joined import ROOT
from patience import PATIENCE_S
from signed_s3 import SignedS3, running_signed_s3

from diloco_orchestrator import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.open_store import open_store

pytestmark = pytest.mark.slow
URL = "s3://bucket/run"
LAUNCHED, STRANGERS, HOSTILE, ROUNDS = 3, range(3, 11), (8, 9, 10), 6
INVITE = ("invite", URL, "--own-credentials", "--replica")


def diloco(folder: Path, server: SignedS3, *args: str, **environ: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"]))
    kept |= {**server.environ(), "XDG_STATE_HOME": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    with (folder / "output.txt").open("a") as output:  # nobody reads a pipe while the run goes on
        program = [sys.executable, "-m", "diloco_orchestrator.cli.main", *args]
        return subprocess.Popen(program, env=kept, cwd=folder, stdout=output, stderr=output, text=True)


def told(folder: Path) -> str:
    return (folder / "output.txt").read_text()


def test_hostile_machines_that_joined_by_a_link_are_left_out_and_honest_ones_are_not(tmp_path: Path):
    """Three of eight climb the loss, on machines of their own: nothing in the run's folder says which."""
    with running_signed_s3() as server:
        launcher, settings = tmp_path / "launcher", tmp_path / "settings.toml"
        settings.write_text(f"[timing]\npoll_s = 0.3\nstartup_timeout_s = {10.0 * PATIENCE_S}\n")
        run = ["run", "tiny_workloads:train_or_climb", "--store", URL, "--replicas", str(LAUNCHED + len(STRANGERS))]
        run += ["--invited", ",".join(map(str, STRANGERS)), "--guard-rule", "off", "--rounds", str(ROUNDS)]
        run += ["--sync-every", "5", "--quorum", "all", "--snapshot-every", str(ROUNDS), "--config", str(settings)]
        run += ["--executor", f"local:{LAUNCHED}", "--executor", f"join:{len(STRANGERS)}"]
        processes = [diloco(launcher, server, *run)]
        try:
            store = open_store(URL, server.options())
            while not store.exists("run.json"):
                assert processes[0].poll() is None, told(launcher)
                time.sleep(0.1)
            for replica_id in STRANGERS:
                made = diloco(tmp_path / "links", server, *INVITE, str(replica_id), XDG_STATE_HOME=str(launcher))
                assert made.wait(PATIENCE_S) == 0, told(tmp_path / "links")
                link = told(tmp_path / "links").split()[-1]
                one = tmp_path / f"stranger-{replica_id}"
                hostile = {"CLIMB": "1"} if replica_id in HOSTILE else {}
                processes.append(diloco(one, server, "join", link, "--every", "0.5", **hostile))
            assert processes[0].wait(10 * PATIENCE_S) == 0, told(launcher)
        finally:
            for each in processes:
                each.kill()
                each.wait()
        run_store = of_run(store)
        assert verify_run(run_store).agrees
        payloads, commits = ContributionReader(run_store), RunReader(store).commits()[:ROUNDS]
    for commit in commits:
        named = [payloads.checked(commit, each) for each in commit.checks or ()]
        assert {each.replica_id for each in named if each.scored} == set(range(LAUNCHED))
    late = commits[ROUNDS // 2 :]
    assert all(set(HOSTILE) <= {each.replica_id for each in commit.quarantined} for commit in late)
    averaged = [{each.replica_id for each in commit.answers if each.averaged} for commit in late]
    assert set(range(8)) == set.union(*averaged)
