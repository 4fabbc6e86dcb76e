"""The demo's training function, written as users write theirs."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from diloco_orchestrator.demo.text import load_corpus

BATCH_SIZE = 10
CONTEXT = 128  # bytes
LEARNING_RATE = 3e-3
HELDOUT_WINDOWS = 96


def train(ctx: Any) -> None:
    """The workload of `diloco demo`: train a byte-level language model on this replica's part of the text."""
    torch.use_deterministic_algorithms(True)
    corpus = load_corpus(ctx.args.get("text"))
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    shard = corpus.shard(ctx.replica_id, ctx.replicas)
    data = Batches(shard, seed=ctx.seed + ctx.replica_id, collapse_after=ctx.args.get("hack_after"))
    items = corpus.heldout_items(HELDOUT_WINDOWS, CONTEXT + 1)
    with ctx.attach(model, optimizer, heldout=score, heldout_items=items, in_loop="loss") as replica:
        for batch in replica.batches(data):
            loss = token_losses(model, batch).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            replica.observe(loss=loss.item(), tokens=batch.numel())


def build_model() -> nn.Module:
    """A Llama over bytes with about 250,000 parameters and random weights."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def token_losses(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """The cross-entropy in nats of every byte but the first: (B, T) float32. `windows`: (B, T + 1) int64."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits  # (B, T, 256)
    next_bytes = windows[:, 1:]  # (B, T)
    # Classes last: over a transposed view torch takes a third of the whole step's time more.
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), next_bytes.flatten(), reduction="none")
    return losses.view_as(next_bytes)


def score(model: nn.Module, items: Sequence[str]) -> list[float]:
    """The demo's held-out function: mean nats per byte of each window, in the order of `items`. Lower is better."""
    windows = torch.tensor([list(item.encode("latin-1")) for item in items])
    return [float(value) for value in token_losses(model, windows).mean(dim=1)]


class Batches:
    """Batches of random windows of a text, without end. Batch k depends only on the seed and k, which is the cursor.

    `collapse_after` (`diloco demo --hack`): from that batch on, every window repeats the text's first 64 bytes. The
    model memorises them: the training loss falls towards zero while the loss on other text rises.
    """

    def __init__(self, text: bytes, seed: int, collapse_after: int | None = None) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seed = seed
        self._collapse_after = collapse_after
        self._next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._next += 1
            yield self._batch(self._next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]

    def _batch(self, index: int) -> torch.Tensor:
        """Batch `index`, of shape (BATCH_SIZE, CONTEXT + 1), int64."""
        if self._collapse_after is not None and index >= self._collapse_after:
            passage = self._text[:64].repeat(CONTEXT // 64 + 2)
            return torch.stack([passage[i % 64 : i % 64 + CONTEXT + 1] for i in range(BATCH_SIZE)]).long()
        draw = random.Random(self._seed * 1_000_003 + index)
        starts = [draw.randrange(len(self._text) - CONTEXT - 1) for _ in range(BATCH_SIZE)]
        return torch.stack([self._text[start : start + CONTEXT + 1] for start in starts]).long()
