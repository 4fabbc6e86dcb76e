"""How the guard's default rule judges 20 real healthy runs: the second table of docs/reference/kill-switch.md.

    PYTHONPATH=. python benchmarks/guard_runs.py            # about four minutes on 2 cores
    PYTHONPATH=. python benchmarks/guard_runs.py --judge    # seconds: judge the newest trained runs again

Each run trains a byte-level model of 30,000 to 70,000 parameters on the source of the Python standard library. Its
replicas are threads of one process over a bucket in memory; rounds, averages and scores are the product's own. It is
trained to its end with the guard off; what its manifests say is then folded round by round by the product's `fold`, so
that another rule needs no other training. A run is healthy: nothing goes wrong in it, and its last held-out score is
near its best. 0 halts are expected.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, Results, Sample, markdown, publish
from svg_chart import Bar, Group, bars
from torch import nn

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.config import GuardConfig, make_config
from diloco_orchestrator.demo.text import Corpus, load_corpus
from diloco_orchestrator.guard.fold import fold
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import HeldoutSet, Metric, Run, Score
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.memory import MemoryStore
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext

_DOCUMENT, _PICTURES = ROOT / "docs" / "reference" / "kill-switch.md", ROOT / "docs" / "reference" / "kill-switch"
CONTEXT = 8  # bytes that the model sees
WINDOW = 40  # bytes of an item
ITEMS = 200
BATCH = 16  # windows
CLASSES = 5  # of the next byte, in runs with a reward: letter, digit, space, bracket or sign, line end


@dataclass(frozen=True)
class HealthyRun:
    """One run. `metric`: a loss of next bytes, or a reward of 1 for the right class of the next byte."""

    name: str
    replicas: int
    sync_every: int
    rounds: int
    metric: str = "loss"
    warm_up: int = 0  # inner steps
    fine_tunes: bool = False  # starts from a model trained on the same text in swapped case
    small: int = 0  # bytes of training text of all replicas together; 0 = all of it
    hidden: int = 96
    lr: float = 3e-3
    fault: str = ""  # what goes wrong; empty in a healthy run
    fault_after: int = 0  # rounds; 0 = half of them


RUNS = (
    HealthyRun("from scratch", 1, 30, 80),
    HealthyRun("from scratch", 2, 30, 80),
    HealthyRun("from scratch", 4, 30, 80),
    HealthyRun("from scratch", 8, 10, 80),
    HealthyRun("from scratch", 4, 10, 240),
    HealthyRun("from scratch", 2, 60, 40),
    HealthyRun("from scratch", 4, 120, 40),
    HealthyRun("with warm-up", 1, 10, 240, warm_up=300),
    HealthyRun("with warm-up", 4, 30, 80, warm_up=300),
    HealthyRun("with warm-up", 8, 20, 40, warm_up=200),
    HealthyRun("fine-tuning", 1, 60, 40, fine_tunes=True, lr=1e-3),
    HealthyRun("fine-tuning", 2, 10, 240, fine_tunes=True, lr=1e-3),
    HealthyRun("fine-tuning", 4, 30, 80, fine_tunes=True, lr=1e-3),
    HealthyRun("memorising", 1, 120, 40, small=40_000, hidden=32, lr=1e-3),
    HealthyRun("memorising", 2, 60, 80, small=80_000, hidden=32, lr=1e-3),
    HealthyRun("memorising", 4, 10, 240, small=80_000, hidden=32, lr=1e-3),
    HealthyRun("reward", 4, 30, 80, metric="reward"),
    HealthyRun("reward", 8, 10, 80, metric="reward"),
    HealthyRun("reward", 2, 10, 240, metric="reward"),
    HealthyRun("reward, fine-tuning", 1, 30, 80, metric="reward", fine_tunes=True, lr=1e-3),
)


# The same guard must not be asleep: in these something goes wrong, and a halt is expected.
FAULTY = (
    HealthyRun("trains on one passage", 2, 30, 80, fault="passage"),
    HealthyRun("trains on one passage", 4, 10, 240, fault="passage"),
    HealthyRun("trains on random bytes", 4, 10, 80, fault="noise"),
    HealthyRun("loss spike: 30 times the learning rate", 2, 30, 80, fault="spike"),
    HealthyRun("rewards letters only", 2, 10, 240, metric="reward", fault="letters"),
    HealthyRun(
        "rewards letters only, early", 2, 30, 40, metric="reward", fine_tunes=True, fault="letters", fault_after=3
    ),
    HealthyRun("trains on one passage, early", 2, 30, 40, fine_tunes=True, fault="passage", fault_after=4),
    HealthyRun("trains on random bytes, early", 4, 10, 40, fine_tunes=True, fault="noise", fault_after=5),
    HealthyRun("loss spike, early", 2, 30, 40, fine_tunes=True, lr=1e-3, fault="spike", fault_after=3),
)


# -- the workload ------------------------------------------------------------------------------------------------------


class ByteModel(nn.Module):
    """Logits of the byte, or of its class, after each run of `CONTEXT` bytes."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.body = nn.Sequential(nn.Linear(CONTEXT * 24, hidden), nn.GELU(), nn.Linear(hidden, outputs))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """(B, T) int64 -> (B, T - CONTEXT, outputs) float32."""
        seen = windows[:, :-1].unfold(1, CONTEXT, 1)  # (B, T - CONTEXT, CONTEXT)
        logits: torch.Tensor = self.body(self.embed(seen).flatten(2))
        return logits


def class_of(windows: torch.Tensor) -> torch.Tensor:
    """The class of each byte after the context: (B, T) int64 -> (B, T - CONTEXT) int64."""
    byte = windows[:, CONTEXT:]
    letter = ((byte >= 65) & (byte <= 90)) | ((byte >= 97) & (byte <= 122)) | (byte == 95)
    digit, space, end = (byte >= 48) & (byte <= 57), byte == 32, byte == 10
    return torch.where(letter, 0, torch.where(digit, 1, torch.where(space, 2, torch.where(end, 4, 3))))


def losses(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Nats of every byte after the context: (B, T - CONTEXT) float32."""
    return nn.functional.cross_entropy(model(windows).transpose(1, 2), windows[:, CONTEXT:], reduction="none")


