"""Windows: requests to the store, signed for an invited replica's machine where the store mints no credentials.

Whoever supervises the run signs a GET for each object of the run, and a PUT for each that the replica may write in the
next rounds, encrypts both to the identity in the machine's link, and overwrites them as the run goes on. The machine
writes them into a file, from which its processes send them (`store.presigned`).
"""

import base64
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeAlias

from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.join.grants import Lent
from diloco_orchestrator.join.invitations import invitations_to
from diloco_orchestrator.join.link import Link
from diloco_orchestrator.join.offers import name_of
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Intent, Invitation, Offer, Window
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.signatures import KEY_BYTES, from_text
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.run_store import Identity, PublicIdentity, stored_names
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.presigned import ENV_REQUESTS, Requests
from diloco_orchestrator.store.signers import Operation, Signs

log = logging.getLogger(__name__)

LONGEST_S = 7 * 86400.0  # for which S3 accepts a signed request
ROUNDS = 4  # the last committed one and the next ones, whose objects a window lets its replica create
MOST_READS = 20_000  # objects of a run; each takes some 150 bytes of the window, which is read again and again
_CHECKS, _PIECES = 8, 32  # more of one round's checks, and of an attempt's output, than there are


# -- which objects ----------------------------------------------------------------------------------------------------


def may_read(key: str, replica_id: int) -> bool:
    """Whether an invited replica gets a signed request to read the object at `key` (its window has one)."""
    named = keys.parse_attempt(key)
    saved = keys.parse_state(key)
    return not (
        (named is not None and named.name == keys.LOG_TEXT)
        or (saved is not None and saved[0] != replica_id)
        or keys.is_join_piece(key)
        or key.startswith((keys.PROBE, keys.DOCTOR))
    )


def may_write(store: Store, there: Mapping[str, int], replica_id: int) -> Iterator[tuple[Operation, str]]:
    """The objects for which an invited replica gets signed requests to write: ("create", key) or ("put", key).

    They are those of its newest offered attempt, and of `ROUNDS` rounds from the last committed one on; with as many
    payload shards, and pieces of a state, as others have written in any round so far, so that in a run's first round a
    stranger waits for another replica's. `there`: sizes of the run's objects by key. Raises `RecordInvalid` for an
    offer that cannot be read, and the store's errors.
    """
    attempt = max((who[1] for key in there if (who := keys.parse_joined(key)) and who[0] == replica_id), default=0)
    yield "create", keys.follows(replica_id)
    if not attempt:
        return
    yield "create", keys.began(replica_id, attempt)
    yield "create", keys.log_text(replica_id, attempt)
    yield "create", keys.exit_record(replica_id, attempt)
    yield "put", keys.heartbeat(replica_id, attempt)
    intent = read(store, Intent, keys.intent(replica_id, attempt))
    if intent is not None:
        yield "create", keys.claim(replica_id, attempt, intent.record.claim_token)
    for key in there:
        if (joined := keys.parse_join_record(key)) is None or joined.who != (replica_id, attempt):
            continue
        if joined.record != keys.JOIN_OFFER or (offer := read(store, Offer, key)) is None:
            continue
        name = name_of(offer.record)
        yield "create", keys.join_record(name, offer.sha256, keys.JOIN_TAKEN)
        yield "create", keys.join_record(name, offer.sha256, keys.JOIN_END)
        yield "put", keys.join_record(name, offer.sha256, keys.JOIN_LEASE)
        pieces = sum(each.startswith(keys.join_output(name)) for each in there)
        yield from (("create", keys.join_piece(name, each)) for each in range(pieces, pieces + _PIECES))
    yield from (("create", key) for key in _of_rounds(there, replica_id, attempt))


