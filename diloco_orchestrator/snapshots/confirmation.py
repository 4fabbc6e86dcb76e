"""Which snapshots are confirmed, and so may be loaded: those whose base digest the commit log names after their round.

A snapshot is written by one machine, whose memory may be wrong, or by anybody with write access. The log names base
digests: `start.json` of the first base, each resume's record of the base that it starts from, and a commit of the base
before its round. `snapshots.stored` checks that the files hold that base; `snapshots.rebuild` makes bases without a
snapshot.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from diloco_orchestrator.errors import ModelMismatch, ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.legs import leg_position
from diloco_orchestrator.protocol.records import Commit, Contribution, Snapshot
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog

log = logging.getLogger(__name__)

_OLD_TAKES = ("2", "3", "4")  # of earlier versions


class ConfirmedSnapshots:
    """The complete snapshots of a run (one LIST), and which of them the commit log confirms by their base digest."""

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._takes = run_log.snapshot_takes()
        self._claims: dict[int, list[Contribution]] = {}  # by the round whose base they claim

    @property
    def rounds(self) -> list[int]:
        """The rounds with a complete snapshot, confirmed or not, oldest first."""
        return sorted(self._takes)

    def complete_takes(self, round_: int) -> list[str]:
        """The versions of a round's snapshot that have a record (snapshot.json), even one that cannot be read."""
        return [take for take in self._takes.get(round_, ()) if self._is_of_run(round_, take)]

    def takes_of(self, round_: int) -> list[str]:
        """The confirmed versions of a round's snapshot: their records name the base digest that the log has.

        Empty if no version is complete or the log names no digest of that base yet. Files may still differ from the
        record: a reader that finds one damaged goes on to the next version or an older snapshot. Records that cannot
        be read, or are by no replica of the run, do not count.
        """
        if not self._takes.get(round_):
            return []
        digest = claimed_base(self._log, round_)
        return [] if digest is None else self.takes_saying(round_, digest)

    def takes_saying(self, round_: int, digest: str) -> list[str]:
        """The complete versions of a round's snapshot whose records name the base digest `digest`, confirmed or not."""
        named = ((take, self._record(round_, take)) for take in self.complete_takes(round_))
        return [take for take, record in named if record is not None and record.base_digest == digest]

    def take_of(self, round_: int) -> str | None:
        """The first version of a round's snapshot that the commit log confirms by its base digest; None without one."""
        return next(iter(self.takes_of(round_)), None)

    def newest(
        self, count: int, among: Sequence[int], usable: Callable[[int, str], bool] = lambda round_, take: True
    ) -> list[int]:
        """The newest `count` rounds in `among` with a confirmed snapshot that is `usable`, oldest first."""
        found: list[int] = []
        for round_ in sorted(among, reverse=True):
            if len(found) == count:
                break
            if any(usable(round_, take) for take in self.takes_of(round_)):
                found.insert(0, round_)
        return found

    def said_digests(self, round_: int) -> set[str]:
        """The base digests that the complete versions of a round's snapshot name, confirmed or not."""
        records = (self._record(round_, take) for take in self.complete_takes(round_))
        return {record.base_digest for record in records if record is not None}

    def claims_of(self, round_: int) -> list[Contribution]:
        """The readable manifests of all rounds whose training started from the base after `round_`."""
        if round_ not in self._claims:
            reader, replicas = ContributionReader(self._log.store), self._log.run.config.most_replicas
            claims = [manifest for later in self._rounds_from(round_) for manifest in reader.in_round(later, replicas)]
            self._claims[round_] = claims
        return self._claims[round_]

    def _is_of_run(self, round_: int, take: str) -> bool:
        replicas = range(self._log.run.config.most_replicas)
        own = (keys.own_take(None), *_OLD_TAKES, *map(keys.own_take, replicas))
        if round_ == 0:
            return take == first_take(self._log)
        return take in (keys.SHARED_TAKE, *own) or self._log.run.signed_by is not None  # whose records replicas signed

    def _record(self, round_: int, take: str) -> Snapshot | None:
        """The record of a version of a snapshot; None if it cannot be read, or retention has deleted it."""
        try:
            return self._log.snapshot(round_, take)
        except (RecordInvalid, ObjectMissing) as error:
            log.warning("a snapshot is not used: %s", error)
            return None

    def _rounds_from(self, round_: int) -> Iterator[int]:
        """Rounds that started from the base after `round_`: before the next stop, and after a resume from it."""
        entry = self._log.commit(round_) if round_ else None
        if entry is None and round_:
            return
        begins = self._log.begins()
        yield from self._until_applied(round_ + 1, entry.commit.leg if entry else 1)
        for begin in begins:
            if begin.leg > 1 and begin.from_round == round_:
                yield from self._until_applied(begin.after_round + 1, begin.leg)

    def _until_applied(self, first: int, leg: int) -> Iterator[int]:
        """The rounds from `first` up to the first that changed the base, or else to the open one or the run's stop."""
        round_ = first
        while (entry := self._log.commit(round_)) is not None and entry.commit.leg == leg:
            yield round_
            if entry.commit.applied or entry.commit.stop != "none":
                return
            round_ += 1
        if entry is None:
            yield round_


