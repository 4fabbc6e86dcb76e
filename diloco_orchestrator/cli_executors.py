"""`--executor` and the options that come with it, which depend on its value; likewise `--code`, `--env`, `--secret`."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import click

from diloco_orchestrator.errors import ConfigError
from executors.base import ServerlessExecutor
from executors.options import HOMES, Option, make_fleet, options_of

_PREFIX = "executor__"  # of click's parameter names


def named(args: Sequence[str]) -> list[str]:
    """Values of `--executor`, before the command line is parsed."""
    found = [after for flag, after in pairwise(args) if flag == "--executor"]
    return found + [arg.partition("=")[2] for arg in args if arg.startswith("--executor=")]


def executor_options(specs: Sequence[str], taken: Collection[str]) -> list[click.Parameter]:
    """`--executor` and the options of those that are named, but for flags that are taken."""
    options: dict[str, Option] = {}
    for spec in specs or ["local"]:
        name = spec.partition(":")[0]
        if name in HOMES:  # else it is refused when the executor is made
            options |= {option.name: option for option in options_of(name)}
    names = ", ".join(sorted(HOMES))
    executor = click.Option(
        ["--executor", "executors"],
        metavar="NAME[:COUNT]",
        multiple=True,
        help=f"Where replicas run: {names}. Several with counts make a mixed fleet. Its own options: --executor NAME "
        "--help.  [default: local]",
    )
    return [executor, *(_click_option(option) for option in options.values() if _flag(option) not in taken)]


def _flag(option: Option) -> str:
    return f"--{option.name.replace('_', '-')}"


def _click_option(option: Option) -> click.Option:
    flag, name = _flag(option), _PREFIX + option.name
    help_ = option.help + ("" if option.default is None or option.kind is tuple else f"  [default: {option.default}]")
    if option.kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=help_)
    if option.kind is tuple:
        return click.Option([flag, name], metavar="VALUE", multiple=True, help=f"{help_} Repeatable.")
    return click.Option([flag, name], metavar="VALUE", type=option.kind, help=help_)


def number(text: str) -> int:
    """ "124M" as 124000000. Raises `ConfigError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    if found is None:
        raise ConfigError(f"--parameters {text}: write a number such as 124M or 1.5B.")
    return round(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2]])


def take_fleet(values: dict[str, Any]) -> tuple[ServerlessExecutor, int | None]:
    """The executor that the options name, taken out of `values`; and how many replicas they ask for, if they do.

    Raises `ConfigError`.
    """
    specs = values.pop("executors")
    given = {name: values.pop(name) for name in list(values) if name.startswith(_PREFIX)}
    options = {name.removeprefix(_PREFIX): value for name, value in given.items() if value not in (None, ())}
    try:
        return make_fleet(specs, options)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def with_count(settings: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """The settings, with as many replicas as a mixed fleet has. Raises `ConfigError` where both say differently."""
    told = settings.get("replicas")
    if count is None:
        return dict(settings)
    if told is not None and int(told) != count:
        raise ConfigError(f"--replicas {told}, but the executors ask for {count}. Leave out one of them.")
    return {**settings, "replicas": count}


def secrets_of(names: Sequence[str]) -> dict[str, str]:
    """Their values from this process's environment: a command line is seen by everybody on the machine."""
    absent = [name for name in names if name not in os.environ]
    if absent:
        raise ConfigError(f"--secret {absent[0]}: there is no such variable in the environment. Export it first.")
    return {name: os.environ[name] for name in names}
