"""One reader and appender of a run's records: who may create a run, and what a reader finds later."""

import pytest
from protocol_fleet import Fleet, play

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import RunFolderTaken
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Halt, Run
from diloco_orchestrator.run_log.append import append_commit, create_run, join_or_create_run
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.memory import MemoryStore

STAMP = Stamp("test", lambda: 0.0)


def run_of(**settings: object) -> Run:
    config = make_config({"entrypoint": "m:f", "replicas": 2, **settings})
    return Run(**STAMP(), run_id="run-1", config=config, package_version="0")


def test_a_folder_that_holds_a_run_is_refused_to_a_second_one():
    store, first = MemoryStore(), run_of(rounds=3)
    create_run(store, first, "test", STAMP)
    with pytest.raises(RunFolderTaken, match="already holds a run"):
        create_run(store, run_of(rounds=3), "test", STAMP)
    assert store.get(keys.RUN) == first.to_bytes()


def test_a_loop_without_coordinator_joins_the_same_run_and_no_other():
    store = MemoryStore()
    first = join_or_create_run(store, run_of(rounds=3), "replica 0", STAMP)
    again = join_or_create_run(store, run_of(rounds=3), "replica 1", STAMP)
    assert again.run == first.run and again.begins() == first.begins()
    with pytest.raises(RunFolderTaken, match=r"another configuration: rounds is 3 there, 4 here\. Use"):
        join_or_create_run(store, run_of(rounds=4), "replica 1", STAMP)


def test_a_commit_is_appended_once_and_the_second_writer_is_told():
    fleet = Fleet(replicas=1)
    play([fleet.join(0)], [1.0])
    standing = fleet.store.get(keys.commit(1))
    other = Commit.from_bytes(standing, "").model_copy(update={"reason": "another writer", "write_id": "other"})
    assert append_commit(RunLog(fleet.store), other).commit == Commit.from_bytes(standing, "")
    assert fleet.store.get(keys.commit(1)) == standing


def test_a_reader_finds_what_was_not_there_when_it_asked_first():
    fleet = Fleet(replicas=1)
    log = RunLog(fleet.store)
    assert log.halt(1) is None and log.start() is None and log.commit(1) is None
    play([fleet.join(0)], [1.0])
    fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason="lunch").to_bytes())
    assert log.halt(1) is not None and log.start() is not None and log.commit(1) is not None


def test_a_heartbeat_is_read_anew_every_time():
    fleet = Fleet(replicas=1)
    records = AttemptRecords(fleet.store)
    for counter in (1, 2):
        beat = Heartbeat(**STAMP(), replica_id=0, attempt=1, counter=counter, phase="training", round=1, inner_step=0)
        fleet.store.put(keys.heartbeat(0, 1), beat.to_bytes())
        found = records.heartbeat(0, 1)
        assert found is not None and found.counter == counter
