"""`AttemptRecords` reads the records about each attempt (launched process) of each replica; `Authors` checks manifests.

A manifest counts if it is by an attempt with an intent, without a gap in attempt numbers before it, and a claim whose
sha256 the manifest names. That excludes authors that have not read the bucket and attempts that no coordinator
intended. It is no signature: claims can be read and copied.

Handles are kept as the JSON that the executor wrote; only executors interpret them.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, takewhile
from typing import TypeVar, cast

from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.errors import ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Cancel, Claim, Exit, Handle, Heartbeat, Intent, Waiting
from diloco_orchestrator.protocol.check_records import Checked
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.kinds import most_bytes
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.reader import read, read_optional
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)


def counted(intents: Iterable[int]) -> list[int]:
    """The valid attempts among those with an intent, the announcing record: 1 up to the first missing number.

    So nobody can fence a replica's attempts by an attempt number without intent or far ahead, nor by a claim from
    before the intent, because the intent holds a token of the claim's key (`AttemptRecords.claim_key`).
    """
    known = set(intents)
    return list(takewhile(known.__contains__, count(1)))


class AttemptRecords:
    """Reader of the records about a run's attempts. Found records are cached, except heartbeats; missing ones are not.

    A method that reads a record returns None if it is missing or cannot be parsed, so that junk written in one
    replica's name does not end coordinator and readers of the run. `unreadable` lists the keys of unparsable records.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, Record] = {}
        self.unreadable: dict[str, str] = {}  # why, by key, of the records that could not be parsed

    def numbers(self, replica_id: int) -> list[int]:
        """The numbers of a replica's valid attempts (announced, without a gap), oldest first. One LIST request."""
        found = self._listed(keys.attempts(replica_id))
        return counted(key.attempt for key in found if key.name == keys.INTENT)

    def all_numbers(self) -> dict[int, list[int]]:
        """The numbers of all valid attempts (announced, without a gap), oldest first, by replica id. One LIST."""
        intents: dict[int, set[int]] = {}
        for key in self._listed(keys.REPLICAS):
            if key.name == keys.INTENT:
                intents.setdefault(key.replica_id, set()).add(key.attempt)
        found = {replica_id: counted(intents[replica_id]) for replica_id in sorted(intents)}
        return {replica_id: numbers for replica_id, numbers in found.items() if numbers}

    def claims(self, replica_id: int) -> set[int]:
        """The valid attempts of a replica that run or ran as a process, which shows by the claim record that it
        created.

        Empty if none has. One LIST request, and a GET for each claimed attempt.
        """
        return set(self._claimed(replica_id, 0))

    def _claimed(self, replica_id: int, above: int) -> Iterator[int]:
        """The valid attempts above number `above` that a process has claimed, newest first."""
        found = list(self._listed(keys.attempts(replica_id)))
        claims = {(key.attempt, key.token) for key in found if key.name == keys.CLAIM}
        claimed = {number for number, _ in claims if number > above}
        numbers = counted(key.attempt for key in found if key.name == keys.INTENT)
        for number in sorted(claimed.intersection(numbers), reverse=True):
            intent = self.intent(replica_id, number)
            if intent is not None and (number, intent.claim_token) in claims:
                yield number

    def _listed(self, prefix: str) -> Iterator[keys.AttemptKey]:
        parsed = (keys.parse_attempt(info.key) for info in self._store.list(prefix))
        return (key for key in parsed if key is not None)

    def newest_claim(self, replica_id: int, above: int = 0) -> int:
        """The highest attempt of a replica above `above` that a process has claimed; `above` if there is none.

        One LIST request, and a GET for an attempt above `above` that has a claim.
        """
        return next(self._claimed(replica_id, above), above)

    def claim_key(self, replica_id: int, attempt: int) -> str | None:
        """The key under which a process claims a valid attempt; None if the intent that announces it is unreadable."""
        intent = self.intent(replica_id, attempt)
        return None if intent is None else keys.claim(replica_id, attempt, intent.claim_token)

    def intent(self, replica_id: int, attempt: int) -> Intent | None:
        """The intent, which announces an attempt; None if it is missing, cannot be read, or names another attempt."""
        found = self._read(Intent, keys.intent(replica_id, attempt))
        return found if found is not None and (found.replica_id, found.attempt) == (replica_id, attempt) else None

    def place(self, replica_id: int, attempt: int) -> str:
        """The name of the place (executor) of an attempt, by its intent; empty if that cannot be read."""
        intent = self.intent(replica_id, attempt)
        return intent.executor if intent is not None else ""

    def handle(self, replica_id: int, attempt: int) -> Handle | None:
        return self._read(Handle, keys.handle(replica_id, attempt))

    def claim(self, replica_id: int, attempt: int) -> Claim | None:
        key = self.claim_key(replica_id, attempt)
        return None if key is None else self._read(Claim, key)

    def cancel(self, replica_id: int, attempt: int) -> Cancel | None:
        return self._read(Cancel, keys.cancel(replica_id, attempt))

    def exit(self, replica_id: int, attempt: int) -> Exit | None:
        return self._read(Exit, keys.exit_record(replica_id, attempt))

    def heartbeat(self, replica_id: int, attempt: int) -> Heartbeat | None:
        """The newest heartbeat of an attempt, fetched at every call because it is overwritten; None if missing."""
        return self._fetched(Heartbeat, keys.heartbeat(replica_id, attempt))

    def waiting(self, replica_id: int, attempt: int) -> Waiting | None:
        """The provider's reason why an attempt has not started, fetched at every call; None if none is recorded."""
        return self._fetched(Waiting, keys.waiting(replica_id, attempt))

    def log_text(self, replica_id: int, attempt: int) -> str | None:
        """The log.txt of an ended attempt, which holds the end of its output; None if the attempt wrote none.

        At most the last bytes that a replica would write are returned. One LIST request and a GET.
        """
        key = keys.log_text(replica_id, attempt)
        listed = self._store.list(f"{keys.attempts(replica_id)}{attempt}/")
        size = next((info.size for info in listed if info.key == key), None)
        if size is None:
            return None
        try:
            data = self._store.get(key, max(0, size - most_bytes(key)), size) if size else b""
        except ObjectMissing:  # deleted meanwhile
            return None
        return data.decode(errors="replace")

    def _read(self, kind: type[R], key: str) -> R | None:
        if key in self.unreadable:
            return None
        if key not in self._records:
            found = self._fetched(kind, key)
            if found is None:
                return None
            self._records[key] = found
        return cast(R, self._records[key])

    def _fetched(self, kind: type[R], key: str) -> R | None:
        try:
            found = read(self._store, kind, key)
        except RecordInvalid as error:
            if key not in self.unreadable:
                log.warning("passed over: %s", error)
            self.unreadable[key] = str(error)
            return None
        if found is None:
            return None
        self.unreadable.pop(key, None)
        return found.record


