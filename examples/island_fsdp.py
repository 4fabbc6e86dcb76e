"""Two replicas of two ranks each, which shard their model with FSDP2: run me, and I launch myself.

python examples/island_fsdp.py
"""

import sys
import tempfile

import torch
from torch.distributed.fsdp import fully_shard

from diloco_orchestrator import launch


def train(ctx):
    """What every rank of every replica does."""
    model = torch.nn.Sequential(*(Block(16) for _ in range(3)), torch.nn.Linear(16, 1)).to(ctx.device)
    for block in model[:-1]:
        fully_shard(block)  # over the ranks of this replica: torch's default process group is theirs
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Batches(ctx.replica_id, ctx.rank, ctx.device)  # this rank's own part of the data
    with ctx.attach(model, optimizer, heldout=score, heldout_items=list(range(32))) as replica:
        for x in replica.batches(data):
            loss = (model(x) - target(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item(), tokens=len(x))  # of this rank: the replica's are summed


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.ReLU())
        self.outer = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(self.inner(x))


class Batches:
    """Batches of one rank, which can be iterated again."""

    def __init__(self, replica_id, rank, device):
        self.seed, self.device = 100 * replica_id + rank, device

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(16, 16, generator=generator).to(self.device)


def target(x):
    return x.pow(2).mean(dim=1, keepdim=True)


def score(model, items):
    """One held-out loss per item; an item is a seed. All ranks call it, each with a part of the items."""
    device = next(model.parameters()).device
    drawn = [torch.randn(16, 16, generator=torch.Generator().manual_seed(10_000 + item)) for item in items]
    return [(model(x) - target(x)).square().mean().item() for x in (each.to(device) for each in drawn)]


if __name__ == "__main__":
    store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp() + "/run"
    run = launch("island_fsdp:train", store=store, replicas=2, ranks_per_replica=2, rounds=5, sync_every=20)
    result = run.wait()
    for row in result.metrics:
        print(f"round {row.round}: held-out before {row.heldout:.2f}, training loss {row.loss}")
    assert result.metrics[-1].heldout < result.metrics[0].heldout / 2
