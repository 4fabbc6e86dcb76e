"""Which snapshots may be loaded: those of the base that the log claims after their round.

A snapshot is written by one machine, whose memory may be wrong, and anybody who may write to the bucket can put one
there. So the log decides: `start.json` has the digest of the first base, the begin of a leg that of the base which it
starts from, and a commit the digest that those whom it names claim of the base before its round. Whether the files hold
that base is checked when they are read (`snapshots.stored`); bases that no snapshot has are `snapshots.rebuild`'s.
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
    """The snapshots that were complete when this object was made, with one LIST request."""

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._takes = run_log.snapshot_takes()
        self._claims: dict[int, list[Contribution]] = {}  # by the round whose base they claim

    @property
    def rounds(self) -> list[int]:
        """The rounds with a complete snapshot, confirmed or not, oldest first."""
        return sorted(self._takes)

    def complete_takes(self, round_: int) -> list[str]:
        """The takes of a round's snapshot that have a record, whatever that says."""
        return [take for take in self._takes.get(round_, ()) if self._is_of_run(round_, take)]

    def takes_of(self, round_: int) -> list[str]:
        """The takes of a round's snapshot that say to hold the base which the log claims after that round.

        Their files may be others: who reads one that is damaged takes the next, or an older snapshot. A record that
        cannot be read, or is of no replica of the run, is none.
        """
        if not self._takes.get(round_):
            return []
        digest = claimed_base(self._log, round_)
        return [] if digest is None else self.takes_saying(round_, digest)

    def takes_saying(self, round_: int, digest: str) -> list[str]:
        """The complete takes of a round's snapshot whose records name this base, confirmed or not."""
        named = ((take, self._record(round_, take)) for take in self.complete_takes(round_))
        return [take for take, record in named if record is not None and record.base_digest == digest]

    def take_of(self, round_: int) -> str | None:
        """The first of them; None if there is none."""
        return next(iter(self.takes_of(round_)), None)

    def newest(
        self, count: int, among: Sequence[int], usable: Callable[[int, str], bool] = lambda round_, take: True
    ) -> list[int]:
        """The newest `count` rounds in `among` that have a confirmed snapshot, oldest first; fewer if there are not.

        `usable`: says of a round and a confirmed take whether it counts.
        """
        found: list[int] = []
        for round_ in sorted(among, reverse=True):
            if len(found) == count:
                break
            if any(usable(round_, take) for take in self.takes_of(round_)):
                found.insert(0, round_)
        return found

    def said_digests(self, round_: int) -> set[str]:
        """The digests of the bases that the complete takes of a round's snapshot name, confirmed or not."""
        records = (self._record(round_, take) for take in self.complete_takes(round_))
        return {record.base_digest for record in records if record is not None}

    def claims_of(self, round_: int) -> list[Contribution]:
        """The manifests that were formed on the base after a round."""
        if round_ not in self._claims:
            reader, replicas = ContributionReader(self._log.store), self._log.run.config.replicas
            claims = [manifest for later in self._rounds_from(round_) for manifest in reader.in_round(later, replicas)]
            self._claims[round_] = claims
        return self._claims[round_]

    def _is_of_run(self, round_: int, take: str) -> bool:
        replicas = range(self._log.run.config.replicas)
        own = (keys.own_take(None), *_OLD_TAKES, *map(keys.own_take, replicas))
        return take == first_take(self._log) if round_ == 0 else take in (keys.SHARED_TAKE, *own)

    def _record(self, round_: int, take: str) -> Snapshot | None:
        """The record of a take; None if it cannot be read, or retention has deleted it since."""
        try:
            return self._log.snapshot(round_, take)
        except (RecordInvalid, ObjectMissing) as error:
            log.warning("a snapshot is not used: %s", error)
            return None

    def _rounds_from(self, round_: int) -> Iterator[int]:
        """The rounds that started from the base after `round_`: in its own leg, and in legs that began from it."""
        entry = self._log.commit(round_) if round_ else None
        if entry is None and round_:
            return
        begins = self._log.begins()
        yield from self._until_applied(round_ + 1, entry.commit.leg if entry else 1)
        for begin in begins:
            if begin.leg > 1 and begin.from_round == round_:
                yield from self._until_applied(begin.after_round + 1, begin.leg)

    def _until_applied(self, first: int, leg: int) -> Iterator[int]:
        """The rounds of a leg from `first` up to the first that was applied, or to the open one."""
        round_ = first
        while (entry := self._log.commit(round_)) is not None and entry.commit.leg == leg:
            yield round_
            if entry.commit.applied or entry.commit.stop != "none":
                return
            round_ += 1
        if entry is None:
            yield round_


def claimed_base(run_log: RunLog, round_: int) -> str | None:
    """The digest of the base after a round, as the log claims it; None while nothing does.

    It is that of `start.json` for the first base, that of the begin of a leg which starts from the base, else that of
    the next commit that names as many contributions as a round needs. A commit is read as every replica reads it: one
    whose claim is not that of the manifests which it names is void.
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
    """The take that most of those name who follow the run's start, if all name one; else the first that can be read.

    Takes that equally many name are tried in the order of `replica_id`. Where several are named it reads
    snapshot 0, once for each `run_log` whose start cannot change any more.
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
