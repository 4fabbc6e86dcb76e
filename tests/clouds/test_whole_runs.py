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
from hf_gateway import HfGateway
from real_runs import FAST, wait_for
from s3_server import S3Server

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch
from diloco_orchestrator.errors import NoSuchRun
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.store.open_store import open_store
from executors.contract import ReplicaHandle, ReplicaState

# The caller's code. What differs between clouds is the line that makes the executor.
pytestmark = pytest.mark.slow

LAUNCHER = """
import json, sys
from diloco_orchestrator import launch
given = json.loads(sys.argv[1])
{construct}
run = launch(given.pop("entrypoint", "tiny_workloads:train_holding"), executor=executor, **given)
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
VICTIM, LONG = 1, 9
REMOTE = ["modal", "hf_jobs", "eks", "slurm", "ray"]  # by their services in `clouds`


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return digests_of_an_undisturbed_run(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def undisturbed_for_long(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return digests_of_an_undisturbed_run(tmp_path_factory.mktemp("undisturbed"), rounds=LONG)


def digests_of_an_undisturbed_run(folder: Path, **settings: Any) -> list[str]:
    """After each round of the same run in local processes over a folder, with nobody harmed."""
    given = {**SETTINGS, **settings, "args": {"folder": str(folder), "hold": []}}
    executor = LocalProcessExecutor(folder / "executor")
    run = launch("tiny_workloads:train_holding", store=str(folder / "bucket"), executor=executor, **given)
    assert run.wait().status == "completed"
    return [commit.base_digest for commit in RunReader(open_store(str(folder / "bucket"))).commits()]


@pytest.fixture(params=["local", *REMOTE])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[clouds.Cloud]:
    with getattr(clouds, request.param)(tmp_path) as cloud:
        yield cloud


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["local", *REMOTE], indirect=True)
def test_a_preempted_replica_and_a_killed_coordinator_change_no_bit(
    cloud: clouds.Cloud, s3_server: S3Server, bucket: str, tmp_path: Path, undisturbed: list[str]
):
    stage = Stage(cloud, f"s3://{bucket}/run", s3_server.options(), args={"folder": str(tmp_path), "hold": [VICTIM]})
    stage.preempt_and_go_on(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cloud", "native_state", "leaves"),
    [
        ("slurm_told", "FAILED", True),  # so Slurm calls the end of a job that leaves with an exit code of its own
        ("slurm_told_in_full", "FAILED", True),
        ("slurm_with_grace", "FAILED", True),
        ("slurm_losing_a_node", "NODE_FAIL", False),
    ],
    indirect=["cloud"],
)
def test_each_way_in_which_slurm_takes_a_machine_is_a_preemption_and_changes_no_bit(
    cloud: clouds.Cloud,
    native_state: str,
    leaves: bool,
    s3_server: S3Server,
    bucket: str,
    tmp_path: Path,
    undisturbed: list[str],
):
    """`leaves`: the replica has time to publish and to leave by itself, with exit code 75."""
    retry = {"backoff_s": 0.0, "max_errors": 0}  # an attempt that counted as an error would end the run
    stage = Stage(
        cloud, f"s3://{bucket}/run", s3_server.options(), args={"folder": str(tmp_path), "hold": [VICTIM]}, retry=retry
    )
    victim = stage.preempt_and_go_on(tmp_path, undisturbed)
    status = cloud.executor().poll(victim)
    assert (status.state, status.native_state) == (ReplicaState.PREEMPTED, native_state)
    assert (status.exit_code == 75) == leaves
    assert ('DILOCO_EXIT {"code": 75}' in list(cloud.executor().logs(victim))) == leaves


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["hf_jobs"], indirect=True)
def test_an_account_at_hugging_face_is_enough(
    cloud: clouds.Cloud, hf_gateway: HfGateway, tmp_path: Path, undisturbed: list[str]
):
    """Jobs over a storage bucket; one is preempted, the coordinator is killed."""
    args = {"folder": str(tmp_path), "hold": [VICTIM]}
    stage = Stage(cloud, hf_gateway.url("runs"), hf_gateway.options(), args=args)
    stage.preempt_and_go_on(tmp_path, undisturbed)


ISLANDS = {
    "entrypoint": "island_workloads:train",
    "replicas": 2,
    "ranks_per_replica": [2, 1],
    "args": {"model": "ddp", "hidden": 31},
}


@pytest.fixture(scope="module")
def islands_here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("islands")
    given = {**SETTINGS, **ISLANDS}
    executor = LocalProcessExecutor(folder / "executor")
    launch(given.pop("entrypoint"), store=str(folder / "bucket"), executor=executor, **given).wait()
    return [commit.base_digest for commit in RunReader(open_store(str(folder / "bucket"))).commits()]


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["modal", "hf_jobs", "eks", "slurm", "kubernetes_pods", "slurm_nodes"], indirect=True)
def test_a_replica_of_two_ranks_trains_the_same_bits_there(
    cloud: clouds.Cloud, s3_server: S3Server, bucket: str, islands_here: list[str]
):
    stage = Stage(cloud, f"s3://{bucket}/run", s3_server.options(), **ISLANDS)
    assert stage.start(LAUNCHER).wait() == 0
    reader = stage.reader()
    assert [commit.base_digest for commit in reader.commits()] == islands_here
    keys_of_round = [keys.contribution(2, replica_id) for replica_id in (0, 1)]
    assert [Contribution.from_bytes(reader.store.get(key), key).ranks for key in keys_of_round] == [2, None]
    assert verify_run(reader.store).agrees
    stage.check_that_nothing_is_secret()


@pytest.mark.slow
def test_one_preemption_after_another_changes_no_bit(
    cloud: clouds.Cloud, s3_server: S3Server, bucket: str, tmp_path: Path, undisturbed_for_long: list[str]
):
    """Each replica is preempted in its turn, and each coordinator that goes on is killed in its."""
    stage = Stage(
        cloud,
        f"s3://{bucket}/run",
        s3_server.options(),
        args={"folder": str(tmp_path), "hold": [], "pause_s": 0.1},
        rounds=LONG,
    )
    coordinator = stage.start(LAUNCHER)
    reader = stage.reader()
    try:
        for victim in range(3):
            wait_for(lambda: len(reader.commits()) > 2 * victim, "the next round")  # noqa: B023
            cloud.preempt(stage.find(victim))
            wait_for(lambda: len(reader.attempts.numbers(victim)) == 2, "it is launched again")  # noqa: B023
            coordinator.kill()
            coordinator.wait()
            coordinator = stage.start(SUCCESSOR)
        assert coordinator.communicate()[0] == "completed\n"
    finally:
        coordinator.kill()
    assert [commit.base_digest for commit in reader.commits()] == undisturbed_for_long
    assert verify_run(reader.store).agrees
    stage.check_that_nothing_is_secret()


class Stage:
    """A run of three replicas in a bucket, and the processes that launch it or go on with it."""

    def __init__(self, cloud: clouds.Cloud, url: str, options: dict[str, Any], **settings: Any) -> None:
        self._cloud = cloud
        self._url, self._options = url, options
        self._secrets = {"HF_TOKEN": "hf_" + "x" * 34}
        self._given = {
            **SETTINGS,
            **settings,
            "store": self._url,
            "storage_options": self._options,
            "secrets": self._secrets,
        }

    def start(self, program: str) -> "subprocess.Popen[str]":
        environ = {**os.environ, **self._cloud.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program.format(construct=self._cloud.construct), json.dumps(self._given)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    def reader(self) -> RunReader:
        return reader_of(self._url, self._options)

    def find(self, replica_id: int) -> ReplicaHandle:
        """The newest attempt, as the vendor names it."""
        found = self._cloud.executor().find(self.reader().run.run_id)
        return [each for each in found if each.replica_id == replica_id][-1]

    def preempt_and_go_on(self, folder: Path, undisturbed: list[str]) -> ReplicaHandle:
        """Kill the coordinator, preempt the victim, attach; the run ends with the bits of an undisturbed one.

        Returns the handle of the attempt that was preempted.
        """
        launcher = self.start(LAUNCHER)
        try:
            wait_for((folder / f"held-{VICTIM}").exists, "the victim is in the middle of round 2")
        finally:
            launcher.kill()
            launcher.wait()
        reader = self.reader()
        handle, found = reader.attempts.handle(VICTIM, 1), self.find(VICTIM)
        assert handle is not None and found.to_json() == handle.handle
        self._cloud.preempt(found)

        assert self.start(SUCCESSOR).communicate()[0] == "completed\n"
        assert [commit.base_digest for commit in reader.commits()] == undisturbed
        assert reader.attempts.numbers(VICTIM) == [1, 2] and reader.attempts.numbers(0) == [1]
        assert verify_run(reader.store).agrees
        self.check_that_nothing_is_secret()
        return found

    def check_that_nothing_is_secret(self) -> None:
        """I9: no credential is in any record, log or handle."""
        secrets = [self._options["secret"], *self._secrets.values(), *self._cloud.credentials, "X-Amz-Signature="]
        store = self.reader().store
        for info in store.list(""):
            if info.key.endswith((".json", ".txt")):
                text = store.get(info.key).decode(errors="replace")
                assert not [secret for secret in secrets if secret in text], info.key


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


@pytest.mark.slow
def test_the_doctor_looks_at_an_executor(cloud: clouds.Cloud, tmp_path: Path):
    """What a user with an account runs first."""
    executor = cloud.executor()
    named = executor.name
    options = {
        "eks": ["--cluster", "night-shift", "--region", "eu-central-1", "--image", "any"],
        "slurm": ["--directory", str(tmp_path / "attempts")],
        "ray": ["--address", str((executor.options or {}).get("address"))],
    }.get(named, [])
    done = diloco("doctor", "--executor", named, *options, "--json", cwd=tmp_path, environ=cloud.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["name"]: each["detail"] for each in json.loads(done.stdout)}
    assert "answered" in found[f"executor {named}: answer"]
    assert found[f"executor {named}: cancel"].startswith("cancelled")
    assert not [secret for secret in cloud.credentials if secret in done.stdout + done.stderr]
