"""Keys of a signed run are replaced after one has leaked, and another user supervises it with a key of their own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from record_examples import EXAMPLES
from signed_fleet import KEY, MANIFEST, OTHER_KEY, Fleet

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError, ObjectMissing
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.key_records import Rotation, epoch_of
from diloco_orchestrator.protocol.record_format import By, Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.protocol.rounds import Stop
from diloco_orchestrator.protocol.signatures import named_bytes
from diloco_orchestrator.protocol.signed_objects import stored_name
from diloco_orchestrator.protocol.void_commits import no_commit
from diloco_orchestrator.run_log.append import create_run, request_halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import keep_key, may_commit, of_run, rotations_of
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, ENV_RUN_KEY, identity, keep, run_key_of
from diloco_orchestrator.signing.keys import Signer, public_key_of
from diloco_orchestrator.signing.signed_store import SignedStore
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.next_leg import auto_resume, begin_next_leg
from diloco_orchestrator.supervision.rotation import begin_epoch, certify

STAMP = Stamp("test", lambda: 0.0)
ROTATION = Rotation(
    **STAMP(),
    epoch=2,
    names=public_key_of(KEY.names(2)),
    from_leg=2,
    after_round=7,
    commit_sha256="a" * 64,
    attempts={"0": 2, "1": 1},
    by="user",
    why="a key leaked",
)


class Rotated(Fleet):
    """A fleet whose keys were replaced after round 7. `old`: what somebody holds whose keys are of before."""

    def __init__(self) -> None:
        super().__init__()
        self.replica(1).create(keys.contribution(7, 1), MANIFEST.to_bytes())
        self.old = KEY.operator(self.run_sha256)
        assert self.coordinator.create(keys.rotation(2), ROTATION.to_bytes())
        self.operator = KEY.operator(self.run_sha256, 2)
        self.coordinator, self.reader = (
            SignedStore(self.stored, {ENV_RUN_KEY: KEY.text()}),
            SignedStore(self.stored, {}),
        )

    def signer(self, replica_id: int, attempt: int = 2) -> Signer:
        operator = self.operator if hasattr(self, "operator") else KEY.operator(self.run_sha256)
        return operator.of_attempt(self.run_sha256, replica_id, attempt)

    def new_name(self, key: str) -> str:
        return stored_name(key, 0, KEY.names(2).sign(named_bytes(self.run_sha256, key)))


LATER = MANIFEST.model_copy(update={"round": 8, "attempt": 2})
NEW = {
    keys.begin(2): True,
    keys.halt(1): False,
    keys.scale(2, 1): True,
    keys.commit(7): False,
    keys.commit(8): True,
    keys.payload(8, 0, 1, 0): True,
    keys.intent(0, 2): False,
    keys.intent(0, 3): True,
    keys.intent(5, 1): True,
    keys.log_text(1, 1): False,
    keys.state(0, 7, 1): False,
    keys.state(0, 8, 3): True,
    keys.began(1, 2): True,
    keys.snapshot(7, keys.SNAPSHOT_RECORD): False,
    keys.snapshot(8, keys.SNAPSHOT_RECORD): True,
    str(keys.SegmentKey(1, 10, "commits")): True,
    keys.START: False,
    keys.RETENTION: False,
}


@pytest.mark.parametrize("key", NEW)
def test_what_is_of_the_new_epoch(key: str):
    assert epoch_of(key, (ROTATION,)) == (2 if NEW[key] else 1)


def test_new_keys_write_on_and_what_was_written_before_counts():
    fleet = Rotated()
    assert fleet.replica(1, 2).create(keys.contribution(8, 1), LATER.to_bytes())
    for view in [fleet.coordinator, fleet.replica(0, 3), fleet.reader]:
        assert view.get(keys.contribution(7, 1)) == MANIFEST.to_bytes()
        assert view.get(keys.contribution(8, 1)) == LATER.to_bytes()
        assert [info.key for info in view.list(keys.ROUNDS)] == [keys.contribution(7, 1), keys.contribution(8, 1)]


def test_keys_of_before_write_nothing_that_is_later():
    fleet = Rotated()
    thief = SignedStore(fleet.stored, {ENV_RUN_KEY: fleet.old.text()})
    with pytest.raises(ConfigError, match="needs keys of"):
        thief.create(keys.begin(2), EXAMPLES["begin"].to_bytes())
    assert thief.get(keys.contribution(7, 1)) == MANIFEST.to_bytes()
    assert thief.create(keys.halt(1), EXAMPLES["halt"].to_bytes()), "a leg that is over"


def _by_operator(fleet: Rotated) -> Iterator[tuple[str, bytes]]:
    yield keys.begin(2), fleet.sealed(fleet.old, EXAMPLES["begin"].to_bytes(), keys.begin(2))


def _by_attempt(fleet: Rotated) -> Iterator[tuple[str, bytes]]:
    signer, where = fleet.old.of_attempt(fleet.run_sha256, 1, 2), keys.contribution(8, 1)
    yield where, fleet.sealed(signer, LATER.to_bytes(), where)


@pytest.mark.parametrize("make", [_by_operator, _by_attempt])
def test_keys_of_before_sign_nothing_even_under_a_name_of_now(make: Callable[[Rotated], Iterator[tuple[str, bytes]]]):
    """As who has stolen them and has an insider's help."""
    fleet = Rotated()
    for where, data in make(fleet):
        for name in (fleet.name(where), fleet.new_name(where)):
            fleet.stored.create(name, data)
        for view in [fleet.coordinator, fleet.replica(0, 3), fleet.reader]:
            with pytest.raises(ObjectMissing):
                view.get(where)


