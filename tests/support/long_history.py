"""Runs of thousands of rounds in seconds: their records are made and chained by the real classes, without training."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from protocol_fleet import Fleet, tiny_model

from diloco_orchestrator.codecs.table import encode
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Claim, Handle, Heartbeat, Intent
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution, Metric, Origin, Payload, Progress, Shard
from diloco_orchestrator.protocol.round_metrics import round_metrics_of
from diloco_orchestrator.protocol.start_records import Follows
from diloco_orchestrator.protocol.weights import weight_of
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.segments import write_segments
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from executors.contract import ReplicaHandle
from replica.training import rng

STEPS = 30


class RequestCounter(MemoryStore):
    """Counts the requests that a reader sends, a LIST once for each page of 1,000 keys."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[str] = []
        self.lists = 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gets.append(key)
        return super().get(key, start, end)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self.lists += 1
        for index, info in enumerate(super().list(prefix, start_after)):
            self.lists += bool(index and index % 1000 == 0)
            yield info

    def forget(self) -> None:
        self.gets.clear()
        self.lists = 0

    @property
    def requests(self) -> int:
        return len(self.gets) + self.lists


class LongRun:
    """A run whose replicas contributed zeros, so that every round ends with the first base.

    `snapshots`: how many of the newest bases, `snapshot_every` rounds apart, have a snapshot beside the first.
    `payload_rounds`: how many of the newest rounds have payloads; retention has deleted the others. `idle`: further
    replicas of the run, which never took part.
    """

    def __init__(
        self, rounds: int, replicas: int = 2, snapshots: int = 3, payload_rounds: int = 20, idle: int = 0
    ) -> None:
        self.store = RequestCounter()
        self.replicas = replicas
        kept = {"payloads": "needed"} if payload_rounds < rounds else {}
        given = {"quorum": None, "snapshot_every": 10, "retention": kept}
        self.fleet = Fleet(replicas=replicas + idle, rounds=10**6, store=self.store, **given)
        self._stamp = Stamp("long", lambda: 0.0)
        self._chance = _states_while_training()
        model = tiny_model()
        self._files = ModelFiles.of(model)
        self._base = Base.fresh(trainable(model), self.fleet.config.outer)
        for replica_id in range(replicas):
            self._write_attempt(replica_id, rounds)
        self.fleet.join(0, attempt=1, model=model)
        follows = Follows.from_bytes(self.store.get(keys.follows(0)), "")
        for replica_id in range(1, replicas):
            self.store.put(keys.follows(replica_id), follows.model_copy(update={"replica_id": replica_id}).to_bytes())
        self._claims = [sha256_hex(self.store.get(self.fleet.claim_key(i))) for i in range(replicas)]
        self.log = RunLog(self.store)
        self._zeros = encode(torch.zeros(12), self.fleet.config.codec)
        shard = Shard(digest=bulk_digest(self._zeros), size=len(self._zeros))
        self._payload = Payload(
            codec=self.fleet.config.codec, numel=12, shard_numel=self.fleet.config.shard_numel, shards=(shard,)
        )
        start, begin = self.log.start(), self.log.begin(1)
        assert start is not None and begin is not None
        for replica_id in range(1, replicas):  # as replica 0 has done when it joined
            given = {
                "replica_id": replica_id,
                "attempt": 1,
                "start_sha256": start.sha256,
                "key": keys.START,
                "take": "",
            }
            self.store.create(keys.follows(replica_id), Follows(**self._stamp(), **given).to_bytes())
        self._begin_sha256, self._previous, self.rounds = begin.sha256, start.sha256, 0
        self.add(rounds, payload_from=rounds - payload_rounds)
        for round_ in range(rounds // 10 * 10, max(0, rounds - 10 * snapshots), -10):
            self.write_snapshot(round_)
        self.store.forget()

    @property
    def digest(self) -> str:
        """Of the base after every round."""
        return self._base.digest()

    def write_snapshot(self, round_: int) -> None:
        write_snapshot(self.store, round_, self._base, self._base.digest(), self._files, self._stamp, by=0)

    def add(self, rounds: int, payload_from: int = 0) -> None:
        """Add so many rounds; only those after `payload_from` get payloads."""
        for round_ in range(self.rounds + 1, self.rounds + rounds + 1):
            manifests = [self._contribution(round_, replica_id) for replica_id in range(self.replicas)]
            answers = tuple(self._answer(manifest) for manifest in manifests)
            if round_ > payload_from:
                for manifest in manifests:
                    self.store.create(keys.payload(round_, manifest.replica_id, 1, 0), self._zeros)
            commit = self._commit(round_, answers, manifests).to_bytes()
            self.store.create(keys.commit(round_), commit)
            self._previous = sha256_hex(commit)
        self.rounds += rounds

    def write_segments(self) -> None:
        """Write all segments that a run of this length has."""
        write_segments(self.store, RunLog(self.store).commit, self.rounds)
        self.store.forget()

    def _contribution(self, round_: int, replica_id: int) -> Contribution:
        made = Contribution(
            **self._stamp(),
            round=round_,
            leg=1,
            replica_id=replica_id,
            attempt=1,
            claim_sha256=self._claims[replica_id],
            kind="delta",
            base_digest=self._base.digest(),
            snapshot_round=0,
            rebuilt_after=0,
            payload=self._payload,
            origins=(Origin(round=round_, steps=STEPS),),
            metrics={"loss": Metric(sum=90.0 + replica_id, count=STEPS), "tokens": Metric(sum=3000.0, count=STEPS)},
            progress=Progress(
                cursor={"epoch": 0, "batches": STEPS * round_, "chance": self._chance},
                rng=self._chance,
                inner_steps=STEPS * round_,
                tokens=3000 * round_,
            ),
            train_s=1.0,
        )
        self.store.create(keys.contribution(round_, replica_id), made.to_bytes())
        return made

    def _answer(self, manifest: Contribution) -> Answer:
        return Answer(
            replica_id=manifest.replica_id,
            attempt=1,
            kind="delta",
            averaged=True,
            weight=weight_of(manifest.round, manifest.origins, 0, self.fleet.config),
            payload=manifest.payload.digest if manifest.payload else "",
            origins=manifest.origins,
            train_s=manifest.train_s,
            manifest_sha256=sha256_hex(manifest.to_bytes()),
        )

    def _commit(self, round_: int, answers: tuple[Answer, ...], manifests: Sequence[Contribution]) -> Commit:
        return Commit(
            **self._stamp(),
            round=round_,
            leg=1,
            fragment=0,
            outer_step=round_,
            answers=answers,
            begin_sha256=self._begin_sha256,
            base_digest=self._base.digest(),
            roster=tuple(range(self.replicas)),
            figures=round_metrics_of(manifests, range(self.replicas)),
            applied=True,
            empty_rounds=0,
            stop="none",
            by="replica 0, attempt 1",
            reason=f"{self.replicas} of {self.replicas} contributions",
            previous=self._previous,
        )

    def _write_attempt(self, replica_id: int, round_: int) -> None:
        who = {"replica_id": replica_id, "attempt": 1}
        stamp, store = self._stamp, self.store
        store.create(
            keys.intent(replica_id, 1), Intent(**stamp(), **who, leg=1, executor="local", why="start").to_bytes()
        )
        handle = ReplicaHandle("scripted", "run-1", replica_id, 1, f"machine-{replica_id}").to_json()
        store.create(keys.handle(replica_id, 1), Handle(**stamp(), **who, handle=handle).to_bytes())
        if replica_id:
            claim = Claim(**stamp(), **who, host="h", pid=1, versions={}, threads=1)
            store.create(self.fleet.claim_key(replica_id), claim.to_bytes())
        beat = Heartbeat(**stamp(), **who, counter=1, phase="training", round=round_, inner_step=0)
        store.put(keys.heartbeat(replica_id, 1), beat.to_bytes())


def _states_while_training() -> dict[str, Any]:
    """States of random generators of a replica whose model has dropout, and whose data is shuffled by torch."""
    before = rng.capture()
    rng.seed_all(8)
    torch.rand(10_000)
    states = rng.capture()
    rng.restore(before)
    return states
