"""Makes batches of `compose_loss` out of trace states, hints and preference pairs, with a model's own chat template.

The template is used as it is: a response is what it adds after its generation prompt. Padding is on the right.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer.losses import IGNORED, response_log_probs
from composer.pairs import DPOPair
from composer.traces import Message, TraceState

HINT = "Hint, from what followed this step:\n"


@dataclass(frozen=True)
class Encoded:
    """Tokens of a context and of the response after it."""

    ids: list[int]
    start: int  # index of the response's first token

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return len(self.ids) - self.start


class Collator:
    """Batches for one tokenizer.

    Args:
        tokenizer: with a chat template that ends with the generation prompt, where one is asked for.
        tools: functions as the template takes them; `tools_of` makes them from traces.
        max_length: of a sequence, in tokens: the context's beginning is cut off, and a response at half of this.
        reference: a frozen model, whose log-probabilities DPO compares with. None for SimPO.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        max_length: int = 512,
        reference: torch.nn.Module | None = None,
    ) -> None:
        self.tokenizer, self.tools, self.max_length, self.reference = tokenizer, list(tools), max_length, reference

    def __call__(
        self, states: Sequence[TraceState], hints: Mapping[str, str], pairs: Sequence[DPOPair] = ()
    ) -> dict[str, Tensor]:
        """One row for each state, one pair of rows for each preference pair.

        `hints` by a state's id: what the teacher's context has more. A state without a hint has no aligned positions.
        """
        own = [self.encode(state.messages, state.student_action) for state in states]
        batch = {"input_ids": self._padded(own), "labels": _labels(own)}
        informed = [
            self.encode([*state.messages, {"role": "user", "content": HINT + hints[state.id]}], state.student_action)
            if state.id in hints
            else None
            for state in states
        ]
        if any(informed):
            batch |= self._aligned(own, informed)
        if pairs:
            batch |= self.preferences(pairs)
        return batch

    def encode(self, messages: Sequence[Message], action: Message) -> Encoded:
        """Raises `ValueError` for a template whose text with an answer does not begin with that without."""
        context = self._rendered(messages, prompt=True)
        whole = self._rendered([*messages, action], prompt=False)
        if not whole.startswith(context):
            raise ValueError(
                "the chat template rewrites the conversation when an answer is added, so that the tokens of the answer "
                "are not what was added: use a template that only appends."
            )
        response = self._tokens(whole[len(context) :].rstrip("\n"))[: self.max_length // 2]
        before = self._tokens(context)[len(response) - self.max_length :]
        return Encoded(before + response, len(before))

    def preferences(self, pairs: Sequence[DPOPair]) -> dict[str, Tensor]:
        """The keys of the third channel; with the reference's log-probabilities if there is a reference.

        Raises `ValueError` for a pair whose answers are the same tokens up to where they are cut off: it would teach
        nothing.
        """
        batch: dict[str, Tensor] = {}
        encoded: dict[str, list[Encoded]] = {}
        for side in ("chosen", "rejected"):
            rows = [self.encode(pair.prompt, {"role": "assistant", "content": getattr(pair, side)}) for pair in pairs]
            encoded[side] = rows
            ids, mask = self._padded(rows), (_labels(rows) != IGNORED).long()
            batch |= {f"dpo_{side}_input_ids": ids, f"dpo_{side}_response_mask": mask}
            if self.reference is not None:
                with torch.no_grad():
                    logits = self.reference(input_ids=ids).logits
                    batch[f"dpo_{side}_ref_logprobs"] = response_log_probs(logits, ids, mask)
        for pair, chosen, rejected in zip(pairs, encoded["chosen"], encoded["rejected"], strict=True):
            if chosen.ids == rejected.ids:
                raise ValueError(
                    f"both answers of the pair for state {pair.state_id[:8]} are the same in their first "
                    f"{self.max_length // 2} tokens: raise max_length={self.max_length}, or leave the pair out."
                )
        return batch

    def _aligned(self, own: Sequence[Encoded], informed: Sequence[Encoded | None]) -> dict[str, Tensor]:
        """The keys of the second channel. The position before a response's token predicts it, in both sequences."""
        empty = Encoded([self.tokenizer.pad_token_id], 1)
        width = max(each.length for each in own)
        indices: dict[str, list[list[int]]] = {"student": [], "teacher": []}
        for plain, other in zip(own, informed, strict=True):
            count = min(plain.length, other.length) if other else 0  # equal, since both cut a response alike
            for name, row in (("student", plain), ("teacher", other or empty)):
                indices[name].append([row.start - 1 + i for i in range(count)] + [-1] * (width - count))
        return {
            "ctx_teacher_input_ids": self._padded([each or empty for each in informed]),
            "sdpo_student_index": torch.tensor(indices["student"]),
            "sdpo_teacher_index": torch.tensor(indices["teacher"]),
        }

    def _rendered(self, messages: Sequence[Message], prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=self.tools or None, add_generation_prompt=prompt, tokenize=False
        )
        return str(text)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _padded(self, rows: Sequence[Encoded]) -> Tensor:
        width = max(len(row.ids) for row in rows)
        return torch.tensor([row.ids + [self.tokenizer.pad_token_id] * (width - len(row.ids)) for row in rows])


def _labels(rows: Sequence[Encoded]) -> Tensor:
    """The tokens of the responses; `IGNORED` elsewhere."""
    width = max(len(row.ids) for row in rows)
    return torch.tensor(
        [[IGNORED] * row.start + row.ids[row.start :] + [IGNORED] * (width - len(row.ids)) for row in rows]
    )


def hints_of(states: Sequence[TraceState], most: int = 300) -> dict[str, str]:
    """What followed a state's action in its session, by the state's id: results of tools, answers of the user.

    Hindsight is what self-distillation teaches with. `most`: characters of a hint.
    """
    hints = {}
    for state, after in itertools.pairwise(states):
        known = len(state.messages)
        if after.messages[:known] != state.messages or after.task != state.task:
            continue  # another session, or one that was compacted in between
        told = [each["content"] for each in after.messages[known + 1 :] if each["role"] in ("tool", "user")]
        if any(told):
            hints[state.id] = "\n".join(told)[:most]
    return hints


def tools_of(states: Sequence[TraceState]) -> list[dict[str, Any]]:
    """Schemas of the tools that were called, with the arguments that were used: traces hold no others."""
    arguments: dict[str, set[str]] = {}
    for state in states:
        for call in state.student_action.get("tool_calls", ()):
            arguments.setdefault(call["function"]["name"], set()).update(call["function"]["arguments"])
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {each: {} for each in sorted(arguments[name])}},
            },
        }
        for name in sorted(arguments)
    ]
