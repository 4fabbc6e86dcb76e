"""Replicas as processes of this machine: they outlive their launcher, and any process of the host can poll them.

`attempt_folder` has the files of an attempt, `processes` distinguishes a process from a later one with its pid.
"""

import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from diloco_orchestrator.executors.attempt_folder import AttemptFolder, Ending, make_private, state_folder
from diloco_orchestrator.executors.clock import Clock
from diloco_orchestrator.executors.constructor_options import plain_options
from diloco_orchestrator.executors.contract import (
    ExecutorError,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    in_order,
)
from diloco_orchestrator.executors.machine import (
    VISIBLE,
    gpus_of,
    memory_share,
    sharing_words,
    usable_cores,
    visible_gpus,
)
from diloco_orchestrator.executors.process_contract import ENV_MEMORY, ENV_WORLD_SIZE, KEY_VARIABLES
from diloco_orchestrator.executors.processes import (
    ProcessId,
    commands_by_environment,
    find_by_environment,
    is_same_folder,
)
from diloco_orchestrator.executors.remote_base import RemoteExecutor

log = logging.getLogger(__name__)

_MARK = "DILOCO_ATTEMPT_DIR"  # in a child's environment: finds a child whose launcher died before it wrote the handle
_POLL_S = 0.02


class LocalProcessExecutor(RemoteExecutor):
    """Runs each attempt as one process of this machine. SIGTERM ends it, SIGKILL after `grace_s`.

    Replica i sees one GPU, number i modulo those that this process sees, unless the run sets `CUDA_VISIBLE_DEVICES`. A
    replica of several ranks sees one for each, the next after those of the replicas before it.

    Args:
        directory: For logs and handles, which only this user can read; by default in $XDG_STATE_HOME (~/.local/state).
        hourly_usd: What one replica's share of this machine costs in US dollars an hour, for max_cost_usd and `status`.
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
        hourly_usd: float | str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.options = plain_options({**locals(), "directory": str(directory) if directory else None})
        super().__init__(hourly_usd=hourly_usd, clock=clock)
        self._directory = Path(directory or state_folder(os.environ)).resolve()
        self._grace_s = grace_s
        self._children: dict[ProcessId, subprocess.Popen[bytes]] = {}
        self._gpus: tuple[str, ...] | None = None  # of this machine; None: not listed yet

    @classmethod
    def of(cls, handle: ReplicaHandle) -> Self:
        """An executor that can poll and cancel the attempt of `handle`: its directory is that of the handle."""
        return cls(Path(handle.native["dir"]).parents[2])

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The command and environment variables that `launch` would use, secrets redacted. Starts nothing.

        Raises ValueError for more ranks than the replica would see GPUs; it may see none, and train on the CPU.
        """
        gpu = self._gpu(request)
        if gpu and 0 < len(seen := visible_gpus(gpu)) < request.ranks:
            raise ValueError(
                f"replica {request.replica_id} has {request.ranks} ranks, each of which trains on its own GPU, and "
                f"would see {len(seen)} here ({', '.join(seen)}). Set ranks_per_replica={len(seen)} (--ranks) or less; "
                f"with {VISIBLE} set to nothing its ranks train on the CPU."
            )
        return {
            "command": _argv(request.command),
            "env": {
                **gpu,
                **request.env,
                **_threads(request),
                **dict.fromkeys(request.secrets, "<redacted>"),
            },
            "dir": str(self._folder(request).path),
            "timeout_s": request.timeout_s,
        }

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Start the attempt, or adopt its process if it was launched before, even if no handle was written."""
        folder = self._folder(request)
        for each in (self._directory, folder.path.parent.parent, folder.path.parent):
            make_private(each)
        with folder.locked():
            if (existing := folder.handle()) is not None:
                return existing
            orphan = find_by_environment(_MARK, str(folder.path))
            process = ProcessId.of(orphan) if orphan else self._start(request, folder)
            if process is None:
                raise ExecutorError(f"the process of {folder.path} ended before it could be identified. Launch again.")
            handle = self._handle(request, folder, process)
            folder.write_handle(handle)
            return handle

    def _start(self, request: LaunchRequest, folder: AttemptFolder) -> ProcessId | None:
        with folder.open_output() as output:
            child = subprocess.Popen(
                _argv(request.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(request, folder, self._gpu(request)),
                start_new_session=True,  # so that Ctrl-C in the coordinator's terminal does not reach replicas
            )
        process = ProcessId.of(child.pid)  # found even if it has ended, because only we can reap it
        if process is not None:
            self._children[process] = child
        return process

    def _gpu(self, request: LaunchRequest) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES for a replica, if this machine has GPUs. Warns, once, if several replicas share one."""
        if VISIBLE in request.env:
            return {VISIBLE: request.env[VISIBLE]}
        if self._gpus is None:
            self._gpus = visible_gpus(os.environ)
            if words := sharing_words(_replicas(request), self._gpus):
                log.warning("%s", words)
        first = request.replica_id if request.ranks_before is None else request.ranks_before
        return gpus_of(first, request.ranks, self._gpus)

    def _handle(self, request: LaunchRequest, folder: AttemptFolder, process: ProcessId) -> ReplicaHandle:
        native = {
            "host": process.host,
            "boot_id": process.boot_id,
            "pid": process.pid,
            "start_ticks": process.start_ticks,
            "dir": str(folder.path),
            "deadline": None if request.timeout_s is None else self._clock.wall_time() + request.timeout_s,
            **_threads(request),
            **self._gpu(request),
        }
        native_id = f"{process.pid}@{process.host}"
        return ReplicaHandle(self.name, request.run_id, request.replica_id, request.attempt, native_id, native)

    # -- polling -------------------------------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The attempt's status from its process, recorded exit code and exit line; UNKNOWN for another host's process.

        A process whose time limit or grace period is over is ended.
        """
        process, folder = ProcessId.from_native(handle.native), _folder_of(handle)
        if process.host != platform.node():
            return ReplicaStatus(ReplicaState.UNKNOWN, message=f"it runs on {process.host}; poll it there")
        if process.is_alive():
            self._end_if_due(handle, process, folder)
            return ReplicaStatus(ReplicaState.RUNNING, native_state="alive")
        self._reap(process, folder)
        if process in self._children:  # a zombie whose other threads still end: its exit code is not known yet
            return ReplicaStatus(ReplicaState.RUNNING, native_state="ending")
        return folder.ended_status()

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return [self.poll(handle) for handle in handles]

    def _reap(self, process: ProcessId, folder: AttemptFolder) -> None:
        """Collect the exit code of a child of this process, and write it to the folder for other processes."""
        child = self._children.get(process)
        if child is not None and child.poll() is not None:
            folder.write_exit_code(child.returncode)
            del self._children[process]

    def _end_if_due(self, handle: ReplicaHandle, process: ProcessId, folder: AttemptFolder) -> None:
        """Send SIGTERM to a process past its time limit, SIGKILL to one whose grace period is over."""
        ending, now, deadline = folder.ending(), self._clock.wall_time(), handle.native.get("deadline")
        if ending is None and deadline is not None and now > deadline:
            self._ask_to_end(process, folder, ReplicaState.TIMED_OUT)
        elif ending is not None and now > ending.patience_ends:
            _signal_group(process, signal.SIGKILL)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Send SIGTERM now; `poll` sends SIGKILL after `grace_s`. Raises `ExecutorError` on another host."""
        process, folder = ProcessId.from_native(handle.native), _folder_of(handle)
        if process.host != platform.node():
            raise ExecutorError(f"replica {handle.replica_id} runs on {process.host}; cancel it there.")
        if process.is_alive() and folder.ending() is None:
            self._ask_to_end(process, folder, ReplicaState.CANCELLED)

    def _ask_to_end(self, process: ProcessId, folder: AttemptFolder, state: ReplicaState) -> None:
        folder.write_ending(Ending(state, self._clock.wall_time() + self._grace_s))
        _signal_group(process, signal.SIGTERM)

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        ended, pause = lambda: self.poll(handle).state.ended, lambda: self._clock.sleep(_POLL_S)
        return _folder_of(handle).logs(follow, tail, ended, pause)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        folders = [AttemptFolder(path.parent) for path in self._run_folder(run_id).glob("*/*/handle.json")]
        found = [handle for folder in folders if (handle := folder.handle()) is not None]
        return in_order(found)

    def forget(self, run_id: str) -> None:
        """Delete logs and handles of a run. Raises `ExecutorError` while one of its processes runs."""
        alive = [h.replica_id for h in self.find(run_id) if not self.poll(h).state.ended]
        if alive:
            raise ExecutorError(f"replicas {alive} of {run_id} still run. Cancel them first.")
        shutil.rmtree(self._run_folder(run_id), ignore_errors=True)

    def _run_folder(self, run_id: str) -> Path:
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in run_id)
        return self._directory / safe

    def _folder(self, request: LaunchRequest) -> AttemptFolder:
        return AttemptFolder(self._run_folder(request.run_id) / str(request.replica_id) / str(request.attempt))


