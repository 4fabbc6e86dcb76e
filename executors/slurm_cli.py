"""Slurm's command line tools: runs them, translates their errors, and reads the tables that they print.

Which job is whose, and what its state means, is in `slurm_objects`.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from diloco_orchestrator.executors.contract import ExecutorDenied, ExecutorError, MissingSdk, NoCapacity, Unavailable
from diloco_orchestrator.executors.slurm_objects import SACCT_FIELDS, SQUEUE_FORMAT, Job, accounted_jobs, queued_jobs
from diloco_orchestrator.executors.transient import TRANSIENT_SLURM

# Parts of messages with which Slurm refuses for good: the same call by the same user would be refused again.
_DENIED = (
    "Protocol authentication error",
    "Invalid authentication credential",
    "ermission denied",
    "not permitted",
    "invalid partition",
    "Invalid ",  # partition, account, qos, feature, gres, time specification …
    "Memory specification can not be satisfied",
    "Requested node configuration is not available",
    "More processors requested than permitted",
    "Requested time limit",
    "unrecognized option",
)
# The cluster takes this job later, when another has ended or an administrator opens the partition again.
_NO_CAPACITY = ("Required partition not available", "MaxSubmitJob", "job submit limit")
# Answers about a job that has ended, or that Slurm no longer knows.
_GONE = ("Invalid job id", "already completing or completed")
_NO_ACCOUNTING = ("accounting storage is disabled", "Slurm accounting is not configured")
_PATIENCE_S = 60.0  # seconds; Slurm's tools give up on a silent controller after MessageTimeout, 10 by default


class SlurmCli:
    """Runs Slurm's tools, as this user, on the cluster of a slurm.conf.

    Args:
        conf: Path of slurm.conf; None: SLURM_CONF of the environment, or the place that the tools were built for.
    """

    def __init__(self, conf: str | None = None) -> None:
        self._conf = conf
        self._has_accounting = True  # until sacct denies it
        self._cluster = ""

    def submit(self, arguments: Sequence[str], script: str) -> str:
        """Submit a batch script, and return the job's id. The script goes through stdin, so it is in no file."""
        answer = self._call(["sbatch", *arguments], "submitting a job", script)
        return answer.strip().partition(";")[0]  # "ID" or "ID;CLUSTER"

    def jobs(self, users: Sequence[str]) -> dict[str, Job]:
        """The jobs of these users that the controller knows, by id: waiting, running, or ended within MinJobAge."""
        words = ["squeue", "--noheader", "--states=all", f"--user={','.join(users)}", f"--Format={SQUEUE_FORMAT}"]
        return queued_jobs(self._call(words, "listing jobs"))

    def ended_jobs(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """What the accounting recorded of these jobs, by id; empty for a cluster without accounting."""
        if not (self._has_accounting and job_ids):
            return {}
        words = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={SACCT_FIELDS}"]
        try:
            return accounted_jobs(self._call([*words, f"--jobs={','.join(job_ids)}"], "reading the accounting"))
        except ExecutorError as error:
            if not (isinstance(error, MissingSdk) or any(words in str(error) for words in _NO_ACCOUNTING)):
                raise
            self._has_accounting = False
            return {}

    def cancel(self, job_id: str) -> None:
        """Cancel a job: SIGTERM now, SIGKILL after the cluster's KillWait. Does nothing for one that has ended."""
        try:
            self._call(["scancel", job_id], f"cancelling job {job_id}")
        except ExecutorError as error:
            if not any(words in str(error) for words in _GONE):
                raise

    def cluster(self) -> str:
        """The cluster's name, asked for once."""
        if not self._cluster:
            lines = self._call(["scontrol", "show", "config"], "asking for the cluster's name").splitlines()
            named = [line.partition("=")[2].strip() for line in lines if line.startswith("ClusterName")]
            self._cluster = named[0] if named else "unknown"
        return self._cluster

    def _call(self, command: Sequence[str], what: str, given: str = "") -> str:
        """What a tool prints. Raises `ExecutorDenied`, `NoCapacity`, `Unavailable`, or `ExecutorError` for the rest."""
        program = shutil.which(command[0])
        if program is None:
            raise MissingSdk(f"{what}: {command[0]} is not on the PATH. Launch on a machine that submits to Slurm.")
        environ = submit_environment(os.environ, self._conf)
        try:
            done = subprocess.run(
                [program, *command[1:]],
                input=given,
                env=environ,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what}: {command[0]} gave no answer for {_PATIENCE_S:g} s. Try again.") from None
        if done.returncode == 0:
            return done.stdout
        raise error_of(what, command[0], done.stderr or done.stdout)


def error_of(what: str, program: str, said: str) -> ExecutorError:
    """The error for what a tool printed as it failed. `what`: the action, for the message."""
    words = "; ".join(line.strip() for line in said.splitlines() if line.strip()) or "no message"
    # Messages of an outage come first: without munge, Slurm also reports an authentication error.
    if any(each in said for each in TRANSIENT_SLURM):
        return Unavailable(
            f"{what}: Slurm does not answer ({words}). Try again. If it lasts: `scontrol ping` "
            "shows the controller, `munge -n | unmunge` this machine's munge, whose key must be the cluster's."
        )
    if any(each in said for each in _GONE):
        return ExecutorError(f"{what}: {words}. The job has ended, or Slurm has forgotten it.")
    if any(each in said for each in _NO_CAPACITY):
        return NoCapacity(f"{what}: Slurm takes no job now ({words}). Try later, or another partition.")
    if any(each in said for each in _DENIED):
        return ExecutorDenied(f"{what}: Slurm refuses ({words}). Correct account, partition, qos or size of the job.")
    return ExecutorError(f"{what}: {program} failed: {words}.")


def submit_environment(environ: Mapping[str, str], conf: str | None) -> dict[str, str]:
    """The environment of Slurm's tools: this process's, without variables that set options of theirs.

    SBATCH_EXPORT=ALL, or SQUEUE_FORMAT, would otherwise change what is sent and printed. Options that a site sets for
    all of its users belong in the executor's.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(("SBATCH_", "SQUEUE_", "SACCT_"))}
    return {**kept, "SLURM_TIME_FORMAT": "standard", **({"SLURM_CONF": conf} if conf else {})}


def this_user() -> str:
    """The user's id, under which Slurm lists the jobs that this process submits."""
    return str(os.geteuid())
