"""On a GPU: learning rates, inner and outer, of examples/speedrun, compared side by side over one whole run.

    python3 benchmarks/speedrun_rates.py                       # sixteen settings, 60 rounds: two minutes of an H200
    python3 benchmarks/speedrun_rates.py --device cpu --rounds 1 --steps 2 --settings 2    # whether the script works

All settings times two replicas train as one model, whose weights have one more dimension, from the same first weights
on the same batches: the model, the Muon and the AdamW of the example written for stacked weights, the model compared
with the example's own before it begins. Contributions are averaged in fp32 instead of int4. Printed is the held-out
score of the base after some rounds, in bits per byte, the best setting first.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "speedrun")]

import speedrun  # noqa: E402  (found by the line above)

REPLICAS = 2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # as torch.optim.Muon has them
Stacked = dict[str, Tensor]  # a model's parameters by name; the first dimension counts models


@dataclass(frozen=True)
class Setting:
    """Rates of Muon and AdamW, the outer optimizer, the decay of matrices, and the share in which rates fall."""

    matrix_lr: float
    other_lr: float
    outer_lr: float
    momentum: float
    decay: float = 0.05
    down: float = 0.6


SETTINGS = [
    Setting(0.02, 0.003, 0.8, 0.9),
    Setting(0.01, 0.003, 0.8, 0.9),
    Setting(0.005, 0.003, 0.8, 0.9),
    Setting(0.0025, 0.003, 0.8, 0.9),
    Setting(0.02, 0.003, 0.7, 0.5),
    Setting(0.01, 0.003, 0.7, 0.5),
    Setting(0.005, 0.003, 0.7, 0.5),
    Setting(0.01, 0.006, 0.7, 0.5),
    Setting(0.02, 0.006, 0.7, 0.5),
    Setting(0.01, 0.012, 0.7, 0.5),
    Setting(0.01, 0.003, 0.9, 0.8),
    Setting(0.01, 0.006, 1.0, 0.0),
    Setting(0.02, 0.006, 1.0, 0.0),
    Setting(0.01, 0.006, 0.7, 0.5, down=0.9),
    Setting(0.01, 0.006, 0.7, 0.5, decay=0.2),
    Setting(0.01, 0.006, 0.7, 0.7),
]


# -- the example's model and optimizers, for stacked weights ----------------------------------------------------------


class Model:
    """The Llama of the example, as a function of stacked weights."""

    def __init__(self, config: Any, device: str) -> None:
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        width = config.hidden_size // self.heads
        turns = 10_000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(config.max_position_embeddings), turns).repeat(1, 2)
        self.cos, self.sin, self.eps = angles.cos().to(device), angles.sin().to(device), config.rms_norm_eps
        self.is_gpu = device == "cuda"

    def losses(self, weights: Mapping[str, Tensor], windows: Tensor) -> Tensor:
        """The cross-entropy in nats of every token but the first: (G, B, T). `windows`: (G, B, T + 1) int64."""
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.is_gpu):
            logits = self._logits(weights, windows[..., :-1])
        found = functional.cross_entropy(logits.float().flatten(0, 2), windows[..., 1:].flatten(), reduction="none")
        return found.view(*windows.shape[:2], -1)

    def _logits(self, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        count, rows, length = ids.shape
        embedding = weights["model.embed_tokens.weight"]
        places = ids.reshape(count, -1, 1).expand(-1, -1, embedding.shape[-1])
        x = embedding.gather(1, places).view(count, rows, length, -1)
        for layer in range(self.layers):
            own = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in _LAYER}
            h = self._normed(x, own["input_layernorm"])
            q, k, v = (
                _linear(h, own[f"self_attn.{name}_proj"]).view(count * rows, length, self.heads, -1).transpose(1, 2)
                for name in "qkv"
            )
            mixed = functional.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
            x = x + _linear(mixed.transpose(1, 2).reshape(count, rows, length, -1), own["self_attn.o_proj"])
            h = self._normed(x, own["post_attention_layernorm"])
            gated = functional.silu(_linear(h, own["mlp.gate_proj"])) * _linear(h, own["mlp.up_proj"])
            x = x + _linear(gated, own["mlp.down_proj"])
        return _linear(self._normed(x, weights["model.norm.weight"]), embedding)

    def _normed(self, x: Tensor, scale: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * scale[:, None, None]

    def _turned(self, x: Tensor) -> Tensor:
        """Queries or keys with rotary positions."""
        low, high = x.chunk(2, -1)
        length = x.shape[-2]
        return (x * self.cos[:length] + torch.cat([-high, low], -1) * self.sin[:length]).to(x.dtype)


_LAYER = (
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{each}_proj" for each in "qkvo"),
    *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    count, rows, length, width = x.shape
    return torch.bmm(x.reshape(count, rows * length, width), weight.mT).view(count, rows, length, -1)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices with the singular vectors of `matrices` (G, rows, columns), and singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    x, is_high = matrices.bfloat16(), matrices.shape[-2] > matrices.shape[-1]
    x = x.mT if is_high else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_high else x).float()


class Optimizers:
    """Muon for matrices, AdamW for the rest, with rates of its own for each stacked model."""

    def __init__(self, weights: Stacked, settings: list[Setting]) -> None:
        self.weights, self.steps = weights, 0
        device = next(iter(weights.values())).device
        self.rate = {
            each.name: torch.tensor([getattr(s, each.name) for s in settings for _ in range(REPLICAS)], device=device)
            for each in fields(Setting)
        }
        self.first = {name: torch.zeros_like(each) for name, each in weights.items()}
        self.second = {name: torch.zeros_like(each) for name, each in weights.items()}

    def step(self, progress: float) -> None:
        """One step of all models, with gradients clipped to norm 1; `progress` of the run, 0 to 1, is done."""
        self.steps += 1
        with torch.no_grad():
            up, falling = (progress + 1e-3) / 0.02, (1 - progress) / self.rate["down"] + 0.02
            pace = falling.clamp(max=min(1.0, up))
            gradients = {name: each.grad for name, each in self.weights.items() if each.grad is not None}
            norms = sum(each.flatten(1).square().sum(1) for each in gradients.values())
            clip = (1 / (torch.as_tensor(norms).sqrt() + 1e-6)).clamp(max=1.0)
            for name, gradient in gradients.items():
                update = self._muon if gradient.ndim == 3 and "embed" not in name else self._adamw
                update(name, gradient * _over(clip, gradient), pace)

    def _muon(self, name: str, gradient: Tensor, pace: Tensor) -> None:
        weight, rate = self.weights[name], self.rate["matrix_lr"] * pace
        self.first[name].lerp_(gradient, 0.05)
        direction = orthogonal(gradient.lerp(self.first[name], 0.95))
        weight.mul_(1 - _over(rate * self.rate["decay"], weight))
        weight.sub_(direction * _over(rate * 0.2 * math.sqrt(max(weight.shape[1:])), weight))  # "match_rms_adamw"

    def _adamw(self, name: str, gradient: Tensor, pace: Tensor) -> None:
        weight, rate = self.weights[name], self.rate["other_lr"] * pace
        first, second = self.first[name].lerp_(gradient, 0.1), self.second[name].lerp_(gradient.square(), 0.05)
        scale = (second / (1 - 0.95**self.steps)).sqrt() + 1e-8
        weight.mul_(1 - _over(rate * 0.01, weight)).sub_(_over(rate, weight) * first / (1 - 0.9**self.steps) / scale)


def _over(values: Tensor, stacked: Tensor) -> Tensor:
    """One value a model, as a factor of stacked tensors."""
    return values.view(-1, *[1] * (stacked.ndim - 1))


# -- the comparison ---------------------------------------------------------------------------------------------------


def curves(given: argparse.Namespace, settings: list[Setting]) -> Iterator[tuple[int, list[float]]]:
    """A round, from 1, and the held-out bits per byte of all settings behind it."""
    scale, device = speedrun.SCALES["cpu"], given.device
    data, heldout = zip(*[speedrun.texts(None, replica, REPLICAS) for replica in range(REPLICAS)], strict=True)
    tokenizer = speedrun.bpe(heldout[0].sample, scale.vocabulary)
    torch.manual_seed(0)
    reference = speedrun.build_model(scale)
    check(reference, scale)
    model, count = Model(reference.config, device), len(settings)
    first = {name: each.detach().to(device) for name, each in reference.named_parameters()}
    base = {name: each.expand(count, *each.shape).clone() for name, each in first.items()}
    momenta = {name: torch.zeros_like(each) for name, each in base.items()}
    weights = {name: each.repeat_interleave(REPLICAS, 0).requires_grad_() for name, each in base.items()}
    optimizers = Optimizers(weights, settings)
    orders = [
        iter(speedrun.Windows(speedrun.encode(tokenizer, each), scale, number)) for number, each in enumerate(data)
    ]
    outer_lr, momentum = (
        torch.tensor([getattr(each, name) for each in settings], device=device) for name in ("outer_lr", "momentum")
    )
    for round_id in range(given.rounds):
        for step in range(given.steps):
            batches = torch.stack([next(each) for each in orders]).to(device).repeat(count, 1, 1)
            for each in weights.values():
                each.grad = None
            model.losses(weights, batches).mean(dim=(1, 2)).sum().backward()
            optimizers.step((round_id * given.steps + step) / (given.rounds * given.steps))
        with torch.no_grad():
            for name, each in weights.items():
                delta = base[name] - each.view(count, REPLICAS, *each.shape[1:]).mean(1)
                momenta[name].mul_(_over(momentum, delta)).add_(delta)
                base[name].sub_(_over(outer_lr, delta) * (delta + _over(momentum, delta) * momenta[name]))
                each.copy_(base[name].repeat_interleave(REPLICAS, 0))
            if round_id + 1 in (1, 7, 15, given.rounds) or round_id % 10 == 9:
                score = _Score(tokenizer, model, scale.context, device)
                yield round_id + 1, score(base, heldout[0].items, count)


class _Score(speedrun.Scorer):
    """The example's score of stacked weights: it is asked for token losses of one model at a time."""

    def __init__(self, tokenizer: Any, model: Model, context: int, device: str) -> None:
        super().__init__(tokenizer, context)
        self.model, self.device = model, device

    def __call__(self, base: Stacked, items: list[str], count: int) -> list[float]:  # type: ignore[override]
        """Bits per byte, one number a model."""
        found = []
        for at in range(count):
            one = {name: each[at : at + 1] for name, each in base.items()}
            nats = super().__call__(_Alone(self.model, one), items)
            found.append(sum(nats) / len(nats) / math.log(2))
        return found


