"""The executor contract on a genuine Slurm, and what only the genuine one shows."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from genuine_slurm import GenuineSlurm, running_slurm
from page_blocks import blocks

from diloco_orchestrator.inspection.verify import verify
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from executors.contract import ExecutorDenied, ReplicaHandle, ReplicaState
from executors.remote_base import attempt_name, run_label
from executors.slurm_jobs import SlurmExecutor
from executors.testing import SECRET, ExecutorContract, Rig, ended_state, request_of, wait_until
from executors.testing.rig import RUN_ID, STAY

pytestmark = pytest.mark.slow


class SlurmRig(Rig):
    def __init__(self, slurm: GenuineSlurm, folder: Path) -> None:
        self.slurm = slurm
        self._options = {"conf": str(slurm.conf), "directory": str(folder / "attempts")}
        self.construct = f"from executors import SlurmExecutor; executor = SlurmExecutor(**{self._options!r})"

    def executor(self, **options: Any) -> SlurmExecutor:
        return SlurmExecutor(**{**self._options, **options})

    def preempt(self, handle: ReplicaHandle) -> None:
        self.slurm.preempt_all()

    def hold(self, on: bool) -> None:
        self.slurm.call("scontrol", "update", "PartitionName=spare", f"State={'DOWN' if on else 'UP'}")

    def no_capacity(self, on: bool) -> None:
        self.slurm.call("scontrol", "update", "PartitionName=spare", f"State={'INACTIVE' if on else 'UP'}")

    def failing(self, on: bool) -> None:
        if on:
            self.slurm.stop_controller()
        else:
            self.slurm.start_controller()

    def forget(self, handle: ReplicaHandle) -> None:
        self.slurm.forget_everything()

    def refuse(self, replica_id: int) -> None:
        (self.slurm.folder / "refused").write_text(f"-r{replica_id}-\n")

    def machines(self, run_id: str) -> int:
        return sum(name.startswith(f"dl-{run_label(run_id)}-") for name in self.slurm.jobs("--states=all"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenuineSlurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def rig(slurm: GenuineSlurm, tmp_path: Path) -> Iterator[SlurmRig]:
    yield SlurmRig(slurm, tmp_path)
    slurm.forget_everything()


class TestSlurm(ExecutorContract):
    pass


def test_slurm_shows_and_keeps_no_secret(rig: SlurmRig, slurm: GenuineSlurm):
    executor = rig.executor()
    code = "import os; print('got', len(os.environ['KEY'])); " + STAY
    handle = executor.launch(request_of(code, secrets={"KEY": SECRET}, env={"PLAIN": "plain value"}))
    wait_until(lambda: f"got {len(SECRET)}" in list(executor.logs(handle)), "the job has read its secret")
    shown = slurm.call("scontrol", "show", "job", handle.native_id, "--details")
    shown += slurm.call("scontrol", "write", "batch_script", handle.native_id, "-") + slurm.call("squeue", "--json")
    assert "plain value" in shown and SECRET not in shown
    kept = [path for path in slurm.folder.rglob("*") if path.is_file()]
    assert any(path.name == "script" for path in kept)  # what the controller and the node keep of the job
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []
    assert [path.name for path in Path(handle.native["dir"]).iterdir() if path.name.startswith("secrets")] == []


def test_a_replica_is_told_before_slurm_takes_its_machine(rig: SlurmRig, slurm: GenuineSlurm):
    """By the preemption itself: SIGTERM first, and KillWait seconds to publish in."""
    executor = rig.executor()
    handle = executor.launch(request_of(STAY))
    wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
    slurm.preempt_all()
    assert ended_state(executor, handle) is ReplicaState.PREEMPTED
    assert 'DILOCO_EXIT {"code": 75}' in list(executor.logs(handle))
    assert executor.poll(handle).exit_code == 75


def test_slurm_runs_no_attempt_twice(rig: SlurmRig, slurm: GenuineSlurm):
    executor = rig.executor()
    handle = executor.launch(request_of(STAY))
    wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
    slurm.call("scontrol", "requeue", handle.native_id, check=False)
    assert executor.poll(handle).state is ReplicaState.RUNNING  # refused: --no-requeue
    other = executor.launch(request_of(STAY, attempt=2))
    wait_until(lambda: "here" in list(executor.logs(other)), "it has started")
    slurm.call("scontrol", "update", f"JobId={other.native_id}", "Requeue=1")  # as a site's plugin may
    slurm.call("scontrol", "requeue", other.native_id)
    assert ended_state(executor, other) is ReplicaState.PREEMPTED
    slurm.call("scontrol", "update", f"JobId={other.native_id}", "StartTime=now")  # else it waits for two minutes
    wait_until(lambda: slurm.jobs("--states=FAILED", f"--jobs={other.native_id}") != [], "it ran again")
    assert executor.poll(other).state is ReplicaState.PREEMPTED
    assert list(executor.logs(other)).count("here") == 1


def test_a_launcher_in_a_job_that_was_requeued_launches_as_any_other(
    rig: SlurmRig, slurm: GenuineSlurm, monkeypatch: pytest.MonkeyPatch
):
    """Its own variables reached its jobs, whose script took them for its own: that it had been requeued."""
    for name, value in {"SLURM_RESTART_COUNT": "1", "SLURM_MEM_PER_CPU": "50"}.items():
        monkeypatch.setenv(name, value)
    shows = "import os; print([name for name in ('SLURM_RESTART_COUNT', 'SLURM_MEM_PER_CPU') if name in os.environ])"
    executor = rig.executor(memory=100)
    handle = executor.launch(request_of(shows))
    assert ended_state(executor, handle) is ReplicaState.SUCCEEDED
    assert list(executor.logs(handle)) == ["[]"]


def test_a_launch_that_slurm_refuses_leaves_no_job_and_says_why(rig: SlurmRig, slurm: GenuineSlurm):
    for options, words in (
        ({"partition": "nope"}, "invalid partition specified: nope"),
        ({"gpu": 1}, "Invalid generic resource"),
        ({"memory": "900G"}, "Memory specification can not be satisfied"),
    ):
        with pytest.raises(ExecutorDenied, match=words):
            rig.executor(**options).launch(request_of(STAY))
        assert rig.executor().find(RUN_ID) == []
    assert slurm.jobs("--states=all") != []  # Slurm lists one of them as failed; the next launch does not adopt it
    handle = rig.executor().launch(request_of(STAY))
    wait_until(lambda: rig.executor().poll(handle).state is ReplicaState.RUNNING, "it runs")


def test_the_end_of_an_attempt_is_known_after_slurm_has_forgotten_it(tmp_path: Path):
    with running_slurm(tmp_path / "slurm", min_job_age=2) as slurm:
        executor = SlurmRig(slurm, tmp_path).executor()
        code = "print('DILOCO_EXIT {\"code\": 78}'); raise SystemExit(78)"
        handles = [executor.launch(request_of(code)), executor.launch(request_of(STAY, replica_id=1))]
        executor.cancel(handles[1])
        slurm.wait(lambda: slurm.jobs("--states=all") == [], "the controller forgets")
        again = SlurmRig(slurm, tmp_path).executor()
        states = [ReplicaState.FAILED, ReplicaState.CANCELLED]
        assert [status.state for status in again.poll_many(handles)] == states
        assert [(each.replica_id, each.native_id) for each in again.find(RUN_ID)] == [(0, "1"), (1, "2")]
        assert executor.launch(request_of(code)).native_id == handles[0].native_id


def test_a_node_that_dies_without_a_word_is_a_preemption(tmp_path: Path):
    """The controller misses the node's answers; nothing on the node says that the job has ended."""
    code = "import os; print('pids', os.getpid(), os.getppid(), flush=True); " + STAY
    with running_slurm(tmp_path / "slurm", nodes=2, options="SlurmdTimeout=10") as slurm:
        executor = SlurmRig(slurm, tmp_path).executor()
        handle = executor.launch(request_of(code))
        wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
        (said,) = (line for line in executor.logs(handle) if line.startswith("pids"))
        node = slurm.node_of(handle.native_id)
        slurm.cut_power(node, *(int(pid) for pid in said.split()[1:]))  # the replica and its slurmstepd
        assert executor.poll(handle).state is ReplicaState.RUNNING
        assert ended_state(executor, handle) is ReplicaState.PREEMPTED
        status = executor.poll(handle)
        assert (status.native_state, status.reason) == ("NODE_FAIL", "lost")
        slurm.start_node(node)


