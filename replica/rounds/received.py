"""`ReceivedResponses`: the replicas' responses to the open round, each with the kind that a commit lists for it.

A response is a manifest. It is a contribution only if the attempt that it names wrote it, for this round, and its
payload is as it declares; whatever else is there counts as unverifiable. `replica.rounds.payload_shards` reads and
verifies payloads, `protocol.rounds.decide` decides.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from diloco_orchestrator.allreduce.owners import ALONE, Owners, merged
from diloco_orchestrator.allreduce.payload import check_shape
from diloco_orchestrator.allreduce.payload_cache import Name
from diloco_orchestrator.allreduce.recent_payloads import RecentPayloads
from diloco_orchestrator.clock import MOST_PARALLEL, Background, in_parallel
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.claims import BaseClaim
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import LONGEST_REASON, MOST_NORM
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution
from diloco_orchestrator.protocol.round_metrics import check_repeatable
from diloco_orchestrator.protocol.weights import weight_of
from diloco_orchestrator.replica.rounds.counted_work import CountedWork
from diloco_orchestrator.replica.rounds.payload_shards import PayloadShard, ReadVerified, fetch_own, verify_own
from diloco_orchestrator.run_log.attempts import Authors
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.reader import read_optional, read_record
from diloco_orchestrator.store.base import Store

T = TypeVar("T")

log = logging.getLogger(__name__)

_BYTES_IN_FLIGHT = 8  # per element of a shard that is being fetched: the store engine's buffer and the bytes, 4 each
_MEMORY_IN_FLIGHT = 256 * 2**20


@dataclass(frozen=True)
class ReceivedContribution:
    """A response found in the bucket. `manifest`: None if it is unparsable or not by the attempt that it names."""

    answer: Answer
    manifest: Contribution | None


@dataclass(frozen=True)
class ExpectedContribution:
    """Properties of every valid contribution to the open round: round, leg, fragment, length, codec, kind."""

    round: int
    leg: int
    fragment: int
    numel: int  # of that fragment
    shard_numel: int
    config: RunConfig
    final_evaluation: bool = False  # whether it takes scores and no pseudo-gradients

    @property
    def longest(self) -> int:
        """The most bytes of a stranger's manifest. An honest one has some 200 a shard, and positions in its data."""
        return 2**20 + 256 * -(-self.numel // max(1, self.shard_numel))

    @property
    def shards_at_once(self) -> int:
        """Number of payload shards to fetch and verify at once, so that they take no more than 256 MiB."""
        shard_bytes = _BYTES_IN_FLIGHT * max(1, min(self.numel, self.shard_numel))
        return max(1, min(MOST_PARALLEL, _MEMORY_IN_FLIGHT // shard_bytes))


class ReceivedResponses:
    """Collects the replicas' responses, one round after another, and verifies their payload shards. Not thread-safe.

    Args:
        cache: verified bytes of payload shards; this replica's own are put there when they are published.
        dealing: returns the payload shards to download, from the manifests.
        counted: refuses work that counts already.
        owners: the ranks of this replica, each of which downloads the shards that it owns; `cache` is each one's.
    """

    def __init__(
        self,
        store: Store,
        background: Background,
        cache: RecentPayloads,
        authors: Authors,
        dealing: Callable[[Iterable[Contribution]], list[PayloadShard]],
        counted: CountedWork,
        owners: Owners = ALONE,
    ) -> None:
        self.shard = ReadVerified(store, cache)
        self._store = store
        self._background = background
        self._owners = owners
        self._reader = ContributionReader(store, background)
        self._cache = cache
        self._authors = authors
        self._dealing = dealing
        self._counted = counted
        self._received: dict[int, ReceivedContribution] = {}
        self._read_as: dict[Name, str] = {}  # shards of others that were read: why they are not used, or ""
        self._sent: bytes | None = None  # this replica's manifest, while it was not read back

    def clear(self) -> None:
        """Drop all responses at the end of a round, and the cached payload bytes of the round before it."""
        self._received.clear()
        self._read_as.clear()
        self._sent = None
        self._owners.each(RecentPayloads.end_round, self._cache, self._background)

    def unread(self, expected: ExpectedContribution) -> Mapping[int, str]:
        """The keys of manifests that were not fetched yet, by replica id. One LIST request."""
        found = {}
        for info in self._store.list(keys.contributions(expected.round)):
            parsed = keys.contribution.parse(info.key)
            if parsed and parsed[1] < expected.config.most_replicas and parsed[1] not in self._received:
                found[parsed[1]] = info.key
        return found

    def take_own(self, data: bytes, replica_id: int, expected: ExpectedContribution) -> None:
        """Count this replica's own response, whose bytes `data` it has just written, as received, without a request.

        `confirm_own` reads it back before a commit.
        """
        self._received[replica_id] = self._parsed(
            keys.contribution(expected.round, replica_id), data, replica_id, expected
        )
        self._sent = data

    def confirm_own(self, replica_id: int, round_: int) -> bool:
        """Whether the bucket holds this replica's own response with the bytes it wrote. One GET; if not, it is dropped.

        A commit names the bytes that others read: a store may damage an object that it has acknowledged.
        """
        if self._sent is None:
            return True
        sent, self._sent = self._sent, None
        if read_record(self._store, keys.contribution(round_, replica_id)) == sent:
            return True
        del self._received[replica_id]
        return False

    def receive(self, unread: Mapping[int, str], expected: ExpectedContribution) -> None:
        """Fetch and verify responses in two round trips: all unread manifests, then their assigned payload shards.

        A manifest that is not by the attempt it names counts as unverifiable; one that was listed and is missing is no
        response, as it was deleted or, in a signed run, its author has not signed it. Claims of attempts not seen
        before are fetched together with the payloads. This replica's own payload is not read back.
        """
        calls = [partial(self._read, key, replica_id, expected) for replica_id, key in unread.items()]
        read = [self._unless_counted(each) for each in in_parallel(self._background, calls) if each is not None]
        readable = [(each.manifest, each.answer.kind) for each in read if each.manifest is not None]
        checking = self._background.start(lambda: self._authors.why_not_each([manifest for manifest, _ in readable]))
        damaged = self._damaged([manifest for manifest, kind in readable if kind == "delta"], expected)
        forged = checking.result()
        for each in read:
            answer = each.answer
            if why := forged.get(answer.replica_id):
                log.warning("round %d: replica %d's manifest is nobody's: %s", expected.round, answer.replica_id, why)
                answer = _answer(answer.replica_id, None, "unverifiable", answer.manifest_sha256, expected, why)
                each = ReceivedContribution(answer, None)
            elif why := damaged.get(answer.replica_id):
                answer = answer.model_copy(update={"kind": "unverifiable", "reason": why[:LONGEST_REASON]})
            self._received[answer.replica_id] = replace(each, answer=answer)

    # -- what was received ---------------------------------------------------------------------------------------

    def answers(self) -> list[Answer]:
        """All responses so far, in the form that a commit lists, in replica_id order; `averaged` is still False."""
        return [self._received[replica_id].answer for replica_id in sorted(self._received)]

    def manifests(self, replica_ids: Iterable[int] | None = None) -> list[Contribution]:
        """The parsed manifests of these replicas, which must have responded, in replica_id order; None: of all."""
        wanted = self._received if replica_ids is None else replica_ids
        found = (self._received[replica_id].manifest for replica_id in sorted(wanted))
        return [manifest for manifest in found if manifest is not None]

    def by_digest(self) -> dict[str, Contribution]:
        """The readable manifests so far, by the sha256 of their bytes."""
        found = ((each.answer.manifest_sha256, each.manifest) for each in self._received.values())
        return {sha256: manifest for sha256, manifest in found if manifest is not None}

    def claims(self) -> list[BaseClaim]:
        """Base claims (base digests named in manifests) of the readable manifests, in replica_id order.

        Announcements, manifests by which a replica only reports that it is back, name no base and are left out.
        """
        return [BaseClaim.of(manifest) for manifest in self.manifests() if manifest.base_digest]

    def averaged_by(
        self, commit: Commit, expected: ExpectedContribution, *, payloads: bool
    ) -> list[tuple[Contribution, int]]:
        """The contributions that a commit averages, each with its weight.

        Manifests not received yet are fetched now, in one round trip, and with `payloads` the payload shards assigned
        to this replica, in a second one. Raises `RecordInvalid` if a manifest is not the one that the commit names,
        `PayloadCorrupt` for a payload that is damaged, `PayloadGone` for one that was deleted.
        """
        answers = [answer for answer in commit.answers if answer.averaged]
        manifests = in_parallel(self._background, [partial(self._named, commit.round, answer) for answer in answers])
        if shards := self._dealing(manifests) if payloads else []:
            self._each_owner(fetch_own, shards, expected)
        return [(manifest, answer.weight) for manifest, answer in zip(manifests, answers, strict=True)]

    def _named(self, round_: int, answer: Answer) -> Contribution:
        """The manifest that a commit names by digest: the received one, or fetched now if that has another digest.

        Raises `RecordInvalid` if the one in the bucket has another digest too, `ObjectMissing` if there is none.
        """
        received = self._received.get(answer.replica_id)
        if received and received.manifest and received.answer.manifest_sha256 == answer.manifest_sha256:
            return received.manifest
        return self._reader.named(round_, answer)

    def late_in(self, round_: int, replicas: int, seen: set[int]) -> list[Contribution]:
        """Manifests that exist now in a closed round, in replica_id order, except those of the replicas in `seen`.

        Adds to `seen` the replicas whose manifests were read, with whatever result: none is read twice.
        """
        new = self._reader.authors_in(round_, replicas) - seen
        seen |= new
        return self._reader.each_of(round_, new)

    # -- verifying -----------------------------------------------------------------------------------------------

    def _read(self, key: str, replica_id: int, expected: ExpectedContribution) -> ReceivedContribution | None:
        data = read_optional(self._store, key)
        return None if data is None else self._parsed(key, data, replica_id, expected)

    def _parsed(self, key: str, data: bytes, replica_id: int, expected: ExpectedContribution) -> ReceivedContribution:
        """The response whose exact bytes are `data`, without its payload."""
        sha256 = sha256_hex(data)
        try:
            if replica_id in expected.config.invited and len(data) > expected.longest:
                raise RecordInvalid(f"{key} has {len(data)} bytes; {expected.longest} are the most of a stranger's.")
            manifest = Contribution.from_bytes(data, key)
            check_repeatable(manifest, expected.config.most_replicas, key)
        except RecordInvalid as error:
            log.warning("round %d: the manifest of replica %d cannot be read: %s", expected.round, replica_id, error)
            reason = f"the manifest cannot be read: {error}"
            return ReceivedContribution(_answer(replica_id, None, "unverifiable", sha256, expected, reason), None)
        kind, reason = self._kind(manifest, replica_id, expected)
        foreign = kind == "unverifiable" and not _belongs(manifest, replica_id, expected)
        return ReceivedContribution(
            _answer(replica_id, manifest, kind, sha256, expected, reason), None if foreign else manifest
        )

    def _kind(self, manifest: Contribution, replica_id: int, expected: ExpectedContribution) -> tuple[str, str]:
        """(kind of response that a commit lists for a good `manifest`, reason if it is no contribution)."""
        if not _belongs(manifest, replica_id, expected):
            log.warning("round %d: replica %d's manifest was copied from elsewhere", expected.round, replica_id)
            return "unverifiable", "the manifest was copied from another round, leg or replica"
        if manifest.kind == "abstention":
            why = manifest.reason[:LONGEST_REASON]
            log.warning("round %d: replica %d abstains: %s", expected.round, replica_id, why)
            return "abstention", manifest.reason
        if why := _why_no_contribution(manifest, expected):
            log.warning("round %d: replica %d is not averaged: %s", expected.round, replica_id, why)
            return "unverifiable", why
        if manifest.kind == "delta" and (why := _breaks_its_promise(manifest, expected)):
            return "unverifiable", why
        return manifest.kind, ""

    def _unless_counted(self, received: ReceivedContribution) -> ReceivedContribution:
        """A response as it is, or as unverifiable if it says work that counts already, or of later rounds."""
        manifest, answer = received.manifest, received.answer
        if manifest is None or answer.kind != "delta" or not (why := self._counted.why_not(manifest)):
            return received
        log.warning("round %d: replica %d is not averaged: %s", manifest.round, answer.replica_id, why)
        return replace(
            received, answer=answer.model_copy(update={"kind": "unverifiable", "reason": why[:LONGEST_REASON]})
        )

    def _damaged(self, manifests: Sequence[Contribution], expected: ExpectedContribution) -> dict[int, str]:
        """Errors of payloads with a shard that is not as its manifest declares, by replica id; empty if there is none.

        Only the shards that `dealing` assigns to this replica are fetched. Caches the verified bytes.
        """
        shards = self._dealing(manifests)
        errors = self.verify(shards, expected)
        damaged: dict[int, str] = {}
        for shard, error in zip(shards, errors, strict=True):
            if error is not None and shard.manifest.replica_id not in damaged:
                damaged[shard.manifest.replica_id] = str(error)
                _log_not_averaged(shard.manifest, error)
        return damaged

    def _each_owner(
        self, task: Callable[..., T], shards: Sequence[PayloadShard], expected: ExpectedContribution
    ) -> list[T]:
        """Call `task`, which reads of `shards` those that its process holds, in each process of this replica."""
        most = expected.shards_at_once
        return self._owners.each(task, self._owners, self._store, self._background, self._cache, shards, most)

    def why_not(self, shard: PayloadShard) -> str | None:
        """Reason why a payload shard cannot be averaged, "" if it can; None if this replica has not read it."""
        return self._read_as.get(shard.name)

    def verify(self, shards: Sequence[PayloadShard], expected: ExpectedContribution) -> Sequence[PayloadCorrupt | None]:
        """Fetch and verify payload shards, assigned to this replica or not; the error of each, None if it is right.

        `why_not` returns the results later.
        """
        if not shards:
            return []
        found = merged(self._each_owner(verify_own, shards, expected))
        errors = [found[shard.name] for shard in shards]
        self._read_as |= {shard.name: str(error or "") for shard, error in zip(shards, errors, strict=True)}
        return errors


def _why_no_contribution(manifest: Contribution, expected: ExpectedContribution) -> str:
    """Reason why a manifest that is no abstention is no contribution, whatever its payload; empty if it may be one.

    A commit that counted it as one would be void, so that its author could fail the run.
    """
    if manifest.kind == "scores" and not expected.final_evaluation:
        return "the manifest holds scores alone, which only the final evaluation round takes"
    return "" if manifest.base_digest else "the manifest names no base from which its author started"


def _breaks_its_promise(manifest: Contribution, expected: ExpectedContribution) -> str:
    """Reason why a payload cannot be averaged: fragment, codec, lengths or norms are not as expected; else ""."""
    payload = manifest.payload
    try:
        if payload is None or manifest.fragment != expected.fragment:
            raise PayloadCorrupt(f"the manifest holds no payload of fragment {expected.fragment}.")
        check_shape(payload, expected.config.codec, expected.numel, expected.shard_numel)
        if len(payload.norms) != len(payload.shards) or payload.norm > MOST_NORM:
            raise PayloadCorrupt(
                f"the manifest declares {len(payload.norms)} norms of {len(payload.shards)} shards, together "
                f"{payload.norm:.3g}; each shard has one, and {MOST_NORM:.3g} is the most that sums can hold."
            )
    except PayloadCorrupt as error:
        _log_not_averaged(manifest, error)
        return str(error)
    return ""


def _log_not_averaged(manifest: Contribution, error: PayloadCorrupt) -> None:
    log.warning("round %d: replica %d is not averaged: %s", manifest.round, manifest.replica_id, error)


def _belongs(manifest: Contribution, replica_id: int, expected: ExpectedContribution) -> bool:
    """Whether a manifest names the round, leg and replica of its key; if not, it was copied from another key."""
    return (manifest.round, manifest.leg, manifest.replica_id) == (expected.round, expected.leg, replica_id)


def _answer(
    replica_id: int,
    manifest: Contribution | None,
    kind: str,
    sha256: str,
    expected: ExpectedContribution,
    reason: str,
) -> Answer:
    origins, tokens = (manifest.origins, manifest.tokens) if manifest else ((), 0)
    return Answer.model_validate(
        {
            "replica_id": replica_id,
            "attempt": manifest.attempt if manifest else 0,
            "kind": kind,
            "averaged": False,
            "weight": weight_of(expected.round, origins, tokens, expected.config),
            "norm": manifest.payload.norm if manifest and manifest.payload else 0.0,
            "payload": manifest.payload.digest if manifest and manifest.payload else "",
            "tokens": tokens,
            "origins": origins,
            "train_s": manifest.train_s if manifest else 0.0,
            "manifest_sha256": sha256,
            "reason": reason[:LONGEST_REASON],
        }
    )
