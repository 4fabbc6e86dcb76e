"""The run's configuration: one frozen tree with default, unit and reason beside each field.

Built from Python keywords or command-line options, frozen into `run.json`. Reads no environment and no file.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from diloco_orchestrator.errors import ConfigError, unknown_name
from diloco_orchestrator.executors.names import check_entrypoint
from diloco_orchestrator.redaction import looks_secret

TRACKERS = ("tensorboard", "trackio", "wandb")


class Tree(BaseModel):
    """A node of the configuration tree: frozen, finite numbers only, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OuterConfig(Tree):
    """The outer optimizer (Nesterov, arXiv 2311.08105 §2)."""

    lr: float = Field(default=0.7, gt=0, description="outer learning rate; the paper's value")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="outer momentum; the paper's value; 0 switches it off")
    nesterov: bool = Field(default=True, description="Nesterov's look-ahead; without it plain heavy-ball momentum")


_GAPS = {"loss": 0.5, "reward": 0.10}  # GuardConfig.max_proxy_real_gap=None: nats per token; of a reward in [0, 1]


GUARD_RULES = {  # by name: the settings that only this rule reads
    "heldout": ("decline_patience", "max_proxy_real_gap", "ema_alpha", "rise_eps"),
    "sequential": ("threshold", "gap_sigmas", "pause_after"),
}


class GuardConfig(Tree):
    """The guard's rule over the global model's held-out score, and its settings."""

    rule: Literal["heldout", "sequential"] = Field(
        default="heldout",
        description="heldout: tripwires in the metric's unit; sequential: statistics in units of the measured noise, "
        "with a stated rate of false halts",
    )
    min_steps: int = Field(default=20, ge=1, description="folds before a verdict may fire")
    decline_patience: int = Field(
        default=6,
        ge=1,
        description="folds in a row with the held-out score falling while the training metric rises; "
        "6, because with 3 healthy noisy runs die (over 9 false halts in 1000 rounds against under 1)",
    )
    max_proxy_real_gap: float | None = Field(
        default=None,
        gt=0,
        description="training gain minus held-out gain that fires; "
        f"None = {_GAPS['loss']:.1f} nats for losses, {_GAPS['reward']:.2f} for rewards",
    )
    ema_alpha: float = Field(default=0.9, ge=0, lt=1, description="weight of the past in the smoothed metrics")
    rise_eps: float = Field(default=1e-4, ge=0, description="smallest change of a smoothed metric that counts")
    kl_hard_stop: float = Field(default=0.08, gt=0, description="nats per token of drift from the start that fires")
    threshold: float = Field(
        default=10.0, gt=0, description="sigmas, added up over rounds, of a sinking held-out score that halt"
    )
    gap_sigmas: float = Field(
        default=5.0, gt=0, description="sigmas that training may gain on a held-out score that does not improve"
    )
    pause_after: int = Field(default=5, ge=1, description="rounds in a row without enough scores that pause the run")
    max_extra: dict[str, float] = Field(
        default_factory=dict,
        description="by name, the largest moving average of a metric passed to observe(extra=...) that does not fire",
    )

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


class TimingConfig(Tree):
    """Waits. All are measured on each process's own clock."""

    round_timeout_s: float = Field(default=1800.0, gt=0, description="s without quorum until QuorumLost is raised")
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


