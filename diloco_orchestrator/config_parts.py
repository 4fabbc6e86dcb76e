"""Parts of the configuration that depend on no other: outer optimizer, waits, relaunches, retention, healing.

The whole tree is in `config`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Tree(BaseModel):
    """A node of the configuration tree: frozen, finite numbers only, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OuterConfig(Tree):
    """The outer optimizer (Nesterov, arXiv 2311.08105 §2)."""

    lr: float = Field(default=0.7, gt=0, description="outer learning rate; the paper's value")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="outer momentum; the paper's value; 0 switches it off")
    nesterov: bool = Field(default=True, description="Nesterov's look-ahead; without it plain heavy-ball momentum")


class TimingConfig(Tree):
    """Waits. All are measured on each process's own clock."""

    round_timeout_s: float = Field(
        default=1800.0, gt=0, description="s without quorum, and without a launch under way, until QuorumLost is raised"
    )
    startup_timeout_s: float = Field(default=1800.0, gt=0, description="s that a leg's first round waits for everybody")
    poll_s: float = Field(default=1.0, gt=0, description="longest pause in s between two polls of the bucket")
    heartbeat_s: float = Field(default=10.0, gt=0, description="s between heartbeats; each one is a PUT")


class RetryConfig(Tree):
    """Relaunching of replicas that ended before the run did."""

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
    """Which objects are deleted from the bucket while the run goes on. Commits and manifests always stay."""

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
    """What follows a halt by the guard without anybody's doing: another leg."""

    resume: Literal["best"] = Field(default="best", description="the base to start from: the best by held-out score")
    change: dict[str, JsonValue] = Field(
        default_factory=dict, description='settings of the new leg, {"outer.lr": 0.5}; those of `outer` and `args`'
    )
    at_most: int = Field(default=1, ge=1, description="legs that begin so; the next halt ends the run")


def changed(config: BaseModel, change: Mapping[str, JsonValue]) -> dict[str, Any]:
    """The configuration as nested dicts, with the values of `change`, {"outer.lr": 0.5}, in place of its own.

    Not validated yet. A name whose parents are not in the configuration is kept, for the validation to refuse.
    """
    tree = config.model_dump(mode="json")
    for path, value in change.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree
