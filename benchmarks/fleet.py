"""What the choice of places costs and saves: tokens per dollar and hours to a goal, on virtual time.

    make bench-fleet

The policy is the real one: `PlaceBook` and `placing` over `fleet_policy.decide` and the state machine of attempts. The
machines, prices and capacities are those of `fleet_markets`, in ticks of a minute; a machine takes `BOOT_S` until it
trains, a round `ROUND_S`, an attempt that leaves `LEAVE_S`, and every second is billed, boots and leavings included.
Each run ends at a goal: the tokens that `least` machines would make in half of the days where tokens cost least.

Compared with: the best *fixed* fleet, one place and one number for the whole run, chosen afterwards; *cheapest first*,
which opens each machine where an hour costs least and there is one, and moves nobody; a *clairvoyant* that knows each
place's speed, price and capacity at each moment, has further machines at the best place alone, and starts and moves
them at once and for nothing; and a *foreseeing* one that knows the future too, and buys its machine-minutes beyond
`least` when they are cheap. All keep `least` machines and never more than `usd_per_hour` allows.
"""

import argparse
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

from fleet_markets import DRAWN, FAST, FRESH, LAST, OTHERS, PUBLISHED, TICK_S, TUNED, Market, Site
from measuring import Results, Sample, heading, markdown, publish, sources_of

from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.executors.contract import (
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)
from diloco_orchestrator.executors.places import Places
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.inspection.costs import LegCost
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.supervision import fleet_policy
from diloco_orchestrator.supervision.attempt import ReplicaView, follow
from diloco_orchestrator.supervision.attempt_types import (
    Alive,
    AttemptPolicy,
    BeatSeen,
    CancelAsked,
    Cancelling,
    Ended,
    Event,
    IntentWritten,
    LaunchFailed,
    LaunchReturned,
    Outcome,
    TookPart,
    VendorSaid,
)
from diloco_orchestrator.supervision.budgets import limit_reached, next_round_usd
from diloco_orchestrator.supervision.place_book import PlaceBook

BOOT_S, ROUND_S, LEAVE_S = 300.0, 600.0, 60.0


@dataclass
class Outcomes:
    """What a run came to, up to the goal."""

    tokens: float = 0.0
    usd: float = 0.0
    hours: float = 0.0
    reached: bool = False
    ends: int = 0  # attempts that the policy ended
    above_s: float = 0.0  # the longest time for which machines together cost more than `usd_per_hour`
    _above_s: float = 0.0  # by now
    highest_usd: float = 0.0  # an hour
    idle_usd: float = 0.0  # for machines that start or leave
    launches: int = 0

    @property
    def tokens_per_usd(self) -> float:
        return self.tokens / self.usd if self.usd else 0.0

    def add(self, tokens: float, rate_usd: float, market: Market) -> None:
        """Count one tick at `rate_usd` an hour."""
        self.tokens += tokens
        self.usd += rate_usd * TICK_S / 3600
        self.hours += TICK_S / 3600
        self._above_s = self._above_s + TICK_S if rate_usd > market.usd_per_hour + 1e-6 else 0.0
        self.above_s = max(self.above_s, self._above_s)
        self.highest_usd = max(self.highest_usd, rate_usd)


# -- the policy -------------------------------------------------------------------------------------------------------


class Vendor:
    """An executor that has a price, and is launched by the world below."""

    shares_machine, free_until_taken = True, False

    def __init__(self, site: Site, world: "World") -> None:
        self.name, self._site, self._world = site.name, site, world

    def price(self, request: LaunchRequest) -> Price:
        return Price(self._site.usd[self._world.tick], "market", self._site.tflops)


@dataclass
class Machine:
    """A machine that an attempt has."""

    site: Site
    since: float
    leaves_at: float = math.inf
    averaged: bool = False


