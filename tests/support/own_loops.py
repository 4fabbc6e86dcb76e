"""Training loops as people write them, over tiny models: many optimizers, complex layers, a GAN, streams, bf16."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
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


class StateSpace(torch.nn.Module):
    """A diagonal state-space layer (S4D): its complex decays and inputs are real parameters of shape (states, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = torch.nn.Parameter(torch.stack((torch.zeros(4), torch.arange(4.0)), dim=1))
        self.input = torch.nn.Parameter(torch.view_as_real(torch.randn(4, dtype=torch.complex64)).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay, input_ = torch.view_as_complex(self.decay), torch.view_as_complex(self.input)
        times = torch.arange(x.shape[1])
        kernel = (input_ * torch.exp(torch.complex(-decay.real.exp(), decay.imag) * times[:, None])).sum(1).real
        return (x * kernel.flip(0)).sum(1, keepdim=True)


class Gan(torch.nn.Module):
    """A generator and a discriminator, which two optimizers train in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Batches that are read one after another, each epoch in an order of its own, drawn while it is read."""

    def __init__(self, replica_id: int) -> None:
        self.first = 1000 * replica_id

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        waiting = list(range(7))
        while waiting:
            yield batch_of(self.first + waiting.pop(random.randrange(min(3, len(waiting)))))


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
    if kind == "muon":
        matrices = [p for p in parameters if p.ndim == 2]
        others = [p for p in parameters if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
    if isinstance(model, Gan):
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (model.discriminator, model.generator)]
    if kind == "lbfgs":
        return [torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=5)]
    made = {"lion": Lion, "mixed": Mixed, "adafactor": torch.optim.Adafactor}.get(kind, torch.optim.AdamW)
    return [made(parameters, lr=0.01)]


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"spectral": Spectral, "state space": StateSpace, "gan": Gan}
KINDS = (
    *("lion", "mixed", "lookahead", "adafactor", "muon", "lbfgs"),
    *("spectral", "state space", "gan", "compiled", "stream", "weighted", "unequal"),
)


def train(ctx: ReplicaContext) -> None:
    """The loop of `args["kind"]`.

    "adafactor": a bf16 model, batches from two workers, two of them to a step. "unequal": the batches of replica 1 have
    half the rows of those of replica 0. "stream": one that is shuffled where it is read, by a worker. "weighted": some
    batches are drawn more often than others.

    With `args["folder"]` replica 1 kills itself once, inside round 2.
    """
    kind, marker = str(ctx.args["kind"]), Path(str(ctx.args.get("folder", "."))) / "killed"
    model = MODELS.get(kind, mlp)()
    micro = 1
    data: Any = [batch_of(1000 * ctx.replica_id + i) for i in range(7)]
    if kind == "unequal":
        data = [(x[:: 1 + ctx.replica_id], y[:: 1 + ctx.replica_id]) for x, y in data]
    if kind == "adafactor":
        model, micro = model.bfloat16(), 2
        data = torch.utils.data.DataLoader(Batches(ctx.replica_id), batch_size=None, shuffle=True, num_workers=2)
    if kind == "weighted":
        drawn = torch.utils.data.WeightedRandomSampler(range(1, 8), 7)
        data = torch.utils.data.DataLoader(data, batch_size=None, sampler=drawn)
    if kind == "stream":
        data = torch.utils.data.DataLoader(Stream(ctx.replica_id), batch_size=None, num_workers=1)
    optimizers = optimizers_of(kind, model)
    with ctx.attach(model, optimizers) as replica:
        called = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
        for number, (x, y) in enumerate(replica.batches(data), start=1):
            if isinstance(model, Gan):
                loss = gan_step(model, x, *optimizers)
            elif kind == "lbfgs":
                loss = optimizers[0].step(partial(closure, model, x, y, optimizers[0]))  # type: ignore[arg-type]
            else:
                loss = torch.nn.functional.mse_loss(called(x), y) / micro
                loss.backward()
            replica.observe(loss=loss.item(), tokens=torch.tensor(len(x)))  # type: ignore[arg-type,union-attr]
            if kind not in ("gan", "lbfgs") and number % micro == 0:
                for optimizer in optimizers if kind == "muon" else optimizers[:1]:
                    optimizer.step()
                    optimizer.zero_grad()
            if "folder" in ctx.args and ctx.replica_id == 1 and replica.step_count == 6 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def closure(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The loss at the model's present values, with its gradients, as LBFGS asks for it several times in a step."""
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def gan_step(
    model: Gan, x: torch.Tensor, of_discriminator: torch.optim.Optimizer, of_generator: torch.optim.Optimizer
) -> torch.Tensor:
    """A step of the discriminator, then one of the generator, whose noise is drawn; the discriminator's loss."""
    made = model.generator(torch.randn_like(x))
    softplus = torch.nn.functional.softplus
    loss = (softplus(-model.discriminator(x)) + softplus(model.discriminator(made.detach()))).mean()
    of_discriminator.zero_grad()
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    softplus(-model.discriminator(made)).mean().backward()
    of_generator.step()
    return loss
