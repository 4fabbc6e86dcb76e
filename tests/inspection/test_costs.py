"""What a run costs, what a round will cost, and the limits that halt it."""

import pytest
from guarded_legs import halted as legs_halted
from protocol_fleet import Fleet
from scripted import STAMP, CountingStore, Scene

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import StoreUnavailable
from diloco_orchestrator.inspection.costs import AttemptCost, EndForecast, LegCost, end_forecast, forecast, leg_cost
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Claim, Exit, Handle, Heartbeat, Intent
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.budgets import LegBudget, limit_reached, next_round_usd, patience_s
from diloco_orchestrator.supervision.next_leg import BY_AUTO_RESUME, BY_ROTATION, begin_next_leg
from executors.contract import LaunchRequest, ReplicaState
from executors.prices import Price

HOUR = 3600.0


def config(**settings):
    return make_config({"entrypoint": "m:f", **settings})


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_machines_are_paid_from_their_launch_to_their_end():
    costs = [AttemptCost(2.0, 0.0, 0.5 * HOUR), AttemptCost(2.0, 0.5 * HOUR, None), AttemptCost(None, 0.0, None)]
    used = leg_cost(costs, began=0.0, now=2 * HOUR)
    assert (used.hours, used.usd, used.unpriced) == (2.0, 1.0 + 3.0, 1)
    assert used.words() == "$4.00 for machines in 2.0 h, $2.00 an hour now, 1 attempts of unknown price not counted"


def test_where_no_price_is_known_none_is_told():
    used = leg_cost([AttemptCost(None, 0.0, None)], began=0.0, now=HOUR)
    assert used.usd is None and used.words() == ""


@pytest.mark.parametrize(
    ("settings", "used", "reason"),
    [
        ({}, LegCost(1e6, 1e6, 0), ""),
        ({"max_hours": 2}, LegCost(1.9, None, 3), ""),
        ({"max_hours": 2}, LegCost(2.0, None, 3), "max_hours=2 is reached"),
        ({"max_cost_usd": 5}, LegCost(9.0, 4.99, 0), ""),
        ({"max_cost_usd": 5}, LegCost(9.0, None, 4), ""),
        ({"max_cost_usd": 5}, LegCost(9.0, 5.0, 0), "max_cost_usd=5 is reached: $5.00 for machines in 9.0 h"),
    ],
)
def test_limits(settings, used, reason):
    assert limit_reached(config(**settings), used) == reason


@pytest.mark.parametrize(
    ("usd", "committed_at", "now", "halted"),
    [
        (8.0, [0.0, 900.0, 1800.0], 2000.0, False),  # at 4 $/h the open round costs .78 more, another one 1.00
        (8.2, [0.0, 900.0, 1800.0], 2000.0, True),
        (8.2, [0.0, 900.0, 1800.0], 2699.0, False),  # as good as over
        (7.0, [0.0, 1800.0, 2700.0], 2700.0, True),  # the longest counts
        (9.9, [1800.0], 2000.0, False),  # nobody knows yet how long a round is
        (9.9, [], 2000.0, False),
    ],
)
def test_a_leg_is_halted_before_the_round_that_its_money_does_not_pay_for(usd, committed_at, now, halted):
    used = LegCost(1.0, usd, 0, rate_usd=4.0)
    reason = limit_reached(config(max_cost_usd=10), used, next_round_usd(used, committed_at, now))
    assert ("max_cost_usd=10 does not pay for another round" in reason) == halted


