"""A training function that leaves most of the machine idle: the pace of an inner step is a setting, not the CPU's."""

import random
import time
from typing import Any

import torch


def train(ctx: Any) -> None:
    """Fit a small network to a fixed linear map; `args["step_s"]` is how long an inner step takes, on average.

    `args["spread"]`: the share by which the time of a step differs from the average, at most. `args["slow"]`: how many
    times as long a step of the last replica takes.
    """
    torch.set_num_threads(1)
    truth = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [
        torch.randn(16, 64, generator=torch.Generator().manual_seed(ctx.replica_id * 100 + i)) for i in range(50)
    ]
    pace = random.Random(ctx.replica_id)
    usual_s = ctx.args["step_s"] * (ctx.args.get("slow", 1.0) if ctx.replica_id == ctx.replicas - 1 else 1.0)
    with ctx.attach(model, optimizer, heldout=_score, heldout_items=list(range(32))) as replica:
        for x in replica.batches(batches):
            began = time.monotonic()
            loss = (model(x) - x @ truth).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item(), tokens=len(x))
            step_s = usual_s * (1 + ctx.args.get("spread", 0.0) * pace.uniform(-1, 1))
            time.sleep(max(0.0, step_s - (time.monotonic() - began)))


def _score(model: torch.nn.Module, items: list[int]) -> list[float]:
    truth = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
    losses = []
    for item in items:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1_000_000 + item))
        losses.append((model(x) - x @ truth).square().mean().item())
    return losses
