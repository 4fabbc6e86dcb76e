"""How LoRA adapters should be averaged: the table of docs/recipes/adapters.md.

    PYTHONPATH=tests/support python benchmarks/adapters.py --docs      # 17 minutes with --processes 1, beside others

4 replicas fine-tune a tiny Llama, pretrained on the source of the Python standard library in swapped case, to that
source as it is, with LoRA on every linear layer. Rounds, averages and outer steps are the product's, in threads over a
bucket in memory. Compared with full-rank averaging: a loop of its own, in float64, that averages the weights W + s·B·A
of all replicas and takes the outer step on them.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lora_models import LoraLinear
from measuring import ROOT, Results, Sample, markdown, publish
from transformers import LlamaConfig, LlamaForCausalLM

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.config import OuterConfig, make_config
from diloco_orchestrator.demo.text import load_corpus
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.store.memory import MemoryStore
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext

REPLICAS = 4
WINDOW, BATCH, ITEMS = 32, 16, 200  # bytes, windows, held-out windows
RANK, ALPHA = 4, 8.0
PRETRAINING = 300  # inner steps
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # Student, two-sided 95 %, by samples
_DOCUMENT = ROOT / "docs" / "recipes" / "adapters.md"
REFERENCE = "full-rank averaging"
FORMS = (REFERENCE, "exact", "mean", "mean, A frozen")


@dataclass(frozen=True)
class Setting:
    """How far replicas go between two rounds."""

    name: str
    sync_every: int
    rounds: int
    lr: float


SETTINGS = (Setting("usual", 20, 10, 2e-3), Setting("aggressive", 50, 4, 1e-2))


corpus = functools.cache(load_corpus)


@functools.cache
def text(part: int) -> torch.Tensor:
    """Bytes that one replica trains on."""
    return torch.frombuffer(bytearray(corpus().shard(part, REPLICAS)), dtype=torch.uint8).long()


def swapped(ids: torch.Tensor) -> torch.Tensor:
    """The same text in swapped case."""
    letters = ((ids | 32) >= ord("a")) & ((ids | 32) <= ord("z"))
    return torch.where(letters, ids ^ 32, ids)


class Windows:
    """Random windows of a replica's text."""

    def __init__(self, part: int, seed: int) -> None:
        self.part, self.random = part, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.next()

    def next(self) -> torch.Tensor:
        starts = torch.randint(len(text(self.part)) - WINDOW, (BATCH, 1), generator=self.random)
        return text(self.part)[starts + torch.arange(WINDOW)]


@functools.cache
def pretrained(seed: int) -> LlamaForCausalLM:
    """A model that knows the text in swapped case."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = [Windows(part, seed) for part in range(REPLICAS)]
    for step in range(PRETRAINING):
        inner_step(model, optimizer, swapped(data[step % REPLICAS].next()))
    return model


def adapted(seed: int, form: str = "") -> LlamaForCausalLM:
    """The pretrained model with new adapters, the same for every replica."""
    model = LlamaForCausalLM(pretrained(seed).config)
    model.load_state_dict(pretrained(seed).state_dict())
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            parent, _, leaf = name.rpartition(".")
            layer = LoraLinear(module, RANK, ALPHA)
            layer.lora_A["default"].weight.requires_grad_(form != "mean, A frozen")
            setattr(model.model.get_submodule(parent), leaf, layer)
    return model


def adapters_of(model: torch.nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def optimizer_of(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean nats per byte."""
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def inner_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    loss_of(model, ids).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def heldout_loss(model: Any) -> float:
    items = [list(item.encode("latin-1")) for item in corpus().heldout_items(ITEMS, WINDOW)]
    return float(loss_of(model, torch.tensor(items)))


Weights = dict[str, torch.Tensor]  # by layer, float64


def effective(model: torch.nn.Module) -> Weights:
    return {name: layer.effective() for name, layer in adapters_of(model).items()}


# -- the product -------------------------------------------------------------------------------------------------------


