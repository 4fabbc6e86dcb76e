"""Sessions of Claude Code as states. `session.jsonl` was rebuilt by hand in the form that the program writes."""

import json
import os
from pathlib import Path

import pytest
from composer.synthetic import write_sessions
from composer.traces import MISSING_RESULT, ClaudeCodeIngester, TraceError, TraceState, action_text

SESSION = Path(__file__).parent / "session.jsonl"


def states_of(path: Path, **options: bool) -> list[TraceState]:
    return list(ClaudeCodeIngester(**options).ingest(path))


def lines() -> list[str]:
    return SESSION.read_text().splitlines()


def test_every_answer_of_the_last_branch_is_a_state():
    states = states_of(SESSION)
    assert [each.source_line for each in states] == [6, 13, 20, 22, 26, 29]
    said = [each.student_action["content"] for each in states]
    assert said[0] == "I look at the code and its tests." and said[-1] == "All tests pass."
    assert "I delete the tests." not in said  # a branch that the user left
    assert {each.model for each in states} == {"claude-sonnet-4-5-20250929"}
    assert states[0].task == "prices.py rounds 0.125 to 0.13. Banker's rounding is wanted."


def test_records_of_one_answer_are_joined_and_thinking_stays_in_the_action():
    first, second, *_ = states_of(SESSION)
    assert first.student_action["reasoning_content"] == "I need the file and its tests."
    calls = [call["function"]["name"] for call in first.student_action["tool_calls"]]
    assert calls == ["Read", "Grep"]
    assert "reasoning_content" not in second.messages[1] and second.messages[1]["content"] == said(first)


def said(state: TraceState) -> str:
    return str(state.student_action["content"])


def test_results_follow_their_calls_also_from_beside_the_branch():
    second = states_of(SESSION)[1]
    assert [each["role"] for each in second.messages] == ["user", "assistant", "tool", "tool"]
    assert second.messages[2]["content"].startswith("     1→def rounded")
    assert second.messages[3] == {
        "role": "tool",
        "tool_call_id": "toolu_02",
        "content": "tests/test_prices.py:4\n[image]",
    }


def test_errors_and_missing_results_are_marked():
    states = states_of(SESSION)
    assert states[2].messages[-2]["is_error"] is True
    missing = next(each for each in states[3].messages if each.get("tool_call_id") == "toolu_04")
    assert missing["content"] == MISSING_RESULT and missing["is_error"] is True


def test_an_answer_that_the_program_invented_is_neither_action_nor_history():
    texts = [message["content"] for state in states_of(SESSION) for message in [*state.messages, state.student_action]]
    assert not any("API Error" in text for text in texts)


def test_a_compacted_session_begins_a_new_history():
    after = states_of(SESSION)[4]
    assert [each["role"] for each in after.messages] == ["user", "user"]
    assert after.messages[0]["content"].startswith("This session is being continued")


def test_sidechains_are_left_out_unless_they_are_asked_for():
    assert len(states_of(SESSION, skip_sidechains=False)) == len(states_of(SESSION)) + 1


def test_unknown_records_are_counted_and_logged_once(caplog):
    ingester = ClaudeCodeIngester()
    for _ in range(2):
        list(ingester.ingest(SESSION))
    assert ingester.unknown["attachment"] == 2 and ingester.unknown["progress"] == 2
    assert [each.message for each in caplog.records] == [
        "records of type 'attachment' are not known and are passed over"
    ]


def test_ids_are_those_of_session_and_record_wherever_the_file_lies(tmp_path: Path):
    moved = tmp_path / "moved.jsonl"
    moved.write_text(SESSION.read_text())
    ids = [each.id for each in states_of(moved)]
    assert ids == [each.id for each in states_of(SESSION)] and len(set(ids)) == 6 and len(ids[0]) == 64


def test_a_last_line_that_was_cut_off_is_tolerated_and_any_other_is_not(tmp_path: Path):
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join([*lines()[:-1], lines()[-1][:40]]))
    assert len(states_of(cut)) == 5
    broken = lines()
    broken[6] = broken[6][:40]
    cut.write_text("\n".join(broken))
    with pytest.raises(TraceError, match=r"cut.jsonl, line 7 is not JSON"):
        states_of(cut)


def test_a_line_with_a_key_is_refused_without_showing_it(tmp_path: Path):
    leaked = tmp_path / "leaked.jsonl"
    key = "ghp_" + "a1B2" * 9
    record = json.loads(lines()[3])
    record["message"]["content"] = f"my key is {key}"
    leaked.write_text("\n".join([*lines()[:3], json.dumps(record), *lines()[4:]]))
    with pytest.raises(TraceError, match=r"line 4: this looks like a key or token") as caught:
        states_of(leaked)
    assert key not in str(caught.value)


def test_an_empty_file_and_one_without_answers_have_no_states(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "asked.jsonl").write_text(lines()[3])
    assert states_of(tmp_path / "empty.jsonl") == states_of(tmp_path / "asked.jsonl") == []


def test_synthetic_sessions_are_equal_for_equal_seeds(tmp_path: Path):
    for name in ("one", "two"):
        write_sessions(tmp_path / name, seed=3, count=4, hacks=0.25)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert len(states_of(tmp_path / "one")) == 16


def test_an_action_as_text_has_its_calls():
    text = action_text(states_of(SESSION)[4].student_action)
    call = '{"name": "Bash", "arguments": {"command": "pytest -q", "description": "Runs the tests"}}'
    assert text == f"<tool_call>{call}</tool_call>"


@pytest.mark.skipif("COMPOSER_TRACE" not in os.environ, reason="COMPOSER_TRACE=path of a session of your own")
def test_a_session_of_your_own():
    states = states_of(Path(os.environ["COMPOSER_TRACE"]))
    assert states and all(each.messages and each.student_action for each in states)
