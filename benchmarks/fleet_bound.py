"""Bounds for `fleet`: with the future known, and for the market "lone" with its law known but not its future.

`fewest_usd`, which needs scipy: a linear programme in steps of five minutes, the time that a machine takes to start: n
machines of each place in each step, of which b have started in it; they are paid for and make no tokens yet. Machines
may be fractions; a step has the lowest price and the most machines of its minutes; leaving costs nothing. All of that
makes it cheaper than it can be.
At least `least` machines run as far as each minute of the step has them within `usd_per_hour`, and never more than
`most` and `usd_per_hour` allow. A policy can be better only by running fewer than `least`, as for a moment when it
moves its dearest machine, or by an end between those that are looked at.

`known_law` prints it: the spot place of "lone" is gone and back for times that are log-uniform from one to twelve
hours. While it is gone one machine trains on demand, and the limit pays for no second one, so that spot can be asked
only by ending that machine (a minute of leaving, and in vain five of a new start). The best moments to ask are found
backwards from the longest time, in steps of five minutes, for the tokens per dollar that they themselves bring about;
what follows a success is taken as good as it can be.
"""

import math
import random
from collections.abc import Sequence

import numpy as np
from fleet_markets import TICK_S, Market, lone
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

STEP = 5  # ticks
PARTS = (0.35, 0.5, 0.6, 0.7, 0.8, 0.86, 0.9, 0.94, 0.97, 1.0)  # of the hours: when the run may end


def fewest_usd(market: Market, goal: float, hours: float) -> float:
    """The fewest dollars for `goal` tokens within so many hours, over ends after the `PARTS` of them."""
    return min(_fewest_usd(market, goal, round(part * hours * 3600 / TICK_S / STEP)) for part in PARTS)


def _fewest_usd(market: Market, goal: float, steps: int) -> float:
    """Infinite if so many steps are too few."""
    sites, hours = market.sites, STEP * TICK_S / 3600
    spans = [range(step * STEP, (step + 1) * STEP) for step in range(steps)]
    most = [[max(min(site.machines[t], market.most) for t in span) for span in spans] for site in sites]
    usd = np.array([[min(site.usd[t] for t in span) for span in spans] for site in sites])
    tokens = [site.tokens_per_s * 3600 * hours / goal for site in sites]
    count = len(sites) * steps  # variables: n by site and step, then b
    rows: list[tuple[Sequence[int], Sequence[float], float]] = []  # columns, factors, upper bound
    for step, span in enumerate(spans):
        all_n = [site * steps + step for site in range(len(sites))]
        for n in all_n:
            before = [n - 1] if step else []
            rows.append(([n, count + n, *before], [1.0, -1.0, *([-1.0] * len(before))], 0.0))
        rows.append((all_n, [-1.0] * len(sites), -float(_kept(market, span))))
        rows.append((all_n, [1.0] * len(sites), float(market.most)))
        rows.append((all_n, list(usd[:, step]), market.usd_per_hour))
    made = [tokens[site] for site in range(len(sites)) for _ in spans]
    rows.append((range(2 * count), [*(-each for each in made), *made], -1.0))
    data = [factor for _, factors, _ in rows for factor in factors]
    columns = [column for each, _, _ in rows for column in each]
    starts = np.cumsum([0, *(len(each) for each, _, _ in rows)])
    found = linprog(
        np.concatenate([usd.ravel() * hours, np.zeros(count)]),
        A_ub=csr_matrix((data, columns, starts), shape=(len(rows), 2 * count)),
        b_ub=[bound for _, _, bound in rows],
        bounds=[(0.0, each) for _ in range(2) for site in most for each in site],
        method="highs",
    )
    return float(found.fun) if found.status == 0 else math.inf


def _kept(market: Market, span: range) -> int:
    """How many of `least` machines there are in each tick, and can be paid for at the highest price of each place."""
    prices = sorted(
        max(site.usd[t] for t in span)
        for site in market.sites
        for _ in range(min(market.least, *(site.machines[t] for t in span)))
    )
    kept = [usd for rank, usd in enumerate(prices[: market.least]) if sum(prices[: rank + 1]) <= market.usd_per_hour]
    return len(kept)


# -- the law known, the future not ------------------------------------------------------------------------------------

_SHORTEST_S, _LONGEST_S, _GRID_S, _BOOT_S, _LEAVE_S = 3600.0, 43200.0, 300.0, 300.0, 60.0
_STEPS = round(_LONGEST_S / _GRID_S)


def known_law(dear_usd: float, spot_usd: float, spot_speed: float, spots: int = 2) -> float:
    """The most tokens per dollar in "lone", of the clairvoyant's, on average over time.

    `dear_usd`, `spot_usd`: US dollars an hour of a machine. `spot_speed`: of the speed on demand.
    """
    low, high = 0.0, 1e-2  # US dollars per token of a machine on demand that makes one a second
    for _ in range(30):
        usd = (low + high) / 2
        low, high = (usd, high) if _cycle(usd, dear_usd, spot_usd, spot_speed, spots) > 0 else (low, usd)
    return (dear_usd + spots * spot_usd) / 3600 / (1 + spots * spot_speed) / high


def _cycle(usd_per_token: float, dear_usd: float, spot_usd: float, spot_speed: float, spots: int) -> float:
    """US dollars of one absence and the presence after it, less the worth of their tokens, at the best times to ask."""

    def after(lost_s: float) -> float:
        """From a success on, where the place has been back for `lost_s`."""
        lengths = (_SHORTEST_S * math.pow(_LONGEST_S / _SHORTEST_S, (each + 0.5) / 40) for each in range(40))
        left = [max(0.0, length - lost_s) for length in lengths]
        paid = sum(left) / 40 * spot_usd / 3600
        return spots * (paid - usd_per_token * spot_speed * sum(max(0.0, each - _BOOT_S) for each in left) / 40)

    def gone(step: int) -> float:
        """The probability that the place is still gone so many steps after it went."""
        return min(1.0, max(0.0, math.log(_LONGEST_S / max(1.0, step * _GRID_S)) / math.log(_LONGEST_S / _SHORTEST_S)))

    success = [after((each + 0.5) * _GRID_S) for each in range(_STEPS + 1)]
    still, cost = [gone(step) for step in range(_STEPS + 1)], [0.0] * (_STEPS + 1)
    for asked in reversed(range(_STEPS)):
        found = []
        for step in range(asked + 1, _STEPS + 1):
            seconds = (step - asked) * _GRID_S
            usd = (seconds + _LEAVE_S) * dear_usd / 3600 - usd_per_token * max(0.0, seconds - _BOOT_S)
            back = sum((still[k - 1] - still[k]) * success[step - k] for k in range(asked + 1, step + 1))
            found.append(usd + (back + still[step] * cost[step]) / still[asked])
        cost[asked] = min(found)
    return cost[0]


def main() -> None:
    for seed in range(6):
        dear, _, spot = lone(random.Random(f"lone {seed}"), 1).sites
        best = known_law(dear.usd[0], spot.usd[0], spot.tokens_per_s / dear.tokens_per_s)
        print(f"lone, seed {seed}: at most {best:.3f} of the clairvoyant's tokens per dollar", flush=True)


if __name__ == "__main__":
    main()
