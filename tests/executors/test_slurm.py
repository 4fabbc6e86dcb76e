"""What is sent to Slurm and what its answers mean. Tables and messages are those of a genuine Slurm 22.05."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executors import LaunchRequest, NoCapacity, ReplicaHandle, ReplicaState, SlurmExecutor
from executors.command_line import error_of
from executors.contract import ExecutorDenied, ExecutorError, MissingSdk, Unavailable
from executors.slurm_cli import FAILURES, submit_environment
from executors.slurm_objects import Job, accounted_jobs, queued_jobs, script_of, seconds_of, status_of
from executors.testing import SECRET, request_of

NAME = "dl-contract-run-r0-a1"
# squeue --Format=JobID:20,State:20,exit_code:12,RestartCnt:12,Name:80,Reason:200, without the blanks at line ends
SQUEUE = "\n".join(
    f"{job_id:<20}{state:<20}{code:<12}{restarts:<12}{name:<80}{reason}"
    for job_id, state, code, restarts, name, reason in [
        (9, "PENDING", 0, 0, NAME, "Nodes required for job are DOWN, DRAINED or reserved"),
        (6, "FAILED", 15, 0, "j1.sh", "JobLaunchFailure"),
        (4, "PENDING", 1, 1, "wrap", "BeginTime"),
        (1, "PREEMPTED", 19200, 0, "dl-x-r0-a1", "None"),
    ]
)
# sacct --noheader --parsable2 --allocations --duplicates --format=JobIDRaw,State,ExitCode,JobName, over a slurmdbd
SACCT = """\
1|FAILED|78:0|dl-run-r0-a1
2|COMPLETED|0:0|dl-run-r1-a1
3|CANCELLED by 0|0:0|dl-run-r2-a1
4|FAILED|0:9|dl-run-r3-a1
5|REQUEUED|0:0|dl-run-r4-a1
5|RUNNING|0:0|dl-run-r4-a1
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH: programs in it stand for Slurm's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def tool(folder: Path, name: str, lines: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
    (folder / name).chmod(0o755)


def slurm(folder: Path, **options: Any) -> SlurmExecutor:
    return SlurmExecutor(**{"directory": folder, "python": "/venv/bin/python", **options})


# -- the request ------------------------------------------------------------------------------------------------------


def test_the_plan_of_an_attempt_compared_whole(tmp_path: Path):
    executor = slurm(
        tmp_path,
        partition="gpu",
        account="lab",
        qos="low",
        gpu="a100",
        cpu=8,
        memory="64G",
        time_limit="1-12",
        constraint="nvlink",
        sbatch=["--reservation=night"],
        setup=["module load cuda"],
        notice_s=120,
    )
    request = LaunchRequest("run-7", 2, 3, ["python", "-c", "print('$HOME')"], {"A": "it's"}, {"KEY": SECRET}, 90.5)
    folder = tmp_path / "run-7" / "2" / "3"
    assert executor.plan(request) == {
        "command": [
            "sbatch",
            "--reservation=night",
            "--partition=gpu",
            "--account=lab",
            "--qos=low",
            "--constraint=nvlink",
            "--gres=gpu:a100:1",
            "--cpus-per-task=8",
            "--mem=64G",
            "--time=4",
            "--parsable",
            "--job-name=dl-run-7-r2-a3",
            "--comment=diloco-orchestrator run run-7 replica 2 attempt 3",
            f"--chdir={folder}",
            f"--output={folder}/output.log",
            "--open-mode=append",
            "--nodes=1",
            "--ntasks=1",
            "--export=NONE",
            "--no-requeue",
            "--signal=B:TERM@120",
        ],
        "script": [
            "#!/bin/bash -l",
            "# dl-run-7-r2-a3, sent by diloco-orchestrator",
            '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 75',
            "export SLURM_EXPORT_ENV=ALL PYTHONUNBUFFERED=1",
            "module load cuda",
            """export A='it'"'"'s'""",
            "export DILOCO_LEAVE_AFTER_S=129300",
            f"for _ in $(seq 30); do [ -r {folder}/secrets.sh ] && break; sleep 1; done",
            f". {folder}/secrets.sh || {{ echo {folder}/secrets.sh is not on this node; exit 78; }}",
            f"rm -f {folder}/secrets.sh",
            "exec timeout --foreground --kill-after=60 90.5 /venv/bin/python -c 'print('\"'\"'$HOME'\"'\"')'",
        ],
        "secrets": {"file": f"{folder}/secrets.sh", "KEY": "<redacted>"},
    }
    assert not folder.exists()


