"""`LegRecords`: reads and caches all records of a run's log but commits: run, start, begin of each leg, halt requests.

A leg is a run's stretch from a start or resume to the next stop. `run_log.RunLog` adds the commits.
"""

import logging
from collections.abc import Callable
from typing import TypeVar, cast

from diloco_orchestrator.config import RunConfig, config_of_leg
from diloco_orchestrator.errors import ConfigError, NoSuchRun, RecordInvalid, RecordTooNew, RecordTooOld
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.launched import Launched, settings_sha256
from diloco_orchestrator.protocol.legs import why_no_begin
from diloco_orchestrator.protocol.record_format import Record, parse_json
from diloco_orchestrator.protocol.records import Begin, Halt, Out, Result, Retention, Run, Scale
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.reader import parsed, read_optional
from diloco_orchestrator.run_log.run_store import of_run, unsigned_in
from diloco_orchestrator.run_log.starts import Starts
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)


class LegConfigs:
    """The configuration of each leg (start or resume to stop): `run`, that of run.json, and what the leg's record
    changes.

    `begin_of`: returns the record of the start or resume that began a leg.
    """

    def __init__(self, run: RunConfig, begin_of: Callable[[int], Entry[Begin] | None]) -> None:
        self._run = run
        self._begin_of = begin_of
        self._known: dict[str, RunConfig] = {}  # by the digest of the leg's record

    def of(self, leg: int) -> RunConfig:
        """The configuration of a leg (start or resume to stop): that of run.json with the settings that it changes.

        Raises `ConfigError` if the begin record names a setting that no leg can change, `NoSuchRun` if it is missing.
        """
        begin = self._begin_of(leg)
        if begin is None:
            raise NoSuchRun(f"leg {leg} has no {keys.begin(leg)}: it was deleted. Start a new run.")
        return self.of_begin(begin)

    def of_begin(self, begin: Entry[Begin]) -> RunConfig:
        """The configuration after this start or resume. Raises `ConfigError` for a change that no leg can make."""
        if begin.sha256 not in self._known:
            self._known[begin.sha256] = config_of_leg(self._run, begin.record.settings, guard=True)
        return self._known[begin.sha256]


