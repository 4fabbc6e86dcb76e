"""`RunConfig`: the settings of a run and the rules between them; the configuration of one leg; validation errors.

A leg is the run from a start or resume to the next stop. Reads no environment and no file.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from diloco_orchestrator.codecs.table import CODECS, get_codec
from diloco_orchestrator.config.parts import (
    SPARSE,
    GuardConfig,
    OnHaltConfig,
    OuterConfig,
    RetentionConfig,
    RetryConfig,
    TimingConfig,
    Tree,
)
from diloco_orchestrator.config.schedule import SyncSchedule
from diloco_orchestrator.errors import ConfigError, as_config_errors, unknown_name
from diloco_orchestrator.executors.names import check_entrypoint
from diloco_orchestrator.redaction import has_token_shape, looks_secret, redact, secret_settings

TRACKERS = ("tensorboard", "trackio", "wandb")
_FEWEST_TRIMMED = 4  # replicas of a run whose aggregate leaves some of the contributions or values out
COORDINATE_WISE = ("trimmed_mean", "median")  # aggregates in which each contribution counts once, whatever its weight
NEED_WHOLE_MODEL = ("fragment_update_alpha", "adapters")  # settings whose other values need it in one process

# Settings that are refused together: a setting, its values (none: all but the default), settings that must have their
# default beside these, and why.
_NOT_TOGETHER: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("adapters", (), ("fragments", "fragment_update_alpha"), "its factors move wholly and in the same round"),
    ("adapters", (), ("aggregate",), "the mean of products is the only average of adapters as products"),
    ("path", ("scatter_reduce",), ("adapters",), "the mean of products needs every payload"),
    ("ranks_per_replica", (), NEED_WHOLE_MODEL, "it needs the whole model in one process"),
    ("deal", (), ("fragment_sync_delay",), "steps are taken before the commit that deals them"),
    ("deal", (), ("fragment_update_alpha",), "a restarted replica goes back a round"),
    ("deal", (), ("ranks_per_replica",), "each rank iterates over data of its own"),
    ("aggregate", COORDINATE_WISE, ("steps", "weights"), "each contribution counts once there, whatever its tokens"),
)


class RunConfig(Tree):
    """The configuration of a run: every setting, validated; `run.json` holds it unchanged for the whole run."""

    entrypoint: str = Field(description='the training function, "package.module:function"')
    args: dict[str, JsonValue] = Field(default_factory=dict, description="JSON for the workload: `ctx.args`")
    heldout_items: list[JsonValue] = Field(
        default_factory=list,
        description="held-out items as JSON: `ctx.heldout_items`; large sets belong in the workload",
    )
    replicas: int = Field(
        default=4,
        ge=1,
        description="replicas, each one process on one device; 4..16: at least 4, and max_replicas=16",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="the most replicas to which the run can be scaled while it trains; data and held-out items are "
        "dealt over so many; None = replicas, for the whole run",
    )
    deal: Literal["ids", "open"] = Field(
        default="ids",
        description="how `replica.batches(data)` is dealt: the training function gives each id its part; or "
        '"open": it gives all of a finite data set, which is dealt round by round over the replicas that train, so '
        "that a pass reads all of it while ids are vacant",
    )
    ranks_per_replica: int | list[int] = Field(
        default=1,
        description="processes (ranks) of a replica, on one machine unless the executor has ranks_per_machine, which "
        "train one model with DDP or fully_shard; or the number for each replica, as in 8,4,1",
    )
    invited: list[int] = Field(
        default=[],
        description="ids of replicas that people with a link run (`diloco invite`), as in 4,5: they contribute, and "
        "neither commit, nor average for others, nor write the first base or snapshots; needs a signed run",
    )
    rounds: int = Field(default=100, ge=1, description="outer steps of the run")
    sync_every: int = Field(default=30, ge=1, description="inner steps between outer steps (H)")
    steps: Literal["equal", "equal_time"] = Field(
        default="equal",
        description="inner steps of a replica in a round: sync_every, fewer only where it would be late; or, where "
        'machines differ, "equal_time": as many as fit the time of sync_every on the fastest, weighted by tokens',
    )
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
    first_base: str | None = Field(
        default=None,
        pattern=r"^b3:[0-9a-f]{64}$",
        description="digest of the only base that the run may begin with: `base_digest` in start.json of an earlier "
        "run of the same model, seed and settings; None = the one that most replicas begin with",
    )
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
    aggregate: Literal["mean", "agreeing_mean", "trimmed_mean", "median", "contributors_mean"] = Field(
        default="mean",
        description="how contributions become one pseudo-gradient: their weighted mean; or, from 4 replicas on, that "
        "of the three quarters whose direction agrees most with the others', or of each coordinate the mean without "
        "the lowest and highest quarter, or the median; or, for sparse codecs, of each coordinate the weighted mean "
        "over those that sent it",
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
        '(the default with quorum="all", for equal bits), beside snapshots and at the planned end (the default '
        "otherwise), or never",
    )
    codec: str = Field(default="fp32", description=f"encoding of pseudo-gradients in the bucket: {', '.join(CODECS)}")
    path: Literal["gather", "scatter_reduce", "auto"] = Field(
        default="gather",
        description="who reads what in a round: gather: every replica reads all payloads; scatter_reduce: about three, "
        "and averages that two others agree on; auto: what takes less time over the link that replicas measure",
    )
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
        default=None, gt=0, description="hours since its launch or resume after which the run is halted"
    )
    max_cost_usd: float | None = Field(
        default=None,
        gt=0,
        description="known machine costs since its launch or resume in US dollars: the run is halted where they do not "
        "pay for another round; it can be resumed. Requests, traffic and storage are not counted",
    )
    strict: bool = Field(default=True, description="run.wait() raises CollapseStopError when the guard fires")
    on_halt: OnHaltConfig | None = Field(
        default=None,
        description="when the guard halts the run: begin the next leg from the best base, with changed settings, as in "
        '{"change": {"outer.lr": 0.5}, "at_most": 2}; None = stop',
    )
    outer: OuterConfig = Field(default_factory=OuterConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    timing: TimingConfig = Field(default_factory=TimingConfig)
    retry: RetryConfig = Field(default_factory=RetryConfig)
    retention: RetentionConfig = Field(default_factory=RetentionConfig)

    @field_validator("ranks_per_replica", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return value.strip("[]() ").split(",") if isinstance(value, str) and "," in value else value

    @field_validator("invited", mode="before")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        return value.strip("[]() ").split(",") if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _aggregate_with_strangers(cls, values: Any) -> Any:
        """Leave out the quarter that agrees least, unless `aggregate` is given, where strangers contribute."""
        is_of_strangers = isinstance(values, Mapping) and values.get("invited") and values.get("outer") != "sparse"
        return {"aggregate": "agreeing_mean", **values} if is_of_strangers else values

    @model_validator(mode="before")
    @classmethod
    def _weights_of_unequal_work(cls, values: Any) -> Any:
        """Set `weights` to "tokens", unless it is given, where replicas take unequal steps or have unequal ranks."""
        if not isinstance(values, Mapping):
            return values
        ranks = cls._listed(values.get("ranks_per_replica"))
        of_unequal_size = isinstance(ranks, list | tuple) and len({str(each).strip() for each in ranks}) > 1
        by_tokens = of_unequal_size and values.get("aggregate") not in COORDINATE_WISE
        return {"weights": "tokens", **values} if by_tokens or values.get("steps") == "equal_time" else values

    @model_validator(mode="before")
    @classmethod
    def _outer_by_name(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(named := values.get("outer"), str):
            return values
        if named != "sparse":
            raise ConfigError(unknown_name("outer optimizer", named, ("sparse",)))
        return {"aggregate": "contributors_mean", **values, "outer": SPARSE}

    @field_validator("on_halt", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ConfigError(f'on_halt={value!r} is not JSON ({error}): write {{"at_most": 1}}.') from None

    @model_validator(mode="before")
    @classmethod
    def _range_of_replicas(cls, values: Any) -> Any:
        text = values.get("replicas") if isinstance(values, Mapping) else None
        if not isinstance(text, str) or ".." not in text:
            return values
        least, _, most = text.partition("..")
        if values.get("max_replicas") not in (None, most):
            raise ConfigError(f"replicas={text!r} with max_replicas={values['max_replicas']}: leave out one of them.")
        return {**values, "replicas": least, "max_replicas": most}

    @model_serializer(mode="wrap")
    def _without_its_later_field(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Earlier versions, which do not know these, read the run.json of a run that does not use them.
        unused: dict[str, Any] = {"max_replicas": None, "ranks_per_replica": 1, "path": "gather", "deal": "ids"}
        unused["invited"] = []
        return {name: value for name, value in dump(self).items() if name not in unused or value != unused[name]}

    @field_validator("guard", mode="before")
    @classmethod
    def _guard_by_name(cls, value: Any) -> Any:
        return {"rule": value} if isinstance(value, str) else value  # guard="off"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.on_halt is not None:
            config_of_leg(self.model_copy(update={"on_halt": None}), self.on_halt.change)
        with as_config_errors():
            check_entrypoint(self.entrypoint)
        get_codec(self.codec)  # raises `ConfigError` for one that is no row of its table
        check_track(self.track)
        _ = self.schedule  # raises `ConfigError` for steps that do not fit
        if reason := next(_why_refused(self), ""):
            raise ConfigError(reason)
        return self

    def ranks_of(self, replica_id: int) -> int:
        """The number of ranks (processes) of a replica."""
        given = self.ranks_per_replica
        return given[replica_id] if isinstance(given, list) else given

    @property
    def in_ranks(self) -> bool:
        """Whether any replica is of several ranks. Then torch's process group exists in all, also in one of one rank,
        so that one training function shards or wraps its model in each.
        """
        return any(self.ranks_of(replica_id) > 1 for replica_id in range(self.most_replicas))

    @property
    def most_replicas(self) -> int:
        """The number of replica ids of the run: `max_replicas`, or `replicas` in a run of a fixed number of replicas.

        Ids are 0 to `most_replicas` - 1. Data and held-out items are dealt over all of them.
        """
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def schedule(self) -> SyncSchedule:
        """The inner steps at which fragments are published and synchronised."""
        return SyncSchedule(self.sync_every, self.fragments, self.fragment_sync_delay, self.fragment_update_alpha)

    @property
    def round_steps(self) -> int:
        """Inner steps of one round."""
        return self.schedule.round_steps

    @property
    def shard_numel(self) -> int:
        """Number of fp32 elements in a full shard."""
        return self.shard_mib * 2**20 // 4

    @property
    def saves_state(self) -> str:
        """The interval at which replicas save their state: `replica_state`, or its default for this quorum."""
        return self.replica_state or ("round" if self.quorum == "all" else "snapshot")

    @property
    def clips_above(self) -> float:
        """The multiple of the median norm above which norms are clipped: `clip_factor`, or the aggregate's default."""
        return self.clip_factor or (1.25 if self.aggregate == "agreeing_mean" else 2.0)

    @property
    def clips_by_history(self) -> bool:
        """Whether a contribution's norm is limited by the norms of earlier rounds.

        It is not with a fixed `clip_factor`, nor with "agreeing_mean", which leaves out the least agreeing quarter
        instead.
        """
        return self.clip != "off" and self.clip_factor is None and self.aggregate != "agreeing_mean"

    @property
    def why_by_tokens(self) -> str:
        """The reason for `weights="tokens"` where replicas have different numbers of ranks; empty elsewhere."""
        ranks = self.ranks_per_replica
        if self.weights != "tokens" or not isinstance(ranks, list) or len(set(ranks)) == 1:
            return ""
        return (
            f'contributions weigh by the tokens passed to observe() (weights="tokens"): replicas of {ranks} ranks '
            'train on different amounts of data in equally many steps. weights="uniform" lets them count alike'
        )

    @property
    def too_few_to_fold(self) -> str:
        """Reason why most alarms of the guard cannot fire in a run of so few rounds; empty if they can."""
        if self.guard.rule not in ("sequential", "heldout") or self.rounds >= self.guard.min_steps:
            return ""
        return (
            f"{self.rounds} rounds are fewer than the guard's min_steps={self.guard.min_steps} folds: the kill-switch "
            "fires in this run only on a fall, an early collapse, a new low or metrics that are not finite"
        )

    @property
    def launched(self) -> set[int]:
        """The ids of the replicas that the run begins with and that are no strangers' (`invited`)."""
        return set(range(self.replicas)).difference(self.invited)

    @property
    def contributions_needed(self) -> int:
        """The quorum as a number of contributions."""
        if self.quorum == "all":
            return self.replicas
        return -(-self.replicas // 2) if self.quorum is None else self.quorum


def _why_refused(config: RunConfig) -> Iterator[str]:
    """Reasons why settings are refused together, each with a remedy; none for settings that fit."""
    for name, values, others, why in _NOT_TOGETHER:
        for other in others if _is_unusual(config, name, values) else ():
            if _is_unusual(config, other):
                found = " with ".join(_said(each, getattr(config, each)) for each in (name, other))
                usual = ", or ".join(_said(each, RunConfig.model_fields[each].default) for each in (other, name))
                yield f"{found}: {why}. Set {usual}."
    yield from _why_not_so_many(config)
    if secret := [name for name in sorted(config.env) if looks_secret(name)]:
        yield (
            f"env holds {', '.join(secret)}, which look like secrets, and run.json can be read by everybody who "
            "reads the bucket. Hand them over with secrets= (--secret NAME)."
        )


def _is_unusual(config: RunConfig, name: str, values: tuple[str, ...] = ()) -> bool:
    """Whether a setting has one of these values; without `values`, whether it has another value than its default."""
    value = getattr(config, name)
    usual = RunConfig.model_fields[name].default
    return value in values if values else any(each != usual for each in (value if isinstance(value, list) else [value]))


def _said(name: str, value: Any) -> str:
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"


def _why_not_so_many(config: RunConfig) -> Iterator[str]:
    """Reasons why numbers of replicas, ranks and strangers, or a quorum, do not fit the rest of the settings."""
    if config.replicas > config.most_replicas:
        yield (
            f"max_replicas={config.most_replicas} is below replicas={config.replicas}, of which the run has at least "
            "so many. Give the smaller number first, as in replicas=4, max_replicas=16 (--replicas 4..16)."
        )
    given = config.ranks_per_replica
    if isinstance(given, list) and len(given) != config.most_replicas:
        yield (
            f"ranks_per_replica={given} holds {len(given)} numbers for {config.most_replicas} replicas: give one "
            "for each, or one for all."
        )
    if min(given if isinstance(given, list) else [given]) < 1:
        yield f"ranks_per_replica={given}: a replica has at least one rank."
    if any(not 0 <= each < config.most_replicas for each in config.invited):
        yield (
            f"invited={config.invited}: the run has replicas 0 to {config.most_replicas - 1}. Name some of these, or "
            "launch it with more."
        )
    if config.invited and len(config.launched) < 2:
        yield (
            f"invited={config.invited} leaves {len(config.launched)} of {config.replicas} replicas that are not: the "
            "others commit the rounds and confirm each other's bases. Two or more must not be invited."
        )
    if config.aggregate not in ("mean", "contributors_mean") and config.replicas < _FEWEST_TRIMMED:
        yield (
            f'aggregate="{config.aggregate}" with replicas={config.replicas}: of fewer than {_FEWEST_TRIMMED} values '
            f'too few are left once the outer ones are gone. Take {_FEWEST_TRIMMED} replicas or more, or "mean".'
        )
    if config.steps == "equal_time" and config.quorum == "all":
        yield (
            'steps="equal_time" with quorum="all": how many steps fit a round depends on the machines\' speed, and '
            '"all" stands for runs that end with equal bits whatever happens. Set quorum='
            f'{config.replicas}, which waits for every replica too, or steps="equal".'
        )
    if config.most_replicas > config.replicas and config.quorum == "all":
        yield (
            f'quorum="all" with replicas={config.replicas} and max_replicas={config.most_replicas}: every round would '
            "wait for replicas that nobody has launched. Leave out max_replicas, or give a number as quorum."
        )
    if isinstance(config.quorum, int) and not 1 <= config.quorum <= config.replicas:
        yield (
            f'quorum={config.quorum}: choose 1..{config.replicas} (the number of replicas), or "all" to wait for each.'
        )


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """The validated configuration from nested dicts.

    Raises `ConfigError` naming the field, its error and the nearest known name.
    """
    try:
        config = RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors())) from None
    _check_no_credentials(config)
    return config


