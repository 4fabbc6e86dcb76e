"""Rebuilds a base from the bucket alone: reads the nearest snapshot, then repeats the outer steps of later commits.

The arithmetic is that of a live round, so the bits are the same (invariant I3). `snapshots.confirmation` decides which
snapshots count; their files are checked against the digests here.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.owners import ALONE, Owners, merged
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import (
    ConfigError,
    NoSuchRun,
    ObjectMissing,
    PayloadCorrupt,
    RecordInvalid,
    RecordTooNew,
)
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.arithmetic import denormals_kept
from diloco_orchestrator.outer.base import Base, BaseLayout, BaseShard
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import leg_of_base
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Commit, Contribution
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.protocol.start_records import AdapterPair, Start
from diloco_orchestrator.run_log.commit_readings import Unchecked
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.buffers import buffers_of_base
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots, claimed_base
from diloco_orchestrator.snapshots.first_snapshot import files_of_run, first_snapshot
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.snapshots.stored_shards import StoredShards

log = logging.getLogger(__name__)
T = TypeVar("T")

_REBUILDS = 3  # two that agree, and one more if a bit was wrong in one of them


@dataclass(frozen=True)
class Tip:
    """A base in memory, and the position in the commit log up to which commits are included in it."""

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
    """The first base in memory, so that a rebuild need not read snapshot 0. A rebuild from it overwrites it."""

    base: Base
    digest: str


def rebuild(
    run_log: RunLog,
    begin: Begin,
    until: int | None = None,
    below: int | None = None,
    first: FirstBase | None = None,
    owners: Owners = ALONE,
) -> Tip:
    """The newest base of a leg (start or resume to stop), or that after round `until`, rebuilt; and its log position.

    Starts from the newest confirmed snapshot (before round `below`, if given), or from an older one if that is damaged
    or later payloads cannot be read. `first`: the first base, if in memory. `owners`: the ranks that hold the base;
    each reads and steps its own shards. Raises `RecordInvalid` if no usable snapshot is left, `PayloadGone` for a
    deleted payload, `PayloadCorrupt` for a damaged one.
    """

    def rebuilt(way: _Way) -> Tip:
        start, reader = start_of(run_log), ContributionReader(run_log.store)
        in_memory = first is not None and not way.round and first.digest == start.base_digest
        base = first.base if first is not None and in_memory else stored_base(_stored(run_log, way), start, owners)
        position, last = _position_at(run_log, way)
        tip = Tip(base, way.round, way.round, position, last)
        for entry in _commits(run_log, way):
            if entry.commit.applied:
                owners.each(take_step, base, _logged(run_log, entry, reader), start.adapters, reader)
                log.info("the base after round %d is rebuilt from the bucket", entry.commit.round)
                tip = replace(tip, base_round=entry.commit.round)
            tip = replace(tip, position=entry.position, last=entry)
        leg = way.legs[-1][0]
        if len(way.legs) > 1 and (tip.last is None or tip.last.commit.leg != leg.leg):
            tip = replace(tip, position=run_log.leg_position(leg), last=None)  # the leg has no commit yet
        return tip

    return _by_first_way(run_log, begin, until, below, rebuilt)


@dataclass(frozen=True)
class Rebuilt:
    """The shards of a rebuilt base that one process owns: their digests, and those that differ from a base in memory.

    Both are by (fragment, index).
    """

    stored: Mapping[tuple[int, int], str]  # digests as the snapshot has them
    stepped: Mapping[tuple[int, int], str]  # digests after the commits that follow
    differing: Mapping[tuple[int, int], BaseShard]

    def digests(self) -> list[Mapping[tuple[int, int], str]]:
        """Digests of the owned shards, by (fragment, index): as stored in the snapshot, and after the steps."""
        return [self.stored, self.stepped]

    def correct(self, base: Base) -> None:
        """Overwrite the shards of `base` in this process that differ with the rebuilt ones."""
        for (fragment, index), shard in self.differing.items():
            base.shards(fragment)[index].copy_(shard)


@dataclass(frozen=True)
class BaseComparison:
    """The difference between a rebuilt base and one in memory: the rebuilt digest, and the shards that differ."""

    digest: str  # of the rebuilt base
    snapshot_round: int  # the snapshot that it was rebuilt from
    shards: Rebuilt  # in every rank its own
    owners: Owners = ALONE

    def correct(self, base: Base) -> None:
        """Overwrite the differing shards of `base`, the one that was compared, with the rebuilt ones."""
        self.owners.each(Rebuilt.correct, self.shards, base)


def rebuild_beside(
    run_log: RunLog,
    begin: Begin,
    until: int | None = None,
    below: int | None = None,
    base: Base | None = None,
    owners: Owners = ALONE,
) -> BaseComparison:
    """Rebuild the newest base of a leg, or that after round `until`, shard by shard, and compare it with `base`.

    A leg is a run's stretch from start or resume to stop; if `base` is None only the digest is computed. Each shard is
    read from the snapshot, stepped through all rounds, hashed and compared before the next one, by the rank of `owners`
    that owns it. With exactly averaged adapters the whole base is rebuilt, because their steps need several shards.
    Raises as `rebuild` does.
    """
    if not start_of(run_log).adapters:
        return _by_first_way(run_log, begin, until, below, partial(_compared_along, run_log, base, owners))
    tip, differing = rebuild(run_log, begin, until, below), {}
    for fragment in range(len(tip.base.fragments)) if base is not None else ():
        for index, shard in enumerate(tip.base.shards(fragment)):
            if base is not None and not shard.equals(base.shards(fragment)[index]):
                differing[fragment, index] = shard
    return BaseComparison(tip.digest, tip.snapshot_round, Rebuilt({}, {}, differing))


def rebuild_files(run_log: RunLog, round_: int, owners: Owners = ALONE) -> tuple[Tip, ModelFiles]:
    """The base after `round_`, before or after a resume, and the other parts of its snapshot.

    The latter are from snapshot 0, the buffers from the replica that `snapshots.buffers` names. The newest base must
    descend from this base. Raises `NoSuchRun` if no replica has created the first base, and `ConfigError` naming the
    nearest snapshot if a payload that the base needs is gone.
    """
    try:
        tip = rebuild_base(run_log, round_, owners)
    except PayloadGone as gone:
        kept = run_log.snapshots()
        nearest, names = min(kept, key=lambda known: (abs(known - round_), known)), ", ".join(map(str, kept))
        raise ConfigError(
            f"round {round_} of {run_log.store.url} cannot be rebuilt any more: {gone} It was deleted, by retention or "
            f"by hand, or the store lost it. Snapshots are there of rounds {names}; the nearest is {nearest}."
        ) from None
    changed = {} if start_of(run_log).buffers is None else buffers_of_base(run_log, round_)
    return tip, files_of_run(run_log).with_buffers(changed)


def rebuild_base(run_log: RunLog, round_: int, owners: Owners = ALONE) -> Tip:
    """The base after `round_`, from which the newest must descend. Raises as `rebuild` does, and `NoSuchRun`."""
    if run_log.start() is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model: there is no base to rebuild.")
    begin = leg_of_base(run_log.begins(), round_)
    assert begin is not None, "the caller has checked that the round has a base"
    return rebuild(run_log, begin, round_, owners=owners)


def digest_of_base(run_log: RunLog, round_: int) -> str:
    """The digest of the base after a round: the one that the log names, else that of the base rebuilt here.

    Raises as `rebuild_files` does if the log names none and the base cannot be rebuilt.
    """
    return claimed_base(run_log, round_) or rebuild_files(run_log, round_)[0].digest


def rebuild_scored(run_log: RunLog, model: int, owners: Owners = ALONE) -> Base:
    """The base whose score the guard attributes to round `model`; the newest base must descend from it.

    For the last round before a resume, that is the base resumed from. Raises `RecordInvalid` if the newest base does
    not descend from it or no snapshot is usable, `PayloadGone` or `PayloadCorrupt` for a deleted or damaged payload.
    """
    begins = run_log.begins()
    scored_in = next(begin for begin in reversed(begins) if begin.after_round <= model)
    round_ = scored_in.from_round if model == scored_in.after_round else model
    begin = leg_of_base(begins, round_)
    if begin is None:
        raise RecordInvalid(f"the base of round {round_} of {run_log.store.url} is no ancestor of the newest one.")
    return rebuild(run_log, begin, round_, owners=owners).base


def write_rebuilt_snapshot(
    run_log: RunLog, round_: int, stamp: Stamp, by: int | None = None, owners: Owners = ALONE
) -> str:
    """Rebuild the base after `round_` from the bucket and write its snapshot; returns the digest of the base.

    The base is rebuilt until a digest comes out twice, or is that of the log or of a snapshot, because nobody else
    would notice a wrong bit. `by`: the replica that writes, None for a process that is no replica; `owners`: its ranks.
    Raises as `rebuild_files` does, and `RecordInvalid` if three rebuilds all differ. A failed write of the snapshot is
    a warning.
    """
    known = {claimed_base(run_log, round_), *ConfirmedSnapshots(run_log).said_digests(round_)} - {None}
    for _ in range(_REBUILDS):
        tip, files = rebuild_files(run_log, round_, owners)
        if (digest := tip.digest) in known:
            try:
                write_snapshot(run_log.store, round_, tip.base, digest, files, stamp, by=by)
            except RecordInvalid as error:
                log.warning("the run goes on without this snapshot: %s", error)
            return digest
        known.add(digest)
    raise RecordInvalid(
        f"{_REBUILDS} rebuilds of the base after round {round_} of {run_log.store.url} gave different digests: the "
        "memory of this machine cannot be trusted. Run the command on another one."
    )


@dataclass(frozen=True)
class _Way:
    """A path by which a base can be computed: one version of a snapshot, then the commits up to the base."""

    round: int  # of the snapshot
    take: str
    legs: tuple[tuple[Begin, int | None], ...]  # each with the round up to which its commits are repeated; None: all


def _by_first_way(
    run_log: RunLog, begin: Begin, until: int | None, below: int | None, rebuilt: Callable[[_Way], T]
) -> T:
    """The result of `rebuilt` for the first path (a snapshot and the commits after it) whose objects can all be read.

    `until`: the round whose base is computed, None for the leg's newest. `below`: only snapshots of rounds before it.
    If every path fails, raises the error of the first one tried, from the newest snapshot: `PayloadCorrupt`,
    `RecordInvalid` or `ObjectMissing`. Raises `RecordInvalid` without a usable snapshot, and `RecordTooNew` and
    `Unchecked` at once.
    """
    failure: PayloadCorrupt | RecordInvalid | ObjectMissing | None = None
    for way in _ways(run_log, begin, until, below):
        try:
            return rebuilt(way)
        except (RecordTooNew, Unchecked):
            raise  # the log is the same along every way
        except (PayloadCorrupt, RecordInvalid, ObjectMissing) as error:
            failure = failure or error
            log.warning("base after round %s not rebuilt from snapshot %d: %s", until or "newest", way.round, error)
    raise failure or RecordInvalid(
        f"{run_log.store.url} has {keys.START} but no complete and confirmed snapshot that leg {begin.leg} could start "
        f"from: snapshot {begin.from_round} was deleted."
    )


def _ways(run_log: RunLog, begin: Begin, until: int | None, below: int | None) -> Iterator[_Way]:
    """All paths (snapshot, then commits) to a base, newest snapshot first; then those from before the last resume."""
    for round_, take in _candidates(run_log, begin, until, below):
        yield _Way(round_, take, ((begin, until),))
    made = leg_of_base(run_log.begins()[: begin.leg - 1], begin.from_round) if begin.from_round else None
    if made is not None:  # the leg's own snapshots cannot be read
        for way in _ways(run_log, made, begin.from_round, below):
            yield replace(way, legs=(*way.legs, (begin, until)))


def _candidates(run_log: RunLog, begin: Begin, until: int | None, below: int | None) -> Iterator[tuple[int, str]]:
    """(round, version) of the confirmed snapshots from which a base can be computed, newest first.

    Snapshots of rounds between the base that was resumed from and the resume are skipped: later bases do not descend
    from them.
    """
    snapshots = ConfirmedSnapshots(run_log)
    for round_ in reversed(snapshots.rounds):
        if begin.after_round >= round_ != begin.from_round or (until is not None and round_ > until):
            continue
        if (below is not None and round_ >= below) or (round_ and run_log.commit(round_) is None):
            continue  # a snapshot is written after its commit; one without a commit was put there by hand
        yield from ((round_, take) for take in snapshots.takes_of(round_))


def _commits(run_log: RunLog, way: _Way) -> Iterator[CommitEntry]:
    """The commits that a path repeats after its snapshot, oldest first."""
    for number, (leg, until) in enumerate(way.legs):
        position = run_log.leg_position(leg) if number else _position_at(run_log, way)[0]
        for entry in run_log.after(position, derive_verdicts=True):
            if until is not None and entry.commit.round > until:
                break
            yield entry


def _stored(run_log: RunLog, way: _Way) -> StoredSnapshot:
    if not way.round:
        return first_snapshot(run_log)
    return StoredSnapshot(run_log.store, way.round, run_log.snapshot(way.round, way.take), way.take)


def _position_at(run_log: RunLog, way: _Way) -> tuple[Position, CommitEntry | None]:
    """The log position where the commits of a path begin, and the commit before; None right after a start or resume."""
    begin, _ = way.legs[0]
    entry = run_log.commit(way.round) if way.round else None
    if entry is None or way.round <= begin.after_round:
        return run_log.leg_position(begin), None
    return entry.position, entry


def _logged(run_log: RunLog, entry: CommitEntry, reader: ContributionReader) -> "LoggedStep":
    """The outer step of an applied commit."""
    read, commit = run_log.conclusions.manifests(entry), entry.commit
    named = [(read.get(a.replica_id) or reader.named(commit.round, a), a.weight) for a in commit.answers if a.averaged]
    return LoggedStep(commit, named, run_log.configs.of(commit.leg))


def _compared_along(run_log: RunLog, base: Base | None, owners: Owners, way: _Way) -> BaseComparison:
    """`base` compared with the one that a path gives. Raises `RecordInvalid` for a snapshot of another base."""
    reader = ContributionReader(run_log.store)
    steps = [_logged(run_log, entry, reader) for entry in _commits(run_log, way) if entry.commit.applied]
    shards = StoredShards(run_log.store, _stored(run_log, way), start_of(run_log))
    rebuilt = owners.make(_rebuilt, owners, shards, base, steps, reader)
    stored, stepped = map(merged, zip(*owners.each(Rebuilt.digests, rebuilt), strict=True))
    shards.check([stored[place] for place in sorted(stored)])
    digest = shards.layout.digest([stepped[place] for place in sorted(stepped)])
    return BaseComparison(digest, way.round, rebuilt, owners)


def _rebuilt(
    owners: Owners, shards: StoredShards, base: Base | None, steps: Sequence["LoggedStep"], reader: ContributionReader
) -> Rebuilt:
    """This process's shards of a snapshot, taken through `steps` one after another, and compared with those of `base`.

    Only those that differ are kept in memory.
    """
    layout, differing = shards.layout, dict[tuple[int, int], BaseShard]()
    stored, stepped = dict[tuple[int, int], str](), dict[tuple[int, int], str]()
    for fragment in range(len(layout.fragments)):
        of_fragment = [step for step in steps if step.commit.fragment == fragment]
        for index in range(len(layout.shards(fragment))):
            if not owners.owns(fragment, index):
                continue
            shard = shards.read(fragment, index)
            stored[fragment, index] = shard.digest()
            _step_shard(shard, layout, index, of_fragment, reader)
            stepped[fragment, index] = shard.digest()
            if base is not None and not shard.equals(base.shards(fragment)[index]):
                differing[fragment, index] = shard
    return Rebuilt(stored, stepped, differing)


@dataclass(frozen=True)
class LoggedStep:
    """One outer step as the log has it, or as it would be with other contributions: all but the payloads' bytes."""

    commit: Commit  # of the round: fragment, and codec of the average
    named: Sequence[tuple[Contribution, int]]  # the averaged contributions, each with its weight
    config: RunConfig  # of the round's leg


