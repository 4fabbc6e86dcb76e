"""The limits on the hours and dollars of a run until somebody resumes it: checked before a launch, then enforced.

They count for a leg (start or resume to stop) together with those before it that led to it by themselves.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.places import Places
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.inspection.costs import LegCost
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.supervision.next_leg import BY_ITSELF
from diloco_orchestrator.supervision.placing import WORTH_S

log = logging.getLogger(__name__)

_LAST_ROUNDS = 4  # whose times are compared
_END_S = 60.0  # that machines take to end after the last commit, the last snapshot written
_COSTS_EVERY_S = 5.0  # adding them up is a LIST and a few GETs; five seconds of a machine cost less than a cent


def limit_reached(config: RunConfig, used: LegCost, next_usd: float = 0.0) -> str:
    """Reason why the run must be halted after `used` hours and dollars of its budget; else empty.

    `next_usd`: US dollars that the open round and one more will cost from now on; 0 if that is not known.
    """
    if config.max_hours is not None and used.hours >= config.max_hours:
        return f"max_hours={config.max_hours:g} is reached"
    if config.max_cost_usd is not None and used.usd is not None and used.usd >= config.max_cost_usd:
        return f"max_cost_usd={config.max_cost_usd:g} is reached: {used.words()}"
    if config.max_cost_usd is not None and next_usd and (used.usd or 0.0) + next_usd > config.max_cost_usd:
        return f"max_cost_usd={config.max_cost_usd:g} does not pay for another round: {used.words()}"
    return ""


def next_round_usd(used: LegCost, committed_at: Sequence[float], now: float) -> float:
    """US dollars that the rest of the open round, one more round and ending the machines will cost; 0 before the second
    commit.

    Rounds are taken to be as long as the longest of the last ones. `committed_at`: times of their commits, oldest
    first. Times are seconds since 1970.
    """
    seconds = max((after - before for before, after in pairwise(committed_at)), default=0.0)
    if not seconds:
        return 0.0
    left_s = max(0.0, seconds - (now - committed_at[-1]))
    return used.rate_usd / 3600 * (left_s + seconds + _END_S)


def patience_s(config: RunConfig, times: Sequence[float]) -> float:
    """Seconds after `max_hours` within which the open round has to end: twice as long as the longest of the last ones.

    At least `timing.round_timeout_s`; as long again as `max_hours` before the first commit, when no round has shown
    how long one is. `times`: of the newest commits, oldest first, and of the leg's begin before them where they are
    all, in seconds since 1970.
    """
    longest_s = max((after - before for before, after in pairwise(times)), default=None)
    if longest_s is None:
        return 3600 * (config.max_hours or 0.0)
    return max(config.timing.round_timeout_s, 2 * longest_s)


def check_cost_limit(config: RunConfig, hourly_usd: Sequence[float | None]) -> None:
    """Raise `ConfigError` if `max_cost_usd` is set and the price of a replica's machine is not known (None)."""
    unknown = [i for i, price in enumerate(hourly_usd) if price is None]
    if config.max_cost_usd is not None and unknown:
        raise ConfigError(
            f"max_cost_usd={config.max_cost_usd:g} cannot be kept: no price is known of the machine that replica "
            f"{unknown[0]} gets from its executor. Say it, hourly_usd=… (--hourly-usd), or use max_hours."
        )


def check_places(config: RunConfig, places: Places, prices: Mapping[str, Price | None]) -> None:
    """Raise `ConfigError` if a price is missing, or if a money limit does not pay for `replicas` at the cheapest place.

    A place is one of a run's several executors. `prices`: US dollars an hour of a replica's machine by place, or None.
    """
    for name, price in sorted(prices.items()):
        if price is None:
            raise ConfigError(
                f"place {name!r}: the price of its machines is not known, so that its tokens per dollar cannot be "
                f"compared. Say it, hourly_usd=… (--{name}-hourly-usd), 0 for a machine that you have anyway."
            )
    name, cheapest = min(((name, each.hourly_usd) for name, each in prices.items() if each), key=lambda each: each[1])
    rate = cheapest * config.replicas
    if places.usd_per_hour is not None and config.max_replicas is None:
        raise ConfigError(
            f"usd_per_hour={places.usd_per_hour:g} needs a run whose replicas may leave and come: give "
            f"replicas={config.replicas}, max_replicas=… (--replicas {config.replicas}..16)."
        )
    if places.usd_per_hour is not None and rate > places.usd_per_hour:
        raise ConfigError(
            f"usd_per_hour={places.usd_per_hour:g} does not pay for replicas={config.replicas}: at {name}, the "
            f"cheapest place, they cost ${rate:.2f} an hour. Give more, or fewer replicas."
        )
    if config.max_cost_usd is not None and config.max_cost_usd < rate * WORTH_S / 3600:
        raise ConfigError(
            f"max_cost_usd={config.max_cost_usd:g} pays for less than {WORTH_S / 60:.0f} minutes of "
            f"replicas={config.replicas} at {name}, the cheapest place: ${rate:.2f} an hour. Give more, or fewer "
            "replicas."
        )