def _check_no_credentials(config: RunConfig) -> None:
    """Raise `ConfigError` for a credential among the settings of a new run; existing runs can still be read."""
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
    """The configuration of a leg (start or resume to stop) that changes some settings of run.json.

    `change`: setting -> value, {"outer.lr": 0.5}. A leg may change its outer optimizer, the numbers of ranks, values
    of `args` that the run has, in a run with `max_replicas` the number of `replicas`, and with `guard` the guard's
    settings. Raises `ConfigError` naming the nearest of these, or the error in a value.
    """
    names = [f"outer.{name}" for name in OuterConfig.model_fields] + [f"args.{name}" for name in sorted(config.args)]
    names += [f"guard.{name}" for name in GuardConfig.model_fields] if guard else []
    names += ["ranks_per_replica", *(["replicas"] if config.max_replicas is not None else [])]
    for name in change:
        if name.startswith("guard.") and not guard:
            raise ConfigError(
                f"{name} is not changed without somebody who answers for it: a guard that loosens itself guards "
                'nothing. Use resume(override_guard="why", guard={…}) or diloco resume --override-guard WHY.'
            )
        if name == "replicas" and name not in names:
            raise ConfigError(
                f"replicas={change[name]}: the run was launched with {config.replicas} replicas, no max_replicas: its "
                "data and held-out items are dealt over these. Fewer take part by themselves while quorum is met; "
                "for more, begin a new run from the model that `diloco pull` copies."
            )
        if name.startswith("args.") and not config.args:
            raise ConfigError(f"{name}: the run was launched without arguments, and a leg changes no others.")
        if name not in names:
            near = [each for each in names if each.startswith("args.") is name.startswith("args.")]
            raise ConfigError(unknown_name("setting that a leg may change", name, near))
    made = make_config(changed(config, change))
    if bool(made.outer.momentum) != bool(config.outer.momentum):
        raise ConfigError(
            f"outer.momentum={made.outer.momentum:g}: the run has outer.momentum={config.outer.momentum:g}, and a leg "
            "can switch momentum neither on nor off, because snapshots hold its buffers. Choose another value, or "
            "start a new run."
        )
    return made


