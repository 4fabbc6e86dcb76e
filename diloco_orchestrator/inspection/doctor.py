"""`diloco doctor`: checks this machine, a store and an executor, and states for each problem what to do about it."""

import os
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from diloco_orchestrator.clock import Clock, random_token
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.executors.contract import ExecutorError, ReplicaState, ServerlessExecutor
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.process import EXIT_PERMANENT, installed_versions
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import INTERACTIVE, open_store
from diloco_orchestrator.store.probe import probe

_PACKAGES = ("diloco-orchestrator", "torch", "torchft", "transformers", "obstore", "fsspec", "s3fs", "boto3")
_PATIENCE_S = 900.0  # long enough to pull an image or start a node
_POLL_S = 0.5
_SMALL_CALLS = 10
_LARGE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # what was checked
    ok: bool
    detail: str  # what was measured, or what is wrong and what to do

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(url: str | None, clock: Clock) -> Iterator[Finding]:
    """Check this machine, and the store at `url` if one is given. Test objects in the store are deleted again.

    Yields findings as they come; an error of the store is a finding that is not ok.
    """
    yield Finding("machine", True, f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    versions = installed_versions(_PACKAGES)
    yield Finding("packages", True, ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield _arithmetic()
    if url is not None:
        yield from _store(url, clock)


def examine_executor(executor: ServerlessExecutor, clock: Clock) -> Iterator[Finding]:
    """Launch three tiny processes, which costs cents: one returns a value, one is cancelled, one fails.

    A finding is not ok if the executor reports another end than expected, or raises `ExecutorError`. What still runs at
    the end is cancelled.
    """
    run_id = f"doctor-{random_token()}"
    name = f"executor {executor.name}"
    try:
        executor.find(run_id)
    except ExecutorError as error:
        yield Finding(f"{name}: credentials", False, str(error))
        return
    yield Finding(f"{name}: credentials", True, "taken; its list of attempts can be read")
    try:
        yield from (_answers(executor, run_id, clock), _is_cancelled(executor, run_id, clock), _fails(executor, run_id))
    except ExecutorError as error:
        yield Finding(f"{name}: launch", False, str(error))
    finally:
        for handle in executor.find(run_id):
            executor.cancel(handle)


def _answers(executor: ServerlessExecutor, run_id: str, clock: Clock) -> Finding:
    began = clock.now()
    handles = executor.launch_replicas(1, "platform:python_version", {}, run_id=run_id)
    (result,) = executor.collect(handles, timeout=_PATIENCE_S)
    words = f"Python {result.value} there answered {clock.now() - began:.0f} s after the launch"
    return Finding(f"executor {executor.name}: answer", isinstance(result.value, str), words)


def _is_cancelled(executor: ServerlessExecutor, run_id: str, clock: Clock) -> Finding:
    (handle,) = executor.launch_replicas(1, "signal:pause", {}, run_id=f"{run_id}-cancel")
    deadline = clock.now() + _PATIENCE_S
    while executor.poll(handle).state is not ReplicaState.RUNNING and clock.now() < deadline:
        clock.sleep(_POLL_S)
    began = clock.now()
    executor.cancel(handle)
    while not (status := executor.poll(handle)).state.ended and clock.now() < deadline:
        clock.sleep(_POLL_S)
    words = f"{status.state} ({status.native_state}) {clock.now() - began:.0f} s after it was asked for"
    return Finding(f"executor {executor.name}: cancel", status.state is ReplicaState.CANCELLED, words)


def _fails(executor: ServerlessExecutor, run_id: str) -> Finding:
    handles = executor.launch_replicas(1, "os:_exit", {"status": EXIT_PERMANENT}, run_id=f"{run_id}-fail")
    (result,) = executor.collect(handles, timeout=_PATIENCE_S, check=False)
    status = result.status
    words = (
        f"exit code {EXIT_PERMANENT} is reported as {status.state}, reason {status.reason!r}, code {status.exit_code}"
    )
    return Finding(f"executor {executor.name}: failure", status.state is ReplicaState.FAILED, words)


def _arithmetic() -> Finding:
    import torch

    from diloco_orchestrator.outer.golden_arithmetic import is_golden

    if is_golden(torch.get_num_threads()):
        return Finding("arithmetic", True, "averages and outer steps have the bits that every machine computes")
    words = "this machine computes other bits than all others: its replicas would stop as diverged. Use another one."
    return Finding("arithmetic", False, words)


def _store(url: str, clock: Clock) -> Iterator[Finding]:
    if url.startswith(("s3://", "fsspec+s3://")):
        yield _credentials()
    try:
        store = open_store(url, clock=clock, retry=INTERACTIVE)
        probe(store)
    except DilocoError as error:
        yield Finding("store", False, str(error))
        return
    yield Finding("store", True, f"{store.url} can be written, read and listed; of 8 racing creates one wins")
    yield from _speed(store, clock)


def _credentials() -> Finding:
    try:
        import boto3
    except ImportError:
        return Finding("credentials", False, "boto3 is missing. Install diloco-orchestrator[s3].")
    session = boto3.session.Session()
    found = session.get_credentials()
    if found is None:
        return Finding("credentials", False, "none found. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret.")
    return Finding("credentials", True, f"from {found.method}; region {session.region_name or 'not set'}")


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
        rates = (
            f"{_LARGE_BYTES / up / 1e6:.0f} MB/s up, {_LARGE_BYTES / down / 1e6:.0f} MB/s down (one object of 8 MiB)"
        )
        yield Finding("throughput", True, rates)
    finally:
        for key in names:
            store.delete(key)


def _seconds(clock: Clock, call: Callable[[], object]) -> float:
    began = clock.now()
    call()
    return max(clock.now() - began, 1e-9)
