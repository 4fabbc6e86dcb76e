"""Replicas as Modal Sandboxes: one named Sandbox per attempt, in one Modal App.

Knows Modal's names, tags, end statuses and errors; how a replica uses a bucket from there is the replica's business.
With a GPU `launch` blocks until Modal has found a machine, up to 21 minutes. Modal lists live Sandboxes only, so
`find` sees those; an attempt that has ended is found by its name, when it is launched again. Modal has no setting for
how long a replica that is asked to end may take.
"""

import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from executors.contract import (
    BY_EXIT_CODE,
    EXIT_DONE,
    ExecutorClock,
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    MissingSdk,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    SystemExecutorClock,
    plain_options,
)
from executors.remote_base import (
    LABEL_ATTEMPT,
    LABEL_REPLICA,
    LABEL_RUN,
    RemoteExecutor,
    attempt_labels,
    attempt_name,
    check_resources,
    env_within,
    run_label,
)

MAX_TIMEOUT_S = 86400  # Modal's own limit for a Sandbox
TAG_CANCELLED = "diloco-cancelled"  # on a Sandbox that was cancelled, so that every process tells it from a preemption

_GPU = re.compile(r"[A-Za-z][\w.-]*!?(:[1-9]\d*)?")
_POLL_THREADS = 16
_LOG_ENTRIES = 20_000  # the most that Modal returns at once; an entry is a line or a piece of one
_LOG_OVERLAP = timedelta(seconds=5)  # entries may arrive out of order; what was shown already is left out
_FOLLOW_S = 0.5

_Entry = tuple[datetime, str, str]  # when, stdout or stderr, text

_RUNNING = "UNSPECIFIED"
# Modal's words for how a Sandbox ended (`GenericResult.GenericStatus`), without their prefix.
_BY_STATUS = {
    _RUNNING: (ReplicaState.RUNNING, ""),
    "TERMINATED": (ReplicaState.PREEMPTED, "lost"),  # or cancelled: then a tag says so
    "TIMEOUT": (ReplicaState.TIMED_OUT, "deadline"),
    "IDLE_TIMEOUT": (ReplicaState.TIMED_OUT, "deadline"),
    "INIT_FAILURE": (ReplicaState.FAILED, "image"),
    "INTERNAL_FAILURE": (ReplicaState.PREEMPTED, "lost"),
    "MEMORY_MANAGER_EVICTION": (ReplicaState.FAILED, "oom"),
    "MEMORY_THRASHING_EVICTION": (ReplicaState.FAILED, "oom"),
    "KERNEL_OOM_KILL": (ReplicaState.FAILED, "oom"),
}
_BY_CODE = {  # for SUCCESS and FAILURE: the process ended by itself
    **BY_EXIT_CODE,
    137: (ReplicaState.PREEMPTED, "lost"),  # killed from outside, as far as Modal tells
    143: (ReplicaState.PREEMPTED, "lost"),
}


