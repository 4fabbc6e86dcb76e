"""Training on texts with a held-out manifest, for runs in processes of their own."""

from pathlib import Path
from typing import Any

import torch

from diloco_orchestrator import HeldoutManifest, ReplicaContext


def encoded(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text) / 10, text.count("1") / 2, 1.0] for text in texts])


def score(model: torch.nn.Module, items: list[Any]) -> list[float]:
    return [float(model(encoded([item])).square().mean()) for item in items]


def train(ctx: ReplicaContext) -> None:
    """Trains on `args["texts"]`. Replicas in `args["tainted"]` meet a held-out text as the fifth batch."""
    folder = Path(str(ctx.args["folder"]))
    held = (folder / "heldout" / "all.txt").read_text().strip().split("\n\n")
    texts = (folder / "train" / "all.txt").read_text().strip().split("\n\n")
    batches = [texts[i : i + 4] for i in range(0, 80, 4)]
    if ctx.replica_id in ctx.args["tainted"]:  # type: ignore[operator]
        batches[4] = [*batches[4][:3], held[0]]
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manifest = HeldoutManifest.read(folder)
    with ctx.attach(model, optimizer, heldout=score, heldout_items=held, heldout_manifest=manifest) as replica:
        for batch in replica.batches(batches):
            loss = model(encoded(batch)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item(), tokens=len(batch))
