"""`CarriedWork`: work of this replica that no commit averaged, added to its next contribution of the same fragment.

A payload contains the work carried into it, so the carried work of a fragment is exactly the payload of the replica's
newest contribution to it, if no commit averages that. A restarted attempt finds it in the bucket, and nothing counts
twice. Its weight is `protocol.rounds.carry_weight`.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch

from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol.records import Commit, Contribution, Origin, Payload
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.replica.rounds.received import PayloadShard, everything
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

Origins = tuple[Origin, ...]
_SHARDS_AT_ONCE = 4  # each is in memory until it is in the cache


class CarriedWork:
    """One replica's work that no commit averaged and that it adds to a later contribution of the same leg.

    A leg is a run's stretch from start or resume to stop. `late`: the run's setting, "carry" or "drop".
    """

    def __init__(self, store: Store, fragments: int, late: str, background: Background) -> None:
        self._background = background
        self._reader = ContributionReader(store)
        self._fragments = fragments
        self._late = late
        self._carried: dict[int, Contribution] = {}  # by fragment
        self._lost: dict[int, Origins] = {}  # by round: dropped work that no manifest lists as dropped yet

    def recover(
        self,
        rounds: range,
        manifest_of: Callable[[int], Contribution | None],
        commit_of: Callable[[int], Commit],
        is_right: Callable[[Contribution], bool],
    ) -> None:
        """Find the unaveraged work of earlier attempts of this replica in the bucket.

        Args:
            rounds: closed rounds of this leg, newest first.
            manifest_of: this replica's manifest of a round.
            commit_of: the commit of a round.
            is_right: whether a manifest claims the base that its round started from, as this replica rebuilds it.
        """
        self._carried.clear()
        self._lost.clear()
        settled: set[int] = set()
        listed: set[int] = set()  # rounds whose work a newer manifest lists as dropped
        for round_ in rounds:
            manifest = manifest_of(round_)
            if manifest is None or manifest.kind != "delta":
                continue
            if manifest.fragment not in settled and self.settle(manifest, commit_of(round_), is_right):
                settled.add(manifest.fragment)
            listed |= {origin.round for origin in manifest.dropped}
            if len(settled) == self._fragments:
                break
        self._lost = {round_: origins for round_, origins in self._lost.items() if round_ not in listed}

    def settle(self, manifest: Contribution, commit: Commit, is_right: Callable[[Contribution], bool]) -> bool:
        """Update the unaveraged work of a fragment once a round with a contribution of this replica is committed.

        If the commit averages the contribution, nothing is carried. If the guard quarantines it, its work is dropped
        and the next manifest lists it as dropped. Otherwise this replica checks the contribution against its own base,
        whatever the commit says: if right, it becomes the carried work; if wrong, its own steps are dropped and listed.
        Returns False, with the carried work unchanged, for an abstention or a wrong base.
        """
        if manifest.kind != "delta":
            return False
        for origin in manifest.dropped:
            self._lost.pop(origin.round, None)
        if any(a.averaged and a.replica_id == manifest.replica_id for a in commit.answers):
            self._carried.pop(manifest.fragment, None)
        elif why := commit.quarantines(manifest.replica_id):
            log.warning("round %d: our %d inner steps are dropped: %s", commit.round, _steps(manifest), why)
            self._carried.pop(manifest.fragment, None)  # what it carried is in the suspected payload, too
            self._lost[manifest.round] = manifest.origins
        elif is_right(manifest):
            self._carried[manifest.fragment] = manifest
            log.info("round %d went on without our %d inner steps: %s", commit.round, _steps(manifest), self._fate)
        else:
            log.warning("round %d: our %d inner steps, from another base, are dropped", commit.round, _steps(manifest))
            self._lost[manifest.round] = tuple(o for o in manifest.origins if o.round == manifest.round)
            return False
        return True

    def drop_all(self, why: str) -> None:
        """Discard all unaveraged work because the run has stopped and can never average it. `why`: for the log."""
        for manifest in self._carried.values():
            log.warning("%d inner steps of round %d are dropped: %s", _steps(manifest), manifest.round, why)
        self._carried.clear()

    def added_to(self, pseudo_gradient: Vector, fragment: int, round_: int) -> "WithCarry":
        """`pseudo_gradient` plus the carried work of `fragment`, weighted by its staleness in `round_`.

        `dropped` of the result lists work given up: by the setting `late`, because its payload cannot be read, or
        because it started from a wrong base. Changes no state, so a repeated call gives the same. The caller closes the
        result.
        """
        lost = tuple(origin for since in sorted(self._lost) for origin in self._lost[since])
        carried = self._carried.get(fragment)
        if carried is None:
            return WithCarry(pseudo_gradient, dropped=lost)
        if self._late == "drop":
            log.warning("%d inner steps of round %d are dropped: late is set to drop", _steps(carried), carried.round)
            return WithCarry(pseudo_gradient, dropped=(*lost, *carried.origins))
        staleness = max(1, (round_ - carried.round) // self._fragments)
        try:
            shards = self._fetch(carried, pseudo_gradient.numel)
        except PayloadCorrupt as error:
            log.error("%d inner steps of round %d are dropped: %s", _steps(carried), carried.round, error)
            return WithCarry(pseudo_gradient, dropped=(*lost, *carried.origins))
        return WithCarry(pseudo_gradient, carried.origins, lost, carried.payload, shards, carry_weight(staleness))

    def _fetch(self, carried: Contribution, numel: int) -> PayloadCache:
        """All payload shards of an unaveraged contribution, by index. Raises `PayloadCorrupt` if one is unusable."""
        assert carried.payload is not None
        if carried.payload.numel != numel:
            raise PayloadCorrupt(f"the carry has {carried.payload.numel} elements, the pseudo-gradient {numel}.")
        cache = PayloadCache()

        def fetch(shard: PayloadShard) -> None:
            cache.put(_name(shard.index), self._reader.shard(shard.manifest, shard.index))

        in_parallel(self._background, [partial(fetch, shard) for shard in everything([carried])], _SHARDS_AT_ONCE)
        return cache

    @property
    def _fate(self) -> str:
        return "they are carried into the next contribution" if self._late == "carry" else "they will be dropped"


class WithCarry:
    """A pseudo-gradient plus carried work, as a `Vector` that adds them range by range when it is read.

    Args:
        carried: origins of the work that is added.
        dropped: origins of work that is given up and that the manifest lists as dropped.
        payload: of the carried work; None if there is none.
        shards: verified bytes of that payload.
        weight: factor of the carried work.
    """

    def __init__(
        self,
        pseudo_gradient: Vector,
        carried: Origins = (),
        dropped: Origins = (),
        payload: Payload | None = None,
        shards: PayloadCache | None = None,
        weight: float = 1.0,
    ) -> None:
        self.carried = carried
        self.dropped = dropped
        self.numel = pseudo_gradient.numel
        self._pseudo_gradient = pseudo_gradient
        self._payload = payload
        self._shards = shards or PayloadCache()
        self._weight = weight

    def read(self, start: int, stop: int) -> torch.Tensor:
        values = self._pseudo_gradient.read(start, stop)
        if self._payload is None:
            return values
        for index, (low, high) in enumerate(shard_ranges(self.numel, self._payload.shard_numel)):
            if low < stop and start < high:
                data = self._shards.get(_name(index)) or b""
                first, last = max(low, start), min(high, stop)
                carried = Encoded(data, self._payload.codec, high - low).values(first - low, last - low)
                values[first - start : last - start].add_(carried * self._weight)
        return values

    def close(self) -> None:
        """Free the bytes of the payload that is added."""
        self._shards.close()


def _name(index: int) -> tuple[str, str]:
    """The name in the payload cache of a shard of unaveraged work."""
    return str(index), ""


def _steps(manifest: Contribution) -> int:
    return sum(origin.steps for origin in manifest.origins)
