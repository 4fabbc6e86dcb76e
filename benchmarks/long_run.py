"""Writes the records of a long, completed run without training it, through the real record classes and a real store.

    python benchmarks/long_run.py FOLDER --rounds 10000 --replicas 8

Every replica contributes to every round and every round is applied, so the log is as long as a real one's and verifies.
The model's one parameter has no elements: payloads have no shards, and the base is the same after every round. Scores,
states and data cursors are left out. `history.py` measures what reading such a run costs; it runs this file of the
checkout that it measures, so whoever changes records changes this file with them.
"""

import argparse
from typing import Any

import torch

from diloco_orchestrator.config import make_config
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.attempt_records import Claim, Exit, Heartbeat, Intent
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Record, Stamp
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution, Metric, Origin, Payload, Run
from diloco_orchestrator.protocol.round_metrics import round_metrics_of
from diloco_orchestrator.protocol.rounds import Action, Decision, Position
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.protocol.weights import weight_of
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.segments import write_segments
from diloco_orchestrator.snapshots.layout import ModelFiles, describe, write_snapshot
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

NAME = "weight"
STEPS = 30  # inner steps of a round
ROUND_S = 60.0


class LongRun:
    """The records of one run, written oldest first."""

    def __init__(self, store: Store, replicas: int, outer_steps: int) -> None:
        self._store = store
        self._now = 1_700_000_000.0
        self._stamp = Stamp("long-run", lambda: self._now)
        config = make_config({"entrypoint": "nobody:trains", "replicas": replicas, "rounds": outer_steps})
        run = Run(**self._stamp(), run_id="long", config=config, package_version="benchmark")
        self._config = config
        self._claims: dict[int, str] = {}  # sha256, by replica
        self._log = create_run(store, run, by="launch", stamp=self._stamp)
        self._begin_sha256 = sha256_hex(store.get(keys.begin(1)))
        self._start()

    def _start(self) -> None:
        parameters = {NAME: torch.zeros(0)}
        self._base = Base.fresh(parameters, self._config.outer)
        self._digest = self._base.digest()
        model = torch.nn.Module()
        model.register_parameter(NAME, torch.nn.Parameter(parameters[NAME]))
        self._files = ModelFiles.of(model)
        self._snapshot(0)
        start = Start(
            **self._stamp(),
            run_sha256=self._log.run_sha256,
            parameters=describe(parameters),
            fragments=self._base.fragments,
            shard_numel=self._base.shard_numel,
            base_digest=self._digest,
        )
        self._position = Position.at_start(self._create(keys.START, start))

    def write(self) -> None:
        """Attempts, all rounds with the final evaluation, the last snapshot, the result, and how the attempts ended."""
        for replica_id in range(self._config.replicas):
            self._attempt_begins(replica_id)
        while self._position.stop == "none":
            commit = self._round()
        self._snapshot(commit.outer_step)
        write_segments(self._store, self._log.commit, commit.round)
        result = rounds.result_of(commit, self._position.sha256, self._stamp())
        self._create(keys.result(1), result)
        for replica_id in range(self._config.replicas):
            self._attempt_ends(replica_id)

    # -- rounds --------------------------------------------------------------------------------------------------

    def _round(self) -> Commit:
        self._now += ROUND_S
        round_, replicas = self._position.round + 1, range(self._config.replicas)
        final_evaluation = rounds.is_final_evaluation(self._position, self._config.rounds)
        manifests = [self._contribute(round_, replica_id, final_evaluation) for replica_id in replicas]
        answers = [self._answer(manifest) for manifest in manifests]
        decision = Decision(Action.COMMIT, f"{len(answers)} of {len(answers)} contributions", tuple(replicas))
        conclusion = rounds.conclude(decision, self._position, outer_steps=self._config.rounds, fired="", halt="")
        commit = Commit(
            **self._stamp(),
            round=round_,
            leg=1,
            fragment=0,
            outer_step=conclusion.outer_step,
            answers=rounds.mark_averaged(answers, decision.named if conclusion.applied else ()),
            begin_sha256=self._begin_sha256,
            base_digest=self._digest,
            roster=tuple(replicas),
            figures=round_metrics_of(manifests, decision.named if conclusion.applied else ()),
            applied=conclusion.applied,
            empty_rounds=conclusion.empty_rounds,
            stop=conclusion.stop,
            by=f"replica {round_ % len(replicas)}, attempt 1",
            reason=conclusion.reason,
            previous=self._position.sha256,
        )
        self._position = Position.after(commit, self._create(keys.commit(round_), commit))
        return commit

    def _contribute(self, round_: int, replica_id: int, final_evaluation: bool) -> Contribution:
        origins = () if final_evaluation else (Origin(round=round_, steps=STEPS),)
        numel = self._config.shard_numel
        manifest = Contribution(
            **self._stamp(),
            round=round_,
            leg=1,
            replica_id=replica_id,
            attempt=1,
            claim_sha256=self._claims[replica_id],
            kind="scores" if final_evaluation else "delta",
            base_digest=self._digest,
            snapshot_round=0,
            rebuilt_after=0,
            payload=None if final_evaluation else Payload(codec="fp32", numel=0, shard_numel=numel, shards=()),
            origins=origins,
            metrics={}
            if final_evaluation
            else {name: Metric(sum=STEPS * 2.0, count=STEPS) for name in ("loss", "tokens")},
            train_s=ROUND_S,
        )
        self._create(keys.contribution(round_, replica_id), manifest)
        return manifest

    def _answer(self, manifest: Contribution) -> Answer:
        return Answer(
            replica_id=manifest.replica_id,
            attempt=1,
            kind=manifest.kind,
            averaged=False,
            weight=weight_of(manifest.round, manifest.origins, 0, self._config),
            origins=manifest.origins,
            train_s=manifest.train_s,
            manifest_sha256=sha256_hex(manifest.to_bytes()),
            tokens=manifest.tokens,
            norm=manifest.payload.norm if manifest.payload else 0.0,
            payload=manifest.payload.digest if manifest.payload else "",
        )

    # -- beside the rounds ---------------------------------------------------------------------------------------

    def _snapshot(self, round_: int) -> None:
        write_snapshot(self._store, round_, self._base, self._digest, self._files, self._stamp, by=0)

    def _attempt_begins(self, replica_id: int) -> None:
        who = {"replica_id": replica_id, "attempt": 1}
        intent = Intent(**self._stamp(), **who, leg=1, executor="local", why="start of the run")
        claim = Claim(**self._stamp(), **who, host="nowhere", pid=1, versions={}, threads=1)
        self._create(keys.intent(replica_id, 1), intent)
        self._claims[replica_id] = self._create(keys.claim(replica_id, 1, intent.claim_token), claim)

    def _attempt_ends(self, replica_id: int) -> None:
        who: dict[str, Any] = {"replica_id": replica_id, "attempt": 1}
        beat = Heartbeat(**self._stamp(), **who, counter=9, phase="waiting", round=self._position.round, inner_step=0)
        self._store.put(keys.heartbeat(replica_id, 1), beat.to_bytes())
        ended = Exit(**self._stamp(), **who, code=0, reason="the run ended", round=self._position.round)
        self._create(keys.exit_record(replica_id, 1), ended)

    def _create(self, key: str, record: Record) -> str:
        """Write a record; returns its sha256."""
        data = record.to_bytes()
        self._store.create(key, data)
        return sha256_hex(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=8)
    given = parser.parse_args()
    LongRun(open_store(given.folder), given.replicas, given.rounds).write()


if __name__ == "__main__":
    main()
