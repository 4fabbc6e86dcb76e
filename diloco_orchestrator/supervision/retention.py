"""Retention: which objects of a run may be deleted (old payloads, old states, surplus snapshots), and their deletion.

Commits, manifests, segments (copies of many of these) and records of starts and resumes always stay. Nothing is deleted
that a resume, a rebuild of a kept round or a late replica still needs. Deletion may be repeated and interrupted at any
line.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco_orchestrator.config import RetentionConfig
from diloco_orchestrator.errors import RecordInvalid, RecordTooNew, StoreFull
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.legs import SAFE_SNAPSHOTS, BaseScores, leg_of_base, rounds_led_to
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Contribution, Retention
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.contributions import ContributionReader, ManifestListing
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import operator_of_run
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.local_files import why_no_room

_NOTE_BYTES = 2**16  # of room for the record of a deletion: more than a file of any file system takes at the least


@dataclass
class RetentionPlan:
    """The objects that may be deleted, in an order in which an interruption leaves every object usable."""

    objects: list[ObjectInfo] = field(default_factory=list)
    kept_snapshots: dict[int, str] = field(default_factory=dict)  # round -> why it is kept
    horizon: int = 0  # payloads of later rounds stay
    # Each replica's newest contribution of each fragment, by (replica id, fragment), and the leg from which they count.
    newest: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    leg: int = 0

    @property
    def size(self) -> int:
        """Total bytes of the objects to delete."""
        return sum(info.size for info in self.objects)


def plan(
    run_log: RunLog, retention: RetentionConfig, earlier: RetentionPlan | None = None, scores: BaseScores | None = None
) -> RetentionPlan:
    """The objects that may be deleted now under the settings `retention`.

    `earlier`: the plan before, whose objects are deleted; rounds up to its horizon are not listed again. `scores`:
    held-out scores of all commits; None: read every commit.
    """
    store, begins = run_log.store, run_log.begins()
    confirmed = ConfirmedSnapshots(run_log)
    snapshots = confirmed.rounds
    if scores is None:
        scores = BaseScores()
        for commit in run_log.each_commit():
            scores.add(commit, begins[commit.leg - 1])
    last = scores.last.round if scores.last else 0
    line = [round_ for round_ in snapshots if round_ <= last and leg_of_base(begins, round_) is not None]
    # Loaders use confirmed snapshots only, so payloads go only when enough of those replace them, with all their files.
    safe = confirmed.newest(SAFE_SNAPSHOTS, line, lambda round_, take: _has_its_files(run_log, round_, take))
    made = RetentionPlan(kept_snapshots=_kept_snapshots(retention, snapshots, line, safe, scores, begins))
    for round_ in snapshots:
        if round_ not in made.kept_snapshots:
            made.objects += _snapshot_objects(store, round_)
    ended = scores.last is not None and scores.last.stop != "none"
    if retention.snapshots is not None and len(safe) >= SAFE_SNAPSHOTS and ended:
        made.objects += _orphans(store, set(snapshots), before=safe[0])
    if retention.payloads == "needed" and len(safe) >= SAFE_SNAPSHOTS:
        made.horizon, made.leg = safe[0], begins[-1].leg
        made.newest = _newest_contributions(run_log, last, begins, earlier)
        made.objects += _payloads(run_log, made.horizon, made.newest, earlier.horizon if earlier else 0)
        made.objects += _states(store, run_log.run.config.most_replicas, made)
    return made


def collect(run_log: RunLog, retention: RetentionConfig, made: RetentionPlan, by: str, stamp: Stamp) -> None:
    """Delete the objects of a retention plan, in its order, for `by`. Safe to repeat and to interrupt.

    Before payloads of a run whose settings keep them all, `by` is recorded: only where a full disk or quota has no room
    for that record, objects go first. `retention`: the settings of the plan. Raises `ConfigError` for a signed run
    whose keys this process has not.
    """
    store, left = run_log.store, deque(made.objects)
    if retention.payloads == "needed" and run_log.keeps_payloads:
        operator_of_run(run_log.run, store, "deleting payloads")  # before any is: who has no key records nothing
        while left and why_no_room(Path(store.url), _NOTE_BYTES):  # the store would wait for somebody to make room
            store.delete(left.popleft().key)
        record = Retention(**stamp(), payloads="needed", by=by)
        try:
            Writer(store, Role.ANYBODY).create(record)
        except StoreFull:  # by a quota
            if not left:
                raise
            store.delete(left.popleft().key)
            Writer(store, Role.ANYBODY).create(record)
    for info in left:
        store.delete(info.key)


def _kept_snapshots(
    retention: RetentionConfig,
    snapshots: Sequence[int],
    line: Sequence[int],
    safe: Sequence[int],
    scores: BaseScores,
    begins: Sequence[Begin],
) -> dict[int, str]:
    """The snapshots to keep: round -> why. `snapshots`: rounds of all complete ones.

    `line`: rounds of those that the newest base descends from, oldest first. `safe`: the newest confirmed ones, which
    are always kept. `scores`: held-out scores of all bases. `begins`: all start and resume records.
    """
    if retention.snapshots is None:
        return dict.fromkeys(snapshots, "all are kept")
    kept = dict.fromkeys(safe, "among the newest confirmed")
    kept |= dict.fromkeys(line[-max(retention.snapshots, SAFE_SNAPSHOTS) :], "among the newest")
    kept[scores.best(line)] = "best held-out score"
    for begin in begins:
        kept[begin.from_round] = f"leg {begin.leg} starts from it"
    for leg, round_ in scores.leg_ends.items():
        kept[round_] = f"leg {leg} ended with it"
    kept[0] = "the first base"
    return {round_: kept[round_] for round_ in sorted(kept) if round_ in snapshots}


def _has_its_files(run_log: RunLog, round_: int, take: str) -> bool:
    """Whether the files of a snapshot exist with the sizes in its record. Their bytes are not read."""
    named = {
        keys.snapshot(round_, name, take): info.size for name, info in run_log.snapshot(round_, take).files.items()
    }
    there = {info.key: info.size for info in run_log.store.list(keys.snapshot(round_, "", take))}
    return bool(named) and named.items() <= there.items()


def _snapshot_objects(store: Store, round_: int) -> list[ObjectInfo]:
    """The files of a snapshot in all its versions, records first: without its record a version is no snapshot."""
    listed = []
    for info in store.list(keys.SNAPSHOTS, start_after=f"{keys.SNAPSHOTS}{keys.round_name(round_)}"):
        if (parsed := keys.parse_snapshot_file(info.key)) is not None:
            if parsed[0] > round_:
                break
            listed.append(info)
    return sorted(listed, key=lambda info: (not info.key.endswith(keys.SNAPSHOT_RECORD), info.key))


def _orphans(store: Store, complete: Collection[int], before: int) -> Iterator[ObjectInfo]:
    """Files of incomplete snapshots, left by an interrupted writer or deletion. Only for a stopped run.

    `complete`: rounds with a complete snapshot. `before`: only snapshots of rounds before this one.
    """
    for info in store.list(keys.SNAPSHOTS):
        parsed = keys.parse_snapshot_file(info.key)
        if parsed is not None and parsed[0] < before and parsed[0] not in complete:
            yield info


def _newest_contributions(
    run_log: RunLog, last: int, begins: Sequence[Begin], earlier: RetentionPlan | None
) -> dict[tuple[int, int], Contribution]:
    """Each replica's newest contribution of each fragment, by (replica id, fragment).

    They are kept, because unaveraged work is added to the next contribution, and they name the newest states and
    residuals. Searched are the rounds since the last resume, and those before that led to its base; those up
    to the horizon of an `earlier` plan of this leg were: a replica that is away would have a long run listed each time.
    `last`: round of the last commit. `begins`: all start and resume records.
    """
    begin, start = begins[-1], run_log.start()
    if earlier is not None and earlier.leg == begin.leg:
        newest, rounds = dict(earlier.newest), [*range(last + 1, max(begin.after_round, earlier.horizon), -1)]
    else:
        legs = len(start.record.synced_fragments) if start else 0
        newest, rounds = {}, [*range(last + 1, begin.after_round, -1), *rounds_led_to(begin, begins, legs)]
    listing, reader = ManifestListing(run_log.store, last + 1), ContributionReader(run_log.store)
    for replica_id in range(run_log.run.config.most_replicas):
        missing = set(range(len(start.record.synced_fragments))) if start else set()
        for round_ in rounds:
            if not missing:
                break
            if replica_id not in listing.authors(round_):
                continue
            manifest = _readable(reader, round_, replica_id)
            if manifest is not None and manifest.kind == "delta" and manifest.fragment in missing:
                newest[replica_id, manifest.fragment] = manifest
                missing.discard(manifest.fragment)
    return newest


def _readable(reader: ContributionReader, round_: int, replica_id: int) -> Contribution | None:
    """A replica's manifest of a round; None if it is missing or invalid. Raises `RecordTooNew`."""
    try:
        return reader.of(round_, replica_id)
    except RecordTooNew:
        raise
    except RecordInvalid:
        return None  # nobody averages or carries it


