"""The best small language model that two CPU cores train in an hour; with `--scale gpu`, four GPUs in two clouds.

    python examples/speedrun/speedrun.py runs/speedrun                # two replicas here: an hour on two quiet cores
    python examples/speedrun/speedrun.py s3://bucket/runs/speedrun --scale gpu --text s3://bucket/text --plan
    python examples/speedrun/speedrun.py s3://bucket/runs/speedrun --scale gpu --text s3://bucket/text

A Llama over BPE tokens, Muon for its matrices, AdamW for the rest. The text is the Python standard library's source, or
every file below `--text`, a folder or whatever fsspec opens. What is reported is held-out bits per byte, which does
not depend on the tokenizer. README.md beside this file has the results.
"""

import argparse
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from diloco_orchestrator import HFJobsExecutor, MixedExecutor, ModalExecutor, launch, plan_launch
from diloco_orchestrator.demo.text import load_corpus

END = "<|end|>"  # between two files
HELDOUT_ITEMS = 128


@dataclass(frozen=True)
class Scale:
    """A model, its batches, and a run that fits the machines."""

    width: int
    layers: int
    context: int  # tokens
    vocabulary: int
    batch: int  # windows of `context` tokens in an inner step
    matrix_lr: float  # Muon's
    other_lr: float  # AdamW's, for embeddings and norms
    replicas: int
    rounds: int
    sync_every: int


SCALES = {
    "cpu": Scale(
        width=192, layers=4, context=256, vocabulary=4096, batch=8, matrix_lr=6e-3, other_lr=4e-3,
        replicas=2, rounds=80, sync_every=40,
    ),
    "gpu": Scale(
        width=768, layers=12, context=1024, vocabulary=32768, batch=64, matrix_lr=6e-3, other_lr=2e-3,
        replicas=4, rounds=100, sync_every=50,
    ),
}  # fmt: skip


def train(ctx: Any) -> None:
    """The training function of every replica."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the order in which BPE counts is then the same everywhere
    scale = SCALES[ctx.args["scale"]]
    training, heldout = texts(ctx.args.get("text"), ctx.replica_id, ctx.replicas)
    tokenizer = bpe(heldout.sample, scale.vocabulary)
    model = build_model(scale).to(ctx.device)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=scale.matrix_lr, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=scale.other_lr, betas=(0.9, 0.95), weight_decay=0.01)
    batches = Windows(encode(tokenizer, training), scale, ctx.seed + ctx.replica_id)
    nats_per_byte = Scorer(tokenizer, scale.context)
    bytes_per_token = sum(map(len, training)) / len(batches.tokens)
    with ctx.attach(
        model,
        [muon, adamw],
        heldout=nats_per_byte,
        heldout_items=heldout.items,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END),
    ) as replica:
        for batch in replica.batches(batches):
            pace = learning_rate(replica.step_count / ctx.total_steps)
            muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = pace * scale.matrix_lr, pace * scale.other_lr
            loss = token_losses(model, batch.to(ctx.device)).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            muon.step()
            adamw.step()
            model.zero_grad(set_to_none=True)
            replica.observe(loss=loss.item() / bytes_per_token, tokens=batch[:, 1:].numel())


def learning_rate(progress: float) -> float:
    """The factor of both learning rates when `progress` of the run, 0 to 1, is done: up in 2 %, down in the last 60."""
    return min(1.0, (progress + 1e-3) / 0.02, (1 - progress) / 0.6 + 0.02)


def build_model(scale: Scale) -> nn.Module:
    """A Llama with random weights, heads of 64 or 48 numbers, and one matrix for embedding and head."""
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=scale.vocabulary,
            hidden_size=scale.width,
            intermediate_size=scale.width * 8 // 3,
            num_hidden_layers=scale.layers,
            num_attention_heads=max(4, scale.width // 64),
            max_position_embeddings=scale.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
        )
    )


def token_losses(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """The cross-entropy in nats of every token but the first: (B, T) float32. `windows`: (B, T + 1) int64."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.device.type == "cuda"):
        logits = model(input_ids=windows[:, :-1]).logits  # (B, T, V)
    return nn.functional.cross_entropy(logits.float().transpose(1, 2), windows[:, 1:], reduction="none")


class Scorer:
    """Mean nats per byte of each held-out item: bits per byte times ln 2."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context

    def __call__(self, model: nn.Module, items: Sequence[str]) -> list[float]:
        """One number per item, in their order. The bytes of an item's first token are given, not scored."""
        device = next(model.parameters()).device
        coded = [self.tokenizer.encode(item) for item in items]
        cuts = [each.offsets[: self.context + 1] for each in coded]
        sizes = [len(item[cut[0][1] : cut[-1][1]].encode()) for item, cut in zip(items, cuts, strict=True)]
        windows = torch.zeros(len(items), self.context + 1, dtype=torch.int64)
        for row, each, cut in zip(windows, coded, cuts, strict=True):
            row[: len(cut)] = torch.tensor(each.ids[: len(cut)])
        ends = torch.tensor([len(cut) - 1 for cut in cuts])  # beyond them a row is padding
        scored = torch.arange(self.context) < ends[:, None]
        losses = torch.cat([token_losses(model, part.to(device)).cpu() for part in windows.split(16)])
        return [nats / size for nats, size in zip((losses * scored).sum(dim=1).tolist(), sizes, strict=True)]


