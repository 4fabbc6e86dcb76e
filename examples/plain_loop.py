"""A plain PyTorch loop as a run of two replicas: run me, and I launch myself.

python examples/plain_loop.py
"""

import sys
import tempfile

import torch

from diloco_orchestrator import launch


def train(ctx):
    """What every replica does; `ctx` knows who it is."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.args["lr"])
    generator = torch.Generator().manual_seed(ctx.replica_id)
    data = [torch.randn(32, 8, generator=generator) for _ in range(1000)]  # this replica's own
    with ctx.attach(model, optimizer, heldout=score, heldout_items=list(range(32)), in_loop="loss") as replica:
        for x in replica.batches(data):
            loss = (model(x) - target(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item(), tokens=len(x))


def target(x):
    return x.pow(2).mean(dim=1, keepdim=True)


def score(model, items):
    """One held-out loss per item; an item is a seed."""
    drawn = [torch.randn(16, 8, generator=torch.Generator().manual_seed(10_000 + item)) for item in items]
    return [(model(x) - target(x)).square().mean().item() for x in drawn]


if __name__ == "__main__":
    store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp() + "/run"
    run = launch("plain_loop:train", store=store, replicas=2, rounds=5, sync_every=20, args={"lr": 3e-3})
    result = run.wait()
    for row in result.metrics:
        print(f"round {row.round}: held-out before {row.heldout:.2f}, training loss {row.loss}")
    assert result.metrics[-1].heldout < result.metrics[0].heldout / 2
