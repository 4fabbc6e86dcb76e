"""`PlaceBook`: decides, with `placing`, at which place (executor) each attempt is launched, from what it has observed.

Measured speeds and the places of attempts come from the bucket. Refusals, pauses after them and the last move are
remembered by this object alone: a new coordinator tries every place again, and moves nothing in its first rounds.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.executors.places import Places
from diloco_orchestrator.executors.prices import Price
from diloco_orchestrator.inspection.places import PlaceOf, PlaceSpeeds
from diloco_orchestrator.protocol.attempt_records import VACATED
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.supervision import placing
from diloco_orchestrator.supervision.attempt import ReplicaView
from diloco_orchestrator.supervision.attempt_types import (
    Alive,
    Cancelling,
    Ended,
    Launching,
    Outcome,
    Postponed,
    Reserved,
    Running,
)
from diloco_orchestrator.supervision.fleet_policy import (
    Action,
    Cancel,
    Launch,
    Stop,
    given_up_by,
    places_of_common_causes,
)
from diloco_orchestrator.supervision.launch_request import prices_of
from diloco_orchestrator.supervision.place_answers import Answers
from diloco_orchestrator.supervision.record_events import Who

log = logging.getLogger(__name__)

_PRICES_S = 60.0  # between two questions about prices; executors remember what they asked a provider
_PAID_S = 86400.0  # how long dollars and tokens count for the cost of a token so far, in the mean
_PATIENCE_S = 600.0  # of an attempt that a provider keeps waiting for a machine
_REFUSED_S = 60.0  # of one whose launch the provider refuses or cannot answer
# How an attempt that never trained ends where its place has no machine for it, or a bad one.
_REFUSALS = (Outcome.NO_CAPACITY, Outcome.ERROR, Outcome.PREEMPTED, Outcome.TIMED_OUT, Outcome.PERMANENT)


class PlaceBook:
    """Observes the places (executors) of a run in one leg (start or resume to stop), and chooses one for each launch.

    Args:
        places: the run's executor, which consists of several.
        config: of the leg.
        place_of: returns the place of an attempt, by its intent record; "" if that is not known.
        round_: of the newest commit.
    """

    def __init__(
        self,
        places: Places,
        config: RunConfig,
        place_of: PlaceOf,
        round_: int,
    ) -> None:
        self._places = places
        self.limits = limits_of(config, places.usd_per_hour)
        self._ranks = config.ranks_of(0)
        self._answers = {name: Answers() for name in places.places}
        self._prices: Mapping[str, Price | None] = {}
        self._prices_at = -math.inf
        self._speeds = PlaceSpeeds(place_of)
        self._without_beat: dict[Who, tuple[str, float]] = {}  # place and launch of attempts that have not trained yet
        self._queued_at: dict[Who, float] = {}  # when those were last seen without a machine
        self._overpaid: dict[Who, float] = {}  # dollars, of attempts that train
        self._counted_at = math.inf
        self._paid_usd = 0.0  # for all machines, of late
        self._paid_s: dict[str, float] = {}  # seconds of replicas that trained by place, of late
        # Place and outcome of attempts that ended before they trained, since their replica last did.
        self._untrained: dict[Who, tuple[str, Outcome]] = {}
        self._most_untrained = config.retry.max_no_capacity
        self._round = self._moved_round = round_
        self._round_ended = False
        self._payable = set[str]()  # the places of which the limits pay for a machine
        self._heading = ""
        self._said = ""

    def read(self, commits: Iterator[Commit]) -> None:
        """Measure the speeds at each place (executor) by `commits`, those that have come since the last call."""
        for commit in commits:
            self._round, self._round_ended = max(self._round, commit.round), True
            self._speeds.add(commit)

    def place(
        self,
        actions: Sequence[Action],
        views: Sequence[ReplicaView],
        now: float,
        asked: int | None,
        left_usd: float | None,
    ) -> list[Action]:
        """`actions` with a place for each launch, without launches that no place can take, and with attempts that
        leave.

        `actions`: result of `fleet_policy.decide` for the replicas `views`, in which each launch says that an attempt
        of that replica may be launched. `asked`: number of replicas that a user has requested, or None. `left_usd`: US
        dollars that may still be spent, or None. `observe` has been called before.
        """
        launches = {each.replica_id: each for each in actions if isinstance(each, Launch)}
        found: list[Action] = [each for each in actions if not isinstance(each, Launch)]
        if any(isinstance(each, Stop) for each in found):
            return found
        hung = [each for each in found if isinstance(each, Cancel)]
        for each in hung:
            self._refused((each.replica_id, each.attempt), each.why, now)
        cancelled = {each.replica_id for each in hung}
        shut = self._shut(given_up_by(actions, views))
        places = [_refusing(each) if each.name in shut else each for each in self._place_views(now)]
        self._count(places, views, now)
        view = placing.PlacesView(
            places,
            [_seat_of(each, launches, cancelled, self._overpaid.get(each.who, 0.0)) for each in views],
            self._round,
            self._round_ended,
            self._moved_round,
            asked,
            left_usd,
            self._heading,
            self._usd_per_token(places),
        )
        numbers = {each.replica_id: each.attempt for each in views}
        while not isinstance(decision := placing.place(view, now, self.limits), placing.Wait):
            replica_id = decision.replica_id
            if isinstance(decision, placing.Open):
                launch = launches[replica_id]
                # Noted here: it may have been refused by the time of the next call.
                self._without_beat[replica_id, launch.attempt] = (decision.place, now)
                found.append(Launch(replica_id, launch.attempt, launch.why, decision.place, decision.why))
            else:
                who = replica_id, numbers[replica_id]
                if decision.without:
                    (waited,) = (each for each in view.seats if each.replica_id == replica_id)
                    self._refused(who, waited.refusal or "it keeps replicas waiting", now)
                found.append(Cancel(*who, f"{VACATED}: {decision.why}"))
            view = view.after(decision)
        self._moved_round, self._round_ended, self._heading = view.moved_round, False, view.heading
        if decision.why and decision.why != self._said:
            log.info("no further machine: %s", decision.why)
        self._said = decision.why
        return found

    def observe(self, views: Sequence[ReplicaView], now: float, left_usd: float | None = None) -> list[int]:
        """Record which attempts train by now, and which ended before they did.

        Returns the replicas that may train at another place (executor) however often they failed: those whose newest
        attempt ended without a heartbeat while another place accepts launches, or has given none of their attempts an
        error and may have a machine after its rest. The latter is for `retry.max_no_capacity` attempts. A place of
        which the limits do not pay for a single machine is none of them. `left_usd`: as for `place`.
        """
        for view in views:
            state, who = view.state, view.who
            if isinstance(state, Alive) and state.beat is None:
                if not isinstance(state, Cancelling):
                    self._without_beat.setdefault(who, (view.place, state.since))
                if _has_no_machine(state):
                    self._queued_at[who] = now
            elif isinstance(state, Alive) and who in self._without_beat:
                place, launched_at = self._without_beat.pop(who)
                self._untrained = {each: end for each, end in self._untrained.items() if each[0] != who[0]}
                if place in self._answers:
                    start_s = now - self._queued_at.get(who, launched_at)
                    self._answers[place] = self._answers[place].given(launched_at, start_s)
            elif isinstance(state, Ended) and state.outcome in _REFUSALS:
                if who in self._without_beat:
                    self._untrained[who] = view.place, state.outcome
                self._refused(who, state.reason, now)
            else:
                self._without_beat.pop(who, None)
            if isinstance(state, Alive) and state.beat is not None and view.place in self._answers:
                self._answers[view.place] = replace(self._answers[view.place], trained_at=now)
        self._queued_at = {who: at for who, at in self._queued_at.items() if who in self._without_beat}
        shut = self._shut(views)
        views_of_places = self._place_views(now)
        self._payable = {each.name for each in views_of_places if placing.is_payable(each, self.limits, left_usd)}
        places = {name for name in self._payable if name not in shut and not self._places.offers(name)}
        return [view.replica_id for view in views if view.who in self._untrained and self._others(view, places)]

    def _others(self, view: ReplicaView, places: set[str]) -> set[str]:
        """Those of `places` that may give a replica a machine now or later, without that of its newest attempt."""
        ends = [end for (replica_id, _), end in self._untrained.items() if replica_id == view.replica_id]
        failed = {place for place, outcome in ends if outcome in (Outcome.ERROR, Outcome.PERMANENT)}
        accepting = {name for name in places if self._answers[name].refused_since is None}
        waited_for = places - failed if len(ends) <= self._most_untrained else set[str]()
        return (accepting | waited_for) - {view.place}

    def opens(self, views: Sequence[ReplicaView]) -> bool:
        """Whether a place is left at which a vacant id may be opened. `observe` has been called before."""
        return bool(self._payable - self._shut(views))

    def _shut(self, views: Sequence[ReplicaView]) -> set[str]:
        """Places where two replicas were given up for one cause and nobody has trained: others would end alike."""
        return places_of_common_causes(views) - self._speeds.measured().keys()

    def _refused(self, who: Who, why: str, now: float) -> None:
        """Record that an attempt ends without having trained, if this object launched it."""
        place, launched_at = self._without_beat.pop(who, ("", now))
        if place in self._answers:
            self._answers[place] = self._answers[place].refused(why, launched_at, now)

    def _count(self, places: Sequence[placing.PlaceView], views: Sequence[ReplicaView], now: float) -> None:
        """Add what machines have cost and trained since the last call, each also beyond its tokens' price elsewhere."""
        since_s, self._counted_at = max(0.0, now - self._counted_at), now
        keeps = math.exp(-since_s / _PAID_S)
        self._paid_usd *= keeps
        self._paid_s = {name: seconds * keeps for name, seconds in self._paid_s.items()}
        prices = {each.name: each.hourly_usd for each in places if not each.offers and each.hourly_usd is not None}
        overpaid, self._overpaid = self._overpaid, {}
        for view in views:
            trains = isinstance(view.state, Alive) and view.state.beat is not None
            if isinstance(view.state, Alive) and not _has_no_machine(view.state):
                self._paid_usd += prices.get(view.place, 0.0) * since_s / 3600
            if trains:
                more_usd = since_s * placing.overpaid_usd(places, view.place, now)
                self._overpaid[view.who] = max(0.0, overpaid.get(view.who, 0.0) + more_usd)
            if trains and view.place in prices:
                self._paid_s[view.place] = self._paid_s.get(view.place, 0.0) + since_s
            if (answers := self._answers.get(view.place)) is not None and (trains or view.who in overpaid):
                trained_s, ends = answers.trained_s + since_s * trains, answers.ends + (not trains)
                self._answers[view.place] = replace(answers, trained_s=trained_s, ends=ends)

    def _usd_per_token(self, places: Sequence[placing.PlaceView]) -> float:
        """US dollars per token of late, starts included; infinite before speeds are measured."""
        measured = any(each.known_by == "measured" for each in places)
        tokens = math.fsum(each.tokens_per_s * self._paid_s.get(each.name, 0.0) for each in places)
        return self._paid_usd / tokens if measured and tokens else math.inf

    def _place_views(self, now: float) -> list[placing.PlaceView]:
        if now - self._prices_at >= _PRICES_S:
            self._prices, self._prices_at = prices_of(self._places, self._ranks), now
        return place_views(self._places, self._prices, self._speeds.measured(), self._answers)


