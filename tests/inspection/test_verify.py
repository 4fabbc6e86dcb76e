"""`verify`: agrees with what runs write, and finds any byte that was changed."""

import json
from collections.abc import Callable

import pytest
from protocol_fleet import Fleet, answer, play, report, tiny_model

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection.verify.chain import Verification, verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import FileInfo, Halt, Retention, Snapshot
from diloco_orchestrator.replica.training.tensor_tree import state_file
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from replica.rounds.interface import ContributionFields

STAMP = Stamp("test", lambda: 0.0)


def reports(round_: int, scored: bool = True) -> list[ContributionFields]:
    """Two replicas that score and save a state."""
    made = [report(share=i, score=0.5 + 0.01 * round_ if scored else None, in_loop=0.5) for i in (0, 1)]
    return [ContributionFields(**{**vars(each), "state": state_file({"of": i})}) for i, each in enumerate(made)]


@pytest.fixture(scope="module")
def finished() -> dict[str, bytes]:
    """Every object of a run of four rounds with scores, states and snapshots."""
    fleet = Fleet(replicas=2, rounds=4, snapshot_every=2, scored=True)
    participants = fleet.join_all()
    for round_ in range(1, 6):
        play(participants, [1.0, -0.5 * round_], reports(round_))
        for participant in participants:
            participant.write_snapshot_if_due()
    for participant in participants:
        participant.finish_leg()
    return {info.key: fleet.store.get(info.key) for info in fleet.store.list("")}


def store_of(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return store


def found(store: Store) -> tuple[str, str]:
    done = verify_run(store)
    assert done.disagreement is not None
    return done.disagreement.key, done.disagreement.words


def test_a_finished_run_agrees_down_to_the_last_byte(finished):
    done = verify_run(store_of(finished))
    assert done.agrees and done.unchecked == []
    assert done.checked["rounds"] == 5 and done.checked["outer steps"] == 4 and done.checked["manifests"] == 10
    assert done.checked["payloads and states"] == 16 and done.checked["snapshots"] == 3


PINNED = [
    keys.RUN,
    keys.START,
    keys.begin(1),
    keys.contribution(2, 1),
    keys.state(1, 3, 1),
    keys.payload(3, 0, 1, 0),
    keys.commit(1),
    keys.commit(3),
    keys.commit(5),
    keys.snapshot(2, "model.safetensors"),
    keys.snapshot(4, "outer.safetensors"),
    keys.snapshot(2, "snapshot.json"),
    keys.result(1),
]


@pytest.mark.parametrize("key", PINNED)
def test_a_flipped_byte_anywhere_in_an_object_is_found(finished, key):
    """A byte near the beginning, in the middle and near the end, and every digit of a digest."""
    data = finished[key]
    for at in (len(data) // 9, len(data) // 2, len(data) - 2):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if key.endswith("snapshot.json") and b'"at":' in data[at - 20 : at + 4]:
            continue  # when it was written is told to people, and nothing depends on it
        done = verify_run(store_of({**finished, key: changed}))
        assert not done.agrees, f"byte {at} of {key}"
        assert done.disagreement is not None and done.disagreement.words


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (keys.contribution(2, 1), "is missing, though the commit of round 2 names it"),
        (keys.commit(3), "is missing, though rounds/00000004/commit.json is there"),
        (keys.snapshot(2, "model.safetensors"), ""),
        (keys.begin(1), "is missing"),
    ],
)
def test_an_object_that_is_gone_is_named(finished, key, words):
    assert found(store_of({k: v for k, v in finished.items() if k != key}))[1].startswith(words)


def test_of_a_half_deleted_run_it_is_told_what_is_missing_and_which_models_can_still_be_had(finished):
    left = {k: v for k, v in finished.items() if not k.startswith(("rounds/00000002", "rounds/00000003"))}
    done = verify_run(store_of(left))
    assert done.disagreement is not None and done.disagreement.key == keys.commit(2)
    assert "is missing" in done.disagreement.words and done.bases == {0, 1, 2, 4}
    del left[keys.snapshot(4, "outer.safetensors")]
    assert verify_run(store_of(left)).bases == {0, 1, 2}


def test_a_snapshot_of_another_model_is_found(finished):
    other = Fleet(replicas=1)
    other.join(0, model=tiny_model(seed=9))
    files = {k: other.store.get(k) for k in (keys.snapshot(0, n) for n in ("model.safetensors", "snapshot.json"))}
    key, words = found(store_of({**finished, **files}))
    assert key == keys.snapshot(0, "model.safetensors") and words.startswith("its digest is")


