"""One replica is one share: what a manifest declares of itself counts no more than that, and says so in the commit.

Every script of `hostile_replicas` is played here for two rounds; benchmarks/attackers.py plays them to the end of
training.
"""

import math
import re
from typing import Any

import pytest
import torch
from hostile_replicas import ATTACKS, HostileFleet
from protocol_fleet import BY_HAND, Fleet, answer

from diloco_orchestrator.cli.report_page import page
from diloco_orchestrator.clock import ManualClock, NoBackground
from diloco_orchestrator.inspection.explain import explain
from diloco_orchestrator.inspection.report import Report
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, UsualNorms
from replica.rounds.participant import Participant


def fleet_of(replicas: int, **settings: Any) -> tuple[Fleet, list[Participant]]:
    fleet, clock = Fleet(replicas=replicas, timing=BY_HAND, **settings), ManualClock()
    return fleet, [fleet.join(i, clock=clock) for i in range(replicas)]


def one_round(participants: list[Participant], *values: float) -> Commit:
    """A round without threads: everybody contributes, then everybody follows."""
    for participant, value in zip(participants, values, strict=True):
        answer(participant, value)
    for participant in participants:
        participant.close()
    last = participants[0]._tip.last
    assert last is not None
    return last


# -- the clip ---------------------------------------------------------------------------------------------------------


def test_in_a_healthy_run_clipping_changes_no_bit():
    digests = []
    for settings in ({}, {"clip": "off"}):
        _, participants = fleet_of(4, **settings)
        for round_ in range(3):
            commit = one_round(participants, 1.0, 1.5, 0.5 + round_ / 3, 0.9)
            assert commit.clipped == () and [a.weight for a in commit.answers] == [30] * 4
        digests.append({participant.digest for participant in participants})
    assert digests[0] == digests[1] and len(digests[0]) == 1


def test_a_contribution_far_above_the_median_is_clipped_for_everybody_and_the_reason_is_everywhere():
    fleet, participants = fleet_of(3)
    before = participants[0].base.copy()
    commit = one_round(participants, 1.0, -100.0, 1.0)
    weight = commit.answers[1].weight / commit.answers[0].weight
    assert weight == pytest.approx(0.01, rel=1e-3)
    mean = (1.0 - 100.0 * weight + 1.0) / (2.0 + weight)
    average = {name: torch.full_like(value, mean) for name, value in before.parameters.items()}
    expected = step(before, average, fleet.config.outer)
    assert torch.allclose(participants[2].base.parameters["weight"], expected.parameters["weight"])
    assert len({participant.digest for participant in [*participants, fleet.join(0)]}) == 1  # a rebuilt base too
    why = "its norm 346.4 is 100 times the median of the round"
    assert [(each.replica_id, each.reason) for each in commit.clipped] == [(1, why)]
    assert f"replica 1 is clipped: {why}" in commit.reason
    status = RunReader(fleet.store).status()
    assert status.rounds[0].judgements == {1: f"clipped: {why}"}
    assert f"Replica 1 did not count in full in 1 of 1 rounds; in round 1: clipped: {why}." in explain(status).why
    assert f"<td class=words>clipped: {why}</td>" in page(Report.read(RunReader(fleet.store), NoBackground()))
    assert verify_run(fleet.store).disagreement is None


def test_where_norms_of_a_run_vary_one_above_twice_the_median_is_no_exception_for_anybody():
    fleet, participants = fleet_of(2, rounds=12)
    for value in (1.0, 1.5, 1.0, 1.5, 1.0, 1.5):
        one_round(participants, value, 1.25)
    commit = one_round(participants, 1.0, 2.5)
    assert commit.clipped == () and commit.norms is not None and commit.norms.rounds == 6
    late = fleet.join(0)  # it rebuilds the base from the log
    assert late.digest == participants[1].digest
    commit = one_round([late, participants[1]], 1.0, 100.0)
    assert [each.replica_id for each in commit.clipped] == [1]
    assert verify_run(fleet.store).disagreement is None


def test_rounds_of_two_contributions_widen_no_limit_where_a_run_has_more_replicas():
    """Who commits as soon as a quorum of two is there would else choose how far norms are apart."""
    _, participants = fleet_of(4, quorum=2)
    for value in (8.0, 15.0):
        commit = one_round(participants[:2], value, -1.0)
        assert [each.replica_id for each in commit.clipped] == [0] and commit.norms is None