@dataclass
class World:
    """A run of the policy in a market."""

    market: Market
    goal: float
    max_cost_usd: float | None = None
    boot_s: float = BOOT_S
    leave_s: float = LEAVE_S
    tick: int = 0
    views: dict[int, ReplicaView] = field(default_factory=dict)
    machines: dict[int, Machine] = field(default_factory=dict)  # by replica id
    found: Outcomes = field(default_factory=Outcomes)
    places_of: dict[tuple[int, int], str] = field(default_factory=dict)
    worked: dict[int, float] = field(default_factory=dict)  # seconds in the open round
    halting: bool = False

    @property
    def now(self) -> float:
        return self.tick * TICK_S

    def run(self) -> Outcomes:
        market = self.market
        least_to_most = f"{market.least}..{market.most}"
        config = make_config({"entrypoint": "m:f", "replicas": least_to_most, "max_cost_usd": self.max_cost_usd})
        policy = AttemptPolicy.of(config)
        vendors = {site.name: cast(ServerlessExecutor, Vendor(site, self)) for site in market.sites}
        places = Places(vendors, usd_per_hour=market.usd_per_hour)
        book = PlaceBook(places, config, lambda *who: self.places_of.get(who, ""), 0)
        self.views = {i: ReplicaView(i) for i in range(config.most_replicas)}
        for self.tick in range(len(market.sites[0].usd)):
            self._advance(policy)
            if self.tick and self.tick % round(ROUND_S / TICK_S) == 0:
                book.read(self._commit())
                if self.halting:
                    self.found.usd += (
                        sum(each.site.usd[self.tick] for each in self.machines.values()) * self.leave_s / 3600
                    )
                    break
            if self.max_cost_usd is not None and self.found.usd >= self.max_cost_usd:  # every machine is ended at once
                self.found.usd += sum(each.site.usd[self.tick] for each in self.machines.values()) * self.leave_s / 3600
                break
            self._step(book, config, policy)
            if self.found.tokens >= self.goal:
                self.found.reached = True
                break
        return self.found

    def _apply(self, replica_id: int, event: Event, policy: AttemptPolicy) -> None:
        self.views[replica_id], _ = follow(self.views[replica_id], event, self.now, policy)
        if not isinstance(self.views[replica_id].state, Alive):
            machine = self.machines.pop(replica_id, None)
            if machine is not None and machine.averaged and isinstance(self.views[replica_id].state, Ended):
                self.views[replica_id], _ = follow(self.views[replica_id], TookPart(), self.now, policy)

    def _advance(self, policy: AttemptPolicy) -> None:
        """Preemptions, heartbeats, ends, work and bills of the minute before `now`."""
        for site in self.market.sites:
            there = [i for i, each in self.machines.items() if each.site is site]
            there.sort(key=lambda i: self.machines[i].since)
            for replica_id in there[site.machines[self.tick] :]:
                self._apply(replica_id, VendorSaid(ReplicaStatus(ReplicaState.PREEMPTED)), policy)
        tokens = 0.0
        for replica_id, machine in list(self.machines.items()):
            if self.now > machine.leaves_at:
                self._apply(replica_id, VendorSaid(ReplicaStatus(ReplicaState.CANCELLED)), policy)
            elif machine.leaves_at == math.inf and self.now >= machine.since + self.boot_s:
                self._apply(replica_id, BeatSeen(self.tick), policy)
                if self.now > machine.since + self.boot_s:
                    tokens += machine.site.tokens_per_s * TICK_S
                    self.worked[replica_id] = self.worked.get(replica_id, 0.0) + TICK_S
        rate = sum(each.site.usd[self.tick] for each in self.machines.values())
        idle = [
            each for each in self.machines.values() if each.leaves_at < math.inf or self.now <= each.since + self.boot_s
        ]
        self.found.idle_usd += sum(each.site.usd[self.tick] for each in idle) * TICK_S / 3600
        self.found.add(tokens, rate, self.market)

    def _commit(self) -> Iterator[Commit]:
        answers = []
        for replica_id, seconds in self.worked.items():
            if (machine := self.machines.get(replica_id)) is not None:
                machine.averaged = True
                attempt, tokens = self.views[replica_id].attempt, round(machine.site.tokens_per_s * seconds)
                who = {"replica_id": replica_id, "attempt": attempt}
                answers.append(SimpleNamespace(**who, averaged=True, tokens=tokens, train_s=seconds))
        self.worked = {}
        round_ = self.tick // round(ROUND_S / TICK_S)
        yield cast(Commit, SimpleNamespace(round=round_, leg=1, answers=answers))

    def _step(self, book: PlaceBook, config: RunConfig, policy: AttemptPolicy) -> None:
        """One step of the coordinator."""
        rate = sum(each.site.usd[self.tick] for each in self.machines.values())
        spent = LegCost(self.found.hours, self.found.usd, 0, rate)
        ended = self.now // ROUND_S * ROUND_S
        next_usd = next_round_usd(spent, [ended - ROUND_S, ended], self.now) if ended > ROUND_S else 0.0
        self.halting = self.halting or bool(limit_reached(config, spent, next_usd))
        views = list(self.views.values())
        elsewhere = book.observe(views, self.now)
        view = fleet_policy.FleetView(views, None, elsewhere=elsewhere)
        actions = fleet_policy.decide(view, self.now, policy, config.retry, config.contributions_needed)
        left = None if config.max_cost_usd is None else config.max_cost_usd - self.found.usd
        for action in [] if self.halting else book.place(actions, views, self.now, None, left):
            match action:
                case fleet_policy.Launch(replica_id, attempt, _, place, _):
                    self._launch(replica_id, attempt, place, policy)
                case fleet_policy.Cancel(replica_id, _, why):
                    self.found.ends += 1
                    self._apply(replica_id, CancelAsked(why), policy)
                    if replica_id in self.machines and isinstance(self.views[replica_id].state, Cancelling):
                        self.machines[replica_id].leaves_at = self.now + self.leave_s
                case _:
                    raise SystemExit(f"{action}: a market ended a run")

    def _launch(self, replica_id: int, attempt: int, place: str, policy: AttemptPolicy) -> None:
        site = next(each for each in self.market.sites if each.name == place)
        self.places_of[replica_id, attempt] = place
        self.views[replica_id] = self.views[replica_id].next_attempt(attempt, place)
        self._apply(replica_id, IntentWritten(), policy)
        self.found.launches += 1
        if sum(each.site is site for each in self.machines.values()) >= site.machines[self.tick]:
            self._apply(replica_id, LaunchFailed(Outcome.NO_CAPACITY, "no machine"), policy)
            return
        self.machines[replica_id] = Machine(site, self.now)
        handle = ReplicaHandle(place, "run", replica_id, attempt, "machine")
        self._apply(replica_id, LaunchReturned(handle, site.usd[self.tick]), policy)


