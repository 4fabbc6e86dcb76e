"""The most that a family of policies without foresight attains in the markets of `fleet`, each tuned on its own seeds.

    PYTHONPATH=tests/support:benchmarks python benchmarks/fleet_family.py

A policy of the family knows what `placing` has to measure or to ask for: every place's speed and present number of
machines, and what the clairvoyant pays for a token on average in that very run. It has six numbers: it opens a machine
beyond `least` while a token costs at most `opens` times that average, and ends one from `closes` times on, at once; a
machine moves to the cheapest place once it has overpaid `starts` starts there, or at once where a token costs `jumps`
times as much; it has at most `cap` machines, and avoids places whose machines have lasted less than `lasts` starts.
The numbers are drawn at random, and those with the best mean over the same seeds are reported: more than the family
attains where it does not know the market in advance. Starts, leavings and limits are those of `fleet`.
"""

import argparse
import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import mean

import fleet
from fleet_markets import TICK_S, Market, Site

_BOOT, _LEAVE = round(fleet.BOOT_S / TICK_S), round(fleet.LEAVE_S / TICK_S)  # ticks
_KEEPS = 0.0  # tokens per dollar of a run that does not reach its goal


@dataclass(frozen=True)
class Numbers:
    """One policy of the family; see above."""

    opens: float
    closes: float
    starts: float
    jumps: float
    cap: float  # of the machines from `least` to `most`
    lasts: float

    @classmethod
    def drawn(cls, draw: random.Random) -> "Numbers":
        opens = draw.uniform(0.6, 1.8)
        starts = math.exp(draw.uniform(math.log(0.02), math.log(4.0)))
        jumps = math.exp(draw.uniform(math.log(1.05), math.log(6.0)))
        lasts = draw.choice([0.0, draw.uniform(0.0, 12.0)])
        return cls(opens, opens * draw.uniform(1.0, 2.0), starts, jumps, draw.choice([1.0, draw.random()]), lasts)


@dataclass
class _Held:
    site: Site
    since: int
    overpaid: float = 0.0  # US dollars
    leaves_at: int = 1 << 30


def tokens_per_usd(market: Market, goal: float, paid: float, numbers: Numbers) -> float:
    """Of one run up to `goal` tokens. `paid`: US dollars per token of the clairvoyant."""
    held: list[_Held] = []
    lived: dict[str, list[float]] = {site.name: [0.0, 0.0] for site in market.sites}  # ticks trained, ends
    cap = round(market.least + numbers.cap * (market.most - market.least))
    tokens = usd = 0.0
    for tick in range(len(market.sites[0].usd)):
        cost = {site.name: site.usd[tick] / 3600 / site.tokens_per_s for site in market.sites}
        for site in market.sites:
            for lost in sorted((each for each in held if each.site is site), key=lambda each: each.since)[
                site.machines[tick] :
            ]:
                held.remove(lost)
                lived[site.name][1] += 1
        for each in held:
            usd += each.site.usd[tick] * TICK_S / 3600
            if each.leaves_at > tick and tick > each.since + _BOOT:
                tokens += each.site.tokens_per_s * TICK_S
                lived[each.site.name][0] += 1
        if tokens >= goal:
            return tokens / usd
        held = [each for each in held if each.leaves_at > tick]
        room = {
            site.name: site.machines[tick] - sum(each.site is site for each in held)
            for site in market.sites
            if lived[site.name][1] < 3 or lived[site.name][0] / lived[site.name][1] >= numbers.lasts * _BOOT
        }
        kept = [each for each in held if each.leaves_at == 1 << 30]
        kept.sort(key=lambda each: cost[each.site.name])
        for rank, each in reversed(list(enumerate(kept))):
            here = cost[each.site.name]
            there = [site for site in market.sites if room.get(site.name, 0) > 0 and cost[site.name] < here]
            to = min(there, key=lambda site: cost[site.name], default=None)
            leaves = rank >= market.least and here > numbers.closes * paid
            if to is not None and tick >= each.since + _BOOT:
                each.overpaid += (here - cost[to.name]) * each.site.tokens_per_s * TICK_S
                enough = each.overpaid > numbers.starts * to.usd[tick] * fleet.BOOT_S / 3600
                leaves = leaves or ((enough or here > numbers.jumps * cost[to.name]) and room[to.name] > 0)
                room[to.name] -= leaves
            if leaves:
                each.leaves_at = tick + _LEAVE
                lived[each.site.name][1] += 1
        rate, count = sum(each.site.usd[tick] for each in held), sum(each.leaves_at > tick + _LEAVE for each in held)
        for site in sorted(market.sites, key=lambda site: cost[site.name]):
            there = sum(each.site is site for each in held)
            while there < site.machines[tick] and rate + site.usd[tick] <= market.usd_per_hour:
                wanted = count < market.least or (count < cap and cost[site.name] <= numbers.opens * paid)
                if not wanted or (site.name not in room and count >= market.least):
                    break
                held.append(_Held(site, tick))
                there, rate, count = there + 1, rate + site.usd[tick], count + 1
    return _KEEPS


def best(name: str, seeds: range, days: float, draws: int) -> tuple[str, float, Numbers]:
    """The best policy of the family in one market, and its mean part of the clairvoyant's tokens per dollar."""
    ticks = round(days * 86400 / TICK_S)
    runs = []
    for seed in seeds:
        market = fleet.MARKETS[name](random.Random(f"{name} {seed}"), ticks)
        goal = fleet._goal_of(market, ticks // 2)
        ideal = fleet.clairvoyant(market, goal)
        runs.append((market, goal, ideal.usd / ideal.tokens))
    found = []
    draw = random.Random(name)
    for numbers in (Numbers.drawn(draw) for _ in range(draws)):
        found.append((mean(tokens_per_usd(*each, numbers) * each[2] for each in runs), numbers))
    part, numbers = max(found, key=lambda each: each[0])
    return name, part, numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=6, help="seeds of each market")
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--draws", type=int, default=200, help="policies in each market")
    parser.add_argument("--markets", nargs="*", default=list(fleet.MARKETS))
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.repetitions)
    task = partial(best, seeds=seeds, days=given.days, draws=given.draws)
    with ProcessPoolExecutor(given.processes) as pool:
        for name, part, numbers in pool.map(task, given.markets):
            print(f"{name}: at most {part:.3f} of the clairvoyant's tokens per dollar, with {numbers}", flush=True)


if __name__ == "__main__":
    main()
