"""Calls of Modal's SDK for one App: images, Sandboxes, mounts, errors, private methods, and output as lines.

The SDK is loaded at first use. `modal_objects` has arguments as data, `modal_sandboxes` maps attempts to Sandboxes.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco_orchestrator.executors.answers import answer_within, unreadable
from diloco_orchestrator.executors.contract import ExecutorDenied, ExecutorError, MissingSdk, NoCapacity, Unavailable
from diloco_orchestrator.executors.modal_objects import RUNNING, Mount, SandboxOptions
from diloco_orchestrator.executors.process_contract import EXIT_DONE
from diloco_orchestrator.executors.remote_base import LABEL_RUN, run_label

if TYPE_CHECKING:
    from modal import App, Client, Image, Sandbox

CALL_S = 60.0  # for a call; the SDK notices a dead connection after 40 s, and waits for ever if only pings are answered
LAUNCH_S = 1800.0  # to find a machine, or to build an image
# Arguments that `Sandbox.create` takes as the plan has them.
_AS_PLANNED = ("name", "tags", "env", "timeout", "cpu", "memory", "include_oidc_identity_token")
# Names in `modal.exception`. ServiceError is gRPC's CANCELLED, UNKNOWN, DEADLINE_EXCEEDED and UNAVAILABLE,
# InternalError its INTERNAL, ConflictError its ABORTED. RESOURCE_EXHAUSTED (ResourceExhaustedError) is `NoCapacity`.
_TRANSIENT = (
    "ServiceError",
    "InternalError",
    "InternalFailure",
    "ConnectionError",
    "TimeoutError",
    "ConflictError",
    "ExecutionError",  # of the SDK itself: the service answered something that it does not expect
)
_LOG_ENTRIES = 20_000  # the most that Modal returns at once
_LOG_OVERLAP = timedelta(seconds=5)  # entries may arrive out of order


class OutputEntry(NamedTuple):
    """A piece of a Sandbox's output: a line, or a part of a line."""

    timestamp: datetime
    source: str  # stdout or stderr
    text: str


