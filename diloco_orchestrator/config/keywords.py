"""The settings as typed keyword arguments, so that type checkers know the keywords of `launch`.

`TypedDict`s cannot be derived from the models of `run_config` and `parts`; a test keeps both equal.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from diloco_orchestrator.config.parts import (
    GuardConfig,
    OnHaltConfig,
    OuterConfig,
    RetentionConfig,
    RetryConfig,
    TimingConfig,
)


class OuterSettings(TypedDict, total=False):
    """Settings of the outer optimizer (`OuterConfig`) as a dict, for `launch(outer=…)`."""

    lr: float
    momentum: float
    nesterov: bool


class GuardSettings(TypedDict, total=False):
    """Settings of the guard (`GuardConfig`) as a dict, for `launch(guard=…)`."""

    rule: str
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
    """Timeouts and intervals (`TimingConfig`) as a dict, for `launch(timing=…)`."""

    round_timeout_s: float
    startup_timeout_s: float
    poll_s: float
    heartbeat_s: float


class RetrySettings(TypedDict, total=False):
    """Budgets for relaunching replicas (`RetryConfig`) as a dict, for `launch(retry=…)`."""

    max_errors: int
    max_preemptions: int
    max_timeouts: int
    max_no_capacity: int
    unavailable_for_s: float
    backoff_s: float
    hung_after_s: float


class RetentionSettings(TypedDict, total=False):
    """Settings of what stays in the bucket (`RetentionConfig`) as a dict, for `launch(retention=…)`."""

    payloads: Literal["all", "needed"]
    snapshots: int | None


class OnHaltSettings(TypedDict, total=False):
    """Settings of automatic resume after a halt (`OnHaltConfig`) as a dict, for `launch(on_halt=…)`."""

    change: Mapping[str, Any]
    at_most: int


class RunSettings(TypedDict, total=False):
    """Keyword arguments of `launch`: the fields of `RunConfig` except those that `launch` lists itself."""

    args: Mapping[str, Any]
    replicas: int
    max_replicas: int | None
    deal: Literal["ids", "open"]
    ranks_per_replica: int | list[int]
    invited: list[int]
    rounds: int
    sync_every: int
    steps: Literal["equal", "equal_time"]
    fragments: int
    fragment_sync_delay: int
    fragment_update_alpha: float
    seed: int
    first_base: str | None
    quorum: Literal["all"] | int | None
    adapters: Literal["mean", "exact"]
    late: Literal["carry", "drop"]
    weights: Literal["uniform", "tokens"]
    aggregate: Literal["mean", "agreeing_mean", "trimmed_mean", "median", "contributors_mean"]
    clip: Literal["median_norm", "off"]
    clip_factor: float | None
    replica_state: Literal["round", "snapshot", "none"] | None
    codec: str
    path: Literal["gather", "scatter_reduce", "auto"]
    shard_mib: int
    snapshot_every: int
    track: str | None
    env: Mapping[str, str]
    max_hours: float | None
    max_cost_usd: float | None
    strict: bool
    on_halt: OnHaltConfig | OnHaltSettings | None
    outer: OuterConfig | OuterSettings | Literal["sparse"]
    guard: GuardConfig | GuardSettings | Literal["off"]
    timing: TimingConfig | TimingSettings
    retry: RetryConfig | RetrySettings
    retention: RetentionConfig | RetentionSettings