# -- what it is compared with -----------------------------------------------------------------------------------------


def foreseeing(market: Market, goal: float) -> Outcomes:
    """Few dollars for `goal` tokens, by knowing all prices, capacities and speeds to come.

    `least` machines run at each tick until the end, where tokens cost least; beside them machine-minutes are bought in
    the order of their cost per token, whenever they come; the end is the one that costs least. Nothing starts, moves or
    rounds. `most` and `usd_per_hour` hold in each tick.
    """
    must, more = [], []  # (tokens, usd) of each tick; (usd per token, tick, tokens, usd) of each further machine in it
    for tick in range(len(market.sites[0].usd)):
        ranked = sorted(market.sites, key=lambda site: site.usd[tick] / site.tokens_per_s)
        there = [site for site in ranked for _ in range(min(site.machines[tick], market.most))]
        cheapest = min((site.usd[tick] for site in there), default=0.0)
        chosen: list[Site] = []
        rate = tokens = usd = 0.0
        for site in there:
            kept = max(0, market.least - len(chosen) - 1) * cheapest
            if len(chosen) == market.most or rate + site.usd[tick] + kept > market.usd_per_hour:
                continue
            chosen.append(site)
            rate += site.usd[tick]
            unit = site.tokens_per_s * TICK_S, site.usd[tick] * TICK_S / 3600
            if len(chosen) <= market.least:
                tokens, usd = tokens + unit[0], usd + unit[1]
            else:
                more.append((unit[1] / unit[0], tick, *unit))
        must.append((tokens, usd))
    more.sort()
    best = Outcomes()
    must_tokens = must_usd = 0.0
    for tick, (tokens, usd) in enumerate(must):
        must_tokens, must_usd = must_tokens + tokens, must_usd + usd
        if (tick + 1) % 60 and must_tokens < goal:
            continue
        bought_tokens, bought_usd = must_tokens, must_usd
        for _, when, unit_tokens, unit_usd in more:
            if bought_tokens >= goal or (best.reached and bought_usd >= best.usd):
                break
            if when <= tick:
                part = min(1.0, (goal - bought_tokens) / unit_tokens)
                bought_tokens, bought_usd = bought_tokens + part * unit_tokens, bought_usd + part * unit_usd
        if bought_tokens >= goal * (1 - 1e-9) and (not best.reached or bought_usd < best.usd):
            best = Outcomes(bought_tokens, bought_usd, (tick + 1) * TICK_S / 3600, True)
        if must_tokens >= goal:
            break
    return best


