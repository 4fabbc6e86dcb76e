"""Verifies contributions and outer steps: manifests, payload bytes, and the base recomputed after each round."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import PayloadGone, check_shard, fetch_shard
from diloco_orchestrator.errors import DilocoError, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.inspection.verify.findings import (
    Differs,
    Verification,
    equal,
    fetch,
    is_of_this_reader,
    optional,
    parse,
)
from diloco_orchestrator.inspection.verify.inventory import NamedByTheLog
from diloco_orchestrator.inspection.verify.snapshots import SnapshotChecker, UnreadBase
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import Checked
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.keys import SegmentKey
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution, Shard
from diloco_orchestrator.protocol.signatures import LONGEST_LINE
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.segments import Manifests, is_line
from diloco_orchestrator.snapshots.saved_state import pieces_of
from diloco_orchestrator.store.base import ObjectInfo

if TYPE_CHECKING:
    from diloco_orchestrator.inspection.verify.tensors import Tensors
    from diloco_orchestrator.outer.base import Base


class SegmentChecker:
    """Reads and checks one run's segments, objects that join the commits or manifests of ten or a hundred rounds.

    Each segment is read once, in order of rounds, and one is in memory at a time. The single objects stay in the bucket
    beside the segments.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._segment: SegmentKey | None = None  # of commits, that holds the round
        self._manifests: Manifests | None = None
        self._sizes: dict[str, int] = {}  # of all objects of the segment's rounds
        self._listing: Iterator[ObjectInfo] | None = None  # of all objects of rounds, in key order; taken once
        self._ahead: ObjectInfo | None = None  # the first one that was not needed yet
        self._until = 0  # the last round for which a segment was looked for

    def manifest(self, round_: int, answer: Answer) -> bytes | None:
        """The bytes of the manifest that a commit names, from a segment (many manifests in one object); else None.

        Raises `Differs` if a segment cannot be read, or if the manifest's own object is missing or has another size.
        """
        self._move_to(round_)
        data = self._manifests.find(answer.manifest_sha256) if self._manifests else None
        if data is not None:
            self._check_single(keys.contribution(round_, answer.replica_id), len(data))
        return data

    def check_lacking(self, round_: int, data: bytes) -> None:
        """Raise `Differs` if a segment (many manifests in one object) covers the round but lacks these bytes."""
        ours = self._manifests
        if ours is not None and is_line(data) and ours.lacks(data):
            raise Differs(str(ours.segment), f"lacks a manifest that the commit of round {round_} names")

    def is_deleted(self, round_: int, key: str) -> bool:
        """Whether a listing that covers the round showed that the object at `key` does not exist."""
        return self._segment is not None and round_ <= self._until and key not in self._sizes

    def check_commit(self, round_: int, size: int) -> None:
        """Raise `Differs` if a segment (many commits in one object) has a commit without own object of this size."""
        self._move_to(round_)
        if self._segment is not None:
            self._check_single(keys.commit(round_), size)

    def _move_to(self, round_: int) -> None:
        if round_ <= self._until:
            return
        try:
            self._manifests = self._log.segments.manifests(round_)
        except RecordInvalid as error:
            raise Differs(keys.LOG, f"has a segment that cannot be read: {error}") from None
        self._segment = self._log.segments.holding(round_)
        self._until = self._segment.last if self._segment else round_
        self._sizes.clear()
        if self._segment is not None:
            self._list_singles(round_, self._until)

    def _list_singles(self, first: int, last: int) -> None:
        if self._listing is None:
            self._listing = self._log.store.list(keys.ROUNDS, start_after=keys.end_of_round(first - 1))
            self._ahead = next(self._listing, None)
        while self._ahead is not None and self._ahead.key < keys.end_of_round(last):
            self._sizes[self._ahead.key] = self._ahead.size
            self._ahead = next(self._listing, None)

    def _check_single(self, key: str, size: int) -> None:
        """Raise `Differs` if a commit or manifest in a segment has no object of its own with the same size.

        In a signed run an object is longer than the record in it by the line of its signature.
        """
        found = self._sizes.get(key)
        line = (found or 0) - size
        if not (0 < line <= LONGEST_LINE if self._log.run.signed_by is not None else line == 0):
            words = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise Differs(key, f"{words}, though {self._segment} was made of it")


