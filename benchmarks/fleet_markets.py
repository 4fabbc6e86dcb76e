"""Markets for `fleet`: prices, capacity and speeds of places over time, drawn from a seed. All but two are synthetic.

`TUNED` are those that the policy was written with. `OTHERS` came afterwards; what it lost in two of them (own nights,
lone) changed it later. `LAST` came after that change. `PUBLISHED` are records (`spot_records`). Losses in all of these
changed it once more: a replica leaves once it has overpaid a start elsewhere. `FRESH` came after that, and changed
nothing. Losses in `FAST` changed it: few tokens beyond those of `least` are bought where they cost more than on average
so far. `DRAWN`, whose laws are drawn from their numbers, came after that, and changed nothing.
What is published elsewhere has the shape of "flicker": in the traces of github.com/skypilot-org/spot-traces (AWS, V100,
16 machines, August 2023, every five minutes; Wu et al., NSDI 2024) a zone has all 16 machines or none at nearly every
look, for five minutes or days. Spot prices at a third of on demand: "roughly 66 %" less, spell.ml's deep dive into
12,000 spot runs.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from spot_records import G2_USD, K80_MACHINES, LOOK_S, V100_MACHINES, V100_RARE

TICK_S = 60.0


@dataclass(frozen=True)
class Site:
    """A place: what one machine does, costs in each tick, and how many there are in each tick."""

    name: str
    tokens_per_s: float
    tflops: float | None  # as a list says, which is not what it does
    usd: Sequence[float]  # an hour, by tick
    machines: Sequence[int]  # by tick


@dataclass(frozen=True)
class Market:
    """The places of one run. `usd_per_hour`, `least`, `most`: its limits. `fixed_prices`: whether none changes."""

    sites: Sequence[Site]
    least: int = 4
    most: int = 16
    usd_per_hour: float = 20.0

    @property
    def fixed_prices(self) -> bool:
        return all(len(set(site.usd)) == 1 for site in self.sites)


# On demand: price, list figure. What a machine really does is the figure times what `_speed` draws.
_KINDS: Mapping[str, tuple[float, float]] = {
    "t4": (0.59, 65.0),
    "l4": (0.80, 121.0),
    "a10g": (1.10, 70.0),
    "a100": (2.50, 312.0),
    "h100": (3.95, 989.0),
}
_PLENTY = 1000


def _site(draw: random.Random, kind: str, usd: Sequence[float], machines: Sequence[int], name: str = "") -> Site:
    figure = _KINDS[kind][1]
    return Site(name or kind, 100 * figure * draw.uniform(0.5, 1.1), figure, usd, machines)


def _on_demand(draw: random.Random, kind: str, ticks: int) -> Site:
    return _site(draw, kind, [_KINDS[kind][0]] * ticks, [_PLENTY] * ticks)


def _runs(draw: random.Random, ticks: int, shortest_s: float, longest_s: float, up: int) -> list[int]:
    """All machines or none, in turn, each for a time that is log-uniform between two durations."""
    found: list[int] = []
    there = draw.random() < 0.5
    while len(found) < ticks:
        seconds = math.exp(draw.uniform(math.log(shortest_s), math.log(longest_s)))
        found += [up if there else 0] * max(1, round(seconds / TICK_S))
        there = not there
    return found[:ticks]


def calm(draw: random.Random, ticks: int) -> Market:
    """Fixed prices, machines for everybody."""
    return Market([_on_demand(draw, kind, ticks) for kind in _KINDS])


def flicker(draw: random.Random, ticks: int) -> Market:
    """Two kinds of spot machines in two zones each at a third of the price, there and gone; on demand beside them."""
    sites = [_on_demand(draw, "a100", ticks), _on_demand(draw, "l4", ticks)]
    for kind, zone in (("a100", "a"), ("a100", "b"), ("l4", "a"), ("l4", "b")):
        usd = [round(_KINDS[kind][0] / 3, 3)] * ticks
        sites.append(_site(draw, kind, usd, _runs(draw, ticks, 300.0, 86400.0, 16), f"{kind} spot {zone}"))
    return Market(sites)


def walk(draw: random.Random, ticks: int) -> Market:
    """Spot prices that wander by half around a third of on demand, within hours; some machines at each."""
    sites = [_on_demand(draw, "a100", ticks), _on_demand(draw, "h100", ticks)]
    for kind in ("l4", "a100", "h100"):
        level, logs = math.log(_KINDS[kind][0] / 3), [0.0]
        for _ in range(ticks - 1):
            logs.append(0.998 * logs[-1] + draw.gauss(0.0, 0.025))
        usd = [round(math.exp(level + logs[tick // 60 * 60]), 3) for tick in range(ticks)]  # changes every hour
        sites.append(_site(draw, kind, usd, [draw.choice([4, 8, 16])] * ticks, f"{kind} spot"))
    return Market(sites)


def wrong_lists(draw: random.Random, ticks: int) -> Market:
    """Lists that are wrong by up to two times, and say nothing of one kind."""
    sites = [_on_demand(draw, kind, ticks) for kind in _KINDS]
    figures = [(site.tflops or 1.0) * math.exp(draw.uniform(-1, 1) * math.log(2)) for site in sites]
    listed: list[float | None] = [*figures]
    listed[draw.randrange(len(listed))] = None
    return Market([Site(s.name, s.tokens_per_s, f, s.usd, s.machines) for s, f in zip(sites, listed, strict=True)])


def daily(draw: random.Random, ticks: int) -> Market:
    """Spot machines by night: at noon nearly none, and the price doubles."""
    sites = [_on_demand(draw, "a100", ticks)]
    for kind, shift in (("a100", 0), ("l4", 8), ("h100", 16)):  # hours: three continents
        night = [0.5 + 0.5 * math.cos(2 * math.pi * (tick * TICK_S / 3600 + shift) / 24) for tick in range(ticks)]
        usd = [round(_KINDS[kind][0] / 3 * (2 - night[tick // 15 * 15]), 3) for tick in range(ticks)]
        sites.append(_site(draw, kind, usd, [round(12 * n) for n in night], f"{kind} spot {shift}"))
    return Market(sites)


def spikes(draw: random.Random, ticks: int) -> Market:
    """Auctions: cheap for hours, then ten times as dear for one."""
    sites = [_on_demand(draw, "l4", ticks), _on_demand(draw, "a100", ticks)]
    for kind in ("l4", "a100", "h100"):
        usd: list[float] = []
        while len(usd) < ticks:
            usd += [round(_KINDS[kind][0] / 4, 3)] * round(draw.expovariate(1 / 600) + 30)
            usd += [round(_KINDS[kind][0] * 2.5, 3)] * round(draw.expovariate(1 / 60) + 10)
        sites.append(_site(draw, kind, usd[:ticks], [16] * ticks, f"{kind} auction"))
    return Market(sites)


def crowd(draw: random.Random, ticks: int) -> Market:
    """A few machines at each of five places, each of which comes and goes on its own, every three hours."""
    sites = [_on_demand(draw, "h100", ticks)]
    for number in range(5):
        kind = draw.choice(["t4", "l4", "a10g", "a100"])
        usd = [round(_KINDS[kind][0] * draw.uniform(0.2, 0.6), 3)] * ticks
        there, machines = 3, []
        for _ in range(ticks):
            there += (draw.random() < (6 - there) / 180) - (draw.random() < there / 180)
            machines.append(there)
        sites.append(_site(draw, kind, usd, machines, f"{kind} host {number}"))
    return Market(sites)


def together(draw: random.Random, ticks: int) -> Market:
    """All spot places lose their machines at the same hours."""
    up = _runs(draw, ticks, 1800.0, 43200.0, 1)
    sites = [_on_demand(draw, "a100", ticks), _on_demand(draw, "h100", ticks)]
    for kind in ("a10g", "a100", "h100"):
        usd = [round(_KINDS[kind][0] * draw.uniform(0.25, 0.5), 3)] * ticks
        sites.append(_site(draw, kind, usd, [16 * each for each in up], f"{kind} spot"))
    return Market(sites)


def scarce(draw: random.Random, ticks: int) -> Market:
    """Little money and little choice: two machines at the least, $6 an hour, two spot places that flicker."""
    sites = [_on_demand(draw, "a10g", ticks)]
    for kind in ("l4", "t4"):
        usd = [round(_KINDS[kind][0] / 2, 3)] * ticks
        sites.append(_site(draw, kind, usd, _runs(draw, ticks, 600.0, 14400.0, 4), f"{kind} spot"))
    return Market(sites, least=2, most=8, usd_per_hour=6.0)


Generator = Callable[[random.Random, int], Market]
TUNED: Mapping[str, Generator] = {
    "calm": calm,
    "flicker": flicker,
    "walk": walk,
    "wrong lists": wrong_lists,
    "daily": daily,
    "spikes": spikes,
    "crowd": crowd,
    "together": together,
    "scarce": scarce,
}


# -- written once the policy was done, and run once -------------------------------------------------------------------


def drift(draw: random.Random, ticks: int) -> Market:
    """Prices that rise or fall for days, and cross; machines for everybody."""
    sites = []
    for kind, (usd, _) in _KINDS.items():
        begin, end = usd * draw.uniform(0.3, 1.0), usd * draw.uniform(0.3, 1.0)
        path = [round(begin + (end - begin) * (tick // 60 * 60) / ticks, 3) for tick in range(ticks)]
        sites.append(_site(draw, kind, path, [_PLENTY] * ticks))
    return Market(sites)


def own_nights(draw: random.Random, ticks: int) -> Market:
    """Eight machines of one's own that cost nothing and are free by night, beside on demand and flickering spot."""
    night = [8 if math.cos(2 * math.pi * tick * TICK_S / 86400) > 0.2 else 0 for tick in range(ticks)]
    sites = [_on_demand(draw, "a100", ticks), _site(draw, "a10g", [0.0] * ticks, night, "own")]
    usd = [round(_KINDS["l4"][0] / 3, 3)] * ticks
    sites.append(_site(draw, "l4", usd, _runs(draw, ticks, 900.0, 28800.0, 16), "l4 spot"))
    return Market(sites)


