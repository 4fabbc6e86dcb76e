"""The rules of a round as tables of cases."""

from collections.abc import Sequence
from typing import Any

import pytest

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Answer, Origin
from diloco_orchestrator.protocol.rounds import Action, Decision, Policy, Position, View
from diloco_orchestrator.protocol.straggler import StragglerDeadline

STRICT = Policy(replicas=3, most_replicas=3, quorum=3, strict=True, round_timeout_s=100.0, startup_timeout_s=500.0)
ELASTIC = Policy(replicas=5, most_replicas=5, quorum=3, strict=False, round_timeout_s=100.0, startup_timeout_s=500.0)
USUAL = StragglerDeadline(median_s=20.0, deadline_s=30.0)
LONG = StragglerDeadline(4000.0, 6000.0)


def answer(replica_id: int, kind: str = "delta") -> Answer:
    return Answer.model_validate(
        {
            "replica_id": replica_id,
            "attempt": 1,
            "kind": kind,
            "averaged": False,
            "weight": 30,
            "origins": (Origin(round=4, steps=30),),
            "manifest_sha256": "0" * 64,
        }
    )


def view(*answers: Answer, roster: Sequence[int] = (0, 1, 2), **fields: Any) -> View:
    """Opened at 980, answered at 1000, the quorum seen then."""
    times = {"opened_at": 980.0, "waiting_since": 1000.0, "quorum_since": 1000.0, "deadline": USUAL, **fields}
    return View(answers=answers, roster=roster, **times)


def decide(seen: View, waited_s: float = 10.0, policy: Policy = STRICT) -> Decision:
    return rounds.decide(seen, now=1000.0 + waited_s, policy=policy)


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
        (view(answer(0), answer(2)), 100, Action.GIVE_UP, (), (1,), "no quorum (3) after 100 s; missing: 1"),
        (
            view(answer(0), answer(2), deadline=LONG),
            4000,
            Action.WAIT,
            (),
            (1,),
            "1980 s left",
        ),
        (view(answer(0), answer(1), answer(2)), 1e6, Action.COMMIT, (0, 1, 2), (), "3 of 3"),
        (view(answer(0), deadline=None), 499, Action.WAIT, (), (1, 2), "1 s left"),
        (view(answer(0), deadline=None), 500, Action.GIVE_UP, (), (1, 2), "no quorum (3) after 500 s"),
    ],
)
def test_decisions(seen, waited_s, action, named, missing, words):
    decision = decide(seen, waited_s)
    assert (decision.action, decision.named) == (action, named)
    assert words in decision.reason
    if action is not Action.COMMIT:
        assert decision.missing == missing


FIRST = {"deadline": None, "roster": range(5)}  # the round that waits for everybody to start


@pytest.mark.parametrize(
    ("seen", "waited_s", "action", "named", "words"),
    [
        # Nobody waits for a replica that is launched no more, but its response counts if there is one.
        (
            view(*map(answer, range(3)), **FIRST, out=(3, 4)),
            0,
            Action.COMMIT,
            (0, 1, 2),
            "3 of 5 contributions, out for good: 3, 4",
        ),
        (view(*map(answer, range(3)), **FIRST, out=(3,)), 0, Action.WAIT, (), "out for good: 3, waiting for 4; 500 s"),
        (
            view(*map(answer, range(4)), **FIRST, out=(3, 4)),
            0,
            Action.COMMIT,
            (0, 1, 2, 3),
            "4 of 5 contributions, out for good: 4",
        ),
        # Without a quorum of contributions a round ends once all others have responded.
        (view(answer(0), answer(1), **FIRST, out=(3, 4)), 0, Action.WAIT, (), "missing 2"),
        (
            view(answer(0), answer(1), answer(2, "abstention"), **FIRST, out=(3, 4)),
            0,
            Action.COMMIT,
            (),
            "all answered but 3, 4, out for good, but only 2 of the 3 contributions needed (replica 2: abstention)",
        ),
    ],
)
def test_nobody_waits_for_replicas_that_are_out(seen, waited_s, action, named, words):
    decision = decide(seen, waited_s, ELASTIC)
    assert (decision.action, decision.named) == (action, named)
    assert words in decision.reason and not set(decision.missing) & set(seen.out)


@pytest.mark.parametrize(
    ("seen", "waited_s", "action", "named"),
    [
        # A tie waits for replica 4, with and without a quorum of contributions, but not when it is out or responds …
        (view(*map(answer, range(3)), roster=(0, 1, 2), tie_breakers=range(5)), 99, Action.WAIT, ()),
        (view(answer(0), answer(1, "wrong_base"), roster=(0, 1), tie_breakers=range(5)), 99, Action.WAIT, ()),
        (
            view(*map(answer, range(3)), roster=(0, 1, 2), tie_breakers=range(5), out=(3, 4)),
            0,
            Action.COMMIT,
            (0, 1, 2),
        ),
        (view(*map(answer, range(3)), roster=(0, 1, 2), tie_breakers=range(3)), 0, Action.COMMIT, (0, 1, 2)),
        # … and not for longer than for a quorum.
        (view(*map(answer, range(3)), roster=(0, 1, 2), tie_breakers=range(5)), 100, Action.COMMIT, (0, 1, 2)),
    ],
)
def test_a_tie_of_bases_waits_for_the_replicas_that_could_break_it(seen, waited_s, action, named):
    decision = decide(seen, waited_s, ELASTIC)
    assert (decision.action, decision.named) == (action, named)
    assert action is Action.COMMIT or ("missing" in decision.reason and 4 in decision.missing)


