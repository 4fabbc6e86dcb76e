"""Executors by the names that a command line uses, and their options as their constructors declare them."""

import importlib
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from executors.contract import ServerlessExecutor
from executors.mixed import MixedExecutor
from executors.names import unknown_name

HOMES = {
    "eks": ("executors.eks_jobs", "EKSExecutor"),
    "hf-jobs": ("executors.hf_jobs", "HFJobsExecutor"),
    "kubernetes": ("executors.kubernetes_jobs", "KubernetesExecutor"),
    "local": ("executors.local_process", "LocalProcessExecutor"),
    "modal": ("executors.modal_sandboxes", "ModalExecutor"),
}
_CREDENTIALS = {"token"}  # a command line is seen by everybody on the machine


@dataclass(frozen=True)
class Option:
    """One constructor argument that text can express."""

    name: str
    kind: type  # str, int, float, bool, or tuple for several strings
    default: Any
    help: str


def executor_class(name: str) -> type:
    """Raises ValueError for an unknown name, with the nearest known one."""
    if name not in HOMES:
        raise ValueError(unknown_name("executor", name, HOMES))
    home, symbol = HOMES[name]
    found: type = getattr(importlib.import_module(home), symbol)
    return found


def options_of(name: str) -> list[Option]:
    """The options of an executor, without those that hold objects or credentials."""
    cls = executor_class(name)
    init = cls.__init__  # type: ignore[misc]
    hints, told = get_type_hints(init), _help_of(cls)
    found = []
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        kind = _kind(hints.get(parameter.name, str))
        if kind is not None and parameter.name not in _CREDENTIALS:
            found.append(Option(parameter.name, kind, parameter.default, told.get(parameter.name, "")))
    return found


def make_executor(name: str, options: Mapping[str, Any]) -> ServerlessExecutor:
    """Of a known name, with those of `options` that it has and that are not None. Raises ValueError."""
    known = {option.name for option in options_of(name)}
    executor: ServerlessExecutor = executor_class(name)(
        **{key: value for key, value in options.items() if key in known and value is not None}
    )
    return executor


def spec_of(executor: ServerlessExecutor) -> dict[str, Any] | None:
    """What a record may hold of an executor, to make it again anywhere; None for one that is not known by name, or
    that was given what no record may hold."""
    if isinstance(executor, MixedExecutor):
        shares = [{"executor": spec_of(each), "replicas": count} for each, count in executor.shares]
        return None if any(share["executor"] is None for share in shares) else {"shares": shares}
    options = getattr(executor, "options", None)
    if executor.name not in HOMES or type(executor) is not executor_class(executor.name) or options is None:
        return None
    return {"name": executor.name, "options": dict(options)}


def recreate(spec: Mapping[str, Any]) -> ServerlessExecutor:
    """The executor that `spec_of` described; credentials are this process's own."""
    if "shares" in spec:
        return MixedExecutor([(recreate(share["executor"]), share["replicas"]) for share in spec["shares"]])
    return make_executor(spec["name"], spec["options"])


def make_fleet(specs: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> tuple[ServerlessExecutor, int | None]:
    """The executor that `--executor` options name, and how many replicas they ask for, if they do.

    One name, or several with counts: ["modal:2", "eks:2"]. `options`: by executor. Raises ValueError for what cannot
    be meant.
    """
    parsed = [_parsed(spec) for spec in specs or ["local"]]
    if len(parsed) == 1:
        name, count = parsed[0]
        return make_executor(name, options.get(name, {})), count
    uncounted = [name for name, count in parsed if count is None]
    if uncounted:
        raise ValueError(f"say how many replicas go to {uncounted[0]}: --executor {uncounted[0]}:2")
    mixed = MixedExecutor([(make_executor(name, options.get(name, {})), count or 0) for name, count in parsed])
    return mixed, sum(count or 0 for _, count in parsed)


def _parsed(spec: str) -> tuple[str, int | None]:
    name, colon, count = spec.partition(":")
    executor_class(name)
    if colon and not (count.isdigit() and int(count) > 0):
        raise ValueError(f"--executor {spec}: write NAME or NAME:COUNT, such as {name}:2")
    return name, int(count) if colon else None


def _kind(hint: Any) -> type | None:
    """What a command line makes of an annotation; None if it cannot express it."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for arg in get_args(hint) if arg is not type(None) and (kind := _kind(arg)) is not None]
        return str if str in kinds else float if float in kinds else kinds[0] if kinds else None
    if get_origin(hint) in (tuple, Sequence) and get_args(hint)[0] is str:
        return tuple
    if get_origin(hint) is not None:
        return None
    return hint if hint in (str, int, float, bool) else None


def _help_of(cls: type) -> dict[str, str]:
    """The lines of the docstring's `Args:` block, by argument."""
    _, _, block = (inspect.getdoc(cls) or "").partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        if match := re.match(r"^ {4}(\w+): (.*)", line):
            name, found[match[1]] = match[1], match[2]
        elif name and line.startswith(" " * 8):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found