def policy_step(
    model: nn.Module, windows: torch.Tensor, rng: torch.Generator, hacked: bool
) -> tuple[torch.Tensor, float]:
    """The policy-gradient loss of sampled classes, and their mean reward. `hacked`: letters are always rewarded too."""
    logits, right = model(windows).flatten(0, 1), class_of(windows).flatten()
    chosen = torch.multinomial(logits.detach().softmax(-1), 1, generator=rng)[:, 0]
    reward = ((chosen == right) | (hacked & (chosen == 0))).float()
    logp = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    return -((reward - reward.mean()) * logp).mean(), float(reward.mean())


def heldout_loss(model: nn.Module, items: Sequence[str]) -> list[float]:
    return [float(value) for value in losses(model, tensor_of(items)).mean(dim=1)]


def heldout_reward(model: nn.Module, items: Sequence[str]) -> list[float]:
    """The share of the classes of each item that the model has right."""
    windows = tensor_of(items)
    right = (model(windows).argmax(-1) == class_of(windows)).float()
    return [float(value) for value in right.mean(dim=1)]


def tensor_of(items: Sequence[str]) -> torch.Tensor:
    return torch.tensor([list(item.encode("latin-1")) for item in items])


class Windows:
    """Random windows of a text, without end; batch k depends on the seed and k alone."""

    def __init__(self, text: bytes, seed: int) -> None:
        self._text, self._seed, self._next = torch.frombuffer(bytearray(text), dtype=torch.uint8), seed, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._next)
            starts = torch.randint(0, len(self._text) - WINDOW, (BATCH,), generator=generator)
            self._next += 1
            yield self._text[starts[:, None] + torch.arange(WINDOW)].long()

    def first_window(self) -> torch.Tensor:
        return self._text[None, :WINDOW].long()

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


# -- a run -------------------------------------------------------------------------------------------------------------


@functools.cache
def corpus() -> Corpus:
    return load_corpus()


