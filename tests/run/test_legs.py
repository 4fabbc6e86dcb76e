"""Legs: which base the next one starts from and with which guard state, and how a coordinator ends one."""

from typing import Any

from protocol_fleet import Fleet, play, report

from diloco_orchestrator.protocol.legs import bases, best_base
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.run_log import RunLog


def begins_of(fleet: Fleet) -> list[Begin]:
    return RunLog(fleet.store).begins()


def fleet_scoring(scores: list[float], **settings: Any) -> tuple[Fleet, list[Any]]:
    """A run in which the base before round i scores `scores[i - 1]`."""
    fleet = Fleet(replicas=2, rounds=50, **settings)
    participants = fleet.join_all()
    for score in scores:
        play(participants, [1.0, 2.0], [report(share=i, score=score) for i in (0, 1)])
    return fleet, participants


def test_of_bases_that_score_alike_the_earliest_is_the_best():
    fleet, _ = fleet_scoring([0.1, 0.5, 0.9, 0.9, 0.2])
    commits, begins = fleet.commits(), begins_of(fleet)
    assert best_base(commits, begins, bases(commits, begins)) == 2
