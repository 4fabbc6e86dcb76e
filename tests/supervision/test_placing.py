"""Where replicas train, as a table: which id is opened at which place, which one leaves, and why."""

import math
from dataclasses import replace
from typing import Any

import pytest

from diloco_orchestrator.supervision.place_book import speeds
from diloco_orchestrator.supervision.placing import (
    Limits,
    Open,
    PlacesView,
    PlaceView,
    SeatView,
    Vacate,
    Wait,
    overpaid_usd,
    place,
)

NOW = 100_000.0
# $1 an hour for 100 tokens a second, 2 for 400, 0 for 10: by token b costs half of a.
A, B = PlaceView("a", 1.0, 100.0, "measured"), PlaceView("b", 2.0, 400.0, "measured")
HOME = PlaceView("home", 0.0, 10.0, offers=True)
LIMITS = Limits(2, 4)


def free(*ids: int) -> list[SeatView]:
    return [SeatView(each, free=True) for each in ids]


def training(place: str, *ids: int, overpaid_usd: float = 0.0) -> list[SeatView]:
    return [SeatView(each, place, trains=True, overpaid_usd=overpaid_usd) for each in ids]


def overpaid(place: str, *ids: int) -> list[SeatView]:
    """Replicas that train where they have cost more beyond the cheapest place's price than any start does."""
    return training(place, *ids, overpaid_usd=10.0)


def waiting(place: str, *ids: int, gives_up_at: float = math.inf) -> list[SeatView]:
    return [SeatView(each, place, waits=True, gives_up_at=gives_up_at) for each in ids]


def resting(place: PlaceView, for_s: float = 100.0, since_s: float = 0.0) -> PlaceView:
    return replace(
        place, rests_until=NOW + for_s, refused_since=NOW - since_s, refused_at=NOW - since_s, refusal="no quota"
    )


def view(*seats: SeatView, places: tuple[PlaceView, ...] = (A, B), **more: Any) -> PlacesView:
    found = {"round_": 10, "round_ended": True, "moved_round": 7, **more}
    return PlacesView(places, sorted(seats, key=lambda each: each.replica_id), **found)


def all_decisions(seen: PlacesView, limits: Limits = LIMITS, now: float = NOW) -> list[Open | Vacate]:
    """What is decided until nothing is."""
    found: list[Open | Vacate] = []
    while not isinstance(decision := place(seen, now, limits), Wait):
        found.append(decision)
        seen = seen.after(decision)
        assert len(found) < 100, "decides without end"
    return found


def short(decisions: list[Open | Vacate]) -> list[tuple[int, str]]:
    """(id, place) of what is opened and (id, "leaves") of what is vacated."""
    return [(each.replica_id, each.place if isinstance(each, Open) else "leaves") for each in decisions]


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_run_without_a_limit_opens_its_replicas_where_tokens_cost_least_and_no_more():
    decisions = all_decisions(view(*free(0, 1, 2, 3)))
    assert short(decisions) == [(0, "b"), (1, "b")]
    assert decisions[0].why == (
        "b ($2.00 an hour, $1.39 per million tokens) costs the least per token, before "
        "a ($1.00 an hour, $2.78 per million tokens)"
    )


@pytest.mark.parametrize(
    ("usd_per_hour", "opened"),
    [
        (4.0, ["b", "b"]),
        (5.9, ["b", "b"]),
        (6.0, ["b", "b", "b"]),
        (100.0, ["b"] * 4),
        (3.0, ["b", "a"]),  # two of b are beyond it: the second one is wanted, and goes to a
        (2.0, ["a", "a"]),  # one of b would leave nothing for the second one
    ],
)
def test_further_replicas_are_opened_while_the_limit_allows_them_and_the_least_number_comes_first(usd_per_hour, opened):
    decisions = all_decisions(view(*free(0, 1, 2, 3)), replace(LIMITS, usd_per_hour=usd_per_hour))
    assert [each.place for each in decisions if isinstance(each, Open)] == opened


