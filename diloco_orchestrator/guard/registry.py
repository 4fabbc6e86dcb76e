"""Finds guard rules by name: the built-in ones, and those of other packages through entry points.

An installed rule's entry point has the same name as its class's `name`. Settings name built-in rules without version:
the newest is used.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from diloco_orchestrator.errors import ConfigError, RecordTooNew, as_config_errors, unknown_name
from diloco_orchestrator.guard.heldout import HeldOutRule
from diloco_orchestrator.guard.per_replica import is_first_form
from diloco_orchestrator.guard.rule import GuardRule, OffRule
from diloco_orchestrator.guard.sequential import SequentialGuard
from diloco_orchestrator.guard.sequential_v1 import SequentialV1
from diloco_orchestrator.guard.sequential_v2 import SequentialV2
from diloco_orchestrator.guard.sequential_v3 import SequentialV3
from diloco_orchestrator.guard.sequential_v4 import SequentialV4
from diloco_orchestrator.import_names import registered_class, registered_names

ENTRY_POINTS = "diloco_orchestrator.guard_rules"
_BY_SETTING: Mapping[str, type[GuardRule]] = {"sequential": SequentialGuard, "heldout": HeldOutRule, "off": OffRule}
# By setting: versions before.
_EARLIER: Mapping[str, list[type[GuardRule]]] = {"sequential": [SequentialV1, SequentialV2, SequentialV3, SequentialV4]}
_BY_NAME: Mapping[str, type[GuardRule]] = {
    kind.name: kind for kinds in ([*_BY_SETTING.values()], *_EARLIER.values()) for kind in kinds
}
# The rule of a state that names no rule: the first rule does not write its name, so that its commits keep their bytes.
UNNAMED = HeldOutRule


def rule_of(name: str) -> type[GuardRule]:
    """The rule that `GuardConfig.rule` names. Raises `ConfigError` if no package, or no single one, provides it."""
    try:
        return _BY_SETTING.get(name) or _installed(name)
    except LookupError:
        raise ConfigError(unknown_name("guard rule", name, (*_BY_SETTING, *registered_names(ENTRY_POINTS)))) from None


def rule_of_state(state: Mapping[str, Any] | None, setting: str, where: str) -> type[GuardRule]:
    """The guard rule that judges the next round: the one named in `state`; at the run's start that of `setting`.

    `where`: describes the state in errors. Raises `RecordTooNew` if the rule is not installed here.
    """
    name = setting if state is None else str(state.get("rule", UNNAMED.name))
    try:
        return (_BY_SETTING if state is None else _BY_NAME).get(name) or _installed(name)
    except (LookupError, ConfigError) as error:
        why = f": {error}" if isinstance(error, ConfigError) else "."
        raise RecordTooNew(
            f"{where} needs the guard rule {name!r}, which is not installed here{why} `pip install` the package that "
            f"registers it under {ENTRY_POINTS}, or the version of diloco-orchestrator that run.json names as "
            "package_version, or a later one, and repeat this command."
        ) from None


def first_state(written: Mapping[str, Any] | None, setting: str) -> dict[str, Any] | None:
    """The guard's state before its first round, if an earlier version of this package judged that round; else None.

    The result names the rule and the form of state that were used then, so that the round is derived again by the same
    arithmetic. `written`: the state that the round's commit holds. `setting`: the rule that the settings name.
    """
    state = written or {}
    earlier = state.get("rule") in [kind.name for kind in _EARLIER.get(setting, ())]
    local: dict[str, Any] = {"local": {}} if is_first_form(state.get("local")) else {}
    return {**({"rule": state["rule"]} if "rule" in state else {}), **local} if earlier or local else None


@cache  # the search of installed packages takes long beside a fold
def _installed(name: str) -> type[GuardRule]:
    """The guard rule that another package registers. Raises `LookupError` if none does, `ConfigError` if it is none."""
    with as_config_errors():
        return registered_class("guard rule", ENTRY_POINTS, name, GuardRule)  # type: ignore[type-abstract]