@pytest.mark.parametrize(
    ("seen", "waited_s", "action", "named", "missing"),
    [
        # Where a quorum has responded nobody waits for a vacated replica, whether all or some contribute.
        (view(*map(answer, range(3)), roster=(0, 1, 2, 4), vacated=(3, 4)), 0, Action.COMMIT, (0, 1, 2), ()),
        (
            view(answer(0), answer(1), answer(2, "abstention"), roster=(0, 4), vacated=(3, 4)),
            0,
            Action.COMMIT,
            (),
            (),
        ),
        # With fewer a vacated one is waited for, for it or another one is launched again, as long as for a quorum.
        (view(answer(0), answer(1), roster=(0, 1), out=(2,), vacated=(3, 4)), 99, Action.WAIT, (), (3, 4)),
        (view(answer(0), answer(1), roster=(0, 1), out=(2,), vacated=(3, 4)), 100, Action.GIVE_UP, (), (3, 4)),
        # In a tie of bases nobody waits for one.
        (
            view(*map(answer, range(3)), roster=(0, 1), tie_breakers=range(5), vacated=(3, 4)),
            0,
            Action.COMMIT,
            None,
            (),
        ),
        (view(answer(0), answer(1), tie_breakers=range(5), vacated=(3, 4)), 99, Action.WAIT, (), (2,)),
    ],
)
def test_a_vacated_replica_is_waited_for_only_while_fewer_than_a_quorum_respond(seen, waited_s, action, named, missing):
    decision = decide(seen, waited_s, ELASTIC)
    assert (decision.action, decision.missing) == (action, missing)
    assert named is None or decision.named == named


def test_a_round_is_ready_without_the_replicas_that_are_out():
    assert rounds.is_ready(view(*map(answer, range(3)), **FIRST, out=(3,), vacated=(4,)), 1000.0, ELASTIC)
    assert rounds.is_ready(view(*map(answer, range(3)), **FIRST, out=(3, 4)), 1000.0, ELASTIC)
    assert not rounds.is_ready(view(*map(answer, range(3)), **FIRST, out=(3,)), 1000.0, ELASTIC)


def test_a_commit_that_averages_nobody_says_why_each_response_is_none():
    nan = answer(1, "abstention").model_copy(update={"reason": "pseudo-gradient not finite: weight"})
    words = decide(view(answer(0), nan, answer(2))).reason
    assert "(replica 1: abstention, pseudo-gradient not finite: weight): nobody is averaged" in words


def test_the_order_of_answers_changes_nothing():
    answers = [answer(2), answer(0), answer(1)]
    assert decide(view(*answers)).named == decide(view(*sorted(answers, key=lambda a: a.replica_id))).named


def test_summaries_leave_out_the_time():
    early, late = decide(view(answer(0)), 10), decide(view(answer(0)), 20)
    assert early.reason != late.reason and early.summary == late.summary