class Authors:
    """Checks whether manifests were written by the attempt that they name, by the claim record that both know.

    Two threads may share one object.
    """

    def __init__(self, store: Store, background: Background) -> None:
        self._store = store
        self._background = background
        self._claims: dict[tuple[int, int], str] = {}  # sha256 of the claim of an attempt that counts

    def know(self, replica_id: int, attempt: int, claim_sha256: str) -> None:
        """Cache the digest of the claim that this process has just created, by which it became the attempt."""
        self._claims[replica_id, attempt] = claim_sha256

    def why_not(self, manifest: Contribution | Checked) -> str:
        """Reason why a manifest or check record is not by the attempt that it names; empty if it may be.

        Raises the store's errors.
        """
        return self.why_not_each([manifest]).get(manifest.replica_id, "")

    def why_not_each(self, manifests: Sequence[Contribution | Checked]) -> dict[int, str]:
        """Reasons why manifests, or check records, are not by the attempts that they name, by replica id; empty if all
        may be.

        Each replica has at most one in `manifests`. One LIST and one GET, in parallel, for every attempt not read
        before, then another GET. Raises the store's errors.
        """
        self._read({(each.replica_id, each.attempt) for each in manifests} - self._claims.keys())
        found = {}
        for manifest in manifests:
            claim = self._claims.get((manifest.replica_id, manifest.attempt))
            who = f"attempt {manifest.attempt} of replica {manifest.replica_id}"
            if claim is None:
                found[manifest.replica_id] = f"no process has claimed {who}, or no coordinator intended it"
            elif manifest.claim_sha256 != claim:
                found[manifest.replica_id] = f"it does not name the claim of {who}"
        return found

    def _read(self, strangers: Collection[tuple[int, int]]) -> None:
        records, ordered = AttemptRecords(self._store), sorted(strangers)
        listing = [self._background.start(partial(records.numbers, who[0])) for who in ordered]
        names = in_parallel(self._background, [partial(records.claim_key, *who) for who in ordered])
        intended = [
            (who, key)
            for who, numbers, key in zip(ordered, listing, names, strict=True)
            if who[1] in numbers.result() and key is not None
        ]
        claims = in_parallel(self._background, [partial(read_optional, self._store, key) for _, key in intended])
        for (who, _), data in zip(intended, claims, strict=True):
            if data is not None:
                self._claims[who] = sha256_hex(data)