def _of_rounds(there: Mapping[str, int], replica_id: int, attempt: int) -> Iterator[str]:
    last = max((parts[0] for key in there if (parts := keys.commit.parse(key)) is not None), default=0)
    payloads = [found for key in there if (found := keys.parse_payload(key)) is not None]
    shards = range(1 + max((each.shard for each in payloads), default=-1))
    pieces = range(1 + max((parts[3] for key in there if (parts := keys.state_piece.parse(key))), default=-1))
    for round_ in range(max(1, last), last + ROUNDS):
        yield keys.contribution(round_, replica_id)
        yield keys.state(replica_id, round_, attempt)
        yield keys.buffers(replica_id, round_, attempt)
        yield from (keys.state_piece(replica_id, round_, attempt, each) for each in pieces)
        yield from (keys.residual(replica_id, round_, attempt, each) for each in shards)
        yield from (keys.payload(round_, replica_id, attempt, *which) for which in product(shards, _TAKES))
        said = [parts[2] for key in there if (parts := keys.checked.parse(key)) and parts[:2] == (round_, replica_id)]
        yield from (keys.checked(round_, replica_id, 1 + each) for each in range(max(said, default=0) + _CHECKS))
    others = {(each.round, each.replica_id, each.attempt, each.shard) for each in payloads if each.round >= last}
    yield from (keys.want(*which, take) for which, take in product(sorted(others), _TAKES[1:]))


_TAKES = range(1, keys.MAX_TAKES + 1)  # of one payload shard


# -- whoever has an operator's keys and an account of the store ------------------------------------------------------


@dataclass(frozen=True)
class _Signed:
    """A signed request for an object of `size` bytes, and when it was signed and ends, in seconds since 1970."""

    url: str
    size: int  # 0 for one that writes
    at: float
    ends: float


_OfMachine: TypeAlias = dict[tuple[Operation, str], _Signed]  # by operation and name in the bucket


class Windows:
    """Signs and renews windows: each the requests to the store that one invited replica's machine may send.

    Args:
        store: the run's folder, with an operator's keys.
        signs: signs requests with this process's account.
        stamp: write ids and times for records.
    """

    def __init__(self, store: Store, signs: Signs, stamp: Stamp) -> None:
        self._store = store
        self._signs = signs
        self._stamp = stamp
        self._signed: dict[str, _OfMachine] = {}  # by the window's key

    def open(self, to: Invitation, lasts_s: float) -> Requests:
        """Create the window (signed requests) for an invitation; returns the requests by which its machine reads it.

        `lasts_s`: seconds for which each request is valid. Raises as `renew`.
        """
        there = self._there()
        self._write(to, lasts_s, there)
        first = [keys.RUN, keys.window(to.epoch, to.replica_id, to.identity)]
        first += [key for key in there if key.startswith(keys.KEYS)]
        wanted: dict[tuple[Operation, str], int] = {("read", key): there.get(key, 0) for key in first}
        return _requests(self._updated({}, wanted, self._stamp()["at"] + lasts_s))

    def renew(self) -> None:
        """Sign the requests that each window (an invited machine's) lacks, and anew those past half of their life.

        Nobody gets any who was revoked, whose link has expired on this process's clock, or who was invited before the
        last rotation of the run's keys. Raises `ConfigError` for a run of more than `MOST_READS` objects, and the
        store's errors. A LIST request for each thousand of the run's objects while somebody has a window.
        """
        there: dict[str, int] = {}
        for key in [info.key for info in self._store.list(keys.WINDOWS)]:
            if (who := keys.window.parse(key)) is None:
                continue
            valid = [each for each in invitations_to(self._store, who[1]) if (each.epoch, each.identity) == who[::2]]
            found = read(self._store, Window, key)
            if found is None or not valid or self._stamp()["at"] >= valid[0].not_after:
                self._signed.pop(key, None)
                continue
            there = there or self._there()
            self._write(valid[0], found.record.lasts_s, there)

    def _there(self) -> dict[str, int]:
        """The run's objects: their sizes by key."""
        found = {info.key: info.size for info in self._store.list("")}
        if len(found) > MOST_READS:
            raise ConfigError(
                f"{self._store.url} has {len(found)} objects, and requests are signed for {MOST_READS} at most: delete "
                "old rounds (`diloco gc`), or keep the run where the store mints temporary credentials."
            )
        return found

    def _write(self, to: Invitation, lasts_s: float, there: Mapping[str, int]) -> None:
        """Overwrite a window, if it changes."""
        key = keys.window(to.epoch, to.replica_id, to.identity)
        wanted: dict[tuple[Operation, str], int] = {("read", key): 0}
        wanted |= {("read", each): size for each, size in there.items() if may_read(each, to.replica_id)}
        for operation, each in may_write(self._store, there, to.replica_id):
            if operation == "put" or each not in there:
                wanted[operation, each] = 0
        before = self._signed.get(key, {})
        signed = self._updated(before, wanted, min(self._stamp()["at"] + lasts_s, to.not_after))
        if signed == before:
            return
        record = Window(
            **self._stamp(),
            epoch=to.epoch,
            replica_id=to.replica_id,
            identity=to.identity,
            sealed=PublicIdentity.parse(to.public).seal(key, _requests(signed).to_bytes()),
            lasts_s=lasts_s,
        )
        Writer(self._store, Role.COORDINATOR).overwrite(record)
        self._signed[key] = signed

    def _updated(self, before: _OfMachine, wanted: Mapping[tuple[Operation, str], int], ends: float) -> _OfMachine:
        """Requests for the objects `wanted`, sizes by operation and key: those of `before` in the first half of their
        life, the others signed until `ends`.
        """
        now, found = self._stamp()["at"], {}
        for (operation, key), size in wanted.items():
            names = stored_names(self._store, key)
            for name in names if operation == "read" else names[:1]:
                signed = before.get((operation, name))
                if signed is None or (now >= (signed.at + signed.ends) / 2 and ends > signed.ends):
                    signed = _Signed(self._signs.url_of(operation, name, max(1.0, ends - now)), size, now, ends)
                found[operation, name] = signed
        return found