def replicas_in(folder: str) -> list[int]:
    """The pids of the processes that write to `folder` as replicas, started on this machine by `LocalProcessExecutor`.

    Processes of other users are among them only if this user may look into them.
    """
    stores = {pid: dict(pairwise(command)).get("--store", "") for pid, command in commands_by_environment(_MARK)}
    return sorted(pid for pid, store in stores.items() if store and is_same_folder(pid, store, folder))


def _folder_of(handle: ReplicaHandle) -> AttemptFolder:
    return AttemptFolder(Path(handle.native["dir"]))


def _argv(command: Sequence[str]) -> list[str]:
    return [sys.executable, *command[1:]] if command[0] == "python" else list(command)


def _environment(request: LaunchRequest, folder: AttemptFolder, gpu: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: this process's, its `sys.path`, a thread count, a GPU, then the request's variables.

    Private keys of a signed run are not inherited.
    """
    ours = str(Path(__file__).absolute().parents[2])
    users = [str(Path(entry or ".").resolve()) for entry in sys.path]
    path = dict.fromkeys([*users, ours])  # ours last: a user's own `executors` or `replica` is found before our names
    return {
        **{name: value for name, value in os.environ.items() if name not in KEY_VARIABLES},
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        **_threads(request),
        **_memory(request),
        **gpu,
        **request.env,
        **request.secrets,
        _MARK: str(folder.path),
    }


def _threads(request: LaunchRequest) -> dict[str, str]:
    """OMP_NUM_THREADS for a replica: its share of the cores. Fixed, because rounding of sums depends on it."""
    threads = max(1, usable_cores() // _replicas(request))
    return {"OMP_NUM_THREADS": request.env.get("OMP_NUM_THREADS", str(threads))}


def _memory(request: LaunchRequest) -> dict[str, str]:
    """DILOCO_MEMORY_MIB for a replica: its share of this machine's memory, on which all replicas run."""
    return {ENV_MEMORY: os.environ.get(ENV_MEMORY, str(memory_share(_replicas(request))))}


def _replicas(request: LaunchRequest) -> int:
    """The number of replicas of the run, all of which are on this machine."""
    return int(request.env.get(ENV_WORLD_SIZE, "1"))


def _signal_group(process: ProcessId, number: signal.Signals) -> None:
    if process.is_alive():
        with suppress(ProcessLookupError):  # it ended in between, which is what was wanted
            os.killpg(process.pid, number)
