"""The rules of names, takes, rotation and invited seats: random schedules keep their promises, and need each rule."""

import pytest
from names_model import RULES, Broken, play


def test_no_schedule_breaks_a_promise():
    for seed in range(400):
        play(seed)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule):
    with pytest.raises(Broken):
        for seed in range(2000):
            play(seed, without=rule)