def test_the_job_of_the_page_trains_a_replica_over_several_nodes(tmp_path: Path):
    """docs/recipes/islands.md. Both nodes are on loopback, where their names are no hosts' and have no GPUs."""
    page = Path(__file__).parents[2] / "docs/recipes/islands.md"
    program, job = (blocks(page, kind)[-1] for kind in ("python", "bash"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    here = {
        " --gres=gpu:8": f" --output={tmp_path}/output-%j",
        "torchrun": f"{sys.executable} -m torch.distributed.run --local-addr 127.0.0.1",
        "--nproc-per-node 8": "--nproc-per-node 1",
        "$head:29500": meeting,
        "s3://bucket/run": str(tmp_path / "run"),
        '"$1" 2': '"$1" 1',
    }
    for its, ours in here.items():
        assert job.count(its) == 1, its
        job = job.replace(its, ours)
    (tmp_path / "own_ranks.py").write_text(program)
    (tmp_path / "island.sh").write_text(job)
    with running_slurm(tmp_path / "slurm", nodes=2, cpus=1) as slurm:
        environ = "ALL,GLOO_SOCKET_IFNAME=lo,OMP_NUM_THREADS=1"
        where = [f"--chdir={tmp_path}", f"--export={environ}", str(tmp_path / "island.sh")]
        slurm.call("sbatch", "--requeue", "--wait", *where, "0", check=False)
    output = "".join(path.read_text() for path in tmp_path.glob("output-*"))
    assert (tmp_path / "run" / "run.json").exists(), output
    manifest = (tmp_path / "run" / keys.contribution(5, 0)).read_bytes()
    assert Contribution.from_bytes(manifest, "round 5").ranks == 2, output
    assert verify(str(tmp_path / "run")).agrees


def test_names_of_jobs_are_what_slurm_lists(rig: SlurmRig, slurm: GenuineSlurm):
    """The longest name, so that no column cuts it."""
    request = request_of(STAY, run_id="A run with a long name, " * 4, replica_id=1023, attempt=999)
    handle = rig.executor().launch(request)
    assert slurm.jobs() == [attempt_name(request)]
    (found,) = rig.executor().find(request.run_id)
    assert found == handle
    rig.executor().cancel(handle)