class _Alone(torch.nn.Module):
    """One of the stacked models, called as the example calls its own."""

    def __init__(self, model: Model, weights: Stacked) -> None:
        super().__init__()
        self.model = model
        self.weights = torch.nn.ParameterList(weights.values())
        self.names = list(weights)

    def forward(self, input_ids: Tensor) -> Any:
        weights = dict(zip(self.names, self.weights, strict=True))
        return argparse.Namespace(logits=self.model._logits(weights, input_ids[None])[0])


def check(reference: torch.nn.Module, scale: Any) -> None:
    """Compare the stacked model with the example's own on random tokens. Raises SystemExit where they differ."""
    windows = torch.randint(scale.vocabulary, (2, scale.context + 1))
    stacked = {name: each.detach()[None] for name, each in reference.named_parameters()}
    with torch.no_grad():
        own = speedrun.token_losses(reference, windows)
        difference = (own - Model(reference.config, "cpu").losses(stacked, windows[None])[0]).abs().max().item()
    if difference > 1e-4:
        raise SystemExit(f"the stacked model's losses differ from the example's by {difference:g} nats.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=speedrun.SCALES["cpu"].sync_every, help="inner steps of a round")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="compare only the first so many")
    given = parser.parse_args()
    settings, began, found = SETTINGS[: given.settings], time.monotonic(), {}
    for round_id, scores in curves(given, settings):
        found[round_id] = scores
        print(f"round {round_id}, {time.monotonic() - began:.0f} s", flush=True)
    columns = [f"round {each}" for each in found]
    print("\n| Muon | AdamW | outer lr | momentum | decay | falls in | " + " | ".join(columns) + " |")
    print("|---" * (6 + len(columns)) + "|")
    for number in sorted(range(len(settings)), key=lambda each: found[given.rounds][each]):
        one = settings[number]
        given_values = [one.matrix_lr, one.other_lr, one.outer_lr, one.momentum, one.decay, one.down]
        cells = [f"{each:g}" for each in given_values] + [f"{scores[number]:.3f}" for scores in found.values()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