def test_a_forecast_grows_with_what_it_should_grow_with():
    small = forecast(config(replicas=2), 60.0, 1_000_000)
    assert small.bytes_up == 2 * 4_000_016 and small.bytes_down == 2 * 4_000_016  # 16: a shard's header
    assert forecast(config(replicas=2, codec="bf16"), 60.0, 1_000_000).bytes_up == 2 * 2_000_016
    assert forecast(config(replicas=2, fragments=2), 60.0, 1_000_000).bytes_up == 2 * 2_000_016
    assert forecast(config(replicas=2), 60.0).bytes_up is None
    few = forecast(config(replicas=2, codec="2bit", quorum="all"), 60.0, 1_000_000)
    assert few.bytes_up == 2 * (32 + 250_000 + 8 * 3907) and few.at_least and not small.at_least
    assert few.requests["PUT"] == pytest.approx(
        forecast(config(replicas=2, quorum="all"), 60.0, 1_000_000).requests["PUT"] + 2.0, rel=1e-9
    )
    puts = {
        kept: forecast(config(replicas=2, replica_state=kept), 60.0, 100_000_000).requests["PUT"]
        for kept in ("round", "none")
    }
    assert puts["round"] - puts["none"] == pytest.approx(2 * (12 + 1)), "800 MB of moments in 64 MiB each, and an index"
    assert forecast(config(replicas=40), 60.0).requests["GET"] > 20 * small.requests["GET"]  # each reads from each
    assert forecast(config(replicas=2), 600.0).requests["GET"] > small.requests["GET"]
    assert forecast(config(replicas=2), 60.0, 100_000_000).requests["PUT"] > small.requests["PUT"]  # more shards


# Counted by `make requests-live`, launcher and screen included: replicas, seconds of a round, requests of one.
COUNTED = [
    (2, 25.4, {"PUT": 6.7, "GET": 10.6, "LIST": 5.2}),
    (4, 25.9, {"PUT": 11.9, "GET": 34.0, "LIST": 13.5}),
    (7, 26.2, {"PUT": 19.7, "GET": 97.9, "LIST": 27.9}),
    (2, 1814.0, {"PUT": 57.5, "GET": 45.4, "LIST": 14.7}),
    (4, 1843.1, {"PUT": 115.1, "GET": 103.5, "LIST": 54.2}),
    (7, 1878.5, {"PUT": 202.2, "GET": 227.2, "LIST": 158.2}),
]


@pytest.mark.parametrize(("replicas", "round_s", "counted"), COUNTED)
def test_a_forecast_of_requests_is_within_a_tenth_of_what_a_server_counted(replicas, round_s, counted):
    told = forecast(config(replicas=replicas), round_s, 8000).requests
    assert sum(told.values()) == pytest.approx(sum(counted.values()), rel=0.1)
    price = {"PUT": 0.005, "GET": 0.0004, "LIST": 0.005}
    cost = [sum(price[kind] * each[kind] for kind in price) for each in (told, counted)]
    assert cost[0] == pytest.approx(cost[1], rel=0.1)


def test_an_hour_of_rounds_of_half_an_hour_costs_no_more_than_600_requests():
    assert 2 * sum(forecast(config(replicas=4), 1800.0, 8000).requests.values()) <= 600


# -- a run's own ------------------------------------------------------------------------------------------------------


class Priced(Scene):
    """Machines of two dollars an hour, on a clock that is everybody's."""

    def __init__(self, **settings):
        super().__init__(timing={"poll_s": 0.01, "startup_timeout_s": 1e6}, **settings)
        self.executor.price = self.price

    def come_up(self) -> None:
        """Machines are paid from the time that they are there."""
        for replica_id in (0, 1):
            claim = Claim(**STAMP(), replica_id=replica_id, attempt=1, host="h", pid=1, versions={}, threads=1)
            key = AttemptRecords(self.fleet.store).claim_key(replica_id, 1)
            assert key is not None
            self.fleet.store.create(key, claim.to_bytes())

    def price(self, request: LaunchRequest) -> Price:
        return Price(2.0, "told")


def test_a_leg_is_halted_when_its_money_is_used_up_and_only_then():
    scene = Priced(max_cost_usd=6.0)
    coordinator = scene.coordinator()
    scene.steps(coordinator, 2 * HOUR, every=600.0)
    assert not halted(scene)  # waiting for a machine costs nothing
    scene = Priced(max_cost_usd=6.0)
    coordinator = scene.coordinator()
    coordinator.step()
    scene.come_up()
    scene.steps(coordinator, 1.4 * HOUR, every=600.0)
    assert not halted(scene)
    scene.steps(coordinator, 0.3 * HOUR, every=600.0)  # two machines at 2 $/h: six dollars after an hour and a half
    assert halted(scene)
    assert set(scene.executor.cancelled) == {(0, 1), (1, 1)}, "machines go on while their first round does not end"


