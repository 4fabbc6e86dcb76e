"""Finds the guard's rules by their names: ours, and those of other packages by entry points.

An installed rule has one name: that of its entry point, which is also its class's `name`. Ours are named in settings
without their version.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from diloco_orchestrator.config import GUARD_RULE_ENTRY_POINTS, known_guard_rules
from diloco_orchestrator.errors import ConfigError, RecordTooNew, unknown_name
from diloco_orchestrator.guard.heldout import HeldOutRule
from diloco_orchestrator.guard.rule import GuardRule, OffRule
from diloco_orchestrator.guard.sequential import SequentialGuard

_BY_SETTING: Mapping[str, type[GuardRule]] = {"sequential": SequentialGuard, "heldout": HeldOutRule, "off": OffRule}
_BY_NAME: Mapping[str, type[GuardRule]] = {kind.name: kind for kind in _BY_SETTING.values()}
# The rule of a state that names no rule: the first rule does not write its name, so that its commits keep their bytes.
UNNAMED = HeldOutRule


def rule_of(name: str) -> type[GuardRule]:
    """The rule that `GuardConfig.rule` names. Raises `ConfigError` if it is not installed, or not as its package says."""
    ours = _BY_SETTING.get(name)
    return ours or _installed(name, tuple(known_guard_rules()))


def rule_of_state(state: Mapping[str, Any] | None, setting: str, where: str) -> type[GuardRule]:
    """The rule that judges the round after `state`: the one that it names, without a state that of the setting.

    `where`: the state, for errors. Raises `RecordTooNew` if the rule is not installed here.
    """
    name = setting if state is None else state.get("rule", UNNAMED.name)
    try:
        if state is None:
            return rule_of(name)
        ours = _BY_NAME.get(str(name))
        return ours or _installed(str(name), (*_BY_NAME, *known_guard_rules()))
    except ConfigError as error:
        raise RecordTooNew(
            f"{where} needs a rule that is not installed here ({error}). Install the package that has it, or use the "
            "version of diloco-orchestrator that run.json names as package_version, or a later one."
        ) from None


@cache
def _installed(name: str, known: tuple[str, ...]) -> type[GuardRule]:
    """The rule of another package. Raises `ConfigError` unless exactly one registers it, as a `GuardRule` of this name.

    `known`: names for the error.
    """
    found = list(entry_points(group=GUARD_RULE_ENTRY_POINTS, name=name))
    if not found:
        raise ConfigError(unknown_name("guard rule", name, known))
    if len(found) > 1:
        raise ConfigError(
            f"guard rule {name!r} is registered by {' and '.join(sorted(map(_package_of, found)))}, so that nobody can "
            "tell which one judges. Uninstall all but one."
        )
    where = f"guard rule {name!r} of package {_package_of(found[0])} ({found[0].value})"
    try:
        kind = found[0].load()
    except Exception as error:  # the other package's code runs here, and may raise anything
        words = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where} does not load: {words}. Repair that package, or name another rule.") from error
    if not isinstance(kind, type) or not issubclass(kind, GuardRule):
        raise ConfigError(f"{where} is no class derived from `diloco_orchestrator.guard.GuardRule`. Repair that package.")
    if getattr(kind, "name", None) != name:
        raise ConfigError(
            f"{where} calls itself {getattr(kind, 'name', None)!r}, and that is what commits record. The package has to "
            "register it under its own name."
        )
    return kind


def _package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
