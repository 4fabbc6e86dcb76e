"""`verify` says which objects the hash chain pins, which it does not, and what is missing or foreign."""

import json

import pytest
from click.testing import CliRunner
from protocol_fleet import Fleet, play

from diloco_orchestrator.cli.derive_commands import verify
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.verify.findings import Verification
from diloco_orchestrator.inspection.verify.inventory import NamedByTheLog, shortened, take_stock
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.attempt_records import Cancel, Exit, Intent, JoinEnd
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store

TOKEN = "0" * 16  # of the claims here


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
    assert dict(done.unpinned) == {
        "intents": 2,
        "heartbeats": 1,
        "snapshot records": 1,
        "what replicas began with": 4,
    }
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
        f"{keys.PROBE}0-1",
        keys.LINK,
        keys.halt(1),
        keys.out(1, 2),
        "snapshots/00000001/replays/x.json",
        named=named,
    )
    assert dict(done.pinned) == {"manifests": 1, "payloads and states": 3}
    assert dict(done.unpinned) == {
        "late manifests": 1,
        "payloads and states": 2,
        "payloads put again": 1,
        "trials of the store": 1,
        "what replicas began with": 1,
        "wants": 1,
        "halt requests": 1,
        "replicas that are out": 1,
        "replays": 1,
    }


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ([keys.claim(2, 3, TOKEN)], keys.intent(2, 3)),
        ([keys.intent(2, 1), keys.intent(2, 3)], keys.intent(2, 2)),
        ([keys.intent(2, 1), keys.heartbeat(2, 1)], keys.claim(2, 1, "")),
        ([keys.intent(2, 1), keys.claim(2, 1, TOKEN), keys.log_text(2, 1)], keys.exit_record(2, 1)),
        (
            [keys.intent(2, 1), keys.claim(2, 1, TOKEN), keys.exit_record(2, 1), keys.heartbeat(2, 1)],
            keys.log_text(2, 1),
        ),
        (
            [keys.intent(2, 1), keys.claim(2, 1, TOKEN), keys.exit_record(2, 1), keys.log_text(2, 1)],
            keys.heartbeat(2, 1),
        ),
        (
            [keys.intent(1, 1), keys.claim(1, 1, TOKEN), keys.handle(1, 1), keys.intent(2, 1), keys.claim(2, 1, TOKEN)],
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


def test_the_output_of_a_hung_attempt_which_its_coordinator_kept_implies_no_exit_record():
    done = stock(
        keys.intent(2, 1), keys.claim(2, 1, TOKEN), keys.heartbeat(2, 1), keys.log_text(2, 1), keys.cancel(2, 1)
    )
    assert not done.missing


NO_EXIT = "no exit record: its machine was lost, or exit.json and log.txt were removed"
TAKEN_AWAY = "attempt 1 (preempted, took part): the node was taken away"


def ended_run(url: str) -> Fleet:
    """Of two replicas; replica 1's first attempt was preempted, its second ended by itself, as replica 0's did."""
    fleet = Fleet(replicas=2, rounds=1, store=open_store(url))
    replicas = [fleet.join(0), fleet.join(1)]
    play(replicas, [1.0, 0.5])
    stamp = Stamp("test", lambda: 0.0)
    intent = Intent(**stamp(), replica_id=1, attempt=2, leg=1, executor="test", why=TAKEN_AWAY)
    fleet.store.create(keys.intent(1, 2), intent.to_bytes())
    replicas[1] = fleet.join(1)
    play(replicas, [1.0, 0.5])  # the final evaluation round
    last = RunLog(fleet.store).commit(2)
    assert last is not None
    fleet.store.create(keys.result(1), rounds.result_of(last.commit, last.sha256, stamp()).to_bytes())
    for replica_id, attempt in ((0, 1), (1, 2)):
        ended = Exit(**stamp(), replica_id=replica_id, attempt=attempt, code=0, reason="the run ended", round=2)
        fleet.store.create(keys.exit_record(replica_id, attempt), ended.to_bytes())
        fleet.store.create(keys.log_text(replica_id, attempt), b"")
        fleet.store.put(keys.heartbeat(replica_id, attempt), b"")
    return fleet


def test_an_attempt_whose_exit_record_and_log_were_both_removed_is_named_and_is_no_failure(tmp_path):
    fleet = ended_run(str(tmp_path / "run"))
    lost = f"replica 1, attempt 1: {NO_EXIT}; {keys.intent(1, 2)} says: {TAKEN_AWAY}"
    done = verify_run(fleet.store)
    assert done.agrees and done.missing == [] and done.without_exit == [lost]
    fleet.store.delete(keys.exit_record(0, 1))
    fleet.store.delete(keys.log_text(0, 1))
    done = verify_run(fleet.store)
    assert done.agrees and done.missing == []
    assert done.without_exit == [f"replica 0, attempt 1: {NO_EXIT}", lost]
    printed = CliRunner().invoke(verify, [str(tmp_path / "run")])
    assert printed.exit_code == 0 and f"no exit:     replica 0, attempt 1: {NO_EXIT}\n" in printed.output
    as_json = CliRunner().invoke(verify, [str(tmp_path / "run"), "--json"])
    assert json.loads(as_json.stdout)["without_exit"] == done.without_exit


def test_an_attempt_of_a_run_that_goes_on_may_still_run():
    done = stock(keys.begin(1), keys.intent(0, 1), keys.claim(0, 1, TOKEN), keys.intent(0, 2), keys.claim(0, 2, TOKEN))
    assert done.without_exit == [
        f"replica 0, attempt 1: {NO_EXIT}; {keys.intent(0, 2)} cannot be read",
        f"replica 0, attempt 2: {NO_EXIT.replace(': ', ': it still runs, ')}",
    ]


def test_what_other_records_say_of_an_end_is_told():
    store, done, stamp = MemoryStore(), Verification("memory://"), Stamp("test", lambda: 0.0)
    cancel = Cancel(**stamp(), replica_id=0, attempt=1, reason="its heartbeat stood still for 300 s")
    end = JoinEnd(**stamp(), state="preempted", reason="lost", message="its machine gives no sign of life")
    joined = keys.join_record("dl-run-1-r0-a1", "0" * 64, keys.JOIN_END)
    store.put(keys.claim(0, 1, TOKEN), b"")
    store.put(keys.log_text(0, 1), b"")
    store.put(keys.cancel(0, 1), cancel.to_bytes())
    store.put(joined, end.to_bytes())
    take_stock(store, NamedByTheLog(), done)
    (said,) = done.without_exit
    assert said == (
        "replica 0, attempt 1: no exit record: it still runs, its machine was lost after log.txt was written, or "
        f"exit.json was removed; {keys.cancel(0, 1)} says: its heartbeat stood still for 300 s; {joined} says: "
        "preempted, its machine gives no sign of life"
    )


def test_a_removed_result_is_told():
    fleet = Fleet(replicas=2, rounds=1, store=MemoryStore())
    replicas = fleet.join_all()
    for _ in range(2):  # the final evaluation round stops the leg
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
