"""The parts of a run's configuration: outer optimizer, timing, retries, retention, resume after a halt, guard.

Each field has its default, unit and reason beside it. `run_config` has the settings that belong to no part.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from diloco_orchestrator.errors import ConfigError

_GAPS = {"loss": 0.5, "reward": 0.10}  # GuardConfig.max_proxy_real_gap=None: nats per token; of a reward in [0, 1]
GUARD_RULES = {  # by name, our own: the settings that only this rule reads
    "sequential": ("threshold", "gap_sigmas", "pause_after", "notice_drop", "item_sd", "vault_sigmas"),
    "heldout": ("decline_patience", "max_proxy_real_gap", "ema_alpha", "rise_eps"),
    "off": (),
}


class Tree(BaseModel):
    """A node of the configuration tree: immutable; refuses unknown names and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OuterConfig(Tree):
    """Settings of the outer optimizer: SGD with Nesterov momentum (arXiv 2311.08105 §2)."""

    lr: float = Field(default=0.7, gt=0, description="outer learning rate; the paper's value")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="outer momentum; the paper's value; 0 switches it off")
    nesterov: bool = Field(default=True, description="Nesterov's look-ahead; without it plain heavy-ball momentum")


SPARSE = OuterConfig(lr=1.0, momentum=0.0)  # outer="sparse": SparseLoCo, arXiv 2508.15706


class TimingConfig(Tree):
    """Timeouts and intervals of a run, each measured on the process's own clock."""

    round_timeout_s: float = Field(
        default=1800.0, gt=0, description="s without quorum, and without a launch under way, until QuorumLost is raised"
    )
    startup_timeout_s: float = Field(
        default=1800.0, gt=0, description="s beside training that a leg's first round waits"
    )
    poll_s: float = Field(
        default=1.0,
        gt=0,
        description="longest pause in s between two polls of a waiting replica; above 50 of it, a fiftieth of a round",
    )
    heartbeat_s: float = Field(
        default=10.0,
        gt=0,
        description="least s between heartbeats, each a PUT; two rounds, at most hung_after_s / 2.5",
    )


class RetryConfig(Tree):
    """Budgets for relaunching replicas that ended before the run did."""

    max_errors: int = Field(default=3, ge=0, description="relaunches of one replica after errors")
    max_preemptions: int = Field(default=100, ge=0, description="relaunches of one replica after preemptions")
    max_timeouts: int = Field(default=1000, ge=0, description="relaunches of one replica at its time limit")
    max_no_capacity: int = Field(default=100, ge=0, description="relaunches of one replica that got no machine")
    unavailable_for_s: float = Field(
        default=21600.0, ge=0, description="s for which a launch is repeated while the provider is down or overloaded"
    )
    backoff_s: float = Field(default=1.0, ge=0, description="s before the first relaunch; doubles, at most 60 s")
    hung_after_s: float = Field(default=180.0, gt=0, description="s without heartbeat until a replica is replaced")


class RetentionConfig(Tree):
    """Which objects stay in the bucket; others are deleted while the run goes on. Commits and manifests always stay."""

    payloads: Literal["all", "needed"] = Field(
        default="all",
        description="all, so that any round can be rebuilt and verified; or those needed to continue: since the last "
        "snapshot but one, and what replicas still owe; likewise replicas' states",
    )
    snapshots: int | None = Field(
        default=None,
        ge=2,
        description="newest snapshots to keep, beside the first, the best by held-out score, and where legs begin and "
        "end; None = all",
    )

    @property
    def keeps_everything(self) -> bool:
        return self.payloads == "all" and self.snapshots is None


class OnHaltConfig(Tree):
    """Automatic resume after a halt by the guard, from the base with the best held-out score."""

    change: dict[str, JsonValue] = Field(
        default_factory=dict, description='settings of the new leg, {"outer.lr": 0.5}; those of `outer` and `args`'
    )
    at_most: int = Field(default=1, ge=1, description="legs that begin so; the next halt ends the run")

    @model_validator(mode="before")
    @classmethod
    def _without_resume(cls, values: Any) -> Any:
        # Settings and run.json files of version 0.3 name the base to start from, of which there is one.
        if isinstance(values, Mapping) and values.get("resume") == "best":
            return {name: value for name, value in values.items() if name != "resume"}
        return values


class GuardConfig(Tree):
    """Settings of the guard: which rule judges the global model's held-out score, and with which limits.

    Settings that only the rule "heldout" reads select it where no rule is named.
    """

    rule: str = Field(
        default="sequential",
        description="sequential: statistics in units of the measured noise, with a stated rate of false halts; "
        "heldout: tripwires in the metric's unit, also selected by its settings; off: scores are recorded, not judged; "
        "or the name of an installed package's rule",  # `guard.registry` refuses unknown ones, where a rule is needed
    )
    min_steps: int = Field(default=20, ge=1, description="folds before a verdict may fire")
    kl_hard_stop: float = Field(default=0.08, gt=0, description="nats per token of drift from the start that fires")
    threshold: float = Field(
        default=10.0,
        gt=0,
        description="sequential: sigmas added up that halt: a Hacking Gap; a fall at about half of it",
    )
    gap_sigmas: float = Field(default=5.0, gt=0, description="sequential: sigmas that a training reward alone may gain")
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
        """The gap between training and held-out gains above which the guard halts; None if its rule has no such gap.

        `max_proxy_real_gap`, or its default for `metric`, "loss" or "reward".
        """
        if self.rule != "heldout":
            return None
        return _GAPS[metric] if self.max_proxy_real_gap is None else self.max_proxy_real_gap