def test_a_place_that_rests_is_not_asked_and_further_replicas_do_not_go_where_tokens_cost_much_more():
    """Two are wanted in any case, so they go to a; the other two wait for b, for an hour."""
    seen, limits = view(*free(0, 1, 2, 3), places=(A, resting(B))), replace(LIMITS, usd_per_hour=100.0)
    assert short(all_decisions(seen, limits)) == [(0, "a"), (1, "a")]
    assert "b has no machine (no quota)" in all_decisions(seen, limits)[0].why
    after_a_day = view(*free(0, 1, 2, 3), places=(A, resting(B, since_s=86_401.0)))
    assert short(all_decisions(after_a_day, limits)) == [(each, "a") for each in range(4)]
    never_seen = view(*free(0, 1, 2, 3), places=(A, replace(resting(B, since_s=3601.0), known_by="expected")))
    assert short(all_decisions(never_seen, limits)) == [(each, "a") for each in range(4)], "nobody ever trained at b"


def test_machines_beyond_the_least_leave_where_their_tokens_cost_half_as_much_again_as_at_the_cheapest_place():
    """As after a spot place has its machines back: the dear ones were wanted, and are not any more."""
    limits = replace(LIMITS, usd_per_hour=100.0)
    back = view(*training("a", 0, 1), *training("b", 2, 3))
    assert short(all_decisions(back, limits)) == [(1, "leaves"), (0, "leaves")]
    middle = view(*training("a", 0, 1), *training("b", 2, 3), round_ended=False)
    assert short(all_decisions(middle, limits)) == [(1, "leaves"), (0, "leaves")], "what they have done is published"
    near = view(*training("a", 0, 1), *training("b", 2, 3), places=(A, replace(B, hourly_usd=2.6)), moved_round=10)
    assert all_decisions(near, limits) == [], "a token costs 1.54 times as much, and too little was lost by it yet"


@pytest.mark.parametrize(("there", "leave"), [(0, 1), (1, 1), (2, 2), (5, 4)])
def test_machines_beyond_the_least_leave_once_they_have_overpaid_a_start_where_a_token_costs_less(there, leave):
    """In the middle of a round too, and as many at once as train there: it may have no further machines."""
    limits, start_usd = Limits(2, 20, usd_per_hour=100.0), B.start_usd
    cheaper = (A, replace(B, hourly_usd=3.6))  # .9 of a
    for usd, left in ((1.8 * start_usd, 0), (1.81 * start_usd, leave)):
        seats = training("a", *range(4 + max(0, 2 - there)), overpaid_usd=usd), training("b", *range(10, 10 + there))
        decisions = all_decisions(view(*seats[0], *seats[1], places=cheaper, round_ended=False), limits)
        assert [each.why for each in decisions] == left * [
            "b ($3.60 an hour, $2.5 per million tokens) costs less than a ($1.00 an hour, $2.78 per million tokens)"
        ]
    five_for_one = view(*overpaid("a", 0, 1, 2, 3), places=(A, replace(B, hourly_usd=4.5, tokens_per_s=500.0)))
    assert all_decisions(five_for_one, replace(limits, usd_per_hour=5.0)) == [], "the limit does not pay for one of b"
    slower = (A, replace(B, hourly_usd=0.81, tokens_per_s=90.0))  # .9 of a
    assert all_decisions(view(*overpaid("a", 0, 1, 2, 3), places=slower), limits) == []
    refuses = (A, replace(cheaper[1], refused_since=NOW, refused_at=NOW))
    assert all_decisions(view(*overpaid("a", 0, 1, 2, 3), places=refuses, round_ended=False), limits) == []


def test_machines_that_are_too_dear_in_any_case_leave_together_in_the_middle_of_a_round():
    """A price rises tenfold: what a start elsewhere costs is overpaid within a minute."""
    risen = view(*overpaid("a", *range(8)), places=(replace(A, hourly_usd=10.0), B), round_ended=False)
    decisions = all_decisions(risen, Limits(2, 8, usd_per_hour=100.0))
    assert short(decisions) == [(each, "leaves") for each in (7, 6, 5, 4, 3, 2)]


