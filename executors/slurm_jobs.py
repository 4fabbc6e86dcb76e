"""Replicas as jobs of a Slurm cluster: one batch job per attempt, named after it, by Slurm's own command line tools.

Scripts and states are in `slurm_objects`, calls in `slurm_cli`. Each attempt has a folder on the file system that login
and compute nodes share: its lock, handle, output and, until the job has read them, its secrets.

Slurm never runs an attempt twice (--no-requeue): a preempted job ends, and the coordinator launches the next attempt.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_orchestrator.executors.attempt_folder import AttemptFolder, Ending, make_private
from diloco_orchestrator.executors.clock import Clock
from diloco_orchestrator.executors.constructor_options import plain_options, withheld
from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    LaunchRequest,
    MissingSdk,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
)
from diloco_orchestrator.executors.names import words_of
from diloco_orchestrator.executors.process_contract import parse_exit_line
from diloco_orchestrator.executors.remote_base import RemoteExecutor, attempt_name, ended_status, env_within, run_label
from diloco_orchestrator.executors.slurm_cli import SlurmCli, this_user
from diloco_orchestrator.executors.slurm_objects import (
    REFUSED,
    SECRETS,
    Job,
    Machine,
    check_extra,
    sbatch_arguments,
    script_of,
    seconds_of,
    secrets_script,
    status_of,
)

_FOLLOW_S = 0.5  # pause before a log is read again
_EXIT_TAIL_LINES = 5


class SlurmExecutor(RemoteExecutor):
    """Runs each attempt as a batch job of a Slurm cluster, submitted from a machine that has sbatch.

    Args:
        partition: Partition, or several with commas; the cluster's default if None.
        account: Account that is charged.
        qos: Quality of service.
        gpu: GPU of each rank of a replica: 1, or its type, such as "a100", or their number, 8 or "a100:8"; none by
            default.
        cpu: CPUs of each replica, on each of its nodes.
        memory: Memory of each replica, on each of its nodes, such as "16G"; the partition's default if None.
        time_limit: Longest life of an attempt as Slurm writes it, such as "04:00:00" or "1-12"; the partition's if
            None.
        constraint: Features that the node must have, such as "a100&nvlink".
        sbatch: Other options of sbatch, such as "--reservation=night".
        setup: Lines of shell that run first, such as "module load cuda".
        python: Interpreter of the replicas; that of the launching process if None.
        directory: Folder of attempts, on a file system that compute nodes share; ~/.diloco-slurm if None.
        notice_s: Seconds before its time limit at which a replica gets SIGTERM, on which it publishes and leaves.
        ranks_per_machine: Ranks of a replica on one node at the most: one of 16 ranks gets two nodes of 8. One node for
            all by default.
        conf: Path of slurm.conf; SLURM_CONF, or the usual place, if None.
        hourly_usd: What one replica's machine costs in US dollars an hour, for max_cost_usd and `status`.
        clock: Time, for tests.
    """

    name = "slurm"

    def __init__(
        self,
        *,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        gpu: int | str | None = None,
        cpu: int | None = None,
        memory: int | str | None = None,
        time_limit: str | None = None,
        constraint: str | None = None,
        sbatch: Sequence[str] = (),
        setup: Sequence[str] = (),
        python: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        notice_s: int = 60,
        ranks_per_machine: int | None = None,
        conf: str | None = None,
        hourly_usd: float | str | None = None,
        clock: Clock | None = None,
    ) -> None:
        given = {**locals(), "directory": os.fspath(directory) if directory else None}
        self.options, self.withheld = plain_options(given), withheld(given)
        super().__init__(hourly_usd=hourly_usd, clock=clock)
        self._places = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
        self._machine = Machine(gpu, cpu, memory, time_limit, ranks_per_machine)
        self.ranks_per_machine = ranks_per_machine
        self._extra, self._setup = words_of(sbatch), words_of(setup)
        check_extra(self._extra)
        self._python = python or sys.executable
        self._directory = Path(directory or "~/.diloco-slurm").expanduser().absolute()
        if re.search(r"[%\\\n]", str(self._directory)):
            raise ValueError(f"directory={str(directory)!r}: Slurm would replace % and \\ in it. Name another folder.")
        if not 0 < notice_s < 65536:
            raise ValueError(f"notice_s={notice_s!r}: Slurm takes whole seconds from 1 to 65535.")
        self._notice_s = notice_s
        self._cli = SlurmCli(conf)

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The arguments of sbatch for an attempt, its script, and the file of secrets with values redacted."""
        folder = self._folder(request)
        arguments, script = self._job(request, folder)
        plan: dict[str, Any] = {"command": ["sbatch", *arguments], "script": script.splitlines()}
        if request.secrets:
            plan["secrets"] = {"file": str(folder.path / SECRETS), **dict.fromkeys(request.secrets, "<redacted>")}
        return plan

    def _job(self, request: LaunchRequest, folder: AttemptFolder) -> tuple[list[str], str]:
        if self._machine.time_limit is not None:
            request = replace(request, env=env_within(request, seconds_of(self._machine.time_limit)))
        arguments = sbatch_arguments(
            request,
            folder.path,
            machine=self._machine,
            places=self._places,
            notice_s=self._notice_s,
            extra=self._extra,
        )
        nodes = request.machines(self._machine.ranks_per_machine)
        return arguments, script_of(request, folder.path, python=self._python, setup=self._setup, nodes=nodes)

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Submit the attempt's job, or adopt an existing one: by the handle in its folder, else by its name in the
        queue.

        The folder's lock excludes other launchers. Where the file system has no locks, the job with the lowest id is
        kept, and its doubles are cancelled.
        """
        folder, name = self._folder(request), attempt_name(request)
        for each in (self._directory, folder.path.parent.parent, folder.path.parent):
            make_private(each)  # the job runs what the attempt's file of secrets says
        with folder.locked():
            if (existing := folder.handle()) is not None:
                return existing
            cluster = self._cli.cluster()
            jobs = self._named(name)
            if not jobs:
                own = self._submit(request, folder)
                jobs = self._named(name) or [own]
                for double in jobs[1:]:
                    self._cli.cancel(double)
            handle = self._handle(request, jobs[0], cluster, folder)
            folder.write_handle(handle)
            return handle

    def _submit(self, request: LaunchRequest, folder: AttemptFolder) -> str:
        arguments, script = self._job(request, folder)
        folder.path.chmod(0o700)
        secrets = folder.path / SECRETS
        if request.secrets:
            secrets.unlink(missing_ok=True)
            with os.fdopen(os.open(secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets_script(request.secrets))
        try:
            return self._cli.submit(arguments, script)
        except (ExecutorDenied, MissingSdk):  # after another error the job may have been taken, and needs the file
            secrets.unlink(missing_ok=True)
            raise

    def _named(self, name: str) -> list[str]:
        """Ids of this user's Slurm jobs of this name, the oldest first.

        Jobs that sbatch refused are left out; Slurm lists some of them for a while as failed for their constraints.
        """
        jobs = self._cli.jobs([this_user()]).values()
        return sorted((job.id for job in jobs if job.name == name and job.reason != REFUSED), key=int)

    def _handle(self, request: LaunchRequest, job_id: str, cluster: str, folder: AttemptFolder) -> ReplicaHandle:
        native = {
            "cluster": cluster,
            "job_id": job_id,
            "user": this_user(),
            "dir": str(folder.path),
            "timeout_s": request.timeout_s,
        }
        return ReplicaHandle(self.name, request.run_id, request.replica_id, request.attempt, job_id, native)

    # -- polling -------------------------------------------------------------------------------------------------

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses by one squeue, and one sacct for jobs that the controller no longer lists."""
        jobs = self._cli.jobs(sorted({handle.native["user"] for handle in handles}))
        gone = [handle.native_id for handle in handles if not _is_job_of(handle, jobs.get(handle.native_id))]
        jobs |= self._cli.ended_jobs(gone)
        here = self._cli.cluster()
        return [self._status(handle, jobs.get(handle.native_id), here) for handle in handles]

    def _status(self, handle: ReplicaHandle, job: Job | None, here: str) -> ReplicaStatus:
        if handle.native["cluster"] != here:
            words = f"its job is on cluster {handle.native['cluster']}, this is {here}; poll it there"
            return ReplicaStatus(ReplicaState.UNKNOWN, message=words)
        found = job if _is_job_of(handle, job) else None
        status = _forgotten(handle) if found is None else status_of(found, handle.native["timeout_s"] is not None)
        if status.state.ended:
            _delete_secrets(handle)
        return status

    def cancel(self, handle: ReplicaHandle) -> None:
        """Cancel the attempt's job; every process then sees CANCELLED, even once Slurm has dropped it."""
        folder = AttemptFolder(Path(handle.native["dir"]))
        job = self._cli.jobs([handle.native["user"]]).get(handle.native_id)
        if job is None or not _is_job_of(handle, job) or status_of(job, timed=False).state.ended:
            return
        with suppress(OSError):  # a folder that is not here; the queue remembers the cancel for a while
            folder.write_ending(Ending(ReplicaState.CANCELLED, 0.0))
        self._cli.cancel(handle.native_id)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines of the job's output file, which Slurm writes in the attempt's folder; they stay until it is deleted."""
        folder = AttemptFolder(Path(handle.native["dir"]))
        return folder.logs(follow, tail, lambda: self.poll(handle).state.ended, lambda: self._clock.sleep(_FOLLOW_S))

    def find(self, run_id: str) -> list[ReplicaHandle]:
        """Handles of this user's jobs with the run's name; of jobs no longer listed, from the attempts' folders."""
        cluster, user = self._cli.cluster(), this_user()
        pattern = re.compile(rf"dl-{re.escape(run_label(run_id))}-r(\d+)-a(\d+)")
        found: dict[tuple[int, int], ReplicaHandle] = {}
        for job in sorted(self._cli.jobs([user]).values(), key=lambda job: int(job.id), reverse=True):
            # The oldest job of a name comes last, and wins.
            if job.reason != REFUSED and (match := pattern.fullmatch(job.name)):
                who = (int(match[1]), int(match[2]))
                request = LaunchRequest(run_id, *who, command=[])
                folder = self._folder(request)
                found[who] = folder.handle() or self._handle(request, job.id, cluster, folder)
        for path in self._run_folder(run_id).glob("*/*/handle.json"):
            if (handle := AttemptFolder(path.parent).handle()) is not None:
                found.setdefault((handle.replica_id, handle.attempt), handle)
        return [found[who] for who in sorted(found)]

    def _run_folder(self, run_id: str) -> Path:
        return self._directory / run_label(run_id)

    def _folder(self, request: LaunchRequest) -> AttemptFolder:
        return AttemptFolder(self._run_folder(request.run_id) / str(request.replica_id) / str(request.attempt))


