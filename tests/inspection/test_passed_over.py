"""Junk among votes, offers and snapshots: `diloco status` names it as `verify` does, and reads no other objects."""

import json
from pathlib import Path

import pytest
from cli_support import diloco_here
from long_history import LongRun
from protocol_fleet import Fleet, play

from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.inspection.passed_over import MOST_NAMED, MOST_READ, passed_over
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store

JUNK = b"[" * 100_000
OFFER = "dl-run-1-r0-a1"
FOREIGN = "nothing in a run has such a key"
UNREADABLE = {
    "a vote of an attempt to come": keys.began(1, 9),
    "what a replica that is not there follows": keys.follows(7),
    "a start record that nobody names": keys.start_take("0" * 16),
    "an offer": keys.join_offer(OFFER),
    "who took an offer": keys.join_record(OFFER, "0" * 64, keys.JOIN_TAKEN),
    "how an offered attempt ended": keys.join_record(OFFER, "0" * 64, keys.JOIN_END),
    "the record of a take": keys.snapshot(2, keys.SNAPSHOT_RECORD, "r1"),
    "the record of a snapshot to come": keys.snapshot(900, keys.SNAPSHOT_RECORD),
}
NAMED = {  # by what it is: the key, and the end of what is said of it
    "a key among the votes": ("start/1/vote.json", FOREIGN),
    "a key among the offers": (f"{keys.JOINS}{OFFER}/junk", FOREIGN),
    "a key among the snapshots": (f"{keys.SNAPSHOTS}junk", FOREIGN),
    "a file beside the model": (keys.snapshot(2, "modeling_evil.py"), "no file of this snapshot"),
    "a file in a take without a record": (keys.snapshot(2, "modeling_evil.py", "r1"), "no file of this snapshot"),
    "a model in a take without a record": (
        keys.snapshot(2, "model.safetensors", "r1"),
        "though snapshot 2 is complete",
    ),
}


@pytest.fixture
def run(tmp_path: Path) -> Fleet:
    """A run in a folder, in its third round, with snapshots of rounds 0 and 2."""
    fleet = Fleet(rounds=9, snapshot_every=2, store=open_store(str(tmp_path / "run")))
    participants = fleet.join_all()
    for _ in range(2):
        play(participants, [1.0, 0.5])
    participants[0].write_snapshot_if_due()
    participants[0]._snapshots.wait()
    return fleet


def said(command: str, fleet: Fleet, tmp_path: Path) -> dict:
    return json.loads(diloco_here(command, str(tmp_path / "run"), "--json", cwd=tmp_path).stdout)


def test_of_an_honest_run_status_passes_over_nothing(run: Fleet, tmp_path: Path):
    run.store.create(keys.snapshot(4, "model.safetensors"), b"being written")
    assert said("status", run, tmp_path)["unreadable"] == []


@pytest.mark.parametrize("key", UNREADABLE.values(), ids=UNREADABLE)
def test_status_names_an_unreadable_record_among_votes_offers_and_snapshots(run: Fleet, tmp_path: Path, key: str):
    run.store.put(key, JUNK)
    assert [words.partition(": ")[0] for words in said("status", run, tmp_path)["unreadable"]] == [key]
    assert key in diloco_here("status", str(tmp_path / "run"), cwd=tmp_path).stdout.replace("\n", "")
    assert key in json.dumps(said("verify", run, tmp_path))


@pytest.mark.parametrize(("key", "why"), NAMED.values(), ids=NAMED)
def test_status_names_a_foreign_object_among_votes_offers_and_snapshots(run: Fleet, tmp_path: Path, key: str, why: str):
    run.store.put(key, JUNK)
    (words,) = said("status", run, tmp_path)["unreadable"]
    folder = key.rpartition("/")[0]
    assert words.startswith(folder if "complete" in why else f"{key}: ") and words.endswith(why)
    assert folder in json.dumps(said("verify", run, tmp_path))


def test_status_reads_each_snapshot_record_once_and_no_payload():
    run = LongRun(100, snapshots=10)
    assert passed_over(RunLog(run.store), NoBackground()) == []
    read = run.store.gets
    assert len([key for key in read if key.startswith(keys.SNAPSHOTS)]) == 11 and len(read) < 25
    assert not any(key.startswith(("rounds/", "log/", "replicas/")) for key in read) and run.store.lists < 6


def test_of_more_records_than_a_status_reads_it_gives_the_number():
    run = LongRun(10)
    for round_ in range(100, 100 + MOST_READ):
        run.store.put(keys.snapshot(round_, keys.SNAPSHOT_RECORD), JUNK)
    words = passed_over(RunLog(run.store), NoBackground())
    left = [said for said in words if said.startswith("snapshots/: ")]
    assert left == ["snapshots/: 2 records were not read here; `diloco verify` reads them"]
    assert len(words) == MOST_READ + 1 and keys.snapshot(10, keys.SNAPSHOT_RECORD) not in run.store.gets


def test_a_status_names_no_more_than_a_thousand_objects():
    run = LongRun(1)
    for number in range(MOST_NAMED + 5):
        run.store.put(f"start/junk{number}", b"")
    assert len(passed_over(RunLog(run.store), NoBackground())) == MOST_NAMED
