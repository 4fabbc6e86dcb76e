"""Runs at several places, in real processes: where replicas are launched, and how one moves to a cheaper place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S
from real_runs import FAST, reader_of

from diloco_orchestrator import (
    LocalProcessExecutor,
    Places,
    Run,
    attach,
    launch,
    plan_launch,
)
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.verify import verify
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run as RunRecord
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.store.open_store import open_store

SETTINGS: dict[str, Any] = {**FAST, "quorum": None, "rounds": 100_000, "sync_every": 3, "args": {"pause_s": 0.05}}


def at(folder: Path, name: str, usd: float) -> LocalProcessExecutor:
    return LocalProcessExecutor(folder / name, hourly_usd=usd, grace_s=0.5)


def places_of(folder: Path) -> dict[tuple[int, int], str]:
    """The place of every attempt that sends heartbeats or has, by replica and attempt."""
    records = reader_of(folder / "bucket").attempts
    who = [(i, n) for i, numbers in records.all_numbers().items() for n in numbers if records.heartbeat(i, n)]
    return {each: records.intent(*each).executor for each in who}  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_replica_moves_from_the_dear_place_to_the_cheap_one_and_the_run_verifies(tmp_path):
    """A new coordinator finds that prices have changed. It opens an id at the cheap place, and then ends one at the
    dear place, one in three rounds."""
    folder, store = tmp_path, str(tmp_path / "bucket")
    first = Places({"a": at(folder, "a", 1.0), "b": at(folder, "b", 3.0)})
    launch("tiny_workloads:train", store=store, executor=first, replicas="2..3", **SETTINGS)
    run = attach(store, executor=Places({"a": at(folder, "a", 3.0), "b": at(folder, "b", 1.0)}))
    until(run, lambda: sum(place == "b" for place in places_of(folder).values()) >= 2)
    found, records = places_of(folder), reader_of(folder / "bucket").attempts
    assert [found[0, 1], found[1, 1], found[2, 1]] == ["a", "a", "b"]
    placed = records.intent(2, 1)
    assert placed is not None and "moves from a ($3.00 an hour" in placed.placed and "to b ($1.00" in placed.placed
    left = [records.cancel(i, 1) for i in (0, 1)]
    assert [each.reason.split(": ")[0] for each in left if each is not None] == ["vacated"] * len([*filter(None, left)])
    assert any(left), "nobody has left the dear place"
    assert verify(store).agrees
    status = run.status()
    rows = {row.place: row for row in status.places}
    assert rows["b"].tokens > 0 and rows["b"].usd_per_million and rows["a"].usd is not None
    assert status.placed.startswith("replica ")
    assert [words for words in status.place_words() if "$1.00 an hour each" in words and "per million tokens" in words]


def until(run: Run, reached: Callable[[], bool]) -> None:
    """Supervise the run until `reached`, then halt it."""
    halted = []

    def drive() -> None:
        if not halted and reached():
            run.halt("seen enough")
            halted.append(True)

    assert run.wait(PATIENCE_S, on_poll=drive).status == "halted"


TWO = {"cheap": 1.0, "dear": 3.0}


def two_places(**more: Any) -> Places:
    return Places({name: LocalProcessExecutor(hourly_usd=usd) for name, usd in TWO.items()}, **more)


def test_a_plan_says_where_each_replica_would_be_launched_and_why(tmp_path):
    executor = two_places(usd_per_hour=5.0)
    plan = plan_launch("tiny_workloads:train", str(tmp_path), replicas="2..8", executor=executor)
    (line,) = plan.places
    assert line == "replicas 0-4 at cheap: cheap ($1.00 an hour) costs the least per token, before dear ($3.00 an hour)"
    assert f"places:    {line}" in plan.lines() and plan.hourly_usd == 5.0
    assert plan.to_json()["places"] == (line,)


@pytest.mark.parametrize(
    ("usd_per_hour", "max_cost_usd", "words"),
    [
        (0.9, None, "usd_per_hour=0.9 pays for none of 4 replicas: "),
        (2.5, 100.0, "usd_per_hour=2.5 pays for 2 of 4 replicas: "),
        (None, 0.2, "max_cost_usd=0.2 pays for 10 minutes of 1 of 4 replicas: "),
        (4.0, None, ""),
    ],
)
def test_a_plan_says_how_many_replicas_the_limits_pay_for_where_the_others_wait_for_machines_that_join(
    tmp_path, usd_per_hour, max_cost_usd, words
):
    places = {"cheap": LocalProcessExecutor(hourly_usd=1.0), "join": JoinExecutor()}
    plan = plan_launch(
        "tiny_workloads:train",
        str(tmp_path),
        replicas="4..8",
        max_cost_usd=max_cost_usd,
        executor=Places(places, usd_per_hour=usd_per_hour),
    )
    rest = "All start" if "none" in words else "The rest start"
    where = "a machine costs $1.00 an hour at cheap, the cheapest place that launches any. "
    assert plan.unpaid == (words and f"{words}{where}{rest} only on machines that join.")
    assert (f"unpaid:    {plan.unpaid}" in plan.lines()) == bool(words) == bool(plan.to_json()["unpaid"])


def test_a_launch_warns_that_the_limits_pay_for_none_and_waits_for_machines_that_join(tmp_path, caplog):
    executor = Places({"cheap": LocalProcessExecutor(hourly_usd=1.0), "join": JoinExecutor()}, usd_per_hour=0.9)
    launch("tiny_workloads:train", store=str(tmp_path), executor=executor, replicas="2..3", **SETTINGS)
    assert [each.levelname for each in caplog.records if "pays for none of 2 replicas" in each.message] == ["WARNING"]


@pytest.mark.parametrize(
    ("executor", "settings", "words"),
    [
        (Places([LocalProcessExecutor()]), {}, "place 'local': the price of its machines is not known"),
        (two_places(usd_per_hour=1.9), {"replicas": "2..4"}, r"at cheap, the cheapest place, they cost \$2.00 an hour"),
        (
            two_places(usd_per_hour=9),
            {"replicas": 2},
            r"needs a run whose replicas may leave and come: give replicas=2",
        ),
        (two_places(), {"max_cost_usd": 0.3}, "max_cost_usd=0.3 pays for less than 10 minutes of replicas=2 at cheap"),
    ],
)
def test_limits_and_prices_that_cannot_be_meant_are_refused_before_anything_is_written(
    tmp_path, executor, settings, words
):
    with pytest.raises(ConfigError, match=words):
        launch("tiny_workloads:train", store=str(tmp_path / "bucket"), executor=executor, **{"replicas": 2, **settings})
    assert not (tmp_path / "bucket").exists()


def test_a_resume_whose_replicas_the_limit_does_not_pay_for_is_refused(tmp_path):
    settings = {"entrypoint": "tiny_workloads:train", "rounds": 3, "replicas": 1, "max_replicas": 8}
    stamp, store = Stamp("t", lambda: 0.0), open_store(str(tmp_path))
    record = RunRecord(**stamp(), run_id="tiny", config=make_config(settings), package_version="0")
    create_run(store, record, "launch", stamp)
    run = attach(str(tmp_path), executor=two_places(usd_per_hour=3.0), trust_bucket=True)
    with pytest.raises(ConfigError, match=r"does not pay for replicas=4: at cheap, .*\$4.00 an hour"):
        run.resume(replicas=4)
    with pytest.raises(ConfigError, match=r"goes on \(leg 1\): there is nothing to resume"):
        run.resume(replicas=3)
