"""What this replica owes the run: finished work that no commit named, carried into its next contribution.

What is owed of a fragment is always exactly the payload of the replica's newest contribution of it, if no commit names
that one: it holds what was owed before. So a restarted attempt finds it in the bucket, and nothing counts twice.
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


class CarriedWork:
    """The carry of one replica in one leg. `late`: "carry" or "drop"."""

    def __init__(self, store: Store, fragments: int, late: str) -> None:
        self._reader = ContributionReader(store)
        self._fragments = fragments
        self._late = late
        self._owed: dict[int, Contribution] = {}  # by fragment

    def recover(
        self,
        rounds: range,
        answer_of: Callable[[int], Contribution | None],
        commit_of: Callable[[int], Commit],
        base_before: Callable[[int], str],
    ) -> None:
        """Find in the bucket what earlier attempts left owed. `rounds`: closed ones of this leg, newest first."""
        self._owed.clear()
        settled: set[int] = set()
        for round_ in rounds:
            manifest = answer_of(round_)
            if manifest is None or manifest.kind != "delta" or manifest.fragment in settled:
                continue
            if self.note(manifest, commit_of(round_), base_before(round_)):
                settled.add(manifest.fragment)
            if len(settled) == self._fragments:
                return

    def note(self, manifest: Contribution, commit: Commit, base_digest: str) -> bool:
        """A round that this replica answered has ended. `base_digest`: of the base that the round started from.

        Returns whether this decides what is owed; an abstention, or work from another base, leaves what was.
        """
        if manifest.kind != "delta":
            return False
        if any(a.averaged and a.replica_id == manifest.replica_id for a in commit.answers):
            self._owed.pop(manifest.fragment, None)
        elif manifest.base_digest == base_digest:
            self._owed[manifest.fragment] = manifest
            log.info("round %d went on without our %d inner steps: %s", commit.round, _steps(manifest), self._fate)
        else:
            log.warning("round %d: our %d inner steps, from another base, are dropped", commit.round, _steps(manifest))
            return False
        return True

    def lapse(self, why: str) -> None:
        """The leg has stopped: what is still owed will never count."""
        for manifest in self._owed.values():
            log.warning("%d inner steps of round %d are dropped: %s", _steps(manifest), manifest.round, why)
        self._owed.clear()

    def add_to(
        self, pseudo_gradient: FlatTensors, fragment: int, round_: int
    ) -> tuple[tuple[Origin, ...], tuple[Origin, ...]]:
        """Add what is owed of `fragment`, for its staleness, to `pseudo_gradient`. Returns (carried, dropped)."""
        owed = self._owed.get(fragment)
        if owed is None:
            return (), ()
        if self._late == "drop":
            log.warning("%d inner steps of round %d are dropped: late is set to drop", _steps(owed), owed.round)
            return (), owed.origins
        staleness = max(1, (round_ - owed.round) // self._fragments)
        try:
            self._add(pseudo_gradient, owed, carry_weight(staleness))
        except PayloadCorrupt as error:
            log.error("%d inner steps of round %d are dropped: %s", _steps(owed), owed.round, error)
            return (), owed.origins
        return owed.origins, ()

    def _add(self, pseudo_gradient: FlatTensors, owed: Contribution, weight: float) -> None:
        assert owed.payload is not None
        ranges, spool = shard_ranges(owed.payload.numel, owed.payload.shard_numel), PayloadCache()
        for index in range(len(ranges)):  # all of them before the first is added: half a carry is none
            spool.put((str(index), ""), self._reader.shard(owed, index))
        for index, (start, stop) in enumerate(ranges):
            values = decode(spool.get((str(index), "")) or b"", owed.payload, index, f"the carry of round {owed.round}")
            pseudo_gradient.write(start, pseudo_gradient.read(start, stop).add_(values.mul_(weight)))
        spool.clear()

    @property
    def _fate(self) -> str:
        return "they are carried into the next contribution" if self._late == "carry" else "they will be dropped"


def _steps(manifest: Contribution) -> int:
    return sum(origin.steps for origin in manifest.origins)
