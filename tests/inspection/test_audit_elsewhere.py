"""Audits of runs whose bucket is S3, and of runs of a trainer: trained again bit for bit, lies found."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import own_loops
import pytest
from dishonest_workloads import LIAR, LIE
from real_runs import FAST
from s3_server import S3Server, running_server

from diloco_orchestrator import LocalProcessExecutor, launch
from diloco_orchestrator import audit as audit_run
from diloco_orchestrator.inspection.audit.findings import AuditOutcome

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as found:
        found.make_bucket("audited")
        yield found


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_run_over_s3_is_audited_from_its_bucket_and_a_lie_is_found(scheme, server, tmp_path, monkeypatch):
    monkeypatch.setenv(LIE, "2=scale")
    store, options = f"{scheme}://audited/{scheme.replace('+', '-')}", server.options()
    settings = {"replicas": 2, "rounds": 2, "sync_every": 4, **FAST}
    executor = LocalProcessExecutor(tmp_path / "executor")
    launch("dishonest_workloads:train", store=store, executor=executor, storage_options=options, **settings).wait()
    monkeypatch.delenv(LIE)
    done = audit_run(store, draw=4, seed=1, storage_options=options)
    found = {(each.range_.round, each.range_.replica_id): each.outcome for each in done.findings}
    assert len(found) == 4 and found.pop((2, LIAR)) is AuditOutcome.DIFFERS
    assert set(found.values()) == {AuditOutcome.EQUAL}
    assert "secret" not in json.dumps(done.to_json()) and server.secret not in done.words()


def test_the_command_audits_a_run_over_s3_with_the_credentials_of_its_environment(server, tmp_path):
    """As a user would, who exported them; the replicas and the re-runs take them from there."""
    environ = {**os.environ, **server.environ(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    main = [sys.executable, "-m", "diloco_orchestrator.cli.main"]
    where, timing = "s3://audited/by-command", ["--timing-poll-s", "0.02", "--timing-heartbeat-s", "0.1"]
    wanted = ["--replicas", "2", "--rounds", "1", "--sync-every", "4", "--quorum", "all", "--guard-rule", "off"]
    launched = [*main, "run", "dishonest_workloads:train", "--store", where, *wanted, *timing]
    subprocess.run(launched, env=environ, cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(
        [*main, "audit", where, "--draw", "2", "--seed", "1"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 ranges" in done.stdout or "All of the run" in done.stdout
    assert server.secret not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", own_loops.KINDS)
def test_own_optimizers_bf16_workers_and_accumulation_are_repeated_bit_for_bit_after_a_kill(kind, tmp_path: Path):
    settings = {"replicas": 2, "rounds": 3, "sync_every": 4, **FAST, "args": {"folder": str(tmp_path), "kind": kind}}
    executor = LocalProcessExecutor(tmp_path / "executor")
    assert launch("own_loops:train", store=str(tmp_path / "bucket"), executor=executor, **settings).wait()
    assert (tmp_path / "killed").exists()
    done = audit_run(str(tmp_path / "bucket"), draw=6, seed=1)
    assert [(each.outcome, each.words) for each in done.findings] == [(AuditOutcome.EQUAL, "")] * 6


@pytest.mark.parametrize("kind", ["trainer", "grpo"])
def test_a_run_of_a_trainer_is_trained_again_bit_for_bit(kind, tmp_path: Path):
    """The trainer restores order of data, schedule, random state and optimizer as it does after a kill."""
    pytest.importorskip("trl", reason="the extra [trl] is not installed")
    settings = {"replicas": 2, "rounds": 2, "sync_every": 4, **FAST, "args": {"folder": str(tmp_path), "kind": kind}}
    executor = LocalProcessExecutor(tmp_path / "executor")
    assert launch("tiny_trainers:train", store=str(tmp_path / "bucket"), executor=executor, **settings).wait()
    done = audit_run(str(tmp_path / "bucket"), draw=4, seed=1)
    assert [(each.outcome, each.words) for each in done.findings] == [(AuditOutcome.EQUAL, "")] * 4
