"""Decides at which place (executor) a run's replicas train: which id gets an attempt where, and which attempt ends.

Pure: `place_book` observes places, and the coordinator performs what is decided here. Times are seconds on the
coordinator's own clock, prices US dollars. An attempt that waits for a machine to join (`diloco join`) costs nothing,
and does not count, until it trains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from diloco_orchestrator.supervision.place_answers import Answers

LESS = 0.8  # times the cost per token: a replica moves to a place that costs at most so much
MORE = 1.1  # times what a token has cost on average: a machine beyond `least` is launched up to there
ROUNDS_BETWEEN_MOVES = 3
HOPED = 4.0  # times its expected speed: so fast a place may be where nobody has trained, and worth one try
# How long others are still compared with a place that refuses: where replicas have trained, and elsewhere.
_MISSED_S, _NEVER_SEEN_S = 86400.0, 3600.0
WORTH_S = 600.0  # of what is left of `max_cost_usd`; a machine that trains for less is not worth its start
_CENT = 0.01


@dataclass(frozen=True)
class PlaceView(Answers):
    """A place (executor) as a coordinator knows it: its price, its speed, and its answers to launches."""

    name: str
    hourly_usd: float | None  # of one replica's machine now; None: not known, so that nothing is opened there
    tokens_per_s: float  # of one replica there
    known_by: str = ""  # where that is from: "measured", "expected"; empty: taken to be as fast as the other places
    offers: bool = False  # its launches are offers to machines that join

    @property
    def usd_per_token(self) -> float:
        """US dollars per token of a machine at this place; infinite without a known price."""
        return math.inf if self.hourly_usd is None else self.hourly_usd / 3600 / self.tokens_per_s

    @property
    def usd_per_token_with_start(self) -> float:
        """US dollars per token of a machine launched now, which trains as long as those before it have."""
        idle = self.ends * self.start_s / self.trained_s if self.trained_s else 0.0
        return self.usd_per_token * (1 + idle)

    @property
    def start_usd(self) -> float:
        """US dollars for a machine at this place until its replica trains."""
        return (self.hourly_usd or 0.0) / 3600 * self.start_s

    def accepts(self, now: float) -> bool:
        """Whether the place has refused no launch since an attempt trained there, and its price and speed are known."""
        known = self.known_by == "measured" and self.hourly_usd is not None and not self.offers
        return known and self.refused_since is None and now >= self.rests_until

    def words(self) -> str:
        """The place's price as text, and where its speed was measured the price of a million tokens."""
        price = "no known price" if self.hourly_usd is None else f"${self.hourly_usd:.2f} an hour"
        if self.known_by != "measured" or self.hourly_usd is None:
            return f"{self.name} ({price})"
        return f"{self.name} ({price}, ${1e6 * self.usd_per_token:.3g} per million tokens)"


@dataclass(frozen=True)
class SeatView:
    """A replica id as a coordinator knows it: at which place (executor) its attempt is, or whether one may be
    launched.
    """

    replica_id: int
    place: str = ""  # of its attempt that is alive; empty: none is
    trains: bool = False  # the attempt has sent a heartbeat
    leaving: bool = False  # the attempt is being ended
    waits: bool = False  # the attempt has no machine yet
    gives_up_at: float = math.inf  # when it has waited for one for long enough to try another place
    refusal: str = ""  # why it waits, in its provider's words
    free: bool = False  # it has no attempt alive, and may be given one now
    without: int = 0  # its attempts so far that no place had a machine for
    overpaid_usd: float = 0.0  # more than its tokens would have cost at the cheapest place that had machines meanwhile


@dataclass(frozen=True)
class Limits:
    """Limits for placing: `least` to `most` replicas, and `usd_per_hour` of all machines together (None: no limit)."""

    least: int
    most: int
    usd_per_hour: float | None = None
    scales: bool = True  # whether replicas can leave a run that goes on: it has `max_replicas`


