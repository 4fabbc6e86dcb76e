"""Which contributions of strangers are left out, from the records of those who scored them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from record_examples import B3, PAYLOAD, SHA, STAMP

from diloco_orchestrator.config import make_config
from diloco_orchestrator.guard.strangers import (
    StrangersWork,
    evidence_of,
    fold_strangers,
    harm_of,
    repetition_of,
    unlike_others,
    why_never_scored,
)
from diloco_orchestrator.protocol.check_records import Checked, DealtScore, WorkScore
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.protocol.start_records import HeldoutSet

HELDOUT = HeldoutSet(metric="loss", shares=(10,) * 4, digest="0" * 64)
DEALT = {0: [0], 1: [1], 2: [2], 3: [3]}
OTHER = "b3:" + "8" * 64


def score(harm: float | None, count: int = 10, payload: str = PAYLOAD.digest, who: int = 3) -> WorkScore:
    """A score of `harm` standard errors, against the base and against the scorer's own contribution alike."""
    squares = 9.0 * count * (count - 1) / 10  # a standard error of the mean of 3 for ten items
    change = None if harm is None else -harm * count * (squares / (count - 1) / count) ** 0.5
    both = {"change": change, "squares": None if harm is None else squares}
    return WorkScore(
        replica_id=who, payload=payload, count=count, **both, beside=change, beside_squares=both["squares"]
    )


def said(by: int, *scores: WorkScore) -> Checked:
    who = {"round": 3, "leg": 1, "replica_id": by, "attempt": 1, "number": 1, "claim_sha256": SHA}
    return Checked(**STAMP, **who, read=(), scored=scores or None)  # type: ignore[arg-type]


def work_of(replica_id: int, **fields: Any) -> Contribution:
    who = {"round": 3, "leg": 1, "replica_id": replica_id, "attempt": 1, "kind": "delta", "base_digest": B3}
    return Contribution(**STAMP, **who, snapshot_round=0, rebuilt_after=1, **{"payload": PAYLOAD, **fields})  # type: ignore[arg-type]


def folded(
    checks: Sequence[Checked], state: Any = None, dealt: Any = None, rules: int = 2
) -> tuple[dict[str, Any], list[str]]:
    """The state after a round in which replica 3, a stranger's, contributed, and why it is left out."""
    named = [work_of(0), work_of(3)]
    after, out = fold_strangers(state, StrangersWork([3], checks, rules), HELDOUT, dealt or DEALT, named)
    assert {each.replica_id for each in out} <= {3}
    return after, [each.reason for each in out]


def test_the_median_of_the_scores_adds_up_over_rounds_and_never_falls_below_zero():
    state: Any = None
    sums, left_out = [], []
    for harm in (-2.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0):
        state, out = folded([said(0, score(harm)), said(1, score(3.0)), said(2, score(harm - 0.1))], state)
        sums.append(state["sums"].get("3", 0.0))
        left_out.append(bool(out))
    # Beside the scorer's own a contribution may be .2 worse, against the base it should be .5 better.
    assert sums == pytest.approx([0.0, 0.8, 1.6, 2.4, 3.2, 2.0, 0.8, 0.0])
    assert left_out == [False, False, False, False, True, True, False, False]


@pytest.mark.parametrize(
    "third",
    [
        pytest.param(said(2), id="none"),
        pytest.param(said(2, score(-1.0, count=9)), id="over other items than were dealt"),
        pytest.param(said(2, score(-1.0, payload=OTHER)), id="of another payload"),
        pytest.param(said(2, score(-1.0, who=1)), id="of another replica"),
        pytest.param(said(3, score(-1.0)), id="by the stranger itself"),
        pytest.param(said(0, score(-1.0)), id="by who has scored it already"),
        pytest.param(said(7, score(-1.0)), id="by who is not on the roster"),
    ],
)
def test_a_score_that_does_not_count_leaves_a_contribution_unscored(third):
    state, out = folded([said(0, score(-1.0)), third])
    assert out == ["1 of 3 replicas have scored its work, and more than half are needed"] and state["sums"] == {}
    assert folded([said(0, score(-1.0)), said(2, score(-1.0))])[1] == []


def test_who_scores_the_shares_of_others_too_scores_all_of_their_items():
    dealt = {0: [0, 1], 2: [2], 3: [3]}
    assert folded([said(0, score(-1.0)), said(2, score(-1.0))], dealt=dealt)[1]
    assert not folded([said(0, score(-1.0, count=20)), said(2, score(-1.0))], dealt=dealt)[1]