def test_a_leg_whose_open_round_does_not_end_is_stopped_a_while_after_its_hours():
    """A deadlock in the training loop: heartbeats go on, and no replica ever commits the halt."""
    scene = Priced(max_hours=1.0)
    coordinator = scene.coordinator()
    coordinator.step()
    scene.come_up()
    for minute in range(118):
        for replica_id in (0, 1):
            beats = {"replica_id": replica_id, "attempt": 1, "counter": minute + 1}
            record = Heartbeat(**STAMP(), **beats, phase="training", round=1, inner_step=7)
            scene.fleet.store.put(keys.heartbeat(replica_id, 1), record.to_bytes())
        scene.steps(coordinator, 60.0, every=60.0)
    assert halted(scene) and scene.executor.cancelled == [], "the round may be as long as the leg"
    scene.steps(coordinator, 180.0, every=60.0)
    assert set(scene.executor.cancelled) == {(0, 1), (1, 1)}
    result = coordinator.reader.log.result(1)
    assert result is not None and result.status == "halted"
    assert result.reason.startswith("halt requested: max_hours=1 is reached, and the open round has not ended in 6")


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([0.0], 2 * HOUR),  # nobody knows how long a round is
        ([0.0, 60.0], 1800.0),  # timing.round_timeout_s
        ([0.0, 2000.0, 2060.0], 4000.0),
    ],
)
def test_the_open_round_may_end_after_the_hours(times, seconds):
    assert patience_s(config(max_hours=2), times) == seconds


def machines(fleet: Fleet, leg: int, began: float, ended: float | None = None) -> None:
    """Two machines of two dollars an hour, of attempts of their own, from `began` to `ended`."""
    attempt = leg + 1
    for who in ({"replica_id": each, "attempt": attempt} for each in (0, 1)):
        stamp, token = Stamp("machine", lambda: began)(), "0" * 16
        intent = Intent(**stamp, **who, leg=leg, executor="told", why="told", claim_token=token)
        claim = Claim(**stamp, **who, host="h", pid=1, versions={}, threads=1)
        for key, record in (
            (keys.intent(*who.values()), intent),
            (keys.handle(*who.values()), Handle(**stamp, **who, handle={}, hourly_usd=2.0)),
            (keys.claim(*who.values(), token), claim),
        ):
            fleet.store.create(key, record.to_bytes())
        if ended is not None:
            end = Exit(**Stamp("machine", lambda: ended)(), **who, code=0, reason="told", round=1)
            fleet.store.create(keys.exit_record(*who.values()), end.to_bytes())


@pytest.mark.parametrize("limits", [{"max_cost_usd": 6.0}, {"max_hours": 1.5}], ids=["dollars", "hours"])
@pytest.mark.parametrize("by", [BY_AUTO_RESUME, BY_ROTATION, "its user"])
def test_a_leg_that_begins_by_itself_has_the_limits_of_the_one_before(limits, by):
    """Otherwise who makes a leg fail, or rewards that make the guard halt, multiply what the user allowed."""
    fleet, _ = legs_halted([0.1, 0.5, 0.9], **limits)
    machines(fleet, leg=1, began=0.0, ended=HOUR)
    begin = begin_next_leg(
        RunLog(fleet.store), rounds=None, from_round=None, by=by, why="told", stamp=Stamp("later", lambda: HOUR)
    )
    machines(fleet, leg=2, began=HOUR)
    reader = RunReader(fleet.store)
    budget = LegBudget(reader, begin, "test", STAMP, wall_time=HOUR)
    assert budget.left_usd in (None, 6.0 if by == "its user" else 2.0)
    budget.enforce(0.0, wall_time=1.4 * HOUR)
    assert reader.log.halt(2) is None
    budget.enforce(10.0, wall_time=1.6 * HOUR)
    assert (reader.log.halt(2) is None) == (by == "its user")


