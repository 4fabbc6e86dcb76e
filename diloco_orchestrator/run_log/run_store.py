"""The folder of a run as its readers and writers must see it: of a signed run only objects that its keys have signed.

`signing.signed_store` filters the objects and finds the keys.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.key_records import Rotation, why_no_commit
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.signing.identity import Identity as Identity
from diloco_orchestrator.signing.identity import PublicIdentity as PublicIdentity
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY as ENV_ATTEMPT_KEY
from diloco_orchestrator.signing.kept_keys import ENV_RUN_KEY, identity, keep, needs_key, run_key_of
from diloco_orchestrator.signing.keys import RunKey as RunKey
from diloco_orchestrator.signing.keys import Signer as Signer
from diloco_orchestrator.signing.keys import is_by as is_by
from diloco_orchestrator.signing.keys import public_key_of as public_key_of
from diloco_orchestrator.signing.keys import text_of as text_of
from diloco_orchestrator.signing.signed_store import SignedStore, signed_store_in
from diloco_orchestrator.store.base import Store


def of_run(store: Store, environ: Mapping[str, str] | None = None) -> Store:
    """`store`, a run's folder, restricted to validly signed objects if the run is signed; else unchanged.

    `environ`: the environment that may hold keys; None: this process's.
    """
    return store if signed_store_in(store) else SignedStore(store, os.environ if environ is None else environ)


def as_attempt(store: Store, secret: str) -> Store:
    """The run's folder `store` for the attempt whose private keys are in `secret`: what it writes is signed with
    them.
    """
    signed = signed_store_in(store)
    return of_run(store if signed is None else signed.beneath, {ENV_ATTEMPT_KEY: secret})


def unsigned_in(store: Store) -> list[str]:
    """Objects in a signed run's folder that this process ignored for their signatures: "name: why"; at most 1,000."""
    signed = signed_store_in(store)
    return [] if signed is None else [f"{name}: {why}" for name, why in sorted(signed.debris().items())]


def stored_names(store: Store, key: str) -> list[str]:
    """The names in the bucket under which `store`, a run's folder, has the object at `key`, the first one first."""
    signed = signed_store_in(store)
    return [key] if signed is None else signed.stored_names(key)


def is_signed(store: Store) -> bool:
    """Whether `store` is the folder of a signed run whose run.json was read through it."""
    signed = signed_store_in(store)
    return signed is not None and signed.is_signed


def new_key() -> RunKey:
    """The private key for a run that begins: the one in this process's environment, else a new one."""
    text = os.environ.get(ENV_RUN_KEY)
    return RunKey.parse(text) if text else RunKey.generate()


def keep_key(key: RunKey) -> Path:
    """Write the key of a run into this user's state folder; returns the file. Raises `ConfigError` if it cannot be
    written.
    """
    return keep(key, os.environ)


def operator_of_run(run: Run, store: Store, what: str) -> Signer | None:
    """The private keys with which this process launches or supervises the run in `store`; None if the run is unsigned.

    `what`: the action that needs them, such as "attach". Raises `ConfigError`, naming it and the run's public key, if
    this process has no such keys.
    """
    if run.signed_by is None:
        return None
    signed = signed_store_in(store)
    if signed is None or (found := signed.operator) is None:
        raise needs_key(store.url, run.signed_by, what)
    return found


def key_of_run(run: Run, store: Store, what: str) -> RunKey:
    """The run's private key, from the environment or this user's state folder. It certifies and replaces all others.

    `what`: the action that needs it. Raises `ConfigError` if it is in neither, and for an unsigned run.
    """
    if run.signed_by is None:
        raise ConfigError(f"{store.url} is not signed: it has no key. A new run is, with --signed.")
    signed = signed_store_in(store)
    found = run_key_of(run.signed_by, os.environ if signed is None else signed.environ)
    if found is None:
        raise ConfigError(
            f"{what} needs the run's own key, {run.signed_by.key}, which is in the state folder of who launched "
            f"{store.url} and nowhere else: do it there."
        )
    return found


def identity_of_user() -> Identity:
    """This user's identity, a key pair in the state folder, made on first use. Raises `ConfigError` if it cannot be
    stored.
    """
    found = identity(os.environ, make=True)
    assert found is not None, "it was made"
    return found


def rotations_of(store: Store) -> tuple[Rotation, ...]:
    """The rotations (replacements of keys) of the signed run in `store` that were read so far; empty if unsigned."""
    signed = signed_store_in(store)
    return () if signed is None else signed.rotations


def may_commit(store: Store, replica_id: int) -> bool:
    """Whether attempts of a replica may sign commits: False once a rotation of the run's keys names it."""
    return not why_no_commit(replica_id, rotations_of(store))


def follow_rotation(store: Store) -> None:
    """Read the rotations (replacements of the run's keys) again, because this process has just written one."""
    if (signed := signed_store_in(store)) is not None:
        signed.learn_anew()
        signed.get(keys.RUN)


def secrets_of_attempt(operator: Signer, run_sha256: Sha256, replica_id: int, attempt: int) -> dict[str, str]:
    """The secret environment variables of an attempt of a signed run: its own keys, and not the launcher's."""
    return {ENV_ATTEMPT_KEY: operator.of_attempt(run_sha256, replica_id, attempt).text()}


def check_signed_by(run: Run, url: str, expected: str | None) -> None:
    """Raise `ConfigError` unless run.json names `expected` as the key that signs the run. None: whatever it names.

    If keys of a signed run are in this process's environment, an unsigned run is refused as well: its run.json may have
    been replaced.
    """
    found = None if run.signed_by is None else run.signed_by.key
    wanted = f"{expected} was asked for" if expected else f"{ENV_RUN_KEY} is set" if ENV_RUN_KEY in os.environ else ""
    if wanted and found != (expected or found or ""):
        signed = f"signed by {found}" if found else "not signed"
        raise ConfigError(
            f"{url} is {signed}, and {wanted}: is the address right? If it is, somebody has replaced {keys.RUN}."
        )


def why_only_watching(run: Run, store: Store) -> str:
    """Reason why this process can read the run and not write to it, naming the key that it lacks; empty if it can."""
    try:
        operator_of_run(run, store, "supervision")
    except ConfigError as error:
        return str(error)
    return ""
