"""One Modal App and what its Sandboxes are made of: image, volumes, Secrets. Creates Sandboxes, and finds them.

Arguments as data are in `modal_objects`, the SDK's errors in `modal_api`. What an attempt is, is left to
`modal_sandboxes`.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.executors.answers import answer_within
from diloco_orchestrator.executors.contract import NoCapacity
from diloco_orchestrator.executors.modal_api import log_in_again, sdk
from diloco_orchestrator.executors.modal_objects import Mount, SandboxOptions
from diloco_orchestrator.executors.remote_base import LABEL_RUN, run_label

if TYPE_CHECKING:
    from modal import App, Client, Image, Sandbox


CALL_S = 60.0  # for a call; the SDK notices a dead connection after 40 s, and waits for ever if only pings are answered
LAUNCH_S = 1800.0  # to find a machine, or to build an image


# Arguments that `Sandbox.create` takes as the plan has them.
_AS_PLANNED = ("name", "tags", "env", "timeout", "cpu", "memory", "include_oidc_identity_token")


class ModalApp:
    """Calls about one App, which is made if it does not exist. Errors are the SDK's own, or `Unavailable` if it does
    not answer in time: no call holds the lock for longer.

    `client`: None for that of the environment's credentials.
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
        """Log in anew with what the configuration says now. False if the client is the user's own object."""
        if self._client is not None:
            return False
        with self._lock:  # what was made with the old client goes on using it
            self._app, self._built = None, {}
            return log_in_again()

    def app_id(self) -> str | None:
        """The App's id."""
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
        """The container image. Modal builds it for the first caller; those in other threads wait until it is built.

        `name`: of a Sandbox's arguments, in which a digest may stand for the tag.
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
        """The Sandbox of this name, live or ended; None if there never was one."""
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
        """The Sandboxes of a run that have not ended, one request a page. `app_id`: of `app_id()`."""
        yield from sdk().Sandbox.list(app_id=app_id, tags={LABEL_RUN: run_label(run_id)}, client=self._client)

    def create(self, arguments: Mapping[str, Any], secrets: Mapping[str, str]) -> "Sandbox":
        """A new Sandbox on the first GPU type of `arguments` that Modal has a machine of.

        Types that it had none of when last asked come last. Raises the SDK's ResourceExhaustedError if it has none of
        any. `secrets`: values of the request's secrets.
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
        """The SDK's object for a mount. A Volume that does not exist is an error: it would be empty."""
        modal = sdk()
        if not isinstance(mount, Mount):
            return mount
        if mount.volume:
            return modal.Volume.from_name(mount.volume, environment_name=self._environment)
        given = dict(mount.bucket)
        if "secret" in given:
            given["secret"] = modal.Secret.from_name(given["secret"], environment_name=self._environment)
        return modal.CloudBucketMount(**given)