@dataclass(frozen=True)
class Open:
    """Decision: launch an attempt of a vacant replica id at a place, one of the run's executors."""

    replica_id: int
    place: str
    why: str
    moves: bool = False


@dataclass(frozen=True)
class Vacate:
    """Decision: end an attempt, which publishes what it has trained; its replica id may then be launched elsewhere."""

    replica_id: int
    why: str
    moves: bool = False
    to: str = ""  # the place that its id is to be opened at
    without: str = ""  # the place that gave the attempt no machine, where that is the reason


@dataclass(frozen=True)
class Wait:
    """Decision: neither launch nor end anything."""

    why: str


Decision = Open | Vacate | Wait


@dataclass(frozen=True)
class PlacesView:
    """A coordinator's observations of all places (executors) and replica ids, from which it decides where to launch."""

    places: Sequence[PlaceView]
    seats: Sequence[SeatView]
    round_: int = 0  # of the newest commit
    round_ended: bool = False  # a commit has come since the last decisions
    moved_round: int = 0  # `round_` at the last move
    asked: int | None = None  # replicas that a user asked for (`diloco scale`); None: nobody did
    left_usd: float | None = None  # of `max_cost_usd`; None: no limit
    heading: str = ""  # the place for the sake of which a replica has left
    paid_usd: float = math.inf  # per token, for all machines of the last day or so; infinite before speeds are known

    @cached_property
    def by_name(self) -> Mapping[str, PlaceView]:
        return {each.name: each for each in self.places}

    @cached_property
    def kept(self) -> Sequence[SeatView]:
        """The replica ids with an attempt that is not being ended."""
        return [each for each in self.seats if each.place and not each.leaving]

    @cached_property
    def counted(self) -> Sequence[SeatView]:
        """The replica ids whose attempt trains or will train, without attempts that wait for a machine to join."""
        return [each for each in self.kept if each.trains or not self.is_offer(each)]

    def is_offer(self, seat: SeatView) -> bool:
        return seat.place in self.by_name and self.by_name[seat.place].offers

    def usd_per_token(self, seat: SeatView) -> float:
        return self.by_name[seat.place].usd_per_token if seat.place in self.by_name else 0.0

    def is_comparable(self, seat: SeatView) -> bool:
        """Whether the cost per token at a replica id's place is measured; True for all ids while none is."""
        known = {each.name for each in self.places if each.known_by == "measured"}
        return not known or seat.place in known

    def hourly_usd(self, seat: SeatView) -> float:
        """US dollars an hour of a replica id's attempt; 0 if it waits for a machine to join, or if unknown."""
        if seat.place not in self.by_name or (self.is_offer(seat) and not seat.trains):
            return 0.0
        return self.by_name[seat.place].hourly_usd or 0.0

    def rate_usd(self) -> float:
        """US dollars an hour of all attempts that are alive, those that are being ended included."""
        return math.fsum(self.hourly_usd(each) for each in self.seats if each.place)

    def dearest(self, seats: Sequence[SeatView]) -> SeatView:
        """Replica id with the highest cost per token; of equals one that waits for a machine, then the highest id."""
        return max(seats, key=lambda each: (self.usd_per_token(each), not each.trains, each.replica_id))

    def after(self, decision: Open | Vacate) -> "PlacesView":
        """The observations as they will be once `decision` is performed."""
        seats = [each for each in self.seats if each.replica_id != decision.replica_id]
        (seat,) = (each for each in self.seats if each.replica_id == decision.replica_id)
        if isinstance(decision, Open):
            seat = SeatView(decision.replica_id, decision.place, waits=True)
        else:
            seat = replace(seat, leaving=True)
        moved = self.round_ if decision.moves else self.moved_round
        ordered = sorted([*seats, seat], key=lambda each: each.replica_id)
        refusing = decision.without if isinstance(decision, Vacate) else ""
        places = [replace(each, rests_until=math.inf) if each.name == refusing else each for each in self.places]
        heading = decision.to or self.heading if isinstance(decision, Vacate) else ""
        return replace(self, places=places, seats=ordered, moved_round=moved, heading=heading)


