"""A genuine Docker of its own on this machine: dockerd and containerd over a folder, and an image from no registry.

Needs root and Debian's package docker.io (`make docker`). The daemon makes no network and changes no rule of iptables;
it ends with the context, its containers before it. The image is this Python without site-packages, `sh` and `timeout`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

IMAGE = "python:3.11-slim"  # the example's default
_PROGRAMS = ("dockerd", "containerd", "runc", "docker")
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")  # where daemons are, which a user's PATH may lack
_PATIENCE_S = 180.0  # seconds; ends a start or an end that hangs
_LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages", "__pycache__"}


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))


def skip_without_docker() -> None:
    """Skip the test where Docker is not installed, or where this user may not start it."""
    if absent := [name for name in _PROGRAMS if _program(name) is None]:
        pytest.skip(
            f"Docker is not installed here ({', '.join(absent)}): `make docker` installs it on Debian and Ubuntu"
        )
    if os.geteuid() != 0:
        pytest.skip("only root can start a Docker daemon")


class GenuineDocker:
    """A running Docker. `host`: its address, as `docker --host` takes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "docker.sock"
        self.host = f"unix://{self.socket}"
        self._daemon: subprocess.Popen[bytes] | None = None

    def call(self, *words: str) -> str:
        """What `docker` prints."""
        done = subprocess.run(["docker", f"--host={self.host}", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"docker {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Start dockerd and wait until it answers. Skip the test where it ends instead: a machine may not allow it."""
        where = [f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec", f"--host={self.host}"]
        files = [f"--pidfile={self.folder}/pid", f"--config-file={self.folder}/daemon.json"]
        network = ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        program = _program("dockerd")
        assert program is not None
        # What it starts (containerd, its shims, runc) is found on the PATH too.
        environ = {**os.environ, "PATH": os.pathsep.join([str(Path(program).parent), os.environ["PATH"], *_SBIN])}
        with (self.folder / "log").open("ab") as log:
            daemon = self._daemon = subprocess.Popen(
                [program, *where, *files, *network, "--storage-driver=vfs", "--live-restore"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait(lambda: daemon.poll() is not None or self._answers(), "dockerd answers")
        if daemon.poll() is not None:
            pytest.skip(f"dockerd cannot run here: {(self.folder / 'log').read_text()[-500:]}")

    def _answers(self) -> bool:
        words = ["docker", f"--host={self.host}", "version"]
        return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0

    def stop(self) -> None:
        """End dockerd; containers run on (--live-restore)."""
        if self._daemon is not None:
            self._daemon.send_signal(signal.SIGTERM)
            self._daemon.wait(_PATIENCE_S)
            self._daemon = None

    def end(self) -> None:
        """End dockerd, and the mount of its data, which --live-restore leaves."""
        self.stop()
        data = ["umount", "--lazy", str(self.folder / "data")]
        subprocess.run(data, stderr=subprocess.DEVNULL, check=False)  # it fails where nothing is mounted

    def remove_containers(self) -> None:
        if names := self.call("ps", "--all", "--quiet").split():
            self.call("rm", "--force", *names)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{(self.folder / 'log').read_text()[-2000:]}"
            time.sleep(0.05)


@contextlib.contextmanager
def running_docker(folder: Path) -> Iterator[GenuineDocker]:
    """A Docker over `folder`, with the one image `IMAGE`."""
    skip_without_docker()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "daemon.json").write_text("{}")
    docker = GenuineDocker(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(docker.end)
        docker.start()
        _write_image(folder / "image.tar")
        docker.call("import", "--change=ENV PATH=/bin", str(folder / "image.tar"), IMAGE)
        (folder / "image.tar").unlink()
        stack.callback(docker.remove_containers)
        yield docker


def _write_image(path: Path) -> None:
    """A root file system in which the Python of this process runs: interpreter, standard library, shared libraries."""
    python, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    programs = {"bin/sh": _program("sh"), "bin/timeout": _program("timeout"), str(python)[1:]: str(python)}
    needed = {
        each for name in [*programs.values(), *library.glob("lib-dynload/*.so")] for each in _libraries(str(name))
    }
    with tarfile.open(path, "w") as image:
        image.add(library, str(library)[1:], filter=_slim)
        for name, real in [*programs.items(), *((each[1:], each) for each in sorted(needed))]:
            image.add(Path(str(real)).resolve(), name)
        link = tarfile.TarInfo("bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, str(python)
        image.addfile(link)
        for name in ("tmp", "root", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o777
            image.addfile(folder)


def _slim(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(entry.name).parts
    return None if _LEFT_OUT & set(parts) or any(part.startswith("config-") for part in parts) else entry


def _libraries(program: str) -> list[str]:
    """Paths of the shared libraries of a program, its loader included."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [word for word in listed.split() if word.startswith("/")]