def play(setting: Setting, seed: int, form: str) -> tuple[list[Weights], float]:
    """The effective weights after each round, and the held-out loss after the last."""
    store, clock = MemoryStore(), SystemClock()
    config = make_config(
        {
            "entrypoint": "adapters:play",
            "replicas": REPLICAS,
            "rounds": setting.rounds,
            "sync_every": setting.sync_every,
            "adapters": "exact" if form == "exact" else "mean",
            "quorum": "all",
            "replica_state": "none",
            "snapshot_every": 10_000,
            "guard": "off",
            "timing": {"poll_s": 0.005},
        }
    )
    stamp = Stamp("adapters", clock.wall_time)
    create_run(store, Run(**stamp(), run_id="run", config=config, package_version="0"), "adapters", stamp)
    models = [adapted(seed, form) for _ in range(REPLICAS)]

    def replica(replica_id: int) -> list[Weights]:
        seen: list[Weights] = []
        model, data = models[replica_id], Windows(replica_id, 1000 * seed + replica_id)
        optimizer = optimizer_of(model, setting.lr)
        attempt = claim_attempt(store, replica_id, None, clock, Stamp(f"replica{replica_id}", clock.wall_time))
        with ReplicaContext(attempt).attach(model, optimizer) as session:
            if replica_id == 0:
                session.on_round(lambda view: seen.append(effective(model)))
            for ids in session.batches(data):
                inner_step(model, optimizer, ids)
        return seen

    with ThreadPoolExecutor(REPLICAS) as pool:
        seen, *_ = pool.map(replica, range(REPLICAS))
    return seen[: setting.rounds], heldout_loss(models[0])


# -- full-rank averaging -----------------------------------------------------------------------------------------------


def play_reference(setting: Setting, seed: int) -> tuple[list[Weights], list[float], float]:
    """As `play`; and how far the product of the mean factors is from the mean product, each round, of the latter."""
    outer = OuterConfig()
    model = adapted(seed)
    optimizers: list[Any] = [None] * REPLICAS
    data = [Windows(part, 1000 * seed + part) for part in range(REPLICAS)]
    factors = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
    factor_momenta = {name: torch.zeros_like(each) for name, each in factors.items()}
    whole = effective(model)
    momenta = {name: torch.zeros_like(each) for name, each in whole.items()}
    seen, errors = [], []
    for _ in range(setting.rounds):
        locals_: list[tuple[dict[str, torch.Tensor], Weights]] = []
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for replica_id in range(REPLICAS):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(start[name])
            optimizer = optimizer_of(model, setting.lr)
            if optimizers[replica_id] is not None:
                optimizer.load_state_dict(optimizers[replica_id])
            for _step in range(setting.sync_every):
                inner_step(model, optimizer, data[replica_id].next())
            optimizers[replica_id] = optimizer.state_dict()
            trained = {name: p.detach().double() for name, p in model.named_parameters() if name in factors}
            locals_.append((trained, effective(model)))
        errors.append(factor_error([each for each, _ in locals_]))
        for name in factors:
            _nesterov(factors[name], factor_momenta[name], sum(each[name] for each, _ in locals_) / REPLICAS, outer)
        for name in whole:
            _nesterov(whole[name], momenta[name], sum(each[name] for _, each in locals_) / REPLICAS, outer)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(factors.get(name, start[name]))
            for name, layer in adapters_of(model).items():
                layer.base_layer.weight.add_((whole[name] - layer.effective()).float())
        seen.append({name: each.clone() for name, each in whole.items()})
    return seen, errors, heldout_loss(model)


def _nesterov(value: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, outer: OuterConfig) -> None:
    gradient = value - mean
    momentum.mul_(outer.momentum).add_(gradient)
    value.sub_(outer.lr * (gradient + outer.momentum * momentum))


def factor_error(local: Sequence[dict[str, torch.Tensor]]) -> float:
    """The plain mean's error: ‖mean(B) mean(A) - mean(B A)‖ / ‖mean(B A)‖ over all layers."""
    off, whole = 0.0, 0.0
    for name_a in (name for name in local[0] if ".lora_A." in name):
        name_b = name_a.replace(".lora_A.", ".lora_B.")
        a, b = (torch.stack([each[name] for each in local]) for name in (name_a, name_b))
        product = (b @ a).mean(0)
        off += float((b.mean(0) @ a.mean(0) - product).square().sum())
        whole += float(product.square().sum())
    return math.sqrt(off / whole)