def place(view: PlacesView, now: float, limits: Limits) -> Decision:
    """The next decision where to launch or end an attempt. The caller performs it, and calls again with
    `view.after(decision)`.

    Never launches what would exceed `usd_per_hour`, nor anything at a place that is paused after refusals. Beyond
    `limits.least` replicas it launches only at places that cost no more than a fourth more per token than the cheapest,
    and about as much as tokens have cost so far: whatever costs more raises the cost of the whole run. A machine is
    replaced by one at a cheaper place that has machines once it has cost more, for the same tokens, by what a start
    there costs. A place that is not known to have machines is tried at a round's end, if its tokens cost at most `LESS`
    times as much, and not within `ROUNDS_BETWEEN_MOVES` rounds of the last move.
    """
    why = ""
    for rule in (_too_dear, _too_many, _missing, _waits_too_long, _try, _needless, _overpaying, _offer):
        decision = rule(view, now, limits)
        if not isinstance(decision, Wait):
            return decision
        why = why or decision.why
    return Wait(why)


# -- who leaves -------------------------------------------------------------------------------------------------------


def _too_dear(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to end the dearest attempt, if prices have risen above `usd_per_hour`; else to wait."""
    rate = math.fsum(map(view.hourly_usd, view.kept))
    paid = [each for each in view.kept if view.hourly_usd(each)]
    if not limits.scales or limits.usd_per_hour is None or rate <= limits.usd_per_hour + _CENT / 100 or not paid:
        return Wait("")
    why = f"machines cost ${rate:.2f} an hour by now, usd_per_hour={limits.usd_per_hour:g}"
    return Vacate(view.dearest(paid).replica_id, why)


def _too_many(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to end an attempt beyond the number that a user requested, or a needless one; else to wait."""
    if not limits.scales:
        return Wait("")
    if view.asked is not None:
        if len(view.kept) <= view.asked:
            return Wait("")
        offers = [each for each in view.kept if each not in view.counted]
        return Vacate(view.dearest(offers or view.counted).replica_id, f"{view.asked} replicas are wanted")
    paid = [each for each in view.counted if view.hourly_usd(each) and view.is_comparable(each)]
    training = sum(each.trains for each in view.counted)
    if limits.usd_per_hour is not None or training < limits.least or len(view.counted) <= limits.least or not paid:
        return Wait("")
    dearest = view.dearest(paid)
    why = f"{training} train, {limits.least} are wanted, and its place costs the most per token"
    if not dearest.trains:
        return Vacate(dearest.replica_id, why)
    return Vacate(dearest.replica_id, why, moves=True) if training > limits.least and _may_move(view) else Wait("")


def _needless(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to end the dearest of more than `least` machines, if a token costs half more than at the cheapest, or a
    fourth more than it has cost so far.
    """
    training = [each for each in view.counted if each.trains]
    known = [each for each in training if view.is_comparable(each) and view.hourly_usd(each)]
    if not limits.scales or view.asked is not None or len(training) <= limits.least or not known:
        return Wait("")
    dearest = view.dearest(known)
    usd = view.usd_per_token(dearest)
    if LESS * LESS * usd <= _worth(view, now, LESS * _mean(view, without=dearest)) and LESS * usd <= view.paid_usd:
        return Wait("")
    why = f"{view.by_name[dearest.place].words()} costs too much for more than {limits.least} replicas"
    return Vacate(dearest.replica_id, why)


def _overpaying(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to replace the attempt that has cost the most beyond what its tokens cost elsewhere, if that would have
    paid for a start there, which the limits allow; else to wait.

    An attempt beyond `least` leaves first, and one of `least` after its successor trains, if there are money and an id
    for both; without, it leaves at a round's end, alone. Not more at once than train there already, which may be all
    of its machines, unless the attempt is too dear to be kept in any case.
    """
    training = [each for each in view.counted if each.trains and view.is_comparable(each) and view.hourly_usd(each)]
    if not limits.scales:
        return Wait("")
    spare = view.asked is None and sum(each.trains for each in view.counted) > limits.least
    leaving = sum(each.leaving for each in view.seats)
    starting = leaving + sum(bool(each.place) and not each.leaving and not each.trains for each in view.seats)
    for seat in sorted(training, key=lambda each: (-each.overpaid_usd, -each.replica_id)):
        to = _cheaper(view, now, seat)
        if to is None or seat.overpaid_usd <= to.start_usd:
            continue
        few = starting < max(1, sum(each.trains and each.place == to.name for each in view.seats))
        here = view.by_name[seat.place].words()
        if spare:
            urgent = LESS * LESS * view.usd_per_token(seat) > to.usd_per_token
            if (few or urgent) and _replaceable(view, now, limits, seat, to, leaving):
                return Vacate(seat.replica_id, f"{to.words()} costs less than {here}")
            continue
        why = f"moves from {here} to {to.words()}"
        free = next((each for each in view.seats if each.free), None)
        overpaying = sum(each.overpaid_usd > to.start_usd for each in training)
        if free is not None and view.asked is None and _affordable(view, to, limits):
            if few and starting < overpaying:
                return Open(free.replica_id, to.name, f"replica {seat.replica_id} {why}", moves=True)
        elif _may_move(view) and not starting and _affordable(view, to, limits, instead_of=seat):
            return Vacate(seat.replica_id, why, moves=True, to=to.name)
    return Wait("")


def _replaceable(view: PlacesView, now: float, limits: Limits, seat: SeatView, to: PlaceView, leaving: int) -> bool:
    """Whether a machine beyond `least` will be launched at `to` once a replica has left, as far as money goes."""
    rate_usd = math.fsum(map(view.hourly_usd, view.kept)) - view.hourly_usd(seat) + (1 + leaving) * _hourly_usd(to)
    within = limits.usd_per_hour is None or rate_usd <= limits.usd_per_hour + _CENT / 100
    return within and _is_worth_opening(view, now, to)


def _cheaper(view: PlacesView, now: float, seat: SeatView) -> PlaceView | None:
    """The cheapest place that has machines, as far as is known, and is better than that of this attempt."""
    here = view.by_name.get(seat.place)
    others = [each for each in view.places if each.accepts(now) and here is not None and _is_better(each, here)]
    return min(others, key=_cost, default=None)


def _is_better(place: PlaceView, than: PlaceView) -> bool:
    """Whether a token costs less at `place`: at all if its machines are as fast, by a fifth if they are slower."""
    if place.tokens_per_s < than.tokens_per_s:
        return place.usd_per_token <= LESS * than.usd_per_token
    return place.usd_per_token < than.usd_per_token


def overpaid_usd(places: Sequence[PlaceView], place: str, now: float) -> float:
    """US dollars a second by which a machine at `place` costs more than its tokens do at the cheapest better place that
    has machines; without any, minus what it costs less than at the cheapest other one. 0 if nothing can be compared.
    """
    here = next((each for each in places if each.name == place), None)
    others = [each for each in places if each.accepts(now) and each.name != place]
    if here is None or here.known_by != "measured" or math.isinf(here.usd_per_token) or not others:
        return 0.0
    better = [each.usd_per_token for each in others if _is_better(each, here)]
    there = min(better) if better else max(here.usd_per_token, min(each.usd_per_token for each in others))
    return (here.usd_per_token - there) * here.tokens_per_s


def _waits_too_long(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to end an attempt that has waited too long for a machine, if another place (executor) can take it."""
    for seat in view.kept:
        if not seat.waits or view.is_offer(seat) or now < seat.gives_up_at:
            continue
        others = [each for each in _usable(view, now) if each.name != seat.place]
        if any(_affordable(view, each, limits, instead_of=seat) for each in others):
            why = f"{seat.place} gives it no machine{seat.refusal and f': {seat.refusal}'}"
            return Vacate(seat.replica_id, why, without=seat.place)
    return Wait("")


def _try(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to replace the machine with the highest cost per token by one at a place that is not known to have any,
    if a token may cost a fifth less there.

    A place where nobody has trained is tried with one machine if it would be so at `HOPED` times its expected speed.
    """
    settled = not any(each.leaving or (each.waits and not view.is_offer(each)) for each in view.seats)
    training = [each for each in view.counted if each.trains and view.hourly_usd(each)]
    if not limits.scales or not settled or not training or not _may_move(view) or _spent(view, 0.0):
        return Wait("")
    dearest = view.dearest(training)
    cheaper = [each for each in _usable(view, now) if each.name != dearest.place and _pays(view, now, dearest, each)]
    for to in sorted(cheaper, key=_cost):
        why = f"moves from {view.by_name[dearest.place].words()} to {to.words()}"
        free = next((each for each in view.seats if each.free), None)
        if free is not None and view.asked is None and _affordable(view, to, limits):
            return Open(free.replica_id, to.name, f"replica {dearest.replica_id} {why}", moves=True)
        if _may_have_machines(view, now, to, dearest) and _affordable(view, to, limits, instead_of=dearest):
            return Vacate(dearest.replica_id, why, moves=True, to=to.name)
    return Wait("")


def _hoped_cost(view: PlacesView, place: PlaceView) -> float:
    """US dollars per token at a place; `HOPED` times the expected speed is assumed where nobody has trained, and any
    speed if nothing is known of its machines: that its price is high may mean that they are fast.
    """
    tried = any(each.place == place.name for each in view.seats)
    measured = any(each.known_by == "measured" for each in view.places)
    if place.known_by == "measured" or tried or not measured:
        return place.usd_per_token
    return place.usd_per_token / HOPED if place.known_by else 0.0


def _pays(view: PlacesView, now: float, seat: SeatView, to: PlaceView) -> bool:
    """Whether `to`, which is not known to have machines for a price that can be compared, is worth a try."""
    if to.accepts(now) and view.is_comparable(seat):
        return False
    return _hoped_cost(view, to) <= LESS * view.usd_per_token(seat)


def _may_have_machines(view: PlacesView, now: float, to: PlaceView, seat: SeatView) -> bool:
    """Whether to end a replica's attempt now in order to launch it at `to`, a place that refused the last launch.

    Only a launch shows whether `to` has machines again. One that is refused costs K dollars, the start of another
    machine where the replica is. While `to` has machines and none is launched there, the run pays g dollars a second
    too much. A try every d seconds costs K / d + g d / (2 m) a second
    where it has machines again after m seconds in the mean: least at d = sqrt(2 K m / g). m: the mean of its times
    without machines, the present one included.
    """
    if to.refused_since is None:
        return True
    used = any(each.trains and each.place == to.name for each in view.seats)
    without_s = now - (to.refused_since if used else max(to.refused_since, to.trained_at))
    vain_usd = view.by_name[seat.place].start_usd
    training = [each for each in view.counted if each.trains and each.place in view.by_name]
    costs = [(view.usd_per_token(each) - to.usd_per_token) * view.by_name[each.place].tokens_per_s for each in training]
    saved_usd = math.fsum(max(0.0, each) for each in costs)
    mean_s = (to.without_s + without_s) / (to.returns + 1)
    return saved_usd > 0 and now - to.refused_at >= math.sqrt(2 * vain_usd * mean_s / saved_usd)


def _may_move(view: PlacesView) -> bool:
    return view.round_ended and view.round_ - view.moved_round >= ROUNDS_BETWEEN_MOVES


# -- who comes --------------------------------------------------------------------------------------------------------


def _missing(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to launch an attempt where tokens cost least, while fewer replicas train or start than are wanted."""
    least = limits.least if view.asked is None else view.asked
    most = limits.most if view.asked is None and limits.usd_per_hour is not None else least
    if len(view.counted) >= most:
        return Wait("")
    priced = [each for each in view.places if not each.offers and each.hourly_usd is not None]
    missing = max(0, least - len(view.counted))
    usable = _usable(view, now)
    if view.heading in {each.name for each in usable}:
        usable = [view.by_name[view.heading]]
    elif not missing:
        usable = [each for each in usable if _is_worth_opening(view, now, each)]
    # What the others of `least` will cost at the least is kept for them.
    kept_usd = max(0, missing - 1) * min(map(_hourly_usd, priced), default=0.0)
    chosen = min((each for each in usable if _affordable(view, each, limits, kept_usd)), key=_cost, default=None)
    if chosen is None and missing:
        chosen = min((each for each in usable if _affordable(view, each, limits)), key=_hourly_usd, default=None)
    if chosen is None:
        instead = _instead(view, usable, limits) if missing else Wait("")
        return instead if isinstance(instead, Vacate) else Wait(_why_nowhere(view, usable, limits, missing))
    # In turn: else one replica alone would find that a place has no machines, and all others would wait for it.
    free = min((each for each in view.seats if each.free), key=lambda each: each.without, default=None)
    if free is not None:
        return Open(free.replica_id, chosen.name, _why_there(view, chosen))
    if any(each.leaving for each in view.seats):
        return Wait("")
    offers = [each for each in view.kept if each not in view.counted]
    if offers and limits.scales:
        return Vacate(offers[-1].replica_id, f"no machine has joined for it, and {chosen.words()} has one")
    return Wait("")


def _instead(view: PlacesView, usable: Sequence[PlaceView], limits: Limits) -> Decision:
    """Decision to end a machine that costs more than two elsewhere, if `least` replicas cannot be paid with it."""
    training = [each for each in view.counted if each.trains]
    if not training or not limits.scales or any(each.leaving for each in view.seats):
        return Wait("")
    dearest = view.dearest(training)
    for to in sorted(usable, key=_cost):
        cheaper = to.usd_per_token <= LESS * view.usd_per_token(dearest)
        if cheaper and _affordable(view, to, limits, kept_usd=_hourly_usd(to), instead_of=dearest):
            why = f"{to.words()} has two machines for what it costs at {view.by_name[dearest.place].words()}"
            return Vacate(dearest.replica_id, why, to=to.name)
    return Wait("")


def _offer(view: PlacesView, now: float, limits: Limits) -> Decision:
    """Decision to let machines that join (`diloco join`) take the replica ids that no place can launch."""
    most = limits.most if view.asked is None else view.asked
    free = next((each for each in view.seats if each.free), None)
    offering = next((each for each in view.places if each.offers and now >= each.rests_until), None)
    if free is None or offering is None or len(view.kept) >= most or offering.hourly_usd is None:
        return Wait("")
    return Open(free.replica_id, offering.name, "for a machine that joins")


def _worth(view: PlacesView, now: float, mean: float) -> float:
    """US dollars per token to which a place's are compared before it gets a machine beyond `least`, or loses one.

    They are those of the cheapest place that is expected to have machines; if it has none now, those of the cheapest
    one that has, but at most `mean`.
    """
    used = {each.place for each in view.counted if each.trains}
    expected = here = math.inf
    for each in view.places:
        there = each.refused_since is None or each.name in used
        memory_s = _MISSED_S if each.known_by == "measured" else _NEVER_SEEN_S
        if not each.offers and (there or now - (each.refused_since or 0.0) < memory_s):
            expected = min(expected, each.usd_per_token)
        if not each.offers and there:
            here = min(here, each.usd_per_token)
    return max(expected, min(here, mean))


def _is_worth_opening(view: PlacesView, now: float, place: PlaceView) -> bool:
    """Whether a token costs little enough at a place for a machine beyond `least` replicas."""
    worth = _worth(view, now, LESS * LESS * _mean(view))
    return LESS * place.usd_per_token <= worth and place.usd_per_token_with_start <= MORE * view.paid_usd


def _mean(view: PlacesView, without: SeatView | None = None) -> float:
    """US dollars per token of all training machines together; 0 if none trains. `without`: a machine to leave out.

    A machine whose tokens cost less than this lowers it, and with it the cost of the whole run.
    """
    training = [each for each in view.counted if each.trains and each is not without and each.place in view.by_name]
    speed = math.fsum(view.by_name[each.place].tokens_per_s for each in training)
    return math.fsum(map(view.hourly_usd, training)) / 3600 / speed if speed else 0.0


def _usable(view: PlacesView, now: float) -> list[PlaceView]:
    """The places that may have a machine now. One that has refused gets one attempt at a time until it has a machine.

    At a place whose machines cost money and never trained, that attempt has to train first.
    """
    wasting = {each.name for each in view.places if each.wastes}
    tried = {each.place for each in view.seats if each.waits or (not each.trains and each.place in wasting)}
    return [
        each
        for each in view.places
        if not each.offers
        and each.hourly_usd is not None
        and now >= each.rests_until
        and (each.refused_since is None or each.name not in tried)
    ]


def _affordable(
    view: PlacesView, to: PlaceView, limits: Limits, kept_usd: float = 0.0, instead_of: SeatView | None = None
) -> bool:
    """Whether `usd_per_hour` and `max_cost_usd` pay for one more machine at the place `to`, in the stead of
    `instead_of`.

    `kept_usd`: US dollars an hour of `usd_per_hour` that are reserved for other machines.
    """
    rate = view.rate_usd() + (_hourly_usd(to)) - (view.hourly_usd(instead_of) if instead_of else 0.0)
    within = limits.usd_per_hour is None or rate + kept_usd <= limits.usd_per_hour + _CENT / 100
    return within and not _spent(view, _hourly_usd(to))


def is_payable(place: PlaceView, limits: Limits, left_usd: float | None) -> bool:
    """Whether the limits pay for one machine at a place that has a price, were it the only one of the run."""
    alone = PlacesView([place], [], left_usd=left_usd)
    return place.hourly_usd is not None and _affordable(alone, place, limits)


def _spent(view: PlacesView, more_usd: float) -> bool:
    return view.left_usd is not None and view.left_usd < (view.rate_usd() + more_usd) * WORTH_S / 3600


def _hourly_usd(place: PlaceView) -> float:
    return place.hourly_usd or 0.0


def _cost(place: PlaceView) -> tuple[float, float, str]:
    return place.usd_per_token, -place.tokens_per_s, place.name


def _why_there(view: PlacesView, chosen: PlaceView) -> str:
    others = sorted((each for each in view.places if each is not chosen and not each.offers), key=_cost)
    if not others:
        return chosen.words()
    cheaper = [each for each in others if each.usd_per_token < chosen.usd_per_token]
    if not cheaper:
        return f"{chosen.words()} costs the least per token, before {others[0].words()}"
    return f"{chosen.words()}: {_why_not(cheaper[0])}"


def _why_not(place: PlaceView) -> str:
    if place.refused_since is not None:
        return f"{place.name} has no machine{place.refusal and f' ({place.refusal})'}"
    return f"{place.words()} is beyond the limit"


def _why_nowhere(view: PlacesView, usable: Sequence[PlaceView], limits: Limits, missing: int) -> str:
    """Reason why no attempt is launched though `missing` more replicas may train; empty if no place has refused any."""
    wanting = f"{missing} more replicas are wanted: " if missing else ""
    if not usable:
        resting = [each for each in sorted(view.places, key=_cost) if each.refused_since is not None]
        return f"{wanting}{'; '.join(map(_why_not, resting))}" if resting else ""
    if view.left_usd is not None and _spent(view, min(map(_hourly_usd, usable))):
        return f"{wanting}${view.left_usd:.2f} is left of max_cost_usd"
    cheapest = min(usable, key=_hourly_usd)
    used = f"${view.rate_usd():.2f} an hour of usd_per_hour={limits.usd_per_hour:g} are in use"
    return f"{wanting}{used}, and the cheapest machine is at {cheapest.name} for ${_hourly_usd(cheapest):.2f}"
