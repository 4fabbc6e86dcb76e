"""Rebuilds a base from the bucket alone: reads the nearest snapshot, then repeats the outer steps after it.

The arithmetic is that of a live round, so the bits are the same (invariant I3). Every digest is checked on the way.
"""

import logging
from dataclasses import dataclass

from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.errors import BaseDiverged, ConfigError, NoSuchRun, RecordInvalid
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import leg_of_base
from diloco_orchestrator.protocol.records import Begin, Stamp, Start
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import CommitEntry, RunLog
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.stored import StoredSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tip:
    """A rebuilt base, and the position in the commit log up to which the commits are included."""

    base: Base
    base_round: int  # the round that made the base; 0 for the first base
    digest: str  # of the base
    position: Position  # after `base_round`, or after later rounds that were not applied
    last: CommitEntry | None  # the commit at `position`; None if the leg has none yet


@dataclass(frozen=True)
class FirstBase:
    """The first base in memory, so that snapshot 0 need not be read. Whoever rebuilds from it steps it in place."""

    base: Base
    digest: str


def rebuild(run_log: RunLog, begin: Begin, until: int | None = None, first: FirstBase | None = None) -> Tip:
    """The newest base of a leg, or its base after round `until`, with the position in the log.

    `first`: the first base, if this process has it. Raises `BaseDiverged` if an outer step gives another digest than
    its commit names, `RecordInvalid` if there is no snapshot to start from, `PayloadGone` for a payload that was
    deleted, `PayloadCorrupt` for one that is damaged.
    """
    return _replay(run_log, _from_snapshot(run_log, begin, until, first)[0], until)


def rebuild_files(run_log: RunLog, round_: int) -> tuple[Tip, ModelFiles]:
    """The base after `round_`, whichever leg made it, and what else a snapshot of it needs, taken from snapshot 0.

    The newest base must descend from that base. Raises `NoSuchRun` if no replica has created the first base, and
    `ConfigError` naming the nearest snapshot if payloads that the base needs were deleted by retention.
    """
    start = run_log.start()
    if start is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model: there is no base to rebuild.")
    begin = leg_of_base(run_log.begins(), round_)
    assert begin is not None, "the caller has checked that the round has a base"
    try:
        tip, snapshot = _from_snapshot(run_log, begin, round_)
        tip = _replay(run_log, tip, round_)
    except PayloadGone:
        kept = run_log.snapshots()
        nearest = min(kept, key=lambda known: (abs(known - round_), known))
        raise ConfigError(
            f"round {round_} of {run_log.store.url} cannot be rebuilt any more: payloads that it needs were deleted by "
            f"retention. Snapshots are there of rounds {', '.join(map(str, kept))}; the nearest is {nearest}."
        ) from None
    first = snapshot if snapshot.round == 0 else StoredSnapshot(run_log.store, 0, run_log.snapshot(0))
    return tip, first.model_files(start.record.parameters)


def write_rebuilt_snapshot(run_log: RunLog, round_: int, stamp: Stamp) -> None:
    """Write the snapshot of the base after `round_`, rebuilt from the bucket. Errors as of `rebuild_files`."""
    tip, files = rebuild_files(run_log, round_)
    write_snapshot(run_log.store, round_, tip.base, tip.digest, files, stamp)


def _replay(run_log: RunLog, tip: Tip, until: int | None) -> Tip:
    """Repeat the commits after `tip`, up to round `until` or to the newest; returns the base and position reached."""
    reader = ContributionReader(run_log.store)
    for entry in run_log.after(tip.position):
        if until is not None and entry.commit.round > until:
            break
        tip = _advance(run_log, tip, entry, reader)
    return tip


def _from_snapshot(
    run_log: RunLog, begin: Begin, until: int | None, first: FirstBase | None = None
) -> tuple[Tip, StoredSnapshot]:
    """The base and position of the newest snapshot of a leg up to round `until`, and that snapshot.

    Snapshots of rounds between the base that the leg started from and the leg's first round are skipped: the leg does
    not descend from them. Raises `RecordInvalid` if there is no snapshot, or if it is not the base that the log names.
    """
    start = _start(run_log)
    for round_ in reversed(run_log.snapshots()):
        if begin.after_round >= round_ != begin.from_round or (until is not None and round_ > until):
            continue
        entry = run_log.commit(round_) if round_ else None
        if round_ and entry is None:
            continue  # a snapshot is written after its commit; one without a commit was put there by hand
        expected = entry.commit.base_digest if entry else start.base_digest
        snapshot = StoredSnapshot(run_log.store, round_, run_log.snapshot(round_))
        if first is not None and not round_ and first.digest == expected:
            base = first.base
        else:
            base = snapshot.base(start.parameters, start.fragments, run_log.run.config.shard_numel)
        if snapshot.record.base_digest != expected:
            raise RecordInvalid(
                f"snapshot {round_} in {run_log.store.url} is not the base that the log names after that round."
            )
        if entry is None or round_ <= begin.after_round:
            return Tip(base, round_, expected, run_log.leg_position(begin), None), snapshot
        return Tip(base, round_, expected, entry.position, entry), snapshot
    raise RecordInvalid(
        f"{run_log.store.url} has {keys.START} but no complete snapshot that leg {begin.leg} could start from: "
        f"snapshot {begin.from_round} was deleted."
    )


def _advance(run_log: RunLog, tip: Tip, entry: CommitEntry, reader: ContributionReader) -> Tip:
    """The base and position after one more commit. Raises `BaseDiverged` if its digest is not the one in the commit."""
    commit = entry.commit
    if not commit.applied:
        return Tip(tip.base, tip.base_round, tip.digest, entry.position, entry)
    named = [(reader.named(commit.round, a), a.weight) for a in commit.answers if a.averaged]
    fragment = _start(run_log).fragments[commit.fragment]
    average = outer_step.average(tip.base, fragment, named, reader.shard)
    outer_step.OuterStep(tip.base, average, run_log.run.config.outer).take()  # the base of the rebuild itself
    digest = tip.base.digest()
    if digest != commit.base_digest:
        raise BaseDiverged(
            f"rebuilt base {digest[:12]} after round {commit.round}; its commit names {commit.base_digest[:12]}. "
            "This machine computes other bits. Committed rounds are safe."
        )
    log.info("rebuilt round %d: base %s", commit.round, digest[:12])
    return Tip(tip.base, commit.round, digest, entry.position, entry)


def _start(run_log: RunLog) -> Start:
    found = run_log.start()
    assert found is not None, "the caller has checked that start.json exists"
    return found.record