def claimed_base(run_log: RunLog, round_: int) -> str | None:
    """The digest of the base after a round that the log names; None as long as no record does.

    Named by `start.json` for the first base, by a resume's record for the base it starts from, else by the next commit
    with enough contributions. Void commits do not count.
    """
    start = run_log.start()
    if start is None:
        return None
    if round_ == 0:
        return start.record.base_digest
    if round_ not in run_log.claimed_bases:
        try:
            claim = _claimed(run_log, round_)
        except (RecordInvalid, ObjectMissing) as error:
            log.warning("what the log claims of the base after round %d cannot be read: %s", round_, error)
            return None
        if claim is None:
            return None
        run_log.claimed_bases[round_] = claim
    return run_log.claimed_bases[round_]


def _claimed(run_log: RunLog, round_: int) -> str | None:
    begins = [begin for begin in run_log.begins() if begin.leg > 1 and begin.from_round == round_]
    for begin in begins:
        if begin.base_digest is not None:
            return begin.base_digest
    made = run_log.as_read(round_)
    if made is None or not made.commit.applied:
        return None
    start = run_log.start()
    assert start is not None, "the caller has checked that start.json exists"
    for position in (made.position, *(leg_position(begin, start.sha256) for begin in begins)):
        if position.stop != "none":
            continue  # the leg ended with this base
        for entry in run_log.after(position, derive_verdicts=True):
            if _names_enough(entry.commit, run_log.configs.of(entry.commit.leg).contributions_needed):
                return entry.commit.base_digest
            if entry.commit.applied or entry.commit.stop != "none":
                break
    return None


def _names_enough(commit: Commit, needed: int) -> bool:
    return commit.base_digest is not None and sum(rounds.contributes(each) for each in commit.answers) >= needed


def first_take(run_log: RunLog) -> str:
    """The version of snapshot 0 that all replicas with the chosen start record name, else the first readable one.

    Versions named by more replicas are tried first, in a tie in `replica_id` order. If several are named, snapshot 0 is
    read, once per `run_log` whose first base is final.
    """
    named = run_log.starts.named_takes()
    if len(named) > 1:
        take = next((take for take in named if _holds_first_base(run_log, take)), named[0])
        run_log.starts.settle_take(take)
        return take
    return named[0] if named else keys.SHARED_TAKE


def _holds_first_base(run_log: RunLog, take: str) -> bool:
    # These import torch, which is slow.
    from diloco_orchestrator.snapshots.file_plan import is_side_file
    from diloco_orchestrator.snapshots.stored import first_snapshot_in

    start = run_log.start()
    if start is None:
        return False
    try:
        found = first_snapshot_in(run_log, start.record, take)
        found.check(start.record, but=[name for name in found.record.files if is_side_file(name)])
    except (RecordInvalid, ObjectMissing, ModelMismatch, KeyError, ValueError) as error:
        log.warning("%s is passed over: %s", keys.snapshot(0, "", take), error)
        return False
    return True
