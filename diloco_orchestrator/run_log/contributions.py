"""`ContributionReader`: fetches manifests of contributions and their payload shards, and checks their digests.

`protocol.rounds` decides which contributions are averaged; `allreduce.payload` decodes payloads.
"""

from collections.abc import Collection
from contextlib import suppress
from functools import partial

from diloco_orchestrator.allreduce.shards import fetch
from diloco_orchestrator.clock import Background, NoBackground, in_parallel
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import Checked, CheckNamed
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution
from diloco_orchestrator.protocol.weights import is_said
from diloco_orchestrator.run_log.reader import read, read_record
from diloco_orchestrator.store.base import Store


class ContributionReader:
    """Fetches manifests and payload shards from the store. Nothing is cached."""

    def __init__(self, store: Store, background: Background | None = None) -> None:
        self._store = store
        self._background = background or NoBackground()

    def named(self, round_: int, answer: Answer) -> Contribution:
        """The manifest that `answer`, a response in a commit, names.

        Raises `RecordInvalid` for one with another digest, `ObjectMissing` without one.
        """
        manifest = self.exact(round_, answer.replica_id, answer.manifest_sha256)
        if not is_said(answer, manifest):
            raise RecordInvalid(
                f"{keys.contribution(round_, answer.replica_id)} in {self._store.url} holds other steps, tokens, norms "
                f"or payload than the commit of round {round_} says."
            )
        return manifest

    def exact(self, round_: int, replica_id: int, sha256: str | None) -> Contribution:
        """A replica's manifest of a round. `sha256`: digest that its bytes must have; None: any.

        Raises `ObjectMissing` if there is none, `RecordInvalid` if it has another digest or cannot be parsed.
        """
        key = keys.contribution(round_, replica_id)
        data = read_record(self._store, key)
        if sha256 is not None and sha256_hex(data) != sha256:
            raise RecordInvalid(
                f"{key} in {self._store.url} is not the manifest that the commit of round {round_} names."
            )
        return Contribution.from_bytes(data, key)

    def checked(self, commit: Commit, named: CheckNamed) -> Checked:
        """A check record that a commit names. Raises `ObjectMissing` without it, `RecordInvalid` for another one."""
        key = keys.checked(commit.round, named.replica_id, named.number)
        data = read_record(self._store, key)
        found = Checked.from_bytes(data, key)
        who = found.round, found.leg, found.replica_id, found.number
        if sha256_hex(data) != named.sha256 or who != (commit.round, commit.leg, named.replica_id, named.number):
            raise RecordInvalid(
                f"{key} in {self._store.url} is not the check record that the commit of round {commit.round} names."
            )
        return found

    def of(self, round_: int, replica_id: int) -> Contribution | None:
        """A replica's manifest of a round, or None if there is none. Raises `RecordInvalid` if it cannot be parsed."""
        found = read(self._store, Contribution, keys.contribution(round_, replica_id))
        return None if found is None else found.record

    def authors_in(self, round_: int, replicas: int) -> set[int]:
        """The ids below `replicas` of those with an object under the key of their manifest of a round. One LIST."""
        parsed = (keys.contribution.parse(info.key) for info in self._store.list(keys.contributions(round_)))
        return {key[1] for key in parsed if key is not None and key[1] < replicas}

    def in_round(self, round_: int, replicas: int) -> list[Contribution]:
        """The manifests of a round of replicas below `replicas`, as `each_of` returns them."""
        return self.each_of(round_, self.authors_in(round_, replicas))

    def each_of(self, round_: int, replica_ids: Collection[int]) -> list[Contribution]:
        """The manifests of a round of these replicas, in replica_id order.

        Without those that cannot be parsed, or name another round or replica than their keys.
        """
        calls = [partial(self._parsed, round_, replica_id) for replica_id in sorted(replica_ids)]
        return [manifest for manifest in in_parallel(self._background, calls) if manifest is not None]

    def _parsed(self, round_: int, replica_id: int) -> Contribution | None:
        with suppress(RecordInvalid):  # the same as no manifest: the round does not wait for its author
            manifest = self.of(round_, replica_id)
            if manifest is not None and (manifest.round, manifest.replica_id) == (round_, replica_id):
                return manifest
        return None

    def shard(self, manifest: Contribution, index: int) -> bytes:
        """The verified bytes of one payload shard of a contribution, from the first upload that fits the manifest.

        Replicas that hold a shard upload it again, up to three times, when others cannot read the author's upload. If
        no upload fits, raises the error of the author's: `PayloadGone` if it was deleted, else `PayloadCorrupt`.
        """
        assert manifest.payload is not None
        failure: PayloadCorrupt | None = None
        for take in range(1, keys.MAX_TAKES + 1):
            key = keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index, take)
            try:
                return fetch(self._store, key, manifest.payload, index)
            except PayloadCorrupt as error:
                failure = failure or error
        assert failure is not None
        raise failure


# A reader that looks far back for a manifest would need a hundred times as many requests with a GET for every round.
_ROUNDS = 50  # of the first listing: with eight replicas about a page of 1,000 keys


class ManifestListing:
    """The replicas with a manifest in each round up to `newest`, listed on demand, later rounds first.

    A listing always runs to the end of the log, so each one goes twice as far back as the one before. A manifest that
    appears after its round was listed is not found: choose `newest` so that this cannot matter.
    """

    def __init__(self, store: Store, newest: int) -> None:
        self.newest = newest
        self._store = store
        self._listed_from = newest + 1
        self._reach = _ROUNDS
        self._authors: dict[int, set[int]] = {}

    def authors(self, round_: int) -> set[int]:
        """The replicas with a manifest in `round_`, at most `newest`; lists the rounds back to it if needed."""
        assert round_ <= self.newest, f"round {round_} is after {self.newest}"
        while max(1, round_) < self._listed_from:
            self._list(max(1, self._listed_from - self._reach))
            self._reach *= 2
        return self._authors.get(round_, set())

    def _list(self, first: int) -> None:
        for info in self._store.list(keys.ROUNDS, start_after=keys.end_of_round(first - 1)):
            if info.key > keys.end_of_round(self._listed_from - 1):
                break
            parsed = keys.contribution.parse(info.key)
            if parsed is not None:
                self._authors.setdefault(parsed[0], set()).add(parsed[1])
        self._listed_from = first
