"""Records: pinned bytes, strict parsing, and words for whoever meets a foreign one."""

import json

import pytest

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import RecordInvalid, RecordTooNew
from diloco_orchestrator.protocol import records
from diloco_orchestrator.protocol.records import Record, Stamp

STAMP = {"write_id": "0123456789abcdef-1", "at": 1700000000.5}
SHA = "ab" * 32
PAYLOAD = records.Payload(codec="bf16", numel=3, shard_numel=2, shards=(records.Shard(sha256=SHA, size=20),))
ANSWER = records.Answer(
    replica_id=1,
    attempt=2,
    kind="delta",
    averaged=True,
    weight=1.0,
    origins=(records.Origin(round=3, steps=30),),
    train_s=1.5,
    manifest_sha256=SHA,
)
EXAMPLES: dict[str, Record] = {
    "run": records.Run(**STAMP, run_id="run-1", config=make_config({"entrypoint": "m:f"}), package_version="0.1.0"),
    "start": records.Start(
        **STAMP,
        run_sha256=SHA,
        parameters=(records.ParameterInfo(name="w", shape=(2, 3), dtype="float32"),),
        fragments=(("w",),),
        base_digest=SHA,
    ),
    "begin": records.Begin(
        **STAMP,
        leg=2,
        after_round=9,
        from_round=7,
        from_outer_step=6,
        outer_steps=4,
        guard={"level": None},
        by="launch",
        why="start",
        previous=SHA,
    ),
    "halt": records.Halt(**STAMP, leg=1, by="user", reason="enough"),
    "result": records.Result(**STAMP, leg=1, status="completed", round=5, outer_steps=4, reason="done"),
    "intent": records.Intent(**STAMP, replica_id=0, attempt=1, leg=1, executor="local", why="start of the run"),
    "handle": records.Handle(**STAMP, replica_id=0, attempt=1, handle={"native": {"pid": 7}}),
    "claim": records.Claim(
        **STAMP, replica_id=0, attempt=1, host="box", pid=7, versions={"torch": "2.13.0"}, threads=1
    ),
    "cancel": records.Cancel(**STAMP, replica_id=0, attempt=1, reason="the run is over"),
    "exit": records.Exit(**STAMP, replica_id=0, attempt=1, code=1, reason="ValueError", round=2, error="Traceback"),
    "heartbeat": records.Heartbeat(
        **STAMP, replica_id=0, attempt=1, counter=9, phase="training", round=3, inner_step=4, loss=2.5
    ),
    "contribution": records.Contribution(
        **STAMP,
        round=3,
        leg=1,
        replica_id=1,
        attempt=2,
        kind="delta",
        base_digest=SHA,
        payload=PAYLOAD,
        origins=(records.Origin(round=3, steps=30),),
        in_loop=records.Metric(sum=-60.0, count=30),
        scores=(records.Score(share=1, sum=-12.0, count=5),),
        heldout_items=20,
        metrics={"loss": records.Metric(sum=60.0, count=30)},
        progress=records.Progress(cursor={"batches": 30, "epoch": 0}, rng={"torch": "AAA="}, inner_steps=90, tokens=5),
        train_s=1.5,
    ),
    "commit": records.Commit(
        **STAMP,
        round=3,
        leg=1,
        fragment=0,
        outer_step=3,
        answers=(ANSWER,),
        begin_sha256=SHA,
        base_digest=SHA,
        roster=(0, 1),
        guard={"level": None},
        verdict=None,
        figures=records.RoundFigures(loss=2.0, tokens=5, dropped_steps=4, payload_bytes=20),
        applied=True,
        empty_rounds=0,
        stop="none",
        by="replica 1, attempt 2",
        reason="2 of 2 contributions",
        previous=SHA,
    ),
    "snapshot": records.Snapshot(
        **STAMP, round=3, base_digest=SHA, files={"model.safetensors": records.FileInfo(sha256=SHA, size=9)}
    ),
    "allreduce": records.AllReducePart(
        **STAMP, round_id=0, rank=1, world_size=2, shape=(3,), dtype="torch.float32", payload=PAYLOAD
    ),
}