def test_an_operator_rotates_nothing_and_takes_no_name_of_a_rotation():
    fleet = Fleet()
    colleague = SignedStore(fleet.stored, {ENV_RUN_KEY: KEY.operator(fleet.run_sha256).text()})
    with pytest.raises(ConfigError, match="needs keys of"):
        colleague.create(keys.rotation(2), ROTATION.to_bytes())
    for private in (KEY.names(1), OTHER_KEY.private, KEY.private):  # the last as who may overwrite
        name = stored_name(keys.rotation(2), 0, private.sign(named_bytes(fleet.run_sha256, keys.rotation(2))))
        operator = KEY.operator(fleet.run_sha256)
        fleet.stored.create(name, fleet.sealed(operator, ROTATION.to_bytes(), keys.rotation(2)))
    assert all(SignedStore(fleet.stored, view.environ).rotations == () for view in fleet.views())
    assert fleet.coordinator.create(keys.rotation(2), ROTATION.to_bytes())


def run_with_void_commits(authors: tuple[int, ...] = (), **replicas: int) -> RunLog:
    """The log of a signed run of three replicas, as its launcher reads it. `authors`: of its commits, all void."""
    stored, stamp = MemoryStore("memory://void"), Stamp("test", lambda: 0.0)
    config = make_config({"entrypoint": "m:f", "replicas": 3, **replicas})
    fields = {"run_id": "r", "config": config, "package_version": "0", "signed_by": KEY.signed_by, "signed_rules": 2}
    log = create_run(SignedStore(stored, {ENV_RUN_KEY: KEY.text()}), Run(**stamp(), **fields), "launch", stamp)
    attempts = [KEY.operator(log.run_sha256).of_attempt(log.run_sha256, i, 1).text() for i in range(3)]
    views = [SignedStore(stored, {ENV_ATTEMPT_KEY: text}) for text in attempts]
    assert views[0].create(keys.START, EXAMPLES["start"].model_copy(update={"run_sha256": log.run_sha256}).to_bytes())
    start = log.start()
    assert start is not None
    previous = start.sha256
    for round_, author in enumerate(authors, 1):
        void = no_commit(round_, "test", By((author, 1))).model_copy(update={"previous": previous})
        assert views[author].create(keys.commit(round_), void.to_bytes())
        previous = sha256_hex(void.to_bytes())
    return RunLog(SignedStore(stored, {ENV_RUN_KEY: KEY.text()}))