class BaseDeriver:
    """Recomputes bases from contributions, one round after another. Every payload byte is fetched once.

    `tensors`: None where torch is not installed. Then objects are checked, and no base is recomputed.
    """

    def __init__(
        self, log: RunLog, start: Start, snapshots: SnapshotChecker, done: Verification, tensors: "Tensors | None"
    ) -> None:
        self._tensors = tensors
        self._store = log.store
        self._log = log
        self._start = start
        self._snapshots = snapshots
        self._done = done
        self._reader = ContributionReader(log.store)
        self._shards = PayloadCache()  # of the current round, digests checked
        self.segments = SegmentChecker(log)
        self.named = NamedByTheLog(code_sha256=log.run.code_sha256)
        self._attempts = AttemptRecords(log.store)
        self._claims: dict[tuple[int, int], str] = {}  # sha256 of attempts' claims
        self._counted: dict[int, array[int]] = {}  # by replica: for each round of origin the commit that counted it

    # -- manifests and the objects that they name ----------------------------------------------------------------

    def manifests(self, commit: Commit) -> dict[int, Contribution | None]:
        """The manifests that a commit names, by replica id; None for an unparsable one or a copy from another key.

        Raises `Differs` if a manifest or an object that it names is not what the commit records.
        """
        self._shards.clear()
        return {answer.replica_id: self._manifest(commit, answer) for answer in commit.answers}

    def _manifest(self, commit: Commit, answer: Answer) -> Contribution | None:
        key = keys.contribution(commit.round, answer.replica_id)
        data = self.segments.manifest(commit.round, answer)
        if data is None:
            data = fetch(self._store, key, f"the commit of round {commit.round} names it")
        equal(key, "its digest", sha256_hex(data), answer.manifest_sha256, "the commit that names it")
        self.segments.check_lacking(commit.round, data)
        self.named.manifests.add((commit.round, answer.replica_id))
        if answer.attempt == 0:
            equal(key, "kind", "unverifiable", answer.kind, "a commit that names no attempt")
            return None
        manifest = parse(Contribution, key, data)
        in_place = (manifest.round, manifest.leg, manifest.replica_id) == (commit.round, commit.leg, answer.replica_id)
        if not in_place:
            if answer.kind != "unverifiable":
                raise Differs(key, "says that it is another round's or another replica's")
            return None
        equal(key, "attempt", manifest.attempt, answer.attempt, "the commit that names it")
        self._check_author(manifest)
        if answer.kind == "wrong_base" and manifest.base_digest == commit.base_digest:
            raise Differs(key, f"names the base that round {commit.round} started from; the commit says it does not")
        if answer.kind not in ("wrong_base", "unverifiable"):
            equal(key, "kind", manifest.kind, answer.kind, "the commit that names it")
            if answer.averaged:
                self._check_payload(manifest)
            self._check_unread(manifest, averaged=answer.averaged)
        equal(key, "train_s", manifest.train_s, answer.train_s, "the commit that names it")
        self._done.checked["manifests"] += 1
        return manifest

    def checks(self, commit: Commit) -> dict[str, Checked]:
        """The check records that a commit names, by digest. Raises `Differs` for a missing, other or misplaced one."""
        found = {}
        for named in commit.checks or ():
            key = keys.checked(commit.round, named.replica_id, named.number)
            data = fetch(self._store, key, f"the commit of round {commit.round} names it")
            equal(key, "its digest", sha256_hex(data), named.sha256, "the commit that names it")
            record = found[named.sha256] = optional(key, partial(Checked.from_bytes, data, key))
            of = record.round, record.leg, record.replica_id, record.number
            equal(key, "whose it is", of, (commit.round, commit.leg, named.replica_id, named.number), "its key")
        return found

    def _check_author(self, manifest: Contribution) -> None:
        """Raise `Differs` unless the claim of the manifest's attempt has the digest that the manifest names.

        The claim is the record by which a process became the attempt; without claim or intent `Differs` is raised too.
        """
        who = manifest.replica_id, manifest.attempt
        key = self._attempts.claim_key(*who)
        if key is None:
            raise Differs(keys.intent(*who), "is missing or cannot be read; it names the claim of a manifest's attempt")
        if who not in self._claims:
            self._claims[who] = sha256_hex(fetch(self._store, key, "a manifest that a commit names is by that attempt"))
        named = keys.contribution(manifest.round, manifest.replica_id)
        equal(key, "its digest", self._claims[who], manifest.claim_sha256, named)
        self.named.attempts[manifest.round, manifest.replica_id] = manifest.attempt

    def _check_unread(self, manifest: Contribution, *, averaged: bool) -> None:
        """Check the objects of a manifest that no base follows from: they are for later attempts of its author.

        A stranger may name what is not there, which is noted. Raises `Differs` for such an object of another replica.
        """
        try:
            if not averaged:
                self._check_payload(manifest)
            self._check_state(manifest)
            self._check_residual(manifest)
        except Differs as differs:
            if manifest.replica_id not in self._log.run.config.invited:
                raise
            self._done.notes.append(f"{differs.found.key} {differs}; nobody but its author, a stranger, would read it")

    def _check_payload(self, manifest: Contribution) -> None:
        for index, shard in enumerate(manifest.payload.shards if manifest.payload else ()):
            key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index)
            if self.segments.is_deleted(manifest.round, key):
                self._note_deleted(key, manifest.round)
                continue
            later = [
                keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index, take)
                for take in range(2, keys.MAX_TAKES + 1)
            ]
            data = self._checked(key, manifest.round, shard, later)
            if data is not None and self._tensors is not None:
                self._shards.put((key, shard.digest), data)

    def _check_residual(self, manifest: Contribution) -> None:
        if (residual := manifest.residual) is None:
            return
        for index, shard in enumerate(residual.saved.shards if residual.saved else ()):
            key = keys.residual(manifest.replica_id, manifest.round, manifest.attempt, index)
            self._checked(key, manifest.round, shard)
        for round_, share in residual.missing:
            of = keys.contribution(round_, manifest.replica_id)
            self._done.notes.append(f"the residual of {of}, {share:.3g} of its norm, was lost and is in no payload")

    def _check_state(self, manifest: Contribution) -> None:
        if manifest.buffers is not None:
            key = keys.buffers(manifest.replica_id, manifest.round, manifest.attempt)
            self._checked(key, manifest.round, manifest.buffers)
        if manifest.state is None:
            return
        key, state = keys.state(manifest.replica_id, manifest.round, manifest.attempt), manifest.state
        data = self._checked(key, manifest.round, state)
        if data is None:
            return
        try:
            pieces = pieces_of(data, manifest)
        except DilocoError as error:
            raise Differs(key, str(error)) from None
        for piece_key, piece in pieces:
            self._checked(piece_key, manifest.round, piece)

    def _checked(self, key: str, round_: int, shard: Shard, later: Sequence[str] = ()) -> bytes | None:
        """The bytes of an object that a manifest names, checked against the digest in `shard`.

        None if the object was deleted and retention may have done it. `round_`: the manifest's. `later`: keys of
        re-uploads, which are tried if the object is damaged, or missing against retention's rules. Raises `Differs`
        if none of them has the digest.
        """
        try:
            data = fetch_shard(self._store, key, shard)
        except PayloadGone:
            try:
                self._note_deleted(key, round_)
                return None
            except Differs as differs:
                data = self._put_again(key, shard, later, differs)
        except DilocoError as error:
            if is_of_this_reader(error):
                raise
            data = self._put_again(key, shard, later, Differs(key, str(error)))
        self._done.checked["bytes of payloads and states"] += len(data)
        self._done.checked["payloads and states"] += 1
        return data

    def _put_again(self, key: str, shard: Shard, later: Sequence[str], differs: Differs) -> bytes:
        """A shard's bytes from the first re-upload that has the shard's digest; raises `differs` if there is none."""
        for each in later:
            with suppress(PayloadCorrupt):
                data = fetch_shard(self._store, each, shard)
                self._done.notes.append(f"{key} was damaged or lost; {each} holds its bytes")
                return data
        raise differs from None

    def _note_deleted(self, key: str, round_: int) -> None:
        self._snapshots.check_deleted(key, round_)
        self._done.checked["payloads and states collected"] += 1  # a key of verify's JSON, which keeps its name

    # -- the outer step ------------------------------------------------------------------------------------------

    def stepped(
        self, key: str, commit: Commit, base: "Base | UnreadBase | None", named: Sequence[Contribution]
    ) -> "Base | None":
        """The base after an applied commit, or None if it cannot be known. `base`, the one before, is stepped in place.

        None if `base` is None or unread, or payloads were deleted. `named`: the manifests that the commit averages.
        Raises `Differs` if they cannot be averaged, or if an inner step counts twice, `SpoolFailed` if this machine
        lacks room, `StoreError` if it cannot read them.
        """
        self._check_origins(key, commit)
        if base is None or isinstance(base, UnreadBase) or self._tensors is None:
            return None
        weights = {answer.replica_id: answer.weight for answer in commit.answers}
        pairs = [(manifest, weights[manifest.replica_id]) for manifest in named]
        try:
            self._tensors.step(base, commit, pairs, self._shard, self._start)
            return base
        except PayloadGone:
            return None
        except (DilocoError, IndexError, RuntimeError, ValueError) as error:
            if is_of_this_reader(error):
                raise
            raise Differs(key, f"averages what cannot be averaged: {error}") from None

    def _shard(self, manifest: Contribution, index: int) -> bytes | memoryview:
        assert manifest.payload is not None
        key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index)
        kept = self._shards.get((key, manifest.payload.shards[index].digest))
        if kept is None:
            return self._reader.shard(manifest, index)
        check_shard(kept, manifest.payload, index, key)
        return kept

    def _check_origins(self, key: str, commit: Commit) -> None:
        """Raise `Differs` if an inner step of a replica is in two averaged contributions (invariant I4)."""
        for answer in commit.answers:
            counted = self._counted.setdefault(answer.replica_id, array("I"))
            for origin in answer.origins if answer.averaged else ():
                if origin.round > commit.round:
                    raise Differs(key, f"counts work of replica {answer.replica_id} in a later round, {origin.round}")
                counted.extend([0] * (origin.round + 1 - len(counted)))
                if before := counted[origin.round]:
                    words = f"counts replica {answer.replica_id}'s work of round {origin.round} again"
                    raise Differs(key, f"{words}, after round {before}")
                counted[origin.round] = commit.round
