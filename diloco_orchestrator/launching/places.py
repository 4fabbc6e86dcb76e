"""Compares executors for the same run: cost of a round and of the whole run, transfer included. Sends nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.constructor_options import options_of
from diloco_orchestrator.executors.contract import ServerlessExecutor
from diloco_orchestrator.executors.names import hint
from diloco_orchestrator.executors.registry import executor_class, make_executor
from diloco_orchestrator.launching.plan import LaunchPlan, plan_launch

_ROUND_S = "round_s"  # of a place; the only name in its text that is no option of its executor


@dataclass(frozen=True)
class Place:
    """An executor with its options, to be compared with others, and the duration of a round on its machines."""

    name: str  # as the user wrote it
    executor: ServerlessExecutor
    round_s: float


Plans = Sequence[tuple[Place, LaunchPlan]]  # the launch plan of the same run at each place


def place_of(text: str, round_s: float) -> Place:
    """The executor that a text such as "modal,gpu=H100,round_s=20" names. `round_s`: used if the text has none.

    Raises `ConfigError` for an unknown executor or option, naming the nearest, or a value of another kind.
    """
    name, *pairs = text.split(",")
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--compare {text}: {pair!r} is not of the form option=value.")
        given[key.strip().replace("-", "_")] = value.strip()
    try:
        seconds = float(given.pop(_ROUND_S, round_s))
        known = {option.name: option for option in options_of(executor_class(name.strip()))}
        for key in given:
            if key not in known:
                raise ValueError(f"unknown option {key!r}: {hint(key, [*known, _ROUND_S])}")
        options = {key: _value(value, known[key].kind) for key, value in given.items()}
        return Place(text, make_executor(name.strip(), options), seconds)
    except ValueError as error:
        raise ConfigError(f"--compare {text}: {error}") from None


def _value(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false.")
        return text.lower() == "true"
    return text.split("+") if kind is tuple else kind(text)


def compare(places: Sequence[Place], entrypoint: Any, store: str, **arguments: Any) -> Plans:
    """The launch plans of the same run on every executor, the cheapest run first; unknown prices last.

    `arguments`: keyword arguments of `plan_launch` except `executor` and `round_s`; `pin` is always "given", because
    no price depends on hashes. Raises `ConfigError` for an invalid argument or setting.
    """
    arguments["pin"] = "given"  # no price depends on hashes, and asking for them takes seconds for each place
    plans = [
        (place, plan_launch(entrypoint, store, executor=place.executor, round_s=place.round_s, **arguments))
        for place in places
    ]
    return sorted(plans, key=lambda each: (each[1].run_usd is None, each[1].run_usd or 0.0, each[0].name))


def table_of(plans: Plans) -> list[str]:
    """The launch plans on each executor as lines of text with columns, the cheapest first."""
    rows = [["place", "$/h", "s/round", "machines", "transfer", "requests", "$/round", "$/run", "price from"]]
    for place, plan in plans:
        machines = None if plan.hourly_usd is None else plan.hourly_usd * plan.round_s / 3600
        moved = None if plan.round.bytes_down is None else plan.round.bytes_down / 1e9 * plan.egress_usd_per_gb
        row = [place.name, _usd(plan.hourly_usd, 2), f"{plan.round_s:g}", _usd(machines), _usd(moved)]
        source = "; ".join(plan.price_sources) or "say hourly_usd=…"
        rows.append([*row, _usd(plan.round.requests_usd), _usd(plan.round_usd), _usd(plan.run_usd, 2), source])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _usd(value: float | None, digits: int = 4) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def plans_json(plans: Plans) -> list[Mapping[str, Any]]:
    """The launch plans on each executor as JSON, the cheapest first."""
    return [{"place": place.name, **plan.to_json()} for place, plan in plans]