def _payloads(
    run_log: RunLog, horizon: int, newest: dict[tuple[int, int], Contribution], after_round: int
) -> Iterator[ObjectInfo]:
    """Payloads and averaged shards of rounds after `after_round` up to `horizon`, without those still needed.

    Needed is work that may still be added to a later round: `newest`, each replica's newest contribution of each
    fragment.
    """
    carried = {(m.round, m.replica_id) for m in newest.values() if not _is_averaged(run_log, m)}
    authors: set[tuple[int, int]] = set()  # of the round that is being listed: its manifests come before its payloads
    for info in run_log.store.list(keys.ROUNDS, start_after=keys.end_of_round(after_round)):
        if info.key > keys.end_of_round(horizon):
            break
        if keys.commit.parse(info.key):
            authors.clear()
        if (parsed := keys.contribution.parse(info.key)) is not None:
            authors.add(parsed)
        if keys.parse_reduced_shard(info.key) is not None:
            yield info  # a cache for replicas that were in the round
            continue
        payload = keys.parse_payload(info.key) or keys.parse_want(info.key)
        whose = (payload.round, payload.replica_id) if payload else None
        if whose in authors and whose not in carried:
            yield info


def _is_averaged(run_log: RunLog, manifest: Contribution) -> bool:
    entry = run_log.commit(manifest.round)
    answers = entry.commit.answers if entry else ()
    return any(a.averaged and a.replica_id == manifest.replica_id for a in answers)