def test_a_commit_with_another_state_of_norms_is_void():
    """Its author would choose the limit: everybody else averages nobody in that round."""
    fleet, participants = fleet_of(3, rounds=4)
    one_round(participants, 1.0, 1.1, 1.2)
    commit = one_round(participants, 1.0, -100.0, 1.0)
    wide = UsualNorms(rounds=1, spread=7.0, levels=((0, 1e30),))
    weights = tuple(each.model_copy(update={"weight": 30}) for each in commit.answers)
    forged = commit.model_copy(update={"norms": wide, "answers": weights, "clipped": ()})
    fleet.store.put(keys.commit(2), forged.to_bytes())
    read = fleet.commits()[1]
    assert not read.applied and "its state of norms is" in read.reason and read.norms == commit.norms
    found = verify_run(fleet.store).disagreement
    assert found is not None and "state of norms" in str(found)


def test_a_commit_that_forgets_to_clip_is_void():
    """Its writer runs without the rule: everybody else averages nobody, and the writer's machine is not followed."""
    fleet, participants = fleet_of(3)
    commit = one_round(participants, 1.0, -100.0, 1.0)
    unclipped = tuple(each.model_copy(update={"weight": 30}) for each in commit.answers)
    forged = commit.model_copy(update={"answers": unclipped, "clipped": ()})
    fleet.store.put(keys.commit(1), forged.to_bytes())
    read = fleet.commits()[0]
    assert not read.applied and read.reason.startswith("void, so that nobody is averaged: replica 0 has weight 30")
    assert fleet.join(1).digest == fleet.start().base_digest


def test_verify_finds_a_commit_that_gives_no_reason_for_a_clip():
    fleet, participants = fleet_of(3)
    commit = one_round(participants, 1.0, -100.0, 1.0)
    fleet.store.put(keys.commit(1), commit.model_copy(update={"clipped": ()}).to_bytes())
    found = verify_run(fleet.store).disagreement
    assert found is not None and "clipped" in str(found)


def test_who_follows_a_commit_averages_what_it_names_whatever_norm_it_measures():
    """Two CPUs may measure norms on both sides of what is accepted: the commit decides, and nobody is left behind."""
    fleet, (one, two) = fleet_of(2, quorum=1)
    answer(one, 1.0)
    said = answer(two, 2.0)
    assert said.payload is not None
    other = said.model_copy(update={"payload": said.payload.model_copy(update={"norms": (6.94,)})})  # it has 6.928
    fleet.store.put(keys.contribution(1, 1), other.to_bytes())
    two.close()  # does not measure its own payload
    assert [a.averaged for a in fleet.commits()[0].answers] == [True, True]
    one.close()
    assert one.digest == two.digest == fleet.join(0).digest


def test_an_author_whose_numbers_are_beyond_what_sums_hold_abstains():
    _, (one, _) = fleet_of(2)
    manifest = answer(one, 1e30)
    assert manifest.kind == "abstention"
    assert "norm 3.46e+30, above 1.27e+30: sums of such numbers overflow" in manifest.reason


# -- aggregates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregate", "expected"), [("median", 2.5), ("trimmed_mean", 2.5), ("mean", 3.0), ("agreeing_mean", 3.0)]
)
def test_every_way_to_a_base_takes_the_aggregate_of_the_run(aggregate, expected):
    """Live, rebuilt by a newcomer, and derived again by verify."""
    fleet, participants = fleet_of(4, aggregate=aggregate, clip="off")
    before = participants[0].base.copy()
    one_round(participants, 1.0, 2.0, 3.0, 6.0)
    if aggregate == "agreeing_mean":  # all point the same way: replica 0 is first among equals
        expected = (2.0 + 3.0 + 6.0) / 3
    average = {name: torch.full_like(value, expected) for name, value in before.parameters.items()}
    stepped = step(before, average, fleet.config.outer).digest()
    assert {participant.digest for participant in participants} == {stepped} == {fleet.join(3).digest}
    done = verify_run(fleet.store)
    assert done.disagreement is None and done.checked["outer steps"] == 1


