"""Writes the last records of a leg, a run's stretch from start or resume to stop, if no replica is left to do it.

They are the stop commit, the result and the last snapshot, which replicas write themselves when they can.
`fleet_policy` decides when to stop a leg.
"""

import logging
import platform

from diloco_orchestrator.errors import ConfigError, ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import By, Stamp
from diloco_orchestrator.protocol.records import Begin, Commit, Halt, Result
from diloco_orchestrator.protocol.weights import norms_after
from diloco_orchestrator.run_log.append import append_commit
from diloco_orchestrator.run_log.entries import CommitEntry, Entry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots, claimed_base
from diloco_orchestrator.snapshots.default_base import ensure_default_snapshot
from diloco_orchestrator.supervision.unfounded_commits import UnfoundedCommits

log = logging.getLogger(__name__)


class EndOfLeg:
    """Writes the records that a stopped run lacks: stop commit, result, last snapshot. Safe to repeat and to race.

    `begin`: the record of the last start or resume.
    """

    def __init__(self, run_log: RunLog, begin: Entry[Begin], stamp: Stamp) -> None:
        self._log = run_log
        self._writer = Writer(run_log.store, Role.COORDINATOR)
        self._begin = begin.record
        self._begin_sha256 = begin.sha256
        self._stamp = stamp
        self.unfounded = UnfoundedCommits(run_log, begin.record, coordinator_name(), stamp)

    def reached(self) -> bool:
        """Whether the run has stopped since its last start or resume: by a stop commit or a result. Up to two GETs."""
        last = self._last()
        if last is not None and last.commit.stop != "none" and self.unfounded.judge():
            return self.reached()  # that commit is void
        return bool(last and last.commit.stop != "none") or self._log.result(self._begin.leg) is not None

    def commit_stop(self, stop: rounds.Stop, why: str) -> None:
        """Stop the run by a commit of the open round that averages nobody and keeps base and guard state.

        `stop`: "halted" or "failed". Writes only a request to halt and the result if no replica ever created the first
        base.
        """
        while not self.reached():
            if self._log.start() is None:
                self._write_result(stop, why)  # without start.json no commit can be chained
                return
            self.unfounded.judge()
            self._log.check_newest(self._begin)
            last = self._last()
            if last is not None and last.commit.stop != "none":
                return  # a replica stopped the leg since `reached` was asked
            # Losing the race means that a replica ended the round: read on.
            append_commit(self._log, self._stop_commit(last, stop, why))

    def finalize(self) -> None:
        """Write the result, the last snapshot and, after a halt by the guard, the best base's snapshot, where missing.

        Called for a stopped run once no attempt runs any more.
        """
        last = self._last()
        if last is not None and last.commit.stop == "none":
            # A replica that was thought dead brought a model after the run was stopped for want of one.
            halt = self._log.halt(self._begin.leg)
            self.commit_stop("halted", halt.reason if halt else "it was stopped before its first commit")
            last = self._last()
        if last is None:
            return
        if self._log.result(self._begin.leg) is None:
            self._writer.create(rounds.result_of(last.commit, last.sha256, self._stamp()))
        self._ensure_last_snapshot()
        if last.commit.halted_by_guard:
            ensure_default_snapshot(self._log, self._stamp)

    def last_base(self) -> int:
        """The round after which the run's newest base exists: of the last applied commit, else the one resumed from."""
        entry = self._last()
        while entry is not None and not entry.commit.applied and entry.commit.round - 1 > self._begin.after_round:
            entry = self._log.commit(entry.commit.round - 1)
        return entry.commit.round if entry is not None and entry.commit.applied else self._begin.from_round

    def _last(self) -> CommitEntry | None:
        """The newest commit of this leg (start or resume to stop); None without any, and once a later leg has some."""
        newest = self._log.newest(self._begin)
        return newest if newest is not None and newest.commit.leg == self._begin.leg else None

    def _stop_commit(self, entry: CommitEntry | None, stop: rounds.Stop, why: str) -> Commit:
        last = entry.commit if entry else None
        position = entry.position if entry else self._log.leg_position(self._begin)
        return Commit(
            **self._stamp(),
            round=position.round + 1,
            leg=self._begin.leg,
            fragment=0,
            outer_step=position.outer_step,
            answers=(),
            begin_sha256=self._begin_sha256,
            base_digest=None,
            roster=last.roster if last else tuple(range(self._log.configs.of(self._begin.leg).replicas)),
            guard=last.guard if last else self._begin.guard,
            norms=norms_after(last, self._log.configs.of(self._begin.leg)) if last else None,
            applied=False,
            empty_rounds=position.empty_rounds + 1,
            stop=stop,
            by=By(None, coordinator_name()),
            reason=why,
            previous=position.sha256,
        )

    def _ensure_last_snapshot(self) -> None:
        """Write the snapshot of the last base before the stop, if missing; logs an error if it cannot be rebuilt."""
        round_, snapshots = self.last_base(), ConfirmedSnapshots(self._log)
        # The log claims nothing of the base that a halt by request leaves, until a leg starts from it.
        unclaimed = claimed_base(self._log, round_) is None and bool(snapshots.said_digests(round_))
        if unclaimed or snapshots.take_of(round_) is not None:
            return
        from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot  # torch, which is slow to import

        try:
            write_rebuilt_snapshot(self._log, round_, self._stamp)
        except (ConfigError, ObjectMissing, PayloadCorrupt, RecordInvalid) as error:
            newest = ConfirmedSnapshots(self._log).newest(1, range(round_))
            log.error(
                "leg %d ends without a snapshot of its last base, of round %d: %s", self._begin.leg, round_, error
            )
            log.error("resume %s with --from-round %d, its newest snapshot", self._log.store.url, *newest or [0])

    def _write_result(self, stop: rounds.Stop, why: str) -> None:
        """Write the result of a leg (start or resume to stop) without commits, valid only with a request to halt."""
        assert stop != "none"
        self._writer.create(Halt(**self._stamp(), leg=self._begin.leg, by=coordinator_name(), reason=why))
        result = Result(**self._stamp(), leg=self._begin.leg, status=stop, round=0, outer_steps=0, reason=why)
        self._writer.create(result)


def coordinator_name() -> str:
    """This coordinator's name in records; `verify` recognises a coordinator's commit by its first word."""
    return f"coordinator on {platform.node()}"
