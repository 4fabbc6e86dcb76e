"""Whole runs on machines that join: lost, told to leave, joined late; the launcher killed; the bits of a quiet run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import diloco
from joined import ROOT, Machines, children_of, is_gone
from real_runs import FAST, wait_for
from s3_server import S3Server

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch
from diloco_orchestrator.errors import NoSuchRun
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from executors.contract import ReplicaHandle

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    **FAST,
    "replicas": 2,
    "rounds": 4,
    "sync_every": 3,
    "replica_state": "round",
    "snapshot_every": 2,
    "env": {"OMP_NUM_THREADS": "1"},  # some sums come out differently with another count
}
TOKEN = "hf_" + "x" * 34


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests after each round of the same run in local processes over a folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    executor = LocalProcessExecutor(folder / "executor")
    given = {**SETTINGS, "args": {"folder": str(folder), "hold": []}}
    run = launch("tiny_workloads:train_holding", store=str(folder / "bucket"), executor=executor, **given)
    assert run.wait().status == "completed"
    return [commit.base_digest for commit in RunReader(open_store(str(folder / "bucket"))).commits()]


class Stage:
    """A bucket, machines that join it, and `diloco` commands of a laptop that has nothing else in common with them."""

    def __init__(self, server: S3Server, bucket: str, folder: Path) -> None:
        self.url, self.folder, self.options = f"s3://{bucket}/run", folder, server.options()
        self._environ = {
            **os.environ,
            **server.environ(),
            "HF_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"])),
        }
        # A machine has no code of the run's own.
        self.machines = Machines(self.url, open_store(self.url, self.options), {**server.environ(), "HF_TOKEN": TOKEN})
        self._commands: list[subprocess.Popen[str]] = []

    def command(self, *args: str) -> "subprocess.Popen[str]":
        program = [sys.executable, "-m", "diloco_orchestrator.cli.main", *args]
        started = subprocess.Popen(program, env=self._environ, stdout=subprocess.PIPE, text=True)
        self._commands.append(started)
        return started

    def run(self, hold: list[int], *options: str) -> "subprocess.Popen[str]":
        settings = {**SETTINGS, "args": {"folder": str(self.folder), "hold": hold}}
        config = self.folder / "run.toml"
        config.write_text(toml(settings))
        place = ["--executor", "join", "--lost-after-s", "2", "--secret", "HF_TOKEN", "--config", str(config)]
        return self.command("run", "tiny_workloads:train_holding", "--store", self.url, *place, "--json", *options)

    def reader(self) -> RunReader:
        found: list[RunReader] = []

        def there() -> bool:
            try:
                found.append(RunReader(open_store(self.url, self.options)))
            except NoSuchRun:
                return False
            return True

        wait_for(there, "run.json")
        return found[0]

    def handle(self, replica_id: int, attempt: int) -> ReplicaHandle:
        record = self.reader().attempts.handle(replica_id, attempt)
        assert record is not None
        return ReplicaHandle.from_json(record.handle)

    def digests(self) -> list[str]:
        return [commit.base_digest for commit in self.reader().commits()]

    def check_that_nothing_is_secret(self) -> None:
        store, secrets = open_store(self.url, self.options), (TOKEN, self.options["secret"], "X-Amz-Signature=")
        for info in store.list(""):
            if info.key.endswith((".json", ".txt")):
                text = store.get(info.key).decode(errors="replace")
                assert not [each for each in secrets if each in text], info.key

    def close(self) -> None:
        for command in self._commands:
            command.kill()
            command.wait()
            assert command.stdout is not None
            command.stdout.close()
        self.machines.close()


def toml(values: dict[str, Any], name: str = "") -> str:
    """Settings as TOML: plain values first, then tables."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [toml(value, f"{name}.{key}".lstrip(".")) for key, value in values.items() if isinstance(value, dict)]
    return "\n".join([*([f"[{name}]"] if name else []), *plain, *tables]) + "\n"