def test_a_place_where_nobody_has_trained_is_tried_once_with_one_machine_if_it_may_be_cheaper():
    unknown = PlaceView(
        "c", 4.0, 200.0, "expected"
    )  # twice the price of a token at a; half of it at four times the speed
    seen = view(*training("a", 0, 1), *free(2, 3), places=(A, unknown))
    assert short(all_decisions(seen)) == [(2, "c")]
    assert all_decisions(view(*training("a", 0, 1), *free(2, 3), places=(A, replace(unknown, hourly_usd=7.0)))) == []
    no_figure = replace(unknown, hourly_usd=7.0, known_by="")  # which may be as fast as its price says
    assert short(all_decisions(view(*training("a", 0, 1), *free(2, 3), places=(A, no_figure)))) == [(2, "c")]
    assert short(all_decisions(view(*training("a", 0, 1), places=(A, unknown)), Limits(2, 2))) == [(1, "leaves")]
    left = view(*training("a", 0), *free(1), places=(A, unknown), moved_round=10, heading="c")
    assert short(all_decisions(left, Limits(2, 2))) == [(1, "c")], "and not where it came from"
    known = replace(unknown, known_by="measured")
    assert all_decisions(view(*training("a", 0, 1), *free(2, 3), places=(A, known))) == []


def test_machines_that_have_become_dear_make_room_for_two_that_are_wanted():
    """Prices rose tenfold: of four machines two are left within the limit, which pays for four elsewhere."""
    limits = Limits(4, 8, usd_per_hour=20.0)
    risen = view(*training("b", 0, 1), *free(2, 3), places=(A, replace(B, hourly_usd=9.9)), round_ended=False)
    decisions = all_decisions(risen, limits)
    assert short(decisions) == [(1, "leaves")] and "has two machines for what it costs at b" in decisions[0].why
    gone = view(*training("b", 0), *free(1, 2, 3), places=(A, replace(B, hourly_usd=9.9)), heading="a")
    assert short(all_decisions(gone, limits)) == [(each, "a") for each in (1, 2, 3)]


def test_a_place_that_has_refused_is_tried_with_one_attempt_at_a_time():
    rested = resting(B, for_s=-1.0)
    assert short(all_decisions(view(*free(0, 1), places=(A, rested)))) == [(0, "b"), (1, "a")]
    has_a_machine = SeatView(0, "b")
    assert short(all_decisions(view(has_a_machine, *free(1), places=(A, rested)))) == [(1, "b")]
    wasting = replace(rested, wastes=True)
    assert short(all_decisions(view(has_a_machine, *free(1), places=(A, wasting)))) == [(1, "a")], (
        "it has to train first"
    )


def test_nothing_is_opened_where_no_price_is_known():
    assert short(all_decisions(view(*free(0, 1), places=(A, replace(B, hourly_usd=None))))) == [(0, "a"), (1, "a")]


def test_a_run_with_all_its_places_at_rest_waits_and_says_so_in_the_providers_words():
    decision = place(view(*free(0, 1), places=(resting(A),)), NOW, LIMITS)
    assert decision == Wait("2 more replicas are wanted: a has no machine (no quota)")


def test_what_is_left_of_max_cost_usd_must_pay_for_ten_minutes():
    two_dollars_an_hour = 2 * 1.0 / 6
    assert short(all_decisions(view(*free(0, 1), places=(A,), left_usd=two_dollars_an_hour))) == [(0, "a"), (1, "a")]
    assert short(all_decisions(view(*free(0, 1), places=(A,), left_usd=0.99 * two_dollars_an_hour))) == [(0, "a")]


def test_a_number_that_a_user_asks_for_is_opened_within_the_limit():
    seen = view(*training("b", 0, 1), *free(2, 3), asked=4)
    assert short(all_decisions(seen)) == [(2, "b"), (3, "b")]
    assert short(all_decisions(seen, replace(LIMITS, usd_per_hour=6.0))) == [(2, "a"), (3, "a")]
    assert short(all_decisions(seen, replace(LIMITS, usd_per_hour=5.0))) == [(2, "a")]
    assert short(all_decisions(view(*training("b", 0), *training("a", 1, 2), asked=2))) == [(2, "leaves")]


