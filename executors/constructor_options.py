"""Describes an executor's constructor as options: its arguments that a command line or a record can express.

The registry makes executors from options; the command line shows them. Works for any executor class.
"""

import inspect
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from diloco_orchestrator.executors.names import hint, looks_secret

_CREDENTIALS = ("token",)  # each process brings these itself, because command lines and records can be read by others
_ENVIRONMENTS = ("env", "env_vars")  # of Hugging Face Jobs; of Ray's `runtime_env`
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Option:
    """One constructor argument of an executor that text can express, with its help from the docstring."""

    name: str
    kind: type  # str, int, float, bool, or tuple for several strings
    default: Any
    required: bool
    help: str


def options_of(cls: type) -> list[Option]:
    """The constructor's arguments that text can express, without those that take objects or credentials."""
    explained = _explained_arguments(cls)
    found = []
    for home, parameter in _parameters(cls).values():
        kind = _kind(_annotation(home, parameter))
        if kind is not None and parameter.name not in _CREDENTIALS and parameter.kind not in _ANY_NUMBER:
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            found.append(Option(parameter.name, kind, default, required, explained.get(parameter.name, "")))
    return found


def check_arguments(cls: type, given: Mapping[str, Any]) -> None:
    """Raise ValueError if the constructor has no argument of a given name, or needs one that is not given."""
    parameters = {name: parameter for name, (_, parameter) in _parameters(cls).items()}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for unknown in given.keys() - parameters.keys():
            raise ValueError(f"unknown option {unknown!r} of {cls.__name__}: {hint(unknown, parameters)}")
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in _ANY_NUMBER and parameter.name not in given
    ]
    if missing:
        raise ValueError(f"{cls.__name__} needs {', '.join(missing)}: --{missing[0].replace('_', '-')} VALUE.")


def plain_options(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a constructor (its `locals()`) as JSON, from which another process makes an equal executor.

    Text, numbers, lists and dicts of them are kept; `self`, clocks, credentials and unset or empty values are left out.
    None if anything else was given (see `withheld`), because an executor without it would not be the same.
    """
    if withheld(given):
        return None
    return {name: _as_json(value) for name, value in _given(given).items()}


def withheld(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the arguments of a constructor (its `locals()`) whose values must not be recorded.

    These are objects, values of secrets, and environments with variables whose names look secret.
    """
    return tuple(sorted(name for name, value in _given(given).items() if not _may_be_recorded(name, value)))


def _given(given: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("self", "clock", *_CREDENTIALS)
    return {
        name: value
        for name, value in given.items()
        if name not in left_out and not name.startswith("_") and value not in (None, [], (), {})
    }


def _may_be_recorded(name: str, value: Any) -> bool:
    """Whether JSON can hold a value, and no secret is in it, at any depth. `name`: of the value."""
    if isinstance(value, Mapping):
        if name == "secrets" or (name in _ENVIRONMENTS and any(map(looks_secret, map(str, value)))):
            return False
        return all(isinstance(inner, str) and _may_be_recorded(inner, each) for inner, each in value.items())
    if isinstance(value, list | tuple):
        return all(_may_be_recorded(name, each) for each in value)
    return value is None or isinstance(value, str | int | float)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _homes(cls: type) -> list[type]:
    """`cls`, and its base classes to whose constructors it passes `**options` on, in order."""
    found = [cls]
    while found[-1].__base__ not in (None, object) and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(found[-1]).parameters.values()
    ):
        found.append(found[-1].__base__)
    return found


def _parameters(cls: type) -> dict[str, tuple[type, inspect.Parameter]]:
    """The constructor's arguments by name, each with the class whose constructor takes it."""
    homes = _homes(cls)
    found: dict[str, tuple[type, inspect.Parameter]] = {}
    for home in homes:
        for name, parameter in inspect.signature(home).parameters.items():
            if home is homes[-1] or parameter.kind is not parameter.VAR_KEYWORD:
                found.setdefault(name, (home, parameter))
    return found


def _annotation(cls: type, parameter: inspect.Parameter) -> Any:
    """The type of a constructor argument: `str` without an annotation, None if the type cannot be resolved here.

    An SDK's type that is imported for type checkers only cannot be resolved.
    """
    if parameter.annotation is parameter.empty:
        return str
    init = inspect.unwrap(cls.__init__)  # type: ignore[misc]
    holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        return get_type_hints(holder, globalns=getattr(init, "__globals__", {}))["it"]
    except NameError:
        return None


def _kind(annotation: Any) -> type | None:
    """The type to which command line text is converted for an annotation; None if text cannot express it."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for arg in get_args(annotation) if arg is not type(None) and (kind := _kind(arg)) is not None]
        return next((kind for kind in (tuple, str, float) if kind in kinds), kinds[0] if kinds else None)
    if get_origin(annotation) in (tuple, Sequence) and get_args(annotation)[0] is str:
        return tuple
    return annotation if annotation in (str, int, float, bool) else None


def _explained_arguments(cls: type) -> dict[str, str]:
    """Help by constructor argument, from the `Args:` blocks of the docstrings of `cls` and its bases."""
    found: dict[str, str] = {}
    for home in reversed(_homes(cls)):
        _, _, block = (inspect.getdoc(home) or "").partition("Args:\n")
        name = ""
        for line in block.splitlines():
            if match := re.match(r"^ {4}(\w+): (.*)", line):
                name, found[match[1]] = match[1], match[2]
            elif name and line.startswith(" " * 8):
                found[name] += " " + line.strip()
            else:
                name = ""
    return found
