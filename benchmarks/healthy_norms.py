"""Healthy fleets of many kinds, trained by a plain loop that clips nobody: the norm of every pseudo-gradient.

Each replica trains alone from the base, the mean of all goes through the outer optimizer with the product's defaults.
Rules about norms are tried on what is recorded, in benchmarks/clips.py.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from hostile_replicas import CLASSES, INPUTS, Classifier, logits
from lora_models import LoraLinear
from quality_runs import OUTER_LR, OUTER_MOMENTUM, ByteTransformer, Size, corpus, losses, pretrained
from torch import nn

_TEXT = Size(batch=0, context=32, width=32, pretraining=600)  # batches are of each replica here, as `Kind` says
_PROMPT, _ANSWER, _WORDS, _GROUP = 8, 6, 8, 8  # of the policy: inputs, places, words of a place, answers to a prompt

Losses = Callable[[nn.Module, int, torch.Generator, int], torch.Tensor]  # model, replica, draw, batch size -> loss


@dataclass(frozen=True)
class Kind:
    """One way to train a healthy fleet."""

    name: str
    replicas: int
    task: str  # of `TASKS`
    lr: float
    optimizer: str = "adamw"
    steps: int = 15  # inner steps of a round
    rounds: int = 80
    batch: int = 8
    decays: bool = False  # to a tenth, as a cosine; otherwise the rate is constant after the warm-up
    clips_gradients: bool = True  # to norm 1, as most trainers do
    small: float = 1.0  # batch of the last replica, as a share of the others'
    other_data: str = ""  # "one", "all": whose data are drawn elsewhere
    few: int = 0  # bytes of text that each replica has; 0 = all of its part
    beta2: float = 0.95  # of AdamW
    seed: int = 0

    def key(self) -> str:
        """What it is, whatever its name."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "name"})

    @property
    def label(self) -> str:
        """What it is called in a table, without the number of replicas."""
        return f"{self.name}, {self.optimizer}, {'decaying' if self.decays else 'constant'} rate"

    def rate(self, step: int) -> float:
        """The learning rate of a step: it rises over the first round."""
        done = step / (self.rounds * self.steps)
        falling = 0.55 + 0.45 * math.cos(math.pi * done) if self.decays else 1.0
        return self.lr * min(1.0, (step + 1) / self.steps) * falling


