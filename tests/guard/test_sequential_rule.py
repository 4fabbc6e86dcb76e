"""`SequentialGuard` in a run: selected by name, folded through shares, stopped, shown, verified; and how many items."""

import json
import math
import random

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator import plan_launch
from diloco_orchestrator.config import GUARD_RULES, GuardConfig, make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard import RoundReports, SequentialGuard, VerdictKind, fold, items_needed
from diloco_orchestrator.guard.heldout import HeldOutRule
from diloco_orchestrator.guard.registry import rule_of
from diloco_orchestrator.guard.rule import Evidence
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol.records import Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet, VaultSet


def config(**guard):
    return make_config({"entrypoint": "m:f", "guard": guard}).guard


# -- choosing it ------------------------------------------------------------------------------------------------------


def test_the_sequential_rule_is_the_default_and_others_are_chosen_by_name():
    assert config().rule == config(min_steps=3, kl_hard_stop=0.1, threshold=12.0).rule == "sequential"
    assert config(rule="heldout").rule == "heldout"
    assert make_config({"entrypoint": "m:f", "guard": "off"}).guard == config(rule="off")


@pytest.mark.parametrize("name", GUARD_RULES["heldout"])
def test_a_setting_that_only_the_rule_heldout_reads_selects_it(name):
    """So do the run.json files from before there was a choice, which hold all of them."""
    assert config(**{name: 0.5}).rule == "heldout" if name != "decline_patience" else config(**{name: 5}).rule
    whole = GuardConfig(rule="heldout").model_dump()
    del whole["rule"], whole["notice_drop"], whole["item_sd"]
    assert GuardConfig.model_validate(whole) == config(rule="heldout")


def test_settings_of_two_rules_at_once_are_refused():
    with pytest.raises(
        ConfigError, match=r"guard\.threshold is a setting of the guard rule 'sequential', and this run"
    ):
        config(threshold=9.0, ema_alpha=0.5)


@pytest.mark.parametrize("name", ["sequental", "Sequential", "cusum", "of"])
def test_an_unknown_rule_is_refused_with_those_that_are_known(name):
    words = r"unknown guard rule .*(did you mean '(sequential|heldout|off)'|known: heldout)"
    with pytest.raises(ConfigError, match=words):
        plan_launch("m:f", store="bucket", guard={"rule": name})
    with pytest.raises(ConfigError, match=words):
        rule_of(name)


@pytest.mark.parametrize("name", [7, None, ["heldout"]])
def test_a_rule_that_is_no_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"setting 'guard\.rule' = "):
        config(rule=name)


@pytest.mark.parametrize("rule", GUARD_RULES)
def test_a_setting_of_another_rule_is_refused(rule):
    for other, names in GUARD_RULES.items():
        for name in names if other != rule else ():
            with pytest.raises(ConfigError, match=rf"guard\.{name} is a setting of the guard rule '{other}'"):
                config(rule=rule, **{name: 9 if name in ("decline_patience", "pause_after") else 0.25})


def test_settings_survive_run_json():
    chosen = config(rule="sequential", pause_after=3)
    assert GuardConfig.model_validate_json(chosen.model_dump_json()) == chosen


