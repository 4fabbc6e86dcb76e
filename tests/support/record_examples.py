"""One record of each kind, with a value in every field that its golden bytes pin."""

from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol import (
    allreduce_records,
    attempt_records,
    check_records,
    key_records,
    records,
    start_records,
)
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.protocol.signatures import Operator

STAMP = {"write_id": "0123456789abcdef-1", "at": 1700000000.5}
SHA = "ab" * 32
B3 = "b3:" + SHA
PAYLOAD = records.Payload(
    codec="bf16", numel=3, shard_numel=2, shards=(records.Shard(digest=B3, size=20),), norms=(0.5,)
)
ANSWER = records.Answer(
    replica_id=1,
    attempt=2,
    kind="delta",
    averaged=True,
    weight=30,
    norm=0.5,
    payload=PAYLOAD.digest,
    tokens=900,
    origins=(records.Origin(round=3, steps=30),),
    train_s=1.5,
    manifest_sha256=SHA,
)
EXAMPLES: dict[str, Record] = {
    "run": records.Run(**STAMP, run_id="run-1", config=make_config({"entrypoint": "m:f"}), package_version="0.1.0"),
    "start": start_records.Start(
        **STAMP,
        run_sha256=SHA,
        parameters=(start_records.ParameterInfo(name="w", shape=(2, 3), dtype="float32"),),
        fragments=(("w",),),
        shard_numel=4,
        base_digest=B3,
        adapters=(
            start_records.AdapterPair(a="l.lora_A", b="l.lora_B", weight="l.weight", residual="l.r", scaling=2.0),
        ),
    ),
    "began": start_records.Began(**STAMP, replica_id=1, attempt=2, start_sha256="5" * 64, key="start/takes/00.json"),
    "link": allreduce_records.MeasuredLink(**STAMP, rank=1, latency_s=0.05, up=62.5e6, down=62.5e6),
    "follows": start_records.Follows(
        **STAMP, replica_id=1, attempt=2, start_sha256="5" * 64, key="start.json", take=""
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
    "scale": records.Scale(**STAMP, leg=1, number=2, replicas=8, by="diloco scale"),
    "out": records.Out(**STAMP, leg=1, replica_id=1, attempt=2, by="coordinator on host", reason="another model"),
    "result": records.Result(**STAMP, leg=1, status="completed", round=5, outer_steps=4, reason="done"),
    "intent": attempt_records.Intent(
        **STAMP,
        replica_id=0,
        attempt=1,
        leg=1,
        executor="local",
        why="start of the run",
        claim_token="0123456789abcdef",
    ),
    "handle": attempt_records.Handle(**STAMP, replica_id=0, attempt=1, handle={"native": {"pid": 7}}),
    "waiting": attempt_records.Waiting(**STAMP, replica_id=0, attempt=1, reason="its pod is refused: exceeded quota"),
    "claim": attempt_records.Claim(
        **STAMP,
        replica_id=0,
        attempt=1,
        host="box",
        pid=7,
        versions={"torch": "2.13.0"},
        threads=1,
        hardware={"cpu": "Xeon", "gpu": "H100"},
    ),
    "cancel": attempt_records.Cancel(**STAMP, replica_id=0, attempt=1, reason="the run is over"),
    "exit": attempt_records.Exit(
        **STAMP, replica_id=0, attempt=1, code=1, reason="ValueError", round=2, error="Traceback"
    ),
    "heartbeat": attempt_records.Heartbeat(
        **STAMP, replica_id=0, attempt=1, counter=9, phase="training", round=3, inner_step=4, loss=2.5
    ),
    "contribution": records.Contribution(
        **STAMP,
        round=3,
        leg=1,
        replica_id=1,
        attempt=2,
        kind="delta",
        base_digest=B3,
        snapshot_round=0,
        rebuilt_after=1,
        payload=PAYLOAD,
        tokens=900,
        origins=(records.Origin(round=3, steps=30),),
        in_loop=records.Metric(sum=-60.0, count=30),
        scores=(records.Score(share=1, sum=-12.0, count=5),),
        metrics={"loss": records.Metric(sum=60.0, count=30)},
        consumed=records.Consumed(items=240, digest=SHA),
        progress=records.Progress(cursor={"batches": 30, "epoch": 0}, rng={"torch": "AAA="}, inner_steps=90, tokens=5),
        train_s=1.5,
    ),
    "checked": check_records.Checked(
        **STAMP,
        round=3,
        leg=1,
        replica_id=1,
        attempt=2,
        number=1,
        claim_sha256=SHA,
        read=(check_records.ReadShards(manifest_sha256=SHA, good=(0, 2), bad=(5,)),),
    ),
    "commit": records.Commit(
        **STAMP,
        round=3,
        leg=1,
        fragment=0,
        outer_step=3,
        answers=(ANSWER,),
        begin_sha256=SHA,
        base_digest=B3,
        roster=(0, 1),
        guard={"level": None},
        verdict=None,
        norms=records.UsualNorms(rounds=2, spread=0.125, levels=((0, 0.5),)),
        clipped=(records.Clipped(replica_id=1, reason="far"),),
        discounted=(records.Discounted(replica_id=0, reason="a score that is not finite"),),
        figures=records.RoundMetrics(loss=2.0, tokens=5, dropped_steps=4, payload_bytes=20),
        applied=True,
        empty_rounds=0,
        stop="none",
        by="replica 1, attempt 2",
        reason="2 of 2 contributions",
        previous=SHA,
    ),
    "offer": attempt_records.Offer(
        **STAMP,
        run_id="run-1",
        replica_id=0,
        attempt=1,
        command=("python", "-c", "pass"),
        env={"REPLICA_RANK": "0"},
        secret_names=("HF_TOKEN",),
        code=f"code/{SHA}.zip",
        timeout_s=60.0,
    ),
    "invitation": attempt_records.Invitation(
        **STAMP, epoch=1, replica_id=5, identity="0" * 32, public="diloco-user-" + "A" * 86, not_after=1700086400.5
    ),
    "grant": attempt_records.Grant(
        **STAMP,
        epoch=1,
        replica_id=5,
        identity="0" * 32,
        number=2,
        sealed="A" * 100,
        not_after=1700043200.5,
        lasts_s=43200.0,
        role="arn:aws:iam::123456789012:role/lender",
    ),
    "window": attempt_records.Window(
        **STAMP,
        epoch=1,
        replica_id=5,
        identity="0" * 32,
        sealed="A" * 100,
        lasts_s=43200.0,
    ),
    "taken": attempt_records.Taken(**STAMP, by="0123456789abcdef", host="box", pid=7),
    "lease": attempt_records.Lease(**STAMP, counter=9),
    "join_cancel": attempt_records.JoinCancel(**STAMP),
    "join_end": attempt_records.JoinEnd(**STAMP, state="preempted", reason="exit", code=75, message="its machine left"),
    "snapshot": records.Snapshot(
        **STAMP, round=3, base_digest=B3, by=1, files={"model.safetensors": records.FileInfo(digest=B3, size=9)}
    ),
    "probe": records.Probe(**STAMP, base_digest=B3, items=SHA, digest=B3, size=9, tokens=3),
    "want": records.ReuploadRequest(
        **STAMP, round=3, replica_id=1, attempt=2, shard=0, take=2, by="replica 0, attempt 1", reason="it is gone"
    ),
    "unfounded": records.Unfounded(
        **STAMP, round=3, commit_sha256=SHA, by="coordinator on c", reason="it names a manifest that is not there"
    ),
    "rotation": key_records.Rotation(
        **STAMP,
        epoch=2,
        names="ed25519:" + "A" * 43,
        from_leg=2,
        after_round=9,
        commit_sha256=SHA,
        attempts={"0": 1, "1": 2},
        by="user",
        why="a key leaked",
    ),
    "colleague": key_records.Colleague(
        **STAMP,
        identity="0" * 32,
        epoch=1,
        operator=Operator(epoch=1, key="ed25519:" + "A" * 43, signature="A" * 86),
        sealed="AA==",
        by="user",
    ),
    "retention": records.Retention(**STAMP, payloads="needed", by="diloco gc"),
    "allreduce": allreduce_records.AllReducePart(
        **STAMP, round_id=0, rank=1, world_size=2, shape=(3,), dtype="torch.float32", payload=PAYLOAD
    ),
    "reduced": allreduce_records.Reduced(
        **STAMP,
        round_id=0,
        rank=1,
        shards=(
            allreduce_records.ReducedShard(shard=0, digest=B3),
            allreduce_records.ReducedShard(shard=1, digest=B3, take=2),
        ),
    ),
}
