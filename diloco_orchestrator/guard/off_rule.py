"""`OffRule`: records the held-out scores of a run and judges nothing."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.rule import Sample
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.protocol.records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Verdict


class OffRule:
    """The guard rule "off-v1", of `guard="off"`. Its state is the number of samples."""

    name: ClassVar[str] = "off-v1"
    needs_in_loop: ClassVar[bool] = False

    def __init__(self, samples: int) -> None:
        self._samples = samples

    @classmethod
    def restore(cls, config: GuardConfig, heldout: HeldoutSet, state: Mapping[str, Any] | None) -> Self:
        return cls(0 if state is None else state["samples"])

    def update(self, sample: Sample) -> Verdict:
        self._samples += 1
        return self.verdict

    def inconclusive(self, round_: int, why_not: str, vault: VaultChange | None, closing: bool) -> Verdict:
        return self.verdict

    @property
    def verdict(self) -> Verdict:
        return Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=self._samples)

    def state(self) -> dict[str, Any]:
        return {"samples": self._samples}
