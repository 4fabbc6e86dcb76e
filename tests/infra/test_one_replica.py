"""The policy of one replica: it writes below its own prefixes and what any replica may, and nothing of another's."""

import json
from pathlib import Path

import pytest
from iam_server import Question, allows

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.keys import PayloadKey
from diloco_orchestrator.protocol.signed_objects import is_named

HERE = "arn:aws:s3:::BUCKET/PREFIX"
POLICY = (Path(__file__).parents[2] / "infra" / "iam" / "one-replica.json").read_text()


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
