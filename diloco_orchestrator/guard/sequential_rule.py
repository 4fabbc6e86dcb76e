"""`SequentialRule`: adapts `SequentialGuard` to the interface of guard rules, with the run's settings."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.evidence import Evidence
from diloco_orchestrator.guard.rule import Sample
from diloco_orchestrator.guard.sequential import SequentialGuard
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.protocol.records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Verdict


class SequentialRule:
    """The guard rule "sequential-v1": `SequentialGuard` behind the interface `GuardRule`."""

    name: ClassVar[str] = SequentialGuard.rule
    needs_in_loop: ClassVar[bool] = False

    def __init__(self, guard: SequentialGuard, state: Mapping[str, Any] | None) -> None:
        self._guard, self._state = guard, None if state is None else dict(state)

    @classmethod
    def restore(cls, config: GuardConfig, heldout: HeldoutSet, state: Mapping[str, Any] | None) -> Self:
        guard = SequentialGuard(
            min_steps=config.min_steps,
            threshold=config.threshold,
            gap_sigmas=config.gap_sigmas,
            kl_hard_stop=config.kl_hard_stop,
            pause_after=config.pause_after,
            vault_sigmas=config.vault_sigmas if heldout.vault else None,
        )
        return cls(guard, state)

    def update(self, sample: Sample) -> Verdict:
        return self._fold(
            Evidence(
                round=sample.round,
                heldout=sample.heldout,
                in_loop=sample.in_loop,
                items=sample.items,
                total_items=sample.total_items,
                kl_to_init=sample.kl_to_init,
                gains=sample.gains,
                vault=sample.vault,
                rebuildable=sample.rebuildable,
                closing=sample.closing,
            )
        )

    def inconclusive(self, round_: int, why_not: str, vault: VaultChange | None, closing: bool) -> Verdict:
        return self._fold(Evidence(round=round_, why_not=why_not, vault=vault, closing=closing))

    def _fold(self, evidence: Evidence) -> Verdict:
        self._state, verdict = self._guard.fold(self._state, evidence)
        return verdict

    @property
    def verdict(self) -> Verdict:
        return self._guard.verdict_of(self._state)

    def state(self) -> dict[str, Any] | None:
        return self._state
