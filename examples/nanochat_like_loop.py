"""A loop that draws its batches as it goes, as nanochat's does: `python examples/nanochat_like_loop.py [FOLDER]`.

Two optimizers, micro-batches, the next batch fetched before the step, and a learning rate computed from the step.
"""

import sys
import tempfile
from typing import Any

import torch

from diloco_orchestrator import ReplicaContext, launch

MICRO_BATCHES = 2


class Batches:
    """An endless source with a position; `stateful` saves and restores it."""

    def __init__(self, replica_id: int) -> None:
        self.seed, self.position = replica_id, 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * self.seed + self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position - 1}  # the batch fetched ahead is fetched again

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def train(ctx: ReplicaContext) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.02, momentum=0.9)
    others = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01)
    batches = Batches(ctx.replica_id)
    with ctx.attach(model, [matrices, others], stateful={"batches": batches}) as replica:
        x, going = batches.next(), True
        while going:
            left = 1 - replica.step_count / ctx.total_steps
            matrices.param_groups[0]["lr"], others.param_groups[0]["lr"] = 0.02 * left, 0.01 * left
            for _ in range(MICRO_BATCHES):
                loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                (loss / MICRO_BATCHES).backward()
                x = batches.next()
            others.step()
            matrices.step()
            model.zero_grad(set_to_none=True)
            going = replica.step(loss=loss.item(), tokens=MICRO_BATCHES * len(x))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    result = launch("nanochat_like_loop:train", store=folder, replicas=2, rounds=5, sync_every=10).wait()
    print(f"{result.status} after {result.rounds} rounds: {folder}")
