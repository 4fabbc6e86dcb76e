"""Builds the launch request of each attempt of a run: command, environment, secrets.

A replica on this machine imports our modules and the user's directly. A replica elsewhere begins with
`code_archive.bootstrap`, which fetches the run's code from the bucket. `vendor` sends requests.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.code_archive.pack import Archive, CodeBundle, pack
from diloco_orchestrator.code_archive.requirements import Requirements
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError, as_config_errors
from diloco_orchestrator.executors.contract import (
    LaunchRequest,
    ServerlessExecutor,
    hourly_usd,
    price_of,
)
from diloco_orchestrator.executors.places import Places
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.executors.remote_base import program_text
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import ENV_RANK, ENV_STORAGE_OPTIONS, ENV_WORLD_SIZE
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.redaction import ENV_SECRET_NAMES, redact
from diloco_orchestrator.run_log.launched_here import why_not_launched_here
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import Signer, secrets_of_attempt
from diloco_orchestrator.store.open_store import options_elsewhere, readable_url
from diloco_orchestrator.supervision.budgets import check_cost_limit, check_places
from diloco_orchestrator.supervision.credential_routes import check_route

# An attempt may queue for hours; one that queues for longer counts as preempted, and the next gets a new URL.
CODE_URL_LIFETIME_S = 12 * 3600.0


def archive_for(
    executor: ServerlessExecutor,
    code: CodeBundle | str | Path | None,
    entrypoint: str,
    url: str,
    requirements: Requirements | None = None,
    args: Collection[str] = (),
) -> Archive | None:
    """The code archive of a new run; None if replicas share this machine and `code` is not given.

    For replicas elsewhere without `code`, the package or module of `entrypoint` ("module:function") is packed. `url`,
    the run's folder, decides which extras of our package replicas install; `args`: names of the run's arguments. Raises
    `ConfigError` for code that cannot be packed, or requirements that this machine lacks if replicas share it.
    """
    if executor.shares_machine and requirements is not None and (absent := requirements.missing_here()):
        raise ConfigError(
            f"replicas share this machine, which lacks {', '.join(absent)}. Install the requirements here first."
        )
    if executor.shares_machine and code is None:
        return None
    return pack(code, entrypoint, extras_for(url), requirements, args)


def extras_for(url: str) -> list[str]:
    """The extras of our package that replicas need to reach the store at `url`."""
    return ["s3"] if url.startswith(("s3://", "s3a://", "fsspec+s3", "hf://buckets/")) else []


def names_of(secrets: Collection[str]) -> dict[str, str]:
    """The environment variable with the names of variables that are secrets; empty without secrets."""
    return {ENV_SECRET_NAMES: ",".join(sorted(secrets))} if secrets else {}


@dataclass(frozen=True)
class LaunchRequests:
    """Builds the launch request of any attempt of one run.

    `launched`: digests of run.json and of settings changed by a resume, for every command. `storage_options` and
    `secrets` reach replicas as secrets of their provider. `dry`: requests are only shown, so no URL is signed (signing
    needs credentials), and `check` does not look for the replicas' credentials. `leg`: the configuration of the leg
    (start or resume to stop), for the numbers of replicas and ranks; None for the run's first. `operator`: the keys of
    this process in a signed run, from which attempts get theirs; None if it is not signed.
    """

    run: Run
    launched: Launched
    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    dry: bool = False
    leg: RunConfig | None = None
    operator: Signer | None = field(default=None, repr=False)

    def without_secrets(self, text: str) -> str:
        """`text`, from a provider, without the credentials sent to it, because the text is recorded."""
        sent = {**self.secrets, ENV_STORAGE_OPTIONS: json.dumps(dict(self.storage_options), default=str)}
        return redact(text, {**sent, **names_of(self.secrets)})

    def check_secrets(self) -> None:
        """Raise `ConfigError` if a secret that the run was launched with is missing here."""
        absent = [name for name in self.run.secret_names if name not in self.secrets]
        if absent:
            raise ConfigError(
                f"replicas of this run need the secrets {', '.join(absent)}, which no record holds. Hand them over "
                "again: secrets={…}, or --secret NAME for one in the environment."
            )

    def check_code(self, executor: ServerlessExecutor) -> None:
        """Raise `ConfigError` if the executor uses other machines and the run's code was never uploaded."""
        if not executor.shares_machine:
            self._code()

    def check(self, executor: ServerlessExecutor) -> None:
        """Raise `ConfigError` if a launch of the run with this executor would fail. Writes and sends nothing.

        Checks the executor's options, secrets, code archive, that replicas have credentials for the bucket, and that
        prices are known if dollars are limited.
        """
        config = self._of_leg
        with as_config_errors():
            requests = at_each_place(
                executor, [self.request(i, 1, executor.shares_machine) for i in range(config.most_replicas)]
            )
            for request in requests:
                executor.plan(request)
            executor.check_machine()
        if self.operator is not None and offers_without_keys(executor, config):
            raise ConfigError(
                "a signed run needs machines that can get an attempt's keys: name them by the lines that `diloco key "
                "--me` prints there, --machines or JoinExecutor(machines=[…]), or launch it with signed=False "
                "(--unsigned)."
            )
        self._check_invited(executor)
        if isinstance(executor, Places):
            check_places(config, executor, prices_of(executor, config.ranks_of(0)))
        else:
            check_cost_limit(config, [hourly_usd(executor, request) for request in requests])
        if not self.dry:
            self.check_routes(executor, requests)

    def _check_invited(self, executor: ServerlessExecutor) -> None:
        """Raise `ConfigError` if replicas of strangers are launched by this executor, or the run is not signed."""
        invited = self.run.config.invited
        if invited and self.operator is None and not self.run.signed_by:
            raise ConfigError(
                f"invited={invited} in a run that is not signed: a stranger could write in everybody's name. Leave out "
                "signed=False (--unsigned)."
            )
        requests = [LaunchRequest("run", each, 1, []) for each in invited]
        for request in at_each_place(executor, requests):
            if not executor.part(request).free_until_taken:
                raise ConfigError(
                    f"replica {request.replica_id} is for a machine of a stranger (invited={invited}), and this "
                    "executor launches it itself. Give its place to machines that join: such as --executor "
                    f"local:{self.run.config.most_replicas - len(invited)} --executor join:{len(invited)}, where the "
                    "last ids are the invited ones."
                )

    def check_routes(self, executor: ServerlessExecutor, requests: Sequence[LaunchRequest]) -> None:
        """Raise `ConfigError` if a replica on another machine would have no credentials for the run's bucket."""
        for request in requests:
            check_route(self.url, self.storage_options, request, executor)

    def request(self, replica_id: int, attempt: int, shares_machine: bool) -> LaunchRequest:
        """The request of one attempt, with a newly signed URL of the code. `shares_machine`: the executor's property.

        Raises `ConfigError` for code that was never uploaded, or a missing secret.
        """
        self.check_secrets()
        command, env = self.program(replica_id, attempt, shares_machine)
        secrets = dict(self.secrets)
        if options := (dict(self.storage_options) if shares_machine else self._options_elsewhere):
            secrets[ENV_STORAGE_OPTIONS] = json.dumps(options)
        if not shares_machine:
            code = keys.code(self._code())
            signed = "" if self.dry else readable_url(self.url, self.storage_options, code, CODE_URL_LIFETIME_S)
            secrets[bootstrap.ENV_URL] = signed
        if self.operator is not None:
            secrets |= secrets_of_attempt(self.operator, self.launched.run_sha256, replica_id, attempt)
        ranks = list(map(self._of_leg.ranks_of, range(replica_id + 1)))
        return LaunchRequest(
            self.run.run_id,
            replica_id,
            attempt,
            command,
            env=env,
            secrets=secrets,
            images=self.run.images,
            ranks=ranks[-1],
            ranks_before=sum(ranks[:-1]),
        )

    @property
    def _of_leg(self) -> RunConfig:
        return self.leg or self.run.config

    def program(self, replica_id: int, attempt: int, shares_machine: bool) -> tuple[list[str], dict[str, str]]:
        """Command and environment of an attempt, from run.json. Raises `ConfigError` for code not uploaded."""
        config = self.run.config
        where = ["--store", self.url, "--replica-id", str(replica_id), "--attempt", str(attempt)]
        if self._of_leg.in_ranks or config.in_ranks:
            where += ["--ranks", str(self._of_leg.ranks_of(replica_id))]
        where += self.launched.arguments()
        env = {**config.env, ENV_RANK: str(replica_id), ENV_WORLD_SIZE: str(config.most_replicas)}
        env |= names_of(self.secrets)
        if shares_machine:
            return ["python", "-P", "-m", "diloco_orchestrator.replica", *where], env
        return ["python", "-u", "-c", program_text(bootstrap), *where], {**env, bootstrap.ENV_SHA256: self._code()}

    def endpoint(self) -> str:
        """The URL of the server of the run's bucket, as replicas elsewhere get it; empty for the cloud's own."""
        options = self._options_elsewhere
        inner = options.get("client_kwargs") or {}
        return str(options.get("endpoint_url") or inner.get("endpoint_url") or "")

    @cached_property
    def _options_elsewhere(self) -> dict[str, Any]:
        """The storage options of a replica elsewhere; cached, because making boto3's client takes 0.1 s."""
        return options_elsewhere(self.url, self.storage_options)

    def _code(self) -> str:
        if self.run.code_sha256 is None:
            raise ConfigError(
                f"run {self.run.run_id} was launched on one machine and its code was never sent, so that replicas "
                "cannot start elsewhere. Attach to it there, or launch a new run with this executor."
            )
        return self.run.code_sha256


