"""An accelerate loop as a replica, by `replica.step`: `python examples/accelerate_loop.py [FOLDER]`."""

import sys
import tempfile

import torch
from accelerate import Accelerator

from diloco_orchestrator import ReplicaContext, launch


def train(ctx: ReplicaContext) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(ctx.replica_id))  # this replica's part of the data
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ctx.total_steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    inner = accelerator.unwrap_model(model), optimizer.optimizer  # without accelerate's wrappers
    with ctx.attach(*inner, stateful={"schedule": schedule}) as replica:
        going = True
        while going:
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients and not (going := replica.step(loss=loss.item(), tokens=len(batch))):
                    break


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    result = launch("accelerate_loop:train", store=folder, replicas=2, rounds=5, sync_every=10).wait()
    print(f"{result.status} after {result.rounds} rounds: {folder}")
