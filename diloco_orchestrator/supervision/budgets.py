"""The hours and dollars that a leg may use: refused before a launch if they cannot be kept, enforced while it runs."""

from collections.abc import Sequence

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.costs import LegCost


def limit_reached(config: RunConfig, used: LegCost) -> str:
    """Why the leg should be halted now; empty while it may go on."""
    if config.max_hours is not None and used.hours >= config.max_hours:
        return f"max_hours={config.max_hours:g} is reached"
    if config.max_cost_usd is not None and used.usd is not None and used.usd >= config.max_cost_usd:
        return f"max_cost_usd={config.max_cost_usd:g} is reached: {used.words()}"
    return ""


def check_cost_limit(config: RunConfig, hourly_usd: Sequence[float | None]) -> None:
    """Raise `ConfigError` for a limit in dollars where the price of a replica's machine is not known."""
    unknown = [i for i, price in enumerate(hourly_usd) if price is None]
    if config.max_cost_usd is not None and unknown:
        raise ConfigError(
            f"max_cost_usd={config.max_cost_usd:g} cannot be kept: no price is known of the machine that replica "
            f"{unknown[0]} gets from its executor. Use max_hours."
        )
