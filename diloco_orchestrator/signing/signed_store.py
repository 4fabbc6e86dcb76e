"""`SignedStore`: the store interface over a run's folder that shows only objects signed by the run's keys.

Its users need not know whether a run is signed: keys and contents are the same. In the bucket an object has a name that
only holders of the run's keys can foretell, and a record ends with its author's signature.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, StoreError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import Sha256, sha256_hex
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.protocol.signatures import (
    LONGEST_LINE,
    Certificate,
    Signature,
    SignedBy,
    named_bytes,
    signed_bytes,
    split_signed,
    to_text,
)
from diloco_orchestrator.protocol.signed_objects import is_named, is_signed, parse_stored, stored_name, why_not_by
from diloco_orchestrator.signing.kept_keys import needs_key, signer_of
from diloco_orchestrator.signing.keys import Signer, is_by, is_certified
from diloco_orchestrator.store.base import ObjectInfo, Store, endpoint_of, open_file
from diloco_orchestrator.store.retrying import without_read_back

_MOST_NAMES = 65_536  # names kept in memory, some 20 MB
_TRIALS = (keys.PROBE, keys.DOCTOR)  # prefixes of objects that come before any run
_MOST_DEBRIS = 1_000  # objects that `debris` names one by one


@dataclass
class _Rules:
    """Stored names and signatures of one signed run's objects. `signer`: this process's keys; None: it only reads."""

    run_sha256: Sha256
    signed_by: SignedBy
    signer: Signer | None
    names: dict[str, str] = field(default_factory=dict)  # under which an object is stored, by its key
    certified: dict[object, bool] = field(default_factory=dict)  # whether the run's key signed a certificate
    fresh: dict[str, bytes] = field(default_factory=dict)  # content of an object that a lost create has just read
    debris: dict[str, str] = field(default_factory=dict)  # reasons, by the names of objects that do not exist

    def name_of(self, key: str) -> str:
        """The name under which the object at `key` is stored. Needs a signer."""
        assert self.signer is not None, "who only reads looks names up"
        if key not in self.names:
            self._remember(key, stored_name(key, self.signer.name_key.sign(named_bytes(self.run_sha256, key))))
        return self.names[key]

    def is_name(self, key: str, name: str) -> bool:
        """Whether `name` is a valid stored name of an object at `key`."""
        if self.signer is not None:
            return self.name_of(key) == name
        if self.names.get(key) == name:
            return True
        found = parse_stored(name)
        is_right = found is not None and is_by(self.signed_by.names, found[1], named_bytes(self.run_sha256, key))
        if is_right:
            self._remember(key, name)
        return is_right

    def _remember(self, key: str, name: str) -> None:
        if len(self.names) >= _MOST_NAMES:
            self.names.clear()
        self.names[key] = name

    def sealed(self, key: str, body: bytes) -> bytes:
        """The object's content `body` followed by this process's signature. Needs a signer.

        Raises `TypeError`, a bug of ours, for an object that another author has to sign.
        """
        assert self.signer is not None, "who only reads signs nothing"
        certificate = self.signer.certificate
        if certificate is not None and (why := why_not_by(certificate.who, key, body)):
            raise TypeError(f"{key} is not this attempt's to write: {why}")
        signature = self.signer.key.sign(signed_bytes(self.run_sha256, key, body))
        return body + Signature(certificate=certificate, signature=to_text(signature)).line()

    def opened(self, key: str, data: bytes) -> bytes | str:
        """The content of a signed object; or, as text, the reason if it was not signed by one who may write it."""
        found = split_signed(data)
        if found is None:
            return "it has no signature"
        body, signature = found
        certificate = signature.certificate
        if certificate is not None and not self._is_certified(certificate):
            return "its author's certificate is not by the run's key"
        author = self.signed_by.key if certificate is None else certificate.key
        if not is_by(author, signature.signature, signed_bytes(self.run_sha256, key, body)):
            return "its signature is not by the key that it names"
        if certificate is not None and (why := why_not_by(certificate.who, key, body)):
            return why
        return body

    def _is_certified(self, certificate: Certificate) -> bool:
        of = certificate.who, certificate.key, certificate.signature
        if of not in self.certified:
            if len(self.certified) >= _MOST_NAMES:
                self.certified.clear()
            self.certified[of] = is_certified(certificate, self.signed_by, self.run_sha256)
        return self.certified[of]

    def note(self, name: str, why: str) -> None:
        """Record that the object `name` is ignored in this signed run. `why`: the reason."""
        name = name if name.isprintable() else ascii(name)  # such as one that would write lines of its own
        if name in self.debris or len(self.debris) < _MOST_DEBRIS:
            self.debris[name] = why


class SignedStore:
    """The store interface over `beneath`, a folder of a run: of a signed one only signed objects exist.

    A folder without run.json, or with that of an unsigned run, is `beneath` itself. Objects that no log rests on, such
    as run.json, code, snapshots and trials, are passed through (`protocol.signed_objects.is_named`).

    Calls raise what those of `beneath` do. Writing raises `ConfigError` if this process has no key, and `StoreError` if
    an object that nobody signed is under the name of a new record: somebody who holds a key of the run, or may
    overwrite objects, put it there.
    """

    def __init__(self, beneath: Store, environ: Mapping[str, str]) -> None:
        """`environ`: the environment in which private keys are sought first, then in this user's state folder."""
        self.beneath = beneath
        self.environ = environ
        self._known: list[_Rules | None] = []  # one item once run.json was read; copies of this store share it

    @property
    def url(self) -> str:
        return self.beneath.url

    @property
    def endpoint(self) -> str:
        return endpoint_of(self.beneath)

    @property
    def is_signed(self) -> bool:
        """Whether the run is signed; False before its run.json was read."""
        return bool(self._known) and self._known[0] is not None

    def debris(self) -> Mapping[str, str]:
        """Reasons by name of the first 1,000 objects in the folder that this process ignored, as not signed validly.

        Empty for an unsigned run.
        """
        rules = self._known[0] if self._known else None
        return {} if rules is None else dict(rules.debris)

    def _learn(self, run_json: bytes) -> None:
        if self._known:
            return
        try:
            run = Run.from_bytes(run_json, keys.RUN)
        except RecordInvalid:
            return  # whoever reads the run says so
        rules = None
        if run.signed_by is not None:
            sha256 = sha256_hex(run_json)
            rules = _Rules(sha256, run.signed_by, signer_of(run.signed_by, sha256, self.environ))
        self._known.append(rules)

    def _rules(self, key: str) -> _Rules | None:
        """Names and signatures for the object at `key`; None if it is stored under its key and unsigned."""
        if not is_named(key):
            return None
        if not self._known:
            try:
                self._learn(self.beneath.get(keys.RUN, 0, most_bytes(keys.RUN) + 1))
            except ObjectMissing:
                return None
        return self._known[0] if self._known else None

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        rules = self._rules(key)
        if rules is None:
            data = self.beneath.get(key, start, end)
            if key == keys.RUN and not start:
                self._learn(data)
            return data
        if not is_signed(key):
            return self.beneath.get(self._name(rules, key), start, end)
        body = rules.fresh.pop(key, None)
        if body is None:
            name = self._name(rules, key)
            found = rules.opened(key, self._read(name, key))
            if isinstance(found, str):
                rules.note(name, found)
                raise ObjectMissing(
                    f"{key} does not exist in {self.url}: what is there, {name}, was not signed: {found}"
                )
            body = found
        return body[start:end]

    def _read(self, name: str, key: str) -> bytes:
        return self.beneath.get(name, 0, most_bytes(key) + 1 + LONGEST_LINE)

    def _name(self, rules: _Rules, key: str) -> str:
        """The name under which the object at `key` is stored. A process without a key lists the names below its key.

        Raises `ObjectMissing` if it then finds none.
        """
        if rules.signer is not None:
            return rules.name_of(key)
        if key not in rules.names:
            for info in self.beneath.list(f"{key}/"):
                if not rules.is_name(key, info.key):
                    rules.note(info.key, "its name is not by the run's keys")
        if key not in rules.names:
            raise ObjectMissing(f"{key} does not exist in {self.url}.")
        return rules.names[key]

    def create(self, key: str, data: bytes) -> bool:
        rules = self._rules(key)
        if rules is None:
            created = self.beneath.create(key, data)
            if key == keys.RUN and created:
                self._learn(data)
            return created
        name, stored = self._to_store(rules, key, data)
        if self.beneath.create(name, stored):
            return True
        if is_signed(key):
            found = rules.opened(key, self._read(name, key))
            if isinstance(found, str):
                rules.note(name, found)
                raise StoreError(
                    f"{key} cannot be written to {self.url}: its name is taken by an object that was not signed "
                    f"({found}). Only who holds a key of the run can foretell that name, and only who may overwrite "
                    f"objects can take it later. Find out who, then delete {name}."
                )
            rules.fresh = {key: found}
        return False

    def put(self, key: str, data: bytes) -> None:
        rules = self._rules(key)
        self.beneath.put(*((key, data) if rules is None else self._to_store(rules, key, data)))

    def _to_store(self, rules: _Rules, key: str, data: bytes) -> tuple[str, bytes]:
        """Name and bytes of an object as it is stored. Raises `ConfigError` without a key."""
        if rules.signer is None:
            raise needs_key(self.url, rules.signed_by, f"writing {key}")
        return rules.name_of(key), rules.sealed(key, data) if is_signed(key) else data

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        rules = None if prefix.startswith(_TRIALS) else self._rules(keys.ROUNDS)
        for info in self.beneath.list(prefix, start_after):
            if rules is None or not is_named(info.key):
                yield info
                continue
            found = parse_stored(info.key)
            if found is None or not is_named(found[0]) or not rules.is_name(found[0], info.key):
                rules.note(info.key, "its name is not by the run's keys")
            elif found[0] > start_after:
                yield ObjectInfo(found[0], info.size)

    def delete(self, key: str) -> None:
        rules = self._rules(key)
        with suppress(ObjectMissing):  # who has no key found none
            self.beneath.delete(key if rules is None else self._name(rules, key))

    def open_file(self, key: str) -> IO[bytes] | None:
        rules = self._rules(key)
        if rules is None:
            return open_file(self.beneath, key)
        return None if is_signed(key) else open_file(self.beneath, self._name(rules, key))

    def without_read_back(self) -> "SignedStore":
        """This store with a `create` that does not read back an object without a signature."""
        found = copy.copy(self)  # what is known is shared
        found.beneath = without_read_back(self.beneath)
        return found


def signed_store_in(store: Store) -> SignedStore | None:
    """The `SignedStore` that `store` is or is layered over; None if there is none."""
    found: object = store
    while found is not None and not isinstance(found, SignedStore):
        found = getattr(found, "beneath", None)
    return found
