"""The rules of rounds by scatter-reduce (scatter_reduce.md) hold in a model, and each of them is needed."""

import pytest
from dealers_checks import SCENARIOS, play
from dealers_world import ALL, RULES

# A schedule that holds with all rules, and what breaks in it without one of them.
NEEDED = {
    "agreed": ("calm N3", 0, "round 2 averages nobody"),
    "log": ("calm N2", 0, "round 3 averages nobody"),
    "deputy": ("liar N4 good", 2, "a commit averages what nobody can read"),
    "other": ("calm N2", 0, "round 1 averages nobody"),
    "both": ("liar N4 good", 7, "a commit averages what nobody can read"),
    "dispute": ("liar N4 good", 0, "a commit averages what nobody can read"),
    "read": ("liar N5 accuse bad", 0, "one lying dealer left round 1 without an average"),
    "silent": ("pair mute", 0, "the run does not end"),
    "takes": ("calm N3", 0, "round 1 averages nobody"),
    "alone": ("deaths N2", 0, "round 1 averages nobody"),
    "borne": ("liar N4 grab rot", 0, "round 1 averages replica 3, whose shard 0 nobody else has read"),
    "inputs": ("slow and late", 0, "a healthy replica lost work that was trained from a right base"),
    "answered": ("late", 0, "the averages of a replica were waited for that had not answered the round"),
    "agree": ("liar N4 sum", 1, "a healthy replica lost work that was trained from a right base"),
    "payloads": ("deaths N4", 3, "the run does not end"),
    "draw": ("pair rare snapshots N5", 0, "replica 2 held a base for 9 rounds that the log does not give"),
    "secret": ("pair rare snapshots N5", 0, "replica 2 held a base for 9 rounds that the log does not give"),
    "told": ("pair rare snapshots N5", 11, "replica 3 held a base for 9 rounds that the log does not give"),
    "again": ("liar N3 accuse bad claim sum", 30, "a false word was without a name"),
    "most": ("liar N4 accuse bad", 0, "honest replicas [2, 3] are barred from dealing"),
    "tried": ("pair rare snapshots N5", 0, "round 2 averages what was trained from a base that was known to be false"),
    "denied": ("liar N4 accuse bad", 0, "a false accusation made a replica average a shard again and again"),
    "rebuild": (
        "pair rare snapshots N5",
        0,
        "round 2 averages what was trained from a base that was known to be false",
    ),
    "passed": ("calm N3", 0, "replica 0 holds a base after round 1 that the log does not give"),
    "before": ("pair N4 sum", 2, "round 3 averages what was trained from a base that was known to be false"),
    "named": ("pair N6 sum", 0, "the commit of round 2 names a base that its writer knew to be false"),
    "distrust": ("pair N4 sum", 0, "liars make others rebuild their bases in every round"),
    "search": ("pair N6 accuse sum", 5, "an honest replica left"),
    "snap": ("pair N6 sum", 5, "replica 1 held a base for 5 rounds that the log does not give"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rules_hold(name):
    assert play(name, seed=100) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rules_hold_in_many_schedules(name):
    assert {seed: broken for seed in range(5000, 5040) if (broken := play(name, seed))} == {}


# Without the rule "silent" a run goes on until its model gives it up.
@pytest.mark.parametrize("rule", [pytest.param(r, marks=pytest.mark.slow) if r == "silent" else r for r in RULES])
def test_each_rule_is_needed(rule):
    name, seed, broken = NEEDED[rule]
    assert play(name, seed) == ""
    assert play(name, seed, ALL - {rule}) == broken
