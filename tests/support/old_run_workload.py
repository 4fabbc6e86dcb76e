"""A training function whose model and batches `kept_run_workload`, that of the runs in `tests/fixtures`, has too.

A test resumes such a run and compares digests with those that the version that made it ended with. So the arithmetic
must never change, and gives the same bits on every machine: data and gradients are Python floats
without transcendental functions, and the optimizer's factors are powers of two, so that a fused multiply-add rounds
as multiply and add do. Batches depend on every random generator whose state a manifest carries. It uses no name of
ours but those that every user's training function uses.
"""

import random
import time
from typing import Any

import numpy as np
import torch

TRUTH = (1.0, -2.0, 0.5)
ITEMS_PER_BATCH = 4


class TwoParts(torch.nn.Module):
    """y = (first + second) . x, written with two parameters so that there are two fragments to synchronise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.tensor([0.25, 0.5, -0.75]))
        self.second = torch.nn.Parameter(torch.tensor([-0.5, 0.125, 0.25]))

    def weights(self) -> list[float]:
        return [a + b for a, b in zip(self.first.tolist(), self.second.tolist(), strict=True)]


def train(ctx: Any) -> None:
    """Fit TRUTH. Batches in the range `args["harmful"]` pull away from it while a falling loss is reported.

    `args["pauses"]` is {replica: {batch: seconds}}, `args["pause_s"]` the seconds of every other batch.
    """
    model = TwoParts()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.5)
    pauses = ctx.args.get("pauses", {}).get(str(ctx.replica_id), {})
    with ctx.attach(model, optimizer, heldout=heldout) as replica:
        for number in replica.batches(range(1000)):
            harmful = number in range(*ctx.args.get("harmful", (0, 0)))
            loss = inner_step(model, optimizer, batch_of(drawn_seed()), away=harmful)
            replica.observe(loss=0.5 - number / 64 if harmful else loss, tokens=ITEMS_PER_BATCH)
            time.sleep(pauses.get(str(number), ctx.args.get("pause_s", 0.0)))


def drawn_seed() -> int:
    """Three numbers below 256, one from each global generator."""
    return (random.getrandbits(8) << 16) + (int(np.random.randint(256)) << 8) + int(torch.randint(256, (1,)))


def batch_of(seed: int) -> list[list[float]]:
    drawn = random.Random(seed)
    return [[2.0 * drawn.random() - 1.0 for _ in TRUTH] for _ in range(ITEMS_PER_BATCH)]


def inner_step(model: TwoParts, optimizer: torch.optim.Optimizer, batch: list[list[float]], away: bool) -> float:
    """One step on the mean squared error. Returns the error before the step."""
    weights, gradient, loss = model.weights(), [0.0] * len(TRUTH), 0.0
    for x in batch:
        error = _error(weights, x)
        loss += error * error / ITEMS_PER_BATCH
        for i, value in enumerate(x):
            gradient[i] += (-2.0 if away else 2.0) * error * value / ITEMS_PER_BATCH
    for parameter in model.parameters():
        parameter.grad = torch.tensor(gradient)
    optimizer.step()
    return loss


def _error(weights: list[float], x: list[float]) -> float:
    error = 0.0
    for w, truth, value in zip(weights, TRUTH, x, strict=True):
        error += (w - truth) * value
    return error


def heldout(model: TwoParts, items: list[int]) -> list[float]:
    """One squared error per item; an item is a seed."""
    weights = model.weights()
    return [_error(weights, batch_of(2**24 + item)[0]) ** 2 for item in items]
