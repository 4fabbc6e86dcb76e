"""Writes snapshots and segments of the log beside training, when it is this replica's turn among all.

The first complete snapshot counts; `snapshots.layout` has its files, retention deletes old ones. `run_log.segments` has
the content of segments, many commits in one object, so that history costs few requests.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from diloco_orchestrator.errors import DilocoError, ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.allocator import returning_freed_memory
from diloco_orchestrator.replica.rounds.base_claims import BaseClaims
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.run_log.segments import TAIL_ROUNDS, write_segments
from diloco_orchestrator.snapshots.buffers import buffers_of_base
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.default_base import default_base, ensure_default_snapshot
from diloco_orchestrator.snapshots.file_plan import is_side_file
from diloco_orchestrator.snapshots.first_snapshot import side_files_of_run
from diloco_orchestrator.snapshots.layout import ModelFiles, info_of, write_snapshot
from diloco_orchestrator.snapshots.rebuild import Tip
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.snapshots.stored_shards import StoredShards

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_WRITES = 2  # of a snapshot whose files read back as another base
_PATIENCE_S = 30.0  # waiting time for each replica with a lower id, which may be writing the last snapshot


class SnapshotWriter:
    """Writes snapshots for one replica. `files`: the files that a snapshot has beside the model's tensors."""

    def __init__(self, attempt: Attempt, tip: HeldTip, claims: BaseClaims, files: ModelFiles) -> None:
        self._attempt = attempt
        self._tip = tip
        self._claims = claims
        self._files = files
        self._writing: Future[None] | None = None

    def write_if_due(self) -> bool:
        """Write the last round's snapshot if one is due and this replica has the lowest id of those averaged.

        If it was averaged alone, or the snapshot before is unconfirmed, no other replica has confirmed its base: the
        base is rebuilt from the bucket first. Returns whether that changed its bits; this replica then holds the
        rebuilt base. Files are written in the background: call `wait` before the base is stepped in place. A failure is
        a warning; the run goes on.
        """
        self.wait()
        commit = self._tip.last
        if commit is None or not commit.applied or commit.outer_step % self._attempt.config.snapshot_every:
            return False
        averaged = [a.replica_id for a in commit.answers if a.averaged]
        if _first_to_write(averaged, self._attempt) != self._attempt.replica_id:
            return False
        alone = len(averaged) < 2 or not self._newest_is_confirmed()
        healed = alone and self._claims.verify_unclaimed()
        tip, digest = self._tip.value, self._claims.digest if alone else None
        self._writing = self._attempt.background.start(lambda: self._write_beside_training(tip, digest))
        return healed

    def wait(self) -> None:
        """Block until no snapshot is being written. Raises the error of the last write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def wait_ended(self) -> None:
        """Block until no snapshot is being written. Raises nothing."""
        if self._writing is not None:
            self._writing.exception()

    def write_last(self) -> bool:
        """After the run's stop: write the last base's snapshot, unless another replica does within some time.

        Each responding replica with a lower id has 30 s. The base is rebuilt first unless the last round left it
        unchanged and several replicas named its digest, or this one had compared it with a rebuild. Their digests do
        not count for a base with averages that others made. The files are read back, because no later commit confirms
        this base. Returns whether the rebuild changed its bits; this replica then holds the rebuilt base.
        """
        commit = self._tip.last
        assert commit is not None
        self.wait()
        if self._attempt.is_invited:
            return False
        self._attempt.pulse.phase = "snapshot"
        agreeing = sum(rounds.contributes(answer) for answer in commit.answers)
        same = self._claims.hash() == commit.base_digest
        checked = self._claims.is_verified or (agreeing > 1 and not self._tip.borrowed)
        agreed = same and not commit.applied and checked
        healed = not agreed and self._claims.verify_unclaimed()
        before_us = _writers_before(commit, self._attempt)
        own = self._tip.value.base_round, self._claims.digest
        self._await_others(_PATIENCE_S * before_us, lambda: self._exists(*own))
        if not self._exists(*own):
            self._write_and_read_back()
        return healed

    def write_default(self) -> None:
        """After a halt by the guard: rebuild the best base and write its snapshot, unless another replica does.

        Replicas with a lower id that responded have 30 s each to do so first. If the write fails, the coordinator
        writes the snapshot, or the process that resumes from it.
        """
        commit, run_log = self._tip.last, self._attempt.log
        assert commit is not None
        if not commit.halted_by_guard or self._attempt.is_invited:
            return
        default = default_base(run_log).round
        before_us = _writers_before(commit, self._attempt)
        self._await_others(_PATIENCE_S * before_us, lambda: ConfirmedSnapshots(run_log).take_of(default) is not None)
        ensure_default_snapshot(run_log, self._attempt.stamp, self._attempt.replica_id, self._attempt.owners)

    def _newest_is_confirmed(self) -> bool:
        snapshots = ConfirmedSnapshots(self._attempt.log)
        earlier = [round_ for round_ in snapshots.rounds if round_ < self._tip.value.base_round]
        return not earlier or snapshots.take_of(earlier[-1]) is not None

    def _await_others(self, patience_s: float, is_there: Callable[[], bool]) -> None:
        clock = self._attempt.clock
        until, pause = clock.now() + patience_s, _FIRST_PAUSE_S
        while clock.now() < until and not self._attempt.should_leave() and not is_there():
            clock.sleep(pause)
            pause = min(1.5 * pause, self._attempt.config.timing.poll_s)

    def _exists(self, made_in: int, digest: str) -> bool:
        """Whether a complete snapshot of round `made_in` declares a base with `digest`, confirmed or not."""
        return digest in ConfirmedSnapshots(self._attempt.log).said_digests(made_in)

    @returning_freed_memory()
    def _write_beside_training(self, tip: Tip, digest: str | None) -> None:
        """Write a snapshot of the base in `tip`; an invalid record is logged, not raised.

        `digest`: of that base as it was rebuilt, which it must still have; None: it is hashed now.
        """
        with _logging_invalid(tip.base_round):
            self._write(tip, digest or tip.digest)

    def _write(self, tip: Tip, digest: str) -> str | None:
        """Write the snapshot of a base. Returns its version; None if bits of the base changed meanwhile.

        Raises `RecordInvalid` if every version that this replica may write holds other files.
        """
        attempt = self._attempt
        take = write_snapshot(
            attempt.store,
            tip.base_round,
            tip.base,
            digest,
            self._with_buffers(tip),
            attempt.stamp,
            limit=attempt.object_limit,
            by=attempt.replica_id,
        )
        if take is not None:
            log.info("snapshot %d: base %s", tip.base_round, digest[:12])
        return take

    def _with_buffers(self, tip: Tip) -> ModelFiles:
        files = self._with_side_files_of_run()
        if files.untrained is None or not files.untrained.buffers.first:
            return files
        try:
            return files.with_buffers(buffers_of_base(self._attempt.log, tip.base_round))
        except (PayloadCorrupt, RecordInvalid, ObjectMissing) as error:
            log.error("snapshot %d is written with the run's first buffers: %s", tip.base_round, error)
            return files

    def _with_side_files_of_run(self) -> ModelFiles:
        """The files of a snapshot, with the run's own tensor-free files if this machine's libraries write others."""
        start = self._attempt.log.start()
        assert start is not None, "a replica that writes snapshots has followed a commit"
        named = start.record.first_files
        ours = {name: info_of(data) for name, data in self._files.extra.items()}
        if named is None or ours == {name: info for name, info in named.items() if is_side_file(name)}:
            return self._files
        return replace(self._files, extra=side_files_of_run(self._attempt.log))

    def _write_and_read_back(self) -> None:
        with _logging_invalid(self._tip.value.base_round):
            for _ in range(_WRITES):
                tip = self._tip.value
                take = self._write(tip, self._claims.digest)
                if take is None:
                    self._claims.verify_unclaimed()
                elif self._reads_back(tip.base_round, take):
                    return

    def _reads_back(self, round_: int, take: str) -> bool:
        start = self._attempt.log.start()
        assert start is not None
        try:
            snapshot = StoredSnapshot(self._attempt.store, round_, self._attempt.log.snapshot(round_, take), take)
            StoredShards(self._attempt.store, snapshot, start.record).check_all(self._attempt.owners)
        except RecordInvalid as error:
            log.error("snapshot %d was written wrongly and is written again: %s", round_, error)
            return False
        return True


def _first_to_write(averaged: Sequence[int], attempt: Attempt) -> int | None:
    """The lowest id of those averaged, without replicas of strangers; None if there is no other."""
    return min((each for each in averaged if each not in attempt.config.invited), default=None)


def _writers_before(commit: Commit, attempt: Attempt) -> int:
    """The number of replicas with a lower id than the attempt's that responded, without replicas of strangers."""
    ids = [answer.replica_id for answer in commit.answers if answer.replica_id not in attempt.config.invited]
    return sum(each < attempt.replica_id for each in ids)


