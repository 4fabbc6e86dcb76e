"""One run of the quality benchmark: through the product on virtual time, or by a loop that knows nothing of it.

Replicas are threads of one process that run one at a time (tests/support/virtual_time.py), so that the same seed gives
the same bits also where replicas are slow, stall or are killed. An inner step takes one virtual second. Rounds,
averages, late work, restarts and scores are the product's own; the bucket is in memory.
"""

import functools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from virtual_time import Killed, VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.codecs.table import CODECS
from diloco_orchestrator.config import make_config
from diloco_orchestrator.demo.text import Corpus, load_corpus
from diloco_orchestrator.inspection.status import RoundRow, RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.process import EXIT_PREEMPTED
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.store.memory import MemoryStore
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext
from replica.process.run_attempt import train as run_training

Sample = dict[str, Any]

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # of an arm that names none; the product's defaults
RESTART_S = 20.0  # virtual, from a kill to the next attempt
_PRETRAINING_SEED = 1000  # added to the seed of the run


@dataclass(frozen=True)
class Size:
    """How much is trained, the same in every arm: `batch` windows a step of all replicas together."""

    steps: int = 960  # inner steps of each replica
    batch: int = 32
    context: int = 32  # bytes
    items: int = 256  # held-out windows
    width: int = 32
    blocks: int = 1
    learning_rate: float = 3e-3
    warm_up: int = 40  # steps; then a cosine down to a tenth
    pretraining: int = 1500  # data-parallel steps from which every arm of a seed begins; 0 = none
    pretraining_rate: float = 1e-2

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        done = min(1.0, max(0, step - self.warm_up) / max(1, self.steps - self.warm_up))
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up) * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Arm:
    """One way to train. `program`: "product", "reference" (DiLoCo as a plain loop) or "data-parallel"."""

    name: str
    replicas: int = 4
    sync_every: int = 30
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run; a plain loop reads `outer`
    program: str = "product"
    slow: float = 1.0  # virtual seconds of an inner step of the last replica
    stalls: float = 0.0  # chance that a replica stalls in a round
    stall: float = 2.5  # rounds that it stalls for
    kills: int = 0  # rounds between kills of a replica; 0 = none
    scales: tuple[tuple[int, int], ...] = ()  # (after how many inner steps, replicas from then on), with max_replicas
    # Whether what a codec of few bits loses is added to nothing, which no setting of a run allows.
    forgets: bool = False
    muon: bool = False  # whether Muon trains the matrices between the embeddings, and AdamW the rest

    @property
    def outer_lr(self) -> float:
        return float(self.settings.get("outer", {}).get("lr", OUTER_LR))

    def key(self) -> dict[str, Any]:
        """What a sample depends on, beside size and seed."""
        added = {
            "forgets": False,
            "stall": 2.5,
            "muon": False,
            "scales": (),
        }  # fields that samples from before do not have
        return {name: value for name, value in asdict(self).items() if value != added.get(name)}


# -- the workload ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer: causal attention with two heads, then a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, width) -> (B, T, width)."""
        count, length, width = x.shape
        heads = self.attention(self.before_attention(x)).view(count, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        forward: torch.Tensor = self.down(nn.functional.relu(self.up(self.before_forward(x))))
        return x + forward


class ByteTransformer(nn.Module):
    """Logits of the next byte. Input and output embeddings are tied."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, size.width)
        self.places = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.blocks)))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """(B, T) int64 -> (B, T, 256) float32."""
        hidden = self.norm(self.blocks(self.embed(windows) + self.places[: windows.shape[1]]))
        logits: torch.Tensor = hidden @ self.embed.weight.T
        return logits


def losses(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Nats of every byte but the first: (B, T + 1) int64 -> (B, T) float32."""
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def score(model: nn.Module, items: Sequence[str]) -> list[float]:
    """Mean nats per byte of each window."""
    windows = torch.tensor([list(item.encode("latin-1")) for item in items])
    return [float(value) for value in losses(model, windows).mean(dim=1)]


class Windows:
    """Batches of random windows of this replica's text, without end; batch k depends on seed, replica and k alone."""

    def __init__(self, size: Size, seed: int, replica_id: int, replicas: int) -> None:
        self._text = torch.frombuffer(bytearray(corpus().shard(replica_id, replicas)), dtype=torch.uint8)
        self._count, self._length = size.batch // replicas, size.context + 1
        self._seed, self._next = 100 * seed + replica_id, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._next)
            starts = torch.randint(0, len(self._text) - self._length, (self._count,), generator=generator)
            self._next += 1
            yield self._text[starts[:, None] + torch.arange(self._length)].long()

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]