def limits_of(config: RunConfig, usd_per_hour: float | None) -> placing.Limits:
    """The limits on replicas and costs for choosing places (executors), of a run with this configuration.

    `usd_per_hour`: of all machines together.
    """
    return placing.Limits(config.replicas, config.most_replicas, usd_per_hour, config.max_replicas is not None)


def place_views(
    places: Places,
    prices: Mapping[str, Price | None],
    measured: Mapping[str, float],
    answers: Mapping[str, Answers] | None = None,
) -> list[placing.PlaceView]:
    """All places (executors) as a coordinator knows them, by name: their prices, measured speeds and refusals.

    `answers`: those of each place to launches so far.
    """
    known = speeds(measured, {name: price.tflops if price else None for name, price in prices.items()})
    return [
        placing.PlaceView(
            name,
            price.hourly_usd if price else None,
            *known[name],
            offers=places.offers(name),
            **asdict((answers or {}).get(name, Answers())),
        )
        for name, price in ((name, prices[name]) for name in places.places)
    ]


def speeds(measured: Mapping[str, float], listed: Mapping[str, float | None]) -> dict[str, tuple[float, str]]:
    """(tokens per second of one replica, source of the number) by the name of each place in `listed`.

    Args:
        measured: tokens per second where replicas have trained.
        listed: the speed of a place's GPU in a list, in any unit, or None.

    A place without a measurement is as fast as its listed speed says, in relation to the measured ones ("expected");
    without that, as the median of the others. Before any measurement the unit is that of the list.
    """
    ratios = [measured[name] / figure for name, figure in listed.items() if figure and measured.get(name)]
    scale = median(ratios) if ratios else None if measured else 1.0
    found = {name: (speed, "measured") for name, speed in measured.items() if name in listed and speed > 0}
    if scale is not None:
        expected = {name: (figure * scale, "expected") for name, figure in listed.items() if figure}
        found = {**expected, **found}
    usual = median(speed for speed, _ in found.values()) if found else 1.0
    return {name: found.get(name, (usual, "")) for name in listed}


