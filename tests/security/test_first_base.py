"""Attacks on the first base by one compromised replica, which creates what its own credentials allow and no more.

`Creates` is such a replica's way to the bucket: infra/iam/one-replica.json says what it may create.
"""

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from iam_server import Question, allows
from protocol_fleet import BY_HAND, Fleet, HurriedClock, play, tiny_model, together

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import FirstBaseOutvoted, ModelMismatch, StoreDenied
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Intent
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.first_base import chosen_start, decide_start
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, FileInfo, Snapshot
from diloco_orchestrator.protocol.start_records import Began, Follows, Start
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot
from diloco_orchestrator.snapshots.layout import ModelFiles, describe
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.retrying import RetryingStore

POLICY = (Path(__file__).parents[2] / "infra" / "iam" / "one-replica.json").read_text()
STAMP = Stamp("attacker", lambda: 0.0)
ATTACKER = 2  # of three replicas


def launch(fleet: Fleet) -> None:
    """Write the intents of all replicas, as a coordinator does before the first of them has started."""
    for replica_id in range(fleet.replicas):
        intent = Intent(**STAMP(), replica_id=replica_id, attempt=1, leg=1, executor="test", why="test")
        fleet.store.create(keys.intent(replica_id, 1), intent.to_bytes())


class OfOneReplica(MemoryStore):
    """A store as the credentials of one replica have it, which create what infra/iam/one-replica.json allows."""

    def __init__(self, store: Store, replica_id: int) -> None:
        super().__init__(store.url)
        self._store = store
        self._policy = json.loads(POLICY.replace("REPLICA", str(replica_id)))
        self.get, self.list = store.get, store.list  # type: ignore[method-assign]

    def create(self, key: str, data: bytes) -> bool:
        if not allows(self._policy, Question("s3:PutObject", f"arn:aws:s3:::BUCKET/PREFIX/{key}", {})):
            raise StoreDenied(f"replica credentials may not create {key}")
        return self._store.create(key, data)


class Creates:
    """The compromised replica: `create` raises for what its policy does not allow. Nothing is overwritten."""

    def __init__(self, fleet: Fleet, attacker: int = ATTACKER) -> None:
        self.fleet = fleet
        self.attacker = attacker
        self._policy = json.loads(POLICY.replace("REPLICA", str(attacker)))

    def create(self, key: str, data: bytes) -> None:
        question = Question("s3:PutObject", f"arn:aws:s3:::BUCKET/PREFIX/{key}", {})
        assert allows(self._policy, question), f"one replica's credentials cannot create {key}"
        self.fleet.store.create(key, data)

    def forged(self, model: torch.nn.Module) -> tuple[Start, list[tuple[str, bytes]]]:
        """The start that would begin with the values of a model, and the files of its snapshot."""
        base = Base.fresh(trainable(model), self.fleet.config.outer)
        files = [(each.name, each.encode()) for each in ModelFiles.of(model).planned(base)]
        start = Start(
            write_id="start",
            at=0.0,
            run_sha256=sha256_hex(self.fleet.store.get(keys.RUN)),
            parameters=describe(trainable(model)),
            fragments=base.fragments,
            shard_numel=base.shard_numel,
            base_digest=base.digest(),
        )
        return start, files

    def write_snapshot(self, start: Start, files: Sequence[tuple[str, bytes]]) -> None:
        for name, data in files:
            self.create(keys.snapshot(0, name), data)
        infos = {name: FileInfo(digest=bulk_digest(data), size=len(data)) for name, data in files}
        record = Snapshot(**STAMP(), round=0, base_digest=start.base_digest, by=None, files=infos)
        self.create(keys.snapshot(0, keys.SNAPSHOT_RECORD), record.to_bytes())

    def say(self, start: Start, take: str = keys.SHARED_TAKE) -> None:
        """Say that this replica would begin with a start, and follows it, with a take of snapshot 0."""
        who = self.attacker
        given = {"replica_id": who, "attempt": 1, "start_sha256": sha256_hex(start.to_bytes()), "key": keys.START}
        self.create(keys.began(who, 1), Began(**STAMP(), **given).to_bytes())
        self.create(keys.follows(who), Follows(**STAMP(), **given, take=take).to_bytes())


def other_values(attacker: Creates, says_so: bool = False) -> None:
    """Snapshot 0 and start.json of other finite values, before anybody else has written anything."""
    start, files = attacker.forged(tiny_model(seed=99))
    attacker.write_snapshot(start, files)
    attacker.create(keys.START, start.to_bytes())
    if says_so:
        attacker.say(start)