def test_a_new_coordinator_opens_no_machine_for_dollars_that_the_one_before_has_spent():
    fleet, _ = legs_halted([0.1, 0.5, 0.9], max_cost_usd=6.0)
    machines(fleet, leg=1, began=0.0, ended=HOUR)
    reader = RunReader(fleet.store)
    begin = reader.log.newest_begin().record
    assert LegBudget(reader, begin, "test", STAMP, wall_time=2 * HOUR).left_usd == 2.0


class AwayForOneHalt(CountingStore):
    """A store that is away for the first request to halt."""

    away = True

    def create(self, key: str, data: bytes) -> bool:
        if key == keys.halt(1) and self.away:
            self.away = False
            raise StoreUnavailable("it is away")
        return super().create(key, data)


def test_a_request_to_halt_that_the_store_refuses_is_made_again():
    engine = AwayForOneHalt()
    Fleet(store=engine, replicas=2, rounds=2, max_hours=1.0)
    reader = RunReader(engine)
    begin = reader.log.newest_begin().record
    budget = LegBudget(reader, begin, "test", STAMP, wall_time=begin.at)
    with pytest.raises(StoreUnavailable):
        budget.enforce(0.0, wall_time=begin.at + HOUR)
    assert reader.log.halt(1) is None
    budget.enforce(10.0, wall_time=begin.at + HOUR)
    assert reader.log.halt(1) is not None


def test_costs_are_added_up_every_few_seconds():
    scene = Priced(max_hours=1000.0)
    reader = scene.coordinator().reader
    budget, asked = LegBudget(reader, reader.log.newest_begin().record, "test", STAMP, wall_time=0.0), []
    for _ in range(11):
        calls = scene.engine.calls.total()
        budget.enforce(scene.clock.now(), wall_time=0.0)
        asked.append(scene.engine.calls.total() > calls)
        scene.clock.advance(1.0)
    assert [second for second, read in enumerate(asked) if read] == [0, 5, 10]


def test_prices_are_written_down_so_that_the_next_coordinator_counts_on():
    scene = Priced(max_hours=1000.0)
    scene.steps(scene.coordinator(), 2.0)
    scene.come_up()
    reader = scene.coordinator().reader
    handle = reader.attempts.handle(0, 1)
    assert handle is not None and handle.hourly_usd == 2.0
    scene.ends(0, 1, ReplicaState.PREEMPTED)
    scene.steps(scene.coordinator(), 2.0)
    status = reader.status()
    assert status.spent is not None and status.spent.usd is not None and status.spent.unpriced == 0


def halted(scene: Scene) -> bool:
    return RunLog(scene.fleet.store).halt(1) is not None


# -- to the end --------------------------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_machines_that_run_now():
    attempts = [AttemptCost(2.0, 0.0, 3600.0), AttemptCost(3.0, 0.0, None), AttemptCost(None, 0.0, None)]
    spent = leg_cost(attempts, 0.0, 7200.0)
    assert (spent.usd, spent.rate_usd, spent.unpriced) == (8.0, 3.0, 1)
    assert spent.words() == "$8.00 for machines in 2.0 h, $3.00 an hour now, 1 attempts of unknown price not counted"


def test_the_forecast_goes_on_as_the_last_rounds_did():
    spent = LegCost(1.0, 4.0, 0, rate_usd=2.0)
    steady = end_forecast(spent, [1000.0, 1100.0, 1200.0, 1300.0], steps_left=36)
    assert steady is not None and (steady.hours, steady.usd) == (1.0, 6.0)
    assert steady.words() == "about 1 h 0 min to the end, $6.00 in all"
    stalled = end_forecast(spent, [0.0, 5000.0, 5100.0, 5200.0, 9000.0, 9100.0], steps_left=36)
    assert stalled is not None and stalled.hours == 1.0  # neither the start nor one long wait counts
    assert end_forecast(spent, [0.0, 100.0], 36) is None
    unpriced = end_forecast(LegCost(1.0, None, 2), [0.0, 1.0, 2.0], 3600)
    assert unpriced is not None and unpriced.usd is None and unpriced.words() == "about 1 h 0 min to the end"
    assert EndForecast(0.011, None).words() == "about 40 s to the end"