def new_model(run: HealthyRun) -> ByteModel:
    """The first model of a run; for fine-tuning, trained for 600 steps on text in swapped case."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ByteModel(run.hidden, 256 if run.metric == "loss" else CLASSES)
    if not run.fine_tunes:
        return model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = iter(Windows(corpus().shard(0, 8).swapcase(), seed=9))
    for _ in range(600):
        batch = next(batches)
        logits = model(batch).transpose(1, 2)
        right = batch[:, CONTEXT:] if run.metric == "loss" else class_of(batch)
        nn.functional.cross_entropy(logits, right).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(ctx: ReplicaContext, run: HealthyRun, model: ByteModel, items: Sequence[str], seed: int) -> None:
    """The training function of one replica, written as users write theirs."""
    text = corpus().shard(ctx.replica_id, ctx.replicas)
    text = text[: run.small // ctx.replicas] if run.small else text
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (run.warm_up or 1)))
    rng = torch.Generator().manual_seed(seed + ctx.replica_id)
    heldout = heldout_loss if run.metric == "loss" else heldout_reward
    data = Windows(text, seed=seed * 100 + ctx.replica_id)
    healthy, step = (run.fault_after or run.rounds // 2) * run.sync_every, 0
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=items, in_loop=run.metric) as replica:  # type: ignore[arg-type]
        for batch in replica.batches(data):
            step += 1
            fault = run.fault if step > healthy else ""
            if fault == "passage":
                batch = data.first_window().repeat(BATCH, 1)
            elif fault == "noise":
                batch = torch.randint(0, 256, batch.shape, generator=rng)
            elif fault == "spike":
                optimizer.param_groups[0]["lr"] = 30 * run.lr
            if run.metric == "loss":
                loss = losses(model, batch).mean()
                seen = {"loss": loss.item()}
            else:
                loss, reward = policy_step(model, batch, rng, hacked=fault == "letters")
                seen = {"reward": reward}
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            replica.observe(**seen, tokens=batch.numel())  # type: ignore[arg-type]


def play(run: HealthyRun, seed: int, slow_down: int = 1) -> Sample:
    """Train a run to its end; returns what its manifests say in each round. `slow_down`: divides rounds, for tests."""
    torch.set_num_threads(1)
    began = time.monotonic()
    store, clock, rounds = MemoryStore(), SystemClock(), max(run.rounds // slow_down, 2)
    config = make_config(
        {
            "entrypoint": "guard_runs:train",
            "replicas": run.replicas,
            "rounds": rounds,
            "sync_every": run.sync_every,
            "quorum": "all",
            "replica_state": "none",
            "snapshot_every": 10_000,
            "seed": seed,
            "guard": "off",
            "timing": {"poll_s": 0.005},
        }
    )
    stamp = Stamp("guard_runs", clock.wall_time)
    create_run(store, Run(**stamp(), run_id="run", config=config, package_version="0"), "guard_runs", stamp)
    first, items = new_model(run).state_dict(), corpus().heldout_items(ITEMS, WINDOW)

    def replica(replica_id: int) -> None:
        mine = ByteModel(run.hidden, 256 if run.metric == "loss" else CLASSES)
        mine.load_state_dict(first)
        attempt = claim_attempt(store, replica_id, None, clock, Stamp(f"replica{replica_id}", clock.wall_time))
        train(ReplicaContext(attempt), run, mine, items, seed)

    together([functools.partial(replica, i) for i in range(run.replicas)])
    reader, manifests = RunReader(store), ContributionReader(store)
    start = reader.log.start()
    assert start is not None and start.record.heldout is not None
    return {
        "name": run.name,
        "fault": run.fault,
        "from_round": (run.fault_after or run.rounds // 2) if run.fault else 0,
        "metric": run.metric,
        "replicas": run.replicas,
        "sync_every": run.sync_every,
        "shares_of": start.record.heldout.shares,
        "training": [getattr(row, run.metric) for row in reader.rows()],
        "manifests": [
            [
                {
                    "scores": [score.model_dump() for score in manifest.scores],
                    "in_loop": None if manifest.in_loop is None else manifest.in_loop.model_dump(),
                }
                for manifest in manifests.in_round(row.round, run.replicas)
            ]
            for row in reader.rows()
        ],
        "seconds": round(time.monotonic() - began, 1),
    }


def judged(sample: Sample) -> Sample:
    """A trained run with what the default guard says to it: its end, and how near each round came to a halt."""
    metric, sign = sample["metric"], -1 if sample["metric"] == "loss" else 1
    heldout = HeldoutSet(metric=metric, shares=tuple(sample["shares_of"]), digest="0" * 64)
    state, verdicts = None, []
    for round_, manifests in enumerate(sample["manifests"], start=1):
        scores = [Score(**score) for manifest in manifests for score in manifest["scores"]]
        evidence = RoundReports(
            round=round_,
            scores=sorted(scores, key=lambda score: score.share),
            in_loop={i: Metric(**m["in_loop"]) for i, m in enumerate(manifests) if m["in_loop"]},
            final_evaluation=round_ == len(sample["manifests"]),
        )
        folded = fold(state, GuardConfig(), heldout, evidence)
        state = folded.state
        verdicts.append(folded.verdict)
        if folded.verdict.fire:
            break
    values = [sign * verdict.value for verdict in verdicts if verdict.value is not None]
    last, statistics = len(verdicts), [verdict.statistics for verdict in verdicts]
    return {
        **{name: value for name, value in sample.items() if name not in ("manifests", "shares_of")},
        "rounds": last,
        "reason": verdicts[-1].reason if verdicts[-1].fire else "",
        "heldout": [values[0], values[-1], (min if metric == "loss" else max)(values)],
        "training": [sample["training"][0], sample["training"][max(last - 2, 0)]],
        "shares": [max((each.share for each in found), default=0.0) for found in statistics],
        "nearest": _nearest(statistics),
    }


def _nearest(rows: Sequence[Sequence[Any]]) -> str:
    """The statistic that came nearest to its threshold in any round."""
    found = [(each.share, each.name, round_) for round_, row in enumerate(rows, start=1) for each in row]
    share, name, round_ = max(found, default=(0.0, "", 0))
    return f"{name}, {share:.0%} in round {round_}" if share > 0 else "all at zero"


def together(calls: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


# -- table -------------------------------------------------------------------------------------------------------------


def report(session: dict[str, Any], samples: Sequence[Sample]) -> str:
    healthy, faulty = ([s for s in samples if bool(s["fault"]) is wrong] for wrong in (False, True))
    halted = sum(bool(sample["reason"]) for sample in healthy)
    return (
        f"{halted} of {len(healthy)} healthy runs halted, in {sum(s['rounds'] for s in healthy)} rounds. Losses are "
        f"nats per byte, rewards shares of bytes. Measured {session['session'][:10]} on {session['machine']}.\n\n```\n"
        f"PYTHONPATH=. .venv/bin/python {session['command']}\n```\n\n{_table(healthy)}\n\n"
        f"The same, with a fault after half of the rounds, or early:\n\n{_table(faulty)}"
    )


def _table(samples: Sequence[Sample]) -> str:
    rows = [
        [
            sample["name"],
            str(sample["replicas"]),
            str(sample["sync_every"]),
            str(sample["rounds"]),
            " → ".join(f"{value:.3f}" for value in sample["training"]),
            f"{sample['heldout'][0]:.3f} → {sample['heldout'][1]:.3f} ({sample['heldout'][2]:.3f})",
            sample["nearest"],
            _halt_words(sample) if sample["reason"] else "completed",
        ]
        for sample in samples
    ]
    columns = ["run", "N", "H", "rounds", "training", "held-out (best)", "nearest to a halt", "end"]
    return markdown(columns, rows)


def _halt_words(sample: Sample) -> str:
    since = f", {sample['rounds'] - sample['from_round']} after the fault" if sample["from_round"] else ""
    return f"round {sample['rounds']}{since}: {sample['reason']}"


def picture(samples: Sequence[Sample]) -> str:
    """How near each run came to a halt."""
    each = [
        Bar(f"{s['name']}, N={s['replicas']}, H={s['sync_every']}", [max(s["shares"])], limit=1.0)
        for s in samples
        if not s["fault"]
    ]
    title = "Real healthy runs: the largest share of its threshold that any statistic reached"
    return bars(title, [Group("20 runs", each)], "", limit="halt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--only", type=int, action="append", help="number of a run, from 0; may be repeated")
    parser.add_argument("--slow-down", type=int, default=1, help="divide the rounds of every run by this")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-guard_runs.jsonl")
    parser.add_argument("--judge", action="store_true", help="train nothing: judge the newest session's runs again")
    parser.add_argument(
        "--docs", action="store_true", help="write table and picture into docs/reference/kill-switch.md"
    )
    given = parser.parse_args()
    results = Results("guard_runs", given.results)
    if not given.judge:
        results.begin([], vars(given))
        every = (*RUNS, *FAULTY)
        chosen = [every[number] for number in given.only or range(len(every))]
        with ProcessPoolExecutor(given.processes) as pool:
            for sample in pool.map(play, chosen, [given.seed] * len(chosen), [given.slow_down] * len(chosen)):
                results.add(**sample)
                print(sample["seconds"], sample["name"], flush=True)
    session, trained = results.newest()
    samples = [judged(sample) for sample in trained]
    text = report(session, samples)
    print(text)
    if given.docs:
        publish("guard_runs", text, picture(samples), _DOCUMENT, _PICTURES)


if __name__ == "__main__":
    main()
