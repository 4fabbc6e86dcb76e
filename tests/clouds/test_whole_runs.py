"""A whole run through every executor, disturbed, over signed requests to S3, has the bits of an undisturbed one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clouds
import pytest
from cli_support import diloco
from real_runs import FAST, wait_for
from s3_server import S3Server

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch
from diloco_orchestrator.errors import NoSuchRun
from diloco_orchestrator.store import open_store
from diloco_orchestrator.verify import verify

# The caller's code. What differs between clouds is the line that makes the executor.
LAUNCHER = """
import json, sys
from diloco_orchestrator import launch
given = json.loads(sys.argv[1])
{construct}
run = launch("tiny_workloads:train_holding", executor=executor, **given)
run.wait()
"""
# Somebody else goes on, who knows the address of the bucket and nothing of the executor.
SUCCESSOR = """
import json, sys
from diloco_orchestrator import attach
given = json.loads(sys.argv[1])
print(attach(given["store"], storage_options=given["storage_options"], secrets=given["secrets"]).wait().status)
"""
SETTINGS: dict[str, Any] = {
    **FAST,
    "replicas": 3,
    "rounds": 4,
    "sync_every": 3,
    "replica_state": "round",
    "snapshot_every": 2,
    "env": {"OMP_NUM_THREADS": "1"},  # some sums come out differently with another count
}
VICTIM = 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests after each round of the same run in local processes over a folder, with nobody harmed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    args = {"folder": str(folder), "hold": []}
    executor = LocalProcessExecutor(folder / "executor")
    run = launch("tiny_workloads:train_holding", store=str(folder / "bucket"), executor=executor, args=args, **SETTINGS)
    assert run.wait(timeout=120).status == "completed"
    return [commit.base_digest for commit in RunReader(open_store(str(folder / "bucket"))).commits()]


@pytest.fixture(params=["local", "modal", "hf_jobs", "eks"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[clouds.Cloud]:
    with getattr(clouds, request.param)(tmp_path) as cloud:
        yield cloud


def test_a_preempted_replica_and_a_killed_coordinator_change_no_bit(
    cloud: clouds.Cloud, s3_server: S3Server, bucket: str, tmp_path: Path, undisturbed: list[str]
):
    url, options = f"s3://{bucket}/run", s3_server.options()
    given = {
        "store": url,
        "storage_options": options,
        "args": {"folder": str(tmp_path), "hold": [VICTIM]},
        "secrets": {"HF_TOKEN": "hf_" + "x" * 34},
        **SETTINGS,
    }
    environ = {**os.environ, **cloud.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = LAUNCHER.format(construct=cloud.construct)
    launcher = subprocess.Popen([sys.executable, "-c", program, json.dumps(given)], env=environ)
    try:
        wait_for((tmp_path / f"held-{VICTIM}").exists, "the victim is in the middle of round 2")
        launcher.kill()
    finally:
        launcher.wait()
    reader = reader_of(url, options)
    handle = reader.handle(VICTIM, 1)
    executor = cloud.executor()
    (found,) = [each for each in executor.find(reader.run.run_id) if each.replica_id == VICTIM]
    assert handle is not None and found.to_json() == handle.handle
    cloud.preempt(found)

    command = [sys.executable, "-c", SUCCESSOR, json.dumps(given)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.stdout == "completed\n"
    assert [commit.base_digest for commit in reader.commits()] == undisturbed
    assert reader.attempts(VICTIM) == [1, 2] and reader.attempts(0) == [1]
    assert verify(reader.store).agrees
    nothing_secret(reader, [s3_server.secret, given["secrets"]["HF_TOKEN"], *cloud.credentials])


def reader_of(url: str, options: dict[str, Any]) -> RunReader:
    found: list[RunReader] = []

    def look() -> bool:
        try:
            found.append(RunReader(open_store(url, options)))
        except NoSuchRun:
            return False
        return True

    wait_for(look, "run.json")
    return found[0]


def nothing_secret(reader: RunReader, secrets: list[str]) -> None:
    """I9: no credential is in any record, log or handle."""
    for info in reader.store.list(""):
        if info.key.endswith((".json", ".txt")):
            text = reader.store.get(info.key).decode(errors="replace")
            assert not [secret for secret in (*secrets, "X-Amz-Signature=") if secret in text], info.key


def test_the_doctor_looks_at_an_executor(cloud: clouds.Cloud, tmp_path: Path):
    """What a user with an account runs first."""
    named = cloud.executor().name
    options = {"eks": ["--cluster", "night-shift", "--region", "eu-central-1", "--image", "any"]}.get(named, [])
    done = diloco("doctor", "--executor", named, *options, "--json", cwd=tmp_path, environ=cloud.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["name"]: each["detail"] for each in json.loads(done.stdout)}
    assert "answered" in found[f"executor {named}: answer"]
    assert found[f"executor {named}: cancel"].startswith("cancelled")
    assert not [secret for secret in cloud.credentials if secret in done.stdout + done.stderr]