@contextmanager
def _logging_invalid(round_: int) -> Iterator[None]:
    """Context that logs `RecordInvalid` instead of raising it: any base can be rebuilt without the snapshot."""
    try:
        yield
    except RecordInvalid as error:
        log.warning("the run goes on without snapshot %d: %s", round_, error)


# -- segments of the log ----------------------------------------------------------------------------------------------


class SegmentWriter:
    """Writes segments for one replica: objects that join the commits or manifests of ten or a hundred rounds.

    After every tenth round the averaged replica with the lowest id writes all missing segments, so that ten rounds
    later another replica replaces one that died. It lists the segments unless it wrote the last ones itself.
    """

    def __init__(self, attempt: Attempt, tip: HeldTip) -> None:
        self._attempt = attempt
        self._tip = tip
        self._complete_until = 0  # this replica knows that all segments of rounds up to it exist
        self._writing: Future[None] | None = None

    def write_if_due(self) -> None:
        """Write missing segments (many commits in one object) in the background, if it is this replica's turn."""
        commit = self._tip.last
        if commit is None or commit.round % TAIL_ROUNDS:
            return
        averaged = [a.replica_id for a in commit.answers if a.averaged]
        if _first_to_write(averaged, self._attempt) != self._attempt.replica_id:
            return
        if self._writing is None or self._writing.done():
            self._writing = self._attempt.background.start(lambda: self._write(commit.round))

    def wait(self) -> None:
        """Block until no segment (many commits in one object) is being written."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, newest_round: int) -> None:
        try:
            knows = self._complete_until if self._complete_until >= newest_round - TAIL_ROUNDS else 0
            write_segments(self._attempt.store, self._attempt.log.commit, newest_round, knows)
            self._complete_until = newest_round
        except DilocoError as error:  # a segment only saves requests; ten rounds later it is tried again
            log.warning("no segment of the log is written this time: %s", error)
