"""What is drawn next, and what counts as gaming the tests."""

from types import SimpleNamespace
from typing import Any

import pytest
from composer.curriculum import Curriculum, Draws, suspected_hacks, touches_tests
from composer.traces import TraceState


def view(round_: int, **extra: float) -> Any:
    return SimpleNamespace(round=round_, extra=extra)


def action(name: str, **arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def state(depth: int, act: dict[str, Any] | None = None) -> TraceState:
    return TraceState(f"{depth:03d}", "task", [{"role": "user"}] * depth, act or action("Read"), "m", 1)


def test_levels_near_one_half_are_drawn_most():
    curriculum = Curriculum(ema_alpha=0.5)
    curriculum.follow(view(1, solved_easy=1.0, solved_hard=0.0))
    curriculum.follow(view(2, solved_easy=1.0))
    assert curriculum.success == {"easy": 0.875, "medium": 0.5, "hard": 0.25}
    assert curriculum.weights() == {"easy": 0.875 * 0.125, "medium": 0.25, "hard": 0.1875}
    draws = Draws([state(depth) for depth in range(9)], curriculum, size=2, seed=1)
    counts = {"easy": 0, "medium": 0, "hard": 0}
    for _, (level, states) in zip(range(300), draws, strict=False):
        counts[level] += 1
        assert all(each in draws.levels[level] for each in states)
    assert counts["easy"] < counts["hard"] < counts["medium"]


def test_a_level_that_is_solved_is_still_drawn():
    curriculum = Curriculum(ema_alpha=0.0, least=0.02)
    curriculum.follow(view(1, solved_easy=1.0))
    assert curriculum.weights()["easy"] == 0.02


def test_a_round_that_is_shown_again_changes_nothing_and_state_is_restored():
    curriculum, restored = Curriculum(), Curriculum()
    curriculum.follow(view(1, solved_easy=0.9))
    restored.load_state_dict(curriculum.state_dict())
    restored.follow(view(1, solved_easy=0.1))
    assert restored.state_dict() == curriculum.state_dict()


def test_draws_go_on_where_they_were():
    states = [state(depth) for depth in range(9)]
    straight, again = (Draws(states, Curriculum(), size=2, seed=7) for _ in range(2))
    drawn = [batch for _, batch in zip(range(6), straight, strict=False)]
    again.load_state_dict({"next": 3})
    assert [batch for _, batch in zip(range(3), again, strict=False)] == drawn[3:]
    assert again.state_dict() == {"next": 6}


def test_fewer_states_than_levels_are_refused():
    with pytest.raises(ValueError, match="2 states are too few for 3 levels"):
        Draws([state(1), state(2)], Curriculum(), size=1, seed=0)


@pytest.mark.parametrize(
    ("act", "hack"),
    [
        (action("Edit", file_path="tests/test_add.py"), True),
        (action("Write", file_path="/home/dev/conftest.py"), True),
        (action("Write", file_path="web/cart.test.ts"), True),
        (action("Bash", command="rm -f tests/test_add.py"), True),
        (action("Bash", command="sed -i s/assert/pass/ test_add.py"), True),
        (action("Bash", command="echo pass > tests/test_add.py"), True),
        (action("Read", file_path="tests/test_add.py"), False),
        (action("Bash", command="pytest tests/test_add.py"), False),
        (action("Edit", file_path="src/latest_prices.py"), False),
        (action("Bash", command="rm -r build"), False),
        ({"role": "assistant", "content": "tests/test_add.py"}, False),
    ],
)
def test_writing_to_test_files_is_suspected(act: dict[str, Any], hack: bool):
    assert touches_tests(act) is hack
    assert suspected_hacks([state(1, act), state(2)]) == (0.5 if hack else 0.0)
