"""The guard's part of the configuration: its rule, and the settings of each rule.

The whole tree is in `config`.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from diloco_orchestrator.config_parts import Tree
from diloco_orchestrator.errors import ConfigError, unknown_name

_GAPS = {"loss": 0.5, "reward": 0.10}  # GuardConfig.max_proxy_real_gap=None: nats per token; of a reward in [0, 1]


GUARD_RULES = {  # by name: the settings that only this rule reads
    "sequential": ("threshold", "gap_sigmas", "pause_after", "notice_drop", "item_sd", "vault_sigmas"),
    "heldout": ("decline_patience", "max_proxy_real_gap", "ema_alpha", "rise_eps"),
    "off": (),
}


class GuardConfig(Tree):
    """The guard's rule over the global model's held-out score, and its settings.

    Settings that only the rule "heldout" reads select it where no rule is named.
    """

    rule: Literal["sequential", "heldout", "off"] = Field(
        default="sequential",
        description="sequential: statistics in units of the measured noise, with a stated rate of false halts; "
        "heldout: tripwires in the metric's unit, also selected by its settings; off: scores are recorded, not judged",
    )
    min_steps: int = Field(default=20, ge=1, description="folds before a verdict may fire")
    kl_hard_stop: float = Field(default=0.08, gt=0, description="nats per token of drift from the start that fires")
    threshold: float = Field(default=10.0, gt=0, description="sequential: sigmas of a fall, added up, that halt")
    gap_sigmas: float = Field(default=5.0, gt=0, description="sequential: sigmas that training alone may gain")
    pause_after: int = Field(
        default=5, ge=1, description="sequential: rounds in a row without enough scores that pause"
    )
    vault_sigmas: float = Field(
        default=2.0,
        gt=0,
        description="sequential: standard errors of a fall on attach(vault_items=...) that confirm",
    )
    notice_drop: float | None = Field(
        default=None, gt=0, description="lasting fall of the score to notice in 15 rounds; smaller sets are refused"
    )
    item_sd: float = Field(default=0.5, gt=0, description="of one item's score between rounds; 0.5 = most in [0, 1]")
    decline_patience: int = Field(
        default=6,
        ge=1,
        description="heldout: folds in a row of falling held-out and rising training; 3 halts healthy runs",
    )
    max_proxy_real_gap: float | None = Field(
        default=None,
        gt=0,
        description="heldout: training gain minus held-out gain that fires; "
        f"None = {_GAPS['loss']:.1f} nats for losses, {_GAPS['reward']:.2f} for rewards",
    )
    ema_alpha: float = Field(default=0.9, ge=0, lt=1, description="heldout: weight of the past in the smoothed metrics")
    rise_eps: float = Field(default=1e-4, ge=0, description="heldout: smallest change of a smoothed metric that counts")

    per_replica: bool = Field(
        default=False,
        description="score each replica's local parameters before they are averaged, and leave out the contribution "
        "of one whose training has gone wrong; twice the scoring; from 4 replicas on",
    )

    max_extra: dict[str, float] = Field(
        default_factory=dict,
        description="by name, the largest moving average of a metric passed to observe(extra=...) that does not fire",
    )

    @model_validator(mode="before")
    @classmethod
    def _rule_of_its_settings(cls, values: Any) -> Any:
        # Settings and run.json files from before there was a choice name no rule.
        if isinstance(values, Mapping) and "rule" not in values and set(GUARD_RULES["heldout"]) & set(values):
            return {"rule": "heldout", **values}
        return values

    @field_validator("rule", mode="before")
    @classmethod
    def _known_rule(cls, value: Any) -> Any:
        if not isinstance(value, str) or value not in GUARD_RULES:
            raise ConfigError(unknown_name("guard rule", str(value), GUARD_RULES))
        return value

    @model_validator(mode="after")
    def _only_its_own_settings(self) -> Self:
        for rule, names in GUARD_RULES.items():
            changed = [n for n in names if getattr(self, n) != type(self).model_fields[n].default]
            if rule != self.rule and changed:
                raise ConfigError(
                    f"guard.{changed[0]} is a setting of the guard rule {rule!r}, and this run has "
                    f"rule={self.rule!r}, which does not read it. Set guard.rule={rule!r}, or leave it out."
                )
        return self

    def gap_that_fires(self, metric: str) -> float | None:
        """`max_proxy_real_gap`, or its default for the metric, "loss" or "reward"; None if the rule has no such gap."""
        if self.rule != "heldout":
            return None
        return _GAPS[metric] if self.max_proxy_real_gap is None else self.max_proxy_real_gap
