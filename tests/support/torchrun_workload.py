"""A loop of its user around `island_workloads.TinyModel`, in one process or in every rank that torchrun starts.

python torchrun_workload.py BUCKET REPLICA_ID STEPS [REPLICAS]
"""

import os
import sys

import torch
import torch.distributed as dist
from island_workloads import TinyModel, global_batch, losses, shard

from diloco_orchestrator import ObjectStoreManager, OuterConfig, make_diloco_outer_loop


def main() -> None:
    url, replica_id, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    replicas = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = TinyModel(31)
    if ranks > 1:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    manager = ObjectStoreManager.join(
        url, replica_id, replicas, rounds=steps // 4, outer=OuterConfig(), snapshot_every=1
    )
    with make_diloco_outer_loop(model, optimizer, manager, 4):
        for step in range(steps):
            losses(model, global_batch(3, replica_id, step)[rank::ranks]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