@pytest.mark.parametrize(
    ("base", "own", "harm"),
    [
        pytest.param(2.0, 1.0, 0.8, id="the lesser of both"),
        pytest.param(-1.0, 1.0, -0.5, id="it is worse than others, and helps"),
        pytest.param(9.0, 9.0, 3.0, id="the most"),
        pytest.param(-9.0, 9.0, -3.0, id="the least"),
        pytest.param(1.0, None, 1.5, id="its scorer has no contribution"),
        pytest.param(None, None, 3.0, id="it is not finite"),
    ],
)
def test_harm_is_in_standard_errors(base, own, harm):
    found = score(base).model_copy(update={"beside": score(own).change, "beside_squares": score(own).squares})
    assert harm_of(found) == pytest.approx(harm)


def test_equal_changes_of_all_items_are_certain():
    flat = WorkScore(replica_id=3, payload=OTHER, count=2, change=1.0, squares=0.0, beside=0.0, beside_squares=0.0)
    assert harm_of(flat) == -3.0 and harm_of(flat.model_copy(update={"change": -1.0})) == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"invited": []}, "no strangers"),
        ({"fragment_sync_delay": 2}, "while contributions come in"),
        ({"adapters": "exact", "aggregate": "mean"}, "no step of the model"),
        ({"ranks_per_replica": [2, 1, 1, 1]}, "no whole base"),
    ],
)
def test_runs_that_score_no_strangers_say_why(settings, words):
    config = make_config({"entrypoint": "m:f", "replicas": 4, "invited": [3], "weights": "uniform", **settings})
    assert words in why_never_scored(config) and bool(words) == bool(why_never_scored(config))


def test_no_more_items_than_256_make_a_change_surer():
    few = WorkScore(
        replica_id=3, payload=OTHER, count=256, change=-256.0, squares=255.0, beside=None, beside_squares=None
    )
    many = few.model_copy(update={"count": 1024, "change": -1024.0, "squares": 1023.0})
    little = few.model_copy(update={"change": -16.0})
    assert harm_of(few) == harm_of(many) == 3.0 and harm_of(little) == pytest.approx(1.5)
    assert harm_of(many.model_copy(update={"change": -64.0})) == pytest.approx(1.5)


def dealt(by: int, gap: float, usual: float = 2.0, payload: str = PAYLOAD.digest, who: int = 3) -> Checked:
    """What a replica says of replica 3's work: harmless, with this gap between data dealt to its author and others'."""
    said_so = DealtScore(replica_id=who, payload=payload, gap=gap, usual=usual)
    return said(by, score(-1.0)).model_copy(update={"dealt": (said_so,)})


def test_who_shows_no_trace_of_the_data_dealt_to_it_is_left_out_until_it_does():
    state: Any = None
    found = []
    for gap in (0.0, 0.1, -0.1, 0.0, 2.0, 2.0, 2.0):
        # The third scorer lies, or its own work shows nothing.
        state, out = folded([dealt(0, gap), dealt(1, gap, 2.2), dealt(2, 9.0, 0.0)], state)
        found.append((round(state.get("dealt", {}).get("3", 0.0), 1), bool(out)))
    assert found == [(2.0, False), (3.8, False), (6.0, False), (8.0, True), (6.0, True), (4.0, True), (2.0, False)]


@pytest.mark.parametrize(
    ("gap", "usual", "evidence"),
    [
        pytest.param(0.0, 0.1, 0.005, id="own data leave hardly a trace, so nothing is decided"),
        pytest.param(0.0, -1.0, 0.0, id="nor where it is the wrong way round"),
        pytest.param(1.0, 2.0, 0.0, id="half of the usual trace"),
        pytest.param(2.0, 2.0, -2.0, id="the usual trace"),
        pytest.param(-9.0, 2.0, 3.0, id="the most"),
        pytest.param(0.0, 99.0, 3.0, id="the most, where data leave a plain trace"),
    ],
)
def test_evidence_grows_with_the_trace_that_data_usually_leave(gap, usual, evidence):
    of_one = DealtScore(replica_id=3, payload=OTHER, gap=gap, usual=usual)
    assert evidence_of([of_one]) == pytest.approx(evidence)


@pytest.mark.parametrize(
    "third",
    [said(2, score(-1.0)), dealt(2, 0.0, payload=OTHER), dealt(2, 0.0, who=1), dealt(3, 0.0), dealt(7, 0.0)],
)
def test_without_most_scorers_nothing_is_said_of_the_data(third):
    checks = [dealt(0, 0.0), said(1, score(-1.0)), third]
    assert set(folded(checks)[0]) == {"sums", "out"}
    assert folded([dealt(0, 0.0), dealt(1, 0.0), third])[0]["dealt"] == {"3": 2.0}