def first_launches(places: Places, config: RunConfig) -> list[placing.Open]:
    """The launches with their places that a coordinator would decide at the start of a new run. Launches nothing."""
    seats = [placing.SeatView(replica_id, free=True) for replica_id in range(config.most_replicas)]
    view = placing.PlacesView(
        place_views(places, prices_of(places, config.ranks_of(0)), {}), seats, left_usd=config.max_cost_usd
    )
    limits, found = limits_of(config, places.usd_per_hour), list[placing.Open]()
    while isinstance(decision := placing.place(view, 0.0, limits), placing.Open):
        found.append(decision)
        view = view.after(decision)
    return found


def unpaid_words(places: Places, config: RunConfig, opened: Sequence[placing.Open]) -> str:
    """Number of a new run's `replicas` that its money limits pay for, in words, where the others wait for machines that
    join.

    Empty if they pay for all, or if no place has machines that cost money. `opened`: result of `first_launches`.
    """
    prices = prices_of(places, config.ranks_of(0))
    priced = [(price.hourly_usd, name) for name, price in prices.items() if price and not places.offers(name)]
    paid, wanted = sum(not places.offers(each.place) for each in opened), config.replicas
    if paid >= wanted or not priced:
        return ""
    hourly_usd, name = min(priced)
    pays = f"max_cost_usd={config.max_cost_usd} pays for {placing.WORTH_S / 60:.0f} minutes of"
    if places.usd_per_hour is not None and places.usd_per_hour < wanted * hourly_usd:
        pays = f"usd_per_hour={places.usd_per_hour:g} pays for"
    return (
        f"{pays} {paid or 'none'} of {wanted} replicas: a machine costs ${hourly_usd:.2f} an hour at {name}, the "
        f"cheapest place that launches any. {'The rest start' if paid else 'All start'} only on machines that join."
    )