def test_a_script_passes_values_on_unchanged(tmp_path: Path):
    value = "a 'b' \"c\" $HOME `id` \\ \n new line ü"
    request = request_of("import os; print(repr((os.environ['A'], os.environ['B'])))", env={"A": value, "B": "-n"})
    script = script_of(request, tmp_path, python=sys.executable, setup=())
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{(value, '-n')!r}\n"
    again = subprocess.run(["bash", "-c", script], env={"SLURM_RESTART_COUNT": "1"}, capture_output=True, check=False)
    assert (again.returncode, again.stdout) == (75, b"")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "a100:"}, "a type such as 'a100', 8, or 'a100:8'"),
        ({"memory": "16 GB"}, "no size that Slurm reads"),
        ({"cpu": 0}, "one CPU or more"),
        ({"time_limit": "soon"}, "no time of a minute or more"),
        ({"time_limit": "0:30"}, "no time of a minute or more"),
        ({"sbatch": ["--array=1-3"]}, "sets --array itself"),
        ({"sbatch": ["--expor=ALL"]}, "sets --export itself"),
        (
            {"sbatch": ["--nodes=2"]},
            "sets --nodes itself. A replica of more ranks than a node takes",
        ),
        ({"sbatch": ["--partition=x"]}, "has an argument for it, partition="),
        ({"sbatch": ["-p", "x"]}, "write options as --name=value"),
        ({"directory": "/home/me/%j"}, "Name another folder"),
        ({"notice_s": 0}, "from 1 to 65535"),
    ],
)
def test_what_slurm_would_not_take_is_refused_before_anything_is_sent(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        SlurmExecutor(**options)


def test_a_variable_that_would_be_shell_code_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no shell takes a variable"):
        slurm(tmp_path).plan(request_of("", env={"A;reboot": "1"}))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("5:30", 330), ("04:00:00", 14400), ("1-12", 129600), ("2-01:30", 178200), ("1-00:00:30", 86430)],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit: str, seconds: float):
    assert seconds_of(limit) == seconds


