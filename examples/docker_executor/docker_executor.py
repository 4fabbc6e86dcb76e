"""Replicas as containers of Docker, on this machine or on another (`host="ssh://gpu-box"`).

An executor of another package, whole; docs/write_an_executor.md explains it. `pip install ./examples/docker_executor`
gives it to `diloco run --executor docker`.
"""

import json
import os
import subprocess

from diloco_orchestrator import RemoteExecutor, ReplicaHandle, ReplicaState, ReplicaStatus
from diloco_orchestrator.executors import ExecutorDenied, ExecutorError, MissingSdk, Unavailable, plain_options
from diloco_orchestrator.executors.contract import BY_EXIT_CODE
from diloco_orchestrator.executors.remote_base import attempt_labels, attempt_name, run_label


class DockerExecutor(RemoteExecutor):
    """Runs each attempt as a container.

    Args:
        image: Image with Python; replicas install what it lacks.
        gpus: What `docker run --gpus` takes, such as "all" or "device=0"; none by default.
        host: Docker's daemon, such as "ssh://gpu-box"; by default that of the command `docker`.
    """

    name = "docker"

    def __init__(self, image: str = "python:3.11-slim", *, gpus: str | None = None, host: str | None = None) -> None:
        self.options = plain_options(locals())  # so that `attach` makes this executor again from the run's record
        self._image, self._gpus, self._host = image, gpus, host
        self._cancelled = set()

    # -- the request ---------------------------------------------------------------------------------------------

    def plan(self, request):
        return {"command": self._run_words(request)}  # secrets by name only

    def _run_words(self, request):
        labels = [f"--label={name}={value}" for name, value in attempt_labels(request).items()]
        plain = [f"--env={name}={value}" for name, value in request.env.items()]
        secret = [f"--env={name}" for name in request.secrets]  # without a value: from the environment of `docker`
        gpus = [f"--gpus={self._gpus}"] if self._gpus else []
        limit = ["timeout", "--foreground", f"{request.timeout_s:g}"] if request.timeout_s is not None else []
        words = ["run", "--detach", "--init", f"--name={attempt_name(request)}", *labels, *plain, *secret, *gpus]
        return [*words, self._image, *limit, *request.command]

    # -- calls ---------------------------------------------------------------------------------------------------

    def launch(self, request):
        """The container's name is the idempotency key: Docker refuses a second one, and the first is adopted."""
        try:
            self._docker(*self._run_words(request), environ=request.secrets)
        except ExecutorError as error:
            if "is already in use" not in str(error):
                raise
        return self._handle(request.run_id, self._inspect([attempt_name(request)])[0])

    def _handle(self, run_id, found):
        labels = found["Config"]["Labels"]
        who = int(labels["diloco-replica"]), int(labels["diloco-attempt"])
        return ReplicaHandle(self.name, run_id, *who, found["Id"], {"timed": "timeout" in found["Config"]["Cmd"][:1]})

    def poll(self, handle):
        return self.poll_many([handle])[0]

    def poll_many(self, handles):
        try:
            found = {each["Id"]: each for each in self._inspect([handle.native_id for handle in handles])}
        except (ExecutorDenied, MissingSdk):
            raise
        except ExecutorError as error:
            return [ReplicaStatus(ReplicaState.UNKNOWN, message=str(error))] * len(handles)
        return [self._status(handle, found.get(handle.native_id)) for handle in handles]

    def _status(self, handle, found):
        cancelled = ReplicaStatus(ReplicaState.CANCELLED, "user")
        if found is None:
            lost = ReplicaStatus(ReplicaState.PREEMPTED, "lost", message="the container is gone")
            return cancelled if handle.native_id in self._cancelled else lost
        native, code = found["State"]["Status"], found["State"]["ExitCode"]
        if native not in ("exited", "dead"):
            waits = native in ("created", "restarting")
            return ReplicaStatus(ReplicaState.PENDING if waits else ReplicaState.RUNNING, native_state=native)
        if code != 0 and handle.native_id in self._cancelled:
            return cancelled
        if code == 124 and handle.native["timed"]:  # of coreutils' timeout
            return ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", code, native)
        state, reason = BY_EXIT_CODE.get(code, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, "oom" if found["State"]["OOMKilled"] else reason, code, native)

    def cancel(self, handle):
        if self.poll(handle).state in (ReplicaState.PENDING, ReplicaState.RUNNING):
            self._cancelled.add(handle.native_id)
            self._docker(
                "kill", "--signal=TERM", handle.native_id, known_errors=("is not running", "No such container")
            )

    def logs(self, handle, *, follow=False, tail=None):
        if not self._inspect([handle.native_id]):
            return
        words = [*(["--follow"] if follow else []), *([] if tail is None else [f"--tail={tail}"]), handle.native_id]
        command = [*self._words(), "logs", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                yield from (line.rstrip("\n") for line in process.stdout)
            finally:
                process.terminate()  # the caller may stop reading while the container runs

    def find(self, run_id):
        ids = self._docker("ps", "--all", "--quiet", "--no-trunc", f"--filter=label=diloco-run={run_label(run_id)}")
        handles = [self._handle(run_id, found) for found in self._inspect(ids.split())]
        return sorted(handles, key=lambda handle: (handle.replica_id, handle.attempt))

    def _inspect(self, names):
        """What Docker knows of those containers that exist."""
        if not names:
            return []
        return json.loads(self._docker("inspect", "--type=container", *names, known_errors=("No such container",)))

    def _words(self):
        return ["docker", *([f"--host={self._host}"] if self._host else [])]

    def _docker(self, *words, environ=None, known_errors=()):
        """What `docker` prints, also if it failed with an error that the caller knows."""
        try:
            environ = {**os.environ, **(environ or {})}
            done = subprocess.run([*self._words(), *words], env=environ, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise MissingSdk("docker is not on the PATH. Install Docker's command line tool.") from None
        if done.returncode == 0 or any(each in done.stderr for each in known_errors):
            return done.stdout
        said = f"docker {words[0]}: {done.stderr.strip()}"
        if "permission denied" in said:
            raise ExecutorDenied(f"{said}. Ask for the right to use this daemon.")
        if "Cannot connect to the Docker daemon" in said:
            raise Unavailable(f"{said}. Try again once it runs.")
        raise ExecutorError(said)
