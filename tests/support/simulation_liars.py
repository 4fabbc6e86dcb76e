"""Replicas that lie in rounds by scatter-reduce: what they write is changed on its way into the bucket of a simulation.

Their memory stays right, and so do their claims: what they lie about is averages, findings and commits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from diloco_orchestrator.allreduce.dealing import Dealing, average_codec_of, dealing_of
from diloco_orchestrator.allreduce.scatter_reduce import published_by
from diloco_orchestrator.codecs.table import encode
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import Reduced
from diloco_orchestrator.protocol.check_records import AverageCheck, Checked, PublishedAverage
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Commit

if TYPE_CHECKING:
    from simulation import Simulation


NUMEL = 4096  # elements of an average


class Liars:
    """Changes what liars create. A pair publishes one false average of each shard that both of them deal.

    Args:
        who: ids of one or two replicas.
        accuse: whether they accuse others of right averages.
        omit: whether their commits leave out the check records that accuse somebody.
    """

    def __init__(self, simulation: "Simulation", who: Sequence[int], accuse: bool = False, omit: bool = False) -> None:
        self.bucket, self.config = simulation.bucket, simulation.config
        self.who, self.accuse, self.omit = set(who), accuse, omit
        self.lies = 0  # shards with a false average
        self._create = simulation.bucket.create
        # What they publish in place of an average.
        self._false = encode(torch.full((NUMEL,), 0.5), average_codec_of(self.config.codec) or "fp32")
        simulation.bucket.create = self.create  # type: ignore[method-assign]

    def create(self, key: str, data: bytes) -> bool:
        for change in (self._shard, self._reduced, self._checked, self._commit):
            data = change(key, data)
        return self._create(key, data)

    def _dealing(self, round_: int) -> Dealing | None:
        commits = [self._commit_of(each) for each in (round_ - 1, round_)]
        among = [a.replica_id for a in commits[1].answers if a.attempt] if commits[1] else ()
        return dealing_of(round_, self.config, set(among) - set((commits[0] and commits[0].barred) or ()))

    def _commit_of(self, round_: int) -> Commit | None:
        data = self.bucket.commits.get(keys.commit(round_))
        return None if data is None else Commit.from_bytes(data, "a commit")

    def _are_dealers(self, round_: int, shard: int) -> bool:
        dealing = self._dealing(round_)
        return dealing is not None and set(dealing.averagers(shard)) == self.who

    def _shard(self, key: str, data: bytes) -> bytes:
        found = keys.parse_reduced_shard(key)
        if found is None or not self._are_dealers(found[0], found[1]):
            return data
        self.lies += 1
        return self._false

    def _reduced(self, key: str, data: bytes) -> bytes:
        found = keys.reduced.parse(key)
        if found is None or found[1] not in self.who:
            return data
        record, false = Reduced.from_bytes(data, key), {"digest": bulk_digest(self._false)}
        shards = [s.model_copy(update=false) if self._are_dealers(found[0], s.shard) else s for s in record.shards]
        return record.model_copy(update={"shards": tuple(shards)}).to_bytes()

    def _checked(self, key: str, data: bytes) -> bytes:
        found = keys.checked.parse(key)
        if found is None or found[1] not in self.who:
            return data
        record = Checked.from_bytes(data, key)
        said = [each.model_copy(update={"false": False}) for each in record.averages or ()]
        if self.accuse and found[0] > 1:
            honest = min(set(range(self.config.replicas)) - self.who)
            for shard, each in sorted(published_by(self.bucket, found[0] - 1, honest).items()):
                average = {"round": found[0] - 1, "shard": shard, "replicas": (honest,), "digest": each.digest}
                said.append(AverageCheck(average=PublishedAverage.model_validate(average), false=True))
        return record.model_copy(update={"averages": tuple(said) or None}).to_bytes()

    def _commit(self, key: str, data: bytes) -> bytes:
        if not key.endswith("/commit.json") or not self.omit:
            return data
        commit = Commit.from_bytes(data, key)
        if commit.by.who is None or commit.by.who[0] not in self.who or commit.checks is None:
            return data
        accuse = [
            each
            for each in commit.checks
            if b'"averages":[' in self.bucket.get(keys.checked(commit.round, each.replica_id, each.number))
        ]
        before = self._commit_of(commit.round - 1)
        kept = tuple(each for each in commit.checks if each not in accuse)
        barred = before.barred if before is not None else None
        return commit.model_copy(update={"checks": kept, "barred": barred}).to_bytes()