class LegRecords:
    """Caches each record of a leg (start or resume to stop) that it has read; a missing one is fetched at every call.

    `on_read`: called with key and bytes of every record. `run_json`: the bytes of run.json; None: they are fetched.
    """

    def __init__(self, store: Store, on_read: Callable[[str, bytes], None] | None, run_json: bytes | None) -> None:
        self.store = store
        self._on_read = on_read
        self._entries: dict[str, Entry[Record]] = {}
        self._begun: dict[int, Entry[Begin]] = {}  # by leg, of those that count
        self._listed: list[tuple[int, str]] = []  # leg and file name, of the last listing
        self._listed_outs: list[str] = []  # keys of `Out` records, as they were listed last
        self._scaled: dict[int, tuple[int, int | None]] = {}  # `scaled_to`, by leg, as read so far
        self._junk: set[str] = set()  # keys of objects that are not the record that they should be
        run = self._read(Run, keys.RUN) if run_json is None else self.remember(Run, keys.RUN, run_json)
        if run is None:
            raise NoSuchRun(
                f"{store.url} holds no run ({keys.RUN} is missing). Check the address; a run is one folder."
            )
        self.run: Run = run.record
        if self.run.signed_by is not None:
            self.store = store = of_run(store)
        self.run_sha256: str = run.sha256
        self.configs = LegConfigs(self.run.config, self.begin)
        config = self.run.config
        later = set(range(config.most_replicas)) - config.launched - set(config.invited)
        self.starts = Starts(store, config.launched, self.run_sha256, config.first_base, later)

    def unsigned(self) -> list[str]:
        """The objects that this process has met and that do not exist for a signed run: "name: why"; at most 1,000.

        Empty for an unsigned run.
        """
        return unsigned_in(self.store)

    def start(self) -> Entry[Start] | None:
        """The start record, which describes the first base, that most replicas adopted; final once over half did.

        Without votes start.json counts; None if it is missing too.
        """
        return self.starts.chosen()

    def begin(self, leg: int) -> Entry[Begin] | None:
        """The record of the start or resume that began a leg; None if it is missing or invalid.

        Raises `RecordTooNew` or `RecordTooOld` for a record of another schema version that names the last commit.
        """
        if leg not in self._begun:
            self.why_foreign(leg)
        return self._begun.get(leg)

    def why_foreign(self, leg: int) -> str:
        """Reason why the object at a leg's begin key is ignored; empty if it is valid or there is none.

        A leg is a run's stretch from start or resume to stop. The object is valid if the leg before is, and it can be
        read, names that leg's last commit, which stopped the leg, and changes only settings that a leg can change.
        Raises `RecordTooNew` or `RecordTooOld` for a record of another schema that names that commit.
        """
        if leg in self._begun:
            return ""
        for below in range(1, leg):
            if self.begin(below) is None:
                return f"leg {below} has not begun"
        found = self._begin_as_written(leg, lambda *named: leg == 1 or self._follows(leg, *named))
        if isinstance(found, Entry):
            self._begun[leg] = found
        return found if isinstance(found, str) else ""

    def begin_after(self, leg: int, round_: int, sha256: str) -> Entry[Begin] | None:
        """The begin record of `leg` (a start or resume) if it names this commit as the last before it; else None."""
        known = self._begun.get(leg)
        if known is not None:
            return known if (known.record.after_round, known.record.previous) == (round_, sha256) else None
        found = self._begin_as_written(leg, lambda *named: named == (round_, sha256))
        return found if isinstance(found, Entry) else None

    def _begin_as_written(self, leg: int, follows: Callable[[int, str], bool]) -> Entry[Begin] | str | None:
        """The begin record of a leg (a start or resume); None if there is none; text why, if the object is ignored.

        `follows(round, sha256)`: whether the commit of that round and digest, which the record names, is the last of
        the leg before. Raises `RecordTooNew` or `RecordTooOld` for another schema version if it is.
        """
        key = keys.begin(leg)
        data = read_optional(self.store, key)
        if data is None:
            return None
        try:
            found = parsed(Begin, key, data)
            begin = found.record
            config_of_leg(self.run.config, begin.settings, guard=True)
        except (RecordTooNew, RecordTooOld):
            if follows(*_named_in(data)):
                raise
            return "it is of another version, and does not name the last commit of the leg before"
        except (RecordInvalid, ConfigError) as error:
            return f"it cannot be read: {error}"
        if why := why_no_begin(begin, leg, self.run_sha256):
            return why
        if not follows(begin.after_round, begin.previous):
            named = f"previous is {begin.previous[:12]}, and after_round {begin.after_round}"
            return f"{named}, which is no commit that stopped leg {leg - 1}"
        if self._on_read is not None:
            self._on_read(key, data)
        return found

    def remember_begin(self, begin: Entry[Begin]) -> None:
        """Cache the begin record of a leg (a start or resume), which the caller has just created."""
        self._begun[begin.record.leg] = begin

    def _follows(self, leg: int, round_: int, sha256: str) -> bool:
        """Whether the commit of a round has this digest and stopped the leg before `leg`, so that `leg` may begin."""
        raise NotImplementedError

    def launched(self, begin: Begin) -> Launched:
        """Digests that pin the run's configuration since `begin`, a start or resume, for processes' command lines."""
        return Launched(self.run_sha256, settings_sha256(begin.settings))

    def newest_leg(self) -> int:
        """The number of starts and resumes that have a valid record, without a gap; 0 before the first. One LIST."""
        listed = [info.key for info in self.store.list(keys.LEGS)]
        self._listed_outs = [key for key in listed if keys.out.parse(key)]
        parsed = map(keys.parse_leg, listed)
        self._listed = [each for each in parsed if each is not None]
        there, leg = {leg for leg, name in self._listed if keys.begin(leg) == f"{keys.LEGS}{leg}/{name}"}, 0
        while leg + 1 in there and self.begin(leg + 1) is not None:
            leg += 1
        return leg

    def has_result(self, leg: int) -> bool:
        """Whether the last listing by `newest_leg` held a result.json of the leg, which anybody may write."""
        return (leg, keys.result(leg).rpartition("/")[2]) in self._listed

    def passed_over(self) -> dict[str, str]:
        """Keys of the ignored or unreadable objects about starts, resumes and stops, each with the reason.

        Uses the listing of the last `newest_leg` call. Costs a GET for each ignored begin record, and one for the
        newest leg's request to halt.
        """
        newest, found = max(self._begun, default=0), {}
        for leg, name in self._listed:
            key = f"{keys.LEGS}{leg}/{name}"
            if leg > newest:
                found[key] = (key == keys.begin(leg) and self.why_foreign(leg)) or f"leg {leg} has not begun"
            elif key == keys.halt(leg) and leg == newest and self.halt(leg) == _unreadable(leg):
                found[key] = _UNREADABLE
        return found

    def newest_begin(self) -> Entry[Begin]:
        """The record of the newest start or resume. Raises `NoSuchRun` if the launcher died before the first."""
        return self.begin_of(max(1, self.newest_leg()))

    def begins(self) -> list[Begin]:
        """The records of all starts and resumes, the newest last. Raises `NoSuchRun` if there is none."""
        return [self.begin_of(leg).record for leg in range(1, max(1, self.newest_leg()) + 1)]

    def known_begins(self) -> list[Begin]:
        """The records of starts and resumes that this object has read so far."""
        return [entry.record for entry in list(self._begun.values())]

    def begin_of(self, leg: int) -> Entry[Begin]:
        """The begin record (of a start or resume) of a leg that has begun. Raises `NoSuchRun` if missing or invalid."""
        found = self.begin(leg)
        if found is None:
            raise _no_begin(self.store.url, leg, self.why_foreign(leg))
        return found

    def halt(self, leg: int) -> Halt | None:
        """The request to halt a leg (start or resume to stop), or None; an unparsable object at its key is one too.

        Whoever can write junk there can write a request, and ignored junk would keep everybody else from creating one.
        """
        key = keys.halt(leg)
        if key not in self._entries:
            data = read_optional(self.store, key)
            if data is None:
                return None
            try:
                self.remember(Halt, key, data)
                if self._on_read is not None:
                    self._on_read(key, data)
            except RecordInvalid as error:
                log.warning("%s counts as a request, though it %s: %s", key, _UNREADABLE, error)
                self._entries[key] = Entry(_unreadable(leg), sha256_hex(data))
        return cast(Halt, self._entries[key].record)

    def scaled_to(self, leg: int) -> tuple[int, int | None]:
        """(number of the newest request to scale a leg, replicas that it asks for); (0, None) without a valid one.

        A leg is a run's stretch from start or resume to stop. A request that cannot be read, or that asks for fewer
        replicas than the leg begins with or more than the run has ids, counts for nothing. Each is fetched once.
        """
        config = self.configs.of(leg)
        number, replicas = self._scaled.get(leg, (0, None))
        while (data := self._fetch(keys.scale(leg, number + 1))) is not None:
            number += 1
            try:
                asked = parsed(Scale, keys.scale(leg, number), data).record
                if (asked.leg, asked.number) != (
                    leg,
                    number,
                ) or not config.replicas <= asked.replicas <= config.most_replicas:
                    raise RecordInvalid(f"it asks for {asked.replicas} replicas, or is of another leg")
                replicas = asked.replicas
                log.info("%d replicas are wanted from now on: %s asked", replicas, asked.by)
            except RecordInvalid as error:
                log.warning("%s counts for nothing: %s", keys.scale(leg, number), error)
        self._scaled[leg] = number, replicas
        return number, replicas

    def out(self, leg: int) -> dict[int, Out]:
        """Replicas that are launched no more until a resume, by id. One LIST, and a GET for each new record."""
        self._listed_outs = [info.key for info in self.store.list(keys.outs(leg))]
        return self.known_out(leg)

    def known_out(self, leg: int) -> dict[int, Out]:
        """Records of the replicas that get no further attempt in a leg (start or resume to stop), by replica id.

        Those that the last listing showed.
        """
        found = {}
        for key in self._listed_outs:
            of_leg, replica_id = keys.out.parse(key) or (0, 0)
            if of_leg == leg and replica_id < self.run.config.most_replicas and (record := self._out(key)) is not None:
                found[replica_id] = record
        return found

    def _out(self, key: str) -> Out | None:
        """The record at `key` that a replica is launched no more; None, with a warning, for an invalid object."""
        if key in self._junk:
            return None
        try:
            entry = self._read(Out, key)
            if entry is None or keys.out(entry.record.leg, entry.record.replica_id) == key:
                return None if entry is None else entry.record
            why = "it names another leg or replica"
        except RecordInvalid as error:
            why = str(error)
        self._junk.add(key)
        log.warning("%s counts for nothing: %s", key, why)
        return None

    def recorded_result(self, leg: int) -> Result | None:
        """The content of a leg's result.json, which any writer to the bucket may have forged; None if it is missing.

        Raises `RecordInvalid` if it cannot be parsed. `RunLog.result` derives the true result from the last commit.
        """
        found = self._read(Result, keys.result(leg))
        return None if found is None else found.record

    @property
    def keeps_payloads(self) -> bool:
        """Whether the run keeps all payloads: its settings say so, and no `gc` with other settings has run."""
        return self.run.config.retention.payloads == "all" and self._read(Retention, keys.RETENTION) is None

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, kind: type[R], key: str) -> Entry[R] | None:
        known = self._entries.get(key)
        if known is not None:
            return cast(Entry[R], known)
        data = self._fetch(key)
        return None if data is None else self.remember(kind, key, data)

    def remember(self, kind: type[R], key: str, data: bytes) -> Entry[R]:
        """Cache the record with the exact bytes `data`, just read or created, so that it is not fetched again."""
        entry = parsed(kind, key, data)
        self._entries[key] = cast(Entry[Record], entry)
        return entry

    def _fetch(self, key: str) -> bytes | None:
        data = read_optional(self.store, key)
        if data is not None and self._on_read is not None:
            self._on_read(key, data)
        return data


_UNREADABLE = "cannot be read"  # part of commits' reasons, so equal for every reader


def _unreadable(leg: int) -> Halt:
    """The halt request that readers use in place of one that cannot be parsed."""
    return Halt(write_id="", at=0.0, leg=leg, by="unknown", reason=f"{keys.halt(leg)} {_UNREADABLE}")


def _named_in(data: bytes) -> tuple[int, str]:
    """(round, sha256) of the last commit before a start or resume, from its record of any schema; else (0, "")."""
    try:
        body = parse_json(data)
        round_, sha256 = body["after_round"], body["previous"]
    except (ValueError, TypeError, KeyError):
        return 0, ""
    return (round_, sha256) if type(round_) is int and type(sha256) is str and round_ > 0 else (0, "")


def _no_begin(url: str, leg: int, why_foreign: str) -> NoSuchRun:
    key = keys.begin(leg)
    what = f"{key} counts for nothing: {why_foreign}" if why_foreign else f"{key} is missing"
    return NoSuchRun(
        f"{url} holds a run whose leg {leg} did not begin: {what}. Its launcher died before the leg began, or the "
        "record was changed or deleted. Launch the run again in a new folder."
    )
