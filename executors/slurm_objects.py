"""Slurm's input and output as plain data: the batch script of an attempt, sbatch's arguments, states of jobs.

`slurm_cli` runs the tools.
"""

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from diloco_orchestrator.executors.answers import odd_reply
from diloco_orchestrator.executors.contract import (
    LaunchRequest,
    ReplicaState,
    ReplicaStatus,
    check_ranks_per_machine,
)
from diloco_orchestrator.executors.names import unknown_name
from diloco_orchestrator.executors.process_contract import (
    ENV_MACHINE,
    ENV_MACHINES,
    ENV_MEETING,
    ENV_MEETING_KEY,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
)
from diloco_orchestrator.executors.remote_base import KILL_AFTER_S, attempt_name, ended_status, limited

SECRETS = "secrets.sh"  # in the attempt's folder, mode 0600, until the job has read it
REFUSED = "BadConstraints"  # reason of a job that sbatch did not accept
# Widths hold what Slurm prints; the reason comes last, because it may contain spaces.
SQUEUE_FORMAT = "JobID:20,State:20,exit_code:12,RestartCnt:12,Name:80,Reason:200"
SACCT_FIELDS = "JobIDRaw,State,ExitCode,JobName"
_VISIBLE_S = 30  # seconds that a file may take to appear on another node of a network file system (NFS caches)

_LAST_S = 120  # seconds for which the machines of a replica live on after the first of them has ended
# The first words on each machine of a replica on several nodes, in the language of the shell. The batch script, and
# srun, run on the first node, which is machine 0. Jobs on one node have different ports, below those of the kernel.
_MEETING = (
    f"export {ENV_MACHINE}=$SLURM_PROCID "
    f'{ENV_MEETING}=$SLURM_LAUNCH_NODE_IPADDR:$((20000 + SLURM_JOB_ID % 10000)); exec "$@"'
)