def test_a_changed_file_beside_the_model_is_found(finished):
    """A README, a tokenizer: no base depends on them, and whoever loads the snapshot does."""
    key, file = keys.snapshot(2, keys.SNAPSHOT_RECORD), keys.snapshot(2, "README.md")
    assert file in found(store_of({**finished, file: b"other words"}))[1]
    assert file in found(store_of({k: v for k, v in finished.items() if k != file}))[1]
    record = Snapshot.from_bytes(finished[key], key)
    files = {**record.files, "README.md": FileInfo(digest=bulk_digest(b"other words"), size=11)}
    objects = {**finished, key: record.model_copy(update={"files": files}).to_bytes(), file: b"other words"}
    key, words = found(store_of(objects))
    assert key == file and words.startswith("its digest is") and "start.json says" in words
    added = keys.snapshot(2, "modeling_evil.py")
    assert found(store_of({**finished, added: b"import os"}))[0] == added


def test_a_log_whose_end_was_cut_off_is_found(finished):
    left = {k: v for k, v in finished.items() if not k.startswith("rounds/00000005")}
    assert found(store_of(left)) == (keys.result(1), "is there, though round 4, the last one, stopped nothing")
    left = {k: v for k, v in left.items() if not k.startswith(("rounds/", "snapshots/00000002", "snapshots/00000004"))}
    assert found(store_of(left))[0] == keys.result(1)


def test_a_payload_deleted_by_hand_is_no_collected_one(finished):
    key = keys.payload(3, 0, 1, 0)
    words = found(store_of({k: v for k, v in finished.items() if k != key}))[1]
    assert words == "is gone, though the run keeps all payloads and states: deleted by hand"
    collecting = {**finished, keys.RETENTION: Retention(**STAMP(), payloads="needed", by="diloco gc").to_bytes()}
    words = found(store_of({k: v for k, v in collecting.items() if k != key}))[1]
    assert words == "is gone, though fewer than 2 snapshots come after round 3: deleted by hand"


def test_a_snapshot_that_a_leg_starts_from_is_missed(finished):
    left = {k: v for k, v in finished.items() if not k.startswith("snapshots/00000000/")}
    assert found(store_of(left)) == (keys.snapshot(0, "snapshot.json"), "is missing; leg 1 starts from it")


def test_a_payload_that_cannot_be_averaged_is_told_and_no_crash(finished):
    manifest = json.loads(finished[keys.contribution(3, 1)])
    manifest["payload"]["numel"] = 11
    data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    def point(commit: dict) -> None:
        commit["answers"][1]["manifest_sha256"] = sha256_hex(data)

    assert "cannot be averaged" in forge({**finished, keys.contribution(3, 1): data}, 3, point)[1]


class Collected(MemoryStore):
    """A snapshot is collected while the log is read."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if key == keys.commit(4):
            for info in list(self.list("snapshots/00000002/")):
                self.delete(info.key)
        return super().get(key, start, end)


def test_a_snapshot_that_is_collected_meanwhile_is_no_disagreement(finished):
    store = Collected()
    for key, data in finished.items():
        store.put(key, data)
    done = verify_run(store)
    assert done.agrees and done.checked["snapshots"] == 2


def test_collected_payloads_are_told_apart_from_checked_ones(finished):
    finished = {**finished, keys.RETENTION: Retention(**STAMP(), payloads="needed", by="diloco gc").to_bytes()}
    left = {k: v for k, v in finished.items() if "rounds/00000001/payload" not in k and "rounds/00000002/pay" not in k}
    done = verify_run(store_of(left))
    assert done.agrees and done.checked["outer steps"] == 2
    assert done.unchecked == [
        "the averages of 2 rounds (1 to 2): their payloads were deleted by retention; "
        "the next snapshots agree with the log"
    ]


def test_a_commit_rewritten_with_its_whole_tail_is_found_by_the_arithmetic(finished):
    """Somebody with write access forges a round and mends every digest after it."""
    objects, previous = dict(finished), ""
    for round_ in range(2, 6):
        commit = json.loads(objects[keys.commit(round_)])
        if round_ == 2:
            commit["answers"][1]["averaged"] = False
        else:
            commit["previous"] = previous
        objects[keys.commit(round_)] = json.dumps(commit, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        previous = sha256_hex(objects[keys.commit(round_)])
    key, words = found(store_of(objects))
    assert key == keys.commit(2) and words.startswith("is void: its who is averaged is [0]; [0, 1] follows")


def forge(finished: dict[str, bytes], round_: int, change: Callable[[dict], None]) -> tuple[str, str]:
    """A commit changed, alone in a log that ends with it."""
    objects = {k: v for k, v in finished.items() if not k.startswith("rounds/") or int(k.split("/")[1]) <= round_}
    objects = {k: v for k, v in objects.items() if "result" not in k and not k.startswith("snapshots/00000004")}
    commit = json.loads(objects[keys.commit(round_)])
    change(commit)
    objects[keys.commit(round_)] = json.dumps(commit, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return found(store_of(objects))


def leave_out(commit: dict, replica_id: int) -> None:
    """Name a replica's contribution as one of another base, so that a round of two averages nobody."""
    commit["answers"][replica_id]["kind"] = "wrong_base"
    for each in commit["answers"]:
        each["averaged"] = False
    commit.update(applied=False, outer_step=2, empty_rounds=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(base_digest="b3:" + "0" * 64), "base_digest is "),
        (lambda c: c.update(applied=False, outer_step=2), "is void: its applied is False; True follows"),
        (lambda c: c["guard"].update(n=99), "is void: its guard is not what the scores in its manifests give"),
        (lambda c: c["verdict"].update(value=0.9), "is void: its verdict is not what the scores in its manifests give"),
        (lambda c: c.update(stop="completed"), "is void: its stop is 'completed', after 2 of 4 outer steps"),
        (lambda c: c.update(stop="halted"), "halts the run, though neither the guard nor a request does"),
        (lambda c: c.update(empty_rounds=1), "is void: its empty_rounds is 1"),
        (
            lambda c: c["answers"][0].update(tokens=2),
            "is void: it has other steps, tokens, norm",
        ),
        (
            lambda c: c["answers"][0].update(attempt=0),
            "kind is unverifiable; a commit that names no attempt says delta",
        ),
        (lambda c: c["answers"][0].update(train_s=9.0), "train_s is"),
        (lambda c: c["answers"][0].update(attempt=2), "attempt is 1; the commit that names it says 2"),
        (lambda c: leave_out(c, 0), "names the base that round 3 started from"),
        (lambda c: c["answers"].append(c["answers"][1]), "is void: it lists the answers of replicas [0, 1, 1]"),
        (lambda c: c.update(leg=7), "is void: its leg is 7; 1 follows"),
        (lambda c: c.update(fragment=1), "is void: its fragment is 1; 0 follows"),
        (lambda c: c.update(roster=[0]), "is void: its roster is [0], of 2 replicas"),
        (lambda c: c["figures"].update(tokens=5), "figures is"),
    ],
)
def test_a_forged_commit_is_found_by_the_rules(finished, change, words):
    assert forge(finished, 3, change)[1].startswith(words)


