"""`verify` says which objects the hash chain pins, which it does not, and what is missing or foreign."""

import pytest
from protocol_fleet import Fleet, play

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.verify.findings import Verification
from diloco_orchestrator.inspection.verify.inventory import NamedByTheLog, shortened, take_stock
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.memory import MemoryStore


def run_of_one_round() -> Fleet:
    fleet = Fleet(replicas=2, rounds=9)
    play(fleet.join_all(), [1.0, 0.5])
    return fleet


def stock(*found: str, named: NamedByTheLog | None = None) -> Verification:
    store, done = MemoryStore(), Verification("memory://")
    for key in found:
        store.put(key, b"")
    take_stock(store, named or NamedByTheLog(), done)
    return done


def test_every_object_of_a_run_is_pinned_or_told_with_a_reason():
    fleet = run_of_one_round()
    fleet.store.put(keys.heartbeat(0, 1), b"")
    fleet.store.put("rounds/00000001/contributions/007.json", b"")
    done = verify_run(fleet.store)
    assert done.agrees and done.missing == []
    assert done.pinned["claims"] == 2 and done.pinned["manifests"] == 2 and done.pinned["payloads and states"] == 2
    assert dict(done.unpinned) == {"intents": 2, "heartbeats": 1, "snapshot records": 1}
    assert done.foreign == ["rounds/00000001/contributions/007.json"]
    counted = sum(done.pinned.values()) + sum(done.unpinned.values()) + len(done.foreign)
    assert counted == len(list(fleet.store.list("")))
    listed = done.to_json()["unpinned"]
    assert [(each["kind"], each["count"]) for each in listed] == sorted(done.unpinned.items())
    assert all(each["why"] for each in listed)


def test_what_no_commit_names_is_not_pinned():
    named = NamedByTheLog(attempts={(1, 0): 2}, manifests={(1, 0)})
    done = stock(
        keys.contribution(1, 0),
        keys.contribution(1, 1),
        keys.payload(1, 0, 2, 0),
        keys.payload(1, 0, 1, 0),
        keys.payload(1, 0, 2, 0, take=2),
        keys.state(0, 1, 2),
        keys.state(0, 1, 1),
        keys.buffers(0, 1, 2),
        keys.want(1, 0, 2, 0, 2),
        keys.halt(1),
        keys.replay(1, "x"),
        named=named,
    )
    assert dict(done.pinned) == {"manifests": 1, "payloads and states": 3}
    assert dict(done.unpinned) == {
        "late manifests": 1,
        "payloads and states": 2,
        "payloads put again": 1,
        "wants": 1,
        "halt requests": 1,
        "replays": 1,
    }


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ([keys.claim(2, 3)], keys.intent(2, 3)),
        ([keys.intent(2, 1), keys.intent(2, 3)], keys.intent(2, 2)),
        ([keys.intent(2, 1), keys.heartbeat(2, 1)], keys.claim(2, 1)),
        ([keys.intent(2, 1), keys.claim(2, 1), keys.log_text(2, 1)], keys.exit_record(2, 1)),
        ([keys.intent(2, 1), keys.claim(2, 1), keys.exit_record(2, 1), keys.heartbeat(2, 1)], keys.log_text(2, 1)),
        ([keys.intent(2, 1), keys.claim(2, 1), keys.exit_record(2, 1), keys.log_text(2, 1)], keys.heartbeat(2, 1)),
        (
            [keys.intent(1, 1), keys.claim(1, 1), keys.handle(1, 1), keys.intent(2, 1), keys.claim(2, 1)],
            keys.handle(2, 1),
        ),
        ([keys.snapshot(10, "model.safetensors")], keys.snapshot(10, "snapshot.json")),
        (["log/00000011-00000020.commits.jsonl"], "log/00000001-00000010.commits.jsonl"),
        (
            ["log/00000001-00000100.commits.jsonl", "log/00000111-00000120.commits.jsonl"],
            "log/00000101-00000110.commits.jsonl",
        ),
    ],
)
def test_an_object_that_others_imply_is_named(found, missing):
    done = stock(*found)
    assert [each.partition(":")[0] for each in done.missing] == [missing]


def test_a_removed_result_is_told():
    fleet = Fleet(replicas=2, rounds=1, store=MemoryStore())
    replicas = fleet.join_all()
    for _ in range(2):  # the closing round stops the leg
        play(replicas, [1.0, 0.5])
    assert fleet.commits()[-1].stop == "completed"
    assert [each.partition(":")[0] for each in verify_run(fleet.store).missing] == [keys.result(1)]


def test_a_removed_start_is_told():
    fleet = run_of_one_round()
    fleet.store.delete(keys.START)
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.START and "is missing" in found.words


def test_a_long_list_is_shortened():
    assert shortened(str(i) for i in range(25))[19:] == ["19", "and 5 more"]
    assert shortened(["a"]) == ["a"]
