"""How a leg ends from the coordinator's side: a stop that it commits itself, the result, the last snapshot.

Replicas do all of this when they can; the coordinator sees to it when none lives to do it.
"""

import platform

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.records import Begin, Commit, Result, Stamp, Start
from diloco_orchestrator.run_log.run_log import CommitLog, first_digest, leg_position, read_start


class LegEnd:
    """Of one leg. `begin_sha256`: of its record's bytes."""

    def __init__(self, reader: RunReader, begin: Begin, begin_sha256: str, stamp: Stamp) -> None:
        self._reader = reader
        self._store = reader.store
        self._begin = begin
        self._begin_sha256 = begin_sha256
        self._stamp = stamp

    @property
    def _config(self) -> RunConfig:
        return self._reader.run.config

    def reached(self) -> bool:
        """Whether the leg has stopped."""
        last = self._last_commit()
        return bool(last and last.stop != "none") or self._reader.result(self._begin.leg) is not None

    def commit_stop(self, stop: rounds.Stop, why: str) -> None:
        """End the leg from here: the open round is committed, naming nobody; base and guard stay as they are."""
        while not self.reached():
            start = read_start(self._store)
            if start is None:
                self._write_result(stop, why)  # no replica ever brought a model: there is no log to end
                return
            last = self._last_commit()
            if last is not None and last.stop != "none":
                return  # a replica stopped the leg between two looks
            # Losing means that a replica ended the round: look again.
            CommitLog(self._store).append(self._stop_commit(last, start, stop, why))

    def conclude(self) -> None:
        """Once nobody runs any more: the result and the last snapshot, where no replica wrote them."""
        last = self._last_commit()
        if last is None:
            return
        position = self._reader.position()
        if self._reader.result(self._begin.leg) is None and position is not None:
            result = rounds.result_of(last, position.sha256, self._stamp())
            self._store.create(keys.result(self._begin.leg), result.to_bytes())
        self._ensure_last_snapshot()

    def last_base(self) -> int:
        """The round that made the leg's newest base."""
        applied = (
            commit.round for commit in self._reader.commits() if commit.applied and commit.leg == self._begin.leg
        )
        return max(applied, default=self._begin.from_round)

    def _last_commit(self) -> Commit | None:
        """The newest commit of this leg."""
        commits = self._reader.commits()
        return commits[-1] if commits and commits[-1].leg == self._begin.leg else None

    def _stop_commit(self, last: Commit | None, start: tuple[Start, str], stop: rounds.Stop, why: str) -> Commit:
        position = self._reader.position() if last else leg_position(self._begin, start[1])
        assert position is not None
        return Commit(
            **self._stamp(),
            round=position.round + 1,
            leg=self._begin.leg,
            fragment=0,
            outer_step=position.outer_step,
            answers=(),
            begin_sha256=self._begin_sha256,
            base_digest=last.base_digest if last else first_digest(CommitLog(self._store), self._begin, start[0]),
            roster=last.roster if last else tuple(range(self._config.replicas)),
            guard=last.guard if last else self._begin.guard,
            applied=False,
            empty_rounds=position.empty_rounds + 1,
            stop=stop,
            by=_me(),
            reason=why,
            previous=position.sha256,
        )

    def _ensure_last_snapshot(self) -> None:
        """Every leg ends with a snapshot of its last good base, even if no replica lived to write it."""
        if self.last_base() in self._reader.snapshots():
            return
        from diloco_orchestrator.snapshots.rebuild import snapshot_newest_base  # torch, which is slow to import

        snapshot_newest_base(self._store, self._config, self._begin, self._stamp)

    def _write_result(self, stop: rounds.Stop, why: str) -> None:
        assert stop != "none"
        result = Result(**self._stamp(), leg=self._begin.leg, status=stop, round=0, outer_steps=0, reason=why)
        self._store.create(keys.result(self._begin.leg), result.to_bytes())


def _me() -> str:
    return f"coordinator on {platform.node()}"
