"""`verify` where torch is not installed: checks log, guard and digests, and says of no run that it agrees."""

import sys

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.inspection.verify import Verification, verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.replica.training.tensor_tree import state_file
from diloco_orchestrator.store.memory import MemoryStore
from replica.rounds.interface import ContributionFields


@pytest.fixture(scope="module")
def finished() -> dict[str, bytes]:
    """Every object of a run of four rounds with scores, states and snapshots."""
    fleet = Fleet(replicas=2, rounds=4, snapshot_every=2, scored=True)
    participants = fleet.join_all()
    for round_ in range(1, 6):
        made = [report(share=i, score=0.5 + 0.01 * round_, in_loop=0.5) for i in (0, 1)]
        fields = [ContributionFields(**{**vars(each), "state": state_file({"of": i})}) for i, each in enumerate(made)]
        play(participants, [1.0, -0.5 * round_], fields)
        for participant in participants:
            participant.write_snapshot_if_due()
    for participant in participants:
        participant.finish_leg()
    return {info.key: fleet.store.get(info.key) for info in fleet.store.list("")}


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No import of torch succeeds: a name that is None in sys.modules cannot be imported."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "diloco_orchestrator.inspection.verify.tensors", raising=False)


def verified(objects: dict[str, bytes]) -> Verification:
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return verify_run(store)


def test_all_is_checked_but_the_tensors_and_the_run_is_not_said_to_agree(finished, no_torch):
    done = verified(finished)
    assert done.disagreement is None and not done.agrees and not done.to_json()["agrees"]
    assert done.not_derived == "averages, outer steps, bases, and the tensors of snapshots: needs torch"
    assert done.checked["rounds"] == 5 and done.checked["manifests"] == 10 and done.checked["payloads and states"] == 16
    files = [key for key in finished if key.startswith("snapshots/") and not key.endswith("snapshot.json")]
    assert done.checked["files of snapshots"] == len(files) == done.unpinned["snapshot files"] > 3
    assert not done.bases and not done.checked["outer steps"] and not done.checked["snapshots"] and not done.notes


@pytest.mark.parametrize(
    "key",
    [
        keys.RUN,
        keys.START,
        keys.begin(1),
        keys.contribution(2, 1),
        keys.state(1, 3, 1),
        keys.payload(3, 0, 1, 0),
        keys.commit(3),
        keys.snapshot(0, "model.safetensors"),
        keys.snapshot(2, "outer.safetensors"),
        keys.result(1),
    ],
)
def test_a_flipped_byte_is_found(finished, key, no_torch):
    data = finished[key]
    at = len(data) // 2
    found = verified({**finished, key: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]}).disagreement
    assert found is not None
    assert found.key == key or not key.startswith(("rounds/00000003/payload", "snapshots/")), found


def test_a_verdict_that_does_not_follow_is_found(finished, no_torch):
    commit = finished[keys.commit(2)].replace(b'"outer_step":2', b'"outer_step":3')
    assert commit != finished[keys.commit(2)]
    found = verified({**finished, keys.commit(2): commit}).disagreement
    assert found is not None and found.key == keys.commit(2) and "its outer_step is 3; 2 follows" in found.words, found


def test_a_snapshot_that_the_log_does_not_confirm_is_noted_if_its_files_differ(finished, no_torch):
    """Of the last base no commit follows that could name it: a reader would not take it."""
    other = {key: data for key, data in finished.items() if not key.startswith("rounds/00000005")}
    other.pop(keys.result(1))
    key = keys.snapshot(4, "model.safetensors")
    done = verified({**other, key: finished[key][:-1] + b"?"})
    assert done.disagreement is None and [note for note in done.notes if note.startswith(key)] == done.notes != []


def test_with_torch_it_goes_on_as_ever(finished):
    done = verified(finished)
    assert done.agrees and not done.not_derived and done.checked["snapshots"] == 3