FIRST_THREE = (answer(0), answer(1), answer(2))
ROSTER = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("seen", "waited_s", "action", "named", "words"),
    [
        # Everybody on the roster has answered: nothing is waited for.
        (view(*FIRST_THREE), 0, Action.COMMIT, (0, 1, 2), "3 of 5 contributions"),
        (view(*FIRST_THREE, answer(4)), 0, Action.COMMIT, (0, 1, 2, 4), "4 of 5"),
        (view(*FIRST_THREE, answer(3, "abstention"), roster=ROSTER), 0, Action.COMMIT, (0, 1, 2), "3 of 5"),
        # The deadline is 30 s after the opening, which was 20 s before this replica answered.
        (view(*FIRST_THREE, roster=ROSTER), 9.9, Action.WAIT, (), "3 of 5 contributions, waiting for 3; 0 s left"),
        (view(*FIRST_THREE, roster=ROSTER), 10, Action.COMMIT, (0, 1, 2), "3 of 5 contributions, without 3 after 30.0"),
        # A quorum that came late leaves a grace of 10 s, deadline less median.
        (view(*FIRST_THREE, roster=ROSTER, quorum_since=1050.0), 59, Action.WAIT, (), "1 s left"),
        (view(*FIRST_THREE, roster=ROSTER, quorum_since=1050.0), 60, Action.COMMIT, (0, 1, 2), "without 3 after 80.0"),
        # The first round of a leg waits for everybody as long as machines may take to start.
        (view(*FIRST_THREE, roster=ROSTER, deadline=None), 499, Action.WAIT, (), "waiting for 3; 1 s left"),
        (view(*FIRST_THREE, roster=ROSTER, deadline=None), 500, Action.COMMIT, (0, 1, 2), "without 3 after 520.0 s"),
        # No quorum, however many have answered.
        (view(answer(0), answer(1), roster=ROSTER), 30, Action.WAIT, (), "2 of 5 contributions, missing 2, 3, 4"),
        (view(answer(0), answer(1), answer(2, "abstention"), roster=ROSTER), 69, Action.WAIT, (), "31 s left"),
        (
            view(answer(0), answer(1), answer(2, "abstention"), roster=ROSTER),
            70,
            Action.COMMIT,
            (),
            "no answer from 3, 4, but only 2 of the 3 contributions needed (replica 2: abstention): nobody is averaged",
        ),
        (
            view(answer(0), answer(1), answer(2, "abstention"), deadline=StragglerDeadline(600.0, 900.0)),
            2679,
            Action.WAIT,
            (),
            "1 s left",
        ),
        (
            view(answer(0), answer(1), answer(2, "abstention"), deadline=StragglerDeadline(600.0, 900.0)),
            2680,
            Action.COMMIT,
            (),
            "nobody",
        ),
        (view(answer(0), answer(1), roster=ROSTER), 100, Action.GIVE_UP, (), "no quorum (3) after 100 s; missing: 2"),
    ],
)
def test_elastic_decisions(seen, waited_s, action, named, words):
    decision = decide(seen, waited_s, ELASTIC)
    assert (decision.action, decision.named) == (action, named)
    assert words in decision.reason


@pytest.mark.parametrize(
    ("seen", "waited_s", "ready"),
    [
        (view(answer(0), answer(1)), 9.9, False),
        (view(answer(0), answer(1)), 10, True),  # the deadline, 30 s after the opening
        (view(*FIRST_THREE), 0, True),
        (view(*(answer(i, "wrong_base") for i in range(3))), 0, True),
        (view(*FIRST_THREE, roster=ROSTER, deadline=None), 499, False),
        (view(*FIRST_THREE, roster=ROSTER, deadline=None), 500, True),
    ],
)
def test_a_round_is_ready_once_its_roster_has_answered_or_the_deadline_has_passed(seen, waited_s, ready):
    assert rounds.is_ready(seen, 1000.0 + waited_s, ELASTIC) is ready


def test_with_quorum_all_no_deadline_ends_a_round():
    for seen in (view(answer(0), answer(1)), view(answer(0), answer(1), answer(2, "abstention"))):
        assert decide(seen, 99.0).named == ()
    assert decide(view(answer(0), answer(1)), 99.0).action is Action.WAIT


@pytest.mark.parametrize(
    ("answered", "latecomers", "roster"),
    [
        ((0, 2, 4), (), (0, 2, 4)),
        ((0, 2, 4), (3,), (0, 2, 3, 4)),
        ((4, 2, 0), (2,), (0, 2, 4)),
        ((0, 2), (), (0, 1, 2, 3, 4)),  # fewer than the quorum: everybody
        ((0, 2), (1,), (0, 1, 2)),
        ((), (), (0, 1, 2, 3, 4)),
    ],
)
def test_the_next_roster_is_who_answered_and_who_came_late(answered, latecomers, roster):
    assert rounds.next_roster(ELASTIC, answered, latecomers) == roster
    assert rounds.next_roster(STRICT, answered, latecomers) == (0, 1, 2)


@pytest.mark.parametrize(
    ("replicas", "quorum", "needed"),
    [(1, None, 1), (2, None, 1), (4, None, 2), (5, None, 3), (5, "all", 5), (5, 1, 1), (5, 5, 5)],
)
def test_the_default_quorum_is_half_rounded_up(replicas, quorum, needed):
    policy = Policy.of(make_config({"entrypoint": "m:f", "replicas": replicas, "quorum": quorum}))
    assert (policy.quorum, policy.strict) == (needed, quorum == "all")


@pytest.mark.parametrize("quorum", [0, 6, -1])
def test_a_quorum_that_cannot_be_is_refused(quorum):
    with pytest.raises(ConfigError, match=r"choose 1\.\.5"):
        make_config({"entrypoint": "m:f", "replicas": 5, "quorum": quorum})


@pytest.mark.parametrize(("staleness", "weight"), [(1, 0.8), (2, 2 / 3), (4, 0.5)])
def test_late_work_counts_less_the_later_it_comes(staleness, weight):
    assert rounds.carry_weight(staleness) == pytest.approx(weight)


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


def test_answers_are_marked_by_who_is_in_the_mean():
    named = rounds.mark_averaged([answer(0), answer(1, "abstention"), answer(2)], averaged=(0, 2))
    assert [(a.replica_id, a.averaged) for a in named] == [(0, True), (1, False), (2, True)]
