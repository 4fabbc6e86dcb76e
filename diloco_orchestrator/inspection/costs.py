"""What a run costs: machine hours that were used, requests and traffic of a round to come. Pure functions.

Prices are those of Amazon S3 in us-east-1 and of the executors' own tables; other stores charge differently, most of
them less. Wall-clock times of records are compared here, because money is counted in them: hours, not milliseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError

_HOUR_S = 3600.0
_USD_PER_REQUEST = {"PUT": 0.005 / 1000, "LIST": 0.005 / 1000, "GET": 0.0004 / 1000}
_USD_PER_GB_OUT = 0.09  # to the internet; nothing within a region
_BYTES_PER_VALUE = {"fp32": 4, "bf16": 2}

# How often a replica looks while it waits for the others, in a round of equally fast ones (`make soak-table`).
_LOOKS = 1.75
_COORDINATOR_LOOK_S = 1.0


@dataclass(frozen=True)
class Bill:
    """One attempt's machine. Times are seconds since 1970."""

    hourly_usd: float | None  # None: nobody knows
    began: float
    ended: float | None  # None: it runs


@dataclass(frozen=True)
class Spent:
    """What a leg has used up."""

    hours: float  # since it began
    usd: float | None  # of machines whose price is known; None if none is
    unpriced: int  # attempts whose price nobody knows

    def words(self) -> str:
        """For people; empty where no price is known."""
        if self.usd is None:
            return ""
        unknown = f", {self.unpriced} attempts of unknown price not counted" if self.unpriced else ""
        return f"${self.usd:.2f} for machines in {self.hours:.1f} h{unknown}"


def spent(bills: Sequence[Bill], began: float, now: float) -> Spent:
    """`began`: of the leg; `now`: the newest time known of it."""
    priced = [bill for bill in bills if bill.hourly_usd is not None]
    usd = sum(
        (bill.hourly_usd or 0.0) * max(0.0, (now if bill.ended is None else bill.ended) - bill.began) / _HOUR_S
        for bill in priced
    )
    return Spent(max(0.0, now - began) / _HOUR_S, usd if priced else None, len(bills) - len(priced))


def limit_reached(config: RunConfig, used: Spent) -> str:
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


@dataclass(frozen=True)
class RoundForecast:
    """What one round of all replicas and the coordinator asks of the bucket."""

    requests: Mapping[str, float]  # by kind: PUT, GET, LIST
    bytes_up: int | None  # None: the model's size is not known
    bytes_down: int | None
    requests_usd: float
    traffic_usd: float | None  # if every byte leaves the cloud of the bucket

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def forecast(config: RunConfig, round_s: float, parameters: int | None = None) -> RoundForecast:
    """Predict a round that takes `round_s` seconds of a model with so many trainable parameters.

    Every replica writes its payload's shards, its manifest and a commit that may lose, reads everybody's manifest and
    payload (its own too: it confirms it), and looks for the commit: from half of its straggler deadline on every
    `timing.poll_s`. The coordinator looks every second.
    """
    n = config.replicas
    shards = 1
    size = None
    if parameters is not None:
        part = -(-parameters // config.fragments)
        shards = max(1, -(-part * 4 // (config.shard_mib * 2**20)))
        size = part * _BYTES_PER_VALUE[config.codec]
    timing = config.timing
    states = {"round": 1.0, "snapshot": 1.0 / config.snapshot_every, "none": 0.0}[config.saves_state]
    beats, looks = n * round_s / timing.heartbeat_s, round_s / _COORDINATOR_LOOK_S
    requests = {
        "PUT": n * (shards + 2 + states) + 3 / config.snapshot_every + beats,
        "GET": n * (n * shards + n + 1 + _LOOKS + 1 + round_s / (2 * timing.poll_s)) + 2 * looks + 1 + beats,
        "LIST": n * _LOOKS + (2.0 if config.retention.payloads == "needed" else 0.0),  # what is there of an old round
    }
    return RoundForecast(
        requests=requests,
        bytes_up=None if size is None else n * size,
        bytes_down=None if size is None else n * n * size,
        requests_usd=sum(count * _USD_PER_REQUEST[kind] for kind, count in requests.items()),
        traffic_usd=None if size is None else n * n * size / 1e9 * _USD_PER_GB_OUT,
    )
