"""The run's configuration: one frozen tree with default, unit and reason beside each field.

Built from Python keywords or command-line options, frozen into `run.json`. Reads no environment and no file.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, Self, TypedDict, get_args

from pydantic import BaseModel, Field, JsonValue, ValidationError, field_validator, model_validator

from diloco_orchestrator.codecs.table import CODECS, get_codec
from diloco_orchestrator.config_guard import GUARD_RULES as GUARD_RULES
from diloco_orchestrator.config_guard import GuardConfig as GuardConfig
from diloco_orchestrator.config_parts import OnHaltConfig as OnHaltConfig
from diloco_orchestrator.config_parts import OuterConfig as OuterConfig
from diloco_orchestrator.config_parts import RetentionConfig as RetentionConfig
from diloco_orchestrator.config_parts import RetryConfig as RetryConfig
from diloco_orchestrator.config_parts import TimingConfig as TimingConfig
from diloco_orchestrator.config_parts import Tree as Tree
from diloco_orchestrator.config_parts import changed
from diloco_orchestrator.errors import ConfigError, unknown_name
from diloco_orchestrator.executors.names import check_entrypoint
from diloco_orchestrator.redaction import has_token_shape, looks_secret, redact, secret_settings

TRACKERS = ("tensorboard", "trackio", "wandb")
_FEWEST_TRIMMED = 4  # replicas of a run whose aggregate leaves some of the contributions or values out
COORDINATE_WISE = ("trimmed_mean", "median")  # aggregates in which each contribution counts once, whatever its weight


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
    adapters: Literal["mean", "exact"] = Field(
        default="mean",
        description='how LoRA adapters are averaged: "mean" of each factor; or "exact", the mean of their products, '
        "for which replicas hold one float32 matrix of the size of each adapted weight, two with outer momentum",
    )
    late: Literal["carry", "drop"] = Field(
        default="carry",
        description="work published after its round's commit: carried into its author's next contribution, or dropped",
    )
    weights: Literal["uniform", "tokens"] = Field(
        default="uniform",
        description="of contributions in the average: equal (DiLoCo), or by the tokens passed to observe()",
    )
    aggregate: Literal["mean", "agreeing_mean", "trimmed_mean", "median"] = Field(
        default="mean",
        description="how contributions become one pseudo-gradient: their weighted mean; or, from 4 replicas on, that "
        "of the three quarters whose direction agrees most with the others', or of each coordinate the mean without "
        "the lowest and highest quarter, or the median",
    )
    clip: Literal["median_norm", "off"] = Field(
        default="median_norm",
        description="a contribution whose norm is far above the median of its round counts as much as one of that "
        "median norm; or every contribution counts as it is",
    )
    clip_factor: float | None = Field(
        default=None,
        gt=1,
        description="above how many times the median norm, the same in every round; by default what is far for the "
        'recent rounds of the run, at least 2; with "agreeing_mean" 1.25',
    )
    replica_state: Literal["round", "snapshot", "none"] | None = Field(
        default=None,
        description="how often replicas save optimizer and schedule, so that a restart goes on with them: every round "
        '(the default with quorum="all", for equal bits), beside snapshots (the default otherwise), or never',
    )
    codec: str = Field(default="fp32", description=f"encoding of pseudo-gradients in the bucket: {', '.join(CODECS)}")
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
        description="known machine costs of a leg in US dollars after which the run is halted; it can be resumed. "
        "Requests, traffic and storage are not counted",
    )
    strict: bool = Field(default=True, description="run.wait() raises CollapseStopError when the guard fires")
    on_halt: OnHaltConfig | None = Field(
        default=None,
        description="when the guard halts the run: begin the next leg from the best base, with changed settings, as in "
        '{"resume": "best", "change": {"outer.lr": 0.5}, "at_most": 2}; None = stop',
    )
    outer: OuterConfig = Field(default_factory=OuterConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    timing: TimingConfig = Field(default_factory=TimingConfig)
    retry: RetryConfig = Field(default_factory=RetryConfig)
    retention: RetentionConfig = Field(default_factory=RetentionConfig)

    @field_validator("on_halt", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ConfigError(f'on_halt={value!r} is not JSON ({error}): write {{"resume": "best"}}.') from None

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        return get_codec(value).name

    @field_validator("guard", mode="before")
    @classmethod
    def _guard_by_name(cls, value: Any) -> Any:
        return {"rule": value} if isinstance(value, str) else value  # guard="off"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.on_halt is not None:
            config_of_leg(self.model_copy(update={"on_halt": None}), self.on_halt.change)
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
        if self.adapters == "exact" and (self.fragments > 1 or self.fragment_update_alpha):
            raise ConfigError(
                f'adapters="exact" with fragments={self.fragments} and fragment_update_alpha='
                f"{self.fragment_update_alpha:g}: both factors of a product must move wholly and in the same round. "
                'Set fragments=1 and fragment_update_alpha=0, or adapters="mean".'
            )
        self._check_aggregate()
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
        check_track(self.track)
        if isinstance(self.quorum, int) and not 1 <= self.quorum <= self.replicas:
            raise ConfigError(
                f'quorum={self.quorum}: choose 1..{self.replicas} (the number of replicas), or "all" to wait for each.'
            )
        return self

    def _check_aggregate(self) -> None:
        """Raise `ConfigError` for an aggregate other than the mean that this run cannot have."""
        if self.aggregate == "mean":
            return
        if self.replicas < _FEWEST_TRIMMED:
            raise ConfigError(
                f'aggregate="{self.aggregate}" with replicas={self.replicas}: of fewer than {_FEWEST_TRIMMED} values '
                f'too few are left once the outer ones are gone. Take {_FEWEST_TRIMMED} replicas or more, or "mean".'
            )
        if self.weights == "tokens" and self.aggregate in COORDINATE_WISE:
            raise ConfigError(
                f'aggregate="{self.aggregate}" with weights="tokens": each contribution counts once there, whatever '
                'its tokens. Set weights="uniform", or aggregate="mean".'
            )
        if self.adapters == "exact":
            raise ConfigError(
                f'aggregate="{self.aggregate}" with adapters="exact", which is a mean of products. Set '
                'adapters="mean", or aggregate="mean".'
            )

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
    def clips_above(self) -> float:
        """Above how many times the median norm is clipped: `clip_factor`, or the least for this aggregate."""
        return self.clip_factor or (1.25 if self.aggregate == "agreeing_mean" else 2.0)

    @property
    def clips_by_history(self) -> bool:
        """Whether the clip's limit follows from the norms of the rounds before.

        Where directions are judged it is narrow on purpose: a quarter is left out of every round anyway.
        """
        return self.clip != "off" and self.clip_factor is None and self.aggregate != "agreeing_mean"

    @property
    def too_few_to_fold(self) -> str:
        """Why most alarms of the kill-switch cannot fire in a run of so few rounds; empty if they can."""
        if self.guard.rule == "off" or self.rounds >= self.guard.min_steps:
            return ""
        return (
            f"{self.rounds} rounds are fewer than the guard's min_steps={self.guard.min_steps} folds: the kill-switch "
            "fires in this run only on a sudden fall, an early collapse, a new low or metrics that are not finite"
        )

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

    rule: Literal["sequential", "heldout", "off"]
    min_steps: int
    kl_hard_stop: float
    threshold: float
    gap_sigmas: float
    pause_after: int
    vault_sigmas: float
    notice_drop: float | None
    item_sd: float
    decline_patience: int
    max_proxy_real_gap: float | None
    ema_alpha: float
    rise_eps: float
    per_replica: bool
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


class OnHaltSettings(TypedDict, total=False):
    """`OnHaltConfig` as a dict."""

    resume: Literal["best"]
    change: Mapping[str, Any]
    at_most: int


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
    adapters: Literal["mean", "exact"]
    late: Literal["carry", "drop"]
    weights: Literal["uniform", "tokens"]
    aggregate: Literal["mean", "agreeing_mean", "trimmed_mean", "median"]
    clip: Literal["median_norm", "off"]
    clip_factor: float | None
    replica_state: Literal["round", "snapshot", "none"] | None
    codec: str
    shard_mib: int
    snapshot_every: int
    track: str | None
    env: Mapping[str, str]
    max_hours: float | None
    max_cost_usd: float | None
    strict: bool
    on_halt: OnHaltConfig | OnHaltSettings | None
    outer: OuterConfig | OuterSettings
    guard: GuardConfig | GuardSettings | Literal["off"]
    timing: TimingConfig | TimingSettings
    retry: RetryConfig | RetrySettings
    retention: RetentionConfig | RetentionSettings


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """The validated configuration.

    Raises `ConfigError`, which names the field, what is wrong with it and, for an unknown name, the nearest known one.
    """
    try:
        config = RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors())) from None
    _check_no_credentials(config)
    return config


def _check_no_credentials(config: RunConfig) -> None:
    """Raise `ConfigError` for a credential among settings. A run of others that holds one can still be read."""
    by_shape = [f"env.{name}" for name, value in sorted(config.env.items()) if has_token_shape(value)]
    names = ["env.<a name that is a credential>" for name in config.env if has_token_shape(name)]
    track = ["track"] if has_token_shape(config.track or "") else []
    found = names or [*by_shape, *secret_settings(config.args, "args"), *track]
    if found:
        name = re.sub(r"\W+", "_", found[0].partition(".")[2]).strip("_").upper() or "API_KEY"
        raise ConfigError(
            f"{', '.join(found)} hold what looks like a credential, and run.json can be read by everybody who reads "
            f'the bucket. Hand it over as a secret (secrets={{"{name}": …}}, --secret {name}), and read '
            f'os.environ["{name}"] in the training function.'
        )


def check_track(track: str | None) -> None:
    """Raise `ConfigError` for a tracker that is not known, with the nearest name."""
    if track is not None and track.partition(":")[0] not in TRACKERS:
        raise ConfigError(unknown_name("tracker", redact(track.partition(":")[0], {}), TRACKERS))


def config_of_leg(config: RunConfig, change: Mapping[str, JsonValue], *, guard: bool = False) -> RunConfig:
    """The configuration of a leg in which some settings have other values than in run.json.

    `change`: by name, {"outer.lr": 0.5}. A leg may change its outer optimizer, values of `args` that the run has, and
    with `guard` the guard's settings. Raises `ConfigError` naming the nearest of these, or what is wrong with a value.
    """
    names = [f"outer.{name}" for name in OuterConfig.model_fields] + [f"args.{name}" for name in sorted(config.args)]
    names += [f"guard.{name}" for name in GuardConfig.model_fields] if guard else []
    for name in change:
        if name.startswith("guard.") and not guard:
            raise ConfigError(
                f"{name} is not changed without somebody who answers for it: a guard that loosens itself guards "
                'nothing. Use resume(override_guard="why", guard={…}) or diloco resume --override-guard WHY.'
            )
        if name not in names:
            raise ConfigError(unknown_name("setting that a leg may change", name, names))
    made = make_config(changed(config, change))
    if bool(made.outer.momentum) != bool(config.outer.momentum):
        raise ConfigError(
            f"outer.momentum={made.outer.momentum:g}: the run has outer.momentum={config.outer.momentum:g}, and a leg "
            "can switch momentum neither on nor off, because snapshots hold its buffers. Choose another value, or "
            "start a new run."
        )
    return made


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
        declared = node.model_fields[name].annotation
        annotation = next((kind for kind in get_args(declared) if kind is not type(None)), declared)  # X | None
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        node = annotation
    return sorted(node.model_fields)