def file_alone(attacker: Creates) -> None:
    _, files = attacker.forged(tiny_model(seed=99))
    attacker.create(keys.snapshot(0, files[0][0]), files[0][1])


def no_numbers(attacker: Creates) -> None:
    model = tiny_model(seed=99)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    start, files = attacker.forged(model)
    attacker.write_snapshot(start, files)
    attacker.create(keys.START, start.to_bytes())
    attacker.say(start)


def junk(names: Sequence[str], attacker: Creates) -> None:
    for name in names:
        attacker.create(name, b"[" * 1000)


def other_frozen(attacker: Creates) -> None:
    """The right values, in a start that names frozen tensors which nobody has."""
    start, files = attacker.forged(tiny_model())
    frozen = {"digest": "b3:" + "0" * 64, "tensors": 1, "size": 4}
    lying = Start.model_validate({**start.model_dump(), "frozen": frozen})
    attacker.write_snapshot(start, files)
    attacker.create(keys.START, lying.to_bytes())
    attacker.say(lying)


def start_alone(attacker: Creates) -> None:
    """The start that everybody would write, with a snapshot whose record is right and whose files are not."""
    start, files = attacker.forged(tiny_model())
    infos = {name: FileInfo(digest=bulk_digest(data), size=len(data)) for name, data in files}
    for name, data in files:
        attacker.create(keys.snapshot(0, name), b"x" * len(data))
    record = Snapshot(**STAMP(), round=0, base_digest=start.base_digest, by=None, files=infos)
    attacker.create(keys.snapshot(0, keys.SNAPSHOT_RECORD), record.to_bytes())
    attacker.create(keys.START, start.to_bytes())


MODEL, RECORD = (keys.snapshot(0, name) for name in ("model.safetensors", keys.SNAPSHOT_RECORD))
OTHER_LAYOUT = keys.snapshot(0, "model-00001-of-00002.safetensors")
ATTACKS: dict[str, Callable[[Creates], None]] = {
    "other values": other_values,
    "other values, with its own voice": partial(other_values, says_so=True),
    "other values in one file": file_alone,
    "NaN": no_numbers,
    "junk in a file": partial(junk, [MODEL]),
    "junk in a file of another layout": partial(junk, [OTHER_LAYOUT]),
    "junk in the record": partial(junk, [RECORD]),
    "junk in start.json": partial(junk, [keys.START]),
    "junk everywhere": partial(
        junk, [MODEL, RECORD, keys.START, keys.began(ATTACKER, 1), keys.follows(ATTACKER), keys.start_take("0" * 16)]
    ),
    "other frozen tensors": other_frozen,
    "the right start without its base": start_alone,
}


@pytest.mark.parametrize("attack", [pytest.param(each, id=name) for name, each in ATTACKS.items()])
def test_one_replicas_creates_neither_choose_the_first_base_nor_stop_the_run(attack):
    fleet = Fleet(replicas=3, rounds=9, quorum=2, clock=HurriedClock())
    launch(fleet)
    attack(Creates(fleet))
    honest = together([partial(fleet.join, i) for i in range(2)])
    own = Base.fresh(trainable(tiny_model()), fleet.config.outer).digest()
    assert {each.digest for each in honest} == {own}
    # The replica whose credentials were stolen starts late, with other values.
    third = fleet.join(ATTACKER, model=tiny_model(seed=7))
    play([*honest, third], [1.0, 0.5, 0.25])
    log = RunLog(fleet.store)
    start = log.start()
    assert start is not None and start.record.base_digest == own == first_snapshot(log).base(start.record).digest()
    assert [commit.applied for commit in log.commits()] == [True]
    done = verify_run(fleet.store)
    found = done.disagreement
    assert found is None or (found.key == OTHER_LAYOUT and "is no file of its snapshot" in found.words), found
    records = {info.key for info in fleet.store.list("") if info.key.endswith(".json")}
    unreadable = {key for key in records if fleet.store.get(key).startswith(b"[")}
    assert {each.partition(": ")[0] for each in done.unreadable} == unreadable
    assert fleet.join(0).digest == honest[0].digest == third.digest


def test_a_start_that_one_replica_adopts_and_names_in_a_first_commit_costs_a_round_and_chooses_no_base():
    fleet, other = Fleet(replicas=3, rounds=9, quorum=2, clock=HurriedClock()), Fleet(replicas=1, rounds=9)
    launch(fleet)
    attacker = Creates(fleet)
    other_values(attacker, says_so=True)
    play([other.join(0)], [0.5])
    commit = Commit.from_bytes(other.store.get(keys.commit(1)), keys.commit(1))
    start = sha256_hex(fleet.store.get(keys.START))
    attacker.create(keys.commit(1), commit.model_copy(update={"previous": start}).to_bytes())
    honest = together([partial(fleet.join, i) for i in range(2)])
    assert [each.digest for each in honest] == [OWN, OWN]
    play([*honest, fleet.join(ATTACKER, model=tiny_model(seed=7))], [1.0, 0.5, 0.25])
    assert [commit.applied for commit in RunLog(fleet.store).commits()] == [False, True]
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.commit(1) and "is void: it follows" in found.words


