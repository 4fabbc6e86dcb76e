"""A small model, its collator and batches of real chat templates, for tests."""

import copy
from pathlib import Path
from typing import Any

import torch
from composer.collate import Collator, hints_of, tools_of
from composer.data import synthetic_states
from composer.losses import compose_loss
from composer.model import make_model, make_tokenizer
from composer.pairs import DPOPair, TeacherAction, extract_dpo_pairs
from composer.synthetic import teacher_actions
from composer.traces import ClaudeCodeIngester, TraceState
from torch import Tensor

SESSION = Path(__file__).parent / "session.jsonl"


def small_model(seed: int = 0) -> torch.nn.Module:
    return make_model(seed, hidden_size=16, layers=1)


def frozen(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)


def recorded_states() -> list[TraceState]:
    return list(ClaudeCodeIngester().ingest(SESSION))


def pairs_against(states: list[TraceState], answer: str = "I ask the user.") -> list[DPOPair]:
    """Two teachers agree on an answer that no student gave."""
    actions = [TeacherAction(state.id, name, answer, 0.0) for state in states for name in ("north", "south")]
    return extract_dpo_pairs(states, actions)


def batches(model: torch.nn.Module, count: int = 2, max_length: int = 320) -> list[dict[str, Tensor]]:
    """`count` batches with the keys of every channel, of different sessions."""
    states = synthetic_states(1, 12)
    hints, pairs = hints_of(states), extract_dpo_pairs(states, teacher_actions(states))
    collator = Collator(make_tokenizer(), tools_of(states), max_length, frozen(model))
    hinted = [state for state in states if state.id in hints]
    return [collator(hinted[3 * i : 3 * i + 3], hints, pairs[i : i + 1]) for i in range(count)]


def trained_lines(steps: int = 10, seed: int = 0) -> list[str]:
    """The components of `steps` steps on two alternating batches, to the last digit."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = small_model(seed)
    prepared = batches(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lines = []
    for step in range(steps):
        found: Any = compose_loss(model, prepared[step % 2], alpha_sdpo=0.5, beta_replay=0.2, strict=True)
        optimizer.zero_grad()
        found.total.backward()
        optimizer.step()
        scalars = (found.total, found.lm_ce, found.sdpo_jsd, found.trace_replay_dpo)
        lines.append(" ".join([*(each.item().hex() for each in scalars), *sorted(found.active)]))
    return lines


if __name__ == "__main__":
    print("\n".join(trained_lines()))
