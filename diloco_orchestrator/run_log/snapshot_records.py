"""`SnapshotRecords`: which rounds have a complete snapshot, and the records of these.

`run_log.RunLog` adds the commits; which snapshots may be loaded is decided in `snapshots.confirmation`.
"""

from collections.abc import Callable

from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Snapshot
from diloco_orchestrator.run_log.leg_records import LegRecords
from diloco_orchestrator.store.base import Store


class SnapshotRecords(LegRecords):
    """Lists snapshots, and reads the records of each once. Arguments and errors as of `RunLog`."""

    def __init__(self, store: Store, on_read: Callable[[str, bytes], None] | None, run_json: bytes | None) -> None:
        super().__init__(store, on_read, run_json)
        self.snapshot_seen = 0  # the newest round with a snapshot: the log has at least as many commits
        # Digests of bases that the log claims, by round, as `snapshots.confirmation` finds them: they never change.
        self.claimed_bases: dict[int, str] = {}

    def snapshots(self) -> list[int]:
        """The rounds with a complete snapshot, oldest first; 0 is the first base. One LIST request."""
        return sorted(self.snapshot_takes())

    def snapshot_takes(self) -> dict[int, list[str]]:
        """The complete takes of every snapshot, by round, the shared take first. One LIST request."""
        takes = complete_takes(self.store)
        self.snapshot_seen = max([self.snapshot_seen, *takes])
        return takes

    def snapshot(self, round_: int, take: str = keys.SHARED_TAKE) -> Snapshot:
        """The record of a complete snapshot. Raises `ObjectMissing` if there is none: retention may have deleted it."""
        found = self._read(Snapshot, keys.snapshot(round_, keys.SNAPSHOT_RECORD, take))
        if found is None:
            raise ObjectMissing(f"{self.store.url} has no complete snapshot {round_} any more. Use a later one.")
        return found.record


def complete_takes(store: Store) -> dict[int, list[str]]:
    """The complete takes of every snapshot, by round, the shared take first. One LIST request."""
    takes: dict[int, list[str]] = {}
    for info in store.list(keys.SNAPSHOTS):
        parsed = keys.parse_snapshot_record(info.key)
        if parsed is not None:
            takes.setdefault(parsed[0], []).append(parsed[1])
    return {round_: sorted(found) for round_, found in takes.items()}
