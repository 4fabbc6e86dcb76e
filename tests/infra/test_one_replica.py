"""The policy of one replica: it writes below its own prefixes and what any replica may, and nothing of another's. And
the bucket's, by which nobody overwrites what is written once.
"""

import json
from pathlib import Path

import pytest
from iam_server import CREATES, Question, allows, denies

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.keys import Form, PayloadKey, SegmentKey
from diloco_orchestrator.protocol.kinds import KINDS
from diloco_orchestrator.protocol.signed_objects import is_named, is_overwritten

HERE = "arn:aws:s3:::BUCKET/PREFIX"
IAM = Path(__file__).parents[2] / "infra" / "iam"
POLICY = (IAM / "one-replica.json").read_text()
CREATE_ONLY = json.loads((IAM / "create-only-bucket-policy.json").read_text())


def may_put(key: str, replica_id: int = 1) -> bool:
    question = Question("s3:PutObject", f"{HERE}/{key}", {})
    return allows(json.loads(POLICY.replace("REPLICA", str(replica_id))), question)


def own_keys(replica_id: int) -> list[str]:
    return [
        keys.claim(replica_id, 1, "0" * 16),
        keys.began(replica_id, 1),
        keys.follows(replica_id),
        keys.heartbeat(replica_id, 1),
        keys.exit_record(replica_id, 1),
        keys.log_text(replica_id, 1),
        keys.state(replica_id, 7, 1),
        keys.buffers(replica_id, 7, 1),
        keys.payload(7, replica_id, 1, 0),
        keys.contribution(7, replica_id),
        keys.snapshot(7, "model.safetensors", keys.own_take(replica_id)),
        keys.join_record(f"dl-run-1-r{replica_id}-a2", "0" * 64, keys.JOIN_LEASE),
        keys.join_piece(f"dl-run-1-r{replica_id}-a2", 0),
    ]


AGAIN = [str(PayloadKey(7, 0, 1, shard, take)) for shard in (0, 12) for take in (2, keys.MAX_TAKES)]
_START = [keys.START, keys.start_take("0" * 16)]
_TAKES = [keys.snapshot(7, "x"), keys.snapshot(0, "x", "123456789")]
ANYBODYS = [*AGAIN, keys.LINK, keys.want(7, 0, 1, 0, 2), keys.commit(7), *_START, keys.result(1), *_TAKES]


SIGNED = "A" * 86  # the last part of an object's name in a signed run


@pytest.mark.parametrize("key", [*own_keys(1), *ANYBODYS])
def test_what_a_replica_writes_passes(key: str):
    assert may_put(key) and (may_put(f"{key}/{SIGNED}") or not is_named(key))


@pytest.mark.parametrize("key", [keys.result(999), keys.handle(1, 1), keys.cancel(1, 1), keys.contribution(7, 1)])
def test_the_attacks_of_one_replica_in_docs_attacks_need_no_more(key: str):
    assert may_put(key)


@pytest.mark.parametrize(
    "key",
    [
        *own_keys(0),
        keys.payload(7, 0, 1, 12),
        *own_keys(10),
        *own_keys(11),
        keys.RUN,
        keys.begin(1),
        keys.halt(1),
        keys.RETENTION,
        keys.snapshot(7, "model.safetensors", keys.own_take(None)),
        keys.code("a" * 64),
    ],
)
def test_what_is_another_replicas_or_the_launchers_does_not(key: str):
    assert not may_put(key)


# -- nobody overwrites ------------------------------------------------------------------------------------------------

_WORDS = {"token": "0" * 16, "job": "dl-run-1-r1-a2", "offer": "0" * 32, "identity": "0" * 32, "take": "2"}


def example(form: Form) -> str:
    return form(*(_WORDS.get(name, 1) for name in form.names))


RECORDS = [example(form) for kind in KINDS if kind.writers for form in kind.forms]  # without those of earlier versions
SEGMENT, BULK = str(SegmentKey(1, 10, "commits")), [*AGAIN, keys.snapshot(7, "x"), keys.state(1, 7, 1)]


@pytest.mark.parametrize("key", [*RECORDS, SEGMENT, *BULK, keys.code("a" * 64), keys.join_piece("dl-run-1-r1-a2", 0)])
def test_what_is_written_once_can_only_be_created(key: str):
    for name in [key, f"{key}/{SIGNED}"] if is_named(key) else [key]:
        over, part = {CREATES: "true"}, {CREATES: "false"}  # a part of an upload, which has no conditions
        assert denies(CREATE_ONLY, Question("s3:PutObject", f"{HERE}/{name}", over)) is not is_overwritten(key)
        assert not denies(CREATE_ONLY, Question("s3:PutObject", f"{HERE}/{name}", {**over, "s3:if-none-match": "*"}))
        assert not denies(CREATE_ONLY, Question("s3:PutObject", f"{HERE}/{name}", part))
