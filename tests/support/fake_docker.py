"""A stand-in for the command `docker`: containers are processes that see only the environment of their request.

`install(folder)` writes the program; it keeps its containers below `folder`. What it prints has the form of Docker's.
A file `down` there makes every call fail as if the daemon were stopped, `refused` holds replicas that are not started.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

_SHARED = ("--detach", "--init")
_FOLLOW_S = 0.05


def install(folder: Path) -> Path:
    """Write `docker` into `folder`/bin, which the caller puts on the PATH; returns that folder."""
    binaries = folder / "bin"
    inside = folder / "image"  # the PATH in the image
    for path in (binaries, inside, folder / "containers"):
        path.mkdir(parents=True)
    (inside / "python").symlink_to(sys.executable)
    program = binaries / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {folder} "$@"\n')
    program.chmod(0o755)
    return binaries


class Refused(Exception):
    """The daemon's error, in its words."""


class Daemon:
    """The commands, over files: a container is a folder with its configuration, its output and how it ended."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._containers = folder, folder / "containers"

    def run(self, words: list[str]) -> str:
        options = [word for word in words if word.startswith("--")][: self._count_of_options(words)]
        image, *command = words[len(options) :]
        given = [option.removeprefix("--").split("=", 1) for option in options if option not in _SHARED]
        name = next(value for key, value in given if key == "name")
        labels = dict(value.split("=", 1) for key, value in given if key == "label")
        env = [value if "=" in value else f"{value}={os.environ[value]}" for key, value in given if key == "env"]
        refused = self._folder / "refused"
        if refused.exists() and labels["diloco-replica"] in refused.read_text().split():
            raise Refused(f"docker: Error response from daemon: pull access denied for {image}.")
        container = {"Id": uuid.uuid4().hex * 2, "Name": name, "Config": {"Labels": labels, "Cmd": command, "Env": env}}
        with self._lock():
            if any(each["Name"] == name for each in self._all()):
                raise Refused(
                    f'docker: Error response from daemon: Conflict. The container name "/{name}" is already in use.'
                )
            home = self._containers / container["Id"]
            home.mkdir()
            (home / "config.json").write_text(json.dumps(container))
            with (self._folder / "started").open("a") as started:
                started.write(f"{labels['diloco-run']}\n")
            subprocess.Popen(
                [sys.executable, "-I", __file__, str(self._folder), "shim", container["Id"]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            while not (home / "pid").exists():
                time.sleep(0.005)
        return str(container["Id"])

    @staticmethod
    def _count_of_options(words: list[str]) -> int:
        return next(place for place, word in enumerate(words) if not word.startswith("--"))

    def shim(self, container_id: str) -> None:
        """Start the container's process, wait for it and write how it ended. Outlives the command that ran it."""
        home = self._containers / container_id
        config = json.loads((home / "config.json").read_text())["Config"]
        env = {
            "PATH": f"{self._folder}/image:/usr/bin:/bin",
            "HOME": str(home),
            **dict(e.split("=", 1) for e in config["Env"]),
        }
        with (home / "output").open("ab") as output:
            process = subprocess.Popen(config["Cmd"], env=env, cwd=home, stdout=output, stderr=output)
        _write(home / "pid", str(process.pid))
        code = process.wait()
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            _write(home / "code", str(code if code >= 0 else 128 - code))

    def inspect(self, names: list[str]) -> str:
        found = [each for name in names for each in self._all() if name in (each["Id"], each["Name"])]
        for each in found:
            ended = self._containers / each["Id"] / "code"
            code = int(ended.read_text()) if ended.exists() else 0
            each["State"] = {"Status": "exited" if ended.exists() else "running", "ExitCode": code, "OOMKilled": False}
        print(json.dumps(found))
        if absent := [name for name in names if not any(name in (each["Id"], each["Name"]) for each in found)]:
            raise Refused("\n".join(f"Error: No such container: {name}" for name in absent))
        return ""

    def ps(self, label: str) -> str:
        key, _, value = label.partition("=")
        return "\n".join(each["Id"] for each in self._all() if each["Config"]["Labels"].get(key) == value)

    def kill(self, container_id: str, number: signal.Signals) -> str:
        home = self._containers / container_id
        if not home.exists():
            raise Refused(f"Error response from daemon: No such container: {container_id}")
        if (home / "code").exists():
            raise Refused(f"Error response from daemon: container {container_id} is not running")
        os.kill(int((home / "pid").read_text()), number)
        return container_id

    def rm(self, container_id: str) -> str:
        home = self._containers / container_id
        with contextlib.suppress(Refused):
            self.kill(container_id, signal.SIGKILL)
        while not (home / "code").exists():
            time.sleep(0.005)
        home.rename(self._folder / f"removed-{container_id}")
        return container_id

    def logs(self, container_id: str, follow: bool, tail: int | None) -> str:
        home = self._containers / container_id
        if not home.exists():
            raise Refused(f"Error response from daemon: No such container: {container_id}")
        with (home / "output").open() as output:
            lines = output.readlines()
            sys.stdout.writelines(lines if tail is None else lines[-tail:] if tail else [])
            while follow:
                ended = (home / "code").exists()
                sys.stdout.write(output.read())
                sys.stdout.flush()
                if ended:
                    break
                time.sleep(_FOLLOW_S)
        return ""

    def _all(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self._containers.glob("*/config.json"))]

    @contextlib.contextmanager
    def _lock(self):
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def main(folder: Path, words: list[str]) -> str:
    daemon = Daemon(folder)
    if words[0] == "--host=unix:///of/another":
        raise Refused("permission denied while trying to connect to the Docker daemon socket at unix:///of/another")
    if (folder / "down").exists() and words[0] != "shim":
        raise Refused(
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
        )
    command, *rest = words[1:] if words[0] == "container" else words
    options = {
        key: value for key, _, value in (w.removeprefix("--").partition("=") for w in rest if w.startswith("--"))
    }
    names = [word for word in rest if not word.startswith("--")]
    match command:
        case "run":
            return daemon.run(rest)
        case "shim":
            return daemon.shim(*names) or ""
        case "inspect":
            return daemon.inspect(names)
        case "ps":
            return daemon.ps(options["filter"].removeprefix("label="))
        case "kill":
            return daemon.kill(names[0], signal.Signals[f"SIG{options.get('signal', 'KILL')}"])
        case "rm":
            return daemon.rm(names[0])
        case "logs":
            return daemon.logs(names[0], "follow" in options, int(options["tail"]) if "tail" in options else None)
        case _:
            raise Refused(f"docker: '{command}' is not a docker command.")


if __name__ == "__main__":
    try:
        if said := main(Path(sys.argv[1]), sys.argv[2:]):
            print(said)
    except Refused as error:
        sys.exit(str(error))