def alike(by: int, again: float | None, own: float | None = 0.2) -> Checked:
    """What a replica says of replica 3's work: harmless, and so much like its last one, beside the scorer's own."""
    return said(by, score(-1.0).model_copy(update={"again": again, "again_own": own}))


def test_who_repeats_itself_more_than_launched_replicas_is_left_out_until_it_does_not():
    state: Any = None
    found = []
    for again in (None, 0.6, 0.6, 0.6, 0.6, 0.2, 0.2, 0.2):
        state, out = folded([alike(0, again), alike(1, again), alike(2, -1.0)], state)  # the third scorer lies
        found.append((round(state.get("again", {}).get("3", 0.0), 2), bool(out)))
    assert found == [
        *((0.0, False), (3.0, False), (6.0, False), (9.0, True)),
        *((12.0, True), (11.2, True), (10.4, True), (9.6, True)),
    ]
    assert set(folded([alike(0, 0.9), alike(1, 0.9, None)])[0]) == {"sums", "out"}  # two of three do not compare it


@pytest.mark.parametrize(
    ("again", "own", "evidence"), [(0.9, 0.9, -0.8), (0.5, 0.2, 2.2), (1.0, -1.0, 3.0), (-1.0, 1.0, -3.0)]
)
def test_repetition_is_beside_what_all_have_still_to_learn(again, own, evidence):
    of_one = score(0.0).model_copy(update={"again": again, "again_own": own})
    assert repetition_of([of_one], None) == pytest.approx(evidence)


@pytest.mark.parametrize(
    ("own", "other", "evidence"),
    [
        (0.2, 0.5, 3.0),  # others pull back what it adds in each round
        (0.2, 0.25, 1.5),
        (0.5, 0.2, 1.0),  # what others have sent, added to its own, hides nothing
        (None, 0.5, 1.2),
        (0.2, None, 1.2),
    ],
)
def test_repetition_is_also_beside_how_much_replicas_are_like_each_other(own, other, evidence):
    alone = score(0.0).model_copy(update={"again": 0.4, "again_own": 0.2})
    of_one = alone.model_copy(update={"like_own": own, "like_other": other})
    assert repetition_of([of_one], unlike_others([of_one])) == pytest.approx(evidence)
    assert unlike_others([of_one, alone]) is None, "half of the scorers do not say"


# By how much a stranger's work is more like its last one than the scorers' own, and less like theirs than these are
# like each other, in eight rounds: of two of eight strangers beside three launched replicas in benchmarks/strangers.py.
HONEST = [0.28, -0.01, 0.35, -0.02, 0.26, -0.05, 0.23, 0.0], [-0.13, 0.09, 0.01, 0.22, -0.19, 0.2, -0.27, 0.19]
DRIFTS = [0.02, 0.16, 0.11, 0.12, 0.19, 0.27, 0.16, 0.08], [0.07, 0.05, 0.08, 0.21, 0.1, 0.08, 0.0, 0.12]


def in_rounds(series: tuple[Sequence[float], Sequence[float]], rules: int) -> tuple[list[Any], list[bool]]:
    """The states after the rounds of a series, as a commit gives them to the next one, and whether it is left out."""
    state: Any = None
    states, out = [], []
    for again, unlike in zip(*series, strict=True):
        said_so = score(-1.0).model_copy(
            update={"again": again, "again_own": 0.0, "like_other": unlike, "like_own": 0.0}
        )
        state, reasons = folded([said(i, said_so) for i in range(3)], state, rules=rules)
        state = json.loads(json.dumps(state))
        states.append(state)
        out.append(bool(reasons))
    return states, out


def test_chance_in_how_much_contributions_are_alike_leaves_nobody_out():
    states, out = in_rounds(HONEST, rules=2)
    assert not any(out) and max(each["again"].get("3", 0.0) for each in states) < 5.0
    averages = [total / weight for total, weight in (each["unlike"]["3"] for each in states[:3])]
    assert averages == pytest.approx([-0.13, (0.09 - 0.8 * 0.13) / 1.8, (0.01 + 0.8 * 0.09 - 0.64 * 0.13) / 2.44])
    assert any(in_rounds(DRIFTS, rules=2)[1]), "a constant direction, half as large as honest work"


def test_a_run_that_began_with_the_first_rules_about_strangers_keeps_them():
    states, out = in_rounds(HONEST, rules=1)
    assert out == [False] * 4 + [True] * 4 and "unlike" not in states[-1]
    assert [round(each["again"]["3"], 2) for each in states[:3]] == [1.8, 1.6, 4.2]
