"""What replicas of a simulated run train: gradients that follow from replica and batch alone."""

import torch

LEARNING_RATE = 1 / 64


def gradient(replica_id: int, batch: int) -> float:
    """Of a parameter's first element: a whole number, so that sums of steps are nearly exact."""
    return float(1 + (7 * batch + 3 * replica_id) % 5)


def pattern(replica_id: int, width: int) -> torch.Tensor:
    """What the gradient of each element is multiplied by: (width,), 1.0 first, so that replicas differ in direction."""
    return 1.0 - (torch.arange(width) * (replica_id + 1) % 4).to(torch.float32) / 2
