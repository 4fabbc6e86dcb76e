"""`CarriedWork`: work of this replica that no commit averaged, added to its next contribution of the same fragment.

The carry of a fragment is always exactly the payload of the replica's newest contribution of that fragment, if no
commit averages it: a payload contains what was carried before. So a restarted attempt finds the carry in the bucket,
and nothing counts twice. The weight of carried work is in `protocol.rounds.carry_weight`.
"""

import logging
from collections.abc import Callable

from diloco_orchestrator.allreduce.payload import FlatTensors, decode, shard_ranges
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol.records import Commit, Contribution, Origin
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

Origins = tuple[Origin, ...]


class CarriedWork:
    """The carry of one replica in one leg. `late`: "carry" or "drop", the run's setting."""

    def __init__(self, store: Store, fragments: int, late: str) -> None:
        self._reader = ContributionReader(store)
        self._fragments = fragments
        self._late = late
        self._carried: dict[int, Contribution] = {}  # by fragment

    def recover(
        self,
        rounds: range,
        manifest_of: Callable[[int], Contribution | None],
        commit_of: Callable[[int], Commit],
        digest_before: Callable[[int], str],
    ) -> None:
        """Find the carry that earlier attempts left in the bucket.

        Args:
            rounds: closed rounds of this leg, newest first.
            manifest_of: this replica's manifest of a round.
            commit_of: the commit of a round.
            digest_before: the digest of the base that a round started from.
        """
        self._carried.clear()
        settled: set[int] = set()
        for round_ in rounds:
            manifest = manifest_of(round_)
            if manifest is None or manifest.kind != "delta" or manifest.fragment in settled:
                continue
            if self.settle(manifest, commit_of(round_), digest_before(round_)):
                settled.add(manifest.fragment)
            if len(settled) == self._fragments:
                return

    def settle(self, manifest: Contribution, commit: Commit, base_digest: str) -> bool:
        """Update the carry after a round with a contribution of this replica was committed.

        The carry is cleared if the commit averages the contribution; otherwise the contribution becomes the carry.
        Returns False, changing nothing, for an abstention or a contribution from another base than the round's, whose
        digest is `base_digest`.
        """
        if manifest.kind != "delta":
            return False
        if any(a.averaged and a.replica_id == manifest.replica_id for a in commit.answers):
            self._carried.pop(manifest.fragment, None)
        elif manifest.base_digest == base_digest:
            self._carried[manifest.fragment] = manifest
            log.info("round %d went on without our %d inner steps: %s", commit.round, _steps(manifest), self._fate)
        else:
            log.warning("round %d: our %d inner steps, from another base, are dropped", commit.round, _steps(manifest))
            return False
        return True

    def drop_all(self, why: str) -> None:
        """Discard the carry, which can never be averaged, because the leg has stopped. `why` goes into the log."""
        for manifest in self._carried.values():
            log.warning("%d inner steps of round %d are dropped: %s", _steps(manifest), manifest.round, why)
        self._carried.clear()

    def merge_into(self, pseudo_gradient: FlatTensors, fragment: int, round_: int) -> tuple[Origins, Origins]:
        """Add the carry of `fragment`, weighted by its staleness in `round_`, to `pseudo_gradient` in place.

        Returns the origins that were added and those that were dropped: by the run's setting, or because their
        payload cannot be read any more. Changes nothing else: adding the same carry again gives the same result.
        """
        carried = self._carried.get(fragment)
        if carried is None:
            return (), ()
        if self._late == "drop":
            log.warning("%d inner steps of round %d are dropped: late is set to drop", _steps(carried), carried.round)
            return (), carried.origins
        staleness = max(1, (round_ - carried.round) // self._fragments)
        try:
            self._add(pseudo_gradient, carried, carry_weight(staleness))
        except PayloadCorrupt as error:
            log.error("%d inner steps of round %d are dropped: %s", _steps(carried), carried.round, error)
            return (), carried.origins
        return carried.origins, ()

    def _add(self, pseudo_gradient: FlatTensors, carried: Contribution, weight: float) -> None:
        """Add the carried payload times `weight`. All shards are fetched before the first is added: all or nothing."""
        assert carried.payload is not None
        ranges, cache = shard_ranges(carried.payload.numel, carried.payload.shard_numel), PayloadCache()
        for index in range(len(ranges)):
            cache.put((str(index), ""), self._reader.shard(carried, index))
        whose = f"the carry of round {carried.round}"
        for index, (start, stop) in enumerate(ranges):
            values = decode(cache.get((str(index), "")) or b"", carried.payload, index, whose)
            pseudo_gradient.write(start, pseudo_gradient.read(start, stop).add_(values.mul_(weight)))
        cache.clear()

    @property
    def _fate(self) -> str:
        return "they are carried into the next contribution" if self._late == "carry" else "they will be dropped"


def _steps(manifest: Contribution) -> int:
    return sum(origin.steps for origin in manifest.origins)