class ModalExecutor(RemoteExecutor):
    """Runs each attempt as one Modal Sandbox. Credentials come from `modal token new` or MODAL_TOKEN_ID and _SECRET.

    Args:
        app: Name of the Modal App that holds the Sandboxes; made if it is not there.
        gpu: GPU of each replica, such as "A100" or "A100:2"; None for none.
        image: Image in a registry, with Python on its PATH; None for Modal's slim Debian.
        cpu: CPU cores of each replica; None for Modal's default.
        memory: Memory of each replica in MiB; None for Modal's default.
        timeout_s: Longest life of an attempt in seconds, 1 to 86400.
        region: Region to run in, such as "us-east"; None for any.
        secrets: Names of Modal Secrets that every replica gets as environment variables.
        environment: Modal environment of the App; None for the profile's.
        oidc: Give replicas an identity token (MODAL_IDENTITY_TOKEN) to exchange for a cloud's credentials.
        clock: Time, for tests.
        client: A `modal.Client` to use instead of the environment's credentials.
    """

    name = "modal"

    def __init__(
        self,
        app: str = "diloco",
        *,
        gpu: str | None = None,
        image: str | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        timeout_s: float = MAX_TIMEOUT_S,
        region: str | None = None,
        secrets: Sequence[str] = (),
        environment: str | None = None,
        oidc: bool = False,
        clock: ExecutorClock | None = None,
        client: Any = None,
    ) -> None:
        self.options = plain_options(locals())
        if not re.fullmatch(r"[\w.-]{1,63}", app):
            raise ValueError(f"app={app!r} is no name that Modal takes: letters, digits, '-', '_' and '.', at most 63.")
        if isinstance(secrets, str):
            raise ValueError(f"secrets={secrets!r} is one string. Write a list of names, [{secrets!r}].")
        self._options = {"gpu": gpu, "cpu": cpu, "memory": memory, "region": region}
        _check_options(self._options)
        self._timeout_s = _whole_timeout(timeout_s)
        self._app_name, self._environment = app, environment
        self._image, self._secrets, self._oidc = image, tuple(secrets), oidc
        self._clock = clock or SystemExecutorClock()
        self._client = client
        self._lock = threading.Lock()  # launches come from several threads; the App and an image are made once
        self._app: Any = None
        self._images: dict[str | None, Any] = {}
        self._cancelled: set[str] = set()
        self._started: set[str] = set()

    def hourly_usd(self, request: LaunchRequest) -> float | None:
        """None: no price is known here."""
        return None

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The arguments of `Sandbox.create` as JSON."""
        check_resources(request, self._options)
        options = {**self._options, **request.resources}
        _check_options(options)
        timeout_s = self._timeout_s if request.timeout_s is None else _whole_timeout(request.timeout_s)
        return {
            "app": self._app_name,
            "environment": self._environment,
            "name": attempt_name(request),
            "tags": attempt_labels(request),
            "command": list(request.command),
            "image": request.image or self._image,
            "env": env_within(request, timeout_s),
            "secrets": dict.fromkeys(request.secrets, "<redacted>"),
            "named_secrets": list(self._secrets),
            "timeout": timeout_s,
            **options,
            "include_oidc_identity_token": self._oidc,
        }

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        plan = self.plan(request)
        modal = _sdk()
        with _translated(f"launching {plan['name']} in Modal's app {self._app_name!r}"):
            sandbox = self._named(plan["name"])
            if sandbox is None:
                try:
                    sandbox = self._create(plan, request.secrets)
                except modal.exception.AlreadyExistsError:  # another launcher was quicker
                    sandbox = self._named(plan["name"])
            if sandbox is None:
                raise ExecutorError(f"{plan['name']} was there and is gone in Modal's app. Launch it again.")
            sandbox.detach()  # so that nothing that ends here ends it
            return self._handle(request.run_id, request.replica_id, request.attempt, sandbox.object_id)

    def _named(self, name: str) -> Any:
        """The Sandbox of this name, live or ended; None if there never was one."""
        modal = _sdk()
        where = {"environment_name": self._environment, "client": self._client}
        for ended_too in (True, False):  # the first asks only Modal's newer backend, the second both
            try:
                return modal.Sandbox.from_name(self._app_name, name, include_terminated=ended_too, **where)
            except modal.exception.NotFoundError:
                continue
        return None

    def _create(self, plan: Mapping[str, Any], secrets: Mapping[str, str]) -> Any:
        modal = _sdk()
        attached = [modal.Secret.from_name(name, environment_name=self._environment) for name in self._secrets]
        if secrets:
            attached.append(modal.Secret.from_dict(dict(secrets)))
        app = self._looked_up_app()
        return modal.Sandbox.create(
            *plan["command"],
            app=app,
            image=self._built_image(plan["image"]),
            secrets=attached,
            client=self._client,
            **{key: plan[key] for key in ("name", "tags", "env", "timeout", "include_oidc_identity_token")},
            **{key: plan[key] for key in self._options},
        )

    def _looked_up_app(self) -> Any:
        with self._lock:
            if self._app is None:
                where = {"environment_name": self._environment, "client": self._client}
                self._app = _sdk().App.lookup(self._app_name, create_if_missing=True, **where)
            return self._app

    def _built_image(self, reference: str | None) -> Any:
        """Built once and before the first launch goes on, for all that run at the same time."""
        modal, app = _sdk(), self._looked_up_app()
        with self._lock:
            if reference not in self._images:
                image = modal.Image.from_registry(reference) if reference else modal.Image.debian_slim()
                self._images[reference] = image.build(app)
            return self._images[reference]

    def _handle(self, run_id: str, replica_id: int, attempt: int, sandbox_id: str) -> ReplicaHandle:
        native = {
            "app": self._app_name,
            "environment": self._environment,
            "sandbox_id": sandbox_id,
            "name": attempt_name(LaunchRequest(run_id, replica_id, attempt, [])),
        }
        return ReplicaHandle(self.name, run_id, replica_id, attempt, sandbox_id, native)

    # -- watching ------------------------------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        try:
            with _translated(f"asking for Sandbox {handle.native_id}"):
                sandbox = self._sandbox(handle)
                if sandbox is None:
                    return self._forgotten(handle)
                status = translate(status_word(sandbox), sandbox.returncode)
                could_be = status.state in (ReplicaState.PREEMPTED, ReplicaState.FAILED)
                if could_be and self._was_cancelled(handle, sandbox):
                    return replace(status, state=ReplicaState.CANCELLED, reason="user", message="cancelled")
                if status.state is ReplicaState.RUNNING and not self._has_started(handle, sandbox):
                    return replace(status, state=ReplicaState.PENDING, message="waits for a machine")
                return status
        except (ExecutorDenied, MissingSdk):
            raise
        except ExecutorError as error:
            return ReplicaStatus(ReplicaState.UNKNOWN, message=str(error))

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """All at the same time: Modal's listing leaves out what has ended, so it cannot say how."""
        if len(handles) < 2:
            return [self.poll(handle) for handle in handles]
        with ThreadPoolExecutor(max_workers=min(len(handles), _POLL_THREADS)) as threads:
            return list(threads.map(self.poll, handles))

    def _sandbox(self, handle: ReplicaHandle) -> Any:
        """With how it ended, if it has; None for what Modal has forgotten."""
        modal = _sdk()
        try:
            return modal.Sandbox.from_id(handle.native_id, client=self._client)
        except modal.exception.NotFoundError:
            return None

    def _forgotten(self, handle: ReplicaHandle) -> ReplicaStatus:
        if handle.native_id in self._cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", message="cancelled, and Modal has forgotten it")
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", message="Modal has forgotten it")

    def _was_cancelled(self, handle: ReplicaHandle, sandbox: Any) -> bool:
        if handle.native_id in self._cancelled:
            return True
        try:
            return TAG_CANCELLED in sandbox.get_tags()
        except _sdk().exception.NotFoundError:
            return False

    def _has_started(self, handle: ReplicaHandle, sandbox: Any) -> bool:
        """Asked until it has; only the SDK's private face tells."""
        try:
            if handle.native_id not in self._started:
                sandbox._resolve_task_id_for_logs()
        except _sdk().exception.ExecutionError:
            return False
        except AttributeError:  # a version without it
            pass
        self._started.add(handle.native_id)
        return True

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Of what was written before the call at most Modal's last 20000 entries, which are lines or pieces of them."""
        what = f"reading the output of Sandbox {handle.native_id}"
        with _translated(what):
            sandbox = self._sandbox(handle)
        if sandbox is None:
            return
        lines, shown, newest = _Lines(), Counter[_Entry](), None
        while True:
            ended = not follow or self.poll(handle).state.ended  # before reading: what was written until then comes
            with _translated(what):
                entries = _entries(sandbox, newest, tail)
            fresh = lines.add(_without(entries, shown)) + (lines.rest() if ended else [])
            if newest is None and tail is not None:
                fresh = fresh[max(0, len(fresh) - tail) :]
            yield from fresh
            if ended:
                return
            if entries:
                shown, newest = Counter(entries), max(timestamp for timestamp, _, _ in entries)
            self._clock.sleep(_FOLLOW_S)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        modal = _sdk()
        found = []
        with _translated(f"listing the Sandboxes of run {run_id}"):
            app_id = self._looked_up_app().app_id
            for sandbox in modal.Sandbox.list(app_id=app_id, tags={LABEL_RUN: run_label(run_id)}, client=self._client):
                with suppress(modal.exception.NotFoundError):  # forgotten since it was listed
                    tags = sandbox.get_tags()
                    replica_id, attempt = int(tags[LABEL_REPLICA]), int(tags[LABEL_ATTEMPT])
                    found.append(self._handle(run_id, replica_id, attempt, sandbox.object_id))
        return sorted(found, key=lambda handle: (handle.replica_id, handle.attempt))

    # -- ending --------------------------------------------------------------------------------------------------

    def cancel(self, handle: ReplicaHandle) -> None:
        """Written down at Modal as a tag first, so that every process sees CANCELLED."""
        modal = _sdk()
        with _translated(f"cancelling Sandbox {handle.native_id}"):
            sandbox = self._sandbox(handle)
            if sandbox is None or sandbox.returncode is not None:
                return
            self._cancelled.add(handle.native_id)
            with suppress(modal.exception.Error):  # without the tag it is cancelled all the same, and this object knows
                sandbox.set_tags({**sandbox.get_tags(), TAG_CANCELLED: "user"})
            with suppress(modal.exception.NotFoundError):
                sandbox.terminate()


