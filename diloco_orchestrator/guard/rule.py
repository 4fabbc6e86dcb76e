"""`GuardRule`: the interface of guard rules; `Evidence`, their input each round; and the rule that judges nothing.

`guard.fold` computes the evidence and stores a rule's state in the commits; `guard.registry` finds rules by name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Verdict

LATCHED = "latched: "  # before the reason of a verdict that fired in an earlier round


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers of one round that a guard rule judges: negated nats per token for losses, else the reward's unit.

    All are of the base that the round started from. Higher is better. NaN means a number that is not finite, None one
    that was not measured.
    """

    round: int  # whose commit holds the verdict; rounds only go forward
    # Score of the base, comparable between rounds whatever shares are missing. None: the round cannot be judged, and
    # nothing is given but `why_not`, `vault` and `final_evaluation`.
    heldout: float | None = None
    why_not: str = ""  # why there is no finite `heldout`, for readers
    in_loop: float | None = None  # training metric of the same model
    kl_to_init: float | None = None  # nats per token, token mean
    entropy: float | None = None
    reward_std: float | None = None
    items: int = 0  # held-out items with finite scores
    total_items: int = 0  # in the whole held-out set; 0 = unknown, every round counts alike
    # By share of the held-out set: its score minus its first one. Empty = the shares are not known one by one.
    gains: Mapping[str, float] = field(default_factory=dict)
    trained: Mapping[int, float] = field(default_factory=dict)  # by replica: its training metric, where it is finite
    vault: VaultChange | None = None  # answers an alarm of the round before; None if too few vault items were scored
    rebuildable: bool = True  # whether the base can be rebuilt later, to score the confirmation set on it
    final_evaluation: bool = False  # whether no round follows

    @property
    def model(self) -> int:
        """The round that made the measured base; 0 is the run's first base."""
        return self.round - 1

    @property
    def is_nonfinite(self) -> bool:
        """Whether the held-out score, the training metric or the KL divergence is not finite."""
        metrics = (self.heldout, self.in_loop, self.kl_to_init)
        return any(metric is not None and not math.isfinite(metric) for metric in metrics)


class GuardRule(ABC):
    """A rule that judges the evidence of one round after another, and so decides when the guard halts the run.

    Pure: the same settings, state and evidence give the same verdicts and the same next state on every machine.
    """

    name: ClassVar[str]  # kept in the state; a change of the arithmetic or of the state's form needs a new name
    needs_in_loop: ClassVar[bool] = False  # whether a round without a training metric cannot be judged
    asks_vault: ClassVar[bool] = False  # whether an alarm can wait for scores of the confirmation set

    @classmethod
    @abstractmethod
    def of(cls, config: GuardConfig, heldout: HeldoutSet) -> Self:
        """The rule with the settings in `config`, for the held-out set of start.json, which names the metric."""

    @abstractmethod
    def fold(self, state: Mapping[str, Any] | None, evidence: Evidence) -> tuple[dict[str, Any] | None, Verdict]:
        """The state and the verdict after one more round. `state`: JSON, of the round before; None at the start.

        Changes neither the rule nor `state`. A verdict that fired stays fired.
        """

    @classmethod
    def check_set(cls, config: GuardConfig, items: int) -> None:
        """Raise `ConfigError` if a held-out set of `items` items is too small for the settings. Default: never."""
        return

    @classmethod
    def outlook(cls, state: Mapping[str, Any] | None, config: GuardConfig) -> str:
        """A sentence for readers about what the rule can judge after `state`. Empty if it has none.

        It says how many rounds the rule still needs, or the score below which it would halt soon.
        """
        return ""

    @classmethod
    def vault_base(cls, state: Mapping[str, Any] | None) -> int | None:
        """The round whose base is scored, beside the newest, to confirm an alarm; None if no alarm awaits that.

        Both are scored on the confirmation set, further held-out items. `state`: the guard's, before the round.
        """
        return None


class OffRule(GuardRule):
    """The guard rule "off-v1", of `guard="off"`: counts the rounds with a held-out score and judges nothing."""

    name: ClassVar[str] = "off-v1"

    @classmethod
    def of(cls, config: GuardConfig, heldout: HeldoutSet) -> Self:
        return cls()

    def fold(self, state: Mapping[str, Any] | None, evidence: Evidence) -> tuple[dict[str, Any], Verdict]:
        folds = (state["samples"] if state else 0) + (evidence.heldout is not None)
        return {"samples": folds}, Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=folds)


def finite_or_none(value: float | None) -> float | None:
    """`value` where it is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None


def plain(value: float | None) -> float | str | None:
    """`value` as JSON; NaN and infinity become text, so that equal states have equal JSON."""
    return value if value is None or math.isfinite(value) else str(float(value))


def check_number(name: str, value: Any, allowed: Callable[[Any], bool], words: str) -> None:
    """Raise `ValueError` unless `value` is a finite number that `allowed` accepts; `words` describes those."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not allowed(value):
        raise ValueError(f"{name}={value!r} must be {words}.")