@pytest.mark.parametrize("authors, barred", [((0, 0, 0), (0,)), ((0, 1, 0), (0, 1)), ((0, 1, 2), None)])
def test_whoever_wrote_void_commits_that_made_a_leg_fail_commits_no_more_while_somebody_is_left_who_may(
    authors: tuple[int, ...], barred: tuple[int, ...] | None
):
    """Of three replicas."""
    log = run_with_void_commits(authors)
    stored = getattr(log.store, "beneath", log.store)
    rotation = begin_epoch(log, "user", "test", STAMP)
    assert rotation.no_commits_by == barred
    later = SignedStore(stored, {})
    later.get(keys.RUN)
    assert [may_commit(later, i) for i in range(3)] == [i not in (barred or ()) for i in range(3)]


def test_no_leg_begins_in_which_no_replica_could_commit():
    log = run_with_void_commits((0, 0, 0), max_replicas=4)
    how = {"rounds": None, "from_round": None, "by": "user", "why": "test", "stamp": STAMP}
    with pytest.raises(ConfigError, match="Resume it with more replicas"):
        begin_next_leg(log, **how, change={"replicas": 1})
    assert rotations_of(log.store) == ()


@pytest.mark.parametrize("stop, why", [("halted", "max_cost_usd=5 is reached"), ("failed", "replica 0 failed 4 times")])
def test_a_leg_that_something_else_stops_before_the_halt_for_new_keys_is_not_followed_by_itself(stop: Stop, why: str):
    log = run_with_void_commits()
    request_halt(log, "user", "a key leaked", STAMP, new_keys=True)
    EndOfLeg(log, log.newest_begin(), STAMP).commit_stop(stop, why)
    assert auto_resume(RunLog(log.store), STAMP) is None
    assert rotations_of(log.store) == () and log.newest_leg() == 1


def test_who_halts_a_run_that_halts_for_new_keys_reads_that_it_goes_on():
    log = run_with_void_commits()
    for _ in range(2):
        request_halt(log, "user", "a key leaked", STAMP, new_keys=True)
    with pytest.raises(ConfigError, match="ask again once leg 2 has begun"):
        request_halt(log, "user", "lunch", STAMP)


# -- another user -----------------------------------------------------------------------------------------------------


@pytest.fixture
def colleague(tmp_path: Path) -> dict[str, str]:
    """The environment of another user, who has an identity."""
    environ = {"XDG_STATE_HOME": str(tmp_path / "colleague")}
    assert identity(environ, make=True) == identity(environ, make=False)
    return environ


def test_machines_with_one_home_that_join_at_once_have_one_identity(tmp_path: Path):
    """Sixteen jobs of a Slurm array: one that found the file before its text was in it ended, and said to delete it."""
    for number in range(30):
        environ, ready = {"XDG_STATE_HOME": str(tmp_path / str(number))}, Barrier(16)

        def made(_: int, environ: dict[str, str] = environ, ready: Barrier = ready) -> str:
            ready.wait()
            found = identity(environ, make=True)
            assert found is not None
            return found.public.text()

        with ThreadPoolExecutor(16) as jobs:
            assert len(set(jobs.map(made, range(16)))) == 1
        assert [path.name for path in (tmp_path / str(number)).rglob("*") if path.is_file()] == ["identity"]


def test_a_key_that_does_not_fit_on_the_disk_leaves_no_file_behind(small_disk: Path):
    environ = {"XDG_STATE_HOME": str(small_disk)}
    keep(OTHER_KEY, environ)
    with pytest.raises(OSError, match="No space left"), (small_disk / "others").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    with pytest.raises(ConfigError, match="cannot be kept"):
        keep(KEY, environ)
    (small_disk / "others").unlink()
    assert run_key_of(KEY.signed_by, environ) is None
    keep(KEY, environ)
    assert run_key_of(KEY.signed_by, environ) == KEY


def log_of(store: Store, environ: dict[str, str]) -> RunLog:
    return RunLog(SignedStore(getattr(store, "beneath", store), environ))