def test_who_is_left_out_for_its_direction_is_named_in_the_next_commit_and_everywhere():
    fleet, participants = fleet_of(4, aggregate="agreeing_mean")
    before = participants[0].base.copy()
    first = one_round(participants, 1.0, 1.0, -1.0, 1.0)
    average = {name: torch.ones_like(value) for name, value in before.parameters.items()}
    assert participants[0].digest == step(before, average, fleet.config.outer).digest()
    assert "left out" not in first.reason and [a.averaged for a in first.answers] == [True] * 4
    commit = one_round(participants, 1.0, 1.0, 1.0, 1.0)
    why = "its direction agrees with most others' by -1.00, where 1.00 is the median, in 1 shard"
    assert f"replica 2 was left out of round 1: {why}" in commit.reason
    status = RunReader(fleet.store).status()
    assert status.rounds[-1].judgements == {2: f"left out of round 1: {why}"}
    assert verify_run(fleet.store).disagreement is None


def test_what_one_manifest_says_of_another_counts_only_with_most():
    _, participants = fleet_of(4, aggregate="agreeing_mean")
    one_round(participants, 1.0, 1.0, -1.0, 1.0)
    liar = participants[3]._tip
    liar.disagreeing = tuple(each.model_copy(update={"replica_id": 0}) for each in liar.disagreeing)
    figures = one_round(participants, 1.0, 1.0, 1.0, 1.0).figures
    assert figures is not None and [each.replica_id for each in figures.disagreeing] == [2]


# -- the scripts ------------------------------------------------------------------------------------------------------

EXPECTED = {
    "sign flip x10": ("clipped", r"its norm .* times the median"),
    "scaled x50": ("clipped", r"its norm .* times the median"),
    "3e38 in every seventh value": ("unverifiable", "together .*e.3[89]; each shard has one, and 1.27e.30 is"),
    "NaN in every seventh value": ("unverifiable", "elements that are not finite"),
    "infinity in every seventh value": ("unverifiable", "elements that are not finite"),
    "x50, declared with the usual norm": ("unverifiable", "has norm .*; the manifest declares"),
    "other bytes than the manifest names": ("unverifiable", "the manifest names"),
    "wrong layout": ("unverifiable", "this round needs"),
    "wrong base claim": ("wrong_base", "another base than most others"),
    "huge counts of steps and tokens": ("clipped", "times the median of tokens per step"),
    "counts of 400 digits": ("unverifiable", "the manifest cannot be read: .* whole number of 401 digits"),
    "forged names and ids": ("unverifiable", "copied from another round, leg or replica"),
    "abstaining": ("abstention", "not today"),
    "late flood": ("", ""),
    "zero update": ("clipped", "its payload is all zeros"),
    "copy of another's payload": ("clipped", "its payload equals that of replica 0, and counts once"),
    "lying scores, high": (
        "discounted",
        r"not dealt \(0, 1, 2\); its score of share 3 is over 1000000000 items, of 256",
    ),
    "lying scores, low": ("discounted", "items, of 256, and does not count$"),
    "scores that are not finite": ("discounted", "share 3 is not finite; its training metric is not finite"),
}


def judgement(commit: Commit, replica_id: int) -> tuple[str, str]:
    for each in commit.clipped:
        if each.replica_id == replica_id:
            return "clipped", each.reason
    for said in commit.discounted:
        if said.replica_id == replica_id:
            return "discounted", said.reason
    found = [(a.kind, a.reason) for a in commit.answers if a.replica_id == replica_id and not a.averaged]
    return found[0] if found else ("", "")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_manifest_neither_ends_nor_steers_a_run(name):
    settings = {"weights": "tokens"} if name == "huge counts of steps and tokens" else {}
    fleet = HostileFleet(4, 2, 0, 1, ATTACKS[name], **settings)
    commits = fleet.play()
    assert [commit.stop for commit in commits] == ["none", "none", "completed"]
    assert all(commit.applied and sum(a.averaged for a in commit.answers) >= 3 for commit in commits[:2])
    kind, words = EXPECTED.get(name, ("", ""))
    for commit in commits[:2]:
        found, why = judgement(commit, 3)
        assert found == kind or (name not in EXPECTED and found == "clipped")
        assert re.search(words, why), why
    assert math.isfinite(fleet.loss)