def offers_without_keys(executor: ServerlessExecutor, config: RunConfig) -> bool:
    """Whether the executor offers a replica of the run to machines that join, and gives them no keys of a signed run.

    Machines of people with a link to a replica (`config.invited`) get keys.
    """
    requests = [LaunchRequest("run", each, 1, []) for each in range(config.most_replicas) if each not in config.invited]
    parts = [executor.part(each) for each in at_each_place(executor, requests)]
    return any(each.free_until_taken and not each.offers_keys for each in parts)


def at_each_place(executor: ServerlessExecutor, requests: Sequence[LaunchRequest]) -> list[LaunchRequest]:
    """`requests` once for every place (executor), of an executor that has several."""
    names = list(executor.places) if isinstance(executor, Places) else [""]
    return [replace(request, place=name) for request in requests for name in names]


def prices_of(places: Places, ranks: int) -> dict[str, Price | None]:
    """The price of the machine of one replica of `ranks` ranks at each place (executor), by name; None if not known."""
    return {name: price_of(places, LaunchRequest("run", 0, 1, [], ranks=ranks, place=name)) for name in places.places}


def check_images(run_log: RunLog, executor: ServerlessExecutor) -> None:
    """Raise `ConfigError` if the executor would use an image digest of run.json that this user did not choose.

    The user chose it if this user launched the run on this machine and run.json is unchanged. Also raises
    `ConfigError` if the executor's options are invalid for the run.
    """
    run = run_log.run
    if not run.images or not (why := why_not_launched_here(run_log)):
        return
    requests = [
        LaunchRequest(run.run_id, each, 1, [], images=run.images, ranks=run.config.ranks_of(each))
        for each in range(run.config.most_replicas)
    ]
    requests = at_each_place(executor, requests)
    with as_config_errors():
        used = any(executor.plan(request) != executor.plan(replace(request, images={})) for request in requests)
    if used:
        raise ConfigError(
            f"{run_log.store.url} gives digests for the images {', '.join(sorted(run.images))}, and {why}: whoever may "
            "write to the bucket chose what replicas would run in. Name the image by digest yourself "
            "(image='NAME@sha256:…', --image), or pass trust_bucket=True (--trust-bucket) if you trust all who may "
            "write there."
        )
