"""A genuine Ray on this machine: a head node and workers that ask for a token, over a folder of their own.

`make ray` installs it into an environment of its own, `.venv-ray`. Daemons run on free ports and end with the context.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from genuine_slurm import _free_ports
from patience import PATIENCE_S

TOKEN = "token-of-the-tests-ray-5521"
_CPUS = 8  # that a node claims, so that many tiny jobs run at once
_RAY = Path(os.environ.get("RAY_BIN") or Path(__file__).parents[2] / ".venv-ray" / "bin" / "ray")
_CHECKS = 8  # of jobs that were deleted, in more than the second after which Ray's monitor looks again
_ROUND_OF_PORTS = 200  # for workers of one node


class GenuineRay:
    """A running Ray. `environ`: what a client needs in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gcs_port, self.dashboard_port = _free_ports(2)
        self.address = f"http://127.0.0.1:{self.dashboard_port}"
        self.environ = {"RAY_AUTH_TOKEN": TOKEN}
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._ids: list[str] = []  # Ray's own, of the nodes in the order of their starts

    def start_node(self, *, head: bool = False, cpus: int = _CPUS) -> None:
        """Start a node and wait until the cluster counts it."""
        count = len(self._nodes)
        ports = _free_ports(7)
        where = [f"--port={self.gcs_port}", f"--dashboard-port={self.dashboard_port}", "--head"]
        first = 20000 + _ROUND_OF_PORTS * (os.getpid() % 50 + count)
        words = [
            *(where if head else [f"--address=127.0.0.1:{self.gcs_port}"]),
            *("--node-ip-address=127.0.0.1", f"--num-cpus={cpus}", "--num-gpus=0", "--disable-usage-stats", "--block"),
            *(f"--object-store-memory={80 * 2**20}", *([f"--temp-dir={self.folder}"] if head else [])),
            *(f"--min-worker-port={first}", f"--max-worker-port={first + _ROUND_OF_PORTS - 1}"),
            *(f"--dashboard-agent-listen-port={ports[0]}", f"--dashboard-agent-grpc-port={ports[1]}"),
            *(f"--metrics-export-port={ports[2]}", f"--runtime-env-agent-port={ports[3]}"),
            *(f"--node-manager-port={ports[4]}", f"--object-manager-port={ports[5]}"),
            *([f"--ray-client-server-port={ports[6]}"] if head else []),
        ]
        environ = {**os.environ, **self.environ, "RAY_AUTH_MODE": "token", "RAY_ENABLE_MULTI_TENANCY": "1"}
        with (self.folder / f"node{count}.out").open("wb") as output:
            command = [str(_RAY), "start", *words]
            self._nodes.append(
                subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            )
        self.wait(self._counts_another, f"node {count} is up")

    def _counts_another(self) -> bool:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            found = [each["raylet"] for each in self.ask("GET", "/nodes?view=summary").json()["data"]["summary"]]
            self._ids += [
                each["nodeId"] for each in found if each["state"] == "ALIVE" and each["nodeId"] not in self._ids
            ]
        return len(self._ids) == len(self._nodes)

    def wait_until_it_takes_jobs(self) -> None:
        """Wait for the agent that jobs go through; a node counts before its own has come up."""
        job = {"entrypoint": "true", "submission_id": "first"}
        self.wait(lambda: self.ask("POST", "/api/jobs/", json=job).is_success, "it takes jobs")
        self.forget("first")

    def node_of(self, job: str) -> int:
        """The node that a job runs on, by the order of their starts."""
        return self._ids.index(self.ask("GET", f"/api/jobs/{job}").json()["driver_node_id"])

    def cut_power(self, node: int) -> None:
        """All processes of a node end without a word, those of its jobs, which are in groups of their own, too."""
        for pid in _descendants(self._nodes[node].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.killpg(self._nodes[node].pid, signal.SIGKILL)
        self._nodes[node].wait(PATIENCE_S)

    def end(self) -> None:
        for node in reversed(self._nodes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
        for node in self._nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)

    def ask(self, method: str, path: str, json: Mapping[str, str] | None = None) -> httpx.Response:
        """An answer of the dashboard."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.request(method, self.address + path, headers=headers, json=json, timeout=60)

    def jobs(self) -> dict[str, str]:
        """States of all submitted jobs, by id."""
        return {job["submission_id"]: job["status"] for job in self.ask("GET", "/api/jobs/").json()}

    def forget(self, *names: str) -> None:
        """Stop these jobs, all by default, and delete what Ray knows of them."""
        names = names or tuple(self.jobs())
        for name in names:
            self.ask("POST", f"/api/jobs/{name}/stop")
        ended = {"SUCCEEDED", "FAILED", "STOPPED"}
        self.wait(lambda: {self.jobs().get(name, "STOPPED") for name in names} <= ended, "the jobs end")
        self.wait(lambda: not self._supervised() & {*names}, "their names are free")
        absent = 0

        def deleted() -> bool:  # Ray's monitor of a job may write once more what it saw before
            nonlocal absent
            left = {*names} & {*self.jobs()}
            for name in left:
                self.ask("DELETE", f"/api/jobs/{name}")
            absent = 0 if left else absent + 1
            return absent > _CHECKS

        self.wait(deleted, "Ray forgets the jobs")

    def _supervised(self) -> set[str]:
        """Names of jobs whose supervisors still live, for a moment after the jobs' ends."""
        actors = self.ask("GET", "/api/v0/actors?limit=1000").json()["data"]["result"]["result"]
        return {each["name"].partition("job_actor_")[2] for each in actors if each["name"] and each["state"] != "DEAD"}

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = [node.args for node in self._nodes if node.poll() not in (None, -signal.SIGKILL)]
            said = "".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("node*.out")))
            assert not ended, f"Ray: a node has ended: {ended}\n{said}"
            assert time.monotonic() < deadline, f"Ray: never happened: {what}\n{said}"
            time.sleep(0.2)


def _descendants(pid: int) -> list[int]:
    """Processes below one, by what Linux lists as its children."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *_descendants(child)]
    return found


@contextlib.contextmanager
def running_ray(*workers: int) -> Iterator[GenuineRay]:
    """A Ray of a head node that takes no jobs beside `workers`, nodes with so many CPUs; without any the head does."""
    if not _RAY.exists():
        pytest.skip(f"Ray is not installed here ({_RAY}): `make ray` installs it")
    # Ray makes sockets there, whose paths may have 108 characters: a test's own folder is too deep.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray = GenuineRay(Path(folder))
        try:
            ray.start_node(head=True, cpus=0 if workers else _CPUS)
            for cpus in workers:
                ray.start_node(cpus=cpus)
            ray.wait_until_it_takes_jobs()
            yield ray
        finally:
            ray.end()
