"""Replicas as processes of this machine: they outlive whoever launched them, and any process can watch them.

Everything about an attempt lies in one folder, so that handles work everywhere on the host:

    lock            held while somebody launches
    handle.json     written atomically once the process runs
    output.log      stdout and stderr
    code            exit code, written by the process's parent if that is alive to see it
    ending.json     that a cancel or a time-out was asked for, and when patience ends

Linux only (/proc tells processes from later ones with the same pid).
"""

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from executors.contract import (
    BY_EXIT_CODE,
    ENV_WORLD_SIZE,
    EXIT_DONE,
    ExecutorClock,
    ExecutorError,
    LaunchRequest,
    ReplicaHandle,
    ReplicaResult,
    ReplicaState,
    ReplicaStatus,
    SystemExecutorClock,
    plain_options,
)
from executors.function_launch import check_options, collect_by_polling, launch_all, low_level_requests, parse_exit_line
from executors.linux_processes import ProcessId, find_by_environment

_MARK = "DILOCO_ATTEMPT_DIR"  # in a child's environment; finds a child whose launcher died before writing it down
_POLL_S = 0.02
_TAIL_BYTES = 256 * 1024


class LocalProcessExecutor:
    """Runs each attempt as one process.

    Args:
        directory: For logs and handles; by default a folder of this user in /tmp.
        grace_s: Seconds between asking a process to end (SIGTERM) and ending it (SIGKILL).
        clock: Time, for tests.
    """

    name = "local"
    shares_machine = True

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        grace_s: float = 10.0,
        clock: ExecutorClock | None = None,
    ) -> None:
        self.options = plain_options({"directory": str(directory) if directory else None, "grace_s": grace_s})
        if not Path("/proc/self/stat").exists():
            raise ExecutorError("LocalProcessExecutor needs Linux's /proc, which this machine does not have.")
        self._directory = Path(directory or Path(tempfile.gettempdir()) / f"diloco-{os.getuid()}").resolve()
        self._grace_s = grace_s
        self._clock = clock or SystemExecutorClock()
        self._children: dict[ProcessId, subprocess.Popen[bytes]] = {}

    @classmethod
    def of(cls, handle: ReplicaHandle) -> Self:
        """The executor that keeps its attempts where `handle` lies."""
        return cls(Path(handle.native["dir"]).parents[2])

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The command and the environment that the request adds, secrets redacted."""
        return {
            "command": _argv(request.command),
            "env": {**dict(request.env), **_threads(request), **dict.fromkeys(request.secrets, "<redacted>")},
            "dir": str(self._folder(request)),
            "timeout_s": request.timeout_s,
        }

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Start the attempt, or adopt the one that was started under the same name."""
        folder = self._folder(request)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):  # released by the system if we die here
            if (folder / "handle.json").exists():
                return ReplicaHandle.from_json(json.loads((folder / "handle.json").read_text()))
            orphan = find_by_environment(_MARK, str(folder))
            process = ProcessId.of(orphan) if orphan else self._start(request, folder)
            if process is None:
                raise ExecutorError(f"the process of {folder} ended before it could be looked at. Launch it again.")
            return self._write_handle(request, folder, process)

    def _start(self, request: LaunchRequest, folder: Path) -> ProcessId | None:
        with (folder / "output.log").open("ab") as output:
            child = subprocess.Popen(
                _argv(request.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(request, folder),
                start_new_session=True,  # Ctrl-C of the coordinator is not the replicas'
            )
        process = ProcessId.of(child.pid)  # there even if it has ended: it is ours to reap
        if process is not None:
            self._children[process] = child
        return process

    def _write_handle(self, request: LaunchRequest, folder: Path, process: ProcessId) -> ReplicaHandle:
        handle = ReplicaHandle(
            executor=self.name,
            run_id=request.run_id,
            replica_id=request.replica_id,
            attempt=request.attempt,
            native_id=f"{process.pid}@{process.host}",
            native={
                "host": process.host,
                "boot_id": process.boot_id,
                "pid": process.pid,
                "start_ticks": process.start_ticks,
                "dir": str(folder),
                "deadline": None if request.timeout_s is None else time.time() + request.timeout_s,
                **_threads(request),
            },
        )
        _write_atomically(folder / "handle.json", json.dumps(handle.to_json()))
        return handle

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Mapping[str, Any],
        *,
        run_id: str | None = None,
        code: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[ReplicaHandle]:
        """Call `entrypoint(**entrypoint_args)` in `n_replicas` processes, which see this process's modules."""
        check_options(options, ("run_id", "code", "env"))
        run = run_id or f"local-{uuid.uuid4().hex[:12]}"
        return launch_all(self, low_level_requests(run, n_replicas, entrypoint, entrypoint_args, env or {}, code))

    # -- watching ------------------------------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """What the operating system, the parent's note and the log's last line say."""
        process, folder = ProcessId.from_native(handle.native), Path(handle.native["dir"])
        if process.host != platform.node():
            return ReplicaStatus(ReplicaState.UNKNOWN, message=f"it runs on {process.host}; ask there")
        if process.is_alive():
            self._end_if_due(handle, process, folder)
            return ReplicaStatus(ReplicaState.RUNNING, native_state="alive")
        self._reap(process, folder)
        if process in self._children:  # a zombie whose other threads still end: its exit code comes soon
            return ReplicaStatus(ReplicaState.RUNNING, native_state="ending")
        return _ended_status(folder)

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return [self.poll(handle) for handle in handles]

    def _reap(self, process: ProcessId, folder: Path) -> None:
        """Let a child of ours go and write down its exit code, for other processes too."""
        child = self._children.get(process)
        if child is not None and child.poll() is not None:
            _write_atomically(folder / "code", str(child.returncode))
            del self._children[process]

    def _end_if_due(self, handle: ReplicaHandle, process: ProcessId, folder: Path) -> None:
        """Enforce the deadline, and end what was asked to end and did not."""
        ending = _read_ending(folder)
        if ending is None and (deadline := handle.native.get("deadline")) is not None and time.time() > deadline:
            self._ask_to_end(process, folder, ReplicaState.TIMED_OUT)
        elif ending is not None and time.time() > ending["patience_ends"]:
            _signal_group(process, signal.SIGKILL)

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None, check: bool = True
    ) -> list[ReplicaResult]:
        return collect_by_polling(self, handles, timeout, check, self._clock)

    def cancel(self, handle: ReplicaHandle) -> None:
        """SIGTERM now; `poll` sends SIGKILL once `grace_s` is over."""
        process = ProcessId.from_native(handle.native)
        if process.host != platform.node():
            raise ExecutorError(f"replica {handle.replica_id} runs on {process.host}; cancel it there.")
        if process.is_alive() and _read_ending(Path(handle.native["dir"])) is None:
            self._ask_to_end(process, Path(handle.native["dir"]), ReplicaState.CANCELLED)

    def _ask_to_end(self, process: ProcessId, folder: Path, state: ReplicaState) -> None:
        ending = {"state": state.value, "patience_ends": time.time() + self._grace_s}
        _write_atomically(folder / "ending.json", json.dumps(ending))
        _signal_group(process, signal.SIGTERM)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        path = Path(handle.native["dir"]) / "output.log"
        offset = 0
        if tail is not None:
            lines, offset = _tail(path, tail)
            yield from lines
        elif path.exists():
            with path.open("rb") as stream:
                for raw in stream:
                    offset += len(raw)
                    yield raw.decode(errors="replace").rstrip("\n")
        while follow:
            ended = self.poll(handle).state.ended  # before reading: what was written until then is read below
            lines, offset = _read_lines(path, offset, to_end=ended)
            yield from lines
            if ended:
                return
            self._clock.sleep(_POLL_S)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        paths = sorted((self._directory / _safe(run_id)).glob("*/*/handle.json"))
        found = [ReplicaHandle.from_json(json.loads(path.read_text())) for path in paths]
        return sorted(found, key=lambda handle: (handle.replica_id, handle.attempt))

    def close(self) -> None:
        """Nothing is held that would need freeing; children run on."""

    def forget(self, run_id: str) -> None:
        """Remove the logs and handles of a run whose processes have all ended."""
        alive = [h.replica_id for h in self.find(run_id) if not self.poll(h).state.ended]
        if alive:
            raise ExecutorError(f"replicas {alive} of {run_id} still run. Cancel them first.")
        shutil.rmtree(self._directory / _safe(run_id), ignore_errors=True)

    def _folder(self, request: LaunchRequest) -> Path:
        return self._directory / _safe(request.run_id) / str(request.replica_id) / str(request.attempt)


