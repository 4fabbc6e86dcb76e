"""The folder of a run as its readers and writers must see it: of a signed run only objects that its keys have signed.

`signing.signed_store` filters the objects and finds the keys.
"""

import os
from collections.abc import Mapping

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, ENV_RUN_KEY, keep, needs_key, run_key_of
from diloco_orchestrator.signing.keys import RunKey as RunKey
from diloco_orchestrator.signing.signed_store import SignedStore, signed_store_in
from diloco_orchestrator.store.base import Store


def of_run(store: Store, environ: Mapping[str, str] | None = None) -> Store:
    """`store`, a run's folder, restricted to validly signed objects if the run is signed; else unchanged.

    `environ`: the environment that may hold keys; None: this process's.
    """
    return store if signed_store_in(store) else SignedStore(store, os.environ if environ is None else environ)


def unsigned_in(store: Store) -> list[str]:
    """Objects in a signed run's folder that this process ignored for their signatures: "name: why"; at most 1,000."""
    signed = signed_store_in(store)
    return [] if signed is None else [f"{name}: {why}" for name, why in sorted(signed.debris().items())]


def is_signed(store: Store) -> bool:
    """Whether `store` is the folder of a signed run whose run.json was read through it."""
    signed = signed_store_in(store)
    return signed is not None and signed.is_signed


def new_key() -> RunKey:
    """The private key for a run that begins: the one in this process's environment, else a new one."""
    text = os.environ.get(ENV_RUN_KEY)
    return RunKey.parse(text) if text else RunKey.generate()


def keep_key(key: RunKey) -> None:
    """Write the key of a run into this user's state folder. Raises `ConfigError` if it cannot be written."""
    keep(key, os.environ)


def key_of_run(run: Run, store: Store, what: str) -> RunKey | None:
    """The private key of the run in `store`, from the environment or this user's state folder; None if it is unsigned.

    Raises `ConfigError` without it, naming the key and `what` needs it, such as "attach".
    """
    if run.signed_by is None:
        return None
    signed = signed_store_in(store)
    found = run_key_of(run.signed_by, os.environ if signed is None else signed.environ)
    if found is None:
        raise needs_key(store.url, run.signed_by, what)
    return found


def secrets_of_attempt(
    key: RunKey, run_sha256: Sha256, replica_id: int, attempt: int, shares_machine: bool
) -> dict[str, str]:
    """The secret environment variables of an attempt of a signed run: its own keys, and not the run's private key.

    `shares_machine`: whether the replica inherits the environment of its launcher, where the run's key may be.
    """
    secrets = {ENV_ATTEMPT_KEY: key.attempt_secret(run_sha256, replica_id, attempt)}
    return {**secrets, ENV_RUN_KEY: ""} if shares_machine else secrets


def why_only_watching(run: Run, store: Store) -> str:
    """Reason why this process can read the run and not write to it, naming the key that it lacks; empty if it can."""
    try:
        key_of_run(run, store, "attach")
    except ConfigError as error:
        return str(error)
    return ""
