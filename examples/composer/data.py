"""What a replica trains and is scored on, from the run's arguments: states, hints, pairs, held-out states."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer.collate import Collator, hints_of, tools_of
from composer.losses import IGNORED
from composer.model import make_tokenizer
from composer.pairs import DPOPair, extract_dpo_pairs
from composer.synthetic import teacher_actions, write_sessions
from composer.traces import ClaudeCodeIngester, TraceState

_HELD_OUT_SEED = 1_000_000  # of sessions that no replica trains on


@dataclass(frozen=True)
class TraceData:
    """What one replica trains on."""

    states: list[TraceState]  # all with a hint: a session's last one has no sequel to learn from
    hints: dict[str, str]  # by state
    pairs: list[DPOPair]


def load_data(replica_id: int, seed: int, args: Mapping[str, Any]) -> TraceData:
    """Sessions of this replica, and those of `args["trace"]`, a path, if there is one. `args["hacks"]`: their share."""
    states = synthetic_states(seed + replica_id, int(args.get("sessions", 20)), float(args.get("hacks", 0.0)))
    if trace := args.get("trace"):
        states += ClaudeCodeIngester().ingest(str(trace))
    hints = hints_of(states)
    return TraceData(
        [state for state in states if state.id in hints], hints, extract_dpo_pairs(states, teacher_actions(states))
    )


def synthetic_states(seed: int, sessions: int, hacks: float = 0.0) -> list[TraceState]:
    """Sessions of a seed, through a file and the ingester."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sessions.jsonl")
        write_sessions(path, seed, sessions, hacks)
        return list(ClaudeCodeIngester().ingest(path))


def make_collator(reference: torch.nn.Module | None = None, max_length: int = 512) -> Collator:
    """One collator for training and scoring. The tools are the same on every replica."""
    return Collator(make_tokenizer(), tools_of(synthetic_states(0, 8)), max_length, reference)


class HeldOut:
    """Scores a model on actions of unseen sessions; an item is a number, three of them a session."""

    def __init__(self, collator: Collator, items: Sequence[int]) -> None:
        self._collator = collator
        self._states = {item: synthetic_states(_HELD_OUT_SEED + item // 3, 1)[item % 3] for item in items}

    def losses(self, model: torch.nn.Module, items: Sequence[int]) -> list[float]:
        """Mean nats per token of each item's action: the unit of the training loss."""
        if not items:
            return []
        batch = self._collator([self._states[item] for item in items], hints={})
        predicted = model(input_ids=batch["input_ids"]).logits[:, :-1].float().log_softmax(-1)
        labels = batch["labels"][:, 1:]
        kept = labels != IGNORED
        of_tokens = predicted.gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1) * kept
        return [float(each) for each in (-of_tokens.sum(-1) / kept.sum(-1)).detach()]

    def likelihoods(self, model: torch.nn.Module, items: Sequence[int]) -> list[float]:
        """Geometric mean probability of each action's tokens, in [0, 1]: the unit of a reward."""
        return [float(torch.tensor(-loss).exp()) for loss in self.losses(model, items)]
