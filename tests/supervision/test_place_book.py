"""Coordinators that choose places: what providers say, lie and refuse, and what becomes of the run's replicas."""

import math
from itertools import pairwise
from typing import Any

import pytest
from scripted import STAMP, Scene, ScriptedExecutor

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Heartbeat, Intent
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.supervision.coordinator import Coordinator
from diloco_orchestrator.supervision.place_answers import START_S, Answers
from diloco_orchestrator.supervision.place_book import first_launches
from executors.contract import (
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
)
from executors.modal_sandboxes import ModalExecutor
from executors.places import Places
from executors.prices import Price


class Priced(ScriptedExecutor):
    """A provider with a price, and with an answer to every launch but those that it accepts."""

    def __init__(self, usd: float, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.usd, self.refusal = usd, None
        self.asked: list[float] = []  # when a launch was refused
        self.dead = False  # whether its machines run nothing

    def price(self, request: LaunchRequest) -> Price | None:
        return Price(self.usd, "its list")

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        if self.refusal is not None:
            self.asked.append(self.clock.now())
            raise self.refusal
        return super().launch(request)


class Town(Scene):
    """A run of two replicas, of at most three, with two places: `cheap` at $1 an hour and `dear` at $3."""

    def __init__(self, usd_per_hour: float | None = None, **settings: Any) -> None:
        run = {"replicas": 2, "max_replicas": 3, "quorum": None, "retry": {"backoff_s": 0.0, "hung_after_s": 30.0}}
        super().__init__(**{**run, **settings})
        self.cheap, self.dear = Priced(1.0, self.clock), Priced(3.0, self.clock)
        self.executor = Places({"cheap": self.cheap, "dear": self.dear}, usd_per_hour=usd_per_hour)
        self.beats = 0

    @property
    def records(self) -> AttemptRecords:
        return AttemptRecords(self.fleet.store)

    def attempts(self, replica_id: int) -> list[int]:
        return self.records.numbers(replica_id)

    def intents(self) -> list[Intent]:
        records = self.records
        return [records.intent(i, n) for i, numbers in records.all_numbers().items() for n in numbers]

    def alive(self, coordinator: Coordinator) -> dict[int, str]:
        """The place of the newest attempt of each replica that is alive."""
        return {i: self.records.intent(i, self.attempts(i)[-1]).executor for i in coordinator.alive()}

    def run(self, coordinator: Coordinator, seconds: int) -> None:
        """Steps, with heartbeats of every attempt but those of a place whose machines are dead."""
        for _ in range(seconds):
            self.steps(coordinator, 0)
            self.beats += 1
            for executor in (self.cheap, self.dear):
                executor.states |= {who: ReplicaStatus(ReplicaState.CANCELLED) for who in executor.cancelled}
                for who in [] if executor.dead else set(executor.launched) - set(executor.states):
                    beat = {"counter": self.beats, "phase": "training", "round": 1, "inner_step": 0}
                    record = Heartbeat(**STAMP(), replica_id=who[0], attempt=who[1], **beat)
                    self.engine.put(keys.heartbeat(*who), record.to_bytes())
            self.clock.advance(1.0)


def test_replicas_begin_at_the_cheapest_place_and_their_intents_say_why():
    town = Town()
    town.steps(town.coordinator(), 5)
    assert town.cheap.launched == [(0, 1), (1, 1)] and town.dear.launched == []
    intent = town.records.intent(0, 1)
    assert (intent.executor, intent.placed) == (
        "cheap",
        "cheap ($1.00 an hour) costs the least per token, before dear ($3.00 an hour)",
    )


def test_a_place_without_a_machine_rests_for_longer_each_time_and_its_words_are_in_the_next_intent():
    town = Town()
    town.cheap.refusal = NoCapacity("quota of 0 A100 in eu-west1")
    coordinator = town.coordinator()
    town.run(coordinator, 30)
    assert sorted(town.alive(coordinator).values()) == ["dear", "dear"]
    placed = [each.placed for each in town.intents() if each.executor == "dear"]
    assert all("cheap has no machine (no machine: quota of 0 A100 in eu-west1)" in each for each in placed)
    while len(town.cheap.asked) < 6:
        for replica_id in town.alive(coordinator):  # machines that come and go, so that another place is looked for
            town.dear.states[replica_id, town.attempts(replica_id)[-1]] = ReplicaStatus(ReplicaState.PREEMPTED)
        town.run(coordinator, 10)
    rests = [after - before for before, after in pairwise(town.cheap.asked[1:])]
    assert rests[0] >= 60 and all(after >= 1.8 * before for before, after in pairwise(rests)), rests


def test_a_place_that_refuses_for_weeks_is_asked_every_ten_minutes():
    answers, now = Answers(), 0.0
    for _ in range(2000):
        answers = answers.refused("no quota", now, now)
        now = answers.rests_until
    assert now == pytest.approx(60 + 120 + 240 + 480 + 1996 * 600)


@pytest.mark.parametrize(("returns", "rest_s"), [(0, 600.0), (3, 120.0), (19, 60.0)])
def test_a_place_that_has_had_machines_again_rests_for_a_twentieth_of_its_mean_time_without_any(returns, rest_s):
    """It has had none for 9,600 s altogether, and refuses for the sixth time; a rest has a minute at the least."""
    answers = Answers(times=5, without_s=9_500.0, returns=returns, refused_since=900.0, refused_at=940.0)
    assert answers.refused("none", 1000.0, 1000.0).rests_until == pytest.approx(1000.0 + rest_s)


def test_a_place_that_has_machines_again_gets_the_next_attempt_after_its_rest():
    town = Town()
    town.cheap.refusal = NoCapacity("none")
    coordinator = town.coordinator()
    town.run(coordinator, 30)
    town.cheap.refusal = None
    for seconds, places in ((35, ["dear", "dear"]), (20, ["cheap", "dear"])):  # tried with one at a time
        town.dear.states = {who: ReplicaStatus(ReplicaState.PREEMPTED) for who in town.dear.launched}
        town.run(coordinator, seconds)
        assert sorted(town.alive(coordinator).values()) == places


@pytest.mark.parametrize("refusal", [ExecutorDenied("this account has no credit"), Unavailable("HTTP 503")], ids=str)
def test_a_provider_that_refuses_every_launch_loses_its_replicas_to_another_place_within_minutes(refusal):
    town = Town()
    town.cheap.refusal = refusal
    coordinator = town.coordinator()
    town.run(coordinator, 150)
    assert list(town.alive(coordinator).values()) == ["dear", "dear"]
    assert town.records.cancel(0, 1).reason == f"vacated: cheap gives it no machine: {refusal}"
    assert f"cheap has no machine ({refusal})" in town.records.intent(0, 2).placed


@pytest.mark.parametrize("refusal", [ValueError("gpu='V1OO' is no kind"), ExecutorError("HTTP 500")], ids=str)
def test_a_place_that_can_launch_nothing_costs_no_replica_its_budget_while_another_place_can(refusal):
    town = Town(retry={"backoff_s": 0.0, "hung_after_s": 30.0, "max_errors": 0})
    town.cheap.refusal = refusal
    coordinator = town.coordinator()
    town.run(coordinator, 900)
    assert sorted(town.alive(coordinator).values()) == ["dear", "dear"] and len(town.cheap.asked) < 10
    assert "cheap has no machine (" in town.intents()[-1].placed and str(refusal) in town.intents()[-1].placed


def test_a_place_that_can_launch_nothing_costs_no_replica_while_another_one_has_no_machine_for_a_minute():
    town = Town(max_replicas=None)
    town.cheap.refusal = NoCapacity("none today")
    town.dear.refusal = ValueError("no such region")
    coordinator = town.coordinator()
    town.run(coordinator, 40)
    assert coordinator.alive() == [] and len(town.dear.asked) == 2  # both wait for a place that rests
    town.cheap.refusal = None
    town.run(coordinator, 60)
    assert town.alive(coordinator) == {0: "cheap", 1: "cheap"}


def test_a_run_ends_where_one_place_can_launch_nothing_and_the_other_never_has_a_machine():
    town = Town(max_replicas=None, retry={"backoff_s": 0.0, "hung_after_s": 30.0, "max_no_capacity": 3})
    town.cheap.refusal = NoCapacity("none today")
    town.dear.refusal = ValueError("no such region")
    coordinator = town.coordinator()
    town.run(coordinator, 600)
    result = coordinator.reader.log.recorded_result(1)
    assert result is not None and result.status == "failed"
    assert "none today" in result.reason or "no such region" in result.reason


@pytest.mark.parametrize("limits", [{"usd_per_hour": 2.9}, {"max_replicas": None, "max_cost_usd": 0.4}], ids=str)
@pytest.mark.parametrize(
    ("refusal", "minutes"),
    [
        (ExecutorDenied("this account has no credit"), 11),
        (ValueError("no such region"), 2),
        (ExecutorError("HTTP 500"), 40),
        (NoCapacity("none today"), 90),
    ],
    ids=str,
)
def test_a_run_ends_where_the_one_place_that_its_limits_pay_for_refuses_for_good(refusal, minutes, limits):
    """As with that place alone: a place whose machines cost more gives nobody one. It waited without end."""
    town = Town(**limits, retry={"backoff_s": 0.0, "hung_after_s": 30.0, "max_no_capacity": 3})
    town.cheap.refusal = refusal
    coordinator = town.coordinator()
    for _ in range(minutes):
        town.run(coordinator, 60)
    result = coordinator.reader.log.recorded_result(1)
    assert result is not None and result.status == "failed" and str(refusal) in result.reason
    assert town.dear.launched == []


def test_replicas_are_given_up_where_no_place_can_launch_any():
    town = Town(retry={"backoff_s": 0.0, "hung_after_s": 30.0, "max_errors": 0})
    town.cheap.refusal = town.dear.refusal = ValueError("no such region")
    coordinator = town.coordinator()
    town.run(coordinator, 900)
    result = coordinator.reader.log.recorded_result(1)
    assert result is not None and result.status == "failed" and "no such region" in result.reason


@pytest.mark.parametrize(("both", "ends"), [(False, False), (True, True)])
def test_a_place_where_two_replicas_were_given_up_alike_gets_no_third_one(both, ends):
    """Its machines run, and refuse the run: an old version, or a GPU that is too small."""
    town = Town(max_replicas=6)
    coordinator = town.coordinator()
    for _ in range(10):
        town.run(coordinator, 60)  # long enough that each attempt's heartbeat is read
        for executor in (town.cheap, town.dear) if both else (town.cheap,):
            executor.states |= {who: ReplicaStatus(ReplicaState.FAILED, exit_code=78) for who in executor.launched}
    places = [intent.executor for intent in town.intents()]
    if ends:
        result = coordinator.reader.log.recorded_result(1)
        assert places == ["cheap", "cheap", "dear", "dear"] and result is not None and result.status == "failed"
    else:
        assert places == ["cheap", "cheap", "dear", "dear"] and coordinator.alive() == [2, 3]
        assert "two replicas were given up there for the same cause" in town.intents()[-1].placed


def test_a_vendor_that_says_running_and_never_claims_costs_each_replica_one_attempt_and_no_more():
    town = Town()
    town.cheap.dead = True
    coordinator = town.coordinator()
    town.run(coordinator, 600)
    assert list(town.alive(coordinator).values()) == ["dear", "dear"]
    assert town.cheap.launched == [(0, 1), (1, 1)]


@pytest.mark.parametrize("price", [math.nan, math.inf, -3.0, None])
def test_a_vendor_whose_price_becomes_no_price_gets_no_further_attempt(price):
    town = Town()
    coordinator = town.coordinator()
    town.run(coordinator, 5)
    town.cheap.price = lambda request: None if price is None else Price(price, "its list")
    town.run(coordinator, 300)  # prices are asked for every minute
    town.cheap.states[1, 1] = ReplicaStatus(ReplicaState.PREEMPTED)
    town.run(coordinator, 20)
    assert town.alive(coordinator) == {0: "cheap", 1: "dear"}


def test_a_vendor_whose_price_is_nothing_gets_all_that_may_train_and_loses_them_to_the_limit_once_it_asks_for_money():
    town = Town(usd_per_hour=3.0)
    town.cheap.usd = 0.0
    coordinator = town.coordinator()
    town.run(coordinator, 5)
    assert town.alive(coordinator) == {0: "cheap", 1: "cheap", 2: "cheap"}
    town.cheap.usd = 2.0
    town.run(coordinator, 120)  # prices are asked for every minute
    assert list(town.alive(coordinator).values()) == ["cheap"] and town.dear.launched == []


def test_the_limit_on_dollars_an_hour_decides_how_many_train():
    for usd_per_hour, launched in ((2.9, 2), (3.0, 3)):
        town = Town(usd_per_hour=usd_per_hour)
        town.run(town.coordinator(), 5)
        assert len(town.cheap.launched) == launched and town.dear.launched == []


def test_a_new_coordinator_knows_where_each_attempt_is_and_launches_nothing_again():
    town = Town()
    town.run(town.coordinator(), 5)
    again = town.coordinator()
    town.run(again, 20)
    assert town.cheap.launched == [(0, 1), (1, 1)] and town.dear.launched == [] and again.alive() == [0, 1]
    town.cheap.states[1, 1] = ReplicaStatus(ReplicaState.PREEMPTED)
    town.run(again, 5)
    assert town.cheap.launched[-1] == (1, 2)


def test_a_new_run_ranks_gpus_by_their_listed_speed_and_offers_the_rest_to_machines_that_join():
    """By the hour an A100 costs three times a T4; by the token it costs less."""
    places = Places({"t4": ModalExecutor("T4"), "a100": ModalExecutor("A100"), "join": JoinExecutor()})
    config = make_config({"entrypoint": "m:f", "replicas": "2..4"})
    assert [each.place for each in first_launches(places, config)] == ["a100", "a100", "join", "join"]


def test_a_halt_moves_and_opens_nothing():
    town = Town(usd_per_hour=20.0)
    coordinator = town.coordinator()
    coordinator.stop("halted", "enough")
    town.steps(coordinator, 20)
    assert town.cheap.launched == [] and town.dear.launched == []


def test_a_start_is_timed_from_when_the_provider_gives_a_machine_without_the_time_in_its_queue():
    town = Town()
    coordinator = town.coordinator()
    town.cheap.states = {who: ReplicaStatus(ReplicaState.PENDING, native_state="queued") for who in [(0, 1), (1, 1)]}
    town.run(coordinator, 120)
    town.cheap.states = {}
    town.run(coordinator, 20)
    assert coordinator._book is not None
    starts = {each.name: each.start_s for each in coordinator._book._place_views(town.clock.now())}
    assert starts["cheap"] < 20.0 and starts["dear"] == START_S
