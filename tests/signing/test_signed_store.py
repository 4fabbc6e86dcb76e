"""`SignedStore`: what the run's keys did not sign does not exist, blocks nothing and takes no name."""

import dataclasses
import json
from collections.abc import Callable

import pytest
from other_signatures import other_signature
from record_examples import EXAMPLES
from signed_fleet import KEY, MANIFEST, OTHER_KEY, WHERE, Fleet

from diloco_orchestrator.allreduce.scatter_reduce import published_by
from diloco_orchestrator.errors import ConfigError, ObjectMissing, StoreError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.kinds import KINDS, kind_of
from diloco_orchestrator.protocol.record_format import By
from diloco_orchestrator.protocol.signatures import Certificate, Signature, named_bytes, to_text
from diloco_orchestrator.protocol.signed_objects import is_named, is_signed, stored_name
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, ENV_RUN_KEY
from diloco_orchestrator.signing.keys import RunKey
from diloco_orchestrator.signing.signed_store import SignedStore
from diloco_orchestrator.store.memory import MemoryStore

WORDS = {
    "token": "0" * 16,
    "job": "dl-x-r1-a1",
    "identity": "0" * 32,
    "offer": "0" * 32,
}  # in keys; other parts are numbers


def absent(store: SignedStore, key: str) -> bool:
    listed = [info.key for info in store.list(key.rpartition("/")[0] + "/")]
    try:
        store.get(key)
    except ObjectMissing:
        return True
    assert key in listed
    return False


def test_everybody_reads_what_was_written_and_only_the_last_line_is_new():
    fleet = Fleet()
    assert fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    assert [view.get(WHERE) for view in fleet.views()] == 3 * [MANIFEST.to_bytes()]
    assert all([info.key for info in view.list(keys.contributions(7))] == [WHERE] for view in fleet.views())
    (name,) = (info.key for info in fleet.stored.list(keys.ROUNDS))
    assert name == fleet.name(WHERE)
    body, line = fleet.stored.get(name).splitlines(keepends=True)
    assert body == MANIFEST.to_bytes()
    assert json.loads(line)["certificate"]["replica_id"] == 1


