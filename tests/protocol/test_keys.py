"""Names of objects: built, parsed back, in order."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_orchestrator.protocol import keys

NUMBERS = st.integers(min_value=0, max_value=99_999_999)


def test_the_layout_is_the_documented_one():
    assert keys.RUN == "run.json" and keys.START == "start.json"
    assert keys.begin(2) == "legs/2/begin.json"
    assert keys.halt(2) == "legs/2/halt.json"
    assert keys.out(2, 3) == "legs/2/out/3.json" and keys.out.parse("legs/2/out/3.json") == (2, 3)
    assert keys.out.parse("legs/2/out/03.json") is None
    assert keys.result(2) == "legs/2/result.json"
    assert keys.claim(3, 12, "0123456789abcdef") == "replicas/3/attempts/12/claim.0123456789abcdef.json"
    assert keys.claim(3, 12, "") == "replicas/3/attempts/12/claim.json"  # of earlier versions
    assert keys.log_text(3, 12) == "replicas/3/attempts/12/log.txt"
    assert keys.payload(7, 3, 12, 0) == "rounds/00000007/payload/3/12/0.bin"
    assert keys.contribution(7, 3) == "rounds/00000007/contributions/3.json"
    assert keys.commit(7) == "rounds/00000007/commit.json"
    assert str(keys.SegmentKey(1, 100, "commits")) == "log/00000001-00000100.commits.jsonl"
    assert keys.snapshot(7, "model.safetensors") == "snapshots/00000007/model.safetensors"
    assert keys.snapshot(7, "model.safetensors", take=keys.own_take(3)) == "snapshots/00000007.r3/model.safetensors"
    assert keys.snapshot(7, "model.safetensors", keys.own_take(None)) == "snapshots/00000007.rebuilt/model.safetensors"


@given(NUMBERS, NUMBERS)
def test_keys_parse_back(round_: int, replica_id: int):
    assert keys.contribution.parse(keys.contribution(round_, replica_id)) == (round_, replica_id)
    for take in (keys.SHARED_TAKE, keys.own_take(None), keys.own_take(replica_id), "2"):
        record = keys.snapshot(round_, keys.SNAPSHOT_RECORD, take)
        assert keys.parse_snapshot_record(record) == keys.parse_snapshot_file(record) == (round_, take)
    replay = f"snapshots/{keys.round_name(round_)}/replays/token-1.json"  # of an earlier version
    assert keys.is_replay(replay) and keys.parse_snapshot_record(replay) is None
    for build in (keys.intent, keys.handle, keys.cancel, keys.exit_record, keys.heartbeat, keys.log_text):
        key = build(replica_id, round_)
        assert keys.parse_attempt(key) == keys.AttemptKey(replica_id, round_, key.rpartition("/")[2])
    for token in ("", "0123456789abcdef"):
        key = keys.claim(replica_id, round_, token)
        assert keys.parse_attempt(key) == keys.AttemptKey(replica_id, round_, keys.CLAIM, token)
    assert keys.parse_attempt(keys.claim(replica_id, round_, "0123456789ABCDEF")) is None


@given(NUMBERS, NUMBERS)
def test_key_order_is_round_order(one: int, other: int):
    assert (keys.commit(one) < keys.commit(other)) == (one < other)


@given(st.text())
def test_foreign_keys_are_told_apart(text: str):
    parsed = keys.contribution.parse(text), keys.parse_attempt(text), keys.parse_snapshot_record(text)
    assert parsed == (None, None, None)


@given(st.integers(1, 10**7), st.integers(0, 500), st.sampled_from(["commits", "manifests"]))
def test_a_segments_key_is_parsed_back_and_no_other_name_is_one(first: int, more: int, kind: str):
    segment = keys.SegmentKey(first, first + more, kind)
    assert keys.parse_segment(str(segment)) == segment
    for other in (f"{segment}.tmp", str(segment).replace(kind, "states"), f"rounds/{segment}"):
        assert keys.parse_segment(other) is None
    if more:
        assert keys.parse_segment(str(keys.SegmentKey(first + more, first, kind))) is None


@given(st.integers(0, 10**6))
def test_the_end_of_a_round_is_between_its_objects_and_those_of_the_next(round_: int):
    assert keys.payload(round_, 99, 99, 99) < keys.end_of_round(round_) < keys.commit(round_ + 1)
    assert keys.payload(round_, 0, 1, 0) < keys.want(round_, 99, 99, 99, 4) < keys.end_of_round(round_)


@given(st.integers(1, 10**6), st.integers(0, 99), st.integers(1, 99), st.integers(0, 999), st.integers(1, 9))
def test_takes_of_a_payload_shard_and_requests_for_them_are_parsed_back(round_, replica_id, attempt, shard, take):
    key = keys.PayloadKey(round_, replica_id, attempt, shard, take)
    assert keys.parse_payload(str(key)) == key and key.first_take == keys.PayloadKey(round_, replica_id, attempt, shard)
    assert keys.parse_want(str(key)) is None and keys.parse_payload(f"{key}.tmp") is None
    if take > 1:
        want = keys.want(round_, replica_id, attempt, shard, take)
        assert keys.parse_want(want) == key and keys.parse_payload(want) is None