# -- translating the reply --------------------------------------------------------------------------------------------


def translate(word: str, code: int | None) -> ReplicaStatus:
    """Modal's end status and exit code as ours."""
    if word in ("SUCCESS", "FAILURE") and code is not None:
        state, reason = _BY_CODE.get(code, (ReplicaState.FAILED, "exit"))
        return ReplicaStatus(state, reason, code, word, "" if code == EXIT_DONE else f"exit code {code}")
    state, reason = _BY_STATUS.get(word, (ReplicaState.UNKNOWN, ""))
    return ReplicaStatus(state, reason, code, word, "" if word == _RUNNING else f"Modal says {word}")


def status_word(sandbox: Any) -> str:
    """The SDK's public face has only an exit code, and gives an image that would not start a 0. Its private one says
    more; where a version lacks that, the code has to do."""
    try:
        status = sandbox._get_metadata().result.status
    except AttributeError:
        by_code = {None: _RUNNING, EXIT_DONE: "SUCCESS", 124: "TIMEOUT", 137: "TERMINATED"}
        return by_code.get(sandbox.returncode, "FAILURE")
    from modal_proto import api_pb2

    names = {number: name for name, number in api_pb2.GenericResult.GenericStatus.items()}
    return str(names.get(status, status)).removeprefix("GENERIC_STATUS_")