def test_a_roster_without_a_replica_that_answered_is_found():
    fleet = Fleet(replicas=2, max_replicas=3, quorum=2, rounds=9)
    participants = [fleet.join(i) for i in range(3)]
    for participant in participants:
        answer(participant, 1.0)
    participants[0].close()
    assert verify_run(fleet.store).agrees
    commit = json.loads(fleet.store.get(keys.commit(1)))
    assert commit["roster"] == [0, 1, 2]
    commit["roster"] = [0, 1]
    fleet.store.put(keys.commit(1), json.dumps(commit, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    assert found(fleet.store) == (
        keys.commit(1),
        "leaves replicas [2] off the next roster, though they answered",
    )


def test_elastic_rounds_carries_halts_and_legs_agree():
    clock = ManualClock()
    fleet = Fleet(replicas=3, rounds=9, quorum=2, snapshot_every=3)
    zero, one, two = (fleet.join(i, clock=clock) for i in range(3))
    for round_ in range(1, 7):
        clock.advance(2.0)
        values = [1.0, float("nan") if round_ == 3 else 0.5]
        for participant, value in zip((zero, one), values, strict=True):
            answer(participant, value)
        if round_ in (1, 5):
            answer(two, 2.0)
        if round_ == 6:
            fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason="lunch").to_bytes())
        for participant in (zero, one):
            participant.close()
        if round_ == 2:
            answer(two, 2.0)  # late
        while two.committed() and not two.open.stopped:
            two.close()
    zero.finish_leg()
    done = verify_run(fleet.store)
    assert done.agrees, done.disagreement
    assert [c.applied for c in fleet.commits()] == [True, True, False, True, True, True]


def test_work_that_counts_twice_is_found(finished):
    def again(commit: dict) -> None:
        commit["answers"][0]["origins"].append({"round": 1, "steps": 30})

    assert "other steps, tokens, norm or payload of replica 0" in forge(finished, 3, again)[1]


def test_a_run_that_never_began_has_nothing_to_derive():
    done: Verification = verify_run(Fleet().store)
    assert done.agrees and done.unchecked == ["no replica brought a model: there is nothing to derive"]


@pytest.mark.slow
def test_real_runs_agree(start, tmp_path):
    run = start(rounds=4, sync_every=4, fragments=2, fragment_sync_delay=1)
    run.wait()
    run = run.resume(rounds=2)
    run.wait()
    done = verify_run(open_store(run.url))
    assert done.agrees, done.disagreement
    assert done.checked["legs"] == 2 and done.checked["outer steps"] == 6
