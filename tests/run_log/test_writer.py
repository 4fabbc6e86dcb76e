"""`Writer`: a record is created once, under its own key, by who may write it."""

import pytest

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Claim, Heartbeat, Intent
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import By, Stamp
from diloco_orchestrator.protocol.records import Halt, Out
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.memory import MemoryStore

STAMP = Stamp("test", lambda: 1.0)
OUT = Out(**STAMP(), leg=2, replica_id=3, attempt=1, by="coordinator", reason="another model")
CLAIM = Claim(**STAMP(), replica_id=1, attempt=2, host="h", pid=1, versions={}, threads=1)
BEAT = Heartbeat(**STAMP(), replica_id=1, attempt=2, counter=1, phase="starting", round=0, inner_step=0)


def test_a_record_is_created_once_under_the_key_that_it_names():
    store = MemoryStore()
    writer = Writer(store, Role.COORDINATOR)
    created = writer.create(OUT)
    assert created is not None and created == read(store, Out, keys.out(2, 3))
    assert writer.create(OUT) is None


def test_a_heartbeat_is_overwritten():
    store = MemoryStore()
    writer = Writer.of_attempt(store, 1, 2)
    for counter in (1, 2):
        writer.overwrite(BEAT.model_copy(update={"counter": counter}))
    found = read(store, Heartbeat, keys.heartbeat(1, 2))
    assert found is not None and found.record.counter == 2


@pytest.mark.parametrize(
    ("writer", "record", "at", "words"),
    [
        (Writer.of_attempt(MemoryStore(), 1, 2), OUT, "", "attempt writes no Out; coordinator may"),
        (Writer(MemoryStore(), Role.MACHINE), CLAIM, keys.claim(1, 2, "0" * 16), "machine writes no Claim"),
        (Writer.of_attempt(MemoryStore(), 1, 3), CLAIM, keys.claim(1, 2, "0" * 16), "that attempt's to write"),
        (Writer.of_attempt(MemoryStore(), 1, 2), CLAIM, keys.intent(1, 2), "is no key of this Claim"),
        (Writer.of_attempt(MemoryStore(), 1, 2), CLAIM, "", "is no key of this Claim"),
        (Writer(MemoryStore(), Role.COORDINATOR), OUT, keys.out(2, 4), "is no key of this Out"),
    ],
)
def test_a_record_of_somebody_else_or_under_another_key_is_refused(writer: Writer, record, at: str, words: str):
    with pytest.raises(TypeError, match=words):
        writer.create(record, at)


def test_anybody_may_request_a_halt():
    halt = Halt(**STAMP(), leg=1, by="user", reason="enough")
    for role in Role:
        assert Writer(MemoryStore(), role).create(halt) is not None


def test_an_intent_is_a_coordinators_or_a_launchers():
    intent = Intent(**STAMP(), replica_id=0, attempt=1, leg=1, executor="local", why="start")
    assert Writer(MemoryStore(), Role.LAUNCHER).create(intent) and Writer(MemoryStore(), Role.COORDINATOR).create(
        intent
    )


@pytest.mark.parametrize("text", ["replica 2, attempt 1", "coordinator on host", "nobody", "", "replica 02, attempt 1"])
def test_who_wrote_a_record_is_data_and_the_same_text_in_the_bucket(text: str):
    by = By.parse(text)
    assert str(by) == text and (by.who is None) == (text != "replica 2, attempt 1")