def jumps(draw: random.Random, ticks: int) -> Market:
    """Three spot places at each of which the number of machines is drawn anew every twenty minutes, 0 to 8."""
    sites = [_on_demand(draw, "l4", ticks)]
    for kind in ("l4", "a10g", "a100"):
        machines = [each for _ in range(ticks // 20 + 1) for each in [draw.randint(0, 8)] * 20][:ticks]
        usd = [round(_KINDS[kind][0] * draw.uniform(0.25, 0.6), 3)] * ticks
        sites.append(_site(draw, kind, usd, machines, f"{kind} spot"))
    return Market(sites)


def lone(draw: random.Random, ticks: int) -> Market:
    """One machine at the least and three at the most, for $5 an hour; a spot place that comes for hours."""
    sites = [_on_demand(draw, "h100", ticks), _on_demand(draw, "t4", ticks)]
    usd = [round(_KINDS["h100"][0] / 3, 3)] * ticks
    sites.append(_site(draw, "h100", usd, _runs(draw, ticks, 3600.0, 43200.0, 2), "h100 spot"))
    return Market(sites, least=1, most=3, usd_per_hour=5.0)


# -- published records, transcribed after the policy of the markets above had been measured on these ------------------


def v100_zones(draw: random.Random, ticks: int) -> Market:
    """V100s in three zones as they ran in August 2023, up to four in each; on demand beside them."""
    usd = 3.06  # of a p3.2xlarge on demand
    speed = 100 * 125 * draw.uniform(0.5, 1.1)
    sites = [Site("v100", speed, 125.0, [usd] * ticks, [_PLENTY] * ticks)]
    for zone, looks in V100_MACHINES.items():
        begin, price = draw.randrange(len(looks)), round(usd * draw.uniform(0.25, 0.45), 3)
        machines = [looks[(begin + int(tick * TICK_S / LOOK_S)) % len(looks)] for tick in range(ticks)]
        sites.append(Site(f"v100 spot {zone}", speed, 125.0, [price] * ticks, machines))
    return Market(sites)


def g2_auction(draw: random.Random, ticks: int) -> Market:
    """Three zones with the prices of one day's auction of g2.8xlarge, each from another minute on; on demand for $2.60.

    The bid is that price: where the auction is above it there are no machines.
    """
    speed = 100 * 10 * draw.uniform(0.5, 1.1)
    sites = [Site("g2", speed, 10.0, [2.6] * ticks, [_PLENTY] * ticks)]
    for zone in "abc":
        begin = draw.randrange(len(G2_USD))
        usd = [G2_USD[(begin + tick) % len(G2_USD)] for tick in range(ticks)]
        machines = [16 if each <= 2.6 else 0 for each in usd]
        sites.append(Site(f"g2 auction {zone}", speed, 10.0, [min(each, 2.6) for each in usd], machines))
    return Market(sites)


# -- written once the policy had its last change, and run once --------------------------------------------------------


def regimes(draw: random.Random, ticks: int) -> Market:
    """Five kinds, each plentiful and cheap, usual, or scarce and dear in turn, for four hours in the mean."""
    sites = [_on_demand(draw, "a10g", ticks)]
    for kind, (listed, _) in _KINDS.items():
        state, usd, machines = draw.randrange(3), list[float](), list[int]()
        for _ in range(ticks):
            if draw.random() < 1 / 240:
                state = draw.randrange(3)
            usd.append(round(listed * (0.2, 0.45, 1.2)[state], 3))
            machines.append((16, 6, 1)[state])
        sites.append(_site(draw, kind, usd, machines, f"{kind} spot"))
    return Market(sites)


def noisy(draw: random.Random, ticks: int) -> Market:
    """Three spot places whose machines come and go one by one around six, and whose prices wander by the hour."""
    sites = [_on_demand(draw, "l4", ticks), _on_demand(draw, "h100", ticks)]
    for kind in ("l4", "a100", "h100"):
        level, price, usd, machines = 0.0, draw.uniform(0.25, 0.5), list[float](), list[int]()
        for tick in range(ticks):
            if tick % 10 == 0:
                level = 0.9 * level + draw.gauss(0.0, 1.5)
            if tick % 60 == 0:
                price = min(0.9, max(0.15, price * math.exp(draw.gauss(0.0, 0.08))))
            usd.append(round(_KINDS[kind][0] * price, 3))
            machines.append(max(0, round(6 + level)))
        sites.append(_site(draw, kind, usd, machines, f"{kind} spot"))
    return Market(sites)


# -- written once a replica left for what it had overpaid, and run once ------------------------------------------------


def k80_zone(draw: random.Random, ticks: int) -> Market:
    """Machines of eight K80s in one zone in October 2022, there or not, from two moments on; on demand beside them."""
    speed, usd = 100 * 60 * draw.uniform(0.5, 1.1), 14.4  # of a p2.16xlarge on demand
    sites = [Site("k80", speed, 60.0, [usd] * ticks, [_PLENTY] * ticks)]
    for zone in "ab":
        begin = draw.randrange(len(K80_MACHINES))
        machines = [8 * K80_MACHINES[(begin + int(tick * TICK_S / 600.0)) % len(K80_MACHINES)] for tick in range(ticks)]
        sites.append(Site(f"k80 spot {zone}", speed, 60.0, [round(usd * draw.uniform(0.3, 0.4), 3)] * ticks, machines))
    return Market(sites, least=2, most=8, usd_per_hour=60.0)


def v100_rare(draw: random.Random, ticks: int) -> Market:
    """A V100 zone in February 2023 that had a machine now and then, for ten minutes or hours; a steady T4 beside it."""
    sites = [_on_demand(draw, "t4", ticks), Site("v100", 12_500.0, 125.0, [3.06] * ticks, [_PLENTY] * ticks)]
    for zone in "ab":
        begin = draw.randrange(len(V100_RARE))
        machines = [4 * V100_RARE[(begin + int(tick * TICK_S / 195.0)) % len(V100_RARE)] for tick in range(ticks)]
        sites.append(Site(f"v100 spot {zone}", 12_500.0, 125.0, [0.92] * ticks, machines))
    return Market(sites, least=2, most=8)


def preemptible(draw: random.Random, ticks: int) -> Market:
    """Two kinds of preemptible machines: each lost in its first three hours, or later, or after a day; soon replaced.

    The shape is that of Kadupitiya et al., Modeling the temporally constrained preemptions of transient cloud VMs (HPDC
    2020): many early losses, few afterwards, all that are left at the limit of 24 hours.
    """
    sites = [_on_demand(draw, "l4", ticks), _on_demand(draw, "a100", ticks)]
    for kind in ("l4", "a100"):
        machines = [0] * ticks
        for _ in range(8):
            tick = draw.randrange(60)
            while tick < ticks:
                lasts_h = draw.choice([min(24.0, draw.expovariate(1 / 1.5)), draw.uniform(3.0, 22.0), 24.0])
                end = min(ticks, tick + max(1, round(lasts_h * 3600 / TICK_S)))
                machines[tick:end] = [each + 1 for each in machines[tick:end]]
                tick = end + round(math.exp(draw.uniform(math.log(5), math.log(120))))
        sites.append(_site(draw, kind, [round(_KINDS[kind][0] * 0.3, 3)] * ticks, machines, f"{kind} preemptible"))
    return Market(sites)


# -- prices that change faster than a start pays for: written after all those, and changed nothing --------------------


def flips(draw: random.Random, ticks: int) -> Market:
    """Three zones of one kind, each usual or 1.5 to 4 times as dear, in turn for ten minutes to two hours."""
    sites = [_on_demand(draw, "a100", ticks)]
    for zone in "abc":
        usd, high = list[float](), False
        while len(usd) < ticks:
            price = _KINDS["a100"][0] / 3 * (draw.uniform(1.5, 4.0) if high else draw.uniform(0.8, 1.2))
            usd += [round(price, 3)] * round(math.exp(draw.uniform(math.log(10), math.log(120))))
            high = not high
        sites.append(_site(draw, "a100", usd[:ticks], [16] * ticks, f"a100 spot {zone}"))
    return Market(sites)


def reverting(draw: random.Random, ticks: int) -> Market:
    """Four zones of one kind whose prices wander every five minutes, and come back within an hour."""
    sites = [_on_demand(draw, "a10g", ticks)]
    for zone in "abcd":
        level, usd = 0.0, list[float]()
        for tick in range(ticks):
            if tick % 5 == 0:
                level = 0.93 * level + draw.gauss(0.0, 0.15)
            usd.append(round(_KINDS["a10g"][0] / 3 * math.exp(level), 3))
        sites.append(_site(draw, "a10g", usd, [16] * ticks, f"a10g spot {zone}"))
    return Market(sites)


def peaks(draw: random.Random, ticks: int) -> Market:
    """Three kinds at .3 of their price for 90 minutes in the mean, then at .5 to 2 times it for 5 or 60."""
    sites = [_on_demand(draw, "h100", ticks)]
    for kind in ("l4", "a100", "h100"):
        usd = list[float]()
        while len(usd) < ticks:
            usd += [round(_KINDS[kind][0] * 0.3, 3)] * round(draw.expovariate(1 / 90) + 1)
            price = round(_KINDS[kind][0] * draw.uniform(0.5, 2.0), 3)
            usd += [price] * round(draw.expovariate(1 / draw.choice([5, 60])) + 1)
        sites.append(_site(draw, kind, usd[:ticks], [16] * ticks, f"{kind} spot"))
    return Market(sites)


# -- drawn: nobody chose what they are --------------------------------------------------------------------------------


def _between(draw: random.Random, low: float, high: float) -> float:
    """Log-uniform."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _drawn_prices(law: random.Random, draw: random.Random, usd: float, ticks: int) -> list[float]:
    """Fixed, or wandering around a level and back, or of two levels in turn; in minutes or in days."""
    level, shape = usd * law.uniform(0.2, 0.6), law.choice(["fixed", "wanders", "turns"])
    minutes, every = _between(law, 10.0, 2880.0), law.choice([1, 5, 60])
    spread, factor = law.uniform(0.05, 0.5), _between(law, 1.3, 6.0)
    if shape == "fixed":
        return [round(level, 3)] * ticks
    found, log, high = list[float](), draw.gauss(0.0, spread), draw.random() < 0.5
    keeps = math.exp(-every / minutes)
    for tick in range(ticks):
        if tick % every == 0:
            log = keeps * log + math.sqrt(1 - keeps**2) * draw.gauss(0.0, spread)
            high ^= draw.random() > keeps
        found.append(round(level * (math.exp(log) if shape == "wanders" else factor if high else 1.0), 3))
    return found


def _drawn_machines(law: random.Random, draw: random.Random, ticks: int) -> list[int]:
    """Enough, or all or none in turn, or coming and going one by one; in minutes or in days."""
    shape, many = law.choice(["enough", "runs", "single"]), law.choice([2, 4, 8, 16])
    shortest_s, minutes = _between(law, 300.0, 7200.0), _between(law, 30.0, 1440.0)
    longest_s = shortest_s * _between(law, 2.0, 50.0)
    if shape == "enough":
        return [16] * ticks
    if shape == "runs":
        return _runs(draw, ticks, shortest_s, longest_s, many)
    there, found = many // 2, list[int]()
    for _ in range(ticks):
        there += (draw.random() < (many - there) / minutes) - (draw.random() < there / minutes)
        found.append(there)
    return found


def drawn(number: int, draw: random.Random, ticks: int) -> Market:
    """One or two kinds on demand and two to five spot places, whose laws are drawn from the market's number."""
    law = random.Random(f"law {number}")
    sites = [_on_demand(draw, kind, ticks) for kind in law.sample(sorted(_KINDS), law.choice([1, 2]))]
    for place in range(law.randint(2, 5)):
        kind = law.choice(sorted(_KINDS))
        usd = _drawn_prices(law, draw, _KINDS[kind][0], ticks)
        sites.append(_site(draw, kind, usd, _drawn_machines(law, draw, ticks), f"{kind} spot {place}"))
    least = law.choice([1, 2, 4])
    dearest = max(site.usd[0] for site in sites[:2] if len(set(site.usd)) == 1)
    return Market(sites, least, least * law.choice([2, 4]), dearest * least * law.uniform(1.2, 3.0))


DRAWN: Mapping[str, Generator] = {f"drawn {number}": partial(drawn, number) for number in range(24)}
FAST: Mapping[str, Generator] = {"flips": flips, "reverting": reverting, "peaks": peaks}
FRESH: Mapping[str, Generator] = {
    "k80 zone, 2022": k80_zone,
    "v100 rare, 2023": v100_rare,
    "preemptible": preemptible,
}
LAST: Mapping[str, Generator] = {"regimes": regimes, "noisy": noisy}
PUBLISHED: Mapping[str, Generator] = {"v100 zones, 2023": v100_zones, "g2 auction, 2016": g2_auction}
OTHERS: Mapping[str, Generator] = {"drift": drift, "own nights": own_nights, "jumps": jumps, "lone": lone}