def norms_of(kind: Kind) -> list[list[float]]:
    """The norms of all pseudo-gradients, by round and replica."""
    torch.manual_seed(kind.seed)
    base, loss_of = TASKS[kind.task](kind)
    models = [TASKS[kind.task](kind)[0] for _ in range(kind.replicas)]
    optimizers = [make_optimizer(model, kind) for model in models]
    draws = [torch.Generator().manual_seed(1000 * kind.seed + i) for i in range(kind.replicas)]
    parameters = trained_of(base)
    momenta = [torch.zeros_like(p) for p in parameters]
    recorded = []
    for round_ in range(kind.rounds):
        deltas = []
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            _take(model, parameters)
            batch = max(1, round(kind.batch * kind.small)) if i == kind.replicas - 1 else kind.batch
            for step in range(kind.steps):
                optimizer.param_groups[0]["lr"] = kind.rate(round_ * kind.steps + step)
                optimizer.zero_grad()
                loss_of(model, i, draws[i], batch).backward()
                if kind.clips_gradients:
                    nn.utils.clip_grad_norm_(trained_of(model), 1.0)
                optimizer.step()
            pairs = zip(parameters, trained_of(model), strict=True)
            deltas.append([ours.detach() - theirs.detach() for ours, theirs in pairs])
        recorded.append([float(torch.cat([each.flatten() for each in delta]).norm()) for delta in deltas])
        with torch.no_grad():
            for parameter, momentum, *each in zip(parameters, momenta, *deltas, strict=True):
                mean = torch.stack(each).mean(dim=0)
                momentum.mul_(OUTER_MOMENTUM).add_(mean)
                parameter.sub_(OUTER_LR * (mean + OUTER_MOMENTUM * momentum))
    return recorded


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _take(model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for ours, base in zip(trained_of(model), parameters, strict=True):
            ours.copy_(base)


def make_optimizer(model: nn.Module, kind: Kind) -> torch.optim.Optimizer:
    if kind.optimizer == "sgd":
        return torch.optim.SGD(trained_of(model), lr=kind.lr, momentum=0.9)
    return torch.optim.AdamW(trained_of(model), lr=kind.lr, betas=(0.9, kind.beta2), weight_decay=0.1, fused=True)


# -- tasks -------------------------------------------------------------------------------------------------------------


def _text(kind: Kind, begins: bool = False, lora: bool = False) -> tuple[nn.Module, Losses]:
    """Next bytes of each replica's part of the text. `begins`: with random values, not from a pretrained model."""
    torch.manual_seed(kind.seed)
    model = ByteTransformer(_TEXT)
    if not begins:
        model.load_state_dict(pretrained(replace(_TEXT, batch=32), kind.seed % 2))
    if lora:
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("attention", "out", "up", "down"):
                block.register_module(name, LoraLinear(getattr(block, name), rank=4, alpha=8.0))
    parts = (bytearray(corpus().shard(i, kind.replicas)) for i in range(kind.replicas))
    shards = [torch.frombuffer(part[: kind.few or None], dtype=torch.uint8) for part in parts]

    def loss_of(model: nn.Module, i: int, draw: torch.Generator, batch: int) -> torch.Tensor:
        text = shards[i]
        starts = torch.randint(0, len(text) - _TEXT.context - 1, (batch,), generator=draw)
        windows = text[starts[:, None] + torch.arange(_TEXT.context + 1)].long()
        if kind.other_data and (i == kind.replicas - 1 or kind.other_data == "all"):
            windows = (windows + 7 * i) % 256  # another alphabet
        return losses(model, windows).mean()

    return model, loss_of


def _classifier(kind: Kind) -> tuple[nn.Module, Losses]:
    """The classifier of the attackers' runs, of a noisy teacher; other data lie elsewhere and lack two classes."""
    model = Classifier(kind.seed)
    teacher = {name: 2.0 * value.detach() for name, value in Classifier(kind.seed + 77).named_parameters()}
    ways = torch.randn((kind.replicas, INPUTS), generator=torch.Generator().manual_seed(kind.seed))

    def loss_of(model: nn.Module, i: int, draw: torch.Generator, batch: int) -> torch.Tensor:
        items = torch.randn((batch, INPUTS), generator=draw)
        if kind.other_data and (i == kind.replicas - 1 or kind.other_data == "all"):
            items = items + 2.25 * ways[i] / ways[i].norm()
        labels = logits(teacher, items).argmax(dim=-1)
        noisy = torch.rand(batch, generator=draw) < 0.1
        labels = torch.where(noisy, torch.randint(CLASSES, (batch,), generator=draw), labels)
        return nn.functional.cross_entropy(logits(dict(model.named_parameters()), items), labels)

    return model, loss_of


def _policy(kind: Kind) -> tuple[nn.Module, Losses]:
    """Answers of some words to a prompt, rewarded for each right word; advantages within the group of a prompt."""
    torch.manual_seed(kind.seed)
    model = nn.Sequential(nn.Linear(_PROMPT, 32), nn.Tanh(), nn.Linear(32, _ANSWER * _WORDS))
    torch.manual_seed(kind.seed + 77)
    right = nn.Sequential(nn.Linear(_PROMPT, 32), nn.Tanh(), nn.Linear(32, _ANSWER * _WORDS)).requires_grad_(False)

    def loss_of(model: nn.Module, i: int, draw: torch.Generator, batch: int) -> torch.Tensor:
        prompts = torch.randn((batch, _PROMPT), generator=draw)
        if kind.other_data and (i == kind.replicas - 1 or kind.other_data == "all"):
            prompts = prompts + (i + 1) / 4
        wanted = right(prompts).view(batch, _ANSWER, _WORDS).argmax(dim=-1)  # (batch, places)
        logps = model(prompts).view(batch, _ANSWER, _WORDS).log_softmax(dim=-1)
        drawn = torch.multinomial(logps.detach().exp().flatten(0, 1), _GROUP, replacement=True, generator=draw)
        answers = drawn.view(batch, _ANSWER, _GROUP)
        rewards = (answers == wanted[..., None]).float().mean(dim=1)  # (batch, group)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)
        said = logps.gather(2, answers).sum(dim=1)  # (batch, group)
        return -(advantages * said).mean()

    return model, loss_of


TASKS: Mapping[str, Callable[[Kind], tuple[nn.Module, Losses]]] = {
    "text": _text,
    "scratch": lambda kind: _text(kind, begins=True),
    "lora": lambda kind: _text(kind, lora=True),
    "classifier": _classifier,
    "policy": _policy,
}


def kinds() -> Iterator[Kind]:
    """The fleets."""
    sft = Kind("text from a trained model", 2, "text", 3e-3)
    yield from (replace(sft, replicas=n, seed=n) for n in (2, 3, 4, 8))
    yield from (replace(sft, replicas=n, seed=n, decays=True) for n in (2, 4, 8))
    yield replace(sft, seed=12, lr=1e-2)
    yield replace(sft, seed=13, lr=1e-2, clips_gradients=False, batch=2)
    yield replace(sft, replicas=4, lr=0.03, optimizer="sgd", seed=20)
    yield replace(sft, replicas=2, lr=0.03, optimizer="sgd", seed=21)
    lora = replace(sft, name="LoRA on text", task="lora", lr=5e-3)
    yield from (replace(lora, replicas=n, seed=30 + n) for n in (2, 3, 4, 8))
    yield replace(lora, replicas=4, seed=40, decays=True)
    scratch = replace(sft, name="text from scratch", task="scratch")
    yield from (replace(scratch, replicas=n, seed=50 + n) for n in (2, 3, 4, 8))
    yield replace(scratch, replicas=4, seed=60, decays=True)
    free = replace(sft, beta2=0.999, clips_gradients=False, rounds=100)
    short = replace(free, name="text, rounds of two steps", steps=2, batch=2)
    yield from (replace(short, replicas=n, seed=seed) for n, seed in ((2, 7), (4, 8)))
    yield replace(free, name="text, one window a step", steps=5, batch=1, lr=1e-2, seed=9)
    heart = replace(free, name="little text, learned by heart")
    yield replace(heart, few=600)
    yield replace(heart, few=200, lr=1e-2, clips_gradients=True, seed=5)
    yield replace(heart, few=200, lr=1e-2, batch=2, steps=5, seed=6)
    yield replace(heart, replicas=3, few=300, lr=1e-2, seed=3)
    yield replace(heart, replicas=4, few=400, lr=5e-3, seed=4)
    policy = Kind("policy gradient", 2, "policy", 3e-3, batch=4)
    yield from (replace(policy, replicas=n, seed=70 + n) for n in (2, 3, 4, 8))
    yield replace(policy, lr=1e-2, seed=80)
    yield replace(policy, replicas=4, optimizer="sgd", lr=0.03, seed=81, decays=True)
    certain = replace(policy, name="policy gradient until it is certain", batch=2, steps=10, rounds=150)
    yield replace(certain, lr=1e-2)
    yield replace(certain, lr=3e-2, beta2=0.999)
    steep = replace(certain, optimizer="sgd", lr=0.1, clips_gradients=False, steps=3, batch=1)
    yield from (replace(steep, replicas=n, seed=seed) for n, seed in ((2, 2), (3, 0), (4, 4), (8, 8)))
    classifier = Kind("classifier", 2, "classifier", 0.1, "sgd", batch=64, clips_gradients=False)
    yield from (replace(classifier, replicas=n, seed=90 + n) for n in (2, 3, 4, 8))
    yield replace(classifier, replicas=8, seed=100, decays=True)
    yield replace(classifier, replicas=3, optimizer="adamw", lr=0.01, seed=101)
    one = replace(classifier, name="classifier, other data of one", other_data="one")
    yield from (replace(one, replicas=n, seed=110 + n) for n in (2, 4, 8))
    yield replace(classifier, name="classifier, other data of all", replicas=8, other_data="all", seed=120)
    yield replace(policy, name="policy gradient, other data of all", replicas=4, other_data="all", seed=121)
    yield replace(sft, name="text, another alphabet of one", replicas=4, other_data="one", seed=122)
    quarter = replace(sft, name="text, a quarter of the batch in one", small=0.25)
    yield from (replace(quarter, replicas=n, seed=seed) for n, seed in ((4, 123), (2, 124)))
    yield replace(classifier, name="classifier, half of the batch in one", replicas=8, small=0.5, seed=126)
    yield replace(classifier, name="classifier, a quarter of the batch in one", replicas=8, small=0.25, seed=125)