# -- the child's command and environment ------------------------------------------------------------------------------


def _argv(command: Sequence[str]) -> list[str]:
    return [sys.executable, *command[1:]] if command[0] == "python" else list(command)


def _environment(request: LaunchRequest, folder: Path) -> dict[str, str]:
    """The parent's, our packages before the user's path, a fixed thread count, then what the request says."""
    ours = str(Path(__file__).resolve().parent.parent)
    users = [str(Path(entry or ".").resolve()) for entry in sys.path]
    path = dict.fromkeys([ours, *users])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        **_threads(request),
        **request.env,
        **request.secrets,
        _MARK: str(folder),
    }


def _threads(request: LaunchRequest) -> dict[str, str]:
    """A thread count that does not depend on load: some sums come out differently with another one."""
    replicas = int(request.env.get(ENV_WORLD_SIZE, "1"))
    threads = max(1, len(os.sched_getaffinity(0)) // replicas)
    return {"OMP_NUM_THREADS": request.env.get("OMP_NUM_THREADS", str(threads))}


# -- the attempt's folder ---------------------------------------------------------------------------------------------


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One launcher at a time, over all processes of this machine."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    draft.write_text(text)
    draft.replace(path)


def _read_ending(folder: Path) -> dict[str, Any] | None:
    path = folder / "ending.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def _signal_group(process: ProcessId, number: signal.Signals) -> None:
    if process.is_alive():
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return  # it ended in between, which is what was wanted


def _ended_status(folder: Path) -> ReplicaStatus:
    code = _exit_code(folder)
    ending = _read_ending(folder)
    if ending is not None and code != EXIT_DONE:
        state = ReplicaState(ending["state"])
        return ReplicaStatus(state, "user" if state is ReplicaState.CANCELLED else "deadline", code, "gone", str(state))
    if code is None:
        words = "gone without an exit code: killed, and nobody was there to see by what"
        return ReplicaStatus(ReplicaState.FAILED, "lost", None, "gone", words)
    if code < 0:
        return ReplicaStatus(ReplicaState.FAILED, "exit", code, "gone", f"killed by {signal.Signals(-code).name}")
    state, reason = BY_EXIT_CODE.get(code, (ReplicaState.FAILED, "exit"))
    return ReplicaStatus(state, reason, code, "gone", "" if code == EXIT_DONE else f"exit code {code}")


def _exit_code(folder: Path) -> int | None:
    """As the parent saw it, else as the process told in its last line."""
    if (folder / "code").exists():
        return int((folder / "code").read_text())
    told = parse_exit_line(_tail(folder / "output.log", 5)[0])
    return None if told is None else int(told["code"])


def _tail(path: Path, lines: int) -> tuple[list[str], int]:
    """The last lines of a file, and where they end."""
    if not path.exists():
        return [], 0
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAIL_BYTES))
        text = stream.read(size).decode(errors="replace")
    return [line for line in text.splitlines() if line][-lines:] if lines else [], size


def _read_lines(path: Path, offset: int, to_end: bool) -> tuple[list[str], int]:
    """Complete lines from `offset` on (with `to_end` a last incomplete one too), and where they end."""
    if not path.exists():
        return [], offset
    with path.open("rb") as stream:
        stream.seek(offset)
        data = stream.read()
    end = len(data) if to_end else data.rfind(b"\n") + 1
    return data[:end].decode(errors="replace").splitlines(), offset + end
