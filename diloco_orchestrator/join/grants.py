"""Grants: temporary credentials of the store for an invited replica's machine, renewed in the bucket before they end.

Whoever supervises the run mints them, encrypted to the identity in the machine's link. The machine writes them into a
file of its own, from which its processes read them. `protocol.attempt_records` has the record.
"""

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

from pydantic import ValidationError

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.join.invitations import invitations_to
from diloco_orchestrator.join.link import OF_ACCOUNTS, Credentials, Link
from diloco_orchestrator.join.temporary_credentials import SHORTEST_S
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Grant, Invitation
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp, canonical_json
from diloco_orchestrator.protocol.signatures import KEY_BYTES, from_text
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.run_store import Identity, PublicIdentity
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.s3_credentials import ENV_WRITING_PROFILE

log = logging.getLogger(__name__)

_LOOKS = 16  # for newer credentials, while those that a machine has are valid
_LOOK_S = (1.0, 600.0)  # the shortest and the longest pause between two
_WRITING = "diloco-writing"  # the profile of those that create objects


# Mints temporary credentials: of a replica id, seconds and a role, as `temporary_credentials.mint`.
Mint = Callable[[int, float, str | None], Credentials]


# -- whoever has an operator's keys and an account of the store ------------------------------------------------------


def create_grant(
    store: Store, to: Invitation, number: int, credentials: Credentials, lasts_s: float, role: str | None, stamp: Stamp
) -> Grant | None:
    """Create the grant of `credentials` to who was invited; None if another process has created that number.

    `lasts_s`, `role`: with which they were minted, and later ones will be.
    """
    key = keys.grant(to.epoch, to.replica_id, to.identity, number)
    secret = canonical_json(credentials.model_dump(mode="json", exclude_none=True))
    record = Grant(
        **stamp(),
        epoch=to.epoch,
        replica_id=to.replica_id,
        identity=to.identity,
        number=number,
        sealed=PublicIdentity.parse(to.public).seal(key, secret),
        not_after=credentials.ends,
        lasts_s=lasts_s,
        role=role,
    )
    return None if Writer(store, Role.COORDINATOR).create(record) is None else record


def renew_grants(store: Store, mint: Mint, stamp: Stamp) -> None:
    """Mint new credentials for everybody who is invited and whose newest ones have passed half of their life.

    Nobody gets any who was invited without credentials, was revoked, has a link that has expired on the clock of
    `stamp`, or is of an epoch before the last rotation of the run's keys. Raises `ConfigError` if the store refuses to
    mint, and the store's errors. One LIST request, and while somebody was granted some two more for each replica and
    two GETs for each invitation.
    """
    newest, refused = _newest(store), None
    for replica_id in sorted({who[1] for who in newest}):
        for invited in invitations_to(store, replica_id):
            found = _last(store, newest.get((invited.epoch, replica_id, invited.identity), ()))
            now = stamp()["at"]
            if found is None or found.not_after >= invited.not_after or now >= invited.not_after:
                continue
            if now < (found.at + found.not_after) / 2:
                continue
            lasts_s = max(SHORTEST_S, min(found.lasts_s, invited.not_after - now))
            try:
                credentials = mint(replica_id, lasts_s, found.role)
            except ConfigError as error:
                refused = error  # others may assume other roles
                continue
            create_grant(store, invited, found.number + 1, credentials, found.lasts_s, found.role, stamp)
    if refused is not None:
        raise refused


def _newest(store: Store) -> dict[tuple[int, int, str], list[str]]:
    """Keys of grants by epoch, replica and identity, the newest first."""
    found: dict[tuple[int, int, str], dict[int, str]] = {}
    for info in store.list(keys.GRANTS):
        if (parts := keys.grant.parse(info.key)) is not None:
            epoch, replica_id, identity, number = parts
            found.setdefault((epoch, replica_id, identity), {})[number] = info.key
    return {who: [each[number] for number in sorted(each, reverse=True)] for who, each in found.items()}


def _last(store: Store, newest_first: Sequence[str]) -> Grant | None:
    """The newest grant that can be read; one that nobody signed does not exist, whatever its number."""
    for key in newest_first:
        try:
            if (found := read(store, Grant, key)) is not None:
                return found.record
        except RecordInvalid as error:
            log.warning("passed over: %s", error)
    return None


# -- the machine that has the link -----------------------------------------------------------------------------------