# -- beyond the least, by what tokens have cost so far ----------------------------------------------------------------


def test_beyond_the_least_a_machine_is_launched_for_about_what_a_token_has_cost_so_far():
    """Whatever costs more raises the cost of the whole run; those that are wanted at the least are launched anyway."""
    limits = replace(LIMITS, usd_per_hour=100.0)
    for times, opened in ((1.09, [2, 3]), (1.11, [])):
        seen = view(*training("b", 0, 1), *free(2, 3), places=(B,), paid_usd=B.usd_per_token / times)
        assert short(all_decisions(seen, limits)) == [(each, "b") for each in opened]
    least = view(*free(0, 1, 2, 3), places=(B,), paid_usd=B.usd_per_token / 10)
    assert short(all_decisions(least, limits)) == [(0, "b"), (1, "b")]


def test_beyond_the_least_machines_leave_at_once_where_a_token_costs_a_fourth_more_than_it_has_so_far():
    limits = replace(LIMITS, usd_per_hour=100.0)
    for times, left in ((1.24, []), (1.26, [3, 2])):
        paid = {"paid_usd": B.usd_per_token / times, "round_ended": False}
        decisions = all_decisions(view(*training("b", 0, 1, 2, 3), places=(B,), **paid), limits)
        assert short(decisions) == [(each, "leaves") for each in left]


def test_a_machine_that_trains_briefly_costs_its_start_too():
    """Ten machines have trained for as long as their starts took, so that a token costs twice as much there."""
    limits, brief = replace(LIMITS, usd_per_hour=100.0), replace(B, start_s=300.0, ends=10, trained_s=3000.0)
    for there, paid_usd, opened in ((B, 1.0, [2, 3]), (brief, 1.0, []), (brief, 2.0, [2, 3])):
        seen = view(*training("b", 0, 1), *free(2, 3), places=(there,), paid_usd=paid_usd * B.usd_per_token)
        assert short(all_decisions(seen, limits)) == [(each, "b") for each in opened]


# -- moving ------------------------------------------------------------------------------------------------------------


def test_a_replica_moves_by_opening_another_id_first_and_only_then_the_dear_one_leaves():
    seen = view(*overpaid("a", 0, 1), *free(2, 3))
    first = all_decisions(seen)
    assert short(first) == [(2, "b")] and first[0].moves
    words = "from a ($1.00 an hour, $2.78 per million tokens) to b ($2.00 an hour, $1.39 per million tokens)"
    assert first[0].why == f"replica 1 moves {words}"
    middle = view(*overpaid("a", 0, 1), *free(2, 3), round_ended=False, moved_round=10)
    assert short(all_decisions(middle)) == [(2, "b")], "nobody's work ends, so that no round's end is waited for"
    assert all_decisions(view(*training("a", 0, 1), *waiting("b", 2), moved_round=10)) == []
    then = view(*training("a", 0, 1), *training("b", 2), *free(3), round_=13, moved_round=10)
    assert short(all_decisions(then))[0] == (1, "leaves")


def test_without_a_free_id_the_dear_one_leaves_first():
    limits = Limits(2, 2)
    assert short(all_decisions(view(*overpaid("a", 0, 1)), limits)) == [(1, "leaves")]
    vacated = view(*training("a", 0), *free(1), moved_round=10)
    assert short(all_decisions(vacated, limits)) == [(1, "b")]


@pytest.mark.parametrize(
    "kept",
    [
        {"round_ended": False},
        {"moved_round": 8},  # two rounds ago
        {"places": (A, replace(B, hourly_usd=4.0))},  # a token costs as much
        {"places": (A, replace(B, start_s=18_001.0))},  # for $10 a machine has not even started there
        {"places": (A, resting(B))},
        {"places": (A, resting(B, for_s=-1.0, since_s=60.0))},  # it refused a minute ago, and no id is free
        {"left_usd": 0.1},
    ],
    ids=str,
)
def test_a_move_waits_for_a_rounds_end_for_three_rounds_until_it_would_have_paid_and_for_a_sure_machine(kept):
    assert all_decisions(view(*overpaid("a", 0, 1), **kept), Limits(2, 2)) == []
    moves = view(*overpaid("a", 0, 1), places=(A, replace(B, hourly_usd=3.9, start_s=9_000.0)))
    assert short(all_decisions(moves, Limits(2, 2))) == [(1, "leaves")]


