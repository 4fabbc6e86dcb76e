"""Checks the snapshots of a run: their files, their bases, and that retention kept enough of them."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from diloco_orchestrator.allreduce.shards import fetch_shard
from diloco_orchestrator.errors import DilocoError, ObjectMissing, RecordInvalid
from diloco_orchestrator.inspection.verify.findings import Differs, Verification, equal, is_of_this_reader, optional
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import SAFE_SNAPSHOTS
from diloco_orchestrator.protocol.records import Shard, Snapshot
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots, first_take
from diloco_orchestrator.snapshots.file_plan import is_side_file, why_no_file

if TYPE_CHECKING:
    from diloco_orchestrator.inspection.verify.tensors import Tensors
    from diloco_orchestrator.outer.base import Base


class UnreadBase:
    """The base of a snapshot whose files have the digests in its record, where no tensor can be read without torch."""

    def digest(self) -> None:
        return None


class SnapshotChecker:
    """Checks the snapshots of a run that were complete when its verification began, and loads bases from them.

    `tensors`: None where torch is not installed. Then only the files' digests are compared with the records.
    """

    def __init__(self, log: RunLog, done: Verification, tensors: "Tensors | None") -> None:
        self._log = log
        self._done = done
        self._tensors = tensors
        self._takes = log.snapshot_takes()
        self._confirmed = ConfirmedSnapshots(log)
        self.rounds = sorted(self._takes)  # with a complete snapshot, when the verification began
        self._checked: set[int] = set()  # rounds whose snapshot agrees
        self.named: dict[
            str, set[str]
        ] = {}  # by the folder of a version, unless that is junk: files in its record, and the record
        self._unread: dict[int, UnreadBase | None] = {}  # by round, of snapshots whose files were compared

    def base(self, round_: int, digest: str | None, start: Start) -> "Base | UnreadBase | None":
        """The base of a round's snapshot after checking every file; None if the round has no usable snapshot.

        `digest`: of the recomputed base after that round; None if it could not be recomputed, and a confirmed version
        counts. A version whose record cannot be read, of which a file does not load or has another digest than there,
        or a confirmed one of another base is noted where another version is right; else `Differs` is raised. An
        unconfirmed one of another base is only noted: nobody loads it.
        """
        if round_ not in self._takes:
            return None
        if self._tensors is None:
            if round_ not in self._unread:
                self._unread[round_] = self._compared(round_, start)
            return self._unread[round_]
        others: list[str] = []
        failed: list[Differs] = []
        for take in self._takes[round_]:
            try:
                base = self._base_in(round_, take, digest, start, others)
            except Differs as differs:
                failed.append(differs)
                self.named.pop(keys.snapshot(round_, "", take), None)
                continue
            if base is not None:
                self._done.bases.add(round_)
                self._done.checked["snapshots"] += round_ not in self._checked
                self._agrees(round_, [*others, *map(_passed_over, failed)])
                return base
        if failed:
            raise failed[0]
        if others:
            self._agrees(round_, others)
        return None

    def _base_in(self, round_: int, take: str, digest: str | None, start: Start, others: list[str]) -> "Base | None":
        """The base in one version of a snapshot; None if nobody uses that version. Arguments and errors as `base`.

        Adds to `others` a sentence about a version that holds another base.
        """
        key = keys.snapshot(round_, "", take)
        if not round_ and take != first_take(self._log):
            others.append(f"{key} is not the first base that the run began with: it is not used")
            return None
        claimed = self._claimed(round_, take)
        if claimed is None:
            return None
        # Only a snapshot whose base does not follow from the log has to be confirmed, which costs requests.
        confirmed = claimed == digest or take in self._confirmed.takes_of(round_)
        if digest is None and not confirmed:
            return None
        base = self._load(round_, take, start)
        if not confirmed:  # a snapshot of another base, but not one that was changed
            others.append(f"{key} is of base {claimed[:12]}, and nobody confirmed it: it is not used")
            return None
        if base is not None:
            equal(key, "its base", base.digest(), claimed if digest is None else digest, "the log")
        return base

    def _agrees(self, round_: int, notes: list[str]) -> None:
        """Add the notes about a round's snapshot, once."""
        if round_ not in self._checked:
            self._checked.add(round_)
            self._done.notes += notes

    def _compared(self, round_: int, start: Start) -> UnreadBase | None:
        """The base, not read, of a round's snapshot after comparing its files with its record; None if none is usable.

        Raises `Differs` if a confirmed version has a file with another digest and no other is right; else that is
        noted.
        """
        found, failed = None, list[Differs]()
        for take in self._takes[round_]:
            try:
                if (not round_ and take != first_take(self._log)) or self._claimed(round_, take) is None:
                    continue
                record = self._log.snapshot(round_, take)
                self._check_names(keys.snapshot(round_, "", take), record, start)
                for name, info in sorted(record.files.items()):
                    self._compare(keys.snapshot(round_, name, take), Shard(digest=info.digest, size=info.size))
            except Differs as differs:
                self.named.pop(keys.snapshot(round_, "", take), None)
                confirmed = take in self._confirmed.takes_of(round_) and not self._deleted_meanwhile(round_, take)
                if confirmed or not self._is_readable(round_, take):
                    failed.append(differs)
                else:
                    self._done.notes.append(f"{differs.found.key} {differs}; the log does not confirm that snapshot")
                continue
            self._done.checked["files of snapshots"] += len(record.files)
            found = UnreadBase()
        if found is None and failed:
            raise failed[0]
        if found is not None:
            self._agrees(round_, [_passed_over(each) for each in failed])
        return found

    def _compare(self, key: str, named: Shard) -> None:
        try:
            fetch_shard(self._log.store, key, named)
        except DilocoError as error:
            if is_of_this_reader(error):
                raise
            raise Differs(key, str(error)) from None

    def _claimed(self, round_: int, take: str) -> str | None:
        """The base digest in the record of a snapshot version; None if it was deleted since the verification began."""
        key = keys.snapshot(round_, keys.SNAPSHOT_RECORD, take)
        try:
            return optional(key, lambda: self._log.snapshot(round_, take)).base_digest
        except ObjectMissing:
            return None

    def _load(self, round_: int, take: str, start: Start) -> "Base | None":
        assert self._tensors is not None, "the caller compares files alone without it"
        key = keys.snapshot(round_, "", take)
        try:
            record = self._log.snapshot(round_, take)
            self._check_names(key, record, start)
            return self._tensors.base(round_, take, record, start)
        except Differs:
            raise
        except DilocoError as error:
            if is_of_this_reader(error):
                raise
            if self._deleted_meanwhile(round_, take):
                return None
            raise Differs(key, str(error)) from None
        except Exception as error:  # whatever safetensors raises for a broken file
            if is_of_this_reader(error):
                raise
            raise Differs(key, f"does not load: {error}") from None

    def _check_names(self, key: str, record: Snapshot, start: Start) -> None:
        """Raise `Differs` if a snapshot's record names foreign files, or has other digests of the first files."""
        self.named[key] = {*record.files, keys.SNAPSHOT_RECORD}
        for name, info in sorted(record.files.items()):
            if why := why_no_file(name, start):
                raise Differs(f"{key}{name}", f"is no file of a snapshot of this run: {why}")
            if start.first_files is not None and (is_side_file(name) or not record.round):
                first = start.first_files.get(name, info)  # of snapshot 0 the outer files follow from the base
                equal(f"{key}{name}", "its digest", info.digest, first.digest, keys.START)

    def check_all(self, digests: Mapping[int, str | None], start: Start, due: Collection[int]) -> None:
        """Check every snapshot of the run that `base` has not read yet.

        `digests`: the digest of the base after each round that has one; None where it could not be derived. `due`:
        rounds whose snapshot a run writes; junk in the place of another is noted. Raises `Differs` at the first that
        disagrees.
        """
        for round_, takes in list(self._takes.items()):
            if round_ not in digests:
                key = keys.snapshot(round_, keys.SNAPSHOT_RECORD, takes[0])
                differs = Differs(key, f"is of round {round_}, which left no base")
                if any(map(partial(self._is_readable, round_), takes)):
                    raise differs
                self._done.notes.append(_passed_over(differs))
                continue
            if round_ not in self._checked:
                try:
                    self.base(round_, digests[round_], start)
                except Differs as differs:
                    if round_ in due:
                        raise
                    self._done.notes.append(_passed_over(differs))

    def _is_readable(self, round_: int, take: str) -> bool:
        """Whether the record of a snapshot version can be read and is of this round."""
        with suppress(RecordInvalid, ObjectMissing):
            return self._log.snapshot(round_, take).round == round_
        return False

    def check_deleted(self, key: str, round_: int) -> None:
        """Raise `Differs` if retention cannot have deleted `key`, an object of a round.

        Retention cannot if the run keeps all such objects, or too few confirmed snapshots follow.
        """
        if optional(keys.RETENTION, lambda: self._log.keeps_payloads):
            raise Differs(key, "is gone, though the run keeps all payloads and states: deleted by hand")
        following = [snapshot for snapshot in self._takes if snapshot >= round_]
        if len(self._confirmed.newest(SAFE_SNAPSHOTS, following)) < SAFE_SNAPSHOTS:
            words = f"is gone, though fewer than {SAFE_SNAPSHOTS} snapshots come after round {round_}: deleted by hand"
            raise Differs(key, words)

    def salvage(self, start: Start) -> None:
        """After a disagreement, add the rounds of all loadable snapshots to the result, confirmed or not."""
        if self._tensors is None:
            return
        for round_, takes in self._takes.items():
            for take in takes:
                with suppress(Exception):  # a broken snapshot is not listed
                    self._tensors.check_loads(round_, take, start)
                    self._done.bases.add(round_)

    def _deleted_meanwhile(self, round_: int, take: str) -> bool:
        """Whether the record of a snapshot version was deleted since the verification began; it is then ignored."""
        gone = read_optional(self._log.store, keys.snapshot(round_, keys.SNAPSHOT_RECORD, take)) is None
        if gone:
            self._takes.pop(round_, None)
        return gone


def _passed_over(differs: Differs) -> str:
    """The note about a version of a snapshot that disagrees, and that nobody needs."""
    key = differs.found.key
    return f"{key} {str(differs).removeprefix(f'{key} ')}: it is not used"
