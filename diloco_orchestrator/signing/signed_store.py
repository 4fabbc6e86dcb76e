"""`SignedStore`: the store interface over a run's folder that shows only objects signed by the run's keys.

Its users need not know whether a run is signed: keys and contents are the same. In the bucket an object has a name that
only holders of the run's keys can foretell, and a record ends with its author's signature.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, StoreError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import Sha256, sha256_hex
from diloco_orchestrator.protocol.key_records import Colleague, Rotation, epoch_of, why_no_commit
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.protocol.signatures import (
    LONGEST_LINE,
    Certificate,
    Operator,
    Signature,
    SignedBy,
    named_bytes,
    signed_bytes,
    split_signed,
    to_text,
)
from diloco_orchestrator.protocol.signed_objects import (
    StoredName,
    is_named,
    is_overwritten,
    is_signed,
    parse_stored,
    stored_name,
    why_not_by,
)
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, identity, needs_key, operator_of
from diloco_orchestrator.signing.keys import RunKey, Signer, is_by, is_certified
from diloco_orchestrator.store.base import ObjectInfo, Store

_MOST_NAMES = 65_536  # names kept in memory, some 20 MB
_TRIALS = (keys.PROBE, keys.DOCTOR)  # prefixes of objects that come before any run
_FOREIGN = "its name is not by the run's keys"
_SEVERAL = "several objects have names of this key, and who holds no key of the run cannot tell which is the run's"
_MOST_DEBRIS = 1_000  # objects that `debris` names one by one


@dataclass
class _Rules:
    """Stored names and signatures of one signed run's objects. `signer`: this process's keys; None: it only reads."""

    run_sha256: Sha256
    signed_by: SignedBy
    signer: Signer | None
    invited: frozenset[int] = frozenset()  # ids of replicas that strangers run
    version: int = 1  # of the rules of signed runs
    rotations: tuple[Rotation, ...] = ()  # of the run's keys, as known when the process began
    names: dict[tuple[str, int], str] = field(default_factory=dict)  # of stored objects, by key and take
    several: set[str] = field(default_factory=set)  # keys of which a process without keys has found several right names
    taken: dict[str, int] = field(default_factory=dict)  # takes of a key below this one hold what nobody signed
    certified: dict[object, bool] = field(default_factory=dict)  # whether the run's key signed a certificate
    fresh: dict[str, bytes] = field(default_factory=dict)  # content of an object that a lost create has just read
    debris: dict[str, str] = field(default_factory=dict)  # reasons, by the names of objects that do not exist

    def epoch_of(self, key: str) -> int:
        """The epoch of the keys that name and sign the object `key`: 1, and one more after each rotation of the run's
        keys.
        """
        return epoch_of(key, self.rotations)

    def private_name_key(self, key: str) -> Ed25519PrivateKey | None:
        """The private key that signs the name of the object at `key`; None if this process does not hold it."""
        if self.signer is None:
            return None
        if key.startswith(keys.KEYS):
            return self.signer.run_key
        epoch = self.epoch_of(key)
        return self.signer.names[epoch - 1] if epoch <= len(self.signer.names) else None

    def _public_name_key(self, key: str) -> str:
        if key.startswith(keys.KEYS):
            return self.signed_by.key
        epoch = self.epoch_of(key)
        return self.signed_by.names if epoch == 1 else self.rotations[epoch - 2].names

    def name_of(self, key: str, take: int = 0) -> str | None:
        """The name under which the object at `key` is stored; None if this process holds no key to make it."""
        if (private := self.private_name_key(key)) is None:
            return None
        name = self.names.get((key, take))
        if name is None:
            name = stored_name(key, take, private.sign(named_bytes(self.run_sha256, key, take)))
            self._remember(key, take, name)
        return name

    def is_name(self, found: StoredName) -> bool:
        """Whether a stored object's name carries a valid signature by the run's keys.

        A process that holds these accepts the one name that they give. Whoever holds the key of names can make other
        valid signatures with it, which a process without keys accepts too.
        """
        key, take, name = found.key, found.take, str(found)
        if (ours := self.name_of(key, take)) is not None:
            return ours == name
        known = self.names.get((key, take))
        if known == name:
            return True
        said = named_bytes(self.run_sha256, key, take)
        is_right = is_by(self._public_name_key(key), found.signature, said)
        if is_right and known is not None:
            self.several.add(key)
        elif is_right:
            self._remember(key, take, name)
        return is_right

    def _remember(self, key: str, take: int, name: str) -> None:
        """Keep a name, unless another thread forgets all names: whoever needs it now must have it from elsewhere."""
        if len(self.names) >= _MOST_NAMES:
            self.names.clear()
        self.names[key, take] = name

    def pass_over(self, key: str, take: int) -> int:
        """Remember that no object under this take's name is signed; returns the next take, to read instead."""
        if len(self.taken) >= _MOST_NAMES:
            self.taken.clear()
        self.taken[key] = take + 1
        return take + 1

    def sealed(self, key: str, body: bytes) -> bytes:
        """The object's content `body` followed by this process's signature. Needs a signer.

        Raises `TypeError`, a bug of ours, for an object that another author has to sign.
        """
        assert self.signer is not None, "who only reads signs nothing"
        private, certificate = self.signer.key, self.signer.certificate
        if key.startswith(keys.KEYS):
            assert self.signer.run_key is not None, "its name could not be made"
            signature = self.signer.run_key.sign(signed_bytes(self.run_sha256, key, body))
            return body + Signature(certificate=None, signature=to_text(signature)).line()
        if why := self._why_not_by(certificate, key, body):
            raise TypeError(f"{key} is not this process's to write: {why}")
        signature = private.sign(signed_bytes(self.run_sha256, key, body))
        return body + Signature(certificate=certificate, signature=to_text(signature)).line()

    def opened(self, key: str, data: bytes) -> bytes | str:
        """The content of a signed object; or, as text, the reason if it was not signed by one who may write it."""
        found = split_signed(data)
        if found is None:
            return "it has no signature"
        body, signature = found
        certificate = signature.certificate
        if (certificate is None) is not key.startswith(keys.KEYS):
            return "the run's key itself signs rotations and certificates, and nothing else"
        if certificate is not None and not self._is_certified(certificate):
            return "its author's certificate is not by the run's key"
        author = self.signed_by.key if certificate is None else certificate.key
        if not is_by(author, signature.signature, signed_bytes(self.run_sha256, key, body)):
            return "its signature is not by the key that it names"
        if certificate is not None and (why := self._why_not_by(certificate, key, body)):
            return why
        return body

    def _why_not_by(self, certificate: Certificate | Operator, key: str, body: bytes) -> str:
        """Reason why a signature with this certificate must be rejected on the object at `key`; empty if valid."""
        operator = certificate.operator if isinstance(certificate, Certificate) else certificate
        if operator.epoch < (epoch := self.epoch_of(key)):
            return f"its author's key is of epoch {operator.epoch} of the run's keys; a rotation began epoch {epoch}"
        if not isinstance(certificate, Certificate):
            return ""
        if keys.commit.parse(key) and (why := why_no_commit(certificate.replica_id, self.rotations[: epoch - 1])):
            return why
        is_invited = certificate.replica_id in self.invited
        return why_not_by(certificate.who, key, body, is_invited=is_invited, rules=self.version)

    def _is_certified(self, certificate: Certificate | Operator) -> bool:
        operator = certificate.operator if isinstance(certificate, Certificate) else certificate
        who = certificate.who if isinstance(certificate, Certificate) else None
        of = who, certificate.key, certificate.signature, operator.epoch, operator.key, operator.signature
        found = self.certified.get(of)
        if found is None:
            if len(self.certified) >= _MOST_NAMES:
                self.certified.clear()
            found = self.certified[of] = is_certified(certificate, self.signed_by, self.run_sha256)
        return found

    def note(self, name: str, why: str) -> None:
        """Record that the object `name` is ignored in this signed run. `why`: the reason."""
        name = name if name.isprintable() else ascii(name)  # such as one that would write lines of its own
        if name in self.debris or len(self.debris) < _MOST_DEBRIS:
            self.debris[name] = why


