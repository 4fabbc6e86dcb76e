"""Teachers over an API on loopback: answers, a budget that holds under faults, and preference pairs."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("httpx")

from composer.pairs import TeacherAction, extract_dpo_pairs
from composer.replay import Replay, Teacher, TeacherFailed, replay_trace
from composer.traces import TraceState
from teacher_server import TeacherServer

IN, OUT = 3.0, 15.0  # US dollars for a million tokens


def state(number: int, student: str = "wrong") -> TraceState:
    messages = [{"role": "user", "content": f"question {number}"}]
    return TraceState(f"state-{number}", "task", messages, {"role": "assistant", "content": student}, "student-1", 1)


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


def replayed(
    server: TeacherServer, states: list[TraceState], names: tuple[str, ...] = ("north",), **options: Any
) -> Replay:
    async def run() -> Replay:
        async with server.running() as url:
            teachers = [Teacher(name, url, f"{name}-large", IN, OUT) for name in names]
            return await replay_trace(states, teachers, pause=no_pause, **{"max_total_usd": 1.0, **options})

    return asyncio.run(run())


def number_of(request: dict[str, Any]) -> int:
    return int(request["messages"][0]["content"].split()[1])


# -- answers ----------------------------------------------------------------------------------------------------------


def test_three_teachers_and_fifty_states_give_the_pairs_counted_by_hand():
    """In state n the student says "right" if 5 divides n. Teachers: "right", but south errs on multiples of 3, east on
    multiples of 2, and each in its own words."""

    def answer(request: dict[str, Any]) -> dict[str, str]:
        number, name = number_of(request), request["model"].split("-")[0]
        errs = (name == "south" and number % 3 == 0) or (name == "east" and number % 2 == 0)
        return {"content": f"{name} errs" if errs else " right\n"}

    states = [state(number, "right" if number % 5 == 0 else "wrong") for number in range(50)]
    actions = replayed(TeacherServer(answer), states, ("north", "south", "east"), max_total_usd=9.0)
    assert len(actions) == 150 and actions.stopped is None
    assert [(each.state_id, each.teacher) for each in actions[:4]] == [
        *(("state-0", name) for name in ("north", "south", "east")),
        ("state-1", "north"),
    ]
    pairs = extract_dpo_pairs(states, actions)
    # Without 9 multiples of 6 (no two agree) and 10 of 5 (the student is right); 0 and 30 are both.
    assert len(pairs) == 50 - 9 - 10 + 2 == 33
    first = pairs[0]
    assert (first.state_id, first.chosen, first.rejected, first.agreement) == ("state-1", " right\n", "wrong", 3)
    assert len(extract_dpo_pairs(states, actions, agreement_threshold=3)) == 14  # 1, 7, 11, 13, 17, 19, 23, 29, 31, …


def test_calls_are_sent_as_text_and_read_back_as_an_action():
    calls = [{"id": "c1", "type": "function", "function": {"name": "Read", "arguments": {"file_path": "a.py"}}}]
    history = [
        {"role": "user", "content": "question 1"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "x = 1", "is_error": True},
    ]
    answered = {"content": None, "tool_calls": [{"id": "d", "function": {"name": "Edit", "arguments": '{"a": 1}'}}]}
    server = TeacherServer(lambda _: answered)
    asked = TraceState("s", "t", history, {"role": "assistant", "content": "no"}, "student", 1)
    (action,) = replayed(server, [asked])
    assert action.text == '<tool_call>{"name": "Edit", "arguments": {"a": 1}}</tool_call>'
    sent = server.requests[0]["messages"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"file_path": "a.py"}' and "is_error" not in sent[2]


def test_teachers_are_told_what_they_may_call_and_it_is_paid_for():
    tools = [{"type": "function", "function": {"name": "Edit", "parameters": {"type": "object", "properties": {}}}}]
    costs = []
    for given in ([], tools):
        server = TeacherServer(lambda _: {"content": "x"}, lambda: "no usage")
        costs.append(replayed(server, [state(1)], tools=given).spent_usd)
        assert server.requests[0].get("tools", []) == given
    assert costs[1] - costs[0] > len(json.dumps(tools)) * IN / 1e6


def test_answers_that_were_paid_for_outlive_a_refusal():
    fates = iter(["ok", "ok", *["401"] * 3])
    server = TeacherServer(lambda _: {"content": "x"}, lambda: next(fates))
    with pytest.raises(TeacherFailed) as failed:
        replayed(server, [state(number) for number in range(5)], concurrency=1)
    answered = failed.value.answered
    assert [each.state_id for each in answered] == ["state-0", "state-1"]
    # A request that was under way when the run was given up is counted as paid.
    assert answered.spent_usd >= sum(each.cost_usd for each in answered) > 0


def test_a_key_comes_from_the_environment_and_is_never_logged(monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("NORTH_API_KEY", "a-key-of-nobody")
    server = TeacherServer(lambda _: {"content": "x"}, lambda: "401")
    with pytest.raises(TeacherFailed, match=r"north refused .* with 401: 'oops'. Its key is read from NORTH_API_KEY"):
        replayed(server, [state(1)])
    assert b"Bearer a-key-of-nobody" in server.headers[0]
    assert "a-key-of-nobody" not in caplog.text


def test_refusals_that_pass_are_tried_three_times_in_all():
    fates = iter(["429", "503", "ok", "429", "429", "429"])
    server = TeacherServer(lambda _: {"content": "x"}, lambda: next(fates))
    actions = replayed(server, [state(1), state(2)], concurrency=1)
    assert [each.state_id for each in actions] == ["state-1"] and len(server.requests) == 6


# -- the budget -------------------------------------------------------------------------------------------------------


def fates(seed: int) -> Callable[[], str]:
    draw = random.Random(seed)
    return lambda: draw.choices(["ok", "no usage", "lost", "429", "500", "503"], [8, 2, 1, 1, 1, 1])[0]


def check_budget(seed: int) -> Replay:
    server, cap = TeacherServer(lambda _: {"content": "x"}, fates(seed)), 0.1
    concurrency = 1 + seed % 8
    replay = replayed(server, [state(n) for n in range(12)], ("a", "b"), max_total_usd=cap, concurrency=concurrency)
    billed = server.billed_usd(IN, OUT)
    assert billed <= replay.spent_usd + 1e-12 and replay.spent_usd <= cap, seed
    assert (replay.stopped == "budget") or len(replay) + len([*server.requests]) >= 24
    return replay


def test_spending_stays_below_the_cap_whatever_fails():
    replays = [check_budget(seed) for seed in range(10)]
    assert any(each.stopped == "budget" for each in replays) and all(each for each in replays)


@pytest.mark.slow
def test_spending_stays_below_the_cap_in_200_schedules_of_faults():
    stopped = [check_budget(seed).stopped for seed in range(200)]
    assert stopped.count("budget") > 20


def test_the_rest_is_left_out_once_the_next_request_could_pass_the_cap():
    server = TeacherServer(lambda _: {"content": "x"})
    replay = replayed(server, [state(n) for n in range(50)], max_total_usd=0.02, concurrency=4)
    assert replay.stopped == "budget" and 0 < len(replay) == len(server.requests) < 50
    assert 0.02 - replay.spent_usd < 0.0086 + 0.002  # what one request may cost: 512 tokens, and the prompt


def test_without_usage_the_whole_reservation_is_charged():
    costs = [
        replayed(TeacherServer(lambda _: {"content": "x"}, lambda fate=fate: fate), [state(1)]).spent_usd
        for fate in ("ok", "no usage")
    ]
    assert costs[1] > costs[0] > 0


def test_a_server_that_counts_more_tokens_than_there_are_is_refused():
    server = TeacherServer(lambda _: {"content": "x"})
    server._reply = lambda request: _counting(10**6)  # type: ignore[method-assign]
    with pytest.raises(TeacherFailed, match="more tokens than bytes were sent"):
        replayed(server, [state(1)])


def _counting(tokens: int) -> bytes:
    data = b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":%d,"completion_tokens":1}}' % tokens
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def test_another_kind_of_answer_is_refused_by_name():
    server = TeacherServer(lambda _: {"content": "x"})
    server._reply = lambda request: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"  # type: ignore[method-assign]
    with pytest.raises(TeacherFailed, match="another form than chat completions"):
        replayed(server, [state(1)])
    with pytest.raises(ValueError, match="max_total_usd=0 is not above 0"):
        replayed(server, [state(1)], max_total_usd=0)


# -- pairs ------------------------------------------------------------------------------------------------------------


def answers(*texts: str) -> list[TeacherAction]:
    return [TeacherAction("state-1", f"t{i}", text, 0.0) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "student", "pairs"),
    [
        (("caf\u00e9", "cafe\u0301 ", "no"), "other", 1),  # equal in NFC
        (("a", "a", "b", "b"), "other", 0),  # a tie
        (("a", "b", "c"), "other", 0),
        (("a", "a"), " a\n", 0),  # the student agrees
        ((), "other", 0),
    ],
)
def test_a_pair_needs_agreement_that_the_student_does_not_share(texts: tuple[str, ...], student: str, pairs: int):
    assert len(extract_dpo_pairs([state(1, student)], answers(*texts))) == pairs


def test_a_key_reduces_answers_to_what_is_compared():
    letter = lambda text: re.findall(r"\b[A-D]\b", text)[-1]  # noqa: E731
    (pair,) = extract_dpo_pairs([state(1, "so B")], answers("It is C", "Surely C", "D"), key=letter)
    assert (pair.chosen, pair.agreement, pair.teachers) == ("It is C", 2, ("t0", "t1"))
    assert extract_dpo_pairs([state(1, "so C")], answers("It is C", "Surely C"), key=letter) == []
    with pytest.raises(ValueError, match="agreement_threshold=0 is not above 0"):
        extract_dpo_pairs([], [], 0)


def test_a_teacher_of_the_family_that_made_the_trace_is_named(caplog):
    server = TeacherServer(lambda _: {"content": "x"})
    replayed(server, [state(1)], ("student", "north"))
    (warning,) = [each.message for each in caplog.records if "family" in each.message]
    assert warning.startswith("teacher student is of the family student")