def test_options_of_the_environment_do_not_change_what_is_sent():
    environ = {"PATH": "/bin", "SBATCH_EXPORT": "ALL", "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/etc/slurm.conf"}
    environ |= {"SCANCEL_INTERACTIVE": "1", "SCANCEL_STATE": "PENDING", "SCONTROL_ALL": "1", "SACCT_FEDERATION": "1"}
    environ |= {"SLURM_CLUSTERS": "gpu"}
    kept = {"PATH": "/bin", "SLURM_TIME_FORMAT": "standard", "SLURM_CLUSTERS": "gpu"}
    # Of a launcher that runs in a job itself: sbatch gives them to its own jobs, whatever --export says.
    environ |= {"SLURM_RESTART_COUNT": "1", "SLURM_MEM_PER_CPU": "50", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    assert submit_environment(environ, None) == {**kept, "SLURM_CONF": "/etc/slurm.conf"}
    assert submit_environment(environ, "/mine") == {**kept, "SLURM_CONF": "/mine"}


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_nobody_else_can_exchange_the_folders_above_what_a_job_runs(tools: Path, tmp_path: Path):
    tool(tools, "scontrol", "echo 'ClusterName             = tests'")
    tool(tools, "squeue", "")
    tool(tools, "sbatch", "cat > /dev/null; echo 7")
    before = os.umask(0o002)  # where a user's group is the user's alone
    try:
        slurm(tmp_path / "attempts").launch(request_of("", secrets={"KEY": SECRET}))
    finally:
        os.umask(before)
    folders = [path for path in (tmp_path / "attempts", *(tmp_path / "attempts").rglob("*")) if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700} and len(folders) == 4
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    with pytest.raises(ExecutorError, match="writable for others"):
        slurm(tmp_path / "shared").launch(request_of("", secrets={"KEY": SECRET}))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_takes_launches(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    """Lustre without its option `flock`, NFS without its lock server. Of two jobs the one of the lower id is kept."""

    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    both = "\n".join(f"{job_id:<20}{'PENDING':<20}{0:<12}{0:<12}{NAME:<80}None" for job_id in (8, 7))
    tool(tools, "scontrol", "echo 'ClusterName             = tests'")
    tool(tools, "squeue", f"if [ -e {tmp_path}/sent ]; then echo '{both}'; fi")
    tool(tools, "sbatch", f"while read -r line; do :; done; echo sent >> {tmp_path}/sent; echo 8")
    tool(tools, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    executor = slurm(tmp_path / "attempts")
    handle = executor.launch(request_of(""))
    assert handle.native_id == "7" and executor.launch(request_of("")) == handle
    assert ((tmp_path / "sent").read_text(), (tmp_path / "cancelled").read_text()) == ("sent\n", "8\n")


def test_secrets_are_in_a_private_file_until_the_job_reads_or_slurm_refuses_it(tools: Path, tmp_path: Path):
    tool(tools, "scontrol", "echo 'ClusterName             = tests'")
    tool(tools, "squeue", "")
    tool(tools, "sbatch", f'printf "%s\\n" "$@" > {tmp_path}/sent; while read -r line; do echo "$line"; done >> '
         f"{tmp_path}/sent; echo 7")  # fmt: skip
    executor = slurm(tmp_path / "attempts")
    handle = executor.launch(request_of("", secrets={"KEY": SECRET}))
    assert (handle.native_id, handle.native["cluster"]) == ("7", "tests")
    assert "--export=NONE" in (tmp_path / "sent").read_text() and SECRET not in (tmp_path / "sent").read_text()
    file = Path(handle.native["dir"]) / "secrets.sh"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_text() == f"export KEY={SECRET}\n"
    assert executor.poll(handle).state is ReplicaState.PREEMPTED  # squeue lists nothing: it is gone
    assert not file.exists()
    tool(tools, "sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(ExecutorDenied, match="invalid partition specified: nope"):
        executor.launch(request_of("", attempt=2, secrets={"KEY": SECRET}))
    assert not (file.parents[1] / "2" / "secrets.sh").exists()


# -- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [127, 65535, 4294967294])
def test_a_status_with_which_no_process_ends_is_no_exit_code(status: int):
    line = f"{1:<20}{'FAILED':<20}{status:<12}{0:<12}{NAME:<80}None"
    assert queued_jobs(f"{line}\n")["1"].exit_code is None


def test_the_queue_is_read():
    reason = "Nodes required for job are DOWN, DRAINED or reserved"
    assert queued_jobs(f"{SQUEUE}\n") == {
        "9": Job("9", "PENDING", 0, 0, NAME, reason),
        "6": Job("6", "FAILED", -15, 0, "j1.sh", "JobLaunchFailure"),
        "4": Job("4", "PENDING", -1, 1, "wrap", "BeginTime"),
        "1": Job("1", "PREEMPTED", 75, 0, "dl-x-r0-a1", "None"),
    }


def test_the_accounting_is_read():
    jobs = accounted_jobs(f"{SACCT}\n")
    assert jobs["5"] == Job("5", "RUNNING", 0, 1, "dl-run-r4-a1", "")  # it was requeued
    ends = [(status.state.value, status.exit_code) for status in (status_of(job, False) for job in jobs.values())]
    expected = [("failed", 78), ("succeeded", 0), ("cancelled", None), ("failed", -9), ("preempted", None)]
    assert ends == expected


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("PENDING", 0, ("pending", "")),
        ("CONFIGURING", 0, ("pending", "")),
        ("RUNNING", 0, ("running", "")),
        ("COMPLETING", 75, ("running", "")),
        ("SUSPENDED", 0, ("running", "")),
        ("COMPLETED", 0, ("succeeded", "exit")),
        ("FAILED", 1, ("failed", "exit")),
        ("FAILED", 75, ("preempted", "exit")),
        ("FAILED", 76, ("failed", "superseded")),
        ("FAILED", 78, ("failed", "permanent")),
        ("FAILED", 124, ("failed", "exit")),
        ("FAILED", -9, ("failed", "exit")),
        ("FAILED", -15, ("preempted", "exit")),
        ("CANCELLED", 75, ("cancelled", "user")),
        ("PREEMPTED", 75, ("preempted", "lost")),
        ("NODE_FAIL", 0, ("preempted", "lost")),
        ("REQUEUED", 0, ("preempted", "lost")),
        ("TIMEOUT", 75, ("timed_out", "deadline")),
        ("DEADLINE", 0, ("timed_out", "deadline")),
        ("OUT_OF_MEMORY", -9, ("failed", "oom")),
        ("BOOT_FAIL", 0, ("failed", "no_capacity")),
        ("MELTED", 0, ("unknown", "")),
    ],
)
def test_a_state_of_slurm_becomes_ours(state: str, code: int, expected: tuple[str, str]):
    status = status_of(Job("1", state, code, 0, NAME, "None"), timed=False)
    assert (status.state.value, status.reason, status.native_state) == (*expected, state)


def test_why_a_job_waits_is_said_as_squeue_says_it():
    assert status_of(Job("1", "PENDING", 0, 0, NAME, "QOSMaxGRES"), False).message == "PENDING (QOSMaxGRES)"


def test_the_requests_own_time_limit_and_a_requeued_job_are_told_apart():
    assert status_of(Job("1", "FAILED", 124, 0, NAME, ""), timed=True).state is ReplicaState.TIMED_OUT
    assert status_of(Job("1", "FAILED", -9, 0, NAME, ""), timed=True).state is ReplicaState.TIMED_OUT
    assert status_of(Job("1", "COMPLETING", 0, 1, NAME, ""), timed=False).state is ReplicaState.RUNNING
    for state in ("PENDING", "RUNNING", "FAILED"):  # the script ends at once when it runs again
        assert status_of(Job("1", state, 0, 1, NAME, ""), timed=False).state is ReplicaState.PREEMPTED


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Unavailable),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", Unavailable),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", Unavailable),
        (
            'squeue: error: Munge encode failed: Failed to access "/run/munge.socket": No such file or directory '
            "(Did you start munged?)\nslurm_load_jobs error: Protocol authentication error",
            Unavailable,
        ),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", ExecutorDenied),
        ("sbatch: error: Invalid generic resource (gres) specification", ExecutorDenied),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", ExecutorDenied),
        ("sbatch: error: Batch job submission failed: Required partition not available (inactive)", NoCapacity),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
         "accounting/QOS policy (job submit limit, user's size and/or time limits)", NoCapacity),
        ("scancel: error: Kill job error on job id 5: Invalid job id specified", ExecutorError),
        ("something else", ExecutorError),
    ],
)  # fmt: skip
def test_a_message_of_slurm_becomes_an_error(said: str, kind: type[ExecutorError]):
    error = error_of("submitting a job", said, FAILURES)
    assert type(error) is kind and said.splitlines()[-1] in str(error)


