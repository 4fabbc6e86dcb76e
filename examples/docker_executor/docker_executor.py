"""Replicas as containers of Docker, here or elsewhere (`host="ssh://gpu-box"`): docs/recipes/write_an_executor.md."""

import json

from diloco_orchestrator import executors
from diloco_orchestrator.executors import ReplicaState, attempt_labels, attempt_name, run_selector

_FAILURES = (  # what `docker` prints as it fails; any other failure is an ExecutorError
    executors.Failure(executors.ExecutorDenied, ["permission denied"], "{said}. Ask for the right to use the daemon."),
    executors.Failure(executors.Unavailable, ["Cannot connect to the Docker daemon"], "{said}. Try again later."),
)
_STATES = {"created": ReplicaState.PENDING, "running": ReplicaState.RUNNING, "paused": ReplicaState.RUNNING}


class DockerExecutor(executors.RemoteExecutor):
    """Runs each attempt as a container.

    Args:
        image: Image with Python; replicas install what it lacks.
        gpus: What `docker run --gpus` takes, such as "all" or "device=0"; none by default.
        host: Docker's daemon, such as "ssh://gpu-box"; by default that of the command `docker`.
    """

    name = "docker"

    def __init__(self, image: str = "python:3.11-slim", *, gpus: str | None = None, host: str | None = None) -> None:
        self.options = executors.plain_options(locals())  # so that `attach` makes it again from the run's record
        super().__init__()
        self._image, self._gpus = image, [f"--gpus={gpus}"] if gpus else []
        self._cli = executors.CommandLine("docker", *([f"--host={host}"] if host else []), failures=_FAILURES)

    def plan(self, request):
        """The words of `docker run`, with secrets by name only: their values are in the environment of `docker`."""
        labels = [f"--label={name}={value}" for name, value in attempt_labels(request).items()]
        env = [f"--env={each}" for each in (*(f"{k}={v}" for k, v in request.env.items()), *request.secrets)]
        words = ["run", "--detach", "--init", f"--name={attempt_name(request)}", *labels, *env, *self._gpus]
        image = request.pinned(self._image)
        return {"image": image, "command": [*words, image, *executors.limited(request.command, request.timeout_s)]}

    def launch(self, request):
        """The container's name is the idempotency key: Docker refuses a second one, and the first is adopted."""
        name = attempt_name(request)
        for _ in self.tries(f"the container {name} to be seen"):  # its name is taken a moment before
            self._cli.run(*self.plan(request)["command"], secrets=request.secrets, known=["is already in use"])
            if found := self._inspect([name]):
                if found[0]["State"]["Status"] == "created":  # by a launcher that died before it started it
                    self._cli.run("start", name)
                return self.handle_of(request.run_id, found[0]["Config"]["Labels"], found[0]["Id"])

    def statuses(self, handles):
        found = {each["Id"]: each for each in self._inspect([handle.native_id for handle in handles])}
        return [self._status(handle, found.get(handle.native_id)) for handle in handles]

    def _status(self, handle, found):
        if found is None:
            return self.gone(handle.native_id, "the container is gone")
        native, code, oom = (found["State"][name] for name in ("Status", "ExitCode", "OOMKilled"))
        if native in ("exited", "dead"):
            cancelled, timed = handle.native_id in self._cancelled, found["Config"]["Cmd"][:1] == ["timeout"]
            return executors.ended_status(code, native, cancelled=cancelled, timed=timed, oom=oom)
        return executors.ReplicaStatus(_STATES.get(native, ReplicaState.UNKNOWN), native_state=native)

    def cancel(self, handle):
        if not self.poll(handle).state.ended:
            self._cancelled.add(handle.native_id)
            self._cli.run("kill", "--signal=TERM", handle.native_id, known=["is not running", "No such container"])

    def logs(self, handle, *, follow=False, tail=None):
        if self._inspect([handle.native_id]):
            options = [*(["--follow"] if follow else []), *([] if tail is None else [f"--tail={tail}"])]
            yield from self._cli.lines("logs", *options, handle.native_id)

    def find(self, run_id):
        ids = self._cli.run("ps", "-aq", "--no-trunc", f"--filter=label={run_selector(run_id)}")
        found = self._inspect(ids.split())
        return executors.in_order(self.handle_of(run_id, each["Config"]["Labels"], each["Id"]) for each in found)

    def _inspect(self, names):
        """What Docker knows of those containers that exist."""
        return json.loads(self._cli.run("container", "inspect", *names, known=["No such container"])) if names else []