def _step_shard(
    shard: BaseShard, layout: BaseLayout, index: int, steps: Sequence[LoggedStep], reader: ContributionReader
) -> None:
    """Apply outer steps to one shard of a base, in place, with a live round's arithmetic. Raises as `take_step`."""
    for step in steps:
        with denormals_kept(), closing(PayloadCache()) as cache:
            read = partial(_read_through, cache, reader)
            lengths = [stop - start for start, stop in layout.shards(step.commit.fragment)]
            parts = [outer_step.part_of(manifest, weight, read) for manifest, weight in step.named]
            average = aggregate_of(step.config.aggregate, parts, lengths, step.commit.average_codec)
            outer_step.step_in_threads(shard, average.shard(index), step.config.outer)


def take_step(base: Base, step: LoggedStep, adapters: Sequence[AdapterPair], reader: ContributionReader) -> None:
    """Step this process's shards of `base` in place by payloads from the bucket, with the arithmetic of a live round.

    `adapters`: those that the run averages exactly. Raises `PayloadGone` for a deleted payload and `PayloadCorrupt` for
    a damaged one, with the base partly stepped.
    """
    with closing(PayloadCache()) as cache:
        outer_step.average_and_step(
            base,
            step.commit.fragment,
            step.named,
            partial(_read_through, cache, reader),
            step.config.outer,
            aggregate=step.config.aggregate,
            codec=step.commit.average_codec,
            adapters=adapters,
        )


def _read_through(
    cache: PayloadCache, reader: ContributionReader, manifest: Contribution, index: int
) -> bytes | memoryview:
    """A payload shard's bytes, kept in `cache` after the first read: all shards together may exceed the memory."""
    mine = f"{manifest.replica_id}"
    if any(name[0] == mine and name[1] != f"{index}" for name in cache.names()):  # an earlier shard is averaged
        cache.clear()
    return cache.kept((mine, f"{index}"), lambda: reader.shard(manifest, index))


def stored_base(snapshot: StoredSnapshot, start: Start, owners: Owners = ALONE) -> Base:
    """The base in a snapshot. Raises `RecordInvalid` if its digest is not the one in `snapshot.json`.

    In a replica of several ranks each reads the byte ranges of its own shards; one process reads whole files.
    """
    if owners.ranks == 1:
        return snapshot.base(start)
    shards = StoredShards(snapshot.store, snapshot, start)
    base = owners.make(StoredShards.base, shards, owners)
    shards.check_digest(base.digest())
    return base


def start_of(run_log: RunLog) -> Start:
    """The start record of a run that has one, as every run with a base does."""
    found = run_log.start()
    assert found is not None, "the caller has checked that start.json exists"
    return found.record