def handle_of(folder: Path, **native: Any) -> ReplicaHandle:
    given = {"cluster": "tests", "job_id": "1", "user": "me", "dir": str(folder), "timeout_s": None, **native}
    return ReplicaHandle("slurm", "contract-run", 0, 1, "1", given)


def test_an_outage_is_unknown_and_a_machine_without_slurm_says_so(tools: Path, tmp_path: Path):
    with pytest.raises(MissingSdk, match="squeue is not on the PATH"):
        slurm(tmp_path).poll(handle_of(tmp_path))
    tool(tools, "squeue", "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1")
    status = slurm(tmp_path).poll(handle_of(tmp_path))
    assert status.state is ReplicaState.UNKNOWN and "Socket timed out" in status.message


def test_a_job_that_the_controller_has_forgotten_is_known_from_accounting_or_its_folder(tools: Path, tmp_path: Path):
    tool(tools, "scontrol", "echo 'ClusterName = tests'")
    row = f"1                   RUNNING             0           0           {'another-job':<80}None"
    tool(tools, "squeue", f"echo '{row}'")  # its number was given out again
    tool(tools, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    executor, handle = slurm(tmp_path), handle_of(tmp_path)
    assert (executor.poll(handle).state, executor.poll(handle).reason) == (ReplicaState.PREEMPTED, "lost")
    (tmp_path / "output.log").write_text('\nDILOCO_EXIT {"code": 78}\n')
    assert (executor.poll(handle).state, executor.poll(handle).reason) == (ReplicaState.FAILED, "permanent")
    tool(tools, "sacct", f"echo '1|OUT_OF_MEMORY|0:125|{NAME}'")
    assert executor.poll(handle).reason == "permanent"  # it was told that there is no accounting
    assert slurm(tmp_path).poll(handle).reason == "oom"
    elsewhere = slurm(tmp_path).poll(handle_of(tmp_path, cluster="other"))
    assert elsewhere.state is ReplicaState.UNKNOWN and "cluster other" in elsewhere.message


def test_a_handle_is_json_without_secrets(tmp_path: Path):
    handle = handle_of(tmp_path)
    assert ReplicaHandle.from_json(json.loads(json.dumps(handle.to_json()))) == handle