def sdk() -> ModuleType:
    try:
        import modal
    except ImportError:
        raise MissingSdk("Modal's SDK is not installed: pip install 'diloco-orchestrator[modal]'") from None
    return modal


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Context that translates errors of Modal's SDK into `ExecutorError`s. `what`: the action, for messages.

    A ConflictError, which means that its object's state has changed meanwhile, counts as transient.
    """
    errors = sdk().exception
    import grpclib.exceptions  # a dependency of the SDK, as protobuf is
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    passing = tuple(getattr(errors, name) for name in _TRANSIENT if hasattr(errors, name))
    try:
        yield
    except (errors.AuthError, errors.PermissionDeniedError) as error:
        raise ExecutorDenied(
            f"{what}: Modal refuses ({error}). Check the credentials with `modal token info`, and what they may do."
        ) from None
    except errors.ResourceExhaustedError as error:
        raise NoCapacity(f"{what}: Modal has no room now ({error}). Try later, another GPU or any region.") from None
    except (*passing, grpclib.exceptions.StreamTerminatedError, OSError) as error:
        words = f"{type(error).__name__}: {error}"
        raise Unavailable(f"{what}: {words}. Try again; https://status.modal.com says if Modal is down.") from None
    except DecodeError as error:
        raise unreadable(what, error) from None
    except (errors.InvalidError, errors.NotFoundError) as error:
        raise ExecutorDenied(
            f"{what}: Modal does not take the request ({error}). Correct environment, Secrets, GPU or image."
        ) from None
    except errors.Error as error:
        raise ExecutorError(f"{what}: {type(error).__name__}: {error}. Try again.") from None


def log_in_again() -> bool:
    """Read Modal's configuration file again, and drop the process's client, so that the next call logs in anew.

    The SDK reads the file only once, at import. Returns True if that was done, False with an SDK version that lacks
    the private names used here: the old client then stays.
    """
    sdk()
    import modal.config
    from modal.client import _Client

    config: Any = modal.config
    try:
        config._user_config = config._read_user_config()
        config._profile = os.environ.get("MODAL_PROFILE") or config._config_active_profile()
        _Client._set_env_client(None)
    except AttributeError:
        return False
    return True


class ModalApp:
    """Calls about one Modal App, which is created if it does not exist.

    Errors are the SDK's own, or `Unavailable` if a call does not return in time, so that no call holds the lock for
    longer. `client`: None for that of the environment's credentials.
    """

    def __init__(self, options: SandboxOptions, client: "Client | None") -> None:
        self._options, self._name, self._environment = options, options.app, options.environment
        self._where = {"environment_name": options.environment, "client": client}
        self._client = client
        self._lock = threading.Lock()  # several threads launch; the App and the image are made once
        self._app: App | None = None
        self._built: dict[str | None, Image] = {}  # by name; several, if runs pin one name to several digests
        self._without_room: set[str] = set()  # GPU types that Modal had none of when last asked

    def log_in_again(self) -> bool:
        """Drop the client and its App, so that the next call logs in with the current configuration. True if done.

        False if the client is an object that the user passed, or the SDK lacks the private names for it.
        """
        if self._client is not None:
            return False
        with self._lock:  # what was made with the old client goes on using it
            self._app, self._built = None, {}
            return log_in_again()

    def app_id(self) -> str | None:
        return self._looked_up().app_id

    def _looked_up(self) -> "App":
        with self._lock:
            if self._app is None:
                look_up = sdk().App.lookup
                self._app = answer_within(
                    CALL_S,
                    f"finding app {self._name}",
                    lambda: look_up(self._name, create_if_missing=True, **self._where),
                )
            return self._app

    def _built_image(self, name: str | None) -> "Image":
        """The container image, built by Modal for the first caller; other threads wait until it is built.

        `name`: from a Sandbox's arguments; it may have a digest in place of its tag.
        """
        modal, app = sdk(), self._looked_up()
        with self._lock:
            if name not in self._built:
                image = self._options.image
                if image is None or isinstance(image, str):
                    image = modal.Image.from_registry(name) if name else modal.Image.debian_slim()
                self._built[name] = answer_within(LAUNCH_S, "building the image", lambda: image.build(app))
            return self._built[name]

    def named(self, name: str) -> "Sandbox | None":
        """The Sandbox of this name, live or ended; None if Modal never had one."""
        modal = sdk()

        def look_up() -> "Sandbox | None":
            for ended_too in (True, False):  # True asks only Modal's newer backend, False both
                with suppress(modal.exception.NotFoundError):
                    found: Sandbox = modal.Sandbox.from_name(
                        self._name, name, include_terminated=ended_too, **self._where
                    )
                    return found
            return None

        return answer_within(CALL_S, f"finding {name}", look_up)

    def with_id(self, sandbox_id: str) -> "Sandbox | None":
        """The Sandbox of this id, with its exit code if it has ended; None if Modal no longer knows it."""
        modal = sdk()
        try:
            found: Sandbox = answer_within(
                CALL_S, f"finding {sandbox_id}", lambda: modal.Sandbox.from_id(sandbox_id, client=self._client)
            )
        except modal.exception.NotFoundError:
            return None
        return found

    def live(self, run_id: str, app_id: str | None) -> "Iterator[Sandbox]":
        """The Sandboxes of a run that have not ended, one request a page. `app_id`: the App's id."""
        yield from sdk().Sandbox.list(app_id=app_id, tags={LABEL_RUN: run_label(run_id)}, client=self._client)

    def create(self, arguments: Mapping[str, Any], secrets: Mapping[str, str]) -> "Sandbox":
        """A new Sandbox on the first GPU type in `arguments` for which Modal has a machine.

        Types without a machine at the last try come last. Raises the SDK's ResourceExhaustedError if no type has one.
        `secrets`: values of the request's secrets.
        """
        modal = sdk()
        wanted: list[str | None] = list(arguments["gpu"]) or [None]
        in_order = sorted(wanted, key=lambda gpu: gpu in self._without_room)  # stable: the user's order within each
        for gpu in in_order:
            try:
                created = self._create_on(gpu, arguments, secrets)
            except modal.exception.ResourceExhaustedError:
                if gpu is not None:
                    self._without_room.add(gpu)
                if gpu == in_order[-1]:
                    raise
                continue
            self._without_room.discard(str(gpu))
            return created
        raise NoCapacity("Modal was asked for no machine.")

    def _create_on(self, gpu: str | None, arguments: Mapping[str, Any], secrets: Mapping[str, str]) -> "Sandbox":
        modal = sdk()
        attached = [modal.Secret.from_name(name, environment_name=self._environment) for name in self._options.secrets]
        if secrets:
            attached.append(modal.Secret.from_dict(dict(secrets)))
        given = {
            "app": self._looked_up(),
            "image": self._built_image(arguments["image"]),
            "secrets": attached,
            "client": self._client,
            "gpu": gpu,
            **{name: arguments[name] for name in _AS_PLANNED},
            "region": arguments["region"] or None,
            "volumes": {path: self._mounted(mount) for path, mount in self._options.mounts.items()},
        }
        created: Sandbox = answer_within(
            LAUNCH_S, f"creating {arguments['name']}", lambda: modal.Sandbox.create(*arguments["command"], **given)
        )
        return created

    def _mounted(self, mount: Any) -> Any:
        """The SDK's object for a mount. A Volume that does not exist is an error, because it would be empty."""
        modal = sdk()
        if not isinstance(mount, Mount):
            return mount
        if mount.volume:
            return modal.Volume.from_name(mount.volume, environment_name=self._environment)
        given = dict(mount.bucket)
        if "secret" in given:
            given["secret"] = modal.Secret.from_name(given["secret"], environment_name=self._environment)
        return modal.CloudBucketMount(**given)


