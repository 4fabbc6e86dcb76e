"""Legs that a guard or a halt ends, of two replicas without training: for tests of what comes after a leg."""

from dataclasses import replace
from typing import Any

from protocol_fleet import Fleet, play, report

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Halt, Metric
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)
CALM, DRIFTING = 0.0, 0.5  # nats of kl_to_init; the guard stops at 0.08
GUARD = {"min_steps": 1, "ema_alpha": 0.0, "max_proxy_real_gap": 10.0}  # only drift fires


def scoring(
    fleet: Fleet, participants: list[Participant], scores: list[float], last_drifts: bool = False
) -> list[Participant]:
    """Rounds in which the base before the i-th one scores `scores[i]`; a drift in the last one fires the guard."""
    for index, score in enumerate(scores):
        drift = DRIFTING if last_drifts and index == len(scores) - 1 else CALM
        said = [
            replace(report(share=i, score=score), metrics={"kl_to_init": Metric(sum=drift, count=1)}) for i in (0, 1)
        ]
        play(participants, [1.0, 2.0], said)
    return participants


def fleet_of(scores: list[float], last_drifts: bool = False, **settings: Any) -> tuple[Fleet, list[Participant]]:
    fleet = Fleet(replicas=2, **{"rounds": 50, "guard": GUARD, "scored": True, **settings})
    return fleet, scoring(fleet, fleet.join_all(), scores, last_drifts)


def halted(scores: list[float], **settings: Any) -> tuple[Fleet, list[Participant]]:
    """As `fleet_of`, but in the last round a halt is obeyed."""
    fleet, participants = fleet_of(scores[:-1], **settings)
    halt(fleet)
    return fleet, scoring(fleet, participants, scores[-1:])


def halt(fleet: Fleet, leg: int = 1) -> None:
    fleet.store.create(keys.halt(leg), Halt(**STAMP(), leg=leg, by="test", reason="lunch").to_bytes())


def commit_of(fleet: Fleet, round_: int) -> Commit:
    return fleet.commits()[round_ - 1]


def ending(fleet: Fleet) -> EndOfLeg:
    log = RunLog(fleet.store)
    return EndOfLeg(log, log.newest_begin(), STAMP)