class Lent(ABC):
    """Access to the store that a machine with a link has for a while, in files that only this user reads."""

    def __init__(self, variables: dict[str, str]) -> None:
        """`variables`: by which a process finds the files. It finds no profile of this machine's user."""
        nothing = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
        self._variables = nothing | variables
        self.secrets: dict[str, str] = {}  # all that were used, by name, for redaction

    def environ(self, others: Mapping[str, str]) -> dict[str, str]:
        """The variables for a process that has this access and no other.

        They are `others`, an environment, without its cloud credentials, and those that name the files of the access.
        """
        return {**{name: value for name, value in others.items() if name not in OF_ACCOUNTS}, **self._variables}

    @contextmanager
    def in_this_process(self) -> Iterator[None]:
        """Context in which this process has this access and no cloud credentials of its own; restores them after it."""
        before = dict(os.environ)
        try:
            _replace_environ(self.environ(before))
            yield
        finally:
            _replace_environ(before)

    @abstractmethod
    def look(self, store: Store) -> None:
        """Call `find` if newer access may have been granted by now. May be called often. Raises as `find`."""

    @abstractmethod
    def find(self, store: Store) -> None:
        """Use the newest access that was granted to the link. Records that cannot be decrypted are skipped.

        Raises the store's errors.
        """

    @property
    def ends(self) -> str:
        """The time at which the access in use ends, for people."""
        return f"{datetime.fromtimestamp(self._ends, UTC):%Y-%m-%d %H:%M} UTC" if self._ends else "a time unknown here"

    _ends = 0.0


class LentCredentials(Lent):
    """Temporary credentials of a machine with a link, in files below `folder`.

    Processes with the variables of `environ` find them as any AWS SDK does, by a profile whose `credential_process`
    prints them, and so read newer ones before these end. Another profile, which stores of this package use alone, has
    those that create objects: stores that are opened before `find` has found them create nothing.

    Args:
        link: where the run's folder is, and the key to decrypt newer credentials.
        credentials: the first ones.
        folder: exists, on a disk of this machine.
        clock: time, by which newer ones are looked for before those in use end.
    """

    def __init__(self, link: Link, credentials: Credentials, folder: Path, clock: Clock) -> None:
        self._identity = Identity(from_text(link.seed, KEY_BYTES))
        self._file, self._writing = folder / "credentials.json", folder / "writing.json"
        self._clock = clock
        self._number = 0
        config = folder / "config"
        profiles = {"default": self._file, f"profile {_WRITING}": self._writing}
        config.write_text("".join(f"[{p}]\ncredential_process = cat {quote(str(f))}\n" for p, f in profiles.items()))
        super().__init__({"AWS_CONFIG_FILE": str(config), ENV_WRITING_PROFILE: _WRITING, **link.environ()})
        self._use(credentials)

    def look(self, store: Store) -> None:
        """Use newer credentials if they were granted, sixteen times in the life of those in use. Raises as `find`."""
        if self._clock.now() >= self._look_at:
            self._pause()
            self.find(store)

    def find(self, store: Store) -> None:
        """Use the newest credentials that were granted to the link: a LIST request, and a GET if they are newer."""
        for (_, _, identity), newest_first in _newest(store).items():
            if identity != self._identity.public.digest:
                continue
            found = _last(store, newest_first)
            if found is None or found.number <= self._number:
                continue
            key = keys.grant(found.epoch, found.replica_id, identity, found.number)
            try:
                self._use(Credentials.model_validate_json(self._identity.opened(key, found.sealed)))
                self._number = found.number
            except (ConfigError, ValidationError) as error:
                log.warning("passed over: %s: %s", key, error)

    def _use(self, credentials: Credentials) -> None:
        for file, each in ((self._file, credentials), (self._writing, credentials.creates or credentials)):
            said = {
                "Version": 1,
                "AccessKeyId": each.key,
                "SecretAccessKey": each.secret,
                "SessionToken": each.token,
            }
            if each.not_after:
                said["Expiration"] = datetime.fromtimestamp(each.not_after, UTC).isoformat()
            new = file.with_suffix(".new")
            new.touch(mode=0o600)
            new.write_text(json.dumps(said))
            new.replace(file)
            for name, value in (("SECRET_ACCESS_KEY", each.secret), ("SESSION_TOKEN", each.token)):
                if value not in self.secrets.values():
                    self.secrets[f"AWS_{name}_{len(self.secrets)}"] = value
        self._ends = credentials.ends
        self._pause()

    def _pause(self) -> None:
        left_s = self._ends - self._clock.wall_time() if self._ends else float("inf")
        shortest, longest = _LOOK_S
        self._look_at = self._clock.now() + max(shortest, min(left_s / _LOOKS, longest))


def _replace_environ(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
