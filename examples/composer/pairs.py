"""Preference pairs by consensus: where teachers agree on an answer that is not the student's."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer.traces import Message, TraceState, action_text


@dataclass(frozen=True)
class TeacherAction:
    """What one teacher answered in one state."""

    state_id: str
    teacher: str
    text: str  # as `action_text` writes an answer
    cost_usd: float


@dataclass(frozen=True)
class DPOPair:
    """The teachers' answer is preferred to the student's."""

    state_id: str
    prompt: list[Message]
    chosen: str  # the consensus
    rejected: str  # the student's
    agreement: int  # teachers that gave the consensus
    teachers: tuple[str, ...]  # their names
    trace_model: str


def extract_dpo_pairs(
    states: Sequence[TraceState],
    actions: Sequence[TeacherAction],
    agreement_threshold: int = 2,
    key: Callable[[str], str] | None = None,
) -> list[DPOPair]:
    """A pair for each state in which enough teachers agree on an answer that is not the student's.

    `key` reduces an answer to what is compared, such as the letter of a choice; by default its text in NFC, stripped.
    Two answers with equally many teachers are no consensus.
    """
    if agreement_threshold < 1:
        raise ValueError(f"agreement_threshold={agreement_threshold!r} is not above 0.")
    compared = key or (lambda text: unicodedata.normalize("NFC", text).strip())
    given: dict[str, list[TeacherAction]] = {}
    for action in actions:
        given.setdefault(action.state_id, []).append(action)
    pairs = []
    for state in states:
        votes = Counter(compared(each.text) for each in given.get(state.id, ()))
        (best, count), second = [*votes.most_common(2), ("", 0), ("", 0)][:2]
        student = action_text(state.student_action)
        if count < agreement_threshold or count == second[1] or best == compared(student):
            continue
        agreed = [each for each in given[state.id] if compared(each.text) == best]
        names = tuple(each.teacher for each in agreed)
        pairs.append(DPOPair(state.id, state.messages, agreed[0].text, student, count, names, state.model))
    return pairs
