"""`GuardRule`: the interface of a rule of the guard, and the sample that it judges each round.

A rule is a class in a file of its own. `guard.fold` computes its samples, keeps its state in the commits and finds it
by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.protocol.records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Verdict


@dataclass(frozen=True)
class Sample:
    """The numbers of one round that a guard rule judges: negated nats per token for losses, else the reward's unit.

    Higher is better. NaN means a number that is not finite, None one that was not measured.
    """

    round: int  # whose commit holds the verdict
    in_loop: float | None  # training metric of the round that made the base
    heldout: float  # score of that base, comparable between rounds whatever shares are missing
    kl_to_init: float | None = None  # nats per token
    entropy: float | None = None
    reward_std: float | None = None
    items: int = 0  # held-out items that were scored
    total_items: int = 0  # in the whole held-out set; 0 = unknown
    gains: Mapping[str, float] = field(default_factory=dict)  # by share: its score minus its first one
    vault: VaultChange | None = None  # answers an alarm of the round before; None if too few vault items were scored
    rebuildable: bool = True  # whether the base can be rebuilt later, to score the vault set on it
    closing: bool = False  # whether no round follows


class GuardRule(Protocol):
    """Judges one sample after another.

    Pure: the same settings, state and samples give the same verdicts and the same next state on every machine.
    """

    name: ClassVar[str]  # kept in the state; a change of the arithmetic or of the state's form needs a new name
    needs_in_loop: ClassVar[bool]  # whether a sample without a training metric cannot be judged

    @classmethod
    def restore(cls, config: GuardConfig, heldout: HeldoutSet, state: Mapping[str, Any] | None) -> Self:
        """The rule with these settings as it was when `state` was taken; a new one if `state` is None.

        `heldout`: what start.json says of the held-out set, such as the unit of the numbers.
        """
        ...

    def update(self, sample: Sample) -> Verdict:
        """Judge the next sample. Rounds only go forward. A verdict that fired stays fired."""
        ...

    def inconclusive(self, round_: int, why_not: str, vault: VaultChange | None, closing: bool) -> Verdict:
        """Judge a round without enough held-out scores for a sample. `why_not`: the reason, for readers; the others as
        in `Sample`.
        """
        ...

    @property
    def verdict(self) -> Verdict:
        """The verdict after the last update; before the first, a verdict that has not fired. Changes nothing."""
        ...

    def state(self) -> dict[str, Any] | None:
        """The rule's state as JSON, from which `restore` continues with the same bits; None before the first sample."""
        ...