def counted_together(begins: Sequence[Begin]) -> list[Begin]:
    """The last of `begins`, records of starts and resumes, and those before it that share its budget, oldest first.

    A leg that begins by itself has the budget of the leg before: nobody has given it more.
    """
    first = len(begins) - 1
    while first > 0 and begins[first].by in BY_ITSELF:
        first -= 1
    return list(begins[first:])


class LegBudget:
    """Enforces `max_hours` and `max_cost_usd` for one leg (start or resume to stop), the newest.

    Each leg that somebody begins has its own budget; `counted_together` has the others. `wall_time`: now, in seconds
    since 1970.
    """

    def __init__(self, reader: RunReader, begin: Begin, by: str, stamp: Stamp, wall_time: float) -> None:
        self._reader = reader
        self._begin = begin
        self._by = by
        self._stamp = stamp
        self._next_at: float | None = None  # None: at once
        config = reader.run.config
        self._unlimited = config.max_hours is None and config.max_cost_usd is None
        self._asked = False  # whether this object has requested a halt
        legs = [] if self._unlimited else counted_together(reader.log.begins())
        self._earlier = [reader.spent(each, now=following.at) for each, following in pairwise(legs)]
        self.left_usd: float | None = None  # as of the last time that costs were read; None: no limit
        if config.max_cost_usd is not None:  # of a leg that goes on, a coordinator before this one has spent some
            self.left_usd = config.max_cost_usd - (reader.spent(begin, wall_time).after(self._earlier).usd or 0.0)

    def enforce(self, now: float, wall_time: float) -> str:
        """Request a halt of the run once its hours are used up, or its dollars do not pay for another round.

        Both count since somebody has started or resumed it. Returns the reason to stop the run in mid-round, where all
        dollars are used up, or the open round does not end; else empty. Reads costs at most every 5 s. `now`: seconds
        on this process's monotonic clock; `wall_time`: seconds since 1970.
        """
        if self._unlimited or (self._next_at is not None and now < self._next_at):
            return ""
        self._next_at = now + _COSTS_EVERY_S
        config, used = self._reader.run.config, self._reader.spent(self._begin, wall_time).after(self._earlier)
        next_usd = 0.0
        if config.max_cost_usd is not None:
            self.left_usd = config.max_cost_usd - (used.usd or 0.0)
            next_usd = next_round_usd(used, self._committed_at(), wall_time)
        reason = limit_reached(config, used, next_usd)
        if reason and not self._asked:
            log.warning("halting the run: %s", reason)
            with suppress(ConfigError):  # the leg has just ended
                request_halt(self._reader.log, self._by, reason, self._stamp)
            self._asked = True
        if self.left_usd is not None and self.left_usd <= 0:
            return reason
        over_s = 0.0 if config.max_hours is None else 3600 * (used.hours - config.max_hours)
        if over_s > 0 and over_s > patience_s(config, self._times()):
            return f"{reason}, and the open round has not ended in {over_s / 60:.0f} minutes since"
        return ""

    def _times(self) -> list[float]:
        """Times of the newest commits of the leg, oldest first, and of its begin before them where they are all."""
        found = self._newest_commits()
        return [self._begin.at, *found] if len(found) < _LAST_ROUNDS else found

    def _committed_at(self) -> list[float]:
        """Times of the newest commits of the leg, oldest first; empty while its last training round is open."""
        log, begin = self._reader.log, self._begin
        newest = log.newest(begin)
        if newest is None or newest.commit.outer_step + 1 >= begin.from_outer_step + begin.outer_steps:
            return []
        return self._newest_commits()

    def _newest_commits(self) -> list[float]:
        """Times of the newest commits of the leg, oldest first."""
        newest = self._reader.log.newest(self._begin)
        if newest is None or newest.commit.leg != self._begin.leg:
            return []
        last = newest.commit.round
        rounds = range(max(self._begin.after_round, last - _LAST_ROUNDS) + 1, last + 1)
        entries = [self._reader.log.commit(each) for each in rounds]
        return [entry.commit.at for entry in entries if entry is not None]
