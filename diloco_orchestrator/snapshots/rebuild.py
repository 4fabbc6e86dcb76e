"""Rebuilds a base from the bucket alone: reads the nearest snapshot, then repeats the outer steps after it.

The arithmetic is that of a live round, so the bits are the same (invariant I3). Which snapshots count is decided in
`snapshots.confirmation`; what their files hold is checked here before anything is made of it.
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
from diloco_orchestrator.protocol.records import Begin, Contribution, Stamp, Start
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import CommitEntry, RunLog
from diloco_orchestrator.snapshots.buffers import buffers_of_base
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots, claimed_base
from diloco_orchestrator.snapshots.first_snapshot import files_of_run, first_snapshot
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.stored import StoredSnapshot

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
    return _rebuild(run_log, begin, until, below, first)


def rebuild_files(run_log: RunLog, round_: int) -> tuple[Tip, ModelFiles]:
    """The base after `round_`, whichever leg made it, and what else a snapshot of it needs.

    That is taken from snapshot 0, and the buffers from the replica whose they are (`snapshots.buffers`).

    The newest base must descend from that base. Raises `NoSuchRun` if no replica has created the first base, and
    `ConfigError` naming the nearest snapshot if payloads that the base needs were deleted by retention.
    """
    try:
        tip = rebuild_base(run_log, round_)
    except PayloadGone:
        kept = run_log.snapshots()
        nearest = min(kept, key=lambda known: (abs(known - round_), known))
        raise ConfigError(
            f"round {round_} of {run_log.store.url} cannot be rebuilt any more: payloads that it needs were deleted by "
            f"retention. Snapshots are there of rounds {', '.join(map(str, kept))}; the nearest is {nearest}."
        ) from None
    changed = {} if _start(run_log).buffers is None else buffers_of_base(run_log, round_)
    return tip, files_of_run(run_log).with_buffers(changed)


def rebuild_base(run_log: RunLog, round_: int) -> Tip:
    """The base after `round_`, whichever leg made it.

    The newest base must descend from that base. Raises `NoSuchRun` if no replica has created the first base, and what
    `rebuild` raises.
    """
    if run_log.start() is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model: there is no base to rebuild.")
    begin = leg_of_base(run_log.begins(), round_)
    assert begin is not None, "the caller has checked that the round has a base"
    return _rebuild(run_log, begin, round_)


def digest_of_base(run_log: RunLog, round_: int) -> str:
    """The digest of the base after a round: as the log claims it, else rebuilt. Errors as of `rebuild_files`."""
    return claimed_base(run_log, round_) or rebuild_files(run_log, round_)[0].digest


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
    return _rebuild(run_log, begin, round_).base


def write_rebuilt_snapshot(run_log: RunLog, round_: int, stamp: Stamp, by: int | None = None) -> str:
    """Write the snapshot of the base after `round_`, rebuilt from the bucket; returns the digest of that base.

    The base is rebuilt until its digest comes out a second time, or is what the log or a snapshot says: no replica
    contradicts a wrong bit here. `by`: the replica that writes; None for who is none. Errors as of `rebuild_files`.
    Raises `RecordInvalid` if three rebuilds all differ. A snapshot that cannot be written is a warning.
    """
    known = {claimed_base(run_log, round_), *ConfirmedSnapshots(run_log).said_digests(round_)} - {None}
    for _ in range(_REBUILDS):
        tip, files = rebuild_files(run_log, round_)
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
) -> Tip:
    """The rebuilt tip. The first error decides if no snapshot leads there."""
    failure: PayloadCorrupt | RecordInvalid | ObjectMissing | None = None
    for round_, take in _candidates(run_log, begin, until, below):
        try:
            return _replay(run_log, _at_snapshot(run_log, begin, round_, take, first), until)
        except (PayloadCorrupt, RecordInvalid, ObjectMissing) as error:
            failure = failure or error
            log.warning("base after round %s not rebuilt from snapshot %d: %s", until or "newest", round_, error)
    made = leg_of_base(run_log.begins()[: begin.leg - 1], begin.from_round) if begin.from_round else None
    if made is not None:  # the leg's own snapshots cannot be read
        tip = _rebuild(run_log, made, begin.from_round, below)
        return _replay(run_log, replace(tip, position=run_log.leg_position(begin), last=None), until)
    raise failure or RecordInvalid(
        f"{run_log.store.url} has {keys.START} but no complete and confirmed snapshot that leg {begin.leg} could start "
        f"from: snapshot {begin.from_round} was deleted."
    )


def _candidates(run_log: RunLog, begin: Begin, until: int | None, below: int | None) -> Iterator[tuple[int, str]]:
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
        yield from ((round_, take) for take in snapshots.takes_of(round_))


def _at_snapshot(run_log: RunLog, begin: Begin, round_: int, take: str, first: FirstBase | None = None) -> Tip:
    """The tip at a snapshot. Raises `RecordInvalid` if its files are not those of its record."""
    entry = run_log.commit(round_) if round_ else None
    start = _start(run_log)
    if first is not None and not round_ and first.digest == start.base_digest:
        base = first.base
    else:
        stored = StoredSnapshot(run_log.store, round_, run_log.snapshot(round_, take), take)
        base = (stored if round_ else first_snapshot(run_log)).base(start)
    if entry is None or round_ <= begin.after_round:
        return Tip(base, round_, round_, run_log.leg_position(begin), None)
    return Tip(base, round_, round_, entry.position, entry)


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
