"""Slurm's command line tools: how they are called, what their errors mean, and parsing of the tables they print.

`slurm_objects` maps jobs to attempts and states.
"""

import os
from collections.abc import Mapping, Sequence

from diloco_orchestrator.executors.answers import Failure, odd_reply
from diloco_orchestrator.executors.command_line import CommandLine
from diloco_orchestrator.executors.contract import ExecutorDenied, ExecutorError, MissingSdk, NoCapacity, Unavailable
from diloco_orchestrator.executors.slurm_objects import (
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    Job,
    accounted_jobs,
    cluster_of,
    job_id_of,
    queued_jobs,
)

# Parts of what Slurm's tools print while the controller, its database or the local munged is away or overloaded.
_TRANSIENT = (
    "Unable to contact slurm controller",
    "Communication connection failure",
    "Communication message send failure",
    "Communication shutdown failure",
    "Message receive failure",
    "Zero Bytes were transmitted or received",
    "Socket timed out",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "No route to host",
    "in standby mode",
    "temporarily un",  # Resource temporarily unavailable; Slurm temporarily unable to accept job
    "job queue full",
    "Did you start munged",
    "Problem talking to the database",
)
# Answers about a job that has ended, or that Slurm no longer knows.
_GONE = ("Invalid job id", "already completing or completed")
_NO_ACCOUNTING = ("accounting storage is disabled", "Slurm accounting is not configured")
FAILURES = (
    # Messages of an outage come first: without munge, Slurm also reports an authentication error.
    Failure(
        Unavailable,
        _TRANSIENT,
        "Slurm does not answer ({said}). Try again. If it lasts: `scontrol ping` shows the controller, "
        "`munge -n | unmunge` this machine's munge, whose key must be the cluster's.",
    ),
    Failure(ExecutorError, _GONE, "{said}. The job has ended, or Slurm has forgotten it."),
    Failure(  # the cluster takes this job later, when another has ended or an administrator opens the partition again
        NoCapacity,
        ("Required partition not available", "MaxSubmitJob", "job submit limit"),
        "Slurm takes no job now ({said}). Try later, or another partition.",
    ),
    Failure(  # the same call by the same user would be refused again
        ExecutorDenied,
        (
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
        ),
        "Slurm refuses ({said}). Correct account, partition, qos or size of the job.",
    ),
)


# How variables begin that set options, and those of the job in which this process may run itself: sbatch gives them to
# its jobs whatever --export says, which then take their memory for another, or themselves for requeued.
_OPTIONS = ("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SLURM_")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # which cluster it is, and who we are to it


class SlurmCli:
    """Runs Slurm's tools, as this user, on the cluster of a slurm.conf.

    Args:
        conf: Path of slurm.conf; None: SLURM_CONF of the environment, or the place that the tools were built for.
    """

    def __init__(self, conf: str | None = None) -> None:
        self._tools = CommandLine(
            failures=FAILURES,
            missing="Launch on a machine that submits to Slurm.",
            environment=lambda: submit_environment(os.environ, conf),
        )
        self._has_accounting = True  # until sacct denies it
        self._cluster = ""

    def submit(self, arguments: Sequence[str], script: str) -> str:
        """Submit a batch script, and return the job's id. The script is passed by stdin, so no file holds it."""
        return job_id_of(self._tools.run("sbatch", *arguments, what="submitting a job", given=script))

    def jobs(self, users: Sequence[str]) -> dict[str, Job]:
        """The jobs of these users that the controller lists, by id: waiting, running, or ended within MinJobAge."""
        words = ["squeue", "--noheader", "--states=all", f"--user={','.join(users)}", f"--Format={SQUEUE_FORMAT}"]
        return queued_jobs(self._tools.run(*words, what="listing jobs"))

    def ended_jobs(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """Accounting records of these jobs, by id; empty for a cluster without accounting."""
        if not (self._has_accounting and job_ids):
            return {}
        words = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={SACCT_FIELDS}"]
        jobs = f"--jobs={','.join(job_ids)}"
        try:
            return accounted_jobs(self._tools.run(*words, jobs, what="reading the accounting"))
        except ExecutorError as error:
            if not (isinstance(error, MissingSdk) or any(words in str(error) for words in _NO_ACCOUNTING)):
                raise
            self._has_accounting = False
            return {}

    def cancel(self, job_id: str) -> None:
        """Cancel a job: SIGTERM now, SIGKILL after the cluster's KillWait. Does nothing for one that has ended."""
        what = f"cancelling job {job_id}"
        if said := self._tools.run("scancel", job_id, what=what, known=_GONE).strip():
            raise odd_reply(what, "scancel's, which is none", said)

    def cluster(self) -> str:
        if not self._cluster:
            said = self._tools.run("scontrol", "show", "config", what="asking for the cluster's name")
            self._cluster = cluster_of(said)
        return self._cluster


def submit_environment(environ: Mapping[str, str], conf: str | None) -> dict[str, str]:
    """The environment for Slurm's tools: this process's, without variables that set options of the tools or describe
    a job.

    SBATCH_EXPORT=ALL, or SQUEUE_FORMAT, would otherwise change what is sent and printed, and with SCANCEL_STATE=PENDING
    scancel would end nothing that runs. A site's options for all of its users must be passed to the executor instead.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_OPTIONS)}
    return {**kept, "SLURM_TIME_FORMAT": "standard", **({"SLURM_CONF": conf} if conf else {})}


def this_user() -> str:
    """The user's id, under which Slurm lists the jobs that this process submits."""
    return str(os.geteuid())
