"""`LegRecords`: the immutable records that are no commits: run, start, begins of legs, requests to halt.

`run_log.RunLog` adds the commits.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from diloco_orchestrator.errors import NoSuchRun
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin, Halt, Record, Result, Retention, Run, Start, sha256_hex
from diloco_orchestrator.run_log.capped_reads import read_optional
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.leg_configs import LegConfigs
from diloco_orchestrator.store.base import Store

R = TypeVar("R", bound=Record)


class LegRecords:
    """Reads each record once; one that does not exist yet is fetched again at every call. Arguments as of `RunLog`."""

    def __init__(self, store: Store, on_read: Callable[[str, bytes], None] | None, run_json: bytes | None) -> None:
        self.store = store
        self._on_read = on_read
        self._entries: dict[str, Entry[Record]] = {}
        run = self._read(Run, keys.RUN) if run_json is None else self.remember(Run, keys.RUN, run_json)
        if run is None:
            raise NoSuchRun(
                f"{store.url} holds no run ({keys.RUN} is missing). Check the address; a run is one folder."
            )
        self.run: Run = run.record
        self.run_sha256: str = run.sha256
        self.configs = LegConfigs(self.run.config, self.begin)

    def start(self) -> Entry[Start] | None:
        """The record `start.json`, or None while no replica has created the first base."""
        return self._read(Start, keys.START)

    def begin(self, leg: int) -> Entry[Begin] | None:
        """The `Begin` record of a leg, or None if the leg has not begun."""
        return self._read(Begin, keys.begin(leg))

    def newest_leg(self) -> int:
        """The number of the newest leg; 0 before the first. One LIST request."""
        found = (keys.parse_begin(info.key) for info in self.store.list(keys.LEGS))
        return max((leg for leg in found if leg is not None), default=0)

    def newest_begin(self) -> Entry[Begin]:
        """The `Begin` record of the newest leg. Raises `NoSuchRun` if the launcher died before it created leg 1."""
        return self.begin_of(max(1, self.newest_leg()))

    def begins(self) -> list[Begin]:
        """The `Begin` records of all legs, the newest last. Raises `NoSuchRun` if one is missing."""
        return [self.begin_of(leg).record for leg in range(1, max(1, self.newest_leg()) + 1)]

    def known_begins(self) -> list[Begin]:
        """The `Begin` records that were read so far."""
        return [entry.record for entry in list(self._entries.values()) if isinstance(entry.record, Begin)]

    def begin_of(self, leg: int) -> Entry[Begin]:
        """The `Begin` record of a leg that has begun. Raises `NoSuchRun` if it is missing."""
        found = self.begin(leg)
        if found is None:
            raise _no_begin(self.store.url, leg)
        return found

    def halt(self, leg: int) -> Halt | None:
        """The request to halt a leg, or None if there is none."""
        found = self._read(Halt, keys.halt(leg))
        return None if found is None else found.record

    def recorded_result(self, leg: int) -> Result | None:
        """What result.json of a leg says, or None if there is none. Nobody obeys it: `RunLog.result` derives it."""
        found = self._read(Result, keys.result(leg))
        return None if found is None else found.record

    @property
    def keeps_payloads(self) -> bool:
        """Whether no payload was ever to be deleted: by the run's settings, nor by a `gc` with others."""
        return self.run.config.retention.payloads == "all" and self._read(Retention, keys.RETENTION) is None

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, kind: type[R], key: str) -> Entry[R] | None:
        known = self._entries.get(key)
        if known is not None:
            return cast(Entry[R], known)
        data = self._fetch(key)
        return None if data is None else self.remember(kind, key, data)

    def remember(self, kind: type[R], key: str, data: bytes) -> Entry[R]:
        """Keep a record, whose exact bytes are `data`, so that no later call fetches it: it was read or created."""
        entry = Entry(kind.from_bytes(data, key), sha256_hex(data))
        self._entries[key] = cast(Entry[Record], entry)
        return entry

    def _fetch(self, key: str) -> bytes | None:
        data = read_optional(self.store, key)
        if data is not None and self._on_read is not None:
            self._on_read(key, data)
        return data


def _no_begin(url: str, leg: int) -> NoSuchRun:
    return NoSuchRun(
        f"{url} holds a run whose leg {leg} has no {keys.begin(leg)}: its launcher died before the leg began, or the "
        "record was deleted. Launch the run again in a new folder."
    )
