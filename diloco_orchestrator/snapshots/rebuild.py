"""Rebuilds a base from the bucket alone: reads the nearest snapshot, then repeats the outer steps after it.

The arithmetic is that of a live round, so the bits are the same (invariant I3). No digest in the log is law: a snapshot
counts once it is confirmed, which `snapshots.confirmation` decides.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError, NoSuchRun, ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.float_mode import denormals_kept
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import leg_of_base
from diloco_orchestrator.protocol.records import Begin, Contribution, Replay, Stamp, Start
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import CommitEntry, RunLog
from diloco_orchestrator.snapshots.buffers import buffers_of_base
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.stored import StoredSnapshot, first_snapshot

log = logging.getLogger(__name__)

_REBUILDS = 3  # two that agree, and one more if a bit was wrong in one of them


@dataclass(frozen=True)
class Tip:
    """A rebuilt base, and the position in the commit log up to which the commits are included."""

    base: Base
    base_round: int  # the round that made the base; 0 for the first base
    snapshot_round: int  # the snapshot that the base was rebuilt from
    position: Position  # after `base_round`, or after later rounds that were not applied
    last: CommitEntry | None  # the commit at `position`; None if the leg has none yet

    @property
    def digest(self) -> str:
        """Digest of the base, hashed at every call."""
        return self.base.digest()


@dataclass(frozen=True)
class FirstBase:
    """The first base in memory, so that snapshot 0 need not be read. Whoever rebuilds from it steps it in place."""

    base: Base
    digest: str


def rebuild(
    run_log: RunLog,
    begin: Begin,
    until: int | None = None,
    below: int | None = None,
    first: FirstBase | None = None,
) -> Tip:
    """The newest base of a leg, or its base after round `until`, with the position in the log.

    Starts from the newest confirmed snapshot, of a round before `below` if that is given; from an older one if the
    newest is damaged or payloads after it cannot be read. `first`: the first base, if this process has it. Raises
    `RecordInvalid` if no snapshot is left to start from, `PayloadGone` for a payload that was deleted, `PayloadCorrupt`
    for one that is damaged.
    """
    return _rebuild(run_log, begin, until, below, first)[0]


def rebuild_files(run_log: RunLog, round_: int) -> tuple[Tip, ModelFiles]:
    """The base after `round_`, whichever leg made it, and what else a snapshot of it needs.

    That is taken from snapshot 0, and the buffers from the replica whose they are (`snapshots.buffers`).

    The newest base must descend from that base. Raises `NoSuchRun` if no replica has created the first base, and
    `ConfigError` naming the nearest snapshot if payloads that the base needs were deleted by retention.
    """
    try:
        tip, snapshot = rebuild_base(run_log, round_)
    except PayloadGone:
        kept = run_log.snapshots()
        nearest = min(kept, key=lambda known: (abs(known - round_), known))
        raise ConfigError(
            f"round {round_} of {run_log.store.url} cannot be rebuilt any more: payloads that it needs were deleted by "
            f"retention. Snapshots are there of rounds {', '.join(map(str, kept))}; the nearest is {nearest}."
        ) from None
    start = _start(run_log)
    first = snapshot if snapshot.round == 0 else first_snapshot(run_log)
    changed = {} if start.buffers is None else buffers_of_base(run_log, round_)
    return tip, first.model_files(start).with_buffers(changed)


def rebuild_base(run_log: RunLog, round_: int) -> tuple[Tip, StoredSnapshot]:
    """The base after `round_`, whichever leg made it, and the snapshot that it was rebuilt from.

    The newest base must descend from that base. Raises `NoSuchRun` if no replica has created the first base, and what
    `rebuild` raises.
    """
    if run_log.start() is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model: there is no base to rebuild.")
    begin = leg_of_base(run_log.begins(), round_)
    assert begin is not None, "the caller has checked that the round has a base"
    return _rebuild(run_log, begin, round_)


def digest_of_base(run_log: RunLog, round_: int) -> str:
    """The digest of the base after a round: of its confirmed snapshot, else rebuilt. Errors as of `rebuild_files`."""
    take = ConfirmedSnapshots(run_log).take_of(round_)
    return rebuild_files(run_log, round_)[0].digest if take is None else run_log.snapshot(round_, take).base_digest


def rebuild_scored(run_log: RunLog, model: int) -> Base:
    """The base that the guard scored as the model after round `model`; the newest base must descend from it.

    The model after a leg's last commit before it is the base that the leg starts from. Errors as of `rebuild`.
    """
    begins = run_log.begins()
    scored_in = next(begin for begin in reversed(begins) if begin.after_round <= model)
    round_ = scored_in.from_round if model == scored_in.after_round else model
    begin = leg_of_base(begins, round_)
    if begin is None:
        raise RecordInvalid(f"the base of round {round_} of {run_log.store.url} is no ancestor of the newest one.")
    return _rebuild(run_log, begin, round_)[0].base


def write_rebuilt_snapshot(run_log: RunLog, round_: int, stamp: Stamp) -> None:
    """Write the snapshot of the base after `round_`, rebuilt from the bucket. Errors as of `rebuild_files`.

    The base is rebuilt until its digest comes out a second time, or is that of a replay: no replica contradicts a wrong
    bit here. Raises `RecordInvalid` if three rebuilds all differ.
    """
    known = {replay.base_digest for replay in run_log.replays(round_)}
    if not any(_write_if_known(run_log, round_, stamp, known) for _ in range(_REBUILDS)):
        raise RecordInvalid(
            f"{_REBUILDS} rebuilds of the base after round {round_} of {run_log.store.url} gave different digests: the "
            "memory of this machine cannot be trusted. Run the command on another one."
        )


def _write_if_known(run_log: RunLog, round_: int, stamp: Stamp, known: set[str]) -> bool:
    """Rebuild a base and write its snapshot if its digest is known, else add the digest. Whether it was known."""
    tip, files = rebuild_files(run_log, round_)
    digest = tip.digest
    if digest not in known:
        known.add(digest)
        return False
    record_replay(run_log, round_, digest, tip.snapshot_round, "rebuilt from the bucket", stamp)
    write_snapshot(run_log.store, round_, tip.base, digest, files, stamp)
    return True


def record_replay(run_log: RunLog, round_: int, digest: str, snapshot_round: int, by: str, stamp: Stamp) -> None:
    """Record that `by` rebuilt the base after `round_` and got `digest`, which confirms snapshots of that base."""
    if round_ == 0:
        return
    replay = Replay(**stamp(), round=round_, base_digest=digest, snapshot_round=snapshot_round, by=by)
    run_log.store.create(keys.replay(round_, replay.write_id), replay.to_bytes())


def _replay(run_log: RunLog, tip: Tip, until: int | None) -> Tip:
    """Repeat the commits after `tip`, up to round `until` or to the newest; returns the base and position reached."""
    reader = ContributionReader(run_log.store)
    for entry in run_log.after(tip.position, derive_verdicts=True):
        if until is not None and entry.commit.round > until:
            break
        tip = _advance(run_log, tip, entry, reader)
    return tip


def _rebuild(
    run_log: RunLog, begin: Begin, until: int | None, below: int | None = None, first: FirstBase | None = None
) -> tuple[Tip, StoredSnapshot]:
    """The rebuilt tip, and the snapshot that it starts from. The first error decides if no snapshot leads there."""
    failure: PayloadCorrupt | RecordInvalid | ObjectMissing | None = None
    for round_, take in _candidates(run_log, begin, until, below):
        try:
            tip, snapshot = _at_snapshot(run_log, begin, round_, take, first)
            return _replay(run_log, tip, until), snapshot
        except (PayloadCorrupt, RecordInvalid, ObjectMissing) as error:
            failure = failure or error
            log.warning("base after round %s not rebuilt from snapshot %d: %s", until or "newest", round_, error)
    raise failure or RecordInvalid(
        f"{run_log.store.url} has {keys.START} but no complete and confirmed snapshot that leg {begin.leg} could start "
        f"from: snapshot {begin.from_round} was deleted."
    )


def _candidates(run_log: RunLog, begin: Begin, until: int | None, below: int | None) -> Iterator[tuple[int, int]]:
    """(round, take) of the confirmed snapshots on the way of a leg, newest first.

    Snapshots of rounds between the base that the leg started from and the leg's first round are skipped: the leg does
    not descend from them.
    """
    snapshots = ConfirmedSnapshots(run_log)
    for round_ in reversed(snapshots.rounds):
        if begin.after_round >= round_ != begin.from_round or (until is not None and round_ > until):
            continue
        if (below is not None and round_ >= below) or (round_ and run_log.commit(round_) is None):
            continue  # a snapshot is written after its commit; one without a commit was put there by hand
        take = snapshots.take_of(round_)
        if take is not None:
            yield round_, take


def _at_snapshot(
    run_log: RunLog, begin: Begin, round_: int, take: int, first: FirstBase | None = None
) -> tuple[Tip, StoredSnapshot]:
    """The tip at a snapshot. Raises `RecordInvalid` if its files are not those of its record."""
    entry = run_log.commit(round_) if round_ else None
    snapshot = StoredSnapshot(run_log.store, round_, run_log.snapshot(round_, take), take)
    start = _start(run_log)
    if first is not None and not round_ and first.digest == start.base_digest:
        base = first.base
    else:
        base = snapshot.base(start)
        if not round_ and snapshot.record.base_digest != start.base_digest:
            raise RecordInvalid(
                f"snapshot 0 in {run_log.store.url} holds base {snapshot.record.base_digest[:12]}, the run began with "
                f"{start.base_digest[:12]}: somebody else wrote it. Start a new run."
            )
    if entry is None or round_ <= begin.after_round:
        return Tip(base, round_, round_, run_log.leg_position(begin), None), snapshot
    return Tip(base, round_, round_, entry.position, entry), snapshot


def _advance(run_log: RunLog, tip: Tip, entry: CommitEntry, reader: ContributionReader) -> Tip:
    """The tip after one more commit."""
    commit = entry.commit
    if not commit.applied:
        return replace(tip, position=entry.position, last=entry)
    read = run_log.conclusions.manifests(entry)
    named = [(read.get(a.replica_id) or reader.named(commit.round, a), a.weight) for a in commit.answers if a.averaged]
    take_step(run_log, tip.base, commit.fragment, named, run_log.configs.of(commit.leg), reader)
    log.info("rebuilt round %d", commit.round)
    return Tip(tip.base, commit.round, tip.snapshot_round, entry.position, entry)


def take_step(
    run_log: RunLog,
    base: Base,
    fragment: int,
    named: Sequence[tuple[Contribution, int]],
    config: RunConfig,
    reader: ContributionReader,
) -> None:
    """Step `base` in place by contributions, read from the bucket, with the arithmetic of a live round.

    An error leaves a base that is stepped in part: `PayloadGone` for a payload that was deleted, `PayloadCorrupt` for
    one that is damaged.

    Args:
        named: (manifest, weight) of what is averaged.
        config: of the round's leg.
    """
    with denormals_kept(), closing(PayloadCache()) as cache:
        read, adapters = partial(_read_through, cache, reader), _start(run_log).adapters
        outer_step.average_and_step(
            base, fragment, named, read, config.outer, aggregate=config.aggregate, adapters=adapters
        )


def _read_through(
    cache: PayloadCache, reader: ContributionReader, manifest: Contribution, index: int
) -> bytes | memoryview:
    """A shard's bytes, in `cache`: those of all replicas are read side by side, and may exceed the memory together."""
    name = f"{manifest.replica_id}", f"{index}"
    if (f"{manifest.replica_id}", f"{index - 1}") in cache:  # the shard before is averaged
        cache.clear()
    cache.put(name, reader.shard(manifest, index))
    kept = cache.get(name)
    assert kept is not None, "it was put there above"
    return kept


def _start(run_log: RunLog) -> Start:
    found = run_log.start()
    assert found is not None, "the caller has checked that start.json exists"
    return found.record