# Options of sbatch that the executor sets, or that would break an attempt's one job.
_OURS = (
    *("array", "chdir", "cluster", "clusters", "comment", "dependency", "error", "export", "export-file"),
    *("get-user-env", "input", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
)
_BY_OPTION = {  # options of sbatch with an argument of the executor
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "gres": "gpu",
    "cpus-per-task": "cpu",
    "mem": "memory",
    "time": "time_limit",
}
# Spellings that mean one of these: a short option would pass a check of names.
_LONG = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GPU = re.compile(r"(?:([A-Za-z][\w.-]*)(?::(\d+))?|(\d+))")
_MEMORY = re.compile(r"\d+[KMGT]?")


class Job(NamedTuple):
    """A Slurm job as squeue or sacct lists it."""

    id: str
    state: str  # native, such as "RUNNING"
    exit_code: int | None  # negative: killed by that signal
    restarts: int
    name: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """The resources of each node that a replica requests. Raises ValueError for a size that Slurm cannot read."""

    gpu: int | str | None = None
    cpu: int | None = None
    memory: int | str | None = None
    time_limit: str | None = None
    ranks_per_machine: int | None = None  # of a node, at the most

    def __post_init__(self) -> None:
        check_ranks_per_machine(self.ranks_per_machine)
        if isinstance(self.gpu, bool) or (self.gpu is not None and not _GPU.fullmatch(str(self.gpu))):
            raise ValueError(f"gpu={self.gpu!r}: write 1, a type such as 'a100', 8, or 'a100:8' for eight.")
        if self.cpu is not None and self.cpu < 1:
            raise ValueError(f"cpu={self.cpu!r}: a replica needs one CPU or more.")
        if self.memory is not None and not _MEMORY.fullmatch(str(self.memory)):
            raise ValueError(f"memory={self.memory!r} is no size that Slurm reads. Write it like 16000 (MiB) or '16G'.")
        if self.time_limit is not None:
            seconds_of(self.time_limit)

    def arguments(self, request: LaunchRequest) -> list[str]:
        """The resources as options of sbatch. Raises ValueError for another number of GPUs than ranks on a node."""
        match = _GPU.fullmatch(str(self.gpu or 0))
        assert match is not None, "it was checked"
        nodes = request.machines(self.ranks_per_machine)
        count = request.gpus(int(match[2] or match[3] or 1), f"gpu={self.gpu!r}", nodes)
        gpu = ":".join(filter(None, ("gpu", match[1], str(count)))) if count else None
        given = {"gres": gpu, "cpus-per-task": self.cpu, "mem": self.memory}
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    def limit_s(self, request: LaunchRequest) -> float | None:
        """Seconds after which Slurm ends the attempt; None: the partition's limit.

        The batch script enforces the request's own limit to the second; Slurm's, in minutes, comes after it.
        """
        limits = [] if self.time_limit is None else [seconds_of(self.time_limit)]
        if request.timeout_s is not None:
            limits.append(60.0 * math.ceil((request.timeout_s + KILL_AFTER_S) / 60) + 60.0)
        return min(limits, default=None)


def seconds_of(limit: str) -> float:
    """Seconds of a time limit as sbatch takes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    Raises ValueError for another form, or less than a minute.
    """
    match = _TIME.fullmatch(str(limit))
    seconds = 0.0
    if match is not None:
        days, *rest = match.groups()
        parts = [float(part) for part in rest if part is not None]
        units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
        seconds = float(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if seconds < 60:
        raise ValueError(f"time_limit={limit!r} is no time of a minute or more. Write it like '04:00:00' or '1-12'.")
    return seconds


def check_extra(options: Sequence[str]) -> None:
    """Raise ValueError for options of sbatch that the executor sets itself, or of another form than --name=value."""
    for option in options:
        match = _LONG.fullmatch(option)
        if match is None:
            raise ValueError(f"sbatch={option!r}: write options as --name=value, one string each.")
        if match[1] in _BY_OPTION:
            raise ValueError(f"sbatch={option!r}: the executor has an argument for it, {_BY_OPTION[match[1]]}=….")
        # sbatch takes any beginning of a name that fits one option only.
        if clash := next((name for name in sorted([*_OURS, *_BY_OPTION]) if name.startswith(match[1])), None):
            nodes = "A replica of more ranks than a node takes (ranks_per_machine) gets several nodes. "
            raise ValueError(
                f"sbatch={option!r}: the executor sets --{clash} itself. {nodes * (clash in ('nodes', 'ntasks'))}"
                "Leave the option out."
            )


# -- the request ------------------------------------------------------------------------------------------------------


def sbatch_arguments(
    request: LaunchRequest,
    folder: Path,
    *,
    machine: Machine,
    places: Mapping[str, str | None],
    notice_s: int,
    extra: Sequence[str] = (),
) -> list[str]:
    """sbatch's arguments for an attempt, without secrets; the script goes to its stdin.

    `places`: partition, account, qos, constraint. `notice_s`: seconds before the time limit at which the job gets
    SIGTERM. `extra`: the user's; they come first, so that ours override them. Arguments rather than #SBATCH lines,
    which variables of the environment would override.
    """
    limit_s, nodes = machine.limit_s(request), request.machines(machine.ranks_per_machine)
    return [
        *extra,
        *(f"--{name}={value}" for name, value in places.items() if value is not None),
        *machine.arguments(request),
        *([] if limit_s is None else [f"--time={math.ceil(limit_s / 60)}"]),
        "--parsable",
        f"--job-name={attempt_name(request)}",
        f"--comment=diloco-orchestrator run {request.run_id} replica {request.replica_id} attempt {request.attempt}",
        f"--chdir={folder}",
        f"--output={folder / 'output.log'}",
        "--open-mode=append",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        *(["--ntasks-per-node=1"] if nodes > 1 else []),
        "--export=NONE",  # else the launcher's whole environment would travel, and be stored by the controller
        "--no-requeue",  # Slurm would run the same attempt again; the coordinator launches the next one
        # To the batch script, which the replica has replaced; on several nodes to the replica's processes there, since
        # srun, which is the batch script then, would end them at once.
        f"--signal={'B:' if nodes == 1 else ''}TERM@{notice_s}",
    ]


def script_of(request: LaunchRequest, folder: Path, *, python: str, setup: Sequence[str], nodes: int = 1) -> str:
    """The batch script of an attempt. It reads secrets from a file, because the controller keeps and shows scripts.

    On several nodes srun starts the program once on each of them, with this script's environment. `python`: the
    interpreter. `setup`: lines of shell that run first. Raises ValueError for a variable whose name a shell does not
    take.
    """
    if wrong := [name for name in (*request.env, *request.secrets) if not _VARIABLE.fullmatch(name)]:
        raise ValueError(f"no shell takes a variable of the name {wrong[0]!r}. Use letters, digits and underscores.")
    program = [python, *request.command[1:]] if request.command[0] == "python" else list(request.command)
    lines = [
        "#!/bin/bash -l",
        f"# {attempt_name(request)}, sent by diloco-orchestrator",
        # Neither --no-requeue nor anything else stops an administrator's plugin. The next attempt goes on.
        f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit {EXIT_PREEMPTED}',
        "export SLURM_EXPORT_ENV=ALL PYTHONUNBUFFERED=1",  # for srun in the user's program
        *setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in request.env.items()),
    ]
    if request.secrets:
        path = shlex.quote(str(folder / SECRETS))
        lines += [
            f"for _ in $(seq {_VISIBLE_S}); do [ -r {path} ] && break; sleep 1; done",
            f". {path} || {{ echo {path} is not on this node; exit {EXIT_PERMANENT}; }}",
            f"rm -f {path}",
        ]
    program = limited(program, request.timeout_s)
    if nodes == 1:
        return "\n".join([*lines, f"exec {shlex.join(program)}", ""])
    key = "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
    steps = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={_LAST_S}"
    cpus = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"  # which srun takes from sbatch no more
    command = f"exec {steps} {cpus} bash -c {shlex.quote(_MEETING)} - {shlex.join(program)}"
    return "\n".join([*lines, f"export {ENV_MACHINES}={nodes} {ENV_MEETING_KEY}={key}", command, ""])


def secrets_script(secrets: Mapping[str, str]) -> str:
    """The lines that set a request's secrets, for the file that the batch script reads."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items())


# -- replies ----------------------------------------------------------------------------------------------------------


_ID = r"\d+[\w.+\[\],%-]*"  # of arrays and steps too
_QUEUED, _ACCOUNTED = re.compile(rf"{_ID}\s+[A-Z]"), re.compile(rf"{_ID}\|[A-Z][^|]*\|[^|]*\|")


def _rows(table: str, row: re.Pattern[str], tool: str) -> list[str]:
    if table.strip() and not table.endswith("\n"):
        raise odd_reply(f"running {tool}", "a whole table of jobs", table)
    lines = [line for line in table.splitlines() if line.strip()]
    for line in lines:
        if not row.match(line):
            raise odd_reply(f"running {tool}", "a table of jobs", line)
    return lines


def job_id_of(said: str) -> str:
    """The id that sbatch printed, "ID" or "ID;CLUSTER". Raises `Unavailable` if it printed something else."""
    job_id = said.strip().partition(";")[0]
    if not job_id.isdecimal():
        raise odd_reply("submitting a job", "a job's id", said)
    return job_id


def cluster_of(config: str) -> str:
    """The cluster's name in the output of `scontrol show config`. Raises `Unavailable` for other output."""
    named = [line.partition("=")[2].strip() for line in config.splitlines() if line.startswith("ClusterName")]
    if not named or not named[0]:
        raise odd_reply("asking for the cluster's name", "Slurm's configuration", config)
    return named[0]


def queued_jobs(table: str) -> dict[str, Job]:
    """The jobs in the output of squeue with `SQUEUE_FORMAT`, by id.

    Jobs whose names are not those of attempts are left out. Raises `Unavailable` for an incomplete or unreadable line.
    """
    found: dict[str, Job] = {}
    for line in _rows(table, _QUEUED, "squeue"):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[3].isdecimal():
            job_id, state, code, restarts, name, reason = fields
            found[job_id] = Job(job_id, state, _exit_code(code), int(restarts), name, reason.strip())
    return found


def accounted_jobs(table: str) -> dict[str, Job]:
    """The jobs in the output of sacct with `SACCT_FIELDS`, by id; for a job that ran several times, its last run.

    Raises `Unavailable` for an incomplete or unreadable line.
    """
    found: dict[str, Job] = {}
    for line in _rows(table, _ACCOUNTED, "sacct"):
        fields = line.split("|")
        if len(fields) == 4:
            job_id, state, code, name = fields
            restarts = found[job_id].restarts + 1 if job_id in found else 0
            found[job_id] = Job(job_id, state.partition(" ")[0], _exit_code(code), restarts, name, "")
    return found


def _exit_code(text: str) -> int | None:
    """The exit code in "CODE:SIGNAL" (sacct, newer versions of squeue), or in a status of wait(2) as a number.

    None for text and numbers that have none.
    """
    code, colon, number = text.partition(":")
    if not (code.isdecimal() and (number.isdecimal() or not colon)):
        return None
    if colon:
        return -int(number) if int(number) else int(code)
    try:
        return os.waitstatus_to_exitcode(int(code))
    except (ValueError, OverflowError):  # such as 4294967294, Slurm's NO_VAL
        return None


# Slurm's states (JOB STATE CODES in squeue's manual), those of 24.05 included.
_STATES: Mapping[str, tuple[ReplicaState, str]] = {
    "BOOT_FAIL": (ReplicaState.FAILED, "no_capacity"),  # its node did not start
    "CANCELLED": (ReplicaState.CANCELLED, "user"),
    "COMPLETED": (ReplicaState.SUCCEEDED, "exit"),
    "COMPLETING": (ReplicaState.RUNNING, ""),  # its processes end
    "CONFIGURING": (ReplicaState.PENDING, ""),
    "DEADLINE": (ReplicaState.TIMED_OUT, "deadline"),
    "FAILED": (ReplicaState.FAILED, "exit"),
    "LAUNCH_FAILED": (ReplicaState.FAILED, "no_capacity"),
    "NODE_FAIL": (ReplicaState.PREEMPTED, "lost"),
    "OUT_OF_MEMORY": (ReplicaState.FAILED, "oom"),
    "PENDING": (ReplicaState.PENDING, ""),
    "POWER_UP_NODE": (ReplicaState.PENDING, ""),
    "PREEMPTED": (ReplicaState.PREEMPTED, "lost"),
    "REQUEUED": (ReplicaState.PREEMPTED, "lost"),
    "REQUEUE_FED": (ReplicaState.PREEMPTED, "lost"),
    "REQUEUE_HOLD": (ReplicaState.PREEMPTED, "lost"),
    "RESIZING": (ReplicaState.RUNNING, ""),
    "RESV_DEL_HOLD": (ReplicaState.PENDING, ""),
    "REVOKED": (ReplicaState.PREEMPTED, "lost"),
    "RUNNING": (ReplicaState.RUNNING, ""),
    "SIGNALING": (ReplicaState.RUNNING, ""),
    "SPECIAL_EXIT": (ReplicaState.PREEMPTED, "lost"),  # requeued and held
    "STAGE_OUT": (ReplicaState.RUNNING, ""),
    "STOPPED": (ReplicaState.RUNNING, ""),
    "SUSPENDED": (ReplicaState.RUNNING, ""),  # it keeps its place; a replica that is silent for long is replaced
    "TIMEOUT": (ReplicaState.TIMED_OUT, "deadline"),
}


def status_of(job: Job, timed: bool) -> ReplicaStatus:
    """The status of an attempt from its Slurm job. `timed`: the batch script enforces the request's time limit."""
    if job.restarts and job.state not in ("CANCELLED", "COMPLETING"):
        words = "Slurm put the job back into the queue; it will not run the attempt again"
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", None, job.state, words)
    if job.state not in _STATES:
        words = f"Slurm reports {unknown_name('state', job.state, _STATES)}"
        return ReplicaStatus(ReplicaState.UNKNOWN, "", None, job.state, words)
    state, reason = _STATES[job.state]
    code = job.exit_code or None if state.ended else None  # Slurm writes 0 where it has none
    if state is ReplicaState.FAILED and reason == "exit" and code is not None:
        return ended_status(code, job.state, timed=timed)
    message = "" if job.reason in ("", "None") else job.reason
    if message and state is ReplicaState.PENDING:
        message = f"{job.state} ({message})"  # as squeue prints it
    return ReplicaStatus(state, reason, 0 if state is ReplicaState.SUCCEEDED else code, job.state, message)
