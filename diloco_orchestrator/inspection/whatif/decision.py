"""`OtherDecision`: a hypothetical decision of a round: without some contributions, or with other settings.

Pure: input is commits and configurations. `whatif.replay` computes the bases.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from pydantic import JsonValue

from diloco_orchestrator.config import OuterConfig, RunConfig, changed, config_of_leg, make_config
from diloco_orchestrator.errors import ConfigError, unknown_name
from diloco_orchestrator.protocol.records import Answer, Commit
from diloco_orchestrator.protocol.weights import shares_of


@dataclass(frozen=True)
class OtherDecision:
    """A hypothetical decision of a round: without some of its contributions, or with some settings changed."""

    without: tuple[int, ...] = ()  # replicas whose contributions are left out
    change: Mapping[str, JsonValue] = field(default_factory=dict)  # settings by name: {"outer.lr": 0.4}

    def config(self, config: RunConfig) -> RunConfig:
        """`config`, the configuration of a leg (start or resume to stop), with the changed settings of this decision.

        Raises `ConfigError` if they are invalid.
        """
        outer = {name: value for name, value in self.change.items() if name.startswith("outer.")}
        rest = {name: value for name, value in self.change.items() if name not in outer}
        made = config_of_leg(config, outer)
        return make_config(changed(made, rest)) if rest else made

    def averaged(self, commit: Commit, config: RunConfig) -> list[tuple[Answer, int]]:
        """The responses that a round would average under this hypothetical decision, each with its weight, in replica
        order.

        `config`: of the round's leg under this decision. Weights are computed as in every round (`protocol.weights`).
        """
        left = [answer for answer in commit.answers if answer.averaged and answer.replica_id not in self.without]
        weights = shares_of(commit.round, left, config, commit.norms, commit.fragment).weights
        return [(answer, weights[answer.replica_id]) for answer in left]

    def words(self) -> str:
        """The differences of this hypothetical decision from the real one, as text."""
        settings = [f"{name}={value}" for name, value in self.change.items()]
        replicas = ["without replica " + " and ".join(map(str, self.without))] if self.without else []
        return ", ".join([*replicas, *settings])


def other_decision(
    config: RunConfig,
    without: Collection[int] = (),
    outer: Mapping[str, Any] | None = None,
    **settings: JsonValue,
) -> OtherDecision:
    """The hypothetical decision of a round that these options describe, for a run of this configuration.

    `settings`: others of the run, such as `weights="tokens"`; None: unchanged. Raises `ConfigError` if nothing is
    changed, for a replica that the run does not have, and for an unknown name, with the nearest one.
    """
    change: dict[str, JsonValue] = {}
    for name, value in (outer or {}).items():
        if name not in OuterConfig.model_fields:
            raise ConfigError(unknown_name("setting of outer", name, OuterConfig.model_fields))
        change[f"outer.{name}"] = value
    for name, value in settings.items():
        kind = RunConfig.model_fields[name].annotation
        if value is None:
            continue
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(unknown_name(f"value of {name}", str(value), get_args(kind)))
        change[name] = value
    unknown = sorted(replica_id for replica_id in without if not 0 <= replica_id < config.most_replicas)
    if unknown:
        raise ConfigError(
            f"the run has no replica {unknown[0]}: its {config.most_replicas} replicas are 0 to "
            f"{config.most_replicas - 1}."
        )
    made = OtherDecision(tuple(sorted(set(without))), change)
    if not made.without and not made.change:
        raise ConfigError(
            "nothing is decided otherwise. Leave a replica out (without=[3], --without 3), or name another setting, "
            'such as outer={"lr": 0.4}, --outer-lr 0.4.'
        )
    made.config(config)  # refuses values
    return made
