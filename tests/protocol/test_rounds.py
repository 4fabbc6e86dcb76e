"""The rules of a round as tables of cases."""

import pytest

from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Answer, Origin
from diloco_orchestrator.protocol.rounds import Action, Decision, Policy, Position, View

POLICY = Policy(replicas=3, quorum=3, round_timeout_s=100.0, startup_timeout_s=500.0)


def answer(replica_id: int, kind: str = "delta") -> Answer:
    return Answer.model_validate(
        {
            "replica_id": replica_id,
            "attempt": 1,
            "kind": kind,
            "averaged": False,
            "weight": 1.0,
            "origins": (Origin(round=4, steps=30),),
            "manifest_sha256": "0" * 64,
        }
    )


def view(*answers: Answer, first_of_leg: bool = False) -> View:
    return View(round=4, answers=answers, waiting_since=1000.0, first_of_leg=first_of_leg)


def decide(seen: View, waited_s: float = 10.0) -> Decision:
    return rounds.decide(seen, now=1000.0 + waited_s, policy=POLICY)


@pytest.mark.parametrize(
    ("seen", "waited_s", "action", "named", "missing", "words"),
    [
        (view(), 10, Action.WAIT, (), (0, 1, 2), "waiting: 0 of 3 contributions, missing 0, 1, 2; 90 s left"),
        (view(answer(2)), 10, Action.WAIT, (), (0, 1), "1 of 3 contributions, missing 0, 1; 90 s left"),
        (view(answer(0), answer(1), answer(2)), 10, Action.COMMIT, (0, 1, 2), (), "3 of 3 contributions"),
        (view(*(answer(i, "scores") for i in range(3))), 0, Action.COMMIT, (0, 1, 2), (), "3 of 3"),
        (view(answer(0), answer(1, "abstention")), 10, Action.WAIT, (), (2,), "missing 2"),
        (
            view(answer(0), answer(1, "abstention"), answer(2)),
            10,
            Action.COMMIT,
            (),
            (),
            "all answered, but only 2 of the 3 contributions needed (replica 1: abstention): nobody is averaged",
        ),
        (
            view(answer(0, "wrong_base"), answer(1, "unverifiable"), answer(2)),
            10,
            Action.COMMIT,
            (),
            (),
            "replica 0: wrong_base; replica 1: unverifiable",
        ),
        (view(answer(0), answer(2)), 99.9, Action.WAIT, (), (1,), "0 s left"),
        (view(answer(0), answer(2)), 100, Action.GIVE_UP, (), (1,), "no quorum after 100 s; missing: 1"),
        (view(answer(0), answer(1), answer(2)), 1e6, Action.COMMIT, (0, 1, 2), (), "3 of 3"),
        (view(answer(0), first_of_leg=True), 499, Action.WAIT, (), (1, 2), "1 s left"),
        (view(answer(0), first_of_leg=True), 500, Action.GIVE_UP, (), (1, 2), "no quorum after 500 s"),
    ],
)
def test_decisions(seen, waited_s, action, named, missing, words):
    decision = decide(seen, waited_s)
    assert (decision.action, decision.named) == (action, named)
    assert words in decision.reason
    if action is not Action.COMMIT:
        assert decision.missing == missing


def test_the_order_of_answers_changes_nothing():
    answers = [answer(2), answer(0), answer(1)]
    assert decide(view(*answers)).named == decide(view(*sorted(answers, key=lambda a: a.replica_id))).named


def test_summaries_leave_out_the_time():
    early, late = decide(view(answer(0)), 10), decide(view(answer(0)), 20)
    assert early.reason != late.reason and early.summary == late.summary


def test_the_default_quorum_is_everybody():
    for quorum in (None, "all"):
        assert Policy.of(make_config({"entrypoint": "m:f", "replicas": 5, "quorum": quorum})).quorum == 5


ALL = Decision(Action.COMMIT, "3 of 3 contributions", (0, 1, 2))
NOBODY = Decision(Action.COMMIT, "all answered, but only 2")


def position(outer_step: int = 3, empty_rounds: int = 0) -> Position:
    return Position(round=3, outer_step=outer_step, empty_rounds=empty_rounds, stop="none", sha256="0" * 64)


@pytest.mark.parametrize(
    ("decision", "at", "fired", "halt", "applied", "outer_step", "empty", "stop", "words"),
    [
        (ALL, position(), "", "", True, 4, 0, "none", "3 of 3"),
        (ALL, position(9), "", "", True, 10, 0, "none", "3 of 3"),
        (ALL, position(), "gap", "", False, 3, 0, "halted", "the guard fired: gap"),
        (ALL, position(), "", "lunch", True, 4, 0, "halted", "halt requested: lunch"),
        (ALL, position(), "gap", "lunch", False, 3, 0, "halted", "the guard fired: gap"),
        (ALL, position(10), "", "", False, 10, 0, "completed", "every outer step is taken"),
        (ALL, position(10), "", "lunch", False, 10, 0, "completed", "every outer step is taken"),
        (ALL, position(10), "gap", "", False, 10, 0, "halted", "the guard fired"),
        (NOBODY, position(), "", "", False, 3, 1, "none", "only 2"),
        (NOBODY, position(empty_rounds=1), "", "", False, 3, 2, "none", "only 2"),
        (NOBODY, position(empty_rounds=2), "", "", False, 3, 3, "failed", "3 rounds in a row named nobody"),
        (NOBODY, position(empty_rounds=2), "", "lunch", False, 3, 3, "halted", "halt requested"),
        (NOBODY, position(10), "", "", False, 10, 1, "none", "only 2"),
        (ALL, position(empty_rounds=2), "", "", True, 4, 0, "none", "3 of 3"),
    ],
)
def test_conclusions(decision, at, fired, halt, applied, outer_step, empty, stop, words):
    conclusion = rounds.conclude(decision, at, outer_steps=10, fired=fired, halt=halt)
    assert (conclusion.applied, conclusion.outer_step) == (applied, outer_step)
    assert (conclusion.empty_rounds, conclusion.stop) == (empty, stop)
    assert words in conclusion.reason


def test_named_answers_mark_who_is_in_the_mean():
    named = rounds.named_answers([answer(0), answer(1, "abstention"), answer(2)], averaged=(0, 2))
    assert [(a.replica_id, a.averaged) for a in named] == [(0, True), (1, False), (2, True)]
