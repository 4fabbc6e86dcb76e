"""`HeldOutRule`: adapts `HeldOutGuard` to the interface of guard rules, with the run's settings."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.heldout import SETTINGS, HeldOutGuard
from diloco_orchestrator.guard.rule import Sample
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.protocol.records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Statistic, Verdict


class HeldOutRule:
    """The guard rule "heldout-v1": `HeldOutGuard` behind the interface `GuardRule`."""

    name: ClassVar[str] = "heldout-v1"
    needs_in_loop: ClassVar[bool] = True

    def __init__(self, guard: HeldOutGuard) -> None:
        self._guard = guard

    @classmethod
    def restore(cls, config: GuardConfig, heldout: HeldoutSet, state: Mapping[str, Any] | None) -> Self:
        settings = {name: getattr(config, name) for name in SETTINGS}
        settings["max_proxy_real_gap"] = config.gap_that_fires(heldout.metric)
        return cls(HeldOutGuard(**settings) if state is None else HeldOutGuard.restore(state, **settings))

    def update(self, sample: Sample) -> Verdict:
        assert sample.in_loop is not None, "the rule needs one"
        self._guard.update(
            sample.round,
            sample.in_loop,
            sample.heldout,
            sample.kl_to_init,
            sample.entropy,
            sample.reward_std,
        )
        return self.verdict

    def inconclusive(self, round_: int, why_not: str, vault: VaultChange | None, closing: bool) -> Verdict:
        return self.verdict

    @property
    def verdict(self) -> Verdict:
        last = self._guard.last_status
        return Verdict(
            fire=self._guard.should_halt(),
            reason=last.reason if last else "",
            proxy_real_gap=self._guard.proxy_real_gap(),
            folds=self._guard.updates,
            statistics=tuple(Statistic(*each) for each in self._guard.statistics()),
        )

    def state(self) -> dict[str, Any]:
        return self._guard.state()
