"""`Authors`: whether a manifest is by an attempt that counts: one with an intent, without a gap before it, and a claim.

A manifest names the sha256 of its attempt's claim. That keeps out whoever writes in the name of a replica without
having read the bucket, and attempts that no coordinator intended. It is no signature: claims can be read and copied.
"""

from collections.abc import Collection, Sequence
from functools import partial

from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.store.base import Store


class Authors:
    """Reads claims, each once. Two threads may share it: at worst both read the same claim."""

    def __init__(self, store: Store, background: Background) -> None:
        self._store = store
        self._background = background
        self._claims: dict[tuple[int, int], str] = {}  # sha256 of the claim of an attempt that counts

    def know(self, replica_id: int, attempt: int, claim_sha256: str) -> None:
        """Take a claim, which the caller has created, without reading it."""
        self._claims[replica_id, attempt] = claim_sha256

    def why_not(self, manifest: Contribution) -> str:
        """Reason why a manifest is not of the attempt that it names; empty if it may be. Errors: `why_not_each`."""
        return self.why_not_each([manifest]).get(manifest.replica_id, "")

    def why_not_each(self, manifests: Sequence[Contribution]) -> dict[int, str]:
        """The reason why a manifest is not by the attempt that it names, by replica id; those that may be are left out.

        One LIST and one GET, together, for every attempt that is not known yet, then another GET. Raises the store's
        errors.
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
