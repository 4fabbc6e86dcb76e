"""`RoundInbox`: the responses to the open round as this replica has received them, verified to the last payload byte.

Verification comes before the decision: what is not verified here is never averaged. The decision is made by
`protocol.rounds.decide`.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from diloco_orchestrator.allreduce.payload import check_shape, decode
from diloco_orchestrator.allreduce.payload_cache import Name, PayloadCache
from diloco_orchestrator.allreduce.shards import fetch
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid, RecordTooNew
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution, sha256_hex
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReceivedContribution:
    """A response found in the bucket. `manifest` is None if it cannot be parsed or is a copy from another key."""

    answer: Answer
    manifest: Contribution | None


@dataclass(frozen=True)
class ExpectedContribution:
    """The properties that a contribution to the open round must have."""

    round: int
    leg: int
    replicas: int
    base_digest: str
    fragment: int
    numel: int  # of that fragment
    codec: str
    shard_numel: int


class RoundInbox:
    """Collects the responses of one round after another. Not thread-safe.

    `cache`: verified payload bytes; this replica's own are put there when they are published.
    """

    def __init__(self, store: Store, cache: PayloadCache) -> None:
        self._store = store
        self._reader = ContributionReader(store)
        self._cache = cache
        self._received: dict[int, ReceivedContribution] = {}
        self._confirmed: set[int] = set()

    def clear(self) -> None:
        """Forget all responses and cached bytes, at the end of a round."""
        self._received.clear()
        self._confirmed.clear()
        self._cache.clear()

    def poll(self, expected: ExpectedContribution) -> None:
        """Read and verify the responses that are new since the last poll. One LIST request; GETs for new ones."""
        for info in self._store.list(keys.contributions(expected.round)):
            parsed = keys.parse_contribution(info.key)
            if parsed and parsed[1] < expected.replicas and parsed[1] not in self._received:
                self._received[parsed[1]] = self._verify(info.key, parsed[1], expected)

    # -- what was received ---------------------------------------------------------------------------------------

    def answers(self) -> list[Answer]:
        """All responses so far, in the form that a commit lists, in replica_id order; `averaged` is still False."""
        return [self._received[replica_id].answer for replica_id in sorted(self._received)]

    def manifests(self, replica_ids: Iterable[int] | None = None) -> list[Contribution]:
        """The readable manifests of these replicas, which must have responded, in replica_id order; None: of all."""
        wanted = self._received if replica_ids is None else replica_ids
        found = (self._received[replica_id].manifest for replica_id in sorted(wanted))
        return [manifest for manifest in found if manifest is not None]

    def scored_manifests(self) -> list[Contribution]:
        """The manifests that start from the round's base, so that their scores are scores of that base."""
        received = self._received.items()
        return self.manifests(replica_id for replica_id, each in received if each.answer.kind != "wrong_base")

    def averaged_by(self, commit: Commit) -> list[tuple[Contribution, float]]:
        """The contributions that a commit averages, each with its weight. Manifests not received yet are read now.

        Raises `RecordInvalid` if a manifest is not the one that the commit names.
        """
        averaged = []
        for answer in commit.answers:
            if answer.averaged:
                received = self._received.get(answer.replica_id)
                same = received is not None and received.answer.manifest_sha256 == answer.manifest_sha256
                manifest = received.manifest if received and same else None
                averaged.append((manifest or self._reader.named(commit.round, answer), answer.weight))
        return averaged

    def late_in(self, round_: int, but: Collection[int]) -> list[Contribution]:
        """Manifests that exist now in a closed round, in replica_id order, except those of the replicas in `but`."""
        return self._reader.in_round(round_, but)

    def shard(self, manifest: Contribution, index: int) -> bytes:
        """The verified bytes of a shard, from the cache if they were verified before."""
        return self._cache.get(_shard_name(manifest, index)) or self._reader.shard(manifest, index)

    def confirm(self, replica_id: int) -> bool:
        """Whether this replica's own payload is in the bucket as published; it is read back once. True without a
        payload.

        The other replicas read the payload from the bucket, this one verified it from memory only. If the bytes differ,
        its response counts as unverifiable from here on.
        """
        received = self._received.get(replica_id)
        if received is None or received.manifest is None or received.answer.kind != "delta":
            return True
        if replica_id in self._confirmed:
            return True
        manifest = received.manifest
        assert manifest.payload is not None
        try:
            for index in range(len(manifest.payload.shards)):
                self._reader.shard(manifest, index)
        except PayloadCorrupt as error:
            log.error("round %d: our own payload arrived damaged and is not averaged: %s", manifest.round, error)
            answer = received.answer.model_copy(update={"kind": "unverifiable"})
            self._received[replica_id] = ReceivedContribution(answer, manifest)
            return False
        self._confirmed.add(replica_id)
        return True

    # -- verifying one response ----------------------------------------------------------------------------------

    def _verify(self, key: str, replica_id: int, expected: ExpectedContribution) -> ReceivedContribution:
        data = self._store.get(key)
        sha256 = sha256_hex(data)
        try:
            manifest = Contribution.from_bytes(data, key)
        except RecordTooNew:
            raise
        except RecordInvalid as error:
            log.warning("round %d: the manifest of replica %d cannot be read: %s", expected.round, replica_id, error)
            return ReceivedContribution(_answer(replica_id, None, "unverifiable", sha256), None)
        kind = self._kind(manifest, replica_id, expected)
        foreign = kind == "unverifiable" and not _belongs(manifest, replica_id, expected)
        return ReceivedContribution(_answer(replica_id, manifest, kind, sha256), None if foreign else manifest)

    def _kind(self, manifest: Contribution, replica_id: int, expected: ExpectedContribution) -> str:
        """The kind of response that a commit lists for a manifest. Reads and verifies the payload."""
        if not _belongs(manifest, replica_id, expected):
            log.warning("round %d: replica %d's manifest was copied from elsewhere", expected.round, replica_id)
            return "unverifiable"
        if manifest.base_digest != expected.base_digest:
            log.warning(
                "round %d: replica %d trained from base %s, the round starts from %s: it is not averaged",
                *(expected.round, replica_id, manifest.base_digest[:12], expected.base_digest[:12]),
            )
            return "wrong_base"
        if manifest.kind == "abstention":
            log.warning("round %d: replica %d abstains: %s", expected.round, replica_id, manifest.reason)
        if manifest.kind == "delta" and not self._payload_verified(manifest, expected):
            return "unverifiable"
        return manifest.kind

    def _payload_verified(self, manifest: Contribution, expected: ExpectedContribution) -> bool:
        """Whether all shards of the payload are as the manifest promises. Verified bytes are kept in the cache."""
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
        if self._cache.get(name) is None:  # this replica's own shards are in the cache
            data = fetch(self._store, name[0], manifest.payload, index)
            decode(data, manifest.payload, index, f"replica {manifest.replica_id}'s payload")
            self._cache.put(name, data)


def _shard_name(manifest: Contribution, index: int) -> Name:
    """The name of a shard's bytes in a `PayloadCache`: (key, sha256)."""
    assert manifest.payload is not None
    key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index)
    return key, manifest.payload.shards[index].sha256


def _belongs(manifest: Contribution, replica_id: int, expected: ExpectedContribution) -> bool:
    """Whether a manifest names the round, leg and replica of its key; if not, it was copied by hand."""
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