# -- table -------------------------------------------------------------------------------------------------------------


def distance(found: Weights, reference: Weights, first: Weights) -> float:
    """How far effective weights are from the reference's, of what fine-tuning changed there."""
    off = sum(float((found[name] - reference[name]).square().sum()) for name in first)
    return math.sqrt(off / sum(float((reference[name] - first[name]).square().sum()) for name in first))


def measure(setting: Setting, seed: int) -> Sample:
    """All forms with one seed."""
    torch.set_num_threads(1)
    began, model = time.monotonic(), adapted(seed)
    first, before = effective(model), heldout_loss(model)
    reference, errors, loss = play_reference(setting, seed)
    sample: Sample = {"setting": setting.name, "seed": seed, "before": before, "factor_errors": errors, REFERENCE: loss}
    for form in FORMS[1:]:
        seen, sample[form] = play(setting, seed, form)
        ends = ((seen[0], reference[0]), (seen[-1], reference[-1]))
        sample[f"distance, {form}"] = [distance(ours, theirs, first) for ours, theirs in ends]
    return {**sample, "seconds": round(time.monotonic() - began, 1)}


def interval(values: Sequence[float], digits: int = 4, sign: str = "") -> str:
    """Mean and half the width of its 95 % interval."""
    half = _T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{sign}.{digits}f} ± {half:.{digits}f}"


def report(session: dict[str, Any], samples: Sequence[Sample]) -> str:
    parts = [
        f"Measured {session['session'][:10]} on {session['machine']}.\n\n```\n"
        f"PYTHONPATH=tests/support .venv/bin/python {session['command']}\n```"
    ]
    for setting in SETTINGS:
        mine = [each for each in samples if each["setting"] == setting.name]
        if mine:
            parts.append(_table(setting, mine))
    return "\n\n".join(parts)


def _table(setting: Setting, samples: Sequence[Sample]) -> str:
    errors = [error for each in samples for error in each["factor_errors"]]
    words = (
        f"**{setting.name}**: {setting.rounds} rounds of {setting.sync_every} steps, inner lr {setting.lr:g}, "
        f"{len(samples)} seeds. The product of the mean factors misses the mean product by "
        f"{statistics.fmean(errors):.1%} of it in the mean round, by {max(errors):.1%} in the worst. Held-out loss "
        f"before: {interval([each['before'] for each in samples], 3)}."
    )
    rows = []
    for form in FORMS:
        losses, apart = [each[form] for each in samples], ["-", "-"]
        if form in ("exact", "mean"):
            apart = [f"{statistics.fmean(each[f'distance, {form}'][end] for each in samples):.1e}" for end in (0, 1)]
        behind = [each[form] - each[REFERENCE] for each in samples]
        rows.append([form, interval(losses), "-" if form == REFERENCE else interval(behind, sign="+"), *apart])
    columns = ["form", "held-out, nats per byte", "more than full-rank", "weights apart, round 1", "at the end"]
    return f"{words}\n\n{markdown(columns, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="default 5")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-adapters.jsonl")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/recipes/adapters.md")
    given = parser.parse_args()
    results = Results("adapters", given.results)
    results.begin([], vars(given))
    jobs = [(setting, seed) for setting in SETTINGS for seed in range(given.seeds)]
    with ProcessPoolExecutor(given.processes) as pool:
        for sample in pool.map(measure, *zip(*jobs, strict=True)):
            results.add(**sample)
            print(sample["seconds"], sample["setting"], [round(sample[form], 4) for form in FORMS], flush=True)
    session, samples = results.newest()
    text = report(session, samples)
    print(text)
    if given.docs:
        publish("adapters", text, None, _DOCUMENT)


if __name__ == "__main__":
    main()
