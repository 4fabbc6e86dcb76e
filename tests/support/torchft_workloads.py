"""torchft's own classes in processes that tests launch."""

import os
from typing import Any

import torch
from sync_cases import OUTER, nesterov_of, network
from tiny_workloads import batch_of, inner_step
from torchft.local_sgd import DiLoCo, LocalSGD

from diloco_orchestrator import ObjectStoreManager, OuterConfig


def train(folder: str, rounds: int, name: str) -> dict[str, Any]:
    """Rounds of three inner steps, and one inner step more."""
    rank, replicas = int(os.environ["REPLICA_RANK"]), int(os.environ["REPLICA_WORLD_SIZE"])
    outer = OUTER if name == "diloco" else OuterConfig(lr=1.0, momentum=0.0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = ObjectStoreManager.join(folder, rank, replicas, rounds=rounds, outer=outer)
    manager.attach(model)
    loop: Any = LocalSGD(manager, model, optimizer, 3)
    if name == "diloco":
        loop = DiLoCo(manager, [model], optimizer, nesterov_of(model), 3)
    with loop:
        for step in range(3 * rounds):
            inner_step(model, optimizer, batch_of(1000 * rank + step))
    synchronised = bytes_of(dict(model.named_parameters()))
    inner_step(model, optimizer, batch_of(1000 * rank))
    taking = manager.participant
    return {
        "synchronised": synchronised,
        "trained": bytes_of(dict(model.named_parameters())),
        "base": bytes_of({name: taking.base.parameters[name] for name, _ in model.named_parameters()}),
        "digest": taking.digest,
    }


def bytes_of(tensors: dict[str, torch.Tensor]) -> str:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors.values()).hex()
