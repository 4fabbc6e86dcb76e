"""Checks the snapshots of a run: their files, their bases, and that retention kept enough of them."""

from collections.abc import Mapping
from contextlib import suppress

import torch

from diloco_orchestrator.errors import DilocoError, ObjectMissing, SpoolFailed
from diloco_orchestrator.inspection.verify.findings import Differs, Verification, equal, optional
from diloco_orchestrator.outer.adapter_products import merged
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import SAFE_SNAPSHOTS
from diloco_orchestrator.protocol.records import Snapshot, Start
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.buffers import buffers_of_base
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots, first_take
from diloco_orchestrator.snapshots.file_plan import Naming, is_side_file
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot, why_no_file
from diloco_orchestrator.snapshots.model_tensors import same_bytes
from diloco_orchestrator.snapshots.stored import RestOfSnapshot, StoredSnapshot


class SnapshotChecker:
    """Checks the snapshots of a run that were complete when its verification began, and loads bases from them."""

    def __init__(self, log: RunLog, done: Verification) -> None:
        self._log = log
        self._done = done
        self._takes = log.snapshot_takes()
        self._confirmed = ConfirmedSnapshots(log)
        self.rounds = sorted(self._takes)  # with a complete snapshot, when the verification began
        self._checked: set[int] = set()  # rounds whose snapshot agrees
        self.named: dict[str, set[str]] = {}  # by the folder of a version: files in its record, and the record
        self._rest: RestOfSnapshot | None = None  # once it was needed

    def base(self, round_: int, digest: str | None, start: Start) -> Base | None:
        """The base of a round's snapshot after checking every file; None if the round has no usable snapshot.

        `digest`: of the recomputed base after that round; None if it could not be recomputed, and a confirmed version
        counts. Raises `Differs` if a file of that version does not load or has another digest than in `snapshot.json`,
        or if a confirmed version is of another base. An unconfirmed one of another base is only noted: nobody loads it.
        """
        if round_ not in self._takes:
            return None
        others: list[str] = []
        for take in self._takes[round_]:
            key = keys.snapshot(round_, "", take)
            if not round_ and take != first_take(self._log):
                others.append(f"{key} is not the first base that the run began with: it is not used")
                continue
            claimed = self._claimed(round_, take)
            if claimed is None:
                continue
            # Only a snapshot whose base does not follow from the log has to be confirmed, which costs requests.
            confirmed = claimed == digest or take in self._confirmed.takes_of(round_)
            if digest is None and not confirmed:
                continue
            if not confirmed:
                self._load(round_, take, start)  # a snapshot of another base, but not one that was changed
                others.append(f"{key} is of base {claimed[:12]}, and nobody confirmed it: it is not used")
                continue
            base = self._load(round_, take, start)
            if base is None:
                continue
            equal(key, "its base", base.digest(), claimed if digest is None else digest, "the log")
            self._done.bases.add(round_)
            if round_ not in self._checked:
                self._checked.add(round_)
                self._done.checked["snapshots"] += 1
                self._done.notes += others
            return base
        if others and round_ not in self._checked:
            self._checked.add(round_)
            self._done.notes += others
        return None

    def _claimed(self, round_: int, take: str) -> str | None:
        """The base digest in the record of a snapshot version; None if it was deleted since the verification began."""
        key = keys.snapshot(round_, keys.SNAPSHOT_RECORD, take)
        try:
            return optional(key, lambda: self._log.snapshot(round_, take)).base_digest
        except ObjectMissing:
            return None

    def _load(self, round_: int, take: str, start: Start) -> Base | None:
        key = keys.snapshot(round_, "", take)
        try:
            record = self._log.snapshot(round_, take)
            self._check_names(key, record, start)
            snapshot = StoredSnapshot(self._log.store, round_, record, take)
            base = snapshot.check(start, but=snapshot.model_file_names(Naming.of(start)))
            self._check_model_files(snapshot, base, start)
        except (Differs, SpoolFailed):  # the latter: this machine lacks room, which is no fault of the run
            raise
        except DilocoError as error:
            if self._deleted_meanwhile(round_, take):
                return None
            raise Differs(key, str(error)) from None
        except Exception as error:  # whatever safetensors raises for a broken file
            raise Differs(key, f"does not load: {error}") from None
        return base

    def _check_names(self, key: str, record: Snapshot, start: Start) -> None:
        """Raise `Differs` if a snapshot's record names foreign files, or has other digests of the first files."""
        self.named[key] = {*record.files, keys.SNAPSHOT_RECORD}
        for name, info in sorted(record.files.items()):
            if why := why_no_file(name, start):
                raise Differs(f"{key}{name}", f"is no file of a snapshot of this run: {why}")
            if start.first_files is not None and (is_side_file(name) or not record.round):
                first = start.first_files.get(name, info)  # of snapshot 0 the outer files follow from the base
                equal(f"{key}{name}", "its digest", info.digest, first.digest, keys.START)

    def _check_model_files(self, snapshot: StoredSnapshot, base: Base, start: Start) -> None:
        """Raise `Differs` unless the model's files hold the base, its buffers, and snapshot 0's frozen tensors."""
        rest, naming = self._first_values(start), Naming.of(start)
        try:
            changed = {} if start.buffers is None else buffers_of_base(self._log, snapshot.round)
        except DilocoError as error:
            self._done.notes.append(f"the buffers in snapshot {snapshot.round} cannot be derived any more: {error}")
            return
        changed = {naming.in_file(name): value for name, value in changed.items()}
        residuals = {pair.residual for pair in start.adapters}
        adapted = {pair.weight: pair for pair in start.adapters}
        trained = {naming.in_file(each.name): each for each in start.parameters if each.name not in residuals}
        untrained = {*(rest.specs() if rest else ()), *(changed if not naming.is_adapter else ())}
        found: set[str] = set()
        for file in snapshot.model_file_names(naming):
            key = keys.snapshot(snapshot.round, file, snapshot.take)
            for name in snapshot.specs(file):
                found.add(name)
                if name in trained:
                    dtype: torch.dtype = getattr(torch, trained[name].dtype)
                    expected, source = base.parameters[trained[name].name].to(dtype), "the base"
                elif name in changed:
                    expected, source = changed[name], "the buffers of the replica that its round's commit says"
                elif rest and (pair := adapted.get(name)) is not None:
                    residual, source = base.parameters[pair.residual], "snapshot 0 and the base's residual"
                    expected = merged(rest.read(name), residual, pair.scaling)
                elif rest and name in untrained:
                    expected, source = rest.read(name), "snapshot 0"
                else:
                    raise Differs(key, f"holds a tensor {name!r} that the run's model does not have")
                if not same_bytes(snapshot.tensor(file, name), expected):
                    raise Differs(key, f"holds other values of {name!r} than {source}")
        for name in sorted({*trained, *untrained} - found):
            raise Differs(keys.snapshot(snapshot.round, "", snapshot.take), f"does not hold the model's {name!r}")

    def _first_values(self, start: Start) -> RestOfSnapshot | None:
        """The untrained tensors of snapshot 0; None, without a request, if the model has none."""
        if self._rest is None and (start.frozen is not None or start.buffers is not None):
            first = first_snapshot(self._log)
            self._rest = RestOfSnapshot(first, Naming.of(start), [each.name for each in start.parameters])
        return self._rest

    def check_all(self, digests: Mapping[int, str | None], start: Start) -> None:
        """Check every snapshot of the run that `base` has not read yet.

        `digests`: the digest of the base after each round that has one; None where it could not be derived. Raises
        `Differs` at the first that disagrees.
        """
        for round_ in list(self._takes):
            if round_ not in digests:
                key = keys.snapshot(round_, keys.SNAPSHOT_RECORD)
                raise Differs(key, f"is of round {round_}, which left no base")
            if round_ not in self._checked:
                self.base(round_, digests[round_], start)

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
        for round_, takes in self._takes.items():
            for take in takes:
                with suppress(Exception):  # a broken snapshot is not listed
                    StoredSnapshot(self._log.store, round_, self._log.snapshot(round_, take), take).base(start)
                    self._done.bases.add(round_)

    def _deleted_meanwhile(self, round_: int, take: str) -> bool:
        """Whether the record of a snapshot version was deleted since the verification began; it is then ignored."""
        gone = read_optional(self._log.store, keys.snapshot(round_, keys.SNAPSHOT_RECORD, take)) is None
        if gone:
            self._takes.pop(round_, None)
        return gone
