"""Finds commits of a signed run that name manifests or check records which are not there, and writes that down.

Replicas cannot check such a commit, which who holds the key of one of them can sign, and wait. A coordinator's finding
(`Unfounded`), which no replica's key may sign, makes it void for every reader.
"""

import logging
from contextlib import suppress

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import Checked, CheckNamed
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Answer, Begin, Commit, Contribution, Unfounded
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.writer import Writer

log = logging.getLogger(__name__)

_REASON = "nothing was here that the round's commit names"


class UnfoundedCommits:
    """Judges commits of one leg (start or resume to stop), each once. Does nothing in an unsigned run."""

    def __init__(self, run_log: RunLog, begin: Begin, by: str, stamp: Stamp) -> None:
        self._log = run_log
        self._begin = begin
        self._by = by
        self._stamp = stamp
        self._attempts = AttemptRecords(run_log.store)
        self._judged: set[int] = set()  # rounds

    def judge(self) -> bool:
        """Write down which of the newest commits name what is not there; returns whether there was one.

        Checks only those that no replica but their author has followed, as heartbeats say. Costs a LIST, a GET for each
        heartbeat and for each manifest that they name. After one is found all verdicts of the leg are checked.
        Raises the store's errors; safe to repeat and to race.
        """
        newest, found = self._log.newest(self._begin), False
        if self._log.run.signed_rules is None or newest is None or newest.commit.leg != self._begin.leg:
            return False
        if newest.commit.by_coordinator:
            return False  # it has judged them, or its stop follows them as they are written
        for round_ in range(self._followed(newest) + 1, newest.commit.round + 1):
            if round_ in self._judged or round_ > newest.commit.round:
                continue
            entry = self._log.commit(round_)
            assert entry is not None, "a commit is never deleted"
            if self._is_unfounded(entry):
                found = True
                self._log.doubt(again=True)
                newest = self._log.newest(self._begin) or newest  # the leg may have ended earlier by it
            self._judged.add(round_)  # unless the store raised an error
        return found

    def _followed(self, newest: CommitEntry) -> int:
        """The last round whose commit another replica than the author of the newest one has followed."""
        who = newest.written.by.who
        beats = [
            self._attempts.heartbeat(replica_id, numbers[-1])
            for replica_id, numbers in self._attempts.all_numbers().items()
            if who is None or replica_id != who[0]
        ]
        return max([self._begin.after_round, *(each.round - 1 for each in beats if each is not None)])

    def _is_unfounded(self, entry: CommitEntry) -> bool:
        """Whether nobody can check a commit for want of what it names. Written down if so, after an abstention."""
        commit, conclusions = entry.written, self._log.conclusions
        if entry.unreadable or entry.contradicts:
            return False
        before = self._log.as_read(commit.round - 1) if commit.round > 1 else None
        with suppress(ObjectMissing, RecordInvalid):
            conclusions.read(entry, before, derive_verdict=True)
            return False  # it is void anyway, or nobody reads what is missing
        last: Answer | CheckNamed | None = None
        while (missing := next(conclusions.missing(commit), None)) is not None and missing[0] != last:
            last, _ = missing
            self._abstain(commit, last, entry.sha256)
        if missing is None:
            return False  # it has come meanwhile
        what, _, _ = missing[1].partition(". ")
        reason = f"it names what is not there: {what}"
        log.warning("%s is void: %s", keys.commit(commit.round), reason)
        found = Unfounded(**self._stamp(), round=commit.round, commit_sha256=entry.sha256, by=self._by, reason=reason)
        Writer(self._log.store, Role.COORDINATOR).create(found)
        return True

    def _abstain(self, commit: Commit, named: Answer | CheckNamed, sha256: str) -> None:
        """Put a record that says nothing under the key of one that a commit names, unless one is there.

        One is enough to make the commit void for good: it may name thousands. `sha256`: digest of the commit.
        """
        if isinstance(named, CheckNamed):
            record: Contribution | Checked = Checked(
                **self._stamp(),
                round=commit.round,
                leg=commit.leg,
                replica_id=named.replica_id,
                attempt=1,
                number=named.number,
                claim_sha256=sha256,
                read=(),
            )
        else:
            record = Contribution(
                **self._stamp(),
                round=commit.round,
                leg=commit.leg,
                replica_id=named.replica_id,
                attempt=named.attempt,
                kind="abstention",
                reason=_REASON,
                base_digest="",
                snapshot_round=0,
                rebuilt_after=0,
            )
        Writer.of_attempt(self._log.store, record.replica_id, record.attempt).create(record)
