"""Attacks on snapshots: nobody gets another model from the bucket than the log says.

Those by one compromised replica only create objects, and only those that infra/iam/one-replica.json allows.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from iam_server import Question, allows
from long_history import RequestCounter
from protocol_fleet import MODEL, Fleet, answer, play, tiny_model
from stored_snapshots import OUTER

from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.verify.loading import OwnCode, SnapshotLoader
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import FileInfo, Retention, Snapshot
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds.participant import Participant

STAMP = Stamp("attacker", lambda: 0.0)
ATTACKER = 2  # of three replicas
POLICY = (Path(__file__).parents[2] / "infra" / "iam" / "one-replica.json").read_text()
EVIL = b"print('run by who trusts this folder')"


class OneReplica(MemoryStore):
    """The store as one compromised replica has it: it creates what its policy allows, and changes nothing."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.url)
        self._store = store
        self._policy = json.loads(POLICY.replace("REPLICA", str(ATTACKER)))

    def create(self, key: str, data: bytes) -> bool:
        asked = Question("s3:PutObject", f"arn:aws:s3:::BUCKET/PREFIX/{key}", {})
        return allows(self._policy, asked) and self._store.create(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._store.get(key, start, end)

    def list(self, prefix: str, start_after: str = ""):
        return self._store.list(prefix, start_after)

    def put(self, key: str, data: bytes) -> None:
        raise AssertionError("a replica's policy allows no overwriting")

    delete = put  # type: ignore[assignment]


def running(dtype: torch.dtype = torch.float32) -> tuple[Fleet, list[Participant], OneReplica]:
    """A run of four rounds with a snapshot after each second one; nothing of it is committed yet."""
    fleet = Fleet(replicas=3, rounds=4, snapshot_every=2)
    participants = [fleet.join(replica_id, model=tiny_model(dtype=dtype)) for replica_id in range(3)]
    return fleet, participants, OneReplica(fleet.store)


def go_on(participants: list[Participant], rounds: int) -> None:
    for round_ in range(rounds):
        play(participants, [1.0, 2.0 + round_, 0.5])
        for participant in participants:
            participant.write_snapshot_if_due()


def finish(participants: list[Participant]) -> None:
    for participant in participants:
        participant.finish_leg()


def finished(dtype: torch.dtype = torch.float32) -> tuple[Fleet, list[Participant]]:
    fleet, participants, _ = running(dtype)
    go_on(participants, 5)
    finish(participants)
    return fleet, participants


def forged_base(participant: Participant) -> Base:
    """A base that no round made, with finite values."""
    base = participant.base.copy()
    for shard in base.shards(0):
        shard.parameters.fill_(7.0)
    return base


def forged_snapshot(store: Store, participant: Participant, round_: int, by: int) -> str:
    """A complete snapshot of a base that no round made; its digest."""
    base = forged_base(participant)
    write_snapshot(store, round_, base, base.digest(), participant._snapshots._files, STAMP, by=by)
    return base.digest()


def forged_replay(store: Store, round_: int, digest: str) -> None:
    """The record with which earlier versions said that they had rebuilt a base."""
    replay = {"record": "replay", "schema_version": 2, "round": round_, "base_digest": digest, "snapshot_round": 0}
    replay |= {"by": "replica 1, attempt 1", "write_id": "x", "at": 0.0}
    line = json.dumps(replay, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    store.create(f"snapshots/{keys.round_name(round_)}/replays/x.json", line)


def pulled(fleet: Fleet, folder: Path, round_: int | None = None) -> dict[str, bytes]:
    copy_model(RunLog(fleet.store), folder, round_)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bias(files: dict[str, bytes]) -> torch.Tensor:
    return safetensors.torch.load(files[MODEL])["bias"]


def is_model_of(files: dict[str, bytes], participant: Participant, dtype: torch.dtype = torch.float32) -> bool:
    tensors = safetensors.torch.load(files[MODEL])
    return all(torch.equal(tensors[name], value.to(dtype)) for name, value in participant.base.parameters.items())


def replaced(store: Store, round_: int, name: str, data: bytes) -> None:
    """Write a file of a snapshot anew, and its digest into the record."""
    key = keys.snapshot(round_, keys.SNAPSHOT_RECORD)
    record = Snapshot.from_bytes(store.get(key), key)
    files = {**record.files, name: FileInfo(digest=bulk_digest(data), size=len(data))}
    store.put(keys.snapshot(round_, name), data)
    store.put(key, record.model_copy(update={"files": files}).to_bytes())


# -- another model in a snapshot ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("evil", ["other values", "no tensors"])
def test_a_model_file_that_was_replaced_with_its_digest_reaches_nobody(tmp_path, dtype, evil):
    fleet, participants = finished(dtype)
    data = fleet.store.get(keys.snapshot(4, MODEL))
    tensors = {name: torch.full_like(each, 7.0) for name, each in safetensors.torch.load(data).items()}
    replaced(fleet.store, 4, MODEL, safetensors.torch.save(tensors) if evil == "other values" else b"a pickle")
    assert is_model_of(pulled(fleet, tmp_path / "model"), participants[0], dtype)
    assert not verify_run(fleet.store).agrees


def test_outer_momenta_that_were_replaced_with_their_digest_reach_nobody(tmp_path):
    fleet, participants = finished()
    tensors = safetensors.torch.load(fleet.store.get(keys.snapshot(4, OUTER)))
    replaced(fleet.store, 4, OUTER, safetensors.torch.save({name: each + 1 for name, each in tensors.items()}))
    files = pulled(fleet, tmp_path / "model")
    momenta = safetensors.torch.load(files[OUTER])
    assert all(torch.equal(momenta[f"momentum.{name}"], each) for name, each in participants[0].base.momenta.items())


def test_where_the_base_cannot_be_derived_any_more_no_model_is_handed_out(tmp_path):
    fleet, _ = finished()
    data = fleet.store.get(keys.snapshot(4, MODEL))
    tensors = {name: torch.full_like(each, 7.0) for name, each in safetensors.torch.load(data).items()}
    replaced(fleet.store, 4, MODEL, safetensors.torch.save(tensors))
    for info in list(fleet.store.list("rounds/00000004/payload/")):
        fleet.store.delete(info.key)
    with pytest.raises((RecordInvalid, PayloadCorrupt)):
        pulled(fleet, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("closed", [True, False], ids=["after the final evaluation round", "before it"])
def test_one_replica_that_forges_the_last_snapshot_early_with_a_replay_gives_nobody_its_model(tmp_path, closed):
    fleet, participants, attacker = running()
    go_on(participants, 1)
    forged_replay(attacker, 4, forged_snapshot(attacker, participants[0], 4, by=0))
    go_on(participants, 4 if closed else 3)
    if closed:
        finish(participants)
        assert ConfirmedSnapshots(RunLog(fleet.store)).take_of(4) == "r0"
    files = pulled(fleet, tmp_path / "model", 4)
    assert is_model_of(files, participants[0]) and not torch.all(bias(files) == 7.0)


def test_a_claim_of_the_forged_base_under_the_attackers_name_confirms_nothing(tmp_path):
    fleet, participants, attacker = running()
    digest = forged_snapshot(attacker, participants[0], 2, by=0)
    go_on(participants, 2)
    said = answer(participants[ATTACKER], 1.0)
    for participant in participants[:2]:
        answer(participant, 1.0)
    forged = said.model_copy(update={"base_digest": digest})
    fleet.store.put(keys.contribution(3, ATTACKER), forged.to_bytes())  # as it would have published it at first
    assert is_model_of(pulled(fleet, tmp_path / "model"), participants[0])
    assert fleet.join(0).digest == participants[0].digest


def test_after_a_halt_a_leg_does_not_start_from_a_forged_base():
    fleet, participants, attacker = running()
    forged_replay(attacker, 3, forged_snapshot(attacker, participants[0], 3, by=0))
    go_on(participants, 2)
    request_halt(RunLog(fleet.store), "test", "lunch", STAMP)
    go_on(participants, 1)
    finish(participants)
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    again = [fleet.join(replica_id) for replica_id in range(3)]
    assert {each.digest for each in again} == {participants[0].digest}


def test_a_finished_run_whose_last_snapshot_was_forged_is_resumed_from_what_the_log_says():
    fleet, participants = finished()
    for info in list(fleet.store.list(keys.snapshot(4, ""))):
        fleet.store.delete(info.key)
    forged_replay(fleet.store, 4, forged_snapshot(fleet.store, participants[0], 4, by=0))
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    again = [fleet.join(replica_id) for replica_id in range(3)]
    assert {each.digest for each in again} == {participants[0].digest}


def test_a_leg_that_names_another_base_than_the_log_is_found():
    fleet, participants = finished()
    digest = forged_snapshot(fleet.store, participants[0], 4, by=1)
    begin = begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    assert verify_run(fleet.store).agrees and begin.base_digest == participants[0].digest
    fleet.store.put(keys.begin(2), begin.model_copy(update={"base_digest": digest}).to_bytes())
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.begin(2) and found.words.startswith("base_digest is")


# -- files beside the model -------------------------------------------------------------------------------------------

BESIDE: dict[str, Callable[[Store], None]] = {
    "added": lambda store: store.put(keys.snapshot(4, "pytorch_model.bin"), EVIL),
    "added with its digest": lambda store: replaced(store, 4, "modeling_evil.py", EVIL),
    "changed with its digest": lambda store: replaced(store, 4, "README.md", EVIL),
    "changed": lambda store: store.put(keys.snapshot(4, "README.md"), EVIL),
    "added to the first one": lambda store: replaced(store, 0, "config.json", EVIL),
    "changed in the first one": lambda store: replaced(store, 0, "README.md", EVIL),
    "in a folder below": lambda store: store.put(keys.snapshot(4, "onnx/model.onnx"), EVIL),
    "beside an unfinished one": lambda store: store.put(keys.snapshot(2, "modeling_evil.py", "r1"), EVIL),
}


@pytest.mark.parametrize("change", BESIDE.values(), ids=BESIDE)
def test_a_file_beside_the_model_that_was_added_or_changed_is_named_and_not_pulled(tmp_path, change):
    fleet, _ = finished()
    honest = pulled(fleet, tmp_path / "honest")
    change(fleet.store)
    assert pulled(fleet, tmp_path / "model") == honest
    done = verify_run(fleet.store)
    assert done.disagreement is not None and done.disagreement.key.startswith(keys.SNAPSHOTS)


@pytest.mark.parametrize("round_", [0, 2])
def test_a_readme_that_one_replica_creates_first_is_adopted_by_nobody(tmp_path, round_):
    fleet = Fleet(replicas=3, rounds=4, snapshot_every=2)
    attacker = OneReplica(fleet.store)
    assert attacker.create(keys.snapshot(round_, "README.md"), EVIL)
    participants = fleet.join_all()
    go_on(participants, 5)
    finish(participants)
    files = pulled(fleet, tmp_path / "model")
    assert files["README.md"].startswith(b"The tensors of a `Linear`")
    later = ConfirmedSnapshots(RunLog(fleet.store))
    assert later.take_of(2) == ("r0" if round_ else "") and later.take_of(4) == ""
    done = verify_run(fleet.store)
    assert done.agrees and len(done.missing) == 1  # half of a snapshot that nobody finished
    assert done.missing[0].startswith(keys.snapshot(round_, keys.SNAPSHOT_RECORD))


def test_a_replica_whose_libraries_write_other_side_files_writes_those_of_the_run():
    fleet, participants, _ = running()
    files = participants[0]._snapshots._files
    participants[0]._snapshots._files = ModelFiles(files.dtypes, files.rest, {"README.md": b"v2"}, files.naming)
    go_on(participants, 3)
    assert fleet.store.get(keys.snapshot(2, "README.md")) == files.extra["README.md"]
    assert verify_run(fleet.store).agrees


# -- junk where snapshots will be -------------------------------------------------------------------------------------


def junk_in_every_take(store: Store, names: tuple[str, ...]) -> int:
    """How many of the objects that later snapshots would be could be created."""
    takes = ["", "2", "3", "4", "rebuilt", *map(keys.own_take, range(3))]
    made = [
        store.create(keys.snapshot(round_, name, take), EVIL) for round_ in (2, 4) for take in takes for name in names
    ]
    return sum(made)


@pytest.mark.parametrize("names", [(MODEL,), (keys.SNAPSHOT_RECORD,), (MODEL, OUTER, keys.SNAPSHOT_RECORD)])
def test_one_replica_that_puts_junk_into_the_takes_of_coming_snapshots_ends_nobody(tmp_path, names):
    fleet, participants, attacker = running()
    assert junk_in_every_take(attacker, names) == 2 * 2 * len(names)  # the shared take, and its own
    go_on(participants, 5)
    finish(participants)
    assert ConfirmedSnapshots(RunLog(fleet.store)).newest(2, [2, 4]) == [2, 4]
    assert fleet.join(1)._tip.value.snapshot_round == 4
    assert is_model_of(pulled(fleet, tmp_path / "model"), participants[0])


def test_a_record_that_names_a_longer_file_than_one_can_be_has_none_of_it_read():
    """Whoever restarted took as many bytes into memory as there were."""
    store = RequestCounter()
    fleet = Fleet(replicas=2, rounds=9, snapshot_every=2, store=store)
    participants = fleet.join_all()
    for _ in range(3):
        play(participants, [1.0, 2.0])
        participants[0].write_snapshot_if_due()
        participants[0]._snapshots.wait()
    key = keys.snapshot(2, keys.SNAPSHOT_RECORD)
    record = Snapshot.from_bytes(store.get(key), key)
    files = {name: info.model_copy(update={"size": 2**40}) for name, info in record.files.items()}
    store.put(key, record.model_copy(update={"files": files}).to_bytes())
    store.forget()
    joined = fleet.join(1)
    assert joined.digest == participants[0].digest and joined._tip.value.snapshot_round == 0
    assert {each for each in store.gets if each.startswith(keys.snapshot(2, ""))} == {key}


def test_one_shard_of_another_layout_ends_nobody():
    fleet, participants, attacker = running()
    for round_ in (2, 4):
        assert attacker.create(keys.snapshot(round_, "model-00001-of-00002.safetensors"), EVIL)
    go_on(participants, 5)
    finish(participants)
    assert ConfirmedSnapshots(RunLog(fleet.store)).newest(2, [2, 4]) == [2, 4]


@pytest.mark.slow  # each replica waits half a minute for the snapshot of one with a lower id
def test_where_no_snapshot_can_be_written_the_run_goes_on_with_a_warning(tmp_path, caplog):
    """Somebody who may create everything below the run's prefix has used all takes."""
    fleet, participants, _ = running()
    junk_in_every_take(fleet.store, (MODEL, keys.SNAPSHOT_RECORD))
    with caplog.at_level(logging.WARNING):
        go_on(participants, 5)
        finish(participants)
    assert "the run goes on without snapshot 2" in caplog.text
    result = RunLog(fleet.store).result(1)
    assert result is not None and result.status == "completed"
    assert is_model_of(pulled(fleet, tmp_path / "model"), participants[0])
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    assert fleet.join(0).digest == participants[0].digest


def test_a_take_that_says_the_right_base_and_holds_another_is_passed_over(tmp_path):
    """One replica knows the digest as soon as the others, and may be first with a record that names it."""
    fleet, participants, attacker = running()
    go_on(participants[:], 1)
    play(participants, [1.0, 3.0, 0.5])
    digest = participants[0].digest
    forged = forged_base(participants[0])
    files = {each.name: each.encode() for each in participants[0]._snapshots._files.planned(forged)}
    infos = {name: FileInfo(digest=bulk_digest(data), size=len(data)) for name, data in files.items()}
    for take in (keys.SHARED_TAKE, keys.own_take(ATTACKER)):
        for name, data in files.items():
            assert attacker.create(keys.snapshot(2, name, take), data)
        record = Snapshot(**STAMP(), round=2, base_digest=digest, by=0, files=infos)
        assert attacker.create(keys.snapshot(2, keys.SNAPSHOT_RECORD, take), record.to_bytes())
    participants[0].write_snapshot_if_due()
    go_on(participants, 1)
    assert ConfirmedSnapshots(RunLog(fleet.store)).takes_of(2) == ["", "r0", "r2"]
    again = fleet.join(1)
    assert (again.digest, again._tip.value.snapshot_round) == (participants[0].digest, 2)
    assert torch.equal(bias(pulled(fleet, tmp_path / "model", 3)), participants[0].base.parameters["bias"])
    assert not torch.all(bias(pulled(fleet, tmp_path / "two", 2)) == 7.0)


# -- what was removed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["/payload/1/", "/payload/"])
def test_payloads_removed_by_hand_are_named_where_the_run_keeps_all(what):
    fleet, _ = finished()
    for info in list(fleet.store.list("rounds/")):
        if what in info.key and info.key < "rounds/00000003":
            fleet.store.delete(info.key)
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.words == "is gone, though the run keeps all payloads and states: deleted by hand"


def test_payloads_that_a_collection_with_wider_settings_removed_are_collected():
    fleet, _ = finished()
    fleet.store.create(keys.RETENTION, Retention(**STAMP(), payloads="needed", by="diloco gc").to_bytes())
    for info in list(fleet.store.list("rounds/00000001/payload/")):
        fleet.store.delete(info.key)
    done = verify_run(fleet.store)
    assert done.agrees and done.unpinned["retention"] == 1 and "averages of 2 rounds" in done.unchecked[0]


def test_loading_of_verify_takes_the_model_of_the_checked_base(tmp_path):
    fleet, _ = finished()
    replaced(fleet.store, 4, "config.json", b'{"architectures": ["GPT2LMHeadModel"]}')
    done = verify_run(fleet.store)
    SnapshotLoader(RunLog(fleet.store), fleet.start(), OwnCode(tiny_model)).check_all(done)
    assert done.checked["snapshots loaded"] == 3
