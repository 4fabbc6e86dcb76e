"""The rules of void commits in signed runs: random schedules keep their promises, and need each rule."""

import pytest
from commits_model import RULES, Broken, play


def test_no_schedule_breaks_a_promise():
    assert max(play(seed) for seed in range(1000)) >= 3, "schedules in which an insider fails a leg"
    for seed in range(300):
        play(seed, overwrites=True)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule):
    with pytest.raises(Broken):
        for seed in range(3000):
            play(seed, without=rule)
            play(seed, without=rule, overwrites=True)


def test_readers_that_check_no_verdicts_would_read_another_log_if_void_commits_ended_no_round():
    """Their author writes the whole log, with commits that contradict manifests alone: those who read no manifests
    follow it, while the others read the next names.
    """
    with pytest.raises(Broken, match="different logs"):
        for seed in range(3000):
            play(seed, instead="pass over")
