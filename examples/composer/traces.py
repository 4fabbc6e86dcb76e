"""Reads recorded sessions of Claude Code (JSONL, one record a line) as pairs of a history and what the model did next.

Knows the file format only; tokens are `collate`'s. One `TraceState` is one answer of the model: text, tool calls, or
both. A record links to the one before it by `parentUuid`, so a file is a tree: its last branch is what happened.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_orchestrator.redaction import has_token_shape

log = logging.getLogger(__name__)

Message = dict[str, Any]  # as chat templates take it; arguments of tool calls are dicts

MISSING_RESULT = "[the trace has no result of this call]"

_COMPACTED = "This session is being continued"  # how the summary begins that stands for everything before it
_SILENT = {"permission-mode", "file-history-snapshot", "progress", "queue-operation", "summary", "system"}


class TraceError(ValueError):
    """A trace that cannot be used; the text names file, line and remedy."""


@dataclass(frozen=True)
class TraceState:
    """What the model saw, and what it did."""

    id: str  # sha256 of session and record: equal for equal files, wherever they lie
    task: str  # the first words of the user in this history
    messages: list[Message]  # before the action, without the model's thinking
    student_action: Message  # of the assistant; "reasoning_content" holds its thinking
    model: str
    source_line: int  # from 1, of the action's first record


@dataclass(frozen=True)
class _Record:
    line: int
    data: dict[str, Any]

    @property
    def role(self) -> str:
        """ "user" or "assistant"; empty for records that are not part of the conversation."""
        kind = self.data.get("type")
        return kind if kind in ("user", "assistant") and isinstance(self.data.get("message"), dict) else ""

    @property
    def blocks(self) -> list[dict[str, Any]]:
        content = self.data["message"].get("content")
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [each for each in content or [] if isinstance(each, dict)]

    @property
    def message_id(self) -> str:
        """One answer of the API may be written as several records."""
        return str(self.data["message"].get("id") or self.data.get("uuid"))

    @property
    def invented(self) -> bool:
        """Whether the program wrote this answer in the model's place, such as the text of an API error."""
        return bool(self.data.get("isApiErrorMessage")) or self.data["message"].get("model") == "<synthetic>"


class ClaudeCodeIngester:
    """Turns session files into states. `skip_sidechains`: leave out the conversations of sub-agents."""

    def __init__(self, skip_sidechains: bool = True) -> None:
        self.skip_sidechains = skip_sidechains
        self.unknown: Counter[str] = Counter()  # types of records that were passed over, over all files
        self._said: set[str] = set()

    def ingest(self, path: str | Path) -> Iterator[TraceState]:
        """States of one file in the order of the session.

        A record of an unknown type is counted and logged once. A last line that was cut off is left out. Raises
        `TraceError` for any other line that is not JSON, and for a line that looks like it holds a key.
        """
        records = [each for each in self._records(Path(path)) if not (self.skip_sidechains and _is_side(each))]
        results, answers = _results_of(records), _answers_of(records)
        for branch in _last_branches(records):
            yield from _states_of(branch, answers, results)

    def _records(self, path: Path) -> Iterator[_Record]:
        lines = path.read_bytes().splitlines()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if has_token_shape(line.decode(errors="replace")):
                raise TraceError(
                    f"{path}, line {number}: this looks like a key or token, and a model learns what it is trained on. "
                    "Remove it from the file, and revoke it."
                )
            try:
                data = json.loads(line)
            except ValueError as error:
                if number == len(lines):
                    log.warning("%s, line %d was cut off while it was written; it is left out", path, number)
                    return
                raise TraceError(
                    f"{path}, line {number} is not JSON ({error}). Only the last line may be cut off: repair it."
                ) from None
            if not isinstance(data, dict):
                raise TraceError(f"{path}, line {number} is no JSON object: is this a session file of Claude Code?")
            record = _Record(number, data)
            if not record.role:
                self._count(str(data.get("type")))
            yield record

    def _count(self, kind: str) -> None:
        self.unknown[kind] += 1
        if kind not in _SILENT and kind not in self._said:
            self._said.add(kind)
            log.warning("records of type %r are not known and are passed over", kind)


def _is_side(record: _Record) -> bool:
    return bool(record.data.get("isSidechain"))


