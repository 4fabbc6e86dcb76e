"""Rebuilds a base from the bucket alone: the nearest snapshot, then the outer steps of the commits after it.

The same arithmetic as in a live round, so the same bits (invariant I3); every digest is checked on the way.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from diloco_orchestrator.allreduce.mean import Part, mean_into
from diloco_orchestrator.allreduce.payload import FlatTensors, fetch
from diloco_orchestrator.config import OuterConfig, RunConfig
from diloco_orchestrator.errors import BaseDiverged, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Answer, Begin, Contribution, Stamp, Start, sha256_hex
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.run_log import CommitEntry, CommitLog, leg_position, read_optional, read_start
from diloco_orchestrator.snapshots.layout import complete_snapshots, files_of_snapshot, load_snapshot, write_snapshot
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

ReadShard = Callable[[Contribution, int], bytes]  # (manifest, shard index) -> verified bytes


@dataclass(frozen=True)
class Tip:
    """The newest base and where the log stands."""

    base: Base
    base_round: int  # whose commit made the base; 0 for the first
    digest: str
    position: Position
    last: CommitEntry | None  # of this leg


class ManifestReader:
    """Reads manifests and payload shards that commits name, straight from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def manifest(self, round_: int, answer: Answer) -> Contribution:
        """The manifest that a commit's answer names, digest checked."""
        key = keys.contribution(round_, answer.replica_id)
        data = self._store.get(key)
        if sha256_hex(data) != answer.manifest_sha256:
            raise RecordInvalid(
                f"{key} in {self._store.url} is not the manifest that the commit of round {round_} names."
            )
        return Contribution.from_bytes(data, key)

    def answer(self, round_: int, replica_id: int) -> Contribution | None:
        """A replica's manifest of a round, or None if there is none. Raises `RecordInvalid` if it was changed."""
        key = keys.contribution(round_, replica_id)
        data = read_optional(self._store, key)
        return None if data is None else Contribution.from_bytes(data, key)

    def manifests(self, round_: int, but: Collection[int] = ()) -> list[Contribution]:
        """The manifests of a round that can be read, in replica_id order, leaving out those of replicas in `but`."""
        found = []
        for info in self._store.list(keys.contributions(round_)):
            parsed = keys.parse_contribution(info.key)
            if parsed is None or parsed[1] in but:
                continue
            with suppress(RecordInvalid):  # whoever wrote it is not waited for
                manifest = self.answer(round_, parsed[1])
                if manifest is not None:
                    found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.replica_id)

    def shard(self, manifest: Contribution, index: int) -> bytes:
        assert manifest.payload is not None
        key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index)
        return fetch(self._store, key, manifest.payload, index)


def average(
    base: Base, fragment: Sequence[str], named: Sequence[tuple[Contribution, float]], read: ReadShard
) -> dict[str, torch.Tensor]:
    """The mean pseudo-gradient of the contributions in `named` (manifest, weight), by parameter name."""
    gradients = {name: torch.empty_like(base.parameters[name]) for name in fragment}
    mean_into(FlatTensors([gradients[name] for name in fragment]), [_part(m, weight, read) for m, weight in named])
    return gradients


def _part(manifest: Contribution, weight: float, read: ReadShard) -> Part:
    if manifest.payload is None:
        raise PayloadCorrupt(f"replica {manifest.replica_id} is averaged in round {manifest.round} without a payload.")
    return Part(manifest.replica_id, weight, manifest.payload, lambda index: read(manifest, index))


def rebuild(
    store: Store,
    begin: Begin,
    start: Start,
    start_sha256: str,
    outer: OuterConfig,
    until: int | None = None,
) -> Tip:
    """The newest base of the leg that `begin` began, or the one after round `until`: the newest snapshot, then the
    commits after it."""
    commit_log = CommitLog(store)
    tip = _from_snapshot(store, commit_log, begin, start, start_sha256, until)
    reader = ManifestReader(store)
    for entry in commit_log.after(tip.position):
        if until is not None and entry.commit.round > until:
            break
        tip = advance(tip, entry, start.fragments[entry.commit.fragment], outer, reader)
    return tip


def _from_snapshot(
    store: Store, commit_log: CommitLog, begin: Begin, start: Start, start_sha256: str, until: int | None
) -> Tip:
    """The leg's newest snapshot. Those between the leg's first base and the leg itself are of another past."""
    for round_ in reversed(complete_snapshots(store)):
        if begin.after_round >= round_ != begin.from_round or (until is not None and round_ > until):
            continue
        entry = commit_log.read(round_) if round_ else None
        if round_ and entry is None:
            continue  # a snapshot never outruns its commit; one that does was put there by hand
        expected = entry.commit.base_digest if entry else start.base_digest
        base = load_snapshot(store, round_, start.parameters)
        if base.digest() != expected:
            raise RecordInvalid(
                f"snapshot {round_} in {store.url} is not the base that the log names after that round."
            )
        if entry is None or round_ <= begin.after_round:
            return Tip(base, round_, expected, leg_position(begin, start_sha256), None)
        return Tip(base, round_, expected, entry.position, entry)
    raise RecordInvalid(
        f"{store.url} has {keys.START} but no complete snapshot that leg {begin.leg} could start from: snapshot "
        f"{begin.from_round} was deleted."
    )


def advance(tip: Tip, entry: CommitEntry, fragment: Sequence[str], outer: OuterConfig, reader: ManifestReader) -> Tip:
    """The tip after one more commit. Raises `BaseDiverged` if the digest is not the one the commit names."""
    commit = entry.commit
    if not commit.applied:
        return Tip(tip.base, tip.base_round, tip.digest, entry.position, entry)
    named = [(reader.manifest(commit.round, a), a.weight) for a in commit.answers if a.averaged]
    gradients = average(tip.base, fragment, named, reader.shard)
    base = tip.base.stepped(gradients, outer)
    digest = base.digest()
    if digest != commit.base_digest:
        raise BaseDiverged(
            f"rebuilt base {digest[:12]} after round {commit.round}; its commit names {commit.base_digest[:12]}. "
            "This machine computes other bits. Committed rounds are safe."
        )
    log.info("rebuilt round %d: base %s", commit.round, digest[:12])
    return Tip(base, commit.round, digest, entry.position, entry)


def snapshot_newest_base(store: Store, config: RunConfig, begin: Begin, stamp: Stamp) -> None:
    """Write the snapshot of the leg's newest base from the bucket alone, when no replica is there to do it."""
    found = read_start(store)
    if found is None:
        return
    start, start_sha256 = found
    tip = rebuild(store, begin, start, start_sha256, config.outer)
    write_snapshot(store, tip.base_round, tip.base, tip.digest, files_of_snapshot(store, 0, start.parameters), stamp)
