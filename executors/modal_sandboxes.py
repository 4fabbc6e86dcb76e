"""Replicas as Modal Sandboxes: one named Sandbox per attempt, in one Modal App.

Requests and replies as data are in `modal_objects`, calls in `modal_api`. With a GPU `launch` blocks until Modal has
found a machine, up to 21 minutes. Modal lists live Sandboxes only, and so does `find`; an attempt that has ended is
found by its name, when it is launched again. Modal has no setting for how long a replica may take to end after SIGTERM.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_orchestrator.executors.answers import answer_within
from diloco_orchestrator.executors.clock import Clock
from diloco_orchestrator.executors.constructor_options import plain_options, withheld
from diloco_orchestrator.executors.contract import (
    Identity,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
    in_order,
)
from diloco_orchestrator.executors.modal_api import (
    CALL_S,
    ModalApp,
    OutputLines,
    end_of,
    entries_of,
    errors_of,
    has_machine,
    sdk,
)
from diloco_orchestrator.executors.modal_objects import (
    MAX_TIMEOUT_S,
    RUNNING,
    SandboxOptions,
    gpus_of,
    mounts_of,
    sandbox_arguments,
    status_of,
    whole_timeout,
)
from diloco_orchestrator.executors.names import words_of
from diloco_orchestrator.executors.prices import Price, modal_price
from diloco_orchestrator.executors.remote_base import (
    LABEL_ATTEMPT,
    LABEL_REPLICA,
    RemoteExecutor,
    attempt_name,
)

if TYPE_CHECKING:
    from modal import Client, Image, Sandbox

T = TypeVar("T")

TAG_CANCELLED = "diloco-cancelled"  # on a cancelled Sandbox, so that no process counts its end as a preemption

_POLL_THREADS = 16
_FOLLOW_S = 0.5


class ModalExecutor(RemoteExecutor):
    """Runs each attempt as one Modal Sandbox. Credentials come from `modal token new` or MODAL_TOKEN_ID and _SECRET.

    Args:
        app: Name of the Modal App that holds the Sandboxes; made if it does not exist.
        gpu: GPU of each rank of a replica, such as "A100", or several in order of preference; none by default. "A100:8"
            is a replica of eight ranks.
        image: Image in a registry, with Python on its PATH, or a `modal.Image`; None for Modal's slim Debian.
        cpu: CPU cores of each replica; None for Modal's default.
        memory: Memory of each replica in MiB; None for Modal's default.
        timeout_s: Longest life of an attempt in seconds, 1 to 86400.
        region: Region to run in, such as "us-east", or several; any by default.
        volumes: What replicas find under a path: {"/data": "NAME"} or "/data=NAME" of a Modal Volume; {"/data":
            {"bucket_name": …, "secret": "NAME", …}} for the arguments of a `CloudBucketMount`; or Modal's own objects.
        secrets: Names of Modal Secrets that every replica gets as environment variables.
        environment: Modal environment of the App; None for the profile's.
        oidc: Give replicas an identity token (MODAL_IDENTITY_TOKEN) to exchange for a cloud's credentials.
        hourly_usd: What one replica's machine costs in US dollars an hour, for max_cost_usd and `status`; by default
            from Modal's list.
        clock: Time, for tests.
        client: A `modal.Client` to use instead of the environment's credentials.
    """

    name = "modal"

    def __init__(
        self,
        app: str = "diloco",
        *,
        gpu: str | Sequence[str] | None = None,
        image: "str | Image | None" = None,
        cpu: float | None = None,
        memory: int | None = None,
        timeout_s: float = MAX_TIMEOUT_S,
        region: str | Sequence[str] | None = None,
        volumes: Sequence[str] | Mapping[str, Any] = (),
        secrets: Sequence[str] = (),
        environment: str | None = None,
        oidc: bool = False,
        hourly_usd: float | str | None = None,
        clock: Clock | None = None,
        client: "Client | None" = None,
    ) -> None:
        self.options, self.withheld = plain_options(locals()), withheld(locals())
        super().__init__(hourly_usd=hourly_usd, clock=clock)
        if isinstance(secrets, str):
            raise ValueError(f"secrets={secrets!r} is one string. Write a list of names, [{secrets!r}].")
        self._options = SandboxOptions(
            app,
            environment,
            image,
            words_of(gpu),
            cpu,
            memory,
            whole_timeout(timeout_s),
            words_of(region),
            mounts_of(volumes),
            tuple(secrets),
            oidc,
        )
        self._app = ModalApp(self._options, client)
        self._started: set[str] = set()

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The arguments of Modal's `Sandbox.create` for an attempt as JSON, secrets redacted."""
        return sandbox_arguments(request, self._options)

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        arguments = sandbox_arguments(request, self._options)
        name, modal = arguments["name"], sdk()

        def adopted_or_created() -> "Sandbox":
            sandbox = self._app.named(name)
            if sandbox is None:
                try:
                    sandbox = self._app.create(arguments, request.secrets)
                except modal.exception.AlreadyExistsError:  # another launcher was first
                    sandbox = self._app.named(name)
            if sandbox is None:
                raise Unavailable(f"{name} exists in Modal's app and cannot be found yet. Launch it again.")
            sandbox.detach()  # so that the Sandbox outlives this process
            return sandbox

        sandbox = self._ask(f"launching {name} in Modal's app {self._options.app!r}", adopted_or_created)
        return self._handle(request.run_id, request.replica_id, request.attempt, sandbox)

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """The result of `call`, a call of Modal's SDK, repeated once after a new login if Modal refuses the
        credentials.

        `what`: the action, for errors, which are translated.
        """
        with errors_of(what):
            try:
                return call()
            except sdk().exception.AuthError:
                if not self._app.log_in_again():
                    raise
                return call()

    def _handle(self, run_id: str, replica_id: int, attempt: int, sandbox: "Sandbox") -> ReplicaHandle:
        handle = ReplicaHandle(self.name, run_id, replica_id, attempt, sandbox.object_id)
        native = {
            "app": self._options.app,
            "environment": self._options.environment,
            "sandbox_id": sandbox.object_id,
            "name": attempt_name(handle),
        }
        return replace(handle, native=native)

    def identity(self) -> Identity:
        """The credentials that Sandboxes have of their own: named Secrets, or an identity token for an AWS role."""
        advice = "oidc=True with env={'AWS_ROLE_ARN': …} of a role that trusts Modal, or secrets=[…] of Modal Secrets"
        if self._options.secrets:
            return Identity(source=f"Modal Secrets {', '.join(self._options.secrets)}", advice=advice)
        if self._options.oidc:
            return Identity(source="Modal's identity token", needs="AWS_ROLE_ARN", advice=advice)
        return Identity(advice=advice)

    def _listed_price(self, request: LaunchRequest) -> Price | None:
        options = self._options
        return modal_price([gpus_of(gpu, request) for gpu in options.gpu], options.cpu, options.memory, options.region)

    # -- polling -------------------------------------------------------------------------------------------------

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses, by one listing of live Sandboxes per run; others are polled alone, in parallel."""
        if len(handles) == 1:
            what = f"polling Sandbox {handles[0].native_id}"
            return [self._ask(what, lambda: answer_within(CALL_S, what, lambda: self._status(handles[0])))]
        what = "listing Sandboxes"

        def listed() -> dict[str, ReplicaStatus]:
            app_id = self._app.app_id()
            return answer_within(CALL_S, what, lambda: self._listed(handles, app_id))

        found = self._ask(what, listed)
        if alone := [handle for handle in handles if handle.native_id not in found]:
            with ThreadPoolExecutor(max_workers=min(len(alone), _POLL_THREADS)) as threads:
                found |= zip([handle.native_id for handle in alone], threads.map(self.poll, alone), strict=True)
        return [found[handle.native_id] for handle in handles]

    def _status(self, handle: ReplicaHandle) -> ReplicaStatus:
        sandbox = self._app.with_id(handle.native_id)
        if sandbox is None:
            return self.gone(handle.native_id, "Modal no longer knows it")
        end, words = end_of(sandbox)
        status = status_of(end, sandbox.returncode, words)
        may_be_cancelled = status.state in (ReplicaState.PREEMPTED, ReplicaState.FAILED)
        if may_be_cancelled and self._was_cancelled(handle, sandbox):
            return replace(status, state=ReplicaState.CANCELLED, reason="user", message="cancelled")
        return self._live_status(handle, sandbox) if status.state is ReplicaState.RUNNING else status

    def _live_status(self, handle: ReplicaHandle, sandbox: "Sandbox") -> ReplicaStatus:
        if self._has_started(handle, sandbox):
            return status_of(RUNNING, None)
        return ReplicaStatus(ReplicaState.PENDING, "", None, RUNNING, "waits for a machine")

    def _listed(self, handles: Sequence[ReplicaHandle], app_id: str | None) -> dict[str, ReplicaStatus]:
        """Statuses of the attempts whose Sandboxes Modal lists as live, by Sandbox id. Stops once all were found."""
        wanted = {handle.native_id: handle for handle in handles}
        found: dict[str, ReplicaStatus] = {}
        for run_id in sorted({handle.run_id for handle in handles}):
            missing = {handle.native_id for handle in handles if handle.run_id == run_id}
            for sandbox in self._app.live(run_id, app_id):
                if sandbox.object_id in missing and sandbox.returncode is None:
                    found[sandbox.object_id] = self._live_status(wanted[sandbox.object_id], sandbox)
                missing.discard(sandbox.object_id)
                if not missing:
                    break
        return found

    def _was_cancelled(self, handle: ReplicaHandle, sandbox: "Sandbox") -> bool:
        if handle.native_id in self._cancelled:
            return True
        try:
            return TAG_CANCELLED in sandbox.get_tags()
        except sdk().exception.NotFoundError:
            return False

    def _has_started(self, handle: ReplicaHandle, sandbox: "Sandbox") -> bool:
        if handle.native_id not in self._started and has_machine(sandbox):
            self._started.add(handle.native_id)
        return handle.native_id in self._started

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines of the attempt's output; of output before the call the last 20,000 entries, all that Modal returns."""
        what = f"reading the output of Sandbox {handle.native_id}"
        sandbox = self._ask(what, lambda: self._app.with_id(handle.native_id))
        if sandbox is None:
            return
        lines = OutputLines()
        while True:
            ended = not follow or self.poll(handle).state.ended  # before reading, so that nothing until then is missed
            first = lines.newest is None
            with errors_of(what):
                entries = answer_within(CALL_S, what, partial(entries_of, sandbox, lines.newest, tail))
            fresh = lines.add(entries) + (lines.rest() if ended else [])
            if first and tail is not None:
                fresh = fresh[max(0, len(fresh) - tail) :]
            yield from fresh
            if ended:
                return
            self._clock.sleep(_FOLLOW_S)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        what = f"listing the Sandboxes of run {run_id}"

        def found() -> list[ReplicaHandle]:
            app_id = self._app.app_id()
            return answer_within(CALL_S, what, lambda: list(self._found(run_id, app_id)))

        return in_order(self._ask(what, found))

    def _found(self, run_id: str, app_id: str | None) -> Iterator[ReplicaHandle]:
        modal = sdk()
        for sandbox in self._app.live(run_id, app_id):
            with suppress(modal.exception.NotFoundError):  # it is gone since it was listed
                tags = sandbox.get_tags()
                yield self._handle(run_id, int(tags[LABEL_REPLICA]), int(tags[LABEL_ATTEMPT]), sandbox)

    # -- ending --------------------------------------------------------------------------------------------------

    def cancel(self, handle: ReplicaHandle) -> None:
        """Tag the Sandbox as cancelled, so that every process sees it; then terminate it."""
        what = f"cancelling Sandbox {handle.native_id}"
        self._ask(what, lambda: answer_within(CALL_S, what, lambda: self._terminate(handle)))

    def _terminate(self, handle: ReplicaHandle) -> None:
        modal, sandbox = sdk(), self._app.with_id(handle.native_id)
        if sandbox is None or sandbox.returncode is not None:
            return
        self._cancelled.add(handle.native_id)
        with suppress(modal.exception.Error):  # without the tag only this object would have a note of the cancel
            sandbox.set_tags({**sandbox.get_tags(), TAG_CANCELLED: "user"})
        with suppress(modal.exception.NotFoundError):
            sandbox.terminate()