def test_overpaid_are_the_dollars_beyond_what_its_tokens_cost_where_they_cost_least():
    """A token costs $1 / 360,000 at a, and half of that at b, which has 400 a second."""
    assert overpaid_usd((A, B), "a", NOW) == pytest.approx(0.5 / 3600)
    assert overpaid_usd((A, B), "b", NOW) == pytest.approx(-2.0 / 3600)
    for unsure in (resting(B), resting(B, for_s=-1.0), replace(B, known_by="expected"), replace(B, hourly_usd=None)):
        assert overpaid_usd((A, unsure), "a", NOW) == 0.0
    assert overpaid_usd((replace(A, known_by="expected"), B), "a", NOW) == 0.0
    assert overpaid_usd((A, B), "gone", NOW) == 0.0


def test_an_id_that_is_free_is_opened_at_a_place_as_soon_as_it_does_not_rest():
    seen = view(*training("a", 0, 1), *free(2), places=(A, resting(B, for_s=-1.0, since_s=60.0)))
    assert short(all_decisions(seen)) == [(2, "b")]


@pytest.mark.parametrize(
    ("without_s", "earlier", "waits_s"),
    [(600.0, {}, 970.8), (36_000.0, {}, 4_957.2), (0.0, {"without_s": 36_000.0, "returns": 9}, 1_500.0)],
)
def test_a_replica_is_ended_for_a_place_that_refuses_when_a_try_in_vain_costs_less_than_to_wait(
    without_s, earlier, waits_s
):
    """In vain it costs $1 / 12, a start at a. Two machines there cost $1 an hour more than at b. So d squared is 600 s
    times the mean of the times without a machine, the present one until the try included.
    """
    lost = replace(B, refused_since=NOW - 80_000.0, refused_at=NOW, trained_at=NOW - without_s, **earlier)
    for later_s, decided in ((waits_s - 1.0, []), (waits_s + 1.0, [(1, "leaves")])):
        seen = view(*training("a", 0, 1), places=(A, lost))
        assert short(all_decisions(seen, Limits(2, 2), NOW + later_s)) == decided


def test_further_machines_are_worth_it_where_they_lower_what_the_fleets_tokens_cost_together():
    """One's own machines, at $0, are not there by day. Two that are wanted train at a; b costs half of that."""
    own, limits = resting(PlaceView("own", 0.0, 100.0, "measured")), replace(LIMITS, usd_per_hour=100.0)
    seen = view(*training("a", 0, 1), *free(2, 3), places=(own, A, B), moved_round=10)
    assert short(all_decisions(seen, limits)) == [(2, "b"), (3, "b")]
    dear = replace(B, hourly_usd=3.3)  # .82 of a
    assert all_decisions(view(*training("a", 0, 1), *free(2, 3), places=(own, A, dear), moved_round=10), limits) == []
    both = view(*training("a", 0), *training("b", 1, 2, 3), places=(own, A, B), moved_round=10)
    assert short(all_decisions(both, limits)) == [(0, "leaves")]  # the three of b stay, one more than are wanted


def test_at_most_one_replica_moves_in_three_rounds():
    """Prices turn every round: of 300 rounds, at most 100 see a move."""
    seats, moves, moved_round, at = overpaid("a", 0, 1, 2, 3), 0, 0, "a"
    for round_ in range(1, 301):
        cheap = PlaceView("b" if round_ % 2 else "a", 0.1, 100.0, "measured")
        dear = replace(A, name="a" if round_ % 2 else "b")
        seen = view(*seats, places=(cheap, dear), round_=round_, moved_round=moved_round)
        for decision in all_decisions(seen, Limits(4, 4)):
            seen = seen.after(decision)
            moves += isinstance(decision, Vacate)
        moved_round, at = seen.moved_round, cheap.name
        places = [at if each.leaving else each.place for each in seen.seats]
        seats = [replace(each, leaving=False, place=there) for each, there in zip(seen.seats, places, strict=True)]
    assert 90 <= moves <= 100


