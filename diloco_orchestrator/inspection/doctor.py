"""`diloco doctor`: checks this machine, a store and an executor, and gives a remedy for each problem."""

import os
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import Clock, random_token
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.executors.contract import (
    ExecutorError,
    ReplicaHandle,
    ReplicaState,
    ServerlessExecutor,
)
from diloco_orchestrator.executors.machine import machine_memory
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.process import EXIT_PERMANENT, installed_versions
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import INTERACTIVE, open_store
from diloco_orchestrator.store.probe import probe

_PACKAGES = ("diloco-orchestrator", "torch", "torchft", "transformers", "obstore", "fsspec", "s3fs", "boto3")
_NO_TORCH = "it does not import"
_LITTLE_MEMORY = 2 * 2**30  # bytes; torch alone takes about half a GiB
_LITTLE_DISK = 2 * 2**30  # bytes; payloads that memory does not hold go to files
_LITTLE_SHARED = 2**30  # bytes; worker processes of a DataLoader pass batches through it
_WRITTEN_BYTES = 64 * 2**20
_GPU_FIELDS = "name,driver_version,memory.total"
_GPU_QUERY = ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader")


@dataclass(frozen=True)
class Finding:
    """The result of one check of `diloco doctor`: its name, whether it is ok, what was found, and what to do."""

    name: str  # what was checked
    ok: bool
    detail: str  # what was measured, or what is wrong
    todo: str = ""  # what to do about it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine_machine(clock: Clock, *, gpu_wanted: bool = False) -> Iterator[Finding]:
    """Findings about this machine. `gpu_wanted`: a machine without a usable GPU is not ok."""
    yield Finding("machine", True, f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    yield _memory(machine_memory())
    yield _disk(clock)
    yield _shared_memory()
    gpus = gpus_of_driver()
    yield gpu_finding(gpus, gpu_wanted)
    yield (torch := _torch(bool(gpus), gpu_wanted))
    versions = installed_versions(_PACKAGES)
    yield Finding("packages", True, ", ".join(f"{name} {version}" for name, version in versions.items()))
    if torch.ok or not torch.detail.startswith(_NO_TORCH):
        yield _arithmetic()


def _memory(size: int) -> Finding:
    if size >= _LITTLE_MEMORY:
        return Finding("memory", True, f"{size / 2**30:.1f} GiB")
    todo = "Ask for more: torch, a model and its optimizer need some GiB (memory=…, or larger hardware)."
    return Finding("memory", False, f"{size / 2**30:.1f} GiB", todo)


def _disk(clock: Clock) -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    words = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < _LITTLE_DISK:
        return Finding(
            "disk", False, words, "Free some space, or set TMPDIR to a larger disk: large rounds go to files."
        )
    began = clock.now()
    with tempfile.TemporaryFile() as file:
        file.write(os.urandom(_WRITTEN_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return Finding("disk", True, f"{words}, {_WRITTEN_BYTES / max(clock.now() - began, 1e-9) / 1e6:.0f} MB/s written")


def _shared_memory(path: str = "/dev/shm") -> Finding:
    if not Path(path).is_dir():
        return Finding("shared memory", True, f"there is no {path}", "Use num_workers=0 in a DataLoader.")
    size = shutil.disk_usage(path).total
    words = f"{size / 2**20:.0f} MiB in {path}"
    if size >= _LITTLE_SHARED:
        return Finding("shared memory", True, words)
    todo = "Workers of a DataLoader may need more: num_workers=0 needs none."
    return Finding("shared memory", True, words, todo)


def gpus_of_driver() -> list[str]:
    """Name, driver version and memory of every NVIDIA GPU, one line each; empty without driver or GPU."""
    try:
        asked = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()] if asked.returncode == 0 else []


def gpu_finding(gpus: list[str], wanted: bool) -> Finding:
    """Finding about the GPUs that the driver reports. `wanted`: then no GPU is not ok, and more than one is a waste."""
    if not gpus:
        todo = "Check the machine's type, and that the image may use its GPU (NVIDIA driver, device plugin)."
        return Finding("GPU", not wanted, "none that nvidia-smi reports", todo if wanted else "")
    todo = "A replica trains on one: ask for one, and launch more replicas." if len(gpus) > 1 else ""
    counts = {each: gpus.count(each) for each in gpus}
    words = "; ".join(f"{count} x {each}" for each, count in counts.items())
    return Finding("GPU", True, f"{words} (name, driver, memory)", todo)


def _torch(has_gpu: bool, wanted: bool) -> Finding:
    """The finding about torch: ok if it computes a correct product on the GPU, or if there is no GPU and none is
    `wanted`.

    A build for another CUDA version or GPU fails only once a kernel runs, so one is run.
    """
    try:
        import torch
    except ImportError as error:
        todo = "It is needed where something is trained or computed: use an image that has it, or install [train]."
        return Finding("torch", False, f"{_NO_TORCH}: {error}", todo)
    words = f"torch {torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}"
    if not has_gpu and not wanted:
        apples = "; it sees Apple's GPU (MPS)" if torch.backends.mps.is_available() else ""
        return Finding("torch", True, f"{words}, {torch.get_num_threads()} threads{apples}")
    if not torch.cuda.is_available():
        todo = "Use an image whose torch is built for the CUDA version that this driver has (pytorch/pytorch:…-cuda…)."
        return Finding("torch", False, f"{words}; it sees no GPU", todo)
    try:
        ones = torch.ones(256, 256, device="cuda")
        right = bool((ones @ ones).sum().item() == 256.0**3)
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        return Finding("torch", False, f"{words}; its first kernel fails: {cause}", "Use a newer torch for this GPU.")
    memory = torch.cuda.mem_get_info()
    words = f"{words}; {torch.cuda.get_device_name()}, {memory[0] / 2**30:.1f} of {memory[1] / 2**30:.1f} GiB free"
    return Finding("torch", right, words, "" if right else "Its products are wrong: use another machine.")


def _arithmetic() -> Finding:
    from diloco_orchestrator.outer.golden_arithmetic import is_golden

    if is_golden():
        return Finding("arithmetic", True, "averages and outer steps have the bits that every machine computes")
    words = "this machine computes other bits than all others: its replicas would stop as diverged"
    return Finding("arithmetic", False, words, "Use another machine.")


_PATIENCE_S = 900.0  # long enough to pull an image or start a node
_ENDING_S = 180.0  # from a cancel to the end: a minute from SIGTERM to SIGKILL, or a machine that is lost
_POLL_S = 0.5
_SMALL_CALLS = 10
_LARGE_BYTES = 8 * 2**20


def examine(url: str | None, clock: Clock, *, gpu_wanted: bool = False) -> Iterator[Finding]:
    """Check this machine, and the store at `url` if one is given. Test objects in the store are deleted again.

    Yields findings as they come; an error of the store is a finding that is not ok. `gpu_wanted`: a machine without a
    usable GPU is not ok.
    """
    yield from examine_machine(clock, gpu_wanted=gpu_wanted)
    if url is not None:
        yield from examine_store(url, clock)


def examine_executor(executor: ServerlessExecutor, clock: Clock) -> Iterator[Finding]:
    """Launch three tiny processes, which costs cents: one returns a value, one is cancelled, one fails.

    A finding is not ok if the executor reports another final state or value, or raises `ExecutorError`. Processes still
    running at the end are cancelled, and the executor's records of them are deleted.
    """
    run_id = f"doctor-{random_token()}"
    name = f"executor {executor.name}"
    try:
        executor.find(run_id)
    except ExecutorError as error:
        yield Finding(f"{name}: credentials", False, str(error))
        return
    yield Finding(f"{name}: credentials", True, "taken; its list of attempts can be read")
    left = ""
    try:
        yield _answers(executor, run_id, clock)
        yield _is_cancelled(executor, f"{run_id}-cancel", clock)
        yield _fails(executor, f"{run_id}-fail")
    except ExecutorError as error:
        yield Finding(f"{name}: launch", False, str(error))
    finally:
        left = remove_attempts(executor, (run_id, f"{run_id}-cancel", f"{run_id}-fail"), clock)
    if left:
        yield Finding(f"{name}: clean-up", False, left, f"Look for attempts of {run_id}, and end them there.")


def remove_attempts(executor: ServerlessExecutor, run_ids: Sequence[str], clock: Clock) -> str:
    """Cancel the running attempts of trial runs, and delete the executor's records of them.

    Waits up to three minutes for the cancelled ones, because their machines may write until they have ended. Returns
    the reason why something may be left, empty if nothing is.
    """
    why = ""
    for run_id in run_ids:
        try:
            running = [handle for handle in executor.find(run_id) if not executor.poll(handle).state.ended]
            for handle in running:
                executor.cancel(handle)
            _wait_for_ends(executor, running, clock)
            executor.forget(run_id)
        except ExecutorError as error:
            why = str(error)
    return why


def _wait_for_ends(executor: ServerlessExecutor, handles: Sequence[ReplicaHandle], clock: Clock) -> None:
    deadline = clock.now() + _ENDING_S
    for handle in handles:
        while not executor.poll(handle).state.ended and clock.now() < deadline:
            clock.sleep(_POLL_S)


def _answers(executor: ServerlessExecutor, run_id: str, clock: Clock) -> Finding:
    began = clock.now()
    handles = executor.launch_replicas(1, "platform:python_version", {}, run_id=run_id)
    (result,) = executor.collect(handles, timeout=_PATIENCE_S)
    words = f"Python {result.value} there answered {clock.now() - began:.0f} s after the launch"
    return Finding(f"executor {executor.name}: answer", isinstance(result.value, str), words)


def _is_cancelled(executor: ServerlessExecutor, run_id: str, clock: Clock) -> Finding:
    # It waits for nothing, and ends by itself where nobody is left to cancel it: somebody may have killed `doctor`.
    pause = "multiprocessing.connection:wait"
    (handle,) = executor.launch_replicas(1, pause, {"object_list": [], "timeout": _PATIENCE_S}, run_id=run_id)
    deadline = clock.now() + _PATIENCE_S
    while (state := executor.poll(handle).state) is not ReplicaState.RUNNING and clock.now() < deadline:
        if state.ended:
            break
        clock.sleep(_POLL_S)
    began = clock.now()
    executor.cancel(handle)
    while not (status := executor.poll(handle)).state.ended and clock.now() < deadline:
        clock.sleep(_POLL_S)
    words = f"{status.state} ({status.native_state}) {clock.now() - began:.0f} s after it was asked for"
    return Finding(f"executor {executor.name}: cancel", status.state is ReplicaState.CANCELLED, words)


def _fails(executor: ServerlessExecutor, run_id: str) -> Finding:
    handles = executor.launch_replicas(1, "os:_exit", {"status": EXIT_PERMANENT}, run_id=run_id)
    (result,) = executor.collect(handles, timeout=_PATIENCE_S, check=False)
    status = result.status
    words = (
        f"exit code {EXIT_PERMANENT} is reported as {status.state}, reason {status.reason!r}, code {status.exit_code}"
    )
    return Finding(f"executor {executor.name}: failure", status.state is ReplicaState.FAILED, words)


def examine_store(url: str, clock: Clock, storage_options: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Findings about the store at `url`: credentials, create-only writes, latency, throughput."""
    if url.startswith(("s3://", "fsspec+s3://", "hf://buckets/")):
        yield _credentials(storage_options or {})
    try:
        store = open_store(url, storage_options, clock=clock, retry=INTERACTIVE)
        probe(store)
    except DilocoError as error:
        what, _, todo = str(error).partition(". ")
        yield Finding("store", False, f"{what}.", todo)
        return
    yield Finding("store", True, f"{store.url} can be written, read and listed; of 8 racing creates one wins")
    yield from _speed(store, clock)


def _credentials(options: Mapping[str, Any]) -> Finding:
    if "key" in options:
        return Finding("credentials", True, "from storage_options")
    try:
        import boto3
    except ImportError:
        return Finding("credentials", False, "boto3 is missing.", "Install diloco-orchestrator[s3].")
    session = boto3.session.Session()
    found = session.get_credentials()
    if found is None:
        todo = "Set AWS_PROFILE here; in replicas AWS_ACCESS_KEY_ID and its secret, or give them a role."
        return Finding("credentials", False, "none found.", todo)
    region = os.environ.get("AWS_REGION") or session.region_name or "not set"
    return Finding("credentials", True, f"from {found.method}; region {region}")


def _speed(store: Store, clock: Clock) -> Iterator[Finding]:
    folder = f"{keys.DOCTOR}{random_token()}/"
    names = [f"{folder}{index}" for index in range(_SMALL_CALLS)]
    body = os.urandom(_LARGE_BYTES)
    try:
        created = [_seconds(clock, lambda key=key: store.create(key, b"x")) for key in names]  # type: ignore[misc]
        read = [_seconds(clock, lambda key=key: store.get(key)) for key in names]  # type: ignore[misc]
        words = f"create {statistics.median(created) * 1e3:.1f} ms, get {statistics.median(read) * 1e3:.1f} ms (median)"
        yield Finding("latency", True, words)
        up = _seconds(clock, lambda: store.put(names[0], body))
        down = _seconds(clock, lambda: store.get(names[0]))
        rates = [float(f"{_LARGE_BYTES / took_s / 1e6:.2g}") for took_s in (up, down)]  # MB/s
        sent_s = [float(f"{bits / 8 * 100 / rates[0]:.2g}") for bits in (32, 4)]  # 100 million parameters
        yield Finding(
            "throughput",
            True,
            f"{rates[0]:g} MB/s up, {rates[1]:g} MB/s down (one object of 8 MiB): 100 million parameters go up in "
            f"{sent_s[0]:g} s in fp32, in {sent_s[1]:g} s in int4",
        )
    finally:
        for key in names:
            store.delete(key)


def _seconds(clock: Clock, call: Callable[[], object]) -> float:
    began = clock.now()
    call()
    return max(clock.now() - began, 1e-9)