def clairvoyant(market: Market, goal: float) -> Outcomes:
    """At each tick the `least` machines by cost per token, and all that the best place has beside them."""
    found = Outcomes()
    for tick in range(len(market.sites[0].usd)):
        ranked = sorted(market.sites, key=lambda site: site.usd[tick] / site.tokens_per_s)
        there = [site for site in ranked for _ in range(min(site.machines[tick], market.most))]
        cheapest = min((site.usd[tick] for site in there), default=0.0)
        chosen: list[Site] = []
        rate = 0.0
        for site in there:
            kept = max(0, market.least - len(chosen) - 1) * cheapest
            wanted = len(chosen) < market.least or site is there[0]
            if wanted and len(chosen) < market.most and rate + site.usd[tick] + kept <= market.usd_per_hour:
                chosen.append(site)
                rate += site.usd[tick]
        found.add(sum(site.tokens_per_s for site in chosen) * TICK_S, rate, market)
        if found.tokens >= goal:
            found.reached = True
            break
    return found


def simple(market: Market, goal: float, most: int, only: Site | None = None) -> Outcomes:
    """Machines that stay where they were opened: of `only`, or where an hour costs least and there is one."""
    found = Outcomes()
    held: list[tuple[Site, float]] = []
    for tick in range(len(market.sites[0].usd)):
        now = tick * TICK_S
        for site in market.sites:
            there = sorted((each for each in held if each[0] is site), key=lambda each: each[1])
            for lost in there[site.machines[tick] :]:
                held.remove(lost)
        sites = sorted([only] if only else market.sites, key=lambda site: site.usd[tick])
        rate = sum(site.usd[tick] for site, _ in held)
        for site in sites:
            count = sum(each is site for each, _ in held)
            while len(held) < most and count < site.machines[tick] and rate + site.usd[tick] <= market.usd_per_hour:
                held.append((site, now))
                count, rate = count + 1, rate + site.usd[tick]
        tokens = sum(site.tokens_per_s for site, since in held if now > since + BOOT_S) * TICK_S
        found.add(tokens, rate, market)
        if found.tokens >= goal:
            found.reached = True
            break
    return found


def best_fixed(market: Market, goal: float) -> Outcomes:
    """Of one place and `least` or `most` machines the fleet with the most tokens per dollar that reaches the goal."""
    runs = [simple(market, goal, most, site) for site in market.sites for most in (market.least, market.most)]
    able = [each for each in runs if each.reached]
    return max(able, key=lambda each: each.tokens_per_usd) if able else Outcomes()


MARKETS = {**TUNED, **OTHERS, **LAST, **PUBLISHED, **FRESH, **FAST, **DRAWN}