def _results_of(records: list[_Record]) -> dict[str, Message]:
    """Tool messages by the id of their call. Results of parallel calls may lie beside the branch that went on."""
    found: dict[str, Message] = {}
    for record in records:
        if record.role != "user":
            continue
        for block in record.blocks:
            if block.get("type") == "tool_result":
                call = str(block.get("tool_use_id"))
                found[call] = {"role": "tool", "tool_call_id": call, "content": _text_of_result(block.get("content"))}
                if block.get("is_error"):
                    found[call]["is_error"] = True
    return found


def _text_of_result(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [each for each in content or [] if isinstance(each, dict)]
    return "\n".join(str(each["text"]) if "text" in each else f"[{each.get('type')}]" for each in parts)


def _last_branches(records: list[_Record]) -> list[list[_Record]]:
    """For each root of the file, in order, the records from it to the last one of the conversation below it."""
    by_uuid = {str(each.data["uuid"]): each for each in records if each.data.get("uuid")}
    roots: dict[int, int] = {}  # line of the root, by line of a record
    leaves: dict[int, _Record] = {}  # by the root's line; later ones replace earlier ones
    for record in records:
        if record.role:
            path = _up(record, by_uuid, roots)
            root = roots.get(path[-1].line, path[-1].line)
            roots |= dict.fromkeys((each.line for each in path), root)
            leaves[root] = record
    return [_up(leaves[line], by_uuid, {})[::-1] for line in sorted(leaves)]


def _up(record: _Record, by_uuid: Mapping[str, _Record], known: Mapping[int, int]) -> list[_Record]:
    """The record and those before it, up to the root or to a line that is `known`. A circle ends where it closes."""
    path, seen = [record], {record.line}
    while path[-1].line not in known:
        parent = by_uuid.get(str(path[-1].data.get("parentUuid")))
        if parent is None or parent.line in seen:
            break
        path.append(parent)
        seen.add(parent.line)
    return path


def _answers_of(records: Sequence[_Record]) -> dict[str, list[_Record]]:
    """The records of each answer of the model, by the answer's id."""
    found: dict[str, list[_Record]] = {}
    for record in records:
        if record.role == "assistant":
            found.setdefault(record.message_id, []).append(record)
    return found


def _states_of(
    branch: Sequence[_Record], answers: Mapping[str, Sequence[_Record]], results: Mapping[str, Message]
) -> Iterator[TraceState]:
    history: list[Message] = []
    done: set[str] = set()
    for record in (each for each in branch if each.role):
        if record.role == "user":
            text = _joined(record.blocks, "text")
            if record.data.get("isCompactSummary") or text.startswith(_COMPACTED):
                history = []
            if text:
                history.append({"role": "user", "content": text})
            continue
        if record.message_id in done or record.invented:
            continue
        done.add(record.message_id)
        parts = answers[record.message_id]
        action = _action_of([block for part in parts for block in part.blocks])
        if not action["content"] and "tool_calls" not in action:
            continue
        user = next((each for each in history if each["role"] == "user"), None)
        yield TraceState(
            id=hashlib.sha256(f"{record.data.get('sessionId')}\0{record.data.get('uuid')}".encode()).hexdigest(),
            task=user["content"] if user else "",
            messages=list(history),
            student_action=action,
            model=str(record.data["message"].get("model")),
            source_line=parts[0].line,
        )
        history.append({key: value for key, value in action.items() if key != "reasoning_content"})
        for call in action.get("tool_calls", ()):
            missing = {"role": "tool", "tool_call_id": call["id"], "content": MISSING_RESULT, "is_error": True}
            history.append(results.get(call["id"], missing))


def _action_of(blocks: list[dict[str, Any]]) -> Message:
    action: Message = {"role": "assistant", "content": _joined(blocks, "text")}
    calls = [
        {
            "id": str(each.get("id")),
            "type": "function",
            "function": {"name": str(each.get("name")), "arguments": dict(each.get("input") or {})},
        }
        for each in blocks
        if each.get("type") == "tool_use"
    ]
    if calls:
        action["tool_calls"] = calls
    if thinking := _joined(blocks, "thinking"):
        action["reasoning_content"] = thinking
    return action


def _joined(blocks: list[dict[str, Any]], kind: str) -> str:
    return "\n".join(str(each.get(kind, "")) for each in blocks if each.get("type") == kind).strip()


def action_text(action: Message) -> str:
    """An answer as one text: what it says, then its calls as the template writes them."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in action.get("tool_calls", ())]
    return "\n".join(
        [*([action["content"]] if action["content"] else []), *(f"<tool_call>{c}</tool_call>" for c in calls)]
    )