def _authors(store: Store, round_: int) -> set[int]:
    """Replica ids whose manifest of a round exists. A payload without one may be of a contribution being published."""
    parsed = (keys.contribution.parse(info.key) for info in store.list(keys.contributions(round_)))
    return {found[1] for found in parsed if found is not None}


def _states(store: Store, replicas: int, made: RetentionPlan) -> Iterator[ObjectInfo]:
    """Saved states to delete: not those of kept snapshots, of rounds still needed, or each replica's newest.

    The residual of each replica's newest contribution to each fragment stays too: its next one contains it.
    """
    for replica_id in range(replicas):
        newest_rounds = {m.round for (owner, _), m in made.newest.items() if owner == replica_id}
        last = max(newest_rounds, default=0)
        for info in store.list(keys.states(replica_id)):
            round_ = keys.parse_round(info.key)
            if round_ is None or round_ > made.horizon or round_ == last or round_ in made.kept_snapshots:
                continue
            if round_ in newest_rounds and keys.residual.parse(info.key):
                continue
            if replica_id in _authors(store, round_):
                yield info


class RetentionSweeper:
    """Deletes objects as retention allows while a run goes on, a few per call, so that no call takes long.

    Reads every commit once and keeps only scores of bases that have a snapshot or may still get one.
    """

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._retention = run_log.run.config.retention
        self._scores = BaseScores()
        self._position: Position | None = None
        self._queue: list[ObjectInfo] = []
        self._made: RetentionPlan | None = None  # the last plan
        self._planned_at = 0  # round

    def step(self, most: int = 50) -> None:
        """Delete at most `most` objects. A new plan is made after every `snapshot_every` rounds."""
        if self._retention.keeps_everything:
            return
        for info in self._queue[:most]:
            self._log.store.delete(info.key)
        del self._queue[:most]
        last = self._fold()
        if not self._queue and last >= self._planned_at + self._log.run.config.snapshot_every:
            self._made = plan(self._log, self._retention, self._made, self._scores)
            self._queue, self._planned_at = self._made.objects, last
            self._scores.forget(but=sorted(self._made.kept_snapshots))

    def _fold(self) -> int:
        """Add the held-out scores in new commits; returns the round of the last one."""
        start = self._log.start()
        if start is None:
            return 0
        for entry in self._log.settled(self._position or Position.at_start(start.sha256)):
            self._scores.add(entry.commit, self._log.begin_of(entry.commit.leg).record)
            self._position = entry.position
        return self._position.round if self._position else 0
