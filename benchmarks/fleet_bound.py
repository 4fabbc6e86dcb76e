"""The fewest dollars for which anybody who knows the future reaches a goal in a market of `fleet_markets`; needs scipy.

A linear programme in steps of five minutes, the time that a machine takes to start: n machines of each place in each
step, of which b have started in it; they are paid for and make no tokens yet. Machines may be fractions; a step has the
lowest price and the most machines of its minutes; leaving costs nothing. All of that makes it cheaper than it can be.
At least `least` machines run as far as each minute of the step has them within `usd_per_hour`, and never more than
`most` and `usd_per_hour` allow. A policy can be better only by running fewer than `least`, as for a moment when it
moves its dearest machine, or by an end between those that are looked at.
"""

import math
from collections.abc import Sequence

import numpy as np
from fleet_markets import TICK_S, Market
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