def test_a_run_of_a_fixed_number_of_replicas_moves_nobody():
    fixed = Limits(2, 2, scales=False)
    assert all_decisions(view(*overpaid("a", 0, 1)), fixed) == []
    assert short(all_decisions(view(*training("a", 0), *free(1)), fixed)) == [(1, "b")]


def test_prices_that_rise_above_the_limit_end_the_dearest_at_once():
    limits = replace(LIMITS, usd_per_hour=6.0)
    risen = view(*training("a", 0, 1), *training("b", 2), places=(replace(A, hourly_usd=4.0), B), round_ended=False)
    decisions = all_decisions(risen, limits)
    assert short(decisions) == [(1, "leaves")] and not decisions[0].moves
    assert decisions[0].why == "machines cost $10.00 an hour by now, usd_per_hour=6"


def test_an_attempt_that_gets_no_machine_leaves_for_a_place_that_may_have_one():
    (refused,), cheap = waiting("a", 0, gives_up_at=NOW), replace(A, hourly_usd=0.1)
    seen = view(replace(refused, refusal="quota exceeded"), *training("b", 1), *free(2), places=(cheap, B))
    decisions = all_decisions(seen)
    assert decisions[0] == Vacate(0, "a gives it no machine: quota exceeded", without="a")
    assert short(decisions[1:]) == [(2, "b")], "not at once at the place that has refused"
    assert all_decisions(view(replace(refused, gives_up_at=NOW + 1), *training("b", 1))) == []
    assert all_decisions(view(refused, *training("b", 1), places=(A, resting(B)))) == []


# -- machines that join ------------------------------------------------------------------------------------------------


def test_what_is_not_paid_for_is_offered_to_machines_that_join():
    seen = view(*free(0, 1, 2, 3), places=(A, B, HOME))
    assert short(all_decisions(seen)) == [(0, "b"), (1, "b"), (2, "home"), (3, "home")]


def test_an_offer_is_withdrawn_when_a_place_has_a_machine_again_and_joined_machines_replace_paid_ones():
    offered = [*waiting("home", 2, 3)]
    lost = view(*training("b", 0), *waiting("home", 1, 2, 3), places=(A, B, HOME))
    assert short(all_decisions(lost)) == [(3, "leaves")]
    joined = view(*training("b", 0, 1), *training("home", 2), *offered[1:], places=(A, B, HOME))
    assert short(all_decisions(joined)) == [(1, "leaves")]
    early = view(*training("b", 0, 1), *training("home", 2), *offered[1:], places=(A, B, HOME), round_ended=False)
    assert all_decisions(early) == []


def test_with_joined_machines_alone_every_id_is_an_offer():
    assert short(all_decisions(view(*free(0, 1, 2, 3), places=(HOME,)))) == [(each, "home") for each in range(4)]


# -- speeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "listed", "found"),
    [
        ({}, {"a": 65.0, "b": 989.0}, {"a": (65.0, "expected"), "b": (989.0, "expected")}),
        ({"a": 130.0}, {"a": 65.0, "b": 989.0}, {"a": (130.0, "measured"), "b": (1978.0, "expected")}),
        ({"a": 130.0}, {"a": None, "b": 989.0}, {"a": (130.0, "measured"), "b": (130.0, "")}),
        ({}, {"a": None, "b": None}, {"a": (1.0, ""), "b": (1.0, "")}),
        ({"gone": 5.0}, {"a": 65.0}, {"a": (1.0, "")}),
    ],
)
def test_a_place_is_as_fast_as_measured_else_as_its_list_says_in_relation_to_the_measured_ones(measured, listed, found):
    assert speeds(measured, listed) == found
