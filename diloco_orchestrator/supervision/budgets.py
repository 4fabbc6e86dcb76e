"""The limits on the hours and dollars of a leg (start or resume to stop): checked before a launch, then enforced."""

import logging
from collections.abc import Sequence
from contextlib import suppress

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.costs import LegCost
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.append import request_halt

log = logging.getLogger(__name__)

_COSTS_EVERY_S = 5.0  # adding them up is a LIST and a few GETs; five seconds of a machine cost less than a cent


def limit_reached(config: RunConfig, used: LegCost) -> str:
    """Reason why the run must be halted after `used` hours and dollars since its last start or resume; else empty."""
    if config.max_hours is not None and used.hours >= config.max_hours:
        return f"max_hours={config.max_hours:g} is reached"
    if config.max_cost_usd is not None and used.usd is not None and used.usd >= config.max_cost_usd:
        return f"max_cost_usd={config.max_cost_usd:g} is reached: {used.words()}"
    return ""


def check_cost_limit(config: RunConfig, hourly_usd: Sequence[float | None]) -> None:
    """Raise `ConfigError` if `max_cost_usd` is set and the price of a replica's machine is not known (None)."""
    unknown = [i for i, price in enumerate(hourly_usd) if price is None]
    if config.max_cost_usd is not None and unknown:
        raise ConfigError(
            f"max_cost_usd={config.max_cost_usd:g} cannot be kept: no price is known of the machine that replica "
            f"{unknown[0]} gets from its executor. Say it, hourly_usd=… (--hourly-usd), or use max_hours."
        )


class LegBudget:
    """Enforces `max_hours` and `max_cost_usd` for one leg (start or resume to stop). Each leg has its own budget."""

    def __init__(self, reader: RunReader, begin: Begin, by: str, stamp: Stamp) -> None:
        self._reader = reader
        self._begin = begin
        self._by = by
        self._stamp = stamp
        self._next_at: float | None = None  # None: at once
        config = reader.run.config
        self._spent_or_unlimited = config.max_hours is None and config.max_cost_usd is None

    def enforce(self, now: float, wall_time: float) -> None:
        """Request a halt of the run once the hours or dollars of its leg are used up. Reads costs at most every 5 s.

        `now`: seconds on this process's monotonic clock; `wall_time`: seconds since 1970.
        """
        if self._spent_or_unlimited or (self._next_at is not None and now < self._next_at):
            return
        self._next_at = now + _COSTS_EVERY_S
        reason = limit_reached(self._reader.run.config, self._reader.spent(self._begin, wall_time))
        if reason:
            log.warning("halting the run: %s", reason)
            self._spent_or_unlimited = True
            with suppress(ConfigError):  # the leg has just ended
                request_halt(self._reader.log, self._by, reason, self._stamp)