def test_a_certified_colleague_supervises_with_a_key_of_its_own(colleague: dict[str, str]):
    fleet, user = Fleet(), identity(colleague, make=False)
    with pytest.raises(ConfigError, match="needs keys of"):
        SignedStore(fleet.stored, colleague).create(keys.begin(1), EXAMPLES["begin"].to_bytes())
    certify(log_of(fleet.stored, {ENV_RUN_KEY: KEY.text()}), user.public.text(), "user", STAMP)
    theirs = SignedStore(fleet.stored, colleague)
    assert theirs.create(keys.begin(1), EXAMPLES["begin"].to_bytes())
    assert all(view.get(keys.begin(1)) == EXAMPLES["begin"].to_bytes() for view in fleet.views())
    attempt = theirs.operator.of_attempt(fleet.run_sha256, 1, 1)
    launched = SignedStore(fleet.stored, {ENV_ATTEMPT_KEY: attempt.text()})
    assert launched.create(keys.contribution(7, 1), MANIFEST.to_bytes())
    assert all(view.get(keys.contribution(7, 1)) == MANIFEST.to_bytes() for view in fleet.views())
    assert user.signing.private_bytes_raw() not in b"".join(
        fleet.stored.get(info.key) for info in fleet.stored.list("")
    )


def test_a_certificate_is_for_one_user_and_ends_with_a_rotation(colleague: dict[str, str], tmp_path: Path):
    fleet, user = Fleet(), identity(colleague, make=False)
    stranger = {"XDG_STATE_HOME": str(tmp_path / "stranger")}
    identity(stranger, make=True)
    launcher = {ENV_RUN_KEY: KEY.text()}
    record = certify(log_of(fleet.stored, launcher), user.public.text(), "user", STAMP)
    with pytest.raises(ConfigError, match="needs keys of"):
        SignedStore(fleet.stored, stranger).create(keys.begin(1), EXAMPLES["begin"].to_bytes())
    with pytest.raises(ConfigError, match="cannot be opened"):
        identity(stranger, make=False).opened(fleet.run_sha256, record.sealed)
    SignedStore(fleet.stored, launcher).create(keys.rotation(2), ROTATION.to_bytes())
    with pytest.raises(ConfigError, match="needs keys of"):
        SignedStore(fleet.stored, colleague).create(keys.begin(2), EXAMPLES["begin"].to_bytes())
    certify(log_of(fleet.stored, launcher), user.public.text(), "user", STAMP)
    assert SignedStore(fleet.stored, colleague).create(keys.begin(2), EXAMPLES["begin"].to_bytes())


@pytest.mark.parametrize("line", ["", "diloco-user-", "diloco-user-" + "A" * 85, "ed25519:" + "A" * 43, KEY.text()])
def test_a_line_that_is_no_identity_is_refused(line: str):
    with pytest.raises(ConfigError, match="no identity of a user") as found:
        certify(log_of(Fleet().stored, {ENV_RUN_KEY: KEY.text()}), line, "user", STAMP)
    assert KEY.text() not in str(found.value)


def test_who_has_an_operators_keys_certifies_and_rotates_nothing():
    fleet = Fleet()
    log = log_of(fleet.stored, {ENV_RUN_KEY: KEY.operator(fleet.run_sha256).text()})
    with pytest.raises(ConfigError, match="needs the run's own key"):
        certify(log, "diloco-user-" + "A" * 86, "user", STAMP)


def test_verify_tells_a_log_that_is_not_the_one_before_the_rotation(tmp_path: Path):
    """As who has stolen the keys of before and may overwrite could write it anew."""
    folder = tmp_path / "run"
    keep_key(KEY)
    run = Run.from_bytes(Fleet().stored.get(keys.RUN), keys.RUN)
    log = create_run(of_run(open_store(str(folder))), run, "launch", STAMP)
    assert verify_run(of_run(open_store(str(folder)))).agrees
    assert log.store.create(keys.rotation(2), ROTATION.to_bytes())
    found = verify_run(of_run(open_store(str(folder)))).disagreement
    assert found is not None and found.key == keys.rotation(2)
