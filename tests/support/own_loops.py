"""Training loops as people write them, over tiny models: own optimizers, complex layers, bf16, workers, two batches."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from own_optimizers import Lion, Lookahead, Mixed
from tiny_workloads import batch_of, mlp

from diloco_orchestrator import ReplicaContext


class Spectral(torch.nn.Module):
    """A Fourier layer: its complex weights are real parameters of shape (modes, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.view_as_real(torch.randn(3, dtype=torch.complex64)).clone())
        self.out = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.weight)
        return self.out(torch.fft.irfft(spectrum, n=4))


class Batches(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Batches by number, in bf16."""

    def __init__(self, replica_id: int) -> None:
        self.first = 1000 * replica_id

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch_of(self.first + index)
        return x.bfloat16(), y.bfloat16()


def optimizers_of(kind: str, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers to attach, the one that the loop steps first."""
    parameters = list(model.parameters())
    if kind == "lookahead":
        outer = Lookahead(torch.optim.AdamW(parameters, lr=0.01))
        return [outer, outer.inner]
    made = {"lion": Lion, "mixed": Mixed, "adafactor": torch.optim.Adafactor}.get(kind, torch.optim.AdamW)
    return [made(parameters, lr=0.01)]


KINDS = ("lion", "mixed", "lookahead", "spectral", "adafactor", "unequal")


def train(ctx: ReplicaContext) -> None:
    """The loop of `args["kind"]`.

    "adafactor": a bf16 model, batches from two workers, two of them to a step. "unequal": the batches of replica 1 have
    half the rows of those of replica 0.

    With `args["folder"]` replica 1 kills itself once, inside round 2.
    """
    kind, marker = str(ctx.args["kind"]), Path(str(ctx.args.get("folder", "."))) / "killed"
    model: torch.nn.Module = Spectral() if kind == "spectral" else mlp()
    micro = 1
    data: Any = [batch_of(1000 * ctx.replica_id + i) for i in range(7)]
    if kind == "unequal":
        data = [(x[:: 1 + ctx.replica_id], y[:: 1 + ctx.replica_id]) for x, y in data]
    if kind == "adafactor":
        model, micro = model.bfloat16(), 2
        data = torch.utils.data.DataLoader(Batches(ctx.replica_id), batch_size=None, shuffle=True, num_workers=2)
    optimizers = optimizers_of(kind, model)
    with ctx.attach(model, optimizers) as replica:
        for number, (x, y) in enumerate(replica.batches(data), start=1):
            loss = torch.nn.functional.mse_loss(model(x), y) / micro
            loss.backward()
            replica.observe(loss=loss.item(), tokens=torch.tensor(len(x)))  # type: ignore[arg-type]
            if number % micro == 0:
                optimizers[0].step()
                optimizers[0].zero_grad()
            if "folder" in ctx.args and ctx.replica_id == 1 and replica.step_count == 6 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