def end_of(sandbox: "Sandbox") -> tuple[str, str]:
    """(how a Sandbox ended, Modal's message about it). The first is a `GenericResult.GenericStatus` without its prefix.

    `RUNNING` if it has not ended. The SDK's public methods return only an exit code, which is 0 for an image that did
    not start. A private method returns the status; with an SDK version without it, the exit code decides.
    """
    try:
        result = sandbox._get_metadata().result
    except AttributeError:
        by_code = {None: RUNNING, EXIT_DONE: "SUCCESS", 124: "TIMEOUT", 137: "TERMINATED"}
        return by_code.get(sandbox.returncode, "FAILURE"), ""
    from modal_proto import api_pb2

    names = {number: name for name, number in api_pb2.GenericResult.GenericStatus.items()}
    return str(names.get(result.status, result.status)).removeprefix("GENERIC_STATUS_"), str(result.exception)


def has_machine(sandbox: "Sandbox") -> bool:
    """Whether a Sandbox that has not ended has got a machine; False while it waits for one.

    True also with an SDK that lacks the private call which reports it.
    """
    try:
        sandbox._resolve_task_id_for_logs()
    except sdk().exception.ExecutionError:
        return False
    except AttributeError:
        return True
    return True


def entries_of(sandbox: "Sandbox", newest: datetime | None, tail: int | None) -> Sequence[OutputEntry]:
    """Output entries that Modal has kept, without Modal's own: the last ones, or from 5 s before `newest` on.

    `newest`: time of the newest entry already read; None: fetch the last entries, enough for `tail` lines, or with
    `tail` None as many as Modal returns. Empty if Modal no longer has the Sandbox or it has no machine yet.
    """
    errors = sdk().exception
    try:
        if newest is None:
            wanted = _LOG_ENTRIES if tail is None else min(_LOG_ENTRIES, 4 * tail + 100)
            found = sandbox.logs.tail(wanted)
        else:
            found = sandbox.logs.fetch(since=newest - _LOG_OVERLAP)
        return [OutputEntry(each.timestamp, each.source, each.message) for each in found if each.source != "system"]
    except (errors.NotFoundError, errors.ExecutionError):  # Modal no longer has it, or it has no machine yet
        return []


class OutputLines:
    """Joins output entries of successive fetches to lines. A fetch may repeat entries of the one before."""

    def __init__(self) -> None:
        self._shown: Counter[OutputEntry] = Counter()
        self._rest: dict[str, str] = {}  # incomplete last line, by source: stdout and stderr have their own
        self.newest: datetime | None = None  # time of the newest entry so far

    def add(self, entries: Sequence[OutputEntry]) -> list[str]:
        """The lines that these entries complete, without entries that were added before."""
        complete: list[str] = []
        for entry in self._without_shown(entries):
            *lines, self._rest[entry.source] = (self._rest.get(entry.source, "") + entry.text).split("\n")
            complete += lines
        if entries:
            self._shown, self.newest = Counter(entries), max(entry.timestamp for entry in entries)
        return complete

    def rest(self) -> list[str]:
        """The incomplete last lines of stdout and stderr, at the end of the output."""
        rest, self._rest = self._rest, {}
        return [line for line in rest.values() if line]

    def _without_shown(self, entries: Sequence[OutputEntry]) -> list[OutputEntry]:
        left, fresh = Counter(self._shown), []
        for entry in entries:
            if left[entry] > 0:
                left[entry] -= 1
            else:
                fresh.append(entry)
        return fresh