def changed(config: BaseModel, change: Mapping[str, JsonValue]) -> dict[str, Any]:
    """A configuration as nested dicts, where the values of `change`, {"outer.lr": 0.5}, replace its own.

    The result is not validated. A name without a parent in the configuration is kept, so that validation refuses it.
    """
    tree = config.model_dump(mode="json")
    for path, value in change.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return unknown_name("setting", ".".join(path), [".".join([*path[:-1], k]) for k in _fields(path[:-1])])
    if error["type"] == "missing":
        return f"setting {'.'.join(path)!r} is missing"
    if isinstance(cause := error.get("ctx", {}).get("error"), ConfigError):
        return str(cause)
    remedy = ""
    if error["type"] == "invalid-json-value" or path == ["args"]:
        remedy = f" ({type(error['input']).__name__}). Pass numbers, texts, lists and dicts: of a dataclass, asdict(it)"
    return f"setting {'.'.join(path)!r} = {error['input']!r}: {error['msg'].lower()}{remedy}"


def _fields(path: list[str]) -> list[str]:
    node: type[BaseModel] = RunConfig
    for name in path:
        declared = node.model_fields[name].annotation
        annotation = next((kind for kind in get_args(declared) if kind is not type(None)), declared)  # X | None
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        node = annotation
    return sorted(node.model_fields)