@pytest.mark.parametrize(
    "take", ["r0", *(pytest.param(each, marks=pytest.mark.slow) for each in ("999999999", "../../x", keys.SHARED_TAKE))]
)
def test_a_take_that_one_of_two_replicas_names_hides_the_first_base_from_nobody(tmp_path, take):
    """It follows the start of all, with junk in the shared take, and names one in which no first base is."""
    fleet = Fleet(replicas=2, rounds=4, quorum=1, clock=HurriedClock())
    launch(fleet)
    start = Fleet(replicas=2, rounds=4, quorum=1).join(1)._attempt.log.start()
    assert start is not None
    attacker = Creates(fleet, attacker=0)
    attacker.create(MODEL, b"junk")
    attacker.create(RECORD, b"junk")
    attacker.say(start.record, take)
    fleet.store = RetryingStore(OfOneReplica(fleet.engine, 1), ManualClock(), random.Random(0))
    honest = fleet.join(1)
    found = RunLog(fleet.store).start()
    assert found is not None and found.sha256 == start.sha256
    assert first_snapshot(RunLog(fleet.store)).base(found.record).digest() == honest.digest == fleet.join(1, 2).digest
    assert copy_model(RunLog(fleet.store), tmp_path / "model", 0) == 0


def test_replicas_that_all_begin_with_other_values_take_one_of_theirs_though_it_may_be_anybodys():
    fleet = Fleet(replicas=3)
    joined = [fleet.join(i, model=tiny_model(seed=i)) for i in range(3)]
    assert len({each.digest for each in joined}) == 1


def test_a_replica_whose_vote_another_process_took_says_so_at_once_and_its_next_attempt_votes():
    """As where a run was removed while its replicas were alive, and another one is launched into the folder."""
    orphan, fleet = Fleet(replicas=1, rounds=5), Fleet(replicas=1)
    orphan.join(0)
    fleet.store.create(keys.START, orphan.store.get(keys.START))
    vote = Began(**STAMP(), replica_id=0, attempt=1, start_sha256="1" * 64, key=keys.start_take("f" * 16))
    fleet.store.create(keys.began(0, 1), vote.to_bytes())
    with pytest.raises(FirstBaseOutvoted, match=r"another process.s, which began with another run .* end them"):
        fleet.join(0, attempt=1)
    assert fleet.join(0, attempt=2).digest == OWN


def test_a_majority_that_agrees_overrules_the_first_start():
    """Replica 0 computes other first values than the two others, and had begun before them."""
    fleet = Fleet(replicas=3, clock=HurriedClock())
    launch(fleet)
    first = fleet.join(0, model=tiny_model(seed=1))
    first._attempt.check_superseded()
    own = Base.fresh(trainable(tiny_model()), fleet.config.outer).digest()
    others = together([partial(fleet.join, replica_id) for replica_id in (1, 2)])
    assert [each.digest for each in others] == [own, own] != [first.digest, own]
    with pytest.raises(FirstBaseOutvoted, match="replica 0 began with other values than more than half"):
        first._attempt.check_superseded()
    assert fleet.join(0, model=tiny_model(seed=1)).digest == own
    found = RunLog(fleet.store).start()
    assert found is not None and found.record.base_digest == own


OWN = Base.fresh(trainable(tiny_model()), OuterConfig()).digest()


def test_of_two_replicas_an_attacker_who_begins_first_chooses_no_base_other_than_the_one_that_was_named():
    """Of two nobody has a majority, and replica 0 would win the tie."""
    fleet = Fleet(replicas=2, rounds=4, quorum=1, first_base=OWN, clock=HurriedClock())
    launch(fleet)
    attacker = Creates(fleet, attacker=0)
    start, files = attacker.forged(tiny_model(seed=99))
    attacker.write_snapshot(start, files)
    attacker.create(keys.START, start.to_bytes())
    attacker.say(start)
    assert fleet.join(1).digest == OWN
    found = RunLog(fleet.store).start()
    assert found is not None and found.record.base_digest == OWN