class Forgotten(dict[object, object]):
    """A cache that another thread clears right after every write, as one does after 65,536 names."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


def test_names_that_another_thread_forgets_in_between_are_found():
    """A thread that had just made or found a name ended with KeyError, or took its object for missing."""
    fleet = Fleet()
    views = [fleet.replica(1), *fleet.views()]
    for view in views:
        view.get(keys.RUN)
        (rules,) = view._known
        assert rules is not None
        rules.names, rules.certified = Forgotten(), Forgotten()  # type: ignore[assignment]
    assert views[0].create(WHERE, MANIFEST.to_bytes())
    assert [view.get(WHERE) for view in views] == 4 * [MANIFEST.to_bytes()]


def test_records_are_signed_and_bulk_is_only_named():
    for kind in KINDS:
        (form, *_) = kind.forms
        key = form(*(WORDS.get(name, 2) for name in form.names))
        outside = key == keys.RUN
        assert is_named(key) is is_signed(key) is not outside
    for key in (keys.payload(1, 0, 1, 0), keys.state(0, 1, 1), keys.reduced_shard(1, 0), keys.log_text(0, 1)):
        assert is_named(key) and not is_signed(key)
    for key in (keys.code("a" * 64), keys.snapshot(3, "model.safetensors"), f"{keys.PROBE}x"):
        assert not is_named(key)


# -- without a key ----------------------------------------------------------------------------------------------------

# Name and content that somebody writes who holds no key, before the genuine object is there.
OUTSIDE: dict[str, Callable[[Fleet], tuple[str, bytes]]] = {
    "under the key itself": lambda fleet: (WHERE, MANIFEST.to_bytes()),
    "under a guessed name": lambda fleet: (f"{WHERE}/{'A' * 86}", MANIFEST.to_bytes()),
    "by a key of another run": lambda fleet: (
        f"{WHERE}/{to_text(OTHER_KEY.names(1).sign(named_bytes(fleet.run_sha256, WHERE)))}",
        fleet.sealed(OTHER_KEY.operator(fleet.run_sha256), MANIFEST.to_bytes()),
    ),
    "under the name of another object": lambda fleet: (
        f"{WHERE}/{fleet.name(keys.contribution(6, 1)).rpartition('/')[2]}",
        MANIFEST.to_bytes(),
    ),
    "below the genuine name": lambda fleet: (f"{fleet.name(keys.commit(6))}/{'A' * 86}", b"x"),
    "not a name": lambda fleet: (f"{WHERE}/x", b"x"),
    "megabytes": lambda fleet: (f"{WHERE}/{'B' * 86}", b"x" * 20_000_000),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_somebody_without_a_key_writes_does_not_exist_and_blocks_nothing(what):
    fleet = Fleet()
    name, data = OUTSIDE[what](fleet)
    assert fleet.stored.create(name, data)
    assert all(absent(view, WHERE) for view in fleet.views())
    assert fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    assert [view.get(WHERE) for view in fleet.views()] == 3 * [MANIFEST.to_bytes()]
    for view in fleet.views():
        list(view.list(keys.ROUNDS))
        assert list(view.debris()) == [name]


def test_a_name_has_one_spelling():
    """The last of 86 characters holds two bits: base64 of other spellings decodes to the same signature."""
    fleet = Fleet()
    name = fleet.name(WHERE)
    aliases = {f"{name[:-1]}{last}" for last in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"}
    for alias in aliases - {name}:
        fleet.stored.create(alias, b"x")
    assert all(absent(view, WHERE) for view in fleet.views())


def test_a_genuine_object_that_is_copied_elsewhere_does_not_exist_there():
    fleet = Fleet()
    fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    genuine, later = fleet.stored.get(fleet.name(WHERE)), keys.contribution(8, 1)
    fleet.stored.create(fleet.name(later), genuine)  # as who may overwrite objects can, or an insider
    assert all(absent(view, later) for view in fleet.views())


def test_many_stray_keys_are_passed_over():
    fleet = Fleet()
    for number in range(510):
        fleet.stored.create(f"{keys.contributions(7)}{number}.json", b"x")
        fleet.stored.create(f"{keys.contributions(7)}{number}.json/{'A' * 86}", b"x")
    for view in fleet.views():
        assert list(view.list(keys.contributions(7))) == []
        assert len(view.debris()) == 1000


# -- by who may overwrite, or holds one replica's key -----------------------------------------------------------------


def changed(line: bytes, **fields: object) -> bytes:
    body = json.loads(line)
    body["certificate"] |= fields
    return Signature(certificate=Certificate(**body["certificate"]), signature=body["signature"]).line()


def genuine_line(fleet: Fleet) -> bytes:
    return fleet.sealed(fleet.signer(1), MANIFEST.to_bytes())[len(MANIFEST.to_bytes()) :]


# Content under the name of replica 1's manifest, and words of the reason for which it does not exist.
INSIDE: dict[str, tuple[Callable[[Fleet], bytes], str]] = {
    "no signature": (lambda fleet: MANIFEST.to_bytes(), "no signature"),
    "an empty object": (lambda fleet: b"", "no signature"),
    "a cut signature": (lambda fleet: fleet.sealed(fleet.signer(1), MANIFEST.to_bytes())[:-40], "no signature"),
    "a changed record": (
        lambda fleet: MANIFEST.model_copy(update={"write_id": "changed"}).to_bytes() + genuine_line(fleet),
        "not by the key that it names",
    ),
    "another replica's certificate": (
        lambda fleet: MANIFEST.to_bytes() + changed(genuine_line(fleet), replica_id=0),
        "not by the run's key",
    ),
    "a key that nobody certified": (
        lambda fleet: MANIFEST.to_bytes() + changed(genuine_line(fleet), key=OTHER_KEY.signed_by.key),
        "not by the run's key",
    ),
    "the key of another run": (
        lambda fleet: fleet.sealed(OTHER_KEY.operator(fleet.run_sha256), MANIFEST.to_bytes()),
        "not by the run's key",
    ),
    "the run's own key": (
        lambda fleet: fleet.sealed(
            dataclasses.replace(KEY.operator(fleet.run_sha256), key=KEY.private, certificate=None), MANIFEST.to_bytes()
        ),
        "signs rotations and certificates, and nothing else",
    ),
    "another replica in its own name": (
        lambda fleet: fleet.sealed(fleet.signer(0), MANIFEST.model_copy(update={"replica_id": 0}).to_bytes()),
        "its replica_id is '1'",
    ),
    "another replica in this one's name": (
        lambda fleet: fleet.sealed(fleet.signer(0), MANIFEST.to_bytes()),
        "its replica_id is '1'",
    ),
    "an attempt in the name of the next": (
        lambda fleet: fleet.sealed(fleet.signer(1), MANIFEST.model_copy(update={"attempt": 2}).to_bytes()),
        "its attempt is '2'",
    ),
}


@pytest.mark.parametrize("what", INSIDE)
def test_an_object_that_its_author_did_not_sign_does_not_exist_and_is_named(what):
    fleet = Fleet()
    forged, why = INSIDE[what]
    fleet.stored.create(fleet.name(WHERE), forged(fleet))
    for view in fleet.views():
        with pytest.raises(ObjectMissing, match="does not exist"):
            view.get(WHERE)
        assert why in view.debris()[fleet.name(WHERE)]
    assert fleet.replica(1).create(WHERE, MANIFEST.to_bytes()), "the next of its names is taken"
    assert not fleet.replica(1).create(WHERE, MANIFEST.model_copy(update={"write_id": "later"}).to_bytes())
    for view in [*fleet.views(), *fleet.views()]:
        assert view.get(WHERE) == MANIFEST.to_bytes()
        assert [info.key for info in view.list(keys.contributions(7))] == [WHERE]


def test_many_names_of_a_record_that_an_insider_has_taken_cost_requests_and_nothing_else():
    fleet = Fleet()
    for take in range(40):
        fleet.stored.create(fleet.name(WHERE, take), b"junk")
    assert fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    assert [view.get(WHERE) for view in fleet.views()] == 3 * [MANIFEST.to_bytes()]


class Rotten(MemoryStore):
    """A store whose next `bad` reads of an object have a wrong bit, as by a network card or a proxy's memory."""

    def __init__(self, store: MemoryStore, name: str, bad: int = 1) -> None:
        super().__init__(store.url)
        for info in store.list(""):
            self.put(info.key, store.get(info.key))
        self.name, self.bad = name, bad

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = bytearray(super().get(key, start, end))
        if key == self.name and self.bad:
            self.bad -= 1
            data[len(data) // 3] ^= 1
        return bytes(data)


@pytest.mark.parametrize("environ", [{ENV_RUN_KEY: KEY.text()}, {}], ids=["with a key", "without one"])
def test_a_record_that_was_read_once_with_an_error_is_neither_missing_nor_written_again(environ):
    """Who took it for missing wrote a second one under its next name, and was the only one to follow that."""
    fleet = Fleet()
    assert fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    view = SignedStore(Rotten(fleet.stored, fleet.name(WHERE)), environ)
    assert view.get(WHERE) == MANIFEST.to_bytes() and not view.debris()
    replica = SignedStore(Rotten(fleet.stored, fleet.name(WHERE)), {ENV_ATTEMPT_KEY: fleet.secret(1)})
    assert not replica.create(WHERE, MANIFEST.model_copy(update={"write_id": "later"}).to_bytes())
    assert replica.get(WHERE) == MANIFEST.to_bytes()


def test_averages_that_nobody_signed_are_none_though_they_are_listed():
    fleet, where = Fleet(), keys.reduced(7, 1)
    fleet.stored.create(fleet.name(where), b"junk")
    for view in fleet.views():
        assert [info.key for info in view.list(keys.reduced_shards(7))] == [where]
        assert published_by(view, 7, 1) == {}


def test_a_heartbeat_that_somebody_has_overwritten_is_its_authors_again_with_the_next_one():
    fleet, beat = Fleet(), EXAMPLES["heartbeat"].model_copy(update={"replica_id": 1, "attempt": 1})
    where = keys.heartbeat(1, 1)
    fleet.stored.put(fleet.name(where), b"junk")
    assert all(absent(view, where) for view in fleet.views())
    fleet.replica(1).put(where, beat.to_bytes())
    assert [view.get(where) for view in fleet.views()] == 3 * [beat.to_bytes()]


def test_a_signed_run_whose_run_json_is_replaced_meanwhile_is_not_read_on():
    """Otherwise what was checked against one run.json would be read by the rules of another, of an unsigned run."""
    for view in [Fleet().coordinator, Fleet().replica(1), Fleet().reader]:
        list(view.list(keys.ROUNDS))
        view.beneath.put(keys.RUN, EXAMPLES["run"].to_bytes())
        with pytest.raises(StoreError, match="was replaced"):
            view.get(keys.RUN)


@pytest.mark.parametrize(
    "kind", ["halt", "scale", "begin", "intent", "handle", "cancel", "out", "retention"], ids=lambda kind: kind
)
def test_an_attempts_key_does_not_speak_for_launcher_or_coordinator(kind):
    fleet, record = Fleet(), EXAMPLES[kind]
    where = kind_of(record).key(record) or ""
    fleet.stored.create(fleet.name(where), fleet.sealed(fleet.signer(1), record.to_bytes(), where))
    assert all(absent(view, where) for view in fleet.views())
    with pytest.raises(TypeError, match="attempts write no"):
        fleet.replica(1).create(keys.halt(9) if kind == "halt" else where, record.to_bytes())


@pytest.mark.parametrize("by", [By(None, "coordinator on host"), By((0, 1)), By((1, 2))], ids=str)
def test_a_commit_is_by_whom_its_signature_names(by):
    fleet, where = Fleet(), keys.commit(7)
    body = EXAMPLES["commit"].model_copy(update={"by": by}).to_bytes()
    fleet.stored.create(fleet.name(where), fleet.sealed(fleet.signer(1), body, where))
    assert all(absent(view, where) for view in fleet.views())


# -- other names of one key, by who holds the key of names ------------------------------------------------------------


def other_name(fleet: Fleet, key: str, nonce: int, take: int = 0) -> str:
    """A name of the object at `key` whose signature is valid, and which no honest holder of the keys makes."""
    seed = fleet.signer(0).names[0].private_bytes_raw()
    return stored_name(key, take, other_signature(seed, named_bytes(fleet.run_sha256, key, take), nonce))


def commit_by(fleet: Fleet, replica_id: int) -> bytes:
    body = EXAMPLES["commit"].model_copy(update={"round": 7, "by": By((replica_id, 1))}).to_bytes()
    return fleet.sealed(fleet.signer(replica_id), body, keys.commit(7))


@pytest.mark.parametrize("data", [b"junk", b""])
def test_other_valid_names_hide_no_record_from_who_has_no_key(data: bytes):
    """Names before and after the genuine one, in the order of a listing."""
    fleet = Fleet()
    fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    others = {other_name(fleet, WHERE, nonce) for nonce in range(2, 12)}
    assert min(others) < fleet.name(WHERE) < max(others)
    for name in others:
        assert fleet.stored.create(name, data)
    listed = SignedStore(fleet.stored, {})
    assert [info.key for info in listed.list(keys.contributions(7))] == [WHERE]
    for view in (*fleet.views(), listed):
        assert view.get(WHERE) == MANIFEST.to_bytes()
        list(view.list(keys.ROUNDS))
        assert others <= view.debris().keys()


@pytest.mark.parametrize("takes", [(0, 0), (0, 1)], ids=["of one take", "in place of a take that holds junk"])
def test_of_two_commits_under_valid_names_of_one_key_none_is_read_without_a_key(takes: tuple[int, int]):
    """An insider's own one, which holders of keys do not see. A reader without keys took it for the run's."""
    fleet, key = Fleet(), keys.commit(7)
    forged, genuine = takes
    for take in range(genuine):
        fleet.stored.create(fleet.name(key, take), b"junk")
    fleet.stored.create(fleet.name(key, genuine), commit_by(fleet, 0))
    fleet.stored.create(other_name(fleet, key, 5, forged), commit_by(fleet, 1))
    for view in fleet.views()[:2]:
        assert b'"by":"replica 0, attempt 1"' in view.get(key)
    listed = SignedStore(fleet.stored, {})
    assert [info.key for info in listed.list(keys.ROUNDS)] == [key]
    for view in (fleet.reader, listed):
        with pytest.raises(StoreError, match="cannot be read") as found:
            view.get(key)
        assert not isinstance(found.value, ObjectMissing) and other_name(fleet, key, 5, forged) in str(found.value)


def test_a_copy_of_a_record_under_another_valid_name_is_that_record():
    fleet = Fleet()
    fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    fleet.stored.create(other_name(fleet, WHERE, 3), fleet.stored.get(fleet.name(WHERE)))
    assert [view.get(WHERE) for view in fleet.views()] == 3 * [MANIFEST.to_bytes()]


@pytest.mark.parametrize("key", [keys.payload(7, 1, 1, 0), keys.heartbeat(1, 1)])
def test_bulk_and_heartbeats_with_several_valid_names_are_missing_without_a_key(key: str):
    fleet, beat = Fleet(), EXAMPLES["heartbeat"].model_copy(update={"replica_id": 1, "attempt": 1})
    bodies = [beat.model_copy(update={"counter": count}).to_bytes() for count in (1, 2)]
    fleet.replica(1).put(key, bodies[1])
    old = fleet.sealed(fleet.signer(1), bodies[0], key) if is_signed(key) else b"other bytes"
    fleet.stored.create(other_name(fleet, key, 3), old)
    assert [view.get(key) for view in fleet.views()[:2]] == 2 * [bodies[1]]
    with pytest.raises(ObjectMissing, match="several objects"):
        fleet.reader.get(key)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_who_has_no_key_reads_and_is_told_which_key_writes():
    fleet = Fleet()
    with pytest.raises(ConfigError, match=KEY.signed_by.key) as found:
        fleet.reader.create(WHERE, MANIFEST.to_bytes())
    assert ENV_RUN_KEY in str(found.value)


def test_the_key_of_another_run_reads_and_does_not_write():
    fleet = Fleet()
    stranger = SignedStore(fleet.stored, {ENV_RUN_KEY: OTHER_KEY.text()})
    fleet.replica(1).create(WHERE, MANIFEST.to_bytes())
    assert stranger.get(WHERE) == MANIFEST.to_bytes()
    with pytest.raises(ConfigError, match="needs keys of"):
        stranger.create(keys.commit(7), b"{}\n")


@pytest.mark.parametrize("text", ["diloco-key-AAAA", "AAAA", KEY.text()[:-1], KEY.text() + "A"])
def test_a_run_key_that_was_cut_is_refused(text):
    with pytest.raises(ConfigError, match="no key of a run"):
        RunKey.parse(text)
    assert RunKey.parse(KEY.text() + "\n") == KEY


def test_an_attempts_key_that_was_cut_or_is_of_another_run_is_refused():
    fleet, other = Fleet(), Fleet(OTHER_KEY)
    for text, why in (
        (fleet.secret(1)[:-3], "damaged"),
        (fleet.secret(1).replace("diloco-keys-", "diloco-keys-A", 1), "damaged"),
        (other.secret(1), "of another run"),
        (KEY.operator("0" * 64).of_attempt("0" * 64, 1, 1).text(), "of another run"),
    ):
        with pytest.raises(ConfigError, match=why) as found:
            SignedStore(fleet.stored, {ENV_ATTEMPT_KEY: text}).get(WHERE)
        assert "diloco-key" not in str(found.value)


def test_two_launchers_with_two_keys_do_not_see_each_others_records():
    """One of them has created run.json. The other's key is not the run's."""
    fleet = Fleet()
    theirs = Fleet(OTHER_KEY)
    theirs.coordinator.create(keys.begin(1), EXAMPLES["begin"].to_bytes())
    for info in list(theirs.stored.list(keys.LEGS)):
        fleet.stored.create(info.key, theirs.stored.get(info.key))
    assert all(absent(view, keys.begin(1)) for view in fleet.views())


def test_an_unsigned_run_is_stored_as_it_is():
    stored = MemoryStore()
    stored.create(keys.RUN, EXAMPLES["run"].to_bytes())
    assert SignedStore(stored, {ENV_RUN_KEY: KEY.text()}).create(WHERE, MANIFEST.to_bytes())
    assert stored.get(WHERE) == MANIFEST.to_bytes()
    assert b"signed_by" not in EXAMPLES["run"].to_bytes()
