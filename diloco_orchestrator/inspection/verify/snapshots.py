"""Checks the snapshots of a run: their files, their bases, and that retention kept enough of them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.inspection.verify.findings import Differs, Verification, equal, optional
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import SAFE_SNAPSHOTS
from diloco_orchestrator.protocol.records import ParameterInfo
from diloco_orchestrator.run_log.run_log import RunLog, read_optional
from diloco_orchestrator.snapshots.stored import StoredSnapshot


class SnapshotChecker:
    """Checks the snapshots that were complete when the verification began, and loads bases from them."""

    def __init__(self, log: RunLog, done: Verification) -> None:
        self._log = log
        self._done = done
        self.rounds = log.snapshots()  # that are complete
        self._checked: set[int] = set()  # rounds whose snapshot agrees

    def base(self, round_: int, digest: str, parameters: Sequence[ParameterInfo]) -> Base | None:
        """The base of the snapshot after `round_`, of which every file is checked; None if there is none.

        Raises `Differs` if a file does not load or has another digest than `snapshot.json` says, or if the base's
        digest is not `digest`, which the commit log names.
        """
        if round_ not in self.rounds:
            return None
        key = keys.snapshot(round_, "")
        try:
            record = optional(keys.snapshot(round_, keys.SNAPSHOT_RECORD), lambda: self._log.snapshot(round_))
            snapshot = StoredSnapshot(self._log.store, round_, record)
            base = snapshot.check(parameters)
        except DilocoError as error:
            if self._deleted_meanwhile(round_):
                return None
            raise Differs(key, str(error)) from None
        except Differs:
            raise
        except Exception as error:  # whatever safetensors raises for a broken file
            raise Differs(key, f"does not load: {error}") from None
        equal(key, "its base", base.digest(), digest, "the log")
        self._done.bases.add(round_)
        if round_ not in self._checked:
            self._checked.add(round_)
            self._done.checked["snapshots"] += 1
        return base

    def check_all(self, digests: Mapping[int, str], parameters: Sequence[ParameterInfo]) -> None:
        """Check every snapshot that `base` has not read yet. Raises `Differs` at the first that disagrees.

        `digests`: the digest of the base after each round that has one.
        """
        for round_ in list(self.rounds):
            if round_ not in digests:
                key = keys.snapshot(round_, keys.SNAPSHOT_RECORD)
                raise Differs(key, f"is of round {round_}, which left no base")
            if round_ not in self._checked:
                self.base(round_, digests[round_], parameters)

    def check_deleted(self, key: str, round_: int) -> None:
        """Raise `Differs` if too few snapshots follow a round for retention to have deleted its object `key`."""
        if sum(snapshot >= round_ for snapshot in self.rounds) < SAFE_SNAPSHOTS:
            words = f"is gone, though fewer than {SAFE_SNAPSHOTS} snapshots come after round {round_}: deleted by hand"
            raise Differs(key, words)

    def salvage(self, parameters: Sequence[ParameterInfo]) -> None:
        """After a disagreement, add the rounds of snapshots that load to the result, whatever the commit log says."""
        for round_ in self.rounds:
            with suppress(Exception):  # a broken snapshot is not listed
                StoredSnapshot(self._log.store, round_, self._log.snapshot(round_)).base(parameters)
                self._done.bases.add(round_)

    def _deleted_meanwhile(self, round_: int) -> bool:
        """Whether retention has deleted the snapshot since the verification began; if so, it is no longer checked."""
        gone = read_optional(self._log.store, keys.snapshot(round_, keys.SNAPSHOT_RECORD)) is None
        if gone:
            self.rounds.remove(round_)
        return gone