@functools.cache
def corpus() -> Corpus:
    return load_corpus()


Optimizers = Sequence[torch.optim.Optimizer]


def new_model(size: Size, seed: int, *, muon: bool = False) -> tuple[ByteTransformer, Optimizers]:
    """The model from which every arm of a seed begins, and its inner optimizers without state."""
    model = ByteTransformer(size)
    model.load_state_dict(pretrained(size, seed))
    return model, inner_optimizers(model, size, muon=muon)


@functools.cache
def pretrained(size: Size, seed: int) -> dict[str, torch.Tensor]:
    """Parameters after the data-parallel steps before all arms, with windows that no arm takes."""
    torch.manual_seed(seed)
    model = ByteTransformer(size)
    optimizers = inner_optimizers(model, size)
    before = replace(size, steps=size.pretraining, learning_rate=size.pretraining_rate)
    batches = iter(Windows(size, seed + _PRETRAINING_SEED, 0, 1))
    for step in range(size.pretraining):
        inner_step(model, optimizers, next(batches), before.rate(step))
    return model.state_dict()


def inner_optimizers(model: nn.Module, size: Size, *, muon: bool = False) -> Optimizers:
    """AdamW; with `muon` for embeddings and norms only, and Muon with steps as large as AdamW's for the matrices."""
    matrices = [p for name, p in model.named_parameters() if muon and p.ndim == 2 and name.startswith("blocks")]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    settings = {"lr": size.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
    adamw = torch.optim.AdamW(others, fused=True, **settings)  # type: ignore[arg-type]
    if not muon:
        return [adamw]
    return [adamw, torch.optim.Muon(matrices, lr=size.learning_rate, adjust_lr_fn="match_rms_adamw")]


def inner_step(model: nn.Module, optimizers: Optimizers, batch: torch.Tensor, rate: float) -> float:
    """One step at a learning rate; returns the loss."""
    loss = losses(model, batch).mean()
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return float(loss.detach())


# -- through the product -----------------------------------------------------------------------------------------------


class ProductRun:
    """A run of the product on virtual time."""

    def __init__(self, arm: Arm, size: Size, seed: int) -> None:
        self.arm, self.size, self.seed = arm, size, seed
        self.world = VirtualTime()
        self.store = MemoryStore()
        self.killed: set[int] = set()  # rounds
        self.running: set[int] = set()  # replicas
        self.attempts: Counter[int] = Counter()  # the newest of each replica
        self.wanted: int = arm.settings.get("max_replicas", arm.replicas)  # replicas from this id on leave
        self.stalled: set[tuple[int, int]] = set()  # (replica, round)
        steps = arm.sync_every // arm.settings.get("fragments", 1)
        values = {
            "entrypoint": "quality_runs:train",
            "replicas": arm.replicas,
            "rounds": size.steps // steps,
            "sync_every": arm.sync_every,
            "snapshot_every": 10,
            "seed": seed,
            "guard": "off",  # it scores all the same
            "timing": {"poll_s": 0.5},
            **arm.settings,
        }
        stamp = Stamp("quality", lambda: 0.0)
        run = Run(**stamp(), run_id="quality", config=make_config(values), package_version="0")
        create_run(self.store, run, "quality", stamp)

    def play(self) -> Sample:
        """Train to the end; held-out scores and contributions are read from the run's records."""
        for replica_id in range(self.arm.replicas):
            self._start(replica_id, 1, 0.0)
        for step, replicas in self.arm.scales:  # an inner step takes one virtual second
            self.world.at(float(step), functools.partial(self._scale, replicas))
        self.world.run()
        reader = RunReader(self.store)
        rows, status = reader.rows(), reader.status()
        if status.state != "completed":
            raise RuntimeError(f"{self.arm.name}, seed {self.seed}: the run ended as {status.state}: {status.reason}")
        scores = [self._heldout(row.round) for row in rows]
        averaged = [(c, answer) for c in reader.commits() for answer in c.answers if answer.averaged]
        late = [origin for c, answer in averaged for origin in answer.origins if origin.round < c.round]
        return {
            "heldout": scores[-1],
            "curve": [[before, score] for before, score in zip(steps_before(rows), scores, strict=True)],
            "averaged": len(averaged),
            "carried": len(late),
            "steps": sum(origin.steps for _, answer in averaged for origin in answer.origins),
            "kills": len(self.killed),
            "stalls": len(self.stalled),
            "duration": self.world.now,
        }

    def _heldout(self, round_: int) -> float:
        """The mean over the held-out items of a round's base, in nats. A row's own clips shares that deviate."""
        found = [keys.contribution(round_, i) for i in range(self.arm.settings.get("max_replicas", self.arm.replicas))]
        listed = {info.key for info in self.store.list(keys.contributions(round_))}
        there = [key for key in found if key in listed]
        manifests = [Contribution.from_bytes(self.store.get(key), key) for key in there]
        by_share = {each.share: each for manifest in manifests for each in manifest.scores}
        sums = [each.sum for each in by_share.values() if each.sum is not None]
        return -math.fsum(sums) / sum(each.count for each in by_share.values())

    def _scale(self, replicas: int) -> None:
        """Start the replicas that are missing; those above get a notice, publish what they have and leave."""
        self.wanted = replicas
        for replica_id in set(range(replicas)) - self.running:
            self._start(replica_id, self.attempts[replica_id] + 1, self.world.now)

    def _start(self, replica_id: int, number: int, at: float) -> None:
        self.running.add(replica_id)
        self.attempts[replica_id] = number
        name = f"replica {replica_id}.{number}"
        self.world.spawn(name, lambda clock: self._attempt(clock, replica_id, number), at)

    def _attempt(self, clock: VirtualClock, replica_id: int, number: int) -> None:
        stamp = Stamp(f"token {replica_id}.{number}", clock.wall_time)
        background = VirtualBackground(clock)
        attempt = claim_attempt(
            self.store, replica_id, None, clock, stamp, lambda: replica_id >= self.wanted, background
        )
        assert attempt.number == number, "attempts of a replica begin one after the other"
        ending = run_training(attempt, lambda _: lambda ctx: self._train(ctx, clock, number))
        if clock.process.killed:
            raise Killed(clock.process.name)
        if ending.code == EXIT_PREEMPTED:
            self.running.discard(replica_id)
        elif ending.code:
            raise RuntimeError(ending.error or ending.reason)

    def _train(self, ctx: ReplicaContext, clock: VirtualClock, number: int) -> None:
        """The training function, and what happens to its process."""
        model, optimizers = new_model(self.size, self.seed, muon=self.arm.muon)
        items = corpus().heldout_items(self.size.items, self.size.context + 1)
        data = Windows(self.size, self.seed, ctx.replica_id, ctx.replicas)
        pace = self.arm.slow if ctx.replica_id == ctx.replicas - 1 else 1.0
        middle = ctx._attempt.config.round_steps // 2
        with ctx.attach(model, optimizers, heldout=score, heldout_items=items, in_loop="loss") as replica:
            for batch in replica.batches(data):
                clock.sleep(pace)
                if replica.step_count % ctx._attempt.config.round_steps == middle:
                    self._maybe_disturb(replica.round, ctx.replica_id, number, clock)
                loss = inner_step(model, optimizers, batch, self.size.rate(replica.step_count))
                replica.observe(loss=loss, tokens=batch.numel())

    def _maybe_disturb(self, round_: int, replica_id: int, number: int, clock: VirtualClock) -> None:
        arm = self.arm
        if arm.kills and round_ % arm.kills == 0 and replica_id == round_ // arm.kills % arm.replicas:
            if round_ not in self.killed:
                self.killed.add(round_)
                self.world.kill(clock.process)
                self._start(replica_id, number + 1, self.world.now + RESTART_S)
                clock.sleep(0.0)  # here the process ends
        elif (replica_id, round_) not in self.stalled and self._stalls(replica_id, round_):
            self.stalled.add((replica_id, round_))
            clock.sleep(arm.stall * arm.sync_every)

    def _stalls(self, replica_id: int, round_: int) -> bool:
        return random.Random(f"{self.seed} {replica_id} {round_}").random() < self.arm.stalls


def steps_before(rows: Sequence[RoundRow]) -> list[int]:
    """Outer steps in the base that each round scores."""
    return [0, *(row.outer_step for row in rows[:-1])]


# -- without the product -----------------------------------------------------------------------------------------------


def reference(arm: Arm, size: Size, seed: int) -> Sample:
    """DiLoCo (arXiv 2311.08105, algorithm 1) as a plain loop, one replica after another.

    The outer step is written out: `torch.optim.SGD` may fuse multiply and add, and a last bit that differs in one round
    has become 3e-4 nats after thirty.
    """
    items = corpus().heldout_items(size.items, size.context + 1)
    base, _ = new_model(size, seed)
    momenta = [torch.zeros_like(p) for p in base.parameters()]
    replicas = [new_model(size, seed) for _ in range(arm.replicas)]
    batches = [iter(Windows(size, seed, i, arm.replicas)) for i in range(arm.replicas)]
    curve: list[list[float]] = []
    for begin in range(0, size.steps, arm.sync_every):
        curve.append([len(curve), mean_score(base, items)])
        deltas = [torch.zeros_like(p) for p in base.parameters()]
        for (model, optimizers), data in zip(replicas, batches, strict=True):
            model.load_state_dict(base.state_dict())
            for step in range(begin, begin + arm.sync_every):
                inner_step(model, optimizers, next(data), size.rate(step))
            for delta, ours, theirs in zip(deltas, base.parameters(), model.parameters(), strict=True):
                delta += (ours.detach() - theirs.detach()) / arm.replicas
        with torch.no_grad():
            for parameter, momentum, delta in zip(base.parameters(), momenta, deltas, strict=True):
                momentum.copy_(OUTER_MOMENTUM * momentum + delta)
                parameter.sub_(arm.outer_lr * (delta + OUTER_MOMENTUM * momentum))
    last = mean_score(base, items)
    return {"heldout": last, "curve": [*curve, [len(curve), last]]}


def data_parallel(arm: Arm, size: Size, seed: int) -> Sample:
    """One model, whose every step takes the windows of all replicas."""
    items = corpus().heldout_items(size.items, size.context + 1)
    model, optimizers = new_model(size, seed)
    batches = [iter(Windows(size, seed, i, arm.replicas)) for i in range(arm.replicas)]
    curve = []
    for step in range(size.steps):
        if step % arm.sync_every == 0:
            curve.append([step // arm.sync_every, mean_score(model, items)])
        inner_step(model, optimizers, torch.cat([next(data) for data in batches]), size.rate(step))
    last = mean_score(model, items)
    return {"heldout": last, "curve": [*curve, [len(curve), last]]}


@torch.no_grad()
def mean_score(model: nn.Module, items: Sequence[str]) -> float:
    return math.fsum(score(model, items)) / len(items)


@contextmanager
def without_feedback(codec: str) -> Iterator[None]:
    """Context in which a codec's residuals are dropped."""
    known = CODECS[codec]
    CODECS[codec] = replace(known, feedback=0.0)
    try:
        yield
    finally:
        CODECS[codec] = known


def play(arm: Arm, size: Size, seed: int) -> Sample:
    """Train one arm with one seed."""
    torch.set_num_threads(1)
    began = time.process_time()
    if arm.program == "product":
        with without_feedback(arm.settings["codec"]) if arm.forgets else nullcontext():
            found = ProductRun(arm, size, seed).play()
    else:
        found = {"reference": reference, "data-parallel": data_parallel}[arm.program](arm, size, seed)
    return {"arm": arm.name, "seed": seed, **found, "cpu_s": round(time.process_time() - began, 1)}
