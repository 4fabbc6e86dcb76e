"""`--executor` and the options of the executors that it names; values of `--secret` and `--parameters`.

`executors.registry` has the executors and their options.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import click

from diloco_orchestrator.errors import ConfigError, as_config_errors
from diloco_orchestrator.executors.constructor_options import Option
from diloco_orchestrator.executors.contract import ServerlessExecutor
from diloco_orchestrator.executors.registry import constructor_options, executor_names, make_fleet

_PREFIX, _JOIN = "executor__", "__"  # in click's parameter names, which have to be identifiers


def named(args: Sequence[str]) -> list[str]:
    """Values of `--executor` in `args`, the unparsed command line; which options a command has depends on them."""
    found = [after for flag, after in pairwise(args) if flag == "--executor"]
    return found + [arg.partition("=")[2] for arg in args if arg.startswith("--executor=")]


def executor_options(specs: Sequence[str], taken: Collection[str], default: str) -> list[click.Parameter]:
    """click's parameters for `--executor` and the options of the executors in `specs`, except the `taken` flags.

    A spec is "NAME[:COUNT]". In a mixed fleet, options that several executors have get a prefix: `--modal-gpu A100
    --eks-gpu 1`. `default`: in words, what a command line without a spec means. Raises `ConfigError` for an executor
    that is unknown or does not load.
    """
    named = sorted({spec.partition(":")[0] for spec in specs or ["local"]})
    with as_config_errors():
        options = [(name, option) for name in named for option in constructor_options(name)]
    counts = Counter(option.name for _, option in options)
    found = [_click_option(name, option, prefixed=counts[option.name] > 1) for name, option in options]
    names = ", ".join(executor_names())
    executor = click.Option(
        ["--executor", "executors"],
        metavar="NAME[:COUNT]",
        multiple=True,
        shell_complete=lambda ctx, option, typed: [name for name in executor_names() if name.startswith(typed)],
        help=f"Where replicas run: {names}. Several with counts make a mixed fleet; without counts replicas go where "
        "tokens cost least. Its own options: --executor NAME --help.  "
        f"[default: {default}]",
    )
    limit = click.Option(
        ["--usd-per-hour"],
        metavar="USD",
        type=float,
        help="With several executors without counts: what all machines together may cost an hour. Replicas beyond "
        "--replicas are launched while it allows them.",
    )
    found = [option for option in found if not set(option.opts) & set(taken)]
    for option in found:
        option.hidden = not specs  # help without --executor lists no place's options
    return [executor, limit, *found]


def places_with(flag: str) -> list[str]:
    """Names of the executors that have the option `flag`, such as "--gpu", of those that load."""
    found = []
    for name in executor_names():
        with suppress(ValueError):
            if flag in (f"--{option.name.replace('_', '-')}" for option in constructor_options(name)):
                found.append(name)
    return found


def _click_option(executor: str, option: Option, prefixed: bool) -> click.Option:
    flag = f"{executor}-{option.name}" if prefixed else option.name
    flag, name = f"--{flag.replace('_', '-')}", f"{_PREFIX}{executor.encode().hex()}{_JOIN}{option.name}"
    help_ = option.help
    if option.required:
        help_ += "  [required]"
    elif option.default is not None and option.kind is not tuple:
        help_ += f"  [default: {option.default}]"
    if option.kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=help_)
    if option.kind is tuple:
        return click.Option([flag, name], metavar="VALUE", multiple=True, help=f"{help_} Repeatable.")
    return click.Option([flag, name], metavar="VALUE", type=option.kind, help=help_)


def number(text: str) -> int:
    """The number that a text means, such as "124M", "1.5B" (K, M, B, T) or "1.5e9". Raises `ConfigError` for others."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\d\d?)?)([KMBT]?)", text.strip().upper().replace("_", ""))
    if found is None:
        raise ConfigError(f"--parameters {text}: write a number such as 124M or 1.5B.")
    return round(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2]])


def take_fleet(values: dict[str, Any], default: str | None = "local") -> tuple[ServerlessExecutor | None, int | None]:
    """The executor that the options name, and the number of replicas as the sum of the counts.

    Removes these options from `values`. The executor is None if none is named and `default` is None; the number is None
    if no count is given. Raises `ConfigError` for unknown names, bad counts or values, and options without
    `--executor`.
    """
    specs = values.pop("executors") or ([default] if default else [])
    usd_per_hour = values.pop("usd_per_hour", None)
    options: dict[str, dict[str, Any]] = {}
    for name in [name for name in values if name.startswith(_PREFIX)]:
        value = values.pop(name)
        if value not in (None, ()):
            executor, _, option = name.removeprefix(_PREFIX).partition(_JOIN)
            options.setdefault(bytes.fromhex(executor).decode(), {})[option] = value
    if not specs:
        if options or usd_per_hour is not None:
            what = "options of an executor are" if options else f"--usd-per-hour {usd_per_hour:g} is"
            raise ConfigError(f"{what} given, but no --executor. Name it, or leave them out.")
        return None, None
    with as_config_errors():
        return make_fleet(specs, options, usd_per_hour)


def with_count(settings: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """`settings` with `replicas` set to `count` unless it is None.

    Raises `ConfigError` if `--replicas` or the end of its range (`max_replicas`) is another number.
    """
    given = settings.get("replicas")
    if count is None:
        return dict(settings)
    most = settings.get("max_replicas") or (None if given is None else str(given).rpartition("..")[2])
    if most is not None and str(most) != str(count):
        raise ConfigError(f"--replicas {given or most}, but the executors ask for {count}. Leave out one of them.")
    return dict(settings) if most is not None else {**settings, "replicas": count}


def secrets_of(names: Sequence[str]) -> dict[str, str]:
    """Secrets by name, from this process's environment. Raises `ConfigError` for a name that is not in it."""
    absent = [name for name in names if name not in os.environ]
    if absent:
        raise ConfigError(f"--secret {absent[0]}: there is no such variable in the environment. Export it first.")
    return {name: os.environ[name] for name in names}