# Changing one of these changes what is in buckets already: raise SCHEMA_VERSION and keep reading the old form.
GOLDEN = {
    "run": "60554e7647fd831980647415b0d90bffebb6e9c45b4d5c579c5a0a2f7d2ede98",
    "start": "916e560748123950ac117453dc5f2222fd286391d2b3efc6d39ac30f79ceb387",
    "begin": "0f2ff9770068dfe9591a6228e301fece7625a8d994fd0f95ddcd4a65eb52a1f4",
    "halt": "5d0fb0a8c4211ff1c925d6bf3be584f03f4f118271d3f7906fa6e9499d374436",
    "result": "043a96edd20edf53ef0e00845821f7d5e5dcd4cc75f5013eed415a179e535b38",
    "intent": "4bd8f63997274469a5a5e98f043f6003cfe43cb8b35d5fecd41c646d853e153f",
    "handle": "8262a47a616958358c45ec64ed841f82c4df926b0e4906aa29f4b13ac578f2ab",
    "claim": "d3a43c6f49328dda7e1da016c6c606b7324544dba2713795b90b2cdc54afb0cd",
    "cancel": "c2a865ab53994de2d6504db31fd073639911e74f16dd2562fe7f1eb9e0584146",
    "exit": "fef5044b4847626aa1edd13938a2780a9cf20420c72398bc6496b28c0294f3f9",
    "heartbeat": "92b1297a97f47ba81338e5e9c3952bfd8b6b05b5b8c92476b30ed8c70f881041",
    "contribution": "93feed30ebb4254921c079f2894d54d8214dfdc3a34b07a08091b1bde4d600c6",
    "commit": "3fbcbdb4515283525e13f862bfcfd69ef2f57cf1bc7c5cddd9e18ef73f678407",
    "snapshot": "730ed5b7da3542575424df295c85ea23c896d098f9249b8bd193acc89b3b8f42",
    "allreduce": "8716209bf3ec8d437868a09e01d15f88127956f8f6c73fc6c89395645a340a57",
}


def every_record() -> list[type[Record]]:
    found = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, Record)]
    return [kind for kind in found if kind is not Record]


def test_every_record_has_an_example_and_golden_bytes():
    names = sorted(kind.record for kind in every_record())
    assert names == sorted(EXAMPLES) == sorted(GOLDEN)


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes(name: str):
    assert records.sha256_hex(EXAMPLES[name].to_bytes()) == GOLDEN[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_records_come_back_equal(name: str):
    example = EXAMPLES[name]
    assert type(example).from_bytes(example.to_bytes(), "here") == example


def test_bytes_are_one_line_of_sorted_json():
    data = EXAMPLES["halt"].to_bytes()
    assert data == (
        b'{"at":1700000000.5,"by":"user","leg":1,"reason":"enough","record":"halt","schema_version":1,'
        b'"write_id":"0123456789abcdef-1"}\n'
    )


def halt_with(**changes: object) -> bytes:
    body = json.loads(EXAMPLES["halt"].to_bytes())
    return json.dumps({**body, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe", "legs/1/halt.json is not JSON"),
        (b"", "not JSON"),
        (b'{"record":"halt"', "not JSON"),
        (b"[]", "holds a JSON list, not an object"),
        (halt_with(record="commit"), "named 'commit', not 'halt'"),
        (halt_with(schema_version=0), "schema version 0"),
        (halt_with(schema_version="1"), "schema version '1'"),
        (halt_with(leg="1"), "field 'leg' of this halt record is wrong"),
        (halt_with(leg=0), "field 'leg'"),
        (halt_with(extra=1), "field 'extra'"),
        (halt_with(at=float("nan")), "field 'at'"),
    ],
)
def test_anything_odd_is_refused_by_name(data: bytes, words: str):
    with pytest.raises(RecordInvalid, match=words):
        records.Halt.from_bytes(data, "legs/1/halt.json")


def test_a_newer_schema_is_refused_with_the_remedy():
    with pytest.raises(RecordTooNew, match=r"legs/1/halt\.json has schema version 2.*Upgrade diloco-orchestrator"):
        records.Halt.from_bytes(halt_with(schema_version=2, unheard_of=True), "legs/1/halt.json")


def test_two_writes_of_one_process_differ():
    stamp = Stamp("token", lambda: 1.0)
    assert [stamp()["write_id"] for _ in range(2)] == ["token-1", "token-2"]
