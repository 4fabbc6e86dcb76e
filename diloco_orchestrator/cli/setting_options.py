"""One command-line option per setting of `RunConfig`, with default, unit and reason from the field's description.

Three tiers: `--help` lists what most runs choose, `--help-settings` further ones, `--help-experts` the rest.
"""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError

_ELSEWHERE = {"entrypoint", "args", "env", "heldout_items"}  # an argument; own options; for Python callers only
_SHORT: dict[tuple[str, ...], str] = {
    ("ranks_per_replica",): "ranks"
}  # names of options that are shorter than those of the setting
_JOIN = "__"  # between the names of a nested setting, in click's parameter names

# By how often a setting is needed: `run --help` lists FIRST, `--help-experts` LAST, `--help-settings` the others.
FIRST = (
    *(
        "replicas",
        "max_replicas",
        "ranks_per_replica",
        "rounds",
        "sync_every",
        "seed",
        "quorum",
        "codec",
        "snapshot_every",
        "replica_state",
    ),
    *("max_hours", "max_cost_usd", "track", "strict", "on_halt", "outer.lr", "outer.momentum", "guard.rule"),
)
LAST = (  # right as they are for nearly every run
    *("fragment_update_alpha", "clip_factor", "shard_mib", "outer.nesterov"),
    *("guard.gap_sigmas", "guard.pause_after", "guard.vault_sigmas", "guard.item_sd"),
    *("guard.decline_patience", "guard.ema_alpha", "guard.rise_eps", "timing.poll_s", "timing.heartbeat_s"),
    *("retry.max_timeouts", "retry.max_no_capacity", "retry.unavailable_for_s", "retry.backoff_s"),
)

SECTIONS = ("Settings that most runs choose", "Settings for now and then", "Settings for experts")
_MORE = {"--help-settings": SECTIONS[1], "--help-experts": SECTIONS[2]}


class SettingOption(click.Option):
    """The command-line option of a setting. `section`: heading under which help lists it."""

    section = ""


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command to its help: its own, then the settings that most runs choose."""
    for section in ("Options", SECTIONS[0]):
        _write_section(section, command, ctx, formatter)


def _write_section(section: str, command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    # An argument has its place in the usage line; some versions of click give it a row of help, too.
    options = [each for each in command.get_params(ctx) if isinstance(each, click.Option)]
    listed = [each for each in options if (each.section if isinstance(each, SettingOption) else "Options") == section]
    if records := [record for each in listed if (record := each.get_help_record(ctx)) is not None]:
        with formatter.section(section):
            formatter.write_dl(records)


def help_options() -> list[click.Parameter]:
    """The options that print the help of one further tier of settings and exit."""
    return [
        click.Option([flag], is_flag=True, expose_value=False, is_eager=True, callback=_show_tier, help=f"List {what}.")
        for flag, what in (("--help-settings", "further settings"), ("--help-experts", "the rest of the settings"))
    ]


def _show_tier(ctx: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        formatter = ctx.make_formatter()
        _write_section(_MORE[option.opts[0]], ctx.command, ctx, formatter)
        click.echo(formatter.getvalue().rstrip("\n"))
        ctx.exit()


def setting_options(parts: Collection[str] = ()) -> list[click.Parameter]:
    """click's parameters for all settings, or, to change a run, those of `parts`. Values stay text, which `make_config`
    validates.
    """
    leaves = [(path, field) for path, field in _leaves(RunConfig, ()) if path[0] not in _ELSEWHERE]
    found = [(path, field) for path, field in leaves if not parts or path[0] in parts]
    return [_option(path, field, "that of the run" if parts else str(field.default)) for path, field in found]


def take_part(part: str, given: dict[str, Any]) -> dict[str, Any]:
    """Remove the parsed options of one part of the settings, such as "guard", from `given`; returns them by field."""
    taken = {name: given.pop(name) for name in list(given) if name.startswith(f"{part}{_JOIN}")}
    found: dict[str, Any] = nested(taken).get(part, {})
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as the nested dict that `make_config` takes: `outer__lr` becomes `outer.lr`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        *parents, leaf = name.split(_JOIN)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def read_toml(path: Path) -> dict[str, Any]:
    """Settings from a TOML file. Raises `ConfigError` if it cannot be read or parsed, or sets `entrypoint`."""
    try:
        found = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read settings from {path}: {error}.") from None
    if "entrypoint" in found:
        raise ConfigError(f"{path} sets entrypoint, which is the command's own argument. Leave it out of the file.")
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested dicts of settings as one: `above` overrides `below`, nested dicts are merged field by field."""
    result = dict(below)
    for name, value in above.items():
        mine = result.get(name)
        result[name] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result


def _leaves(tree: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in tree.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, (*path, name))
        elif field.default_factory is None or not path:  # a table within a part, such as guard.max_extra: TOML only
            yield (*path, name), field


def _option(path: tuple[str, ...], field: FieldInfo, default: str) -> click.Option:
    flag = _SHORT.get(path) or "-".join(path).replace("_", "-")
    text = f"{field.description}  [default: {default}]"
    if field.annotation is bool:
        option = SettingOption([f"--{flag}/--no-{flag}", _JOIN.join(path)], default=None, help=text)
    else:
        option = SettingOption([f"--{flag}", _JOIN.join(path)], metavar="VALUE", help=text)
    name = ".".join(path)
    option.section = SECTIONS[0 if name in FIRST else 2 if name in LAST else 1]
    return option
