"""Names of objects: built, parsed back, in order."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_orchestrator.protocol import keys

NUMBERS = st.integers(min_value=0, max_value=99_999_999)


def test_the_layout_is_the_documented_one():
    assert keys.RUN == "run.json" and keys.START == "start.json"
    assert keys.begin(2) == "legs/2/begin.json"
    assert keys.halt(2) == "legs/2/halt.json"
    assert keys.result(2) == "legs/2/result.json"
    assert keys.claim(3, 12) == "replicas/3/attempts/12/claim.json"
    assert keys.log_text(3, 12) == "replicas/3/attempts/12/log.txt"
    assert keys.payload(7, 3, 12, 0) == "rounds/00000007/payload/3/12/0.bin"
    assert keys.contribution(7, 3) == "rounds/00000007/contributions/3.json"
    assert keys.commit(7) == "rounds/00000007/commit.json"
    assert keys.snapshot(7, "model.safetensors") == "snapshots/00000007/model.safetensors"


@given(NUMBERS, NUMBERS)
def test_keys_parse_back(round_: int, replica_id: int):
    assert keys.parse_contribution(keys.contribution(round_, replica_id)) == (round_, replica_id)
    assert keys.parse_snapshot_record(keys.snapshot(round_, keys.SNAPSHOT_RECORD)) == round_
    for build in (keys.intent, keys.handle, keys.claim, keys.cancel, keys.exit_record, keys.heartbeat, keys.log_text):
        key = build(replica_id, round_)
        assert keys.parse_attempt(key) == keys.AttemptKey(replica_id, round_, key.rpartition("/")[2])


@given(NUMBERS, NUMBERS)
def test_key_order_is_round_order(one: int, other: int):
    assert (keys.commit(one) < keys.commit(other)) == (one < other)


@given(st.text())
def test_foreign_keys_are_told_apart(text: str):
    parsed = keys.parse_contribution(text), keys.parse_attempt(text), keys.parse_snapshot_record(text)
    assert parsed == (None, None, None)
