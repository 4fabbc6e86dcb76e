"""`RunLog`: reads and caches the immutable records of one run (run, start, legs, commits) and checks the hash chain.

Each commit is checked against the log before it (`run_log.commit_readings`); one that contradicts it is void: it
averages nobody. Whether its verdict follows from the round's manifests is checked too by replicas, who act on it. Other
readers take it as written, which costs no request, until a record contradicts the log: a wrong verdict may be the
reason, or make a later commit look wrong that is right. From then on they check every verdict (`RunLog.doubt`).

Long histories are read through segments, objects that hold many commits (`run_log.segments`). `run_log.append` writes
records; `run_log.attempts` and `run_log.contributions` read those of attempts and contributions.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid, RecordTooNew, RecordTooOld
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.check_records import Checked
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.legs import leg_position
from diloco_orchestrator.protocol.record_format import By, StampFields, parse_json
from diloco_orchestrator.protocol.records import Begin, Commit, Contribution, Result, Run, Snapshot
from diloco_orchestrator.protocol.rounds import MAX_EMPTY_ROUNDS, Position
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.protocol.void_commits import NOBODY
from diloco_orchestrator.run_log.commit_readings import Conclusions
from diloco_orchestrator.run_log.entries import CommitEntry, Entry
from diloco_orchestrator.run_log.leg_records import LegRecords
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.segments import CheckedSegments, SegmentReader
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

_PATIENCE = 10  # single commits that a reader follows before it looks for segments of the log
_KEPT_COMMITS = 256  # single commits kept in memory: more than the rounds of a segment


class RunLog(LegRecords):
    """The records of the run in `store`.

    Records never change, so each is fetched once; a missing one is fetched again at every call. Every method that reads
    raises `RecordInvalid` for an object that is not the record its key names, `RecordTooNew` for a record of a later
    schema, and the store's errors. Two threads may share a log: at worst both fetch the same record.

    The constructor reads run.json, unless `run_json` holds the bytes that the caller has just created there; it raises
    `NoSuchRun` if there is none. `on_read` is called with key and exact bytes of every record before it is parsed;
    `on_bad_segment` with the key of a segment that disagrees with the log, and how (default: it is logged), after which
    the single commits are read.
    """

    def __init__(
        self,
        store: Store,
        on_read: Callable[[str, bytes], None] | None = None,
        on_bad_segment: Callable[[str, str], None] | None = None,
        run_json: bytes | None = None,
    ) -> None:
        super().__init__(store, on_read, run_json)
        self._commit_entries: dict[int, CommitEntry] = {}
        self._commits: list[Commit] = []
        self._position: Position | None = None
        self._newest: CommitEntry | None = None
        self._open_seen = 0  # the last round that had no commit yet when it was read
        self.segments = SegmentReader(self.store, self.run.config)
        self._history = CheckedSegments(self.segments, self.commit, on_read, on_bad_segment)
        self.conclusions = Conclusions(self)
        self._goes_on: set[tuple[int, str]] = set()  # leg, digest of a commit that did not stop the leg before
        self.snapshot_seen = 0  # the newest round with a snapshot: the log has at least as many commits
        # Digests of bases that the log claims, by round, as `snapshots.confirmation` finds them: they never change.
        self.claimed_bases: dict[int, str] = {}
        self.void_authors: dict[int, int] = {}  # replicas, by round, of void commits as they were read last
        self.in_doubt = False  # whether a record contradicted the log, so that every verdict is derived since

    # -- commits -------------------------------------------------------------------------------------------------

    def start(self) -> Entry[Start] | None:
        """The start record, which describes the first base, that most replicas adopted; final once over half did.

        While none of those who vote has adopted one, the one that the first commit was made from; without that and
        without votes start.json. None if it is missing too.
        """
        return self.starts.chosen() or self.start_of_commits()

    def start_of_commits(self) -> Entry[Start] | None:
        """The start record that the first commit names, if a quorum of launched replicas has adopted it; else None.

        From then on it is the run's, whatever those say who come later: replicas beyond those that the run began with
        may be the first to train. Fewer than a quorum close no round, so one replica that creates an object at that key
        chooses no first base where a round needs two. Costs a GET, where as many have adopted any.
        """
        adopted = {
            sha256 for sha256, count in self.starts.followed.items() if count >= self.run.config.contributions_needed
        }
        first = self.commit(1) if adopted else None
        return self.starts.entry(first.written.previous) if first and first.written.previous in adopted else None

    def commit(self, round_: int) -> CommitEntry | None:
        """The commit of a round, or None while the round is open. Neither its content nor its link is checked."""
        known = self._commit_entries.get(round_)
        if known is not None:
            return known
        data = self._fetch(keys.commit(round_))
        if data is None:
            self._open_seen = max(self._open_seen, round_)
            return None
        return self.remember_commit(round_, data)

    def remember_commit(self, round_: int, data: bytes) -> CommitEntry:
        """Cache the commit of a round, whose exact bytes are `data`, so that no later call fetches it.

        Bytes that are no commit of that round give a void entry, which averages nobody. Raises `RecordTooNew` and
        `RecordTooOld`.
        """
        if len(self._commit_entries) >= _KEPT_COMMITS:
            oldest, *_ = self._commit_entries  # copied at once: another thread may add one
            self._commit_entries.pop(oldest, None)
        found = self._commit_entries[round_] = _entry_of(round_, data, self.run)
        return found

    def after(self, position: Position, derive_verdicts: bool = False) -> Iterator[CommitEntry]:
        """The commits after `position`, oldest first, checked against the log; ones that contradict it are marked void.

        `derive_verdicts`: whether to check every verdict against manifests. Raises `RecordInvalid` if a record was
        changed after it was written.
        """
        for entry in self._each_after(position, derive_verdicts):
            if self._newest is None or entry.commit.round > self._newest.commit.round:
                self._newest = entry
            yield entry

    def settled(self, position: Position) -> Iterator[CommitEntry]:
        """The entries of `after`, each delayed until the later commits that may show that its commit is void have been
        read.

        A void commit contradicts the log and averages nobody. The delay is `MAX_EMPTY_ROUNDS` commits, the most void
        ones in a row; the newest ones are yielded at the end.
        """
        held = deque[CommitEntry]()
        for entry in self.after(position):
            held.append(entry)
            if len(held) > MAX_EMPTY_ROUNDS:
                yield self._known(held.popleft())
        yield from map(self._known, held)

    def _known(self, entry: CommitEntry) -> CommitEntry:
        """The cached entry of the same round if its commit was found to contradict the log since, else `entry`."""
        known = self._commit_entries.get(entry.commit.round)
        return known if known is not None and known.void else entry

    def _each_after(self, position: Position, derive_verdicts: bool = False) -> Iterator[CommitEntry]:
        """The commits after `position`, oldest first, each checked against the one before.

        Lists segments, objects with the commits of many rounds (one LIST, then one GET for each), once ten single
        commits were read, the newest known snapshot is ten rounds ahead, or it is of a later round than the last commit
        that is there. At most two segments are in memory.
        """
        singles, listed = 0, False
        previous = self.as_read(position.round) if position.round else None
        while True:
            if singles >= _PATIENCE or self.snapshot_seen >= position.round + _PATIENCE:
                if not listed:
                    self.segments.refresh()
                    listed = True
                if entries := self._history.after(position):
                    for each in entries:
                        if (read := self._concluded(each, previous, derive_verdicts)) is None:
                            return
                        previous, position = read, read.position
                        yield previous
                    continue
            entry = self.commit(position.round + 1)
            if entry is None:
                if listed or self.snapshot_seen <= position.round:
                    return
                singles = _PATIENCE  # it was deleted: a segment may hold it
                continue
            if (read := self._concluded(entry, previous, derive_verdicts)) is None:
                return
            previous, position, singles = read, read.position, singles + 1
            yield previous

    def as_read(self, round_: int) -> CommitEntry | None:
        """The checked commit of a round that may be the last of its leg (start or resume to stop); None if missing.

        An invalid (void) last commit does not itself say that it stops the leg. So if the commit is void, contradicts
        the one before it, or does not stop the leg though another begins after it, the whole leg is read, with its
        verdicts checked if the other leg is known to begin only by them (`_follows`).
        """
        entry = self.commit(round_)
        if entry is None or entry.contradicts:
            return entry
        before = self.commit(round_ - 1) if round_ > 1 else None
        goes_on = entry.commit.stop == "none" and any(each.after_round == round_ for each in self.known_begins())
        if not (entry.unreadable or entry.void or goes_on or self.conclusions.why_not_concluded(entry, before)):
            return entry
        leg = self.begin_of(1).record
        while (following := self.begin(leg.leg + 1)) is not None and following.record.after_round < round_:
            leg = following.record
        return self._read_in_leg(leg, round_)

    def _read_in_leg(self, leg: Begin, round_: int) -> CommitEntry | None:
        """The checked commit of a round; None if it is missing. The round's whole leg (start to stop) is read."""
        return next((each for each in self._each_after(self.leg_position(leg)) if each.commit.round == round_), None)

    def _follows(self, leg: int, round_: int, sha256: str) -> bool:
        """Whether `leg` (a resume) may begin after the commit of this round and digest: it stopped the leg before.

        If that commit does not itself stop the leg, it and commits before it may be void (contradict the log): the leg
        is then read whole, the second time with its verdicts checked.
        """
        before, start = self.begin_of(leg - 1).record, self.start()
        if start is None:
            return False
        if (round_, sha256) == (0, start.sha256):  # a coordinator ended the leg before any replica committed
            return leg == 2 and self._recorded_before_the_first_commit()
        entry = self.commit(round_) if round_ > before.after_round else None
        if entry is None or entry.sha256 != sha256:
            return False
        if not entry.void and not entry.unreadable and entry.commit.stop != "none":
            last = self.commit(round_ - 1) if round_ > 1 else None
            # One that is unreadable or void does not say what was known before the round.
            known = last is None or not (last.unreadable or last.void)
            plain = known and not self.conclusions.why_not_concluded(entry, last)
            if plain and not self.conclusions.read(entry, last, derive_verdict=False, lenient=True).void:
                return entry.commit.leg == before.leg
        if (leg, sha256) in self._goes_on:
            return False
        doubted, found = self.in_doubt, self._read_in_leg(before, round_)
        if not doubted and found is not None and found.commit.stop == "none":
            self.doubt()
            found = self._read_in_leg(before, round_)
        stops = found is not None and found.commit.stop != "none"
        if not stops:
            self.in_doubt = doubted
            self._goes_on.add((leg, sha256))
        return stops

    def _recorded_before_the_first_commit(self) -> bool:
        """Whether the run's first leg (until its first stop) has a result.json but no commit."""
        try:
            return self.recorded_result(1) is not None and self.commit(1) is None
        except RecordInvalid:
            return False

    def checked(
        self,
        entry: CommitEntry,
        last: CommitEntry | None,
        received: Mapping[str, Contribution],
        checks: Mapping[str, Checked],
    ) -> CommitEntry:
        """`entry`, the log entry of the commit after `last`, marked void if the commit contradicts the log or its
        manifests.

        `last`: None in the first round after a start or resume. `received` and `checks`: manifests and check records at
        hand, by sha256; others are fetched.
        """
        previous = last or (self.as_read(entry.written.round - 1) if entry.written.round > 1 else None)
        found = self.conclusions.read(entry, previous, derive_verdict=True, received=received, checks=checks)
        return self._kept(found)

    def _concluded(self, entry: CommitEntry, previous: CommitEntry | None, derive_verdict: bool) -> CommitEntry | None:
        """`entry`, the log entry of the commit after `previous`, marked void if it contradicts the log.

        If it does, all verdicts since the start or resume are checked: a wrong verdict may make the commit before void,
        and then this one is right. None where the log ends with `previous`.
        """
        derive, lenient = derive_verdict or self.in_doubt, not derive_verdict
        ends = previous is not None and self._ends_with(previous)
        found = entry if ends else self.conclusions.read(entry, previous, derive_verdict=derive, lenient=lenient)
        unclear = ends or (found.contradicts and not found.unreadable and not found.unlinked)
        if unclear and not derive:
            self.doubt()
            begin, again = self.begin_of(previous.commit.leg if previous else 1).record, previous
            for again in self._each_after(self.leg_position(begin)):
                if again.commit.round == entry.commit.round:
                    return again
            ends = ends or (again is not None and self._ends_with(again))  # by its checked verdicts the leg stopped
        if ends:
            self._commit_entries.pop(entry.commit.round, None)  # the next leg may have another one
            return None
        return self._kept(found)

    def _ends_with(self, last: CommitEntry) -> bool:
        """Whether no commit after `last` is of the log, because that one stopped its leg and no other leg has begun.

        Only in signed runs with that rule: elsewhere such a commit is void, and the next leg begins after it. Who holds
        the key of one replica could go on writing such, so that a leg which somebody begins never is the next one.
        """
        if self.run.signed_rules is None or last.position.stop == "none":
            return False
        return self.begin_after(last.commit.leg + 1, last.commit.round, last.sha256) is None

    def doubt(self, again: bool = False) -> None:
        """Check all verdicts since the last start or resume from now on, because a record contradicts the commits.

        `again`: also those that were checked already.
        """
        if again or not self.in_doubt:
            self.in_doubt, self._newest = True, None
            if self.run.signed_rules is not None:  # the leg may have stopped earlier, and its log be shorter
                self._commits, self._position = [], None

    def _kept(self, entry: CommitEntry) -> CommitEntry:
        """`entry`, which also replaces the cached one of its round if its commit contradicts the log (is void)."""
        round_, author = entry.commit.round, entry.written.by.who
        self.void_authors.pop(round_, None)
        if entry.void:
            if author is not None:
                self.void_authors[round_] = author[0]
            self._commit_entries[round_] = entry
            if round_ <= len(self._commits):
                self._commits[round_ - 1] = entry.commit
        return entry

    def commits(self) -> Sequence[Commit]:
        """All commits so far, oldest first; only new ones are fetched. Raises `RecordInvalid` for a broken chain."""
        if self._position is None:
            start = self.start()
            if start is None:
                return ()
            self._position = Position.at_start(start.sha256)
        known = self._commits
        for entry in self.after(self._position):
            if self._commits is not known:
                return self.commits()  # all verdicts are checked from here on, those of earlier commits too
            known.append(entry.commit)
            self._position = entry.position
        return known if self._commits is known else self.commits()

    def each_commit(self) -> Iterator[Commit]:
        """All commits so far, oldest first; none is cached. Raises `RecordInvalid` where the hash chain breaks."""
        start = self.start()
        for entry in self.settled(Position.at_start(start.sha256)) if start else ():
            yield entry.commit

    def position(self) -> Position | None:
        """The log position after the last commit that `commits` returned; None until it has found a start record."""
        return self._position

    def newest(self, begin: Begin) -> CommitEntry | None:
        """The newest commit of the run, whose newest start or resume is `begin`; None before the run's first commit.

        Before the first commit since `begin` it is the one from whose base the run was resumed. Reads only the end of a
        long log, without checking the chain up to there.
        """
        if self.start() is None:
            return None
        last = self._newest or (self.as_read(begin.after_round) if begin.after_round else None)
        singles, doubted = 0, self.in_doubt
        while (entry := self.commit(last.commit.round + 1 if last else 1)) is not None:
            if (read := self._concluded(entry, last, derive_verdict=False)) is None:
                if self.in_doubt and not doubted:
                    return self.newest(begin)  # `last` was read with unchecked verdicts
                break
            last = self._newest = read
            singles += 1
            if singles == _PATIENCE and not self.in_doubt:
                last = self._newest = self._far_ahead(last) or last
            if self.in_doubt and not doubted:
                return self.newest(begin)
        if self.snapshot_seen > (last.commit.round if last else 0):  # one was deleted: a segment may hold it
            for entry in self._each_after(last.position if last else self.leg_position(begin)):
                last = self._newest = entry
        self._newest = last
        return last

    def check_newest(self, begin: Begin) -> None:
        """Check the verdicts of the newest commits as replicas do, so that who commits after them agrees with these.

        A void one that was taken as it is written makes this reader check all verdicts (`doubt`). Only so many commits
        are checked as may be void in a row: what another replica has continued since was right, or contradicts it.
        Costs a GET for each manifest that they name. `begin`: the newest start or resume.
        """
        last = self.newest(begin)
        if last is None or self.in_doubt:
            return
        first = max(begin.after_round, last.commit.round - MAX_EMPTY_ROUNDS) + 1
        previous = self.as_read(first - 1) if first > 1 else None
        for round_ in range(first, last.commit.round + 1):
            entry = self.commit(round_)
            assert entry is not None, "a commit is never deleted"
            found = self.conclusions.read(entry, previous, derive_verdict=True, lenient=True)
            if found.contradicts and not entry.contradicts:
                self.doubt()
                return
            previous = found

    def lost(self, begin: Begin) -> str:
        """A sentence about the first record that is missing though a snapshot of a later round is there; else empty.

        `begin`: the newest start or resume. Only snapshots that this reader has listed are known.
        """
        last = self.newest(begin)
        after = last.commit.round if last else 0
        if self.snapshot_seen <= after:
            return ""
        key, why = (keys.START, self.why_no_start()) if self.start() is None else (keys.commit(after + 1), "is missing")
        happened = "it was deleted, or the store hides it" if why == "is missing" else "it was changed"
        seen = f"though a snapshot of round {self.snapshot_seen} is there"
        return f"{key} {why}, {seen}: {happened}, and nothing after it is read"

    def why_no_start(self) -> str:
        """Words after the key of start.json where `start` returns None: that it is missing, or cannot be read."""
        try:
            read(self.store, Start, keys.START)
        except RecordInvalid as error:
            return f"cannot be read ({str(error).removeprefix(f'{keys.START}: ').rstrip('.')})"
        return "is missing"

    def _far_ahead(self, last: CommitEntry) -> CommitEntry | None:
        """The last commit in a segment (of many rounds) if it is after `last`, and it and the one before are valid.

        In a signed run the last one of those that follow `last`: who holds the key of one replica can sign two that
        follow each other in rounds to come.
        """
        if self.run.signed_rules is not None:
            return next(iter(deque(self._each_after(last.position), maxlen=1)), None)
        self.segments.refresh()
        far = self.segments.newest_round()
        previous, entry = (self.commit(far - 1), self.commit(far)) if far > last.commit.round + 1 else (None, None)
        if previous is None or entry is None:
            return None
        found = self.conclusions.read(entry, previous, derive_verdict=False, lenient=True)
        return None if found.void or previous.void else found

    def leg_position(self, begin: Begin) -> Position:
        """The position in the commit log at which a leg (start or resume to stop) begins. start.json must exist."""
        return leg_position(begin, self._start().sha256)

    def _start(self) -> Entry[Start]:
        start = self.start()
        assert start is not None, "the caller has checked that start.json exists"
        return start

    # -- the end of a leg ----------------------------------------------------------------------------------------

    def result(self, leg: int) -> Result | None:
        """The result of a leg (start or resume to stop) by its last commit; None without result.json, or if it goes on.

        A result.json alone proves nothing, because every replica may create it. For a leg 1 without commits, which only
        a coordinator can have stopped, it counts together with a request to halt, which no replica may create.
        """
        try:
            recorded = self.recorded_result(leg)
            if recorded is None:
                return None
        except RecordInvalid as error:
            log.error("%s is not obeyed: %s", keys.result(leg), error)
            recorded = None
        last = self._last_of(leg)
        if last is None:
            return self._before_the_first_commit(recorded) if leg == 1 else None
        differs = recorded is not None and recorded.commit_sha256 != last.sha256 and self.run.signed_rules is not None
        if differs or (last.commit.stop == "none" and recorded is not None):
            self.doubt()  # replicas, which derive every verdict, may have read some commits as void, and so an end
            last = self._last_of(leg) or last
        if last.commit.stop == "none":
            log.error("%s says that the leg has ended; round %d stopped nothing", keys.result(leg), last.commit.round)
            return None
        stamp: StampFields = {"write_id": last.commit.write_id, "at": (recorded or last.commit).at}
        return rounds.result_of(last.commit, last.sha256, stamp)

    def false_end(self, begin: Begin) -> str:
        """A sentence about the result.json of a leg that its commits do not end; empty without one, and if they do.

        `begin`: the newest start or resume. Either a commit was changed or deleted after it, or it is false: in an
        unsigned run who may write to the bucket may have written it.
        """
        key = keys.result(begin.leg)
        try:
            recorded = self.recorded_result(begin.leg)
        except RecordInvalid as error:
            return f"{key} is there and cannot be read ({error}), and no commit ends the leg"
        last = self._last_of(begin.leg)
        if recorded is None or last is None or last.commit.stop != "none":
            return ""
        named = f"{key} says that round {recorded.round} ended the leg ({recorded.status})"
        if recorded.round > last.commit.round:
            return (
                f"{named}, and {keys.commit(last.commit.round + 1)} is missing: it was deleted, or the result is false"
            )
        if recorded.round == last.commit.round and recorded.commit_sha256 != last.sha256:
            return (
                f"{named} by a commit with sha256 {recorded.commit_sha256[:12]}, and {keys.commit(recorded.round)} has "
                f"{last.sha256[:12]}: one of the two was changed after it was written"
            )
        return f"{named}, which no commit does: the result is false"

    def _before_the_first_commit(self, recorded: Result | None) -> Result | None:
        """The result of a run stopped before any commit; None without a request to halt. `recorded`: result.json."""
        halt = self.halt(1)
        if halt is None:
            return None
        if recorded is not None and recorded.before_any_commit:
            return recorded
        stamp: StampFields = {"write_id": halt.write_id, "at": halt.at}
        return Result(**stamp, leg=1, status="halted", round=0, outer_steps=0, reason=halt.reason)

    def _last_of(self, leg: int) -> CommitEntry | None:
        """The last commit so far of a leg (start or resume to stop); None if it has none."""
        begin, following = self.begin_of(leg).record, self.begin(leg + 1)
        if following is None:
            last = self.newest(begin)
            return last if last is not None and last.commit.leg == leg else None
        after = following.record.after_round
        return self.as_read(after) if after > begin.after_round else None

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        """The rounds with a complete snapshot, oldest first; 0 is the first base. One LIST request."""
        return sorted(self.snapshot_takes())

    def snapshot_takes(self) -> dict[int, list[str]]:
        """The result of `complete_takes` for this run: the complete versions of every snapshot, by round. One LIST."""
        takes = complete_takes(self.store)
        self.snapshot_seen = max([self.snapshot_seen, *takes])
        return takes

    def snapshot(self, round_: int, take: str = keys.SHARED_TAKE) -> Snapshot:
        """The record of a complete snapshot. Raises `ObjectMissing` if there is none: retention may have deleted it.

        `take`: name of the version.
        """
        found = self._read(Snapshot, keys.snapshot(round_, keys.SNAPSHOT_RECORD, take))
        if found is None:
            raise ObjectMissing(f"{self.store.url} has no complete snapshot {round_} any more. Use a later one.")
        return found.record

    def snapshots_ahead(self, round_: int, begin: Begin) -> list[int]:
        """Rounds since `begin` with a snapshot at least ten rounds after `round_`: loading one saves replaying commits.

        No request if this reader has seen the round open, one GET if it is less than ten rounds behind, else a LIST
        too.
        """
        far = round_ + _PATIENCE
        if round_ <= self._open_seen or self.commit(far) is None:
            return []
        return [found for found in self.snapshots() if found >= far and found > begin.after_round]