def _requests(signed: _OfMachine) -> Requests:
    urls: dict[Operation, dict[str, str]] = {"create": {}, "put": {}}
    for (operation, name), each in signed.items():
        urls.setdefault(operation, {})[name] = each.url
    return Requests(
        ends=min(each.ends for each in signed.values()),
        read={name: (each.size, each.url) for (operation, name), each in signed.items() if operation == "read"},
        create=urls["create"],
        put=urls["put"],
    )


# -- the machine that has the link -----------------------------------------------------------------------------------


class LentRequests(Lent):
    """Signed requests to the store, by which a machine without an account there takes part in a run it was invited to.

    The run's launcher signs them and writes new ones into the bucket, sealed for this machine; the newest are kept in a
    file in `folder`.

    Args:
        link: the invitation, which holds the first requests.
        folder: exists, on a disk of this machine.
    """

    def __init__(self, link: Link, folder: Path) -> None:
        self._file = folder / "requests"
        super().__init__({ENV_REQUESTS: str(self._file), **link.environ()})
        self._identity = Identity(from_text(link.seed, KEY_BYTES))
        self._use(base64.urlsafe_b64decode(link.requests))

    def look(self, store: Store) -> None:
        """Call `find` every time, because the requests at hand do not cover objects written later. Raises as `find`."""
        self.find(store)

    def find(self, store: Store) -> None:
        """Use the newest requests that were written for the link: a GET. Raises the store's errors."""
        me = self._identity.public.digest
        for key in [info.key for info in store.list(keys.WINDOWS)]:
            if (who := keys.window.parse(key)) is None or who[2] != me:
                continue
            try:
                if (found := read(store, Window, key)) is not None:
                    self._use(self._identity.opened(key, found.record.sealed))
            except (ConfigError, RecordInvalid, ValueError) as error:
                log.warning("passed over: %s: %s", key, error)

    def _use(self, data: bytes) -> None:
        """Replace the file, if it changes. Raises `ValueError` for bytes that are no requests."""
        requests = Requests.from_bytes(data)
        if self._file.exists() and self._file.read_bytes() == data:
            return
        new = self._file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(data)
        new.replace(self._file)
        self._ends = requests.ends