def _refusing(place: placing.PlaceView) -> placing.PlaceView:
    why = "two replicas were given up there for the same cause"
    return replace(place, rests_until=math.inf, refused_since=-math.inf, refusal=why)


def _seat_of(
    view: ReplicaView, launches: Mapping[int, Launch], cancelled: set[int], overpaid_usd: float
) -> placing.SeatView:
    state = view.state
    if not isinstance(state, Alive):
        without = view.endings.get(Outcome.NO_CAPACITY, 0)
        return placing.SeatView(view.replica_id, free=view.replica_id in launches, without=without)
    patience_s = _REFUSED_S if isinstance(state, Postponed) else _PATIENCE_S
    said = state.refusal.error if isinstance(state, Postponed) else getattr(state, "waits_for", "")
    return placing.SeatView(
        view.replica_id,
        view.place,
        trains=state.beat is not None,
        leaving=isinstance(state, Cancelling) or view.replica_id in cancelled,
        waits=_has_no_machine(state) and state.beat is None,
        gives_up_at=(state.refusal.since if isinstance(state, Postponed) else state.since) + patience_s,
        refusal=said,
        overpaid_usd=overpaid_usd,
    )


def _has_no_machine(state: Alive) -> bool:
    """Whether an attempt waits for a machine, by its provider's last report."""
    return isinstance(state, Launching | Postponed | Reserved) or (isinstance(state, Running) and state.pending)
