"""Prepares a launch: the records, code and requests that `launch` writes and sends. Nothing here writes or sends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from diloco_orchestrator.code_archive.entrypoint import check_importable, entrypoint_of
from diloco_orchestrator.code_archive.pack import Archive, CodeBundle, folder_of, lock_file_of, source_of
from diloco_orchestrator.code_archive.pinning import Pin, check_pinned, pinned
from diloco_orchestrator.code_archive.requirements import read_requirements
from diloco_orchestrator.config import RunConfig, RunSettings, make_config
from diloco_orchestrator.errors import ConfigError, as_config_errors
from diloco_orchestrator.executors.contract import (
    LaunchRequest,
    ServerlessExecutor,
    price_of,
)
from diloco_orchestrator.executors.places import Places
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.executors.registry import executor_of, spec_of
from diloco_orchestrator.guard.registry import rule_of
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import StampFields
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.protocol.version import VERSION
from diloco_orchestrator.run_log.run_store import RunKey, new_key
from diloco_orchestrator.store.open_store import absolute_url
from diloco_orchestrator.supervision.launch_request import (
    LaunchRequests,
    archive_for,
    extras_for,
    offers_without_keys,
)
from diloco_orchestrator.supervision.place_book import first_launches, unpaid_words
from diloco_orchestrator.supervision.placing import Open
from diloco_orchestrator.supervision.trackers import library_of

if TYPE_CHECKING:
    from diloco_orchestrator.replica.context import ReplicaContext

TrainFunction = Callable[["ReplicaContext"], Any]


@dataclass(frozen=True)
class PreparedLaunch:
    """Everything about a launch that is known before it: records, code, requests. Nothing is written or sent yet."""

    run: Run  # as run.json will hold it
    url: str  # of the run's folder
    executor: ServerlessExecutor
    archive: Archive | None  # code that travels; None where replicas share this machine
    key: RunKey | None  # private, of a signed run; nothing holds a new one yet
    launching: LaunchRequests  # makes the request of any attempt
    requests: Sequence[LaunchRequest]  # of attempt 1 of every replica
    prices: Sequence[Price | None]  # of each machine that is paid for; None where the price is not known
    opened: Sequence[Open] = ()  # where each replica is launched, of an executor that has several places
    unpaid: str = ""  # how many replicas the limits pay for, where others wait for machines that join
    unsigned: str = ""  # why a run in a bucket is not signed though its launch does not say so

    @property
    def config(self) -> RunConfig:
        return self.run.config

    def words(self) -> list[str]:
        """Lines for the log: the code and packages to be sent, and which are not pinned (no hashes, images by tag)."""
        if self.archive is None:
            return []
        images = [f"images: {images_words(found)}"] if (found := self.images()) else []
        return [self.archive.words(), f"packages: {self.archive.package_words()}", *images]

    def images(self) -> tuple[str, ...]:
        """Container images that the launch requests name by tag, in order, without the provider's defaults."""
        return tuple(sorted(set(images_by_tag(sent(self.executor, self.requests)))))


class LaunchOptions(RunSettings, total=False):
    """Keyword arguments of `launch` and `plan_launch`: what replicas run on and with, and the settings of the run."""

    executor: ServerlessExecutor | str | None
    storage_options: Mapping[str, Any] | None
    secrets: Mapping[str, str] | None
    code: CodeBundle | str | Path | None
    requirements: Sequence[str] | str | Path | None
    pin: Pin
    heldout_items: Sequence[Any]
    signed: bool | None


