"""The most tokens per dollar in two markets of `fleet` for whoever knows how they are drawn, and sees the present.

    PYTHONPATH=tests/support:benchmarks python benchmarks/fleet_law.py

Nobody here knows the future, and nobody who does not know it can have more, but for what is left out in the models
below: by dynamic programming, on average over endless time, in parts of what the clairvoyant has on a long path of the
same prices and speeds. What is seen is acted upon `LATE` minutes later, as by a policy that asks once a minute; a
machine takes `BOOT` minutes until it trains and one to leave; `least` machines run or start at all times.

*jumps*: every 20 minutes each place has 0 to 8 machines anew, and the newest ones above that number are lost. The state
is how many run at each of the three places. On demand are those that are missing from `least`.

*flips*: in steps of five minutes, the time that a start takes. The state is the phase, price and age of each zone.
Prices have five levels (two usual, three dear). Machines are decided on one by one, as `usd_per_hour` is left out: the
`least` always have a place, the others may have none.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from statistics import mean

import fleet
import numpy as np
from fleet_markets import Market, Site, flips, jumps
from numpy.typing import NDArray

Array = NDArray[np.float32]

BOOT, LEAVE, LATE = 5.0, 1.0, 1.0  # minutes
_DAYS = 4  # of the table of `fleet`, whose markets these are
_BLOCK, _MOST = 20, 8  # of jumps: minutes between two draws, machines of a place
_STEP, _AGES = 5.0, 24  # of flips: minutes, and how many steps the longest phase has


def _usd(site: Site) -> float:
    """US dollars a minute, at the first tick."""
    return site.usd[0] / 60


def _tokens(site: Site) -> float:
    """Tokens a minute."""
    return site.tokens_per_s * 60


def _root(loss: Callable[[float], float], guess: float) -> float:
    """US dollars per token at which a run that is paid so much for tokens has no loss and no gain."""
    before, after = guess, guess * 1.05
    lost = loss(before)
    for _ in range(8):
        now = loss(after)
        if abs(after - before) < 1e-4 * guess or now == lost:
            break
        before, after, lost = after, after - now * (after - before) / (now - lost), now
    return after


# -- jumps ------------------------------------------------------------------------------------------------------------


def best_in_jumps(market: Market, guess: float) -> float:
    """US dollars per token. `guess`: a number that is near it."""
    on_demand, *spots = market.sites
    usd, made = np.array([_usd(each) for each in spots]), np.array([_tokens(each) for each in spots])
    side = _MOST + 1
    fleets = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    count = fleets.sum(axis=1)
    missing = np.maximum(0, market.least - count)
    both = np.minimum(fleets[:, None, :], fleets[None, :, :])
    survivors = np.ravel_multi_index(np.moveaxis(both, -1, 0), (side,) * 3)  # by fleet and draw
    kept_usd, kept_made = both @ usd, both @ made  # by survivors and next fleet
    left_usd, left_made = (fleets @ usd)[:, None] - kept_usd, (fleets @ made)[:, None] - kept_made
    relative = np.zeros(side**3)  # of each fleet, to the empty one

    def loss(per_token: float) -> float:
        """US dollars of 20 minutes less the worth of their tokens, at the best."""
        nonlocal relative
        new = (_BLOCK - LATE) * (fleets @ usd) - per_token * (_BLOCK - LATE - BOOT) * (fleets @ made)
        new[count > market.most] = math.inf
        moves = LATE * kept_usd - per_token * (LATE + BOOT) * kept_made
        moves += (LATE + LEAVE) * left_usd - per_token * LATE * left_made
        dear = []
        for had in range(market.least + 1):
            idle = BOOT * np.maximum(0, missing - had)
            dear.append(_BLOCK * _usd(on_demand) * missing - per_token * _tokens(on_demand) * (_BLOCK * missing - idle))
        while True:
            found = moves[:, None, :] + np.stack(dear)[None] + (new + relative)
            found = found.reshape(-1, market.least + 1, side, side, side)
            for axis in (2, 3, 4):  # the best of all fleets that a draw allows
                np.minimum.accumulate(found, axis=axis, out=found)
            found = found.reshape(-1, market.least + 1, side**3)
            after = found[survivors, missing[:, None], np.arange(side**3)[None, :]].mean(axis=1)
            low, high = (after - relative).min(), (after - relative).max()
            relative = after - after[0]
            if high - low < 1e-4 * _BLOCK * _usd(on_demand):
                return float(low + high) / 2

    return _root(loss, guess)


# -- flips ------------------------------------------------------------------------------------------------------------

_SHORTEST, _LONGEST, _USUAL = 10.0, 120.0, 2
_USD = np.array([0.9, 1.1, *(1.5 + 2.5 * (each + 0.5) / 3 for each in range(3))], dtype=np.float32) * 2.5 / 3 / 60
_ZONE = _AGES * len(_USD)


def _lasts(minutes: float) -> float:
    """The probability that a phase is longer."""
    return min(1.0, max(0.0, math.log(_LONGEST / max(minutes, _SHORTEST)) / math.log(_LONGEST / _SHORTEST)))


_ENDS = [1 - _lasts(_STEP * (age + 1)) / _lasts(_STEP * age) for age in range(_AGES)]


def _later(value: Array, axis: int) -> Array:
    """Mean of `value` a step later, over what a zone then is."""
    moved = np.moveaxis(value, axis, 0)
    now = moved.reshape(_AGES, len(_USD), *moved.shape[1:])
    found = np.empty_like(now)
    usual, dear = now[0, :_USUAL].mean(axis=0), now[0, _USUAL:].mean(axis=0)
    for age, ends in enumerate(_ENDS):
        older = now[min(age + 1, _AGES - 1)]
        found[age, :_USUAL] = (1 - ends) * older[:_USUAL] + ends * dear
        found[age, _USUAL:] = (1 - ends) * older[_USUAL:] + ends * usual
    return np.moveaxis(found.reshape(moved.shape), 0, axis)


def best_in_flips(market: Market, guess: float) -> float:
    """US dollars per token. `guess`: a number that is near it."""
    on_demand, *zones = market.sites
    made = [np.float32(_tokens(each)) for each in (*zones, on_demand)]
    shapes = [(_ZONE, 1, 1), (1, _ZONE, 1), (1, 1, _ZONE)]
    usd = [*(np.tile(_USD, _AGES).reshape(shape) for shape in shapes), np.full((1, 1, 1), _usd(on_demand), np.float32)]
    values = {count: [np.zeros((_ZONE,) * 3, np.float32)] * count for count in (4, 5)}  # the fifth place is none

    def loss_of_one(per_token: np.float32, places: int) -> float:
        """US dollars of a step of one machine less the worth of its tokens, at the best."""
        while True:
            value = values[places]
            starts = value[0] + np.float32(BOOT) * usd[0]
            for place in range(1, 4):
                np.minimum(starts, value[place] + np.float32(BOOT) * usd[place], out=starts)
            if places > 4:
                np.minimum(starts, value[4], out=starts)
            after = []
            for place in range(places):
                best = starts
                if place < 4:
                    worth, price = per_token * made[place], usd[place]
                    goes = starts + (np.float32(LATE + LEAVE) * price - np.float32(LATE) * worth)
                    best = np.minimum(value[place] + np.float32(_STEP) * (price - worth), goes)
                for axis in range(3):
                    best = _later(best, axis)
                after.append(best)
            change = after[0] - value[0]
            first = after[0].flat[0]
            values[places] = [each - first for each in after]
            if change.max() - change.min() < 1e-4:
                return float(change.max() + change.min()) / 2

    def loss(per_token: float) -> float:
        price, further = np.float32(per_token), market.most - market.least
        return market.least * loss_of_one(price, 4) + further * loss_of_one(price, 5)

    return _root(loss, guess)


# -- of the clairvoyant -----------------------------------------------------------------------------------------------


def part(name: str, seed: int, days: int) -> float:
    """The best tokens per dollar in the market of a seed, of the clairvoyant's in so many days with its speeds."""
    generator, best = {"jumps": (jumps, best_in_jumps), "flips": (flips, best_in_flips)}[name]
    a_day = round(86400 / fleet.TICK_S)
    market = generator(random.Random(f"{name} {seed}"), _DAYS * a_day)
    path = generator(random.Random(seed), days * a_day)
    sites: list[Site] = []
    for here, there in zip(market.sites, path.sites, strict=True):
        usd: Sequence[float] = there.usd if name == "flips" else [here.usd[0]] * len(there.usd)
        sites.append(Site(here.name, here.tokens_per_s, here.tflops, usd, there.machines))
    ideal = fleet.clairvoyant(Market(sites), math.inf)
    return ideal.usd / ideal.tokens / best(market, ideal.usd / ideal.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=40, help="of the clairvoyant's path")
    parser.add_argument("--repetitions", type=int, default=6, help="seeds of each market")
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--markets", nargs="*", default=["jumps", "flips"])
    given = parser.parse_args()
    for name in given.markets:
        parts = []
        for seed in range(given.first, given.first + given.repetitions):
            parts.append(part(name, seed, given.days))
            print(f"{name}, seed {seed}: at most {parts[-1]:.3f} of the clairvoyant's tokens per dollar", flush=True)
        print(f"{name}: {mean(parts):.3f}", flush=True)


if __name__ == "__main__":
    main()
