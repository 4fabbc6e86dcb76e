"""`Starts`: reads a run's start records and the replicas' votes on them, each object once.

`protocol.first_base` decides which start record the run uses. Objects that cannot be parsed are ignored: anybody may
have put them there.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import BulkDigest, Sha256, sha256_hex
from diloco_orchestrator.protocol.first_base import chosen_start
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.protocol.start_records import Began, Follows, Start
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.store.base import Store

R = TypeVar("R", bound=Record)


class Starts:
    """The start records of the run whose run.json has the sha256 `run_sha256`, and the votes of `voters` on them.

    Votes of other replicas do not count: of those that came later (`later`), which adopt what the first ones chose, and
    of strangers, who may be more than the launched replicas and one person's. If the run has a `first_base`, only start
    records with that base digest, and votes for those, count.
    """

    def __init__(
        self,
        store: Store,
        voters: Collection[int],
        run_sha256: Sha256,
        first_base: BulkDigest | None = None,
        later: Collection[int] = (),
    ) -> None:
        self._store = store
        self._voters = voters
        self._later = later
        self._run_sha256 = run_sha256
        self._first_base = first_base
        self._seen: set[str] = set()  # keys that were read, of whatever was there
        self._starts: dict[str, Entry[Start]] = {}  # by key
        self._began: dict[int, Began] = {}  # of each replica's newest attempt
        self._follows: dict[int, Follows] = {}
        self._later_follows: dict[int, Follows] = {}
        self._chosen: Entry[Start] | None = None  # once it cannot change any more, or this process follows it
        self._is_settled = False  # whether more than half follow what this process follows
        self._take: str | None = None  # of snapshot 0, as this process has read or written it

    # -- for readers of the run ------------------------------------------------------------------------------------

    def chosen(self) -> Entry[Start] | None:
        """The start record that most replicas adopted; None before the first vote.

        In a bucket without votes, start.json counts as it is. Costs one LIST request and a GET for each new record,
        until the choice is final.
        """
        if self._chosen is None:
            self.refresh()
            found = chosen_start(self.follows, len(self._voters))
            if found is None:
                return None if self._began else self._starts.get(keys.START)
            entry = self.entry(found.sha256)
            if found.final:
                self._chosen = entry
            return entry
        return self._chosen

    @property
    def is_final(self) -> bool:
        """Whether the start record that most replicas adopted is final: missing votes cannot change it."""
        return self._chosen is not None

    def named_takes(self) -> list[str]:
        """The versions of snapshot 0 that replicas with the chosen start record have read or written, most frequent
        first.

        A tie goes to the lower `replica_id`. If this process has read or written one, that one alone. Empty if no start
        record is chosen yet.
        """
        start = self.chosen()
        if self._take is not None:
            return [self._take]
        return [] if start is None else self.takes_of(start.sha256)

    def settle_take(self, take: str) -> None:
        """Use this version of snapshot 0, which holds the chosen first base, from now on if that choice is final."""
        if self.is_final:
            self._take = take

    # -- for replicas ----------------------------------------------------------------------------------------------

    def adopt(self, start: Entry[Start], take: str) -> None:
        """Adopt a start record and a version of snapshot 0, because this process has begun to train from them."""
        self._chosen, self._take = start, take

    def outvoted_by(self) -> Sha256 | None:
        """The start record that over half of the replicas adopted, unless this process did too: then None. One LIST."""
        if self._is_settled or self._chosen is None:
            return None
        self.refresh()
        for sha256, count in Counter(self.follows.values()).items():
            if 2 * count > len(self._voters):
                self._is_settled = sha256 == self._chosen.sha256
                return None if self._is_settled else sha256
        return None

    @property
    def began(self) -> dict[int, Sha256]:
        """The digest of the start record (first base) that each replica's newest attempt votes for, by replica."""
        return self._that_count(self._began)

    def vote(self, replica_id: int) -> Began | None:
        """The vote on the first base of a replica's newest attempt; None if none was read."""
        return self._began.get(replica_id)

    @property
    def follows(self) -> dict[int, Sha256]:
        """The digest of the start record (first base) that each replica has adopted (`Follows`), by replica id."""
        return self._that_count(self._follows)

    @property
    def followed(self) -> Counter[Sha256]:
        """The number of launched replicas, those that came later too, that have adopted each start record."""
        return Counter(each.start_sha256 for each in (*self._follows.values(), *self._later_follows.values()))

    @property
    def offered(self) -> list[Entry[Start]]:
        """The distinct start records of this run in the bucket, start.json first."""
        found: dict[Sha256, Entry[Start]] = {}
        for key in sorted(self._starts, key=lambda key: (key != keys.START, key)):
            found.setdefault(self._starts[key].sha256, self._starts[key])
        return list(found.values())

    def entry(self, sha256: Sha256) -> Entry[Start] | None:
        """The start record (description of a first base) with this digest; None if the bucket has none."""
        return next((each for each in self._starts.values() if each.sha256 == sha256), None)

    def key_of(self, sha256: Sha256) -> str:
        """The key of the start record (description of a first base) with this digest, which must exist."""
        return min((key for key, each in self._starts.items() if each.sha256 == sha256), key=lambda k: k != keys.START)

    def takes_of(self, sha256: Sha256) -> list[str]:
        """The versions of snapshot 0 that replicas with this start record have read or written, most frequent first."""
        said = (each for _, each in sorted(self._follows.items()) if each.start_sha256 == sha256)
        return [take for take, _ in Counter(each.take for each in said if keys.is_take(each.take)).most_common()]

    def refresh(self) -> None:
        """Read new start records (descriptions of a first base) and the replicas' votes on them.

        One LIST request, and a GET for each new record or a missing start.json.
        """
        there = {info.key for info in self._store.list(keys.STARTS)}
        newest: dict[int, tuple[int, str]] = {}
        for key in sorted(there):
            if (attempt := keys.began.parse(key)) is not None and attempt[0] in self._voters:
                newest[attempt[0]] = max(newest.get(attempt[0], (0, "")), (attempt[1], key))
            who = keys.follows.parse(key)
            if who and who[0] in (*self._voters, *self._later) and (follows := self._read(Follows, key)):
                (self._follows if who[0] in self._voters else self._later_follows)[who[0]] = follows.record
        for replica_id, (_, key) in newest.items():
            if began := self._read(Began, key):
                self._began[replica_id] = began.record
        named = {each.key for each in self._began.values()} | {each.key for each in self._follows.values()}
        named |= {each.key for each in self._later_follows.values()}
        self._read_starts([keys.START, *filter(keys.is_start, sorted(named & there))])

    def _that_count(self, said: Mapping[int, Began | Follows]) -> dict[int, Sha256]:
        """The start record that each replica votes for, by replica id, from its votes `said`.

        If the run's settings have a `first_base`, only votes for existing records count.
        """
        there = {each.sha256 for each in self._starts.values()}
        named = {replica_id: each.start_sha256 for replica_id, each in said.items()}
        return {i: sha256 for i, sha256 in named.items() if self._first_base is None or sha256 in there}

    def _read_starts(self, wanted: Iterable[str]) -> None:
        for key in wanted:
            found = self._read(Start, key)
            if found is None or found.record.run_sha256 != self._run_sha256:
                continue
            if self._first_base in (None, found.record.base_digest):
                self._starts[key] = found

    def _read(self, kind: type[R], key: str) -> Entry[R] | None:
        """The record at `key` if it is new; None if it is missing, was read before, or is not in canonical form."""
        if key in self._seen:
            return None
        try:
            found = read(self._store, kind, key)
        except RecordInvalid:
            self._seen.add(key)
            return None
        if found is None:
            return None
        self._seen.add(key)
        return found if sha256_hex(found.record.to_bytes()) == found.sha256 else None