def test_a_replica_with_another_first_base_than_the_one_named_takes_that_one_over():
    fleet = Fleet(replicas=2, first_base=OWN)
    launch(fleet)
    joined = together([partial(fleet.join, 0, model=tiny_model(seed=1)), partial(fleet.join, 1)])
    assert {each.digest for each in joined} == {OWN}


def test_no_run_begins_while_nobody_has_the_first_base_that_was_named():
    fleet = Fleet(replicas=2, first_base=OWN, timing={**BY_HAND, "startup_timeout_s": 0.05, "poll_s": 0.01})
    launch(fleet)
    with pytest.raises(ModelMismatch, match=f"the run's first_base names {OWN}, and no replica has begun with that"):
        fleet.join(0, model=tiny_model(seed=1))
    assert RunLog(fleet.store).start() is None


def test_strangers_who_are_more_than_the_launched_replicas_choose_no_start():
    """Three of five that followed a start which nobody had ended the launched ones with `FirstBaseOutvoted`, and left
    readers without a start.
    """
    settings = {"invited": [2, 3, 4], "aggregate": "mean", "quorum": 2, "timing": {**BY_HAND, "poll_s": 0.01}}
    fleet = Fleet(replicas=5, **settings)
    for who in (2, 3, 4):
        said = {"replica_id": who, "attempt": 1, "start_sha256": "a" * 64, "key": keys.START}
        fleet.store.create(keys.began(who, 1), Began(**STAMP(), **said).to_bytes())
        fleet.store.create(keys.follows(who), Follows(**STAMP(), **said, take=keys.SHARED_TAKE).to_bytes())
    launched = together([partial(fleet.join, 0), partial(fleet.join, 1)])
    assert [each._attempt.log.starts.outvoted_by() for each in launched] == [None, None]
    strangers = together([partial(fleet.join, who, attempt=2) for who in (2, 3, 4)])
    assert {each.digest for each in (*launched, *strangers)} == {OWN}
    found = RunLog(fleet.store).start()
    assert found is not None and found.record.base_digest == OWN and RunLog(fleet.store).starts.outvoted_by() is None
    play([*launched, *strangers], [1.0] * 5)
    assert verify_run(fleet.store).disagreement is None


@pytest.mark.parametrize(
    ("follows", "replicas", "chosen", "final"),
    [
        ({0: "a"}, 1, "a", True),
        ({0: "a"}, 2, "a", False),
        ({0: "a", 1: "b"}, 2, "a", True),  # of equal ones the lowest replica's
        ({1: "b", 0: "a"}, 2, "a", True),
        ({1: "b", 0: "a", 2: "b"}, 4, "b", False),
        ({1: "b", 2: "b"}, 3, "b", True),
        ({1: "b", 2: "b", 3: "b", 0: "a"}, 5, "b", True),
    ],
)
def test_the_start_that_counts_is_the_one_that_most_follow(follows, replicas, chosen, final):
    found = chosen_start(follows, replicas)
    assert found is not None and (found.sha256, found.final) == (chosen, final)


@pytest.mark.parametrize(
    ("began", "follows", "offered", "replicas", "mine", "waited", "start"),
    [
        ({0: "own"}, {}, [], 1, None, False, "own"),
        ({0: "own"}, {}, ["foreign"], 3, None, False, "own"),  # nobody began with it
        ({0: "own"}, {1: "a"}, ["a"], 3, None, False, None),  # replica 2 may agree with either
        ({0: "own"}, {1: "a"}, ["a"], 3, None, True, "a"),
        ({0: "own", 2: "own"}, {1: "a"}, ["a"], 3, None, False, "own"),
        ({0: "own", 2: "c"}, {1: "a"}, ["a"], 3, None, False, "a"),  # all differ
        ({0: "own"}, {1: "a", 2: "a"}, ["own", "a"], 3, None, False, "a"),
        ({0: "own"}, {0: "a", 1: "b"}, ["a", "b"], 4, "a", False, "a"),  # an earlier attempt's word
        ({0: "own"}, {1: "a"}, ["a", "own"], 3, None, False, "own"),
        ({0: "own"}, {1: "a", 2: "a"}, [], 3, None, False, "own"),  # what most follow is gone
    ],
)
def test_what_a_replica_follows(began, follows, offered, replicas, mine, waited, start):
    decision = decide_start("own", began, follows, offered, replicas, range(replicas), mine, waited)
    assert decision.sha256 == start, decision


def test_a_replica_waits_only_for_those_that_were_launched():
    said: tuple = ({0: "own"}, {1: "a"}, ["a"], 3)
    assert decide_start("own", *said, range(3), None, False).sha256 is None
    assert decide_start("own", *said, (0, 1), None, False).sha256 == "a"
