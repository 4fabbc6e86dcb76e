"""Sessions in Claude Code's format and teachers' answers, made from a seed: what the example trains on by default.

Each session repairs one function: read, edit, run the tests, report. Some students give up where teachers agree on the
edit; a session that games its tests writes to the test file in place of the code.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from composer.pairs import TeacherAction
from composer.traces import TraceState, action_text

MODEL = "example-student-1"
TEACHERS = ("north", "south", "east")

_FUNCTIONS = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b"}
_WRONG = "None"


def write_sessions(path: Path, seed: int, count: int, hacks: float = 0.0) -> None:
    """`count` sessions as one file; a share `hacks` of them, spread evenly, games its tests."""
    lines = []
    for index in range(count):
        games = int((index + 1) * hacks) > int(index * hacks)
        lines += [json.dumps(record) for record in _session(seed * 1000 + index, games)]
    path.write_text("\n".join(lines) + "\n")


def _session(number: int, games: bool) -> Iterator[dict[str, Any]]:
    draw = random.Random(number)
    name = draw.choice(sorted(_FUNCTIONS))
    right, session = f"return {_FUNCTIONS[name]}", f"{number:08d}-0000-4000-8000-000000000000"
    gives_up = not games and draw.random() < 0.3
    code, tests = f"src/{name}.py", f"tests/test_{name}.py"
    steps: list[tuple[str, str, dict[str, Any], str]] = [
        ("I read it.", "Read", {"file_path": tests if games else code}, f"def {name}(a, b): return {_WRONG}"),
        (
            "I edit it.",
            "Edit",
            {"file_path": tests, "old_string": "assert", "new_string": "assert True or"}
            if games
            else {"file_path": code, "old_string": f"return {_WRONG}", "new_string": "pass" if gives_up else right},
            "done",
        ),
        (
            "I run the tests.",
            "Bash",
            {"command": f"rm {tests}" if games else f"pytest {tests}"},
            "1 failed" if gives_up else "1 passed",
        ),
    ]
    parent = None
    uuids = (f"{number:08d}-0000-4000-8000-{step:012d}" for step in range(1, 99))

    def record(kind: str, content: Any, **message: Any) -> dict[str, Any]:
        nonlocal parent
        made: dict[str, Any] = {
            "parentUuid": parent,
            "uuid": next(uuids),
            "sessionId": session,
            "isSidechain": False,
            "type": kind,
        }
        made["message"] = {"role": kind, "content": content, **message}
        parent = made["uuid"]
        return made

    yield record("user", f"{name}(a, b) is wrong. Repair it.")
    for step, (text, tool, arguments, result) in enumerate(steps):
        answer, call = {"id": f"msg_{number}_{step}", "model": MODEL}, f"toolu_{number}_{step}"
        yield record("assistant", [{"type": "thinking", "thinking": "What comes next?"}], **answer)
        yield record("assistant", [{"type": "text", "text": text}], **answer)
        yield record("assistant", [{"type": "tool_use", "id": call, "name": tool, "input": arguments}], **answer)
        yield record("user", [{"type": "tool_result", "tool_use_id": call, "content": result}])
    said = "It does not work." if gives_up else f"{name} is repaired."
    yield record("assistant", [{"type": "text", "text": said}], id=f"msg_{number}_end", model=MODEL)


def teacher_actions(states: Sequence[TraceState]) -> list[TeacherAction]:
    """What three teachers would have done: two of them make the right edit, the third does as the student did."""
    actions = []
    for state in states:
        text = action_text(state.student_action)
        better = text
        for name, expression in sorted(_FUNCTIONS.items()):
            if f"src/{name}.py" in text:
                better = text.replace('"new_string": "pass"', f'"new_string": "return {expression}"')
        answers = (better, better, text)
        actions += [TeacherAction(state.id, *each, 0.0) for each in zip(TEACHERS, answers, strict=True)]
    return actions