def complete_takes(store: Store) -> dict[int, list[str]]:
    """The names of the complete versions of every snapshot, by round. One LIST request.

    The version that every replica may write, named "", comes first, then those that one writer alone may write.
    """
    takes: dict[int, list[str]] = {}
    for info in store.list(keys.SNAPSHOTS):
        parsed = keys.parse_snapshot_record(info.key)
        if parsed is not None:
            takes.setdefault(parsed[0], []).append(parsed[1])
    return {round_: sorted(found) for round_, found in takes.items()}


def signer_of(data: bytes) -> By:
    """The author of what is under a commit's key in a signed run and is none; whoever signed it is named in it."""
    try:
        return By.parse(parse_json(data)["by"])
    except (ValueError, LookupError, TypeError):
        return NOBODY  # as an operator's key may sign


def _entry_of(round_: int, data: bytes, run: Run) -> CommitEntry:
    """The log entry for `data`, the bytes at the key of a round's commit. Raises `RecordTooNew` and `RecordTooOld`."""
    sha256 = sha256_hex(data)
    try:
        commit = Commit.from_bytes(data, keys.commit(round_))
    except (RecordTooNew, RecordTooOld):
        raise
    except RecordInvalid as error:
        return CommitEntry.of_no_commit(round_, sha256, str(error), signer_of(data) if run.signed_rules else NOBODY)
    if commit.round != round_:
        return CommitEntry.of_no_commit(round_, sha256, f"it says it is round {commit.round}")
    return CommitEntry.of(commit, sha256, run.config)