def test_each_setting_reaches_the_rule_that_reads_it():
    heldout = HeldoutSet(metric="loss", shares=(8, 8), digest="0" * 64, vault=VaultSet(shares=(4, 4), digest="1" * 64))
    chosen = {"min_steps": 7, "threshold": 12.0, "gap_sigmas": 6.0, "kl_hard_stop": 0.2, "pause_after": 9}
    rule = SequentialGuard.of(config(**chosen, vault_sigmas=3.0), heldout)
    assert rule == SequentialGuard(**{**chosen, "gap_sigmas": None}, vault_sigmas=3.0, losses=True)
    of_rewards = SequentialGuard.of(config(**chosen), heldout.model_copy(update={"metric": "reward"}))
    assert of_rewards == SequentialGuard(**chosen, vault_sigmas=2.0)  # a gap of losses is memorisation
    deaf = HeldOutRule.of(config(rule="heldout", rise_eps=0.5, min_steps=1, decline_patience=1), heldout)
    keen = HeldOutRule.of(config(rule="heldout", rise_eps=0.0, min_steps=1, decline_patience=1), heldout)
    for rule, fires in ((deaf, False), (keen, True)):
        state, verdict = None, None
        for round_, (training, score) in enumerate([(1.0, 1.0), (1.1, 0.9), (1.2, 0.8)], 1):
            state, verdict = rule.fold(state, Evidence(round=round_, in_loop=training, heldout=score))
        assert verdict.fire is fires


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_a_run_is_folded_stopped_shown_and_verified_by_the_sequential_rule():
    fleet = Fleet(replicas=2, rounds=80, guard={"rule": "sequential"}, scored=True)
    participants, rng = fleet.join_all(), random.Random(3)
    for round_ in range(1, 60):
        fall = 0.1 * max(round_ - 30, 0)
        play(participants, [1.0, 1.0], [report(i, 2.0 - fall + rng.gauss(0, 0.05)) for i in range(2)])
        if any(p.open.stopped for p in participants):
            break
    assert all(p.open.stopped for p in participants)
    last = fleet.commits()[-1]
    assert last.guard is not None and last.guard["rule"] == "sequential-v5"
    assert (last.stop, last.applied, last.fired) == ("halted", False, True)
    assert last.verdict is not None and last.verdict.kind is VerdictKind.HALT
    assert last.verdict.rollback_to is not None and last.verdict.rollback_to <= 31
    assert RunReader(fleet.store).status().verdict == last.verdict
    found = verify_run(fleet.store)
    assert found.agrees and found.checked["rounds"] == last.round


def test_rounds_without_enough_scores_pause_the_run():
    settings, state = config(rule="sequential"), None
    heldout = HeldoutSet(metric="reward", shares=(10,) * 4, digest="0" * 64)
    for round_ in range(1, 40):
        blind = round_ > 30
        scores = [Score(share=i, sum=10.0 + round_ % 3, count=10) for i in range(1 if blind else 4)]
        result = fold(state, settings, heldout, RoundReports(round_, scores, {0: Metric(sum=5.0, count=5)}))
        state = json.loads(json.dumps(result.state))
        if result.verdict.fire:
            break
    assert round_ == 35 and result.verdict.kind is VerdictKind.PAUSE
    assert "5 rounds in a row" in result.verdict.reason and "10 of 40 held-out items" in result.verdict.reason


# -- how many items ---------------------------------------------------------------------------------------------------


def test_half_of_the_drop_takes_four_times_the_items():
    one, half = (items_needed(drop, item_sd=0.5) for drop in (0.04, 0.02))
    assert half == pytest.approx(4 * one, rel=0.01)
    assert items_needed(0.04, item_sd=1.0) == pytest.approx(4 * one, rel=0.01)


def test_less_time_and_more_correlated_noise_take_more_items():
    counts = [items_needed(0.02, item_sd=0.5, rounds=rounds) for rounds in (60, 30, 15, 8, 2)]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert items_needed(0.02, item_sd=0.5, autocorrelation=0.0) * 3 == pytest.approx(
        items_needed(0.02, item_sd=0.5), rel=0.01
    )


def test_a_set_too_small_for_the_sensitivity_is_refused_with_the_number_it_takes():
    needed = items_needed(0.02, item_sd=0.5, rounds=15)
    asked = config(notice_drop=0.02, item_sd=0.5)
    SequentialGuard.check_set(asked, needed)
    SequentialGuard.check_set(config(), 1)
    with pytest.raises(ConfigError, match=rf"{needed - 1} items is too small .* takes {needed} items"):
        SequentialGuard.check_set(asked, needed - 1)


@pytest.mark.parametrize("bad", [{"drop": 0}, {"item_sd": -1}, {"rounds": 0}, {"autocorrelation": 1.0}])
def test_a_sensitivity_that_cannot_be_meant_is_refused(bad):
    given = {"drop": 0.02, "item_sd": 0.5, **bad}
    with pytest.raises(ValueError, match="all must be > 0"):
        items_needed(given.pop("drop"), **given)
    with pytest.raises(ValueError, match="all must be > 0"):
        items_needed(math.nan, item_sd=0.5)
