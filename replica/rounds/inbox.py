"""The answers to one open round as this replica has seen them, each verified down to its last payload byte.

Verification comes before the decision: what is not verified here is never averaged. The decision itself is
`protocol.rounds`'.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_orchestrator.allreduce.payload import check_shape, decode, fetch
from diloco_orchestrator.allreduce.payload_cache import Name, PayloadCache
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid, RecordTooNew
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Answer, Contribution, sha256_hex
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReceivedContribution:
    """An answer found in the bucket; `manifest` is None where it cannot be read or belongs elsewhere."""

    answer: Answer
    manifest: Contribution | None


@dataclass(frozen=True)
class ExpectedContribution:
    """What a contribution to the open round must be."""

    round: int
    leg: int
    replicas: int
    base_digest: str
    fragment: int
    numel: int  # of that fragment
    codec: str
    shard_numel: int


class RoundInbox:
    """Collects the answers of one round after another. One thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader = ContributionReader(store)
        self._spool = PayloadCache()
        self._seen: dict[int, ReceivedContribution] = {}
        self._confirmed: set[int] = set()

    def clear(self) -> None:
        """Forget the round."""
        self._seen.clear()
        self._confirmed.clear()
        self._spool.clear()

    def look(self, expected: ExpectedContribution) -> None:
        """Read and verify the answers that are new since the last look."""
        for info in self._store.list(keys.contributions(expected.round)):
            parsed = keys.parse_contribution(info.key)
            if parsed and parsed[1] < expected.replicas and parsed[1] not in self._seen:
                self._seen[parsed[1]] = self._judge(info.key, parsed[1], expected)

    def seen(self) -> list[ReceivedContribution]:
        """All answers so far, in replica_id order."""
        return [self._seen[replica_id] for replica_id in sorted(self._seen)]

    def manifests(self, replica_ids: Iterable[int]) -> list[Contribution]:
        """The readable manifests of these replicas, in replica_id order."""
        found = (self._seen[replica_id].manifest for replica_id in sorted(replica_ids))
        return [manifest for manifest in found if manifest is not None]

    def named_by(self, round_: int, answers: Sequence[Answer]) -> list[tuple[Contribution, float]]:
        """(manifest, weight) of the answers that a commit averages, from memory where we saw the same ones."""
        named = []
        for answer in answers:
            seen = self._seen.get(answer.replica_id)
            same = seen is not None and seen.answer.manifest_sha256 == answer.manifest_sha256
            manifest = seen.manifest if seen and same else None
            named.append((manifest or self._reader.named(round_, answer), answer.weight))
        return named

    def keep(self, key: str, sha256: str, data: bytes) -> None:
        """Remember verified shard bytes: our own as they are published."""
        self._spool.put((key, sha256), data)

    def shard(self, manifest: Contribution, index: int) -> bytes:
        """The verified bytes of a shard, from the spool where it was verified before."""
        return self._spool.get(_shard_name(manifest, index)) or self._reader.shard(manifest, index)

    def confirm(self, replica_id: int) -> bool:
        """Whether our own payload arrived as it was sent: it was verified from memory so far, as others cannot.

        If not, our answer counts as unverifiable from here on.
        """
        seen = self._seen.get(replica_id)
        if seen is None or seen.manifest is None or seen.answer.kind != "delta" or replica_id in self._confirmed:
            return True
        assert seen.manifest.payload is not None
        try:
            for index in range(len(seen.manifest.payload.shards)):
                self._reader.shard(seen.manifest, index)
        except PayloadCorrupt as error:
            log.error("round %d: our own payload arrived damaged and is not averaged: %s", seen.manifest.round, error)
            answer = seen.answer.model_copy(update={"kind": "unverifiable"})
            self._seen[replica_id] = ReceivedContribution(answer, seen.manifest)
            return False
        self._confirmed.add(replica_id)
        return True

    # -- judging one answer --------------------------------------------------------------------------------------

    def _judge(self, key: str, replica_id: int, expected: ExpectedContribution) -> ReceivedContribution:
        data = self._store.get(key)
        sha256 = sha256_hex(data)
        try:
            manifest = Contribution.from_bytes(data, key)
        except RecordTooNew:
            raise
        except RecordInvalid as error:
            log.warning("round %d: the answer of replica %d cannot be read: %s", expected.round, replica_id, error)
            return ReceivedContribution(_answer(replica_id, None, "unverifiable", sha256), None)
        kind = self._kind(manifest, replica_id, expected)
        foreign = kind == "unverifiable" and not _in_place(manifest, replica_id, expected)
        return ReceivedContribution(_answer(replica_id, manifest, kind, sha256), None if foreign else manifest)

    def _kind(self, manifest: Contribution, replica_id: int, expected: ExpectedContribution) -> str:
        if not _in_place(manifest, replica_id, expected):
            log.warning("round %d: replica %d's answer was copied from elsewhere", expected.round, replica_id)
            return "unverifiable"
        if manifest.base_digest != expected.base_digest:
            log.warning(
                "round %d: replica %d trained from base %s, the round starts from %s: it is not averaged",
                *(expected.round, replica_id, manifest.base_digest[:12], expected.base_digest[:12]),
            )
            return "wrong_base"
        if manifest.kind == "abstention":
            log.warning("round %d: replica %d abstains: %s", expected.round, replica_id, manifest.reason)
        if manifest.kind == "delta" and not self._verified(manifest, expected):
            return "unverifiable"
        return manifest.kind

    def _verified(self, manifest: Contribution, expected: ExpectedContribution) -> bool:
        """Fetch and check every shard; what is verified stays in the spool."""
        try:
            if manifest.payload is None or manifest.fragment != expected.fragment:
                raise PayloadCorrupt(f"the manifest holds no payload of fragment {expected.fragment}.")
            check_shape(manifest.payload, expected.codec, expected.numel, expected.shard_numel)
            for index in range(len(manifest.payload.shards)):
                self._verify_shard(manifest, index)
        except PayloadCorrupt as error:
            log.warning("round %d: replica %d is not averaged: %s", expected.round, manifest.replica_id, error)
            return False
        return True

    def _verify_shard(self, manifest: Contribution, index: int) -> None:
        assert manifest.payload is not None
        name = _shard_name(manifest, index)
        if self._spool.get(name) is None:  # our own is there already
            data = fetch(self._store, name[0], manifest.payload, index)
            decode(data, manifest.payload, index, f"replica {manifest.replica_id}'s payload")
            self._spool.put(name, data)


def _shard_name(manifest: Contribution, index: int) -> Name:
    assert manifest.payload is not None
    key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index)
    return key, manifest.payload.shards[index].sha256


def _in_place(manifest: Contribution, replica_id: int, expected: ExpectedContribution) -> bool:
    return (manifest.round, manifest.leg, manifest.replica_id) == (expected.round, expected.leg, replica_id)


def _answer(replica_id: int, manifest: Contribution | None, kind: str, sha256: str) -> Answer:
    return Answer.model_validate(
        {
            "replica_id": replica_id,
            "attempt": manifest.attempt if manifest else 0,
            "kind": kind,
            "averaged": False,
            "weight": manifest.weight if manifest else 1.0,
            "origins": manifest.origins if manifest else (),
            "manifest_sha256": sha256,
        }
    )
