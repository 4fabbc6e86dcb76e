"""`plan_launch`: shows what a launch would send and what it would cost. Sends nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.costs import RoundForecast, egress_usd_per_gb, forecast
from diloco_orchestrator.launching.prepare import (
    LaunchOptions,
    PreparedLaunch,
    TrainFunction,
    images_words,
    prepare_launch,
    sent,
)
from diloco_orchestrator.protocol import pace
from diloco_orchestrator.protocol.record_format import StampFields
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.store.open_store import requests_allowed
from diloco_orchestrator.supervision.placing import Open

_MOUNTED = "note:      the run's folder is a path: it must be mounted where replicas run"
_HELD, _MOST = 2.5, 3.5  # times its part of the parameters: a rank's memory, as tests/run/test_islands.py bounds it
_LONG = 200  # characters of a value that is shown whole


@dataclass(frozen=True)
class LaunchPlan:
    """The result of `plan_launch`: what a launch would send, and its prices in US dollars."""

    executor: str
    url: str
    replicas: int
    most_replicas: int  # ids of replicas: to so many the run can be scaled, and over so many its data is dealt
    deal: str  # "open": data is dealt over the replicas that train instead
    code: str  # what travels; empty where nothing has to
    requests: Mapping[str, Mapping[str, Any]]  # of each executor's first replica as its provider gets it, redacted
    hourly_usd: float | None  # of all replicas together; None where the price of one is not known
    round: RoundForecast
    round_s: float
    max_hours: float | None
    max_cost_usd: float | None
    price_sources: tuple[str, ...] = ()
    egress_usd_per_gb: float = 0.0  # price of what replicas read from the bucket
    rounds: int = 1  # outer steps of the run
    packages: str = ""  # which packages replicas check by hash; empty where nothing is installed
    images: tuple[str, ...] = ()  # container images named by tag, which another image may have tomorrow
    refusal: str = ""  # why `launch` would refuse for want of credentials in replicas; empty: it would not
    places: tuple[str, ...] = ()  # which replicas would be launched where, and why, where there are several places
    unpaid: str = ""  # how many replicas the limits pay for, where others wait for machines that join
    unsigned: str = ""  # why a run in a bucket is not signed though its launch does not say so
    ranks: tuple[int, ...] = ()  # processes of each replica, where one has several
    machines: tuple[int, ...] = ()  # of each replica, where one has several ranks
    rank_bytes: tuple[tuple[int, int], ...] = ()  # of each replica: host memory for us in a rank, held and at the most
    apart_s: float = 0.0  # least pause between two polls, where the store limits requests
    replica_usd: tuple[float, ...] = ()  # of each replica, an hour, where they have different numbers of ranks

    def to_json(self) -> dict[str, Any]:
        limit = {"rounds_within_cost": self.rounds_within_cost}
        return {**asdict(self), "round_usd": self.round_usd, "run_usd": self.run_usd, **limit}

    @property
    def round_usd(self) -> float | None:
        """US dollars for a round: machines, requests, transfer of a model of known size; None without a price."""
        if self.hourly_usd is None:
            return None
        moved = (self.round.bytes_down or 0) / 1e9 * self.egress_usd_per_gb
        return self.hourly_usd * self.round_s / 3600 + self.round.requests_usd + moved

    @property
    def run_usd(self) -> float | None:
        """US dollars for all rounds of the run, if none is repeated; None if the cost of a round is not known."""
        return None if self.round_usd is None else self.round_usd * self.rounds

    @property
    def rounds_within_cost(self) -> int | None:
        """The round after which `max_cost_usd` halts the run; None without that limit or a machine's price.

        The limit counts machines only and is checked during a round, which still ends.
        """
        if self.max_cost_usd is None or not self.hourly_usd:
            return None
        return max(1, math.floor(round(self.max_cost_usd / (self.hourly_usd * self.round_s / 3600), 6)))

    def _cost_limit(self) -> str:
        limit, halts_after = f"${self.max_cost_usd:g}", self.rounds_within_cost
        if halts_after is None:
            return limit
        if halts_after > self.rounds:
            return f"{limit} for machines alone, which the run's {self.rounds} rounds do not reach"
        return (
            f"{limit} for machines alone (no requests, traffic or storage): "
            f"halted after about round {halts_after} of {self.rounds}"
        )

    def _scaling(self) -> list[str]:
        if self.most_replicas == self.replicas:
            return []
        known = self.hourly_usd is not None and not self.places and not self.replica_usd
        data = f"dealt over {self.most_replicas}: while {self.replicas} train, nobody reads the others' parts"
        if self.deal == "open":
            data = "dealt round by round over the replicas that train, of each pass all of it"
        price = f", ${(self.hourly_usd or 0.0) / self.replicas:.2f} an hour for each" if known else ""
        return [
            f"scaling:   up to {self.most_replicas} replicas by `diloco scale`{price}",
            f"data:      {data}",
        ]

    def _ranks(self) -> list[str]:
        """A line about the ranks (processes) of replicas that have equally many; empty if each replica has one."""
        lines = []
        for ids, (count, index) in grouped((each, (count, self._like(each))) for each, count in enumerate(self.ranks)):
            price = f", ${self.replica_usd[index]:.2f} an hour each" if self.replica_usd else ""
            memory = "host memory depends on the model: say --parameters, such as 7B"
            if self.rank_bytes:
                held, most = (f"{size / 2**30:.1f}" for size in self.rank_bytes[index])
                memory = f"beside the training {held} GiB of host memory in each rank, {most} GiB while a round ends"
            machines = self.machines[index]
            where = f"on {machines} machines with {count // machines} on each" if machines > 1 else "on one machine"
            gpus = "with a GPU for each where the request asks for GPUs"
            lines.append(f"ranks:     {count} in {replicas(ids)}, {where}, {gpus}{price}; {memory}")
        return lines

    def _like(self, replica_id: int) -> int:
        """The first replica with as many ranks and machines as this one."""
        kinds = list(zip(self.ranks, self.machines, strict=True))
        return kinds.index(kinds[replica_id])

    def _requests_at_hugging_face(self) -> list[str]:
        """Hugging Face limits requests: a line with those of five minutes; empty for another store."""
        if not self.url.startswith("hf://"):
            return []
        each = sum(self.round.requests.values())
        window = each * 300 / self.round_s
        fits = f"; rounds of {math.ceil(each * 300 / 1000)} s keep to 1,000" if window > 1000 else ""
        return [
            f"quota:     about {window:.0f} requests in five minutes; the Hub allows 1,000 (free), 2,500 (PRO), 3,000 "
            f"(Team) or 6,000 (Enterprise), and states no other limit for its buckets; who waits asks every "
            f"{self.apart_s:.0f} s, to fit 1,000{fits}"
        ]

    def lines(self) -> list[str]:
        """The requests and prices of the launch as lines of text."""
        each, rounds_an_hour = self.round, 3600 / self.round_s
        price = "not known here: say it with --hourly-usd"
        if self.hourly_usd is not None:
            price = f"${self.hourly_usd:.2f} an hour together ({'; '.join(self.price_sources)})"
        fees = f", ${each.requests_usd * rounds_an_hour:.2f} an hour on S3" if "://" in self.url else ""
        counts = ", ".join(f"{count:.0f} {kind}" for kind, count in each.requests.items())
        limits = [f"{self.max_hours:g} hours"] if self.max_hours else []
        limits += [self._cost_limit()] if self.max_cost_usd else []
        return [
            f"launch:    {self.replicas} replicas by {self.executor}, run folder {self.url}",
            *self._scaling(),
            *self._ranks(),
            *(f"places:    {words}" for words in self.places),
            *([f"unpaid:    {self.unpaid}"] if self.unpaid else []),
            *([f"keys:      {self.unsigned}"] if self.unsigned else []),
            f"code:      {self.code or 'nothing travels: replicas share this machine'}",
            *([f"packages:  {self.packages}"] if self.packages else []),
            *([f"images:    {images_words(self.images)}"] if self.images else []),
            f"machines:  {price}",
            f"requests:  {counts} a round of {self.round_s:g} s{fees}",
            *self._requests_at_hugging_face(),
            f"traffic:   {_traffic(each, rounds_an_hour)}",
            *([f"one round: {_dollars(self.round_usd)}, the run's {self.rounds}: {_dollars(self.run_usd)}"]),
            f"limits:    {' or '.join(limits) if limits else 'none (--max-hours, --max-cost-usd)'}",
            *([f"refused:   {self.refusal}"] if self.refusal else []),
            *([_MOUNTED] if self.code and "://" not in self.url else []),
            *(line for who, sent in self.requests.items() for line in (f"{who} would be sent:", *_shown(sent, "  "))),
        ]


def _dollars(usd: float | None) -> str:
    return "not known" if usd is None else f"${usd:.2f}" if usd >= 1 else f"${usd:.4f}"


def _traffic(each: RoundForecast, rounds_an_hour: float) -> str:
    if each.bytes_up is None or each.bytes_down is None or each.traffic_usd is None:
        return "depends on the model: say --parameters, such as 124M"
    least = "at least " if each.at_least else ""
    return (
        f"{least}{each.bytes_up / 1e6:.1f} MB up, {each.bytes_down / 1e6:.1f} MB down a round; "
        f"${each.traffic_usd * rounds_an_hour:.2f} an hour if all of it leaves AWS, nothing within a region"
    )


def _shown(node: Any, indent: str) -> list[str]:
    """Nested names and values as indented lines, one value each; values over `_LONG` characters are cut."""
    lines: list[str] = []
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for name, value in items:
        plain = isinstance(value, list | tuple) and not any(isinstance(v, Mapping | list | tuple) for v in value)
        if isinstance(value, Mapping | list | tuple) and value and not plain:
            lines += [f"{indent}{name}:", *_shown(value, indent + "  ")]
        else:
            text = " ".join((" ".join(map(str, value)) if plain else str(value)).split())
            shown = text if len(text) <= _LONG else f"{text[:_LONG]}… ({len(text)} characters)"
            lines.append(f"{indent}{name}: {shown}")
    return lines


def plan_launch(
    entrypoint: str | TrainFunction,
    store: str,
    *,
    round_s: float = 60.0,
    parameters: int | None = None,
    **options: Unpack[LaunchOptions],
) -> LaunchPlan:
    """The plan of `launch` with the same arguments: its requests and price. Sends nothing, needs no credentials.

    uv asks the package index for hashes as it does for `launch`, unless they are given or `pin="given"`.

    `round_s`: expected duration of a round in seconds; `parameters`: number of the model's trainable parameters,
    without which no traffic is predicted. Raises `ConfigError` as `launch` would.
    """
    stamp: StampFields = {"write_id": "planned", "at": 0.0}
    prepared = prepare_launch(entrypoint, store, options, run_id="run-planned", stamp=stamp, dry=True)
    config, archive, allowed = prepared.config, prepared.archive, requests_allowed(prepared.url)
    ranks = tuple(map(config.ranks_of, range(config.replicas)))
    shares = [4 * (parameters or 0) / count for count in ranks]  # bytes of a rank's part of the parameters in fp32
    known = [price for price in prepared.prices if price is not None]
    return LaunchPlan(
        executor=prepared.executor.name,
        url=prepared.url,
        replicas=config.replicas,
        most_replicas=config.most_replicas,
        deal=config.deal,
        code="" if archive is None else archive.words(),
        requests=sent(prepared.executor, prepared.requests),
        hourly_usd=sum(price.hourly_usd for price in known) if len(known) == len(prepared.prices) else None,
        places=_places(prepared.opened),
        unpaid=prepared.unpaid,
        unsigned=prepared.unsigned,
        price_sources=tuple(sorted({price.source for price in known})),
        egress_usd_per_gb=egress_usd_per_gb(prepared.executor.name, prepared.url, prepared.launching.endpoint()),
        rounds=config.rounds,
        round=forecast(config, round_s, parameters, allowed),
        apart_s=pace.apart_s(config, allowed),
        round_s=round_s,
        max_hours=config.max_hours,
        max_cost_usd=config.max_cost_usd,
        packages="" if archive is None else archive.package_words(),
        images=prepared.images(),
        refusal=_refusal(prepared),
        ranks=ranks if max(ranks) > 1 else (),
        machines=tuple(
            each.machines(prepared.executor.part(each).ranks_per_machine)
            for each in prepared.requests
            if max(ranks) > 1
        ),
        rank_bytes=tuple(
            (round(_HELD * each), round(_MOST * each)) for each in shares if parameters and max(ranks) > 1
        ),
        replica_usd=tuple(price.hourly_usd for price in known if len(known) == len(ranks) and len(set(ranks)) > 1),
    )


def _places(opened: Sequence[Open]) -> tuple[str, ...]:
    """Lines about the places (executors) of the first launches, replicas with the same place and reason together."""
    found = grouped((each.replica_id, (each.place, each.why)) for each in opened)
    return tuple(f"{replicas(ids)} at {place}: {why}" for ids, (place, why) in found)


def _refusal(prepared: PreparedLaunch) -> str:
    try:
        prepared.launching.check_routes(prepared.executor, prepared.requests)
    except ConfigError as error:
        return str(error)
    return ""