def _sdk() -> Any:
    """Modal's SDK, loaded at first use."""
    try:
        import modal
    except ImportError:
        raise MissingSdk("Modal's SDK is not installed: pip install 'diloco-orchestrator[modal]'") from None
    return modal


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Errors of the SDK as ours; what a caller treats otherwise it has caught before."""
    errors = _sdk().exception
    import grpclib.exceptions  # comes with the SDK

    try:
        yield
    except (errors.AuthError, errors.PermissionDeniedError) as error:
        raise ExecutorDenied(
            f"{what}: Modal refuses ({error}). Check the credentials with `modal token info`, and what they may do."
        ) from None
    except errors.ResourceExhaustedError as error:
        raise NoCapacity(f"{what}: Modal has no room now ({error}). Try later, another GPU or any region.") from None
    except errors.ConflictError as error:
        raise ExecutorError(f"{what}: its state has changed meanwhile ({error}). Look again.") from None
    except (errors.InvalidError, errors.NotFoundError) as error:
        raise ExecutorDenied(
            f"{what}: Modal does not take the request ({error}). Correct environment, Secrets, GPU or image."
        ) from None
    except (errors.Error, grpclib.exceptions.StreamTerminatedError, OSError) as error:
        words = f"{type(error).__name__}: {error}"
        raise ExecutorError(f"{what}: {words}. Try again; https://status.modal.com says if Modal is down.") from None


# -- output -----------------------------------------------------------------------------------------------------------


def _entries(sandbox: Any, newest: datetime | None, tail: int | None) -> list[_Entry]:
    """What Modal has kept: the last entries, or with `newest` all from a little before it on."""
    try:
        if newest is None:
            wanted = _LOG_ENTRIES if tail is None else min(_LOG_ENTRIES, 4 * tail + 100)
            found = sandbox.logs.tail(wanted)
        else:
            found = sandbox.logs.fetch(since=newest - _LOG_OVERLAP)
        return [(entry.timestamp, entry.source, entry.message) for entry in found if entry.source != "system"]
    except (_sdk().exception.NotFoundError, _sdk().exception.ExecutionError):  # forgotten, or no machine yet
        return []


def _without(entries: Sequence[_Entry], shown: Counter[_Entry]) -> list[_Entry]:
    left, fresh = Counter(shown), []
    for entry in entries:
        if left[entry] > 0:
            left[entry] -= 1
        else:
            fresh.append(entry)
    return fresh


class _Lines:
    """Puts pieces of output together to lines, stdout's and stderr's apart."""

    def __init__(self) -> None:
        self._rest: dict[str, str] = {}

    def add(self, entries: Sequence[_Entry]) -> list[str]:
        complete: list[str] = []
        for _, source, text in entries:
            *lines, self._rest[source] = (self._rest.get(source, "") + text).split("\n")
            complete += lines
        return complete

    def rest(self) -> list[str]:
        """Last lines that lack their end."""
        rest, self._rest = self._rest, {}
        return [line for line in rest.values() if line]


# -- options ----------------------------------------------------------------------------------------------------------


def _check_options(options: Mapping[str, Any]) -> None:
    gpu, cpu, memory, region = (options[key] for key in ("gpu", "cpu", "memory", "region"))
    if gpu is not None and not (isinstance(gpu, str) and _GPU.fullmatch(gpu)):
        raise ValueError(f"gpu={gpu!r} is not of the form 'A100' or 'A100:2'.")
    if cpu is not None and not (isinstance(cpu, (int, float)) and cpu > 0):
        raise ValueError(f"cpu={cpu!r} is no number of cores above 0.")
    if memory is not None and not (isinstance(memory, int) and memory > 0):
        raise ValueError(f"memory={memory!r} is no whole number of MiB above 0.")
    if region is not None and not (isinstance(region, str) and region):
        raise ValueError(f"region={region!r} is no name of a region, such as 'us-east'.")


def _whole_timeout(timeout_s: float) -> int:
    if not 1 <= timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s={timeout_s!r}: Modal runs a Sandbox for 1 to {MAX_TIMEOUT_S} seconds.")
    return math.ceil(timeout_s)