def play(name: str, seed: int, days: float) -> Sample:
    """One market: the figures of the policy and of what it is compared with."""
    logging.disable(logging.CRITICAL)
    ticks = round(days * 86400 / TICK_S)
    market = MARKETS[name](random.Random(f"{name} {seed}"), ticks)
    goal = _goal_of(market, ticks // 2)
    ours, ideal, foreseen = World(market, goal).run(), clairvoyant(market, goal), foreseeing(market, goal)
    fixed, cheapest = best_fixed(market, goal), simple(market, goal, market.most)
    budget = 0.3 * ideal.usd
    bounded = World(market, math.inf, max_cost_usd=budget).run()
    return {
        "market": name,
        "seed": seed,
        "reached": ours.reached,
        "of_clairvoyant": ours.tokens_per_usd / ideal.tokens_per_usd,
        "of_foreseeing": ours.tokens_per_usd / foreseen.tokens_per_usd,
        "without_starts": World(market, goal, boot_s=0.0, leave_s=0.0).run().tokens_per_usd / ideal.tokens_per_usd,
        "of_fixed": ours.tokens_per_usd / fixed.tokens_per_usd if fixed.reached else math.nan,
        "of_cheapest": ours.tokens_per_usd / cheapest.tokens_per_usd if cheapest.tokens else math.nan,
        "hours": ours.hours,
        "hours_clairvoyant": ideal.hours,
        "hours_fixed": fixed.hours if fixed.reached else math.nan,
        "ends_an_hour": ours.ends / ours.hours,
        "above_s": ours.above_s,
        "highest": ours.highest_usd / market.usd_per_hour,
        "fixed_prices": market.fixed_prices,
        "over_usd": bounded.usd - budget,
        "a_minute_usd": bounded.highest_usd / 60,
        "launches": ours.launches,
        "idle": ours.idle_usd / ours.usd if ours.usd else 0.0,
    }


def _goal_of(market: Market, ticks: int) -> float:
    """The tokens that `least` machines make in so many ticks where tokens cost least."""
    goal = 0.0
    for tick in range(ticks):
        ranked = sorted(market.sites, key=lambda site: site.usd[tick] / site.tokens_per_s)
        there = [site for site in ranked for _ in range(min(site.machines[tick], market.least))]
        goal += sum(site.tokens_per_s for site in there[: market.least]) * TICK_S
    return goal


def table(samples: Sequence[Sample]) -> str:
    """A row for each market."""
    rows, keys = [], ("without_starts", "of_foreseeing", "of_fixed", "of_cheapest")
    for name in MARKETS:
        of: list[Mapping[str, Any]] = [each for each in samples if each["market"] == name]
        if not of:
            continue
        ratio = [each["of_clairvoyant"] for each in of]
        rows.append(
            [
                name if name in TUNED else f"*{name}*",
                f"{mean(ratio):.2f} ({min(ratio):.2f})",
                *(f"{_mean(of, key):.2f}" for key in keys),
                f"{_mean(of, 'hours'):.0f}, {_mean(of, 'hours_clairvoyant'):.0f}, {_mean(of, 'hours_fixed'):.0f}",
                f"{max(each['ends_an_hour'] for each in of):.2f}",
                f"{max(each['highest'] for each in of):.2f}, {max(each['above_s'] for each in of) / 60:.0f} min",
                f"{100 * _mean(of, 'idle'):.1f} %",
                f"{max(each['over_usd'] / each['a_minute_usd'] for each in of):.1f}",
            ]
        )
    columns = [
        "market",
        "of the clairvoyant (worst)",
        "the same if starts cost nothing",
        "of the foreseeing",
        "of the best fixed fleet",
        "of cheapest first",
        "hours: policy, clairvoyant, fixed",
        "machines that the policy ends an hour, most",
        "highest rate of `usd_per_hour`, for how long above",
        "of the dollars for machines that start or leave",
        "over `max_cost_usd`, minutes of all machines",
    ]
    return markdown(columns, rows)


def _mean(samples: Sequence[Mapping[str, Any]], key: str) -> float:
    known = [each[key] for each in samples if math.isfinite(each[key])]
    return mean(known) if known else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=6.0)
    parser.add_argument("--repetitions", type=int, default=6, help="seeds of each market")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--markets", nargs="*", default=[name for name in MARKETS if name not in DRAWN])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-fleet.jsonl")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/performance.md")
    given = parser.parse_args()
    results = Results("fleet", given.results)
    results.begin(sources_of(None), vars(given))
    seeds = range(given.first, given.first + given.repetitions)
    with ProcessPoolExecutor(given.processes) as pool:
        plays = [pool.submit(play, name, seed, given.days) for name in given.markets for seed in seeds]
        for each in as_completed(plays):
            results.add(**each.result())
            print(results.samples[-1], flush=True)
    session, samples = results.newest()
    text = f"{heading(session)}\n\n{table(samples)}"
    print(text)
    if given.docs:
        publish("fleet", text, None)


if __name__ == "__main__":
    main()