class RunConfig(Tree):
    """The configuration of a run: every setting, validated; `run.json` holds it unchanged for the whole run."""

    entrypoint: str = Field(description='the training function, "package.module:function"')
    args: dict[str, JsonValue] = Field(default_factory=dict, description="JSON for the workload: `ctx.args`")
    heldout_items: list[JsonValue] = Field(
        default_factory=list,
        description="held-out items as JSON: `ctx.heldout_items`; large sets belong in the workload",
    )
    replicas: int = Field(default=4, ge=1, description="replicas, each one process on one device")
    rounds: int = Field(default=100, ge=1, description="outer steps of the run")
    sync_every: int = Field(default=30, ge=1, description="inner steps between outer steps (H)")
    fragments: int = Field(
        default=1, ge=1, description="parts of the model synchronised in turn, each once in sync_every steps"
    )
    fragment_sync_delay: int = Field(
        default=0,
        ge=0,
        description="inner steps taken while a fragment is published and the others' are fetched; hides transfers",
    )
    fragment_update_alpha: float = Field(
        default=0.0, ge=0, le=1, description="share of a replica's own values kept when a fragment is synchronised"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="seeds torch, numpy and random in every replica")
    quorum: Literal["all"] | int | None = Field(
        default=None,
        description='contributions a round needs, None = half of the replicas, rounded up; "all" is strictly '
        "synchronous: every round waits for every replica",
    )
    late: Literal["carry", "drop"] = Field(
        default="carry",
        description="work published after its round's commit: carried into its author's next contribution, or dropped",
    )
    weights: Literal["uniform", "tokens"] = Field(
        default="uniform",
        description="of contributions in the average: equal (DiLoCo), or by the tokens passed to observe()",
    )
    replica_state: Literal["round", "snapshot", "none"] | None = Field(
        default=None,
        description="how often replicas save optimizer and schedule, so that a restart goes on with them: every round "
        '(the default with quorum="all", for equal bits), beside snapshots (the default otherwise), or never',
    )
    codec: Literal["fp32", "bf16"] = Field(default="fp32", description="encoding of pseudo-gradients in the bucket")
    shard_mib: int = Field(default=64, ge=1, le=1024, description="MiB of fp32 input in one payload object")
    snapshot_every: int = Field(default=10, ge=1, description="rounds between snapshots; a leg's end has one always")
    track: str | None = Field(
        default=None,
        description="send each round's metrics to tensorboard, trackio or wandb too; a folder or project may follow, "
        'as in "tensorboard:runs/curves" and "wandb:my-project"',
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables of every replica; secrets go through secrets="
    )
    max_hours: float | None = Field(
        default=None, gt=0, description="hours of a leg after which the run is halted; it can be resumed"
    )
    max_cost_usd: float | None = Field(
        default=None,
        gt=0,
        description="known machine costs of a leg in US dollars after which the run is halted; it can be resumed",
    )
    strict: bool = Field(default=True, description="run.wait() raises CollapseStopError when the guard fires")
    outer: OuterConfig = Field(default_factory=OuterConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    timing: TimingConfig = Field(default_factory=TimingConfig)
    retry: RetryConfig = Field(default_factory=RetryConfig)
    retention: RetentionConfig = Field(default_factory=RetentionConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        try:
            check_entrypoint(self.entrypoint)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.sync_every % self.fragments:
            multiple = self.fragments * -(-self.sync_every // self.fragments)
            raise ConfigError(
                f"sync_every={self.sync_every} is not divisible by fragments={self.fragments}: each fragment moves "
                f"once in sync_every steps. Choose a multiple, such as {multiple}."
            )
        if self.fragment_sync_delay >= self.round_steps:
            raise ConfigError(
                f"fragment_sync_delay={self.fragment_sync_delay} must be below sync_every / fragments = "
                f"{self.round_steps}: a fragment is synchronised before the next one is published."
            )
        secret = [name for name in sorted(self.env) if looks_secret(name)]
        if secret:
            raise ConfigError(
                f"env holds {', '.join(secret)}, which look like secrets, and run.json can be read by everybody who "
                "reads the bucket. Hand them over with secrets= (--secret NAME)."
            )
        if self.track is not None and self.track.partition(":")[0] not in TRACKERS:
            raise ConfigError(unknown_name("tracker", self.track.partition(":")[0], TRACKERS))
        if isinstance(self.quorum, int) and not 1 <= self.quorum <= self.replicas:
            raise ConfigError(
                f'quorum={self.quorum}: choose 1..{self.replicas} (the number of replicas), or "all" to wait for each.'
            )
        return self

    @property
    def round_steps(self) -> int:
        """Inner steps of one round."""
        return self.sync_every // self.fragments

    @property
    def shard_numel(self) -> int:
        """Number of fp32 elements in a full shard."""
        return self.shard_mib * 2**20 // 4

    @property
    def saves_state(self) -> str:
        """How often replicas save their state: `replica_state`, or its default for this quorum."""
        return self.replica_state or ("round" if self.quorum == "all" else "snapshot")

    @property
    def contributions_needed(self) -> int:
        """The quorum as a number of contributions."""
        if self.quorum == "all":
            return self.replicas
        return -(-self.replicas // 2) if self.quorum is None else self.quorum


# -- the same settings as keyword arguments ----------------------------------------------------------------------------
# Generated from the models above, so that type checkers know the keywords of `launch`. A test keeps both equal.


class OuterSettings(TypedDict, total=False):
    """`OuterConfig` as a dict."""

    lr: float
    momentum: float
    nesterov: bool


class GuardSettings(TypedDict, total=False):
    """`GuardConfig` as a dict."""

    rule: Literal["heldout", "sequential"]
    min_steps: int
    decline_patience: int
    max_proxy_real_gap: float | None
    ema_alpha: float
    rise_eps: float
    kl_hard_stop: float
    threshold: float
    gap_sigmas: float
    pause_after: int
    max_extra: Mapping[str, float]


class TimingSettings(TypedDict, total=False):
    """`TimingConfig` as a dict."""

    round_timeout_s: float
    startup_timeout_s: float
    poll_s: float
    heartbeat_s: float


class RetrySettings(TypedDict, total=False):
    """`RetryConfig` as a dict."""

    max_errors: int
    max_preemptions: int
    max_timeouts: int
    max_no_capacity: int
    unavailable_for_s: float
    backoff_s: float
    hung_after_s: float


class RetentionSettings(TypedDict, total=False):
    """`RetentionConfig` as a dict."""

    payloads: Literal["all", "needed"]
    snapshots: int | None


class RunSettings(TypedDict, total=False):
    """Keyword arguments of `launch`: the fields of `RunConfig` except those that `launch` lists itself."""

    args: Mapping[str, Any]
    replicas: int
    rounds: int
    sync_every: int
    fragments: int
    fragment_sync_delay: int
    fragment_update_alpha: float
    seed: int
    quorum: Literal["all"] | int | None
    late: Literal["carry", "drop"]
    weights: Literal["uniform", "tokens"]
    replica_state: Literal["round", "snapshot", "none"] | None
    codec: Literal["fp32", "bf16"]
    shard_mib: int
    snapshot_every: int
    track: str | None
    env: Mapping[str, str]
    max_hours: float | None
    max_cost_usd: float | None
    strict: bool
    outer: OuterConfig | OuterSettings
    guard: GuardConfig | GuardSettings
    timing: TimingConfig | TimingSettings
    retry: RetryConfig | RetrySettings
    retention: RetentionConfig | RetentionSettings


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """The validated configuration.

    Raises `ConfigError`, which names the field, what is wrong with it and, for an unknown name, the nearest known one.
    """
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors())) from None


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return unknown_name("setting", ".".join(path), [".".join([*path[:-1], k]) for k in _fields(path[:-1])])
    if error["type"] == "missing":
        return f"setting {'.'.join(path)!r} is missing"
    if isinstance(cause := error.get("ctx", {}).get("error"), ConfigError):
        return str(cause)
    return f"setting {'.'.join(path)!r} = {error['input']!r}: {error['msg'].lower()}"


def _fields(path: list[str]) -> list[str]:
    node: type[BaseModel] = RunConfig
    for name in path:
        annotation = node.model_fields[name].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        node = annotation
    return sorted(node.model_fields)