def prepare_launch(
    entrypoint: str | TrainFunction, store: str, options: LaunchOptions, *, run_id: str, stamp: StampFields, dry: bool
) -> PreparedLaunch:
    """Check the arguments of a launch and build everything that it writes or sends.

    `dry`: sign no URL, because signing needs credentials. Raises `ConfigError` for all that can be found wrong on this
    machine; nothing is written or sent.
    """
    settings = cast(dict[str, Any], options.copy())
    executor, code, requirements = (settings.pop(each, None) for each in ("executor", "code", "requirements"))
    storage_options, secrets = settings.pop("storage_options", None) or {}, settings.pop("secrets", None) or {}
    pin, heldout_items = settings.pop("pin", "auto"), settings.pop("heldout_items", ())
    signed = settings.pop("signed", None)
    name = entrypoint if isinstance(entrypoint, str) else entrypoint_of(entrypoint)
    config = make_config({"entrypoint": name, "heldout_items": list(heldout_items), **settings})
    _check_heldout(config, len(heldout_items))
    with as_config_errors():
        executor = executor_of("local" if executor is None else executor)
    if config.track is not None:
        library_of(config.track)
    if executor.shares_machine:
        check_importable(name, config.args)
    if store.startswith("memory://"):
        raise ConfigError("memory:// is gone with this process; replicas are processes of their own. Give a folder.")
    url = absolute_url(store)
    key = new_key() if (_is_signed(url, executor, config) if signed is None else signed) else None
    unsigned = _UNNAMED if key is None and signed is None and _is_bucket(url) else ""
    executor.use_store(url, storage_options)
    if requirements is None and not executor.shares_machine:
        requirements = lock_file_of(code, name)
    more = code.requirements if isinstance(code, CodeBundle) else ()
    required = read_requirements(requirements)
    hashes = pinned(pin, required, executor.shares_machine, extras_for(url), more, secrets, config.env)
    archive = archive_for(executor, code, name, url, hashes.requirements, config.args)
    archive = None if archive is None else replace(archive, note=hashes.note)
    run = Run(
        **stamp,
        run_id=run_id,
        config=config,
        package_version=VERSION,
        code_sha256=None if archive is None else archive.sha256,
        executor=spec_of(executor),
        secret_names=tuple(sorted(secrets)),
        images={} if required is None else dict(required.images),
        source=source_of(folder_of(code, name)),
        signed_by=None if key is None else key.signed_by,
        signed_rules=None if key is None else 2,
    )
    launched = Launched(sha256_hex(run.to_bytes()))
    operator = None if key is None else key.operator(launched.run_sha256)
    launching = LaunchRequests(run, launched, url, storage_options, secrets, dry, operator=operator)
    launching.check(executor)
    opened = first_launches(executor, config) if isinstance(executor, Places) else []
    unpaid = unpaid_words(executor, config, opened) if isinstance(executor, Places) else ""
    requests = _first_requests(launching, executor, opened)
    paid = [each for each in requests if not isinstance(executor, Places) or not executor.offers(each.place)]
    prices = [price_of(executor, request) for request in paid]
    prepared = PreparedLaunch(run, url, executor, archive, key, launching, requests, prices, opened, unpaid, unsigned)
    if pin == "require" and archive is not None and not executor.shares_machine:
        check_pinned(archive, prepared.images())
    return prepared


def _first_requests(
    launching: LaunchRequests, executor: ServerlessExecutor, opened: Sequence[Open]
) -> list[LaunchRequest]:
    """The requests for the first attempts of all replicas, in their order. `opened`: their places, if there are any."""
    places = {each.replica_id: each.place for each in opened} or dict.fromkeys(range(launching.run.config.replicas), "")
    return [
        replace(launching.request(i, 1, executor.shares_machine), place=place) for i, place in sorted(places.items())
    ]


_UNNAMED = (
    "not signed, because replicas are offered to machines that nobody has named: whoever may write to the bucket can "
    "write in every replica's name. Name them, --machines with the line that `diloco key --me` prints on each, or say "
    "that this is meant, --unsigned."
)


def _is_signed(url: str, executor: ServerlessExecutor, config: RunConfig) -> bool:
    """Whether a run is signed unless its launch says otherwise.

    It is in a bucket where no machine joins that has no key, and wherever people with a link run replicas.
    """
    return bool(config.invited) or (_is_bucket(url) and not offers_without_keys(executor, config))


def _is_bucket(url: str) -> bool:
    return "://" in url and not url.startswith("file://")


def _check_heldout(config: RunConfig, items: int) -> None:
    """Raise `ConfigError` for a guard rule that nobody has, or a number of held-out items that is too small."""
    rule = rule_of(config.guard.rule)
    if 0 < items < config.most_replicas:
        raise ConfigError(
            f"{items} held-out items cannot be dealt over {config.most_replicas} replicas: give at least one for each, "
            "better a hundred, or a smaller max_replicas."
        )
    if items:
        rule.check_set(config.guard, items)


def images_words(images: Sequence[str]) -> str:
    """A line of text about container images that are named by tag."""
    return f"{', '.join(images)} by tag, which may name another image later; `diloco lock --image NAME` pins one"


def images_by_tag(node: Any) -> Iterator[str]:
    """Container images in a provider's request that have no digest."""
    for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if isinstance(value, Mapping | list | tuple):
            yield from images_by_tag(value)
        elif name == "image" and isinstance(value, str) and "@sha256:" not in value:
            yield value


def sent(executor: ServerlessExecutor, requests: Sequence[LaunchRequest]) -> dict[str, Mapping[str, Any]]:
    """The provider's requests for replica 0 and for the first replica of each further executor of a mixed fleet."""
    firsts = {id(executor.part(request)): request for request in reversed(requests)}
    chosen = sorted(firsts.values(), key=lambda request: request.replica_id)
    return {f"replica {r.replica_id} ({executor.part(r).name})": executor.plan(r) for r in chosen}
