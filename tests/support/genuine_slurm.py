"""A genuine Slurm on this machine: munged, slurmctld and a slurmd for each node, over a folder of their own.

Needs the packages munge, slurmctld, slurmd and slurm-client of Debian or Ubuntu (`make slurm`, as root). The daemons
run as this user on ports that are free, and end with the context. Jobs are genuine too: batch scripts under slurmstepd.
"""

import contextlib
import getpass
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")  # where daemons are, which a user's PATH may lack
_PATIENCE_S = 180.0  # seconds; ends a start or an end that hangs
_CPUS = 16  # that the node claims, so that many tiny jobs run at once

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobSubmitPlugins=lua
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
MessageTimeout=5
ReturnToService=2
KillWait=10
MinJobAge={min_job_age}
{options}
{nodes}
PartitionName=spare Nodes=ALL Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 State=UNKNOWN"
# Refuses jobs whose name has an ending that a line of the file `refused` holds.
_SUBMIT = """
function slurm_job_submit(job, partitions, uid)
   local refused = io.open("{folder}/refused", "r")
   if refused == nil then return slurm.SUCCESS end
   for part in refused:lines() do
      if string.find(job.name or "", part, 1, true) then
         slurm.log_user("no such job today")
         refused:close()
         return slurm.ERROR
      end
   end
   refused:close()
   return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))


def skip_without_slurm() -> None:
    """Skip the test where Slurm or munge is not installed."""
    if absent := [name for name in _PROGRAMS if _program(name) is None]:
        pytest.skip(f"Slurm is not installed here ({', '.join(absent)}): `make slurm` installs it on Debian and Ubuntu")


class GenuineSlurm:
    """A running Slurm. `environ`: what its tools need in the environment, the place of slurm.conf."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.environ = {"SLURM_CONF": str(self.conf)}
        self._controller: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def call(self, *command: str, check: bool = True) -> str:
        """What a tool of Slurm prints."""
        environ = {**os.environ, **self.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_controller(self, *, afresh: bool = False) -> None:
        """Start slurmctld and wait for the node. `afresh`: it forgets every job, and the node ends what it runs."""
        words = ["-D", "-f", str(self.conf), *(["-c"] if afresh else [])]
        controller = self._controller = _started(self.folder, "slurmctld", *words)

        def answers() -> bool:
            return controller.poll() is not None or "UP" in self.call("scontrol", "ping", check=False)

        self.wait(answers, "slurmctld answers")
        assert controller.poll() is None, (self.folder / "slurmctld.log").read_text()[-2000:]

    def stop_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld: by SIGTERM it saves what it knows; by SIGKILL it loses the jobs of the last seconds."""
        if self._controller is not None:
            _end(self._controller, number)
            self._controller = None

    def start_node(self, name: str) -> None:
        self._nodes[name] = _started(self.folder, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def stop_nodes(self) -> None:
        for node in self._nodes.values():
            _end(node, signal.SIGTERM)

    def wait_for_nodes(self) -> None:
        self.wait(lambda: set(self.call("sinfo", "-h", "-o", "%T", check=False).split()) == {"idle"}, "nodes are idle")

    def node_of(self, job_id: str) -> str:
        """Name of the node that a job runs on."""
        return self.call("squeue", "--noheader", f"--jobs={job_id}", "--Format=NodeList:80").strip()

    def take_down(self, node: str) -> None:
        """What an administrator, or a site's health check, does with a broken node: Slurm ends its jobs."""
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=broken")

    def cut_power(self, node: str, *pids: int) -> None:
        """The node's slurmd and these processes of its jobs end without a word."""
        _end(self._nodes[node], signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def forget_everything(self) -> None:
        """End all processes of jobs, then start a controller that knows no job."""
        (self.folder / "refused").unlink(missing_ok=True)
        user = getpass.getuser()
        self.call("scancel", f"--user={user}", "--signal=KILL", "--full", check=False)
        self.call("scancel", f"--user={user}", check=False)
        self.wait(lambda: not self.jobs("--states=RUNNING,COMPLETING"), "no job runs")
        self.stop_controller(signal.SIGKILL)
        self.start_controller(afresh=True)
        self.wait_for_nodes()

    def jobs(self, *options: str) -> list[str]:
        """Names of jobs that squeue lists."""
        return self.call("squeue", "--noheader", "--Format=Name:80", *options).split()

    def preempt_all(self) -> None:
        """A job of another partition takes the whole node for a moment."""
        self.preempt()

    def preempt(self, *options: str) -> None:
        """A job of another partition takes a whole node for a moment. `options`: of sbatch, such as --nodelist=node0"""
        self.call("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", *options, "--wrap=true")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("slurm*.log")))
            assert time.monotonic() < deadline, f"Slurm: never happened: {what}\n{logs}"
            time.sleep(0.05)


@contextlib.contextmanager
def running_slurm(
    folder: Path, *, nodes: int = 1, cpus: int = _CPUS, min_job_age: int = 300, options: str = ""
) -> Iterator[GenuineSlurm]:
    """A Slurm over `folder`.

    `cpus`: of each node, each for one job. `min_job_age`: seconds for which the controller remembers a job that has
    ended. `options`: other lines of slurm.conf.
    """
    skip_without_slurm()
    names = [f"node{number}" for number in range(nodes)]
    (folder / "state").mkdir(parents=True)
    host = platform.node().partition(".")[0]
    controller_port, *ports = _free_ports(1 + nodes)
    listed = [_NODE.format(name=n, host=host, port=p, cpus=cpus) for n, p in zip(names, ports, strict=True)]
    given = {"folder": folder, "user": getpass.getuser(), "host": host, "nodes": "\n".join(listed), "options": options}
    with contextlib.ExitStack() as stack:
        # slurmstepd makes sockets there, whose paths may have 108 characters: a test's own folder is too deep.
        spool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmd-", ignore_cleanup_errors=True)))
        for name in names:
            (spool / name).mkdir()
        conf = _CONF.format(controller_port=controller_port, min_job_age=min_job_age, spool=spool, **given)
        (folder / "slurm.conf").write_text(conf)
        (folder / "job_submit.lua").write_text(_SUBMIT.replace("{folder}", str(folder)))
        slurm = GenuineSlurm(folder)
        munged = _started(folder, "munged", *_munge_options(folder))
        stack.callback(_end, munged, signal.SIGTERM)
        slurm.wait((folder / "munge.socket").exists, "munged listens")
        stack.callback(slurm.stop_controller, signal.SIGKILL)
        slurm.start_controller()
        stack.callback(slurm.stop_nodes)
        for name in names:
            slurm.start_node(name)
        slurm.wait_for_nodes()
        stack.callback(slurm.forget_everything)
        yield slurm


def _munge_options(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    return ["--foreground", "--force", f"--socket={folder}/munge.socket", *files]


def _started(folder: Path, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
    program = _program(name)
    assert program is not None, f"{name} is not installed"
    with (folder / f"{name}.out").open("ab") as output:
        return subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    process.send_signal(number)
    process.wait(_PATIENCE_S)


def _free_ports(count: int) -> list[int]:
    """Ports on which nothing listens, all held at once so that they differ."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