class Windows:
    """Batches of windows of a replica's tokens; every epoch is a new order of windows cut at another offset.

    Batch k depends on the seed and k alone; k is the position that a restarted replica goes on from.
    """

    def __init__(self, tokens: torch.Tensor, scale: Scale, seed: int) -> None:
        self.tokens, self.scale, self.seed, self.next = tokens, scale, seed, 0
        self.in_epoch = (len(tokens) - 1 - scale.context) // scale.context // scale.batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        epoch, starts = -1, torch.empty(0)
        while True:
            at, self.next = self.next, self.next + 1
            if at // self.in_epoch != epoch:
                epoch = at // self.in_epoch
                draw = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
                offset = torch.randint(self.scale.context, (1,), generator=draw)
                count = self.in_epoch * self.scale.batch
                starts = offset + self.scale.context * torch.randperm(count, generator=draw)
            first = at % self.in_epoch * self.scale.batch
            chosen = starts[first : first + self.scale.batch, None] + torch.arange(self.scale.context + 1)
            yield self.tokens[chosen].long()  # (batch, context + 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next = state["next"]


@dataclass(frozen=True)
class Heldout:
    """What every replica reads: the held-out items, and a sample of training text that the tokenizer is made of."""

    items: list[str]
    sample: list[str]


def texts(url: str | None, replica_id: int, replicas: int) -> tuple[list[bytes], Heldout]:
    """The training files of one replica, and what all read. Of `url` a 32nd of the files is held out."""
    if url is None:
        corpus = load_corpus()
        training, heldout = list(corpus.training), list(corpus.heldout)
        own, sample = training[replica_id::replicas], training[::4]
    else:
        files = sorted(fsspec.open_files(f"{url}/**", "rb"), key=lambda f: hashlib.sha256(f.path.encode()).hexdigest())
        count = math.ceil(len(files) / 32)
        heldout, sample = read(files[:count], 2**20), read(files[count : count + 16], 2**20)
        own = read(files[count + replica_id :: replicas])
    text = b"\n".join(heldout).decode("utf-8", "replace")
    stride = len(text) // HELDOUT_ITEMS
    items = [text[k * stride : k * stride + 1024] for k in range(HELDOUT_ITEMS)]
    return own, Heldout(items, [each.decode("utf-8", "replace") for each in sample])


def read(files: Sequence[Any], limit: int = -1) -> list[bytes]:
    """The first `limit` bytes of each file; all of it by default."""
    found = []
    for file in files:
        with file as opened:
            found.append(opened.read(limit))
    return found


def bpe(sample: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocabulary` tokens, made from `sample`; token 0 stands between files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, files: Sequence[bytes]) -> torch.Tensor:
    """The tokens of all files, each after a separator: (T,) int32."""
    tokens: list[int] = []
    for text in files:
        tokens += [0, *tokenizer.encode(text.decode("utf-8", "replace")).ids]
    return torch.tensor(tokens, dtype=torch.int32)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("store", help="where the run is kept: a folder or a bucket's URL")
    arguments.add_argument("--scale", choices=sorted(SCALES), default="cpu")
    arguments.add_argument("--text", help="a folder or URL of UTF-8 files; default: the standard library's source")
    arguments.add_argument("--rounds", type=int, help="other than the scale's")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--plan", action="store_true", help="only print what would be launched, and its price")
    given = arguments.parse_args()
    scale = SCALES[given.scale]
    options: dict[str, Any] = {
        "replicas": scale.replicas,
        "rounds": given.rounds or scale.rounds,
        "sync_every": scale.sync_every,
        "seed": given.seed,
        "outer": {"lr": 0.7, "momentum": 0.5},  # README.md has what .8 and .9 came to
        "codec": "int4",
        "args": {"scale": given.scale} | ({"text": given.text} if given.text else {}),
    }
    if given.scale == "cpu":
        options["replica_state"] = "round"  # so that `diloco audit` can train any of them again
    else:
        keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if name in os.environ}
        two_clouds = MixedExecutor([(ModalExecutor(gpu="H100"), 2), (HFJobsExecutor(hardware="h200"), 2)])
        options |= {"executor": two_clouds, "secrets": keys, "max_cost_usd": 40}
    if given.plan:
        parameters = sum(p.numel() for p in build_model(scale).parameters())
        plan = plan_launch("speedrun:train", given.store, round_s=36.0, parameters=parameters, **options)
        print(*plan.lines(), sep="\n")
        return
    result = launch("speedrun:train", store=given.store, **options).wait()
    first, last = result.metrics[0].heldout, result.metrics[-1].heldout
    print(f"held-out bits per byte: {first / math.log(2):.3f} -> {last / math.log(2):.3f} ({result.status})")


if __name__ == "__main__":
    main()
