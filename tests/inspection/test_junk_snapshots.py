"""`verify` names junk among the snapshots of a run, and goes on to the good ones."""

import sys
from collections.abc import Callable

import pytest
from protocol_fleet import Fleet, play

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import FileInfo, Snapshot
from diloco_orchestrator.store.memory import MemoryStore

ABSENT = FileInfo(digest=bulk_digest(b"nothing"), size=7)
JUNK: dict[str, Callable[[Snapshot], bytes]] = {
    "cannot be read": lambda good: b"junk",
    "of another base": lambda good: good.model_copy(update={"base_digest": bulk_digest(b"another")}).to_bytes(),
    "without files": lambda good: good.model_copy(update={"files": dict.fromkeys(good.files, ABSENT)}).to_bytes(),
    "with a file": lambda good: good.model_copy(update={"files": {**good.files, "evil.py": ABSENT}}).to_bytes(),
}


@pytest.fixture(scope="module")
def finished() -> dict[str, bytes]:
    """Every object of a run of four rounds with a snapshot after each second one."""
    fleet = Fleet(replicas=2, rounds=4, snapshot_every=2)
    participants = fleet.join_all()
    for _ in range(5):
        play(participants, [1.0, 2.0])
        for participant in participants:
            participant.write_snapshot_if_due()
    for participant in participants:
        participant.finish_leg()
    return {info.key: fleet.store.get(info.key) for info in fleet.store.list("")}


def with_junk(finished: dict[str, bytes], round_: int, junk: str, good: bool) -> MemoryStore:
    """The run with junk as the shared version of a round's snapshot; the good one, if there is one, is replica 0's."""
    store, shared = MemoryStore(), keys.snapshot(round_, "")
    record = Snapshot.from_bytes(finished[keys.snapshot(4, keys.SNAPSHOT_RECORD)], "")
    for key, data in finished.items():
        if not key.startswith(shared):
            store.put(key, data)
        elif good:
            store.put(keys.snapshot(round_, key.removeprefix(shared), keys.own_take(0)), data)
    store.put(keys.snapshot(round_, keys.SNAPSHOT_RECORD), JUNK[junk](record.model_copy(update={"round": round_})))
    return store


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("round_", [2, 3, 4])
@pytest.mark.parametrize("torch", [True, False], ids=["", "without torch"])
def test_junk_that_sorts_before_the_good_snapshot_is_noted(finished, round_, junk, torch, monkeypatch):
    """`verify` disagreed. Of round 3 the run has no snapshot, and needs none."""
    if not torch:
        monkeypatch.setitem(sys.modules, "torch", None)
        monkeypatch.delitem(sys.modules, "diloco_orchestrator.inspection.verify.tensors", raising=False)
    done = verify_run(with_junk(finished, round_, junk, good=True))
    assert done.disagreement is None
    said = [each for each in (*done.notes, *done.unreadable) if each.startswith(keys.snapshot(round_, ""))]
    assert said, (done.notes, done.unreadable)
    if torch:
        assert done.bases == {0, 1, 2, 3, 4} and done.checked["snapshots"] == 3


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("round_", [2, 4])
def test_junk_in_the_place_of_the_only_snapshot_of_a_round_is_a_disagreement(finished, round_, junk):
    done = verify_run(with_junk(finished, round_, junk, good=False))
    found = done.disagreement
    assert found is not None and found.key.startswith(keys.snapshot(round_, "")), found


def test_junk_in_a_round_that_left_no_base_is_named(finished):
    for round_ in (5, 999):
        done = verify_run(with_junk(finished, round_, "cannot be read", good=False))
        assert done.disagreement is None and done.unreadable[0].startswith(keys.snapshot(round_, ""))
