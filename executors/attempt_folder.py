"""`AttemptFolder`: the files of one attempt on a file system, from which any process can poll the attempt.

    lock            held during a launch
    handle.json     written atomically once the process runs
    output.log      stdout and stderr
    code            exit code, written by the process's parent if that is alive to reap it
    ending.json     why the process was signalled to end, and when it will be killed

No other user of this machine can read, write, or prepare them. In a folder where everybody may write, such as /tmp,
somebody else could create them beforehand, with links to files that are then overwritten, or with false content.
`local_process` and `slurm_jobs` start and signal processes.
"""

import errno
import fcntl
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from diloco_orchestrator.executors.contract import (
    BY_EXIT_CODE,
    ExecutorError,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
)
from diloco_orchestrator.executors.process_contract import EXIT_DONE, parse_exit_line
from diloco_orchestrator.executors.processes import signal_name

_TAIL_BYTES = 256 * 1024
_OTHERS_WRITE = 0o022
# Errors of a file system that has no locks: Lustre mounted without `flock`, NFS without a lock server.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class Ending:
    """A record that a process was signalled to end, by a cancel or its time limit, and when it will be killed."""

    state: ReplicaState  # of the attempt once it has ended: CANCELLED or TIMED_OUT
    patience_ends: float  # wall-clock time (seconds since 1970) after which the process is killed


@dataclass(frozen=True)
class AttemptFolder:
    """Reads and writes the files of one attempt (a launched process of a replica) in its folder."""

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context with the attempt's launch lock: one caller on this machine at a time launches it.

        Waits as long as another caller holds the lock, which the system frees if that process dies. On a file system
        without locks callers exclude nobody; of two processes of one attempt the second to claim it ends. Raises
        `ExecutorError` if the folder or the lock file is not this user's.
        """
        make_private(self.path)
        with os.fdopen(open_private(self.path / "lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            yield

    @property
    def output(self) -> Path:
        return self.path / "output.log"

    def open_output(self) -> BinaryIO:
        return os.fdopen(open_private(self.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")

    def handle(self) -> ReplicaHandle | None:
        """The handle in `handle.json`; None if that file does not exist, because no launch has written it yet.

        Raises `ExecutorError` if the file is a link, another user's, or of another version.
        """
        try:
            descriptor = open_private(self.path / "handle.json", os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor) as file:
            return ReplicaHandle.from_json(json.loads(file.read()))

    def write_handle(self, handle: ReplicaHandle) -> None:
        self._write("handle.json", json.dumps(handle.to_json()))

    def ending(self) -> Ending | None:
        path = self.path / "ending.json"
        if not path.exists():
            return None
        body = json.loads(path.read_text())
        return Ending(ReplicaState(body["state"]), body["patience_ends"])

    def write_ending(self, ending: Ending) -> None:
        self._write("ending.json", json.dumps({"state": ending.state.value, "patience_ends": ending.patience_ends}))

    def write_exit_code(self, code: int) -> None:
        self._write("code", str(code))

    def ended_status(self) -> ReplicaStatus:
        """The status of an attempt whose process is gone, from its files: a cancel or time limit, else its exit code.

        FAILED with reason "lost" if neither is recorded.
        """
        code, ending = self._exit_code(), self.ending()
        if ending is not None and code != EXIT_DONE:
            reason = "user" if ending.state is ReplicaState.CANCELLED else "deadline"
            return ReplicaStatus(ending.state, reason, code, "gone", str(ending.state))
        if code is None:
            words = "gone without an exit code: it was killed while no parent was alive to record the signal"
            return ReplicaStatus(ReplicaState.FAILED, "lost", None, "gone", words)
        if code < 0:
            return ReplicaStatus(ReplicaState.FAILED, "exit", code, "gone", f"killed by {signal_name(-code)}")
        state, reason = BY_EXIT_CODE.get(code, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, reason, code, "gone", "" if code == EXIT_DONE else f"exit code {code}")

    def _exit_code(self) -> int | None:
        """The exit code that the parent recorded, else the one in the process's exit line; None if there is neither."""
        if (self.path / "code").exists():
            return int((self.path / "code").read_text())
        code = (parse_exit_line(self.tail(5)[0]) or {}).get("code")
        return code if isinstance(code, int) else None

    def tail(self, lines: int, *, complete: bool = False) -> tuple[list[str], int]:
        """The last `lines` non-empty lines of output, and the offset in bytes after them; ([], 0) without output file.

        `complete`: without a last line that may not have been written to its end.
        """
        if not self.output.exists():
            return [], 0
        with self.output.open("rb") as stream:
            size, length = stream.seek(0, os.SEEK_END), _TAIL_BYTES
            while True:
                stream.seek(max(0, size - length))
                data = stream.read(min(size, length))
                if complete:
                    data = data[: data.rfind(b"\n") + 1]
                found = [line for line in data.decode(errors="replace").splitlines() if line]
                if length >= size or (len(found) > lines and data):  # what comes first may be the end of a line
                    return found[-lines:] if lines else [], max(0, size - length) + len(data)
                length *= 4

    def logs(
        self, follow: bool, tail: int | None, has_ended: Callable[[], bool], pause: Callable[[], None]
    ) -> Iterator[str]:
        """Lines of output, all or the last `tail`; with `follow` as they are written, until the attempt has ended."""
        lines, offset = ([], 0) if tail is None else self.tail(tail, complete=follow)
        yield from lines
        ended = tail is not None and not follow
        while not ended:
            ended = not follow or has_ended()  # before reading, so that nothing written until then is missed
            for line, end in self._lines_from(offset, to_end=ended):
                offset = end
                yield line
            if not ended:
                pause()

    def _lines_from(self, offset: int, to_end: bool) -> Iterator[tuple[str, int]]:
        """Lines of output after byte `offset`, and the offset after each. `to_end`: an incomplete last line too."""
        if not self.output.exists():
            return
        with self.output.open("rb") as stream:
            stream.seek(offset)
            for raw in stream:
                if raw.endswith(b"\n") or to_end:
                    offset += len(raw)
                    for line in raw.decode(errors="replace").splitlines():  # a progress bar ends its lines with "\r"
                        yield line, offset

    def _write(self, name: str, text: str) -> None:
        """Write a file of the folder by an atomic rename, so that readers see the old or the new content.

        Leaves nothing else where that fails: on a full disk every poll would leave another draft.
        """
        draft = self.path / f"{name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        try:
            with os.fdopen(open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
                file.write(text)
            draft.replace(self.path / name)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def state_folder(environ: Mapping[str, str]) -> Path:
    """The folder for files of this user's local replicas: below $XDG_STATE_HOME if that is set, else ~/.local/state."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "diloco-orchestrator" / "local"


def make_private(folder: Path) -> None:
    """Create a folder, and its parents, that only this user can enter.

    Raises `ExecutorError` if it exists and belongs to another user, is a link, or is writable for others.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ExecutorError(f"{folder} cannot be made: {error}. Name another folder (directory=).") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_WRITE:
        raise ExecutorError(
            f"{folder} is another user's, a link, or writable for others, who could plant processes and files there. "
            "Name a folder of your own (directory=), or chmod 700 it."
        )


def open_private(path: Path, flags: int) -> int:
    """A file descriptor of a file of this user, created with mode 600 if `flags` say so. No link is followed.

    Raises `ExecutorError` for a link or the file of another user.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ExecutorError(f"{path} cannot be opened: {error}. If it is a link, somebody planted it.") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise ExecutorError(f"{path} is no file of this user: somebody else planted it. Remove it.")
    return descriptor
