"""What somebody who may write to the bucket puts there on purpose, and what each reader does with it."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mutated_buckets import build_bucket, check, run_commands
from protocol_fleet import Fleet, answer, report

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, StoreError
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys, kinds
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.redaction import shown
from diloco_orchestrator.run_log.reader import read_record
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store

COLOURS = "\x1b[31mred\x1b]0;title\x07 [/x] \u202egnp"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    build_bucket(tmp_path / "run")
    return tmp_path / "run"


def changed(path: Path, **fields: object) -> None:
    path.write_text(
        json.dumps({**json.loads(path.read_text()), **fields}, sort_keys=True, separators=(",", ":")) + "\n"
    )


def outcome(bucket: Path, *argv: str) -> tuple[object, str]:
    out = bucket.parent / "out"
    out.mkdir(exist_ok=True)
    (found,) = run_commands(bucket, out, [argv])
    check(found, out)
    return found.code, found.text


def test_text_of_the_bucket_neither_moves_the_terminal_nor_is_markup(bucket: Path):
    changed(bucket / keys.result(1), reason=COLOURS)
    changed(bucket / keys.exit_record(0, 1), reason=COLOURS, code=1)
    (bucket / keys.log_text(0, 1)).write_text(f"{COLOURS}\r\n")
    for command in (("status", "{url}"), ("explain", "{url}"), ("logs", "{url}")):
        code, text = outcome(bucket, *command)
        assert code == 0 and "Traceback" not in text
    assert outcome(bucket, "logs", "{url}")[1] == "\u241b[31mred\u241b]0;title\u2407 [/x] \ufffdgnp\n"


def test_what_is_shown_keeps_text_and_lines():
    assert shown("a\tb\n\xe9 \u4e2d \U0001f600") == "a\tb\n\xe9 \u4e2d \U0001f600"
    assert shown("\r\x00\x7f\x9b\ud800") == "\u240d\u2400\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("value", ["1" * 4400, f"1{'0' * 100}", f"-1{'0' * 101}", "1e999", "NaN", "-Infinity"])
def test_numbers_that_no_record_holds_are_refused(value: str):
    data = b'{"record":"heartbeat","schema_version":2,"counter":' + value.encode() + b"}"
    with pytest.raises(RecordInvalid, match="is not JSON"):
        Heartbeat.from_bytes(data, "beat")


@pytest.mark.parametrize("data", [b"[" * 10**6, b'{"a":' * 10**5, b'{"record":"\\ud800"}', b"\xff"])
def test_text_that_no_record_holds_is_refused(data: bytes):
    with pytest.raises(RecordInvalid):
        Heartbeat.from_bytes(data, "beat")


def test_no_more_of_a_record_is_read_than_a_record_may_have():
    store, key = MemoryStore(), keys.heartbeat(0, 1)
    store.put(key, b" " * (4 * kinds.MIB))
    assert len(read_record(store, key)) == kinds.MIB + 1
    with pytest.raises(RecordInvalid):
        Heartbeat.from_bytes(read_record(store, key), key)


@pytest.mark.parametrize(
    ("key", "most"),
    [
        (keys.START, 16),
        (keys.snapshot(3, keys.SNAPSHOT_RECORD), 16),
        (keys.commit(3), 8),
        (keys.contribution(3, 11), 8),
        (keys.RUN, 1),
        (keys.claim(3, 1, "0" * 16), 1),
        ("anything else", 1),
    ],
)
def test_the_most_bytes_of_each_kind_of_record(key: str, most: int):
    assert kinds.most_bytes(key) == most * kinds.MIB


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("make", [fifo, link, Path.mkdir])
def test_what_is_no_regular_file_is_no_object_and_blocks_nobody(make: Callable[[Path], None], tmp_path: Path):
    store = open_store(str(tmp_path))
    make(tmp_path / "record.json")
    store.put("other.json", b"{}")
    with pytest.raises((StoreError, ObjectMissing)):
        store.get("record.json")
    with pytest.raises((StoreError, ObjectMissing)):
        read_record(store, "record.json")


@pytest.mark.parametrize("name", [b"a\nb", b"a\x80", b"..x", b"%2e", "\u0663.json".encode(), b"007.json"])
def test_files_whose_names_are_no_keys_of_ours_hide_no_others(name: bytes, bucket: Path):
    folder = os.fsencode(bucket / "rounds/00000001/contributions")
    with open(folder + b"/" + name, "wb") as file:  # noqa: PTH123 - a name that is no text
        file.write(b"{}")
    reader = RunReader(open_store(str(bucket)))
    assert len(reader.status().rounds) == 4
    assert outcome(bucket, "verify", "{url}")[0] == 0


@pytest.mark.parametrize(
    "key",
    [
        "rounds/00000001/contributions/007.json",
        "rounds/00000001/contributions/\u0663.json",
        "rounds/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661/contributions/1.json",
        "rounds/00000001/contributions/1.json\n",
        f"rounds/00000001/contributions/{10**9}.json",
        "rounds/00000001//contributions/1.json",
        "rounds/00000001/contributions/../1.json",
    ],
)
def test_a_key_counts_only_if_it_is_the_one_that_would_be_written(key: str):
    assert keys.contribution.parse(key) is None


@pytest.mark.parametrize(
    "harm",
    [
        {"schema_version": 99},
        {"tokens": 10**400},
        {"unknown": 1},
        {"metrics": {"unknown": {"sum": 1e308, "count": 1}, "extra.x": {"sum": None, "count": 3}}},
        {"progress": {"cursor": {"a": [[[[]]]]}, "rng": {}, "inner_steps": 2**62, "tokens": 2**62}},
        {"train_s": 1e308},
        {"scores": [{"share": 10**9, "sum": 1e308, "count": 2**62}]},
        {"in_loop": {"sum": -1e308, "count": 1}},
        {"origins": [{"round": 2**62, "steps": 2**62}]},
        {"payload": None},
        {"reason": COLOURS},
        {"attempt": 2**62},
        {"tokens": 2**53, "origins": [{"round": 1, "steps": 1}, {"round": 2, "steps": 2**53}]},
        {"tokens": 10**99},
        {"metrics": {"tokens": {"sum": 1e308, "count": 1}}},
    ],
)
@pytest.mark.parametrize("weights", ["uniform", "tokens"])
def test_one_manifest_never_ends_the_run_of_the_others(harm: dict[str, object], weights: str):
    fleet = Fleet(replicas=3, rounds=9, quorum=2, scored=True, weights=weights)
    one, two, three = fleet.join_all()
    said = replace(report(), tokens=900)
    body = json.loads(answer(three, 1.0, said).to_bytes())
    fleet.store.put(keys.contribution(1, 2), json.dumps({**body, **harm}).encode())
    for each in (one, two):
        answer(each, 1.0, said)
    for each in (one, two):
        each.close()
    (commit,) = fleet.commits()
    assert commit.applied and {0, 1} <= {each.replica_id for each in commit.answers if each.averaged}
    assert one._claims.hash() == two._claims.hash()