@pytest.fixture
def stage(s3_server: S3Server, bucket: str, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(s3_server, bucket, tmp_path)
    yield made
    made.close()


def test_a_lost_machine_a_late_one_and_a_killed_launcher_change_no_bit(stage: Stage, undisturbed: list[str]):
    first, second = stage.machines.join(), stage.machines.join()  # before there is a run
    launcher = stage.run([1])
    wait_for((stage.folder / "held-1").exists, "replica 1 is in the middle of round 2")
    victim = stage.machines.of(stage.handle(1, 1))
    stage.machines.lose(victim)
    reader = stage.reader()
    wait_for(lambda: reader.attempts.numbers(1) == [1, 2], "its replica is offered again")
    launcher.kill()
    launcher.communicate()

    late = stage.machines.join()
    attached = stage.command("attach", stage.url, "--secret", "HF_TOKEN", "--json")
    assert json.loads(attached.communicate()[0])["status"] == "completed"
    assert stage.digests() == undisturbed
    assert reader.attempts.numbers(0) == [1]
    assert stage.machines.of(stage.handle(1, 2)) is late
    survivor = first if victim is second else second
    assert [survivor.wait(), late.wait()] == [0, 0]  # the run is over
    assert verify_run(reader.store).agrees
    stage.check_that_nothing_is_secret()


def test_machines_take_part_in_a_run_that_is_launched_anew_in_the_same_folder(stage: Stage, undisturbed: list[str]):
    """Its user gave the first one up: killed the launcher, and removed the folder until nobody wrote there any more."""
    machines = [stage.machines.join(), stage.machines.join()]
    launcher = stage.run([1])
    wait_for((stage.folder / "held-1").exists, "replica 1 is in the middle of round 2")
    launcher.kill()
    launcher.communicate()
    store = stage.reader().store
    remove_all(store)
    (stage.folder / "release").touch()
    wait_for(lambda: not any(children_of(each.pid) for each in machines), "the replicas have ended")
    remove_all(store)
    launcher = stage.run([])
    assert json.loads(launcher.communicate()[0])["status"] == "completed"
    assert [each.wait() for each in machines] == [0, 0]  # that run is over
    assert stage.digests() == undisturbed
    assert verify_run(stage.reader().store).agrees


def remove_all(store: Store) -> None:
    for info in list(store.list("")):
        store.delete(info.key)


def in_the_middle_of_a_round(stage: Stage) -> "tuple[subprocess.Popen[str], subprocess.Popen[str]]":
    """The launcher of a run on two machines, and the machine of replica 1, which is held in round 2."""
    stage.machines.join()
    stage.machines.join()
    launcher = stage.run([1])
    wait_for((stage.folder / "held-1").exists, "replica 1 is in the middle of round 2")
    return launcher, stage.machines.of(stage.handle(1, 1))


def test_a_machine_that_is_told_to_leave_hands_its_replica_to_the_next(stage: Stage, undisturbed: list[str]):
    launcher, machine = in_the_middle_of_a_round(stage)
    stage.machines.join()
    (stage.folder / "release").touch()
    assert stage.machines.leave(machine) == 75
    assert json.loads(launcher.communicate()[0])["status"] == "completed"
    ended = stage.reader().attempts.exit(1, 1)
    assert ended is not None and ended.code == 75
    assert stage.digests() == undisturbed


def test_a_replica_leaves_when_its_diloco_join_was_killed(stage: Stage, undisturbed: list[str]):
    """SIGKILL of `diloco join` alone: the machine is still there, and what it trained is not lost."""
    launcher, machine = in_the_middle_of_a_round(stage)
    (replica,) = children_of(machine.pid)
    machine.kill()
    machine.wait()
    (stage.folder / "release").touch()
    wait_for(lambda: is_gone(replica), "the replica has left")
    ended = stage.reader().attempts.exit(1, 1)
    assert ended is not None and ended.code == 75
    stage.machines.join()
    assert json.loads(launcher.communicate()[0])["status"] == "completed"
    assert stage.digests() == undisturbed


def test_the_doctor_examines_a_machine_that_has_joined(stage: Stage, s3_server: S3Server):
    stage.machines.join()
    done = diloco(
        "doctor", stage.url, "--executor", "join", "--json", cwd=stage.folder, environ=s3_server.environ()
    )  # fmt: skip
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert all(each["ok"] for each in found.values()), done.stdout
    assert found["executor join: cancel"]["detail"].startswith("cancelled")
    assert found["join over there: start"]["detail"].startswith("examined")
    assert [info.key for info in open_store(stage.url, stage.options).list("")] == []


def test_a_machine_may_train_its_replica_with_several_ranks(stage: Stage):
    """Of two machines one has two GPUs, so to speak, which the run does not know."""
    settings = {**SETTINGS, "rounds": 2, "args": {"model": "ddp", "hidden": 31}, "guard": {"rule": "off"}}
    config = stage.folder / "run.toml"
    config.write_text(toml(settings))
    two, one = stage.machines.join("--replica", "0", "--ranks", "2"), stage.machines.join("--replica", "1")
    place = ["--executor", "join", "--config", str(config), "--json"]
    launcher = stage.command("run", "island_workloads:train", "--store", stage.url, *place)
    assert json.loads(launcher.communicate()[0])["status"] == "completed"
    assert [two.wait(), one.wait()] == [0, 0]
    reader = stage.reader()
    found = [
        Contribution.from_bytes(reader.store.get(key), key).ranks for i in (0, 1) if (key := keys.contribution(2, i))
    ]
    assert found == [2, None] and verify_run(reader.store).agrees
    log = reader.store.get(keys.log_text(0, 1)).decode()
    assert "[rank 0]" in log and "with 2 ranks, and the run's configuration says 1" in log