class SignedStore(Store):
    """The store interface over `beneath`, a folder of a run: of a signed one only signed objects exist.

    A folder without run.json, or with that of an unsigned run, is `beneath` itself. Objects that no log rests on, such
    as run.json, code, snapshots and trials, are passed through (`protocol.signed_objects.is_named`).

    Calls raise what those of `beneath` do, writing `ConfigError` if this process has no key. Somebody who holds a
    key of the run, or may overwrite objects, can put an unsigned object under the name of a record. The record is then
    written under its next name (`take`), and read from the first of its names that has a signed object.
    """

    def __init__(self, beneath: Store, environ: Mapping[str, str]) -> None:
        """`environ`: the environment in which private keys are sought first, then in this user's state folder."""
        self.url = beneath.url
        self.beneath = beneath
        self.environ = environ
        self._known: list[_Rules | None] = []  # one item once run.json was read; copies of this store share it

    @property
    def endpoint(self) -> str:
        return self.beneath.endpoint

    @property
    def requests_allowed(self) -> int | None:
        return self.beneath.requests_allowed

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
        """Take the rules of signing from run.json. Raises `StoreError` if another one, of a signed run, was read
        before.
        """
        sha256 = sha256_hex(run_json)
        if self._known:
            if self._known[0] is not None and sha256 != self._known[0].run_sha256:
                raise StoreError(
                    f"{keys.RUN} of {self.url} was replaced while this process read the run: find out who may "
                    "overwrite objects there, and restore it."
                )
            return
        try:
            run = Run.from_bytes(run_json, keys.RUN)
        except RecordInvalid:
            return  # whoever reads the run says so
        self._known.append(None if run.signed_by is None else self._rules_of(run, run.signed_by, sha256))

    def _rules_of(self, run: Run, signed_by: SignedBy, run_sha256: Sha256) -> _Rules:
        """The rules of signing of a run: its rotations of keys, whose signatures are checked, then the keys of this
        process.
        """
        rules = _Rules(run_sha256, signed_by, None, frozenset(run.config.invited), run.signed_rules or 1)
        found = {}
        for info in self.beneath.list(keys.KEYS):
            stored = parse_stored(info.key)
            number = None if stored is None else keys.rotation.parse(stored.key)
            if stored is None or number is None or not rules.is_name(stored):
                continue
            body = self._checked(rules, info.key, stored.key)
            if isinstance(body, bytes):
                found[number[0]] = Rotation.from_bytes(body, stored.key)
        while (epoch := len(rules.rotations) + 2) in found:
            rules.rotations += (found[epoch],)
        rules.names.clear()
        rules.signer = self._signer(rules)
        return rules

    def _signer(self, rules: _Rules) -> Signer | None:
        if text := self.environ.get(ENV_ATTEMPT_KEY):
            return Signer.parse(text, rules.signed_by, rules.run_sha256)
        epoch = len(rules.rotations) + 1
        found = operator_of(rules.signed_by, rules.run_sha256, epoch, self.environ)
        return found or self._certified_here(rules)

    def _certified_here(self, rules: _Rules) -> Signer | None:
        """The keys of this user, if the run's key has certified them for this run; else None."""
        user = identity(self.environ, make=False)
        if user is None:
            return None
        key = keys.colleague(user.public.digest, len(rules.rotations) + 1)
        try:
            found = Colleague.from_bytes(self._opened(rules, key), key)
        except ObjectMissing:
            return None
        names = tuple(map(RunKey.parse, user.opened(rules.run_sha256, found.sealed).decode().split()))
        return Signer(user.signing, tuple(each.private for each in names), found.operator)

    def learn_anew(self) -> None:
        """Forget run.json and the rotations (replacements of its keys), so that the next call reads them again."""
        self._known.clear()

    @property
    def operator(self) -> Signer | None:
        """This process's private keys as a launcher or coordinator of the signed run.

        None if it has none of the newest epoch (since the last rotation of keys), or run.json was not read yet.
        """
        rules = self._known[0] if self._known else None
        found = None if rules is None else rules.signer
        if rules is None or found is None or not found.is_operator or len(found.names) <= len(rules.rotations):
            return None
        return found

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The rotations (replacements of a signed run's keys) that existed when run.json was read."""
        return self._known[0].rotations if self._known and self._known[0] is not None else ()

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
            if key == keys.RUN and not start and (end is None or end > len(data)):
                self._learn(data)
            return data
        if not is_signed(key):
            return self.beneath.get(self._name(rules, key), start, end)
        body = rules.fresh.pop(key, None)
        if body is None:
            body = self._opened(rules, key)
        return body[start:end]

    def _opened(self, rules: _Rules, key: str) -> bytes:
        """The content of the record at `key` under the first of its names whose object has a valid signature.

        Raises `ObjectMissing` if there is none, and, in a process without keys, `StoreError` for two signed records
        under different names of one key.
        """
        take, why = 0 if is_overwritten(key) else rules.taken.get(key, 0), ""
        while True:
            try:
                names = self._right_names(rules, key, take)
                if len(names) > 1:  # the first one with a signature may be under a name that others do not see
                    names = self._right_names(rules, key, None)
                found = {name: self._checked(rules, name, key) for name in names}
            except ObjectMissing:
                if not why:
                    raise
                raise ObjectMissing(f"{key} does not exist in {self.url}: {why}") from None
            bodies = {each for each in found.values() if isinstance(each, bytes)}
            if len(bodies) > 1:
                kind = ObjectMissing if is_overwritten(key) else StoreError
                raise kind(self._several(rules, key, found))
            for name, each in found.items():
                if isinstance(each, str):
                    rules.note(name, each)
                    why = f"what is there, {name}, was not signed: {each}"
            if bodies:
                return bodies.pop()
            if is_overwritten(key):
                raise ObjectMissing(f"{key} does not exist in {self.url}: {why}")
            take = rules.pass_over(key, take)

    def _checked(self, rules: _Rules, name: str, key: str) -> bytes | str:
        """The content of the object `name`, or the reason why it is not signed validly, by a second read.

        A first one may have had an error, after which this process would take the record of everybody else for missing.
        """
        found = rules.opened(key, self._read(name, key))
        return found if isinstance(found, bytes) else rules.opened(key, self._read(name, key))

    def _read(self, name: str, key: str) -> bytes:
        return self.beneath.get(name, 0, most_bytes(key) + 1 + LONGEST_LINE)

    def _name(self, rules: _Rules, key: str, take: int = 0) -> str:
        """The name under which the object at `key` is stored.

        Raises `ObjectMissing` if a process without a key finds none, or several.
        """
        names = self._right_names(rules, key, take)
        if len(names) > 1:
            raise ObjectMissing(self._several(rules, key, names))
        return names[0]

    def _right_names(self, rules: _Rules, key: str, take: int | None) -> list[str]:
        """The name of the object at `key`; for a process without a key, which lists the names below it, all valid ones.

        `take`: None for those of every take, which only such a process asks for. Raises `ObjectMissing` if there is
        none.
        """
        if take is not None and (ours := rules.name_of(key, take)) is not None:
            return [ours]
        known = None if take is None else rules.names.get((key, take))
        if known is not None and key not in rules.several:
            return [known]
        right = []
        for info in self.beneath.list(f"{key}/"):
            found = parse_stored(info.key)
            if found is None or found.key != key or not rules.is_name(found):
                rules.note(info.key, _FOREIGN)
            elif take in (None, found.take):
                right.append(info.key)
        if not right:
            raise ObjectMissing(f"{key} does not exist in {self.url}.")
        return right

    def _several(self, rules: _Rules, key: str, names: Collection[str]) -> str:
        """A sentence about several objects of one key, which whoever holds the key of names has made. Notes them."""
        for name in names:
            rules.note(name, _SEVERAL)
        return (
            f"{key} cannot be read in {self.url}: {_SEVERAL}: {', '.join(names)}. One who holds the keys of an attempt "
            "has made the others: read the run with its keys, and replace these (`diloco key --rotate`)."
        )

    def stored_names(self, key: str) -> list[str]:
        """The names in the bucket under which the object at `key` is sought here, the first one first.

        Raises `ObjectMissing` if this process holds no key to make them and finds none.
        """
        rules = self._rules(key)
        return [key] if rules is None else [self._name(rules, key, t) for t in range(rules.taken.get(key, 0) + 1)]

    def create(self, key: str, data: bytes) -> bool:
        rules = self._rules(key)
        if rules is None:
            created = self.beneath.create(key, data)
            if key == keys.RUN and created:
                self._learn(data)
            return created
        name = self._name_to_write(rules, key)
        if not is_signed(key):
            return self.beneath.create(name, data)
        stored, take = rules.sealed(key, data), rules.taken.get(key, 0)
        while not self.beneath.create(name := self._name(rules, key, take), stored):
            found = self._checked(rules, name, key)
            if isinstance(found, bytes):
                rules.fresh = {key: found}
                return False
            rules.note(name, found)
            take = rules.pass_over(key, take)
        return True

    def put(self, key: str, data: bytes) -> None:
        rules = self._rules(key)
        if rules is None:
            self.beneath.put(key, data)
            return
        name = self._name_to_write(rules, key)
        self.beneath.put(name, rules.sealed(key, data) if is_signed(key) else data)

    def _name_to_write(self, rules: _Rules, key: str) -> str:
        """The name under which this process writes the object at `key`. Raises `ConfigError` without a key that signs
        it.
        """
        if (name := rules.name_of(key)) is None:
            raise needs_key(self.url, rules.signed_by, f"writing {key}")
        return name

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        rules = None if prefix.startswith(_TRIALS) else self._rules(keys.ROUNDS)
        newest = ""
        for info in self.beneath.list(prefix, start_after):
            if rules is None or not is_named(info.key):
                yield info
                continue
            found = parse_stored(info.key)
            if found is None or not is_named(found.key) or not rules.is_name(found):
                rules.note(info.key, _FOREIGN)
            elif found.key > start_after and found.key != newest:  # takes of one key follow each other
                newest = found.key
                yield ObjectInfo(newest, info.size)

    def delete(self, key: str) -> None:
        rules = self._rules(key)
        if rules is None:
            self.beneath.delete(key)
            return
        for take in range(rules.taken.get(key, 0) + 1):
            with suppress(ObjectMissing):  # who has no key found none
                self.beneath.delete(self._name(rules, key, take))

    def open_file(self, key: str) -> IO[bytes] | None:
        rules = self._rules(key)
        if rules is None:
            return self.beneath.open_file(key)
        return None if is_signed(key) else self.beneath.open_file(self._name(rules, key))

    def without_read_back(self) -> "SignedStore":
        """This store with a `create` that does not read back an object without a signature."""
        found = copy.copy(self)  # what is known is shared
        found.beneath = self.beneath.without_read_back()
        return found


def signed_store_in(store: Store) -> SignedStore | None:
    """The `SignedStore` that `store` is or is layered over; None if there is none."""
    found: object = store
    while found is not None and not isinstance(found, SignedStore):
        found = getattr(found, "beneath", None)
    return found