def _is_job_of(handle: ReplicaHandle, job: Job | None) -> bool:
    """Whether `job`, found by the handle's id, has the attempt's name; False for None, no job of this id.

    A controller that lost its database uses ids again for other jobs.
    """
    return job is not None and job.name == attempt_name(handle)


def _forgotten(handle: ReplicaHandle) -> ReplicaStatus:
    """The status, from the files in its folder, of an attempt whose job neither controller nor accounting list.

    CANCELLED if a cancel is recorded, else by the exit code in its output, else PREEMPTED with reason "lost".
    """
    folder = AttemptFolder(Path(handle.native["dir"]))
    if folder.ending() is not None:
        return ReplicaStatus(ReplicaState.CANCELLED, "user", None, "gone", "cancelled; Slurm no longer knows the job")
    fields = parse_exit_line(folder.tail(_EXIT_TAIL_LINES)[0]) or {}
    if isinstance(code := fields.get("code"), int):
        return ended_status(code, "gone")
    return ReplicaStatus(ReplicaState.PREEMPTED, "lost", None, "gone", "Slurm no longer knows the job")


def _delete_secrets(handle: ReplicaHandle) -> None:
    """Remove the secrets of an attempt that has ended before its job read them."""
    with suppress(OSError):
        (Path(handle.native["dir"]) / SECRETS).unlink(missing_ok=True)
