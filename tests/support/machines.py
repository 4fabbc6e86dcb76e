"""What a loopback cloud runs its commands on: local processes that see only the environment their request names."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# What an image brings: a PATH, a home. The rest of this machine's environment stays out.
_IMAGE = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Machine:
    """One process, its output and its end. Starts at once; `python` is this interpreter, with all that is installed."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], timeout_s: float | None = None, grace_s: float = 5.0
    ) -> None:
        self.command, self.env = list(command), dict(env)
        self.timed_out = False
        self.started_at = time.time()
        self.ended_at: float | None = None
        self._grace_s = grace_s
        self._folder = tempfile.TemporaryDirectory(prefix="machine-")
        self.output = Path(self._folder.name) / "output"
        self._log = self.output.open("wb")
        argv = [sys.executable, *command[1:]] if command[0] in ("python", "python3") else list(command)
        self._process = subprocess.Popen(
            argv,
            env={**_IMAGE, "HOME": self._folder.name, **env},
            cwd=self._folder.name,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.ended = threading.Event()
        threading.Thread(target=self._wait, args=(timeout_s,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: killed by that signal."""
        return self._process.returncode if self.ended.is_set() else None

    def read(self, offset: int = 0) -> bytes:
        """Output so far, from a byte on."""
        with self.output.open("rb") as stream:
            stream.seek(offset)
            return stream.read()

    def lines(self) -> list[str]:
        """Complete lines so far; an incomplete last one too once it has ended."""
        text = self.read().decode(errors="replace")
        return text.splitlines() if self.ended.is_set() else text[: text.rfind("\n") + 1].splitlines()

    def terminate(self) -> None:
        """SIGTERM, and SIGKILL after the grace, as every provider does. Returns at once."""
        self._signal(signal.SIGTERM)
        timer = threading.Timer(self._grace_s, self._signal, args=(signal.SIGKILL,))
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """End it and remove its files."""
        self.kill()
        self.ended.wait()
        self._folder.cleanup()

    def _wait(self, timeout_s: float | None) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.timed_out = True
            self.terminate()
            self._process.wait()
        self._log.close()
        self.ended_at = time.time()
        self.ended.set()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
