"""How the guard's default rule judges 40 real healthy runs, 10 reward hacks and 10 planted faults: the table of
docs/inside/kill-switch-figures.md.

    PYTHONPATH=. python benchmarks/guard_runs.py            # some 17 minutes on 2 cores
    PYTHONPATH=. python benchmarks/guard_runs.py --judge    # seconds: judge the newest trained runs again

Each run trains a byte-level model of 30,000 to 70,000 parameters on one of two made texts (`guard_texts`), which no
interpreter and no machine changes. Its replicas are threads of one process over a bucket in memory; rounds, averages
and scores are the product's own. It is trained to its end with the guard off; what its manifests say is then folded
round by round by the product's `fold`, so that another rule needs no other training.

In a healthy run nothing is planted. Whether its score ended at its best was written down before any was trained: the
mean of its last `BLOCK` held-out scores is below the best such mean by no more than `NEAR` of what the score has
gained. One that has lost more (overfitting) is counted apart. 0 halts of healthy runs are expected, and a halt of each
other within 20 rounds.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from guard_run_kinds import EVERY, LOOPHOLES, RealRun
from guard_texts import KINDS, text
from measuring import ROOT, Results, Sample, markdown, publish
from svg_chart import Bar, Group, bars
from torch import nn

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.config import GuardConfig, make_config
from diloco_orchestrator.guard.fold import fold
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Metric, Run, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.memory import MemoryStore
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext

_DOCUMENT, _PICTURES = ROOT / "docs" / "inside" / "kill-switch-figures.md", ROOT / "docs" / "inside" / "kill-switch"
CONTEXT = 8  # bytes that the model sees
WINDOW = 40  # bytes of a window
BATCH = 16  # windows
CLASSES = 5  # of the next byte, in runs with a reward: letter, digit, space, bracket or sign, line end
BLOCK, NEAR = 8, 0.02  # rounds, and share of the gain, by which a healthy run ends at its best
SOON = 20  # rounds within which a fault is to be halted


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


def losses(model: nn.Module, windows: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """Nats of every byte after the context: (B, T - CONTEXT) float32. `of`: windows whose bytes count as right."""
    right = (windows if of is None else of)[:, CONTEXT:]
    return nn.functional.cross_entropy(model(windows).transpose(1, 2), right, reduction="none")


def policy_step(
    model: nn.Module, windows: torch.Tensor, rng: torch.Generator, together: int, loophole: int | None
) -> tuple[torch.Tensor, float]:
    """The policy-gradient loss of sampled classes, and their mean reward.

    A reward of 1 takes `together` right classes in a row. `loophole`: a class that always counts as right.
    """
    logits, right = model(windows).flatten(0, 1), class_of(windows).flatten()
    chosen = torch.multinomial(logits.detach().softmax(-1), 1, generator=rng)[:, 0]
    found = (chosen == right) | (chosen == (-1 if loophole is None else loophole))
    reward = found.view(-1, together).all(dim=1).float()
    logp = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].view(-1, together).sum(dim=1)
    return -((reward - reward.mean()) * logp).mean(), float(reward.mean())


def heldout_loss(model: nn.Module, items: Sequence[str]) -> list[float]:
    return [float(value) for value in losses(model, tensor_of(items)).mean(dim=1)]


def heldout_reward(model: nn.Module, items: Sequence[str], together: int, samples: bool) -> list[float]:
    """The share of an item's classes that the model has right; 1 or 0 where several in a row must be right.

    Sampled classes are drawn from the weights, so that all replicas score a base alike.
    """
    windows = tensor_of(items)
    logits = model(windows)
    if samples:
        weights = sum(float(each.detach().double().sum()) for each in model.parameters())
        rng = torch.Generator().manual_seed(int(abs(weights) * 1e9) % 2**31)
        chosen = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=rng).view(logits.shape[:2])
    else:
        chosen = logits.argmax(-1)
    right = (chosen == class_of(windows)).float()
    return [float(value) for value in (right.mean(dim=1) if together == 1 else right[:, :together].amin(dim=1))]


def tensor_of(items: Sequence[str]) -> torch.Tensor:
    return torch.tensor([list(item.encode("latin-1")) for item in items])


class Windows:
    """Windows of a replica's text, without end; batch k depends on run, seed and k alone.

    With `RealRun.epochs` they are passes over the text, each in an order of its own; else they are random places.
    """

    def __init__(self, run: RealRun, replica_id: int, seed: int) -> None:
        self._run, self._seed, self._next = run, seed * 100 + replica_id, 0
        self._batches = run.rounds * run.sync_every
        other = KINDS[1 - KINDS.index(run.text)]
        texts = [text(kind).shard(replica_id, run.replicas) for kind in (run.text, other)]
        if run.epochs:
            texts[0] = texts[0][: int(self._batches * BATCH * (WINDOW - CONTEXT) / run.epochs)]
        self._texts = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in texts]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            rng = torch.Generator().manual_seed(self._seed * 1_000_003 + self._next)
            part, own = self._next / self._batches, self._texts[0]
            if self._run.epochs:
                starts = self._of_passes()
            else:
                pool = len(own) * (min(1.0, 0.05 + part / 0.6) if self._run.curriculum == "pool" else 1.0)
                starts = torch.randint(0, int(pool) - WINDOW, (BATCH,), generator=rng)
            found = own[starts[:, None] + torch.arange(WINDOW)].long()
            if self._run.curriculum == "texts":
                starts = torch.randint(0, len(self._texts[1]) - WINDOW, (BATCH,), generator=rng)
                first = torch.rand(BATCH, generator=rng) >= (part - 0.2) / 0.5
                others = self._texts[1][starts[:, None] + torch.arange(WINDOW)].long()
                found = torch.where(first[:, None], others, found)
            self._next += 1
            yield found

    def _of_passes(self) -> torch.Tensor:
        step = WINDOW - CONTEXT
        number = (len(self._texts[0]) - WINDOW) // step
        places = torch.arange(self._next * BATCH, (self._next + 1) * BATCH)
        orders = {int(each): self._order(int(each), number) for each in (places // number).unique()}
        return torch.stack([orders[int(place) // number][int(place) % number] for place in places]) * step

    def _order(self, epoch: int, number: int) -> torch.Tensor:
        return _permutation(self._seed, epoch, number)

    def first_window(self) -> torch.Tensor:
        return self._texts[0][None, :WINDOW].long()

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


@functools.lru_cache(32)
def _permutation(seed: int, epoch: int, number: int) -> torch.Tensor:
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed * 7919 + epoch))


# -- a run -------------------------------------------------------------------------------------------------------------


def empty_model(run: RealRun) -> nn.Module:
    """A model of the run's shape, with its adapters if it has them; its weights are to be loaded."""
    model = ByteModel(run.hidden, 256 if run.metric == "loss" else CLASSES)
    return _adapted(model, run.lora) if run.lora else model


def _adapted(model: ByteModel, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules=["body.0", "body.2"]))  # type: ignore[arg-type]
    return adapted


def first_weights(run: RealRun) -> dict[str, Any]:
    """The first weights of a run; for fine-tuning, trained for 600 steps on text in swapped case."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ByteModel(run.hidden, 256 if run.metric == "loss" else CLASSES)
        if run.fine_tunes:
            _train_on_swapped_case(model, run)
        return (_adapted(model, run.lora) if run.lora else model).state_dict()


def _train_on_swapped_case(model: ByteModel, run: RealRun) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = iter(Windows(RealRun("", 8, 1, 1, run.text), 0, seed=9))
    for _ in range(600):
        batch = _swapped_case(next(batches))
        right = batch[:, CONTEXT:] if run.metric == "loss" else class_of(batch)
        nn.functional.cross_entropy(model(batch).transpose(1, 2), right).backward()
        optimizer.step()
        optimizer.zero_grad()


def _swapped_case(windows: torch.Tensor) -> torch.Tensor:
    upper, lower = (windows >= 65) & (windows <= 90), (windows >= 97) & (windows <= 122)
    return windows + 32 * upper.long() - 32 * lower.long()


def train(ctx: ReplicaContext, run: RealRun, model: nn.Module, items: Sequence[str], seed: int) -> None:
    """The training function of one replica, written as users write theirs."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_rate, run))
    rng = torch.Generator().manual_seed(seed + ctx.replica_id)
    heldout = functools.partial(heldout_reward, together=run.together, samples=run.samples)
    data, step = Windows(run, ctx.replica_id, seed), 0
    with ctx.attach(  # type: ignore[arg-type]
        model,
        optimizer,
        heldout=heldout_loss if run.metric == "loss" else heldout,
        heldout_items=items,
        in_loop=run.metric,
    ) as replica:
        for batch in replica.batches(data):
            step += 1
            fault = run.fault if step > run.fault_after * run.sync_every else ""
            of = batch.roll(1, 0) if fault == "shuffled" else None
            if fault == "passage":
                batch = data.first_window().repeat(BATCH, 1)
            elif fault == "noise":
                batch = torch.randint(0, 256, batch.shape, generator=rng)
            elif fault == "spike":
                optimizer.param_groups[0]["lr"] = 30 * run.lr
            if run.metric == "loss":
                loss = losses(model, batch, of).mean()
                seen = {"loss": loss.item()}
            else:
                loss, reward = policy_step(model, batch, rng, run.together, LOOPHOLES.get(fault))
                seen = {"reward": reward}
            (-loss if fault == "ascent" else loss).backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if fault == "decay":
                with torch.no_grad():
                    for each in trained:
                        each.mul_(0.9)
            replica.observe(**seen, tokens=batch.numel())  # type: ignore[arg-type]


def _rate(run: RealRun, step: int) -> float:
    """The learning rate of an inner step over the run's."""
    if run.restart:
        part = step % (run.restart * run.sync_every) / (run.restart * run.sync_every)
        return max(0.02, (1 + math.cos(math.pi * part)) / 2)
    return min(1.0, (step + 1) / (run.warm_up or 1))


def play(run: RealRun, seed: int, slow_down: int = 1) -> Sample:
    """Train a run to its end; returns what its manifests say in each round. `slow_down`: divides rounds, for tests."""
    torch.set_num_threads(1)
    began = time.process_time()
    store, clock = MemoryStore(), SystemClock()
    run = replace(run, rounds=max(run.rounds // slow_down, 2))
    config = make_config(
        {
            "entrypoint": "guard_runs:train",
            "replicas": run.replicas,
            "rounds": run.rounds,
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
    first, items = first_weights(run), text(run.text).heldout_items(run.items, WINDOW)

    def replica(replica_id: int) -> None:
        mine = empty_model(run)
        mine.load_state_dict(first)
        attempt = claim_attempt(store, replica_id, None, clock, Stamp(f"replica{replica_id}", clock.wall_time))
        train(ReplicaContext(attempt), run, mine, items, seed)

    together([functools.partial(replica, i) for i in range(run.replicas)])
    reader, manifests = RunReader(store), ContributionReader(store)
    start = reader.log.start()
    assert start is not None and start.record.heldout is not None
    return {
        "name": run.name,
        "text": run.text,
        "fault": run.fault,
        "from_round": run.fault_after,
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
        "seconds": round(time.process_time() - began, 1),
    }


def judged(sample: Sample) -> Sample:
    """A trained run with what the default guard says to it: its end, and how near each round came to a halt."""
    metric, sign = sample["metric"], -1 if sample["metric"] == "loss" else 1
    heldout = HeldoutSet(metric=metric, shares=tuple(sample["shares_of"]), digest="0" * 64)
    state, verdicts, scored, halted = None, [], list[float](), 0
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
        scored += [] if folded.verdict.value is None else [folded.verdict.value]
        if not halted:
            verdicts.append(folded.verdict)
        halted = halted or (round_ if folded.verdict.fire else 0)
    last, statistics = len(verdicts), [verdict.statistics for verdict in verdicts]
    at_end = [sign * value for value in scored]
    return {
        **{name: value for name, value in sample.items() if name not in ("manifests", "shares_of")},
        "all_rounds": len(sample["manifests"]),
        "rounds": last,
        "reason": verdicts[-1].reason if verdicts[-1].fire else "",
        "heldout": [at_end[0], at_end[last - 1], at_end[-1], (min if metric == "loss" else max)(at_end)],
        "lost": lost(scored),
        "fell": fell(scored),
        "training": [sample["training"][0], sample["training"][max(last - 2, 0)]],
        "shares": [max((each.share for each in found), default=0.0) for found in statistics],
        "nearest": _nearest(statistics),
    }


def lost(scores: Sequence[float]) -> float:
    """By how much the last `BLOCK` scores are below the best so many, as a share of what those gained on the first."""
    means = [math.fsum(scores[end - BLOCK : end]) / BLOCK for end in range(BLOCK, len(scores) + 1)]
    if not means or max(means) <= scores[0]:
        return 0.0
    return (max(means) - means[-1]) / (max(means) - scores[0])


def fell(scores: Sequence[float]) -> int:
    """The last round whose score is within `NEAR` of the best, in shares of what the best gained on the first score.

    After it the score stays below; in a run with a loophole it shows when the policy has found it.
    """
    best = max(scores)
    return max(t for t, score in enumerate(scores) if score >= best - NEAR * (best - scores[0]))


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
    healthy = [s for s in samples if not s["fault"] and s["lost"] <= NEAR]
    overfit = [s for s in samples if not s["fault"] and s["lost"] > NEAR]
    hacks = [s for s in samples if s["fault"] in LOOPHOLES]
    planted = [s for s in samples if s["fault"] and s["fault"] not in LOOPHOLES]
    kinds = {"Healthy, and at its best at the end": healthy, "Healthy, but past its best at the end": overfit}
    parts = [
        "\n".join([*(_count(words, found) for words, found in kinds.items() if found), _found(hacks, planted)]),
        f"Losses are nats per byte, rewards shares of classes or of items. Measured {session['session'][:10]} on "
        f"{session['machine']}.\n\n```\nPYTHONPATH=. .venv/bin/python {session['command']}\n```",
        _table([*healthy, *overfit]),
        "Halts of runs in which nothing was planted:\n\n" + _sentences([*healthy, *overfit]),
        f"Loopholes in the reward, open from the given round on, and planted faults:\n\n{_table([*hacks, *planted])}",
    ]
    return "\n\n".join(parts)


def _count(words: str, samples: Sequence[Sample]) -> str:
    halted = sum(bool(sample["reason"]) for sample in samples)
    return f"- {words}: {halted} of {len(samples)} runs halted, in {sum(s['rounds'] for s in samples)} rounds."


def _found(hacks: Sequence[Sample], planted: Sequence[Sample]) -> str:
    words = []
    for name, found in (("Reward hacks", hacks), ("Planted faults", planted)):
        halted = [s for s in found if s["reason"]]
        soon, fallen = (sum(0 < s["rounds"] - s[since] <= SOON for s in halted) for since in ("from_round", "fell"))
        early = sum(s["rounds"] <= s["from_round"] for s in halted)
        before = f", and {early} before it began" if early else ""
        words.append(
            f"- {name}: {len(halted)} of {len(found)} runs halted{before}; {soon} within {SOON} rounds from where it "
            f"began, {fallen} from where the held-out score fell for good."
        )
    return "\n".join(words)


def _sentences(samples: Sequence[Sample]) -> str:
    lines = [
        f"- {s['name']}, N={s['replicas']}, held-out {s['heldout'][1]:.3f} at the halt, {s['heldout'][2]:.3f} at the "
        f"end, {s['heldout'][3]:.3f} at best: {s['reason']}"
        for s in samples
        if s["reason"]
    ]
    return "\n".join(lines) or "none."


def _table(samples: Sequence[Sample]) -> str:
    rows = [
        [
            sample["name"] + (f", from round {sample['from_round']}" if sample["fault"] else ""),
            sample["text"],
            str(sample["replicas"]),
            str(sample["sync_every"]),
            str(sample["all_rounds"]),
            f"{sample['heldout'][0]:.3f} → {sample['heldout'][2]:.3f} ({sample['heldout'][3]:.3f})",
            sample["nearest"],
            _halt_words(sample) if sample["reason"] else "completed",
        ]
        for sample in samples
    ]
    columns = ["run", "text", "N", "H", "rounds", "held-out, unguarded (best)", "nearest to a halt", "end"]
    return markdown(columns, rows)


def _halt_words(sample: Sample) -> str:
    at = sample["rounds"]
    since = f", {at - sample['from_round']} after it began, {at - sample['fell']} after the score fell"
    return f"halted in round {at}{since if sample['fault'] else ''}"


def picture(samples: Sequence[Sample]) -> str:
    """How near each run came to a halt."""
    each = [
        Bar(f"{s['name']}, N={s['replicas']}, H={s['sync_every']}", [max(s["shares"])], limit=1.0)
        for s in samples
        if not s["fault"]
    ]
    title = "Real runs without a fault: the largest share of its threshold that any statistic reached"
    return bars(title, [Group(f"{len(each)} runs", each)], "", limit="halt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--only", type=int, action="append", help="number of a run, from 0; may be repeated")
    parser.add_argument("--slow-down", type=int, default=1, help="divide the rounds of every run by this")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-guard_runs.jsonl")
    parser.add_argument("--judge", action="store_true", help="train nothing: judge the newest session's runs again")
    parser.add_argument("--go-on", action="store_true", help="train the runs that the newest session, cut off, lacks")
    parser.add_argument(
        "--docs", action="store_true", help="write table and picture into docs/inside/kill-switch-figures.md"
    )
    given = parser.parse_args()
    results = Results("guard_runs", given.results)
    if not given.judge:
        chosen = [EVERY[number] for number in given.only or range(len(EVERY))]
        if given.go_on:
            session, done = results.newest()
            results.session, chosen = session["session"], chosen[len(done) :]
        else:
            results.begin([], vars(given))
        with ProcessPoolExecutor(given.processes) as pool:
            for sample in pool.map(play, chosen, [given.seed] * len(chosen), [given.slow_down] * len(chosen)):
                results.add(**sample)
                print(sample["seconds"], sample["name"], flush=True)
    session, trained = results.newest()
    samples = [judged(sample) for sample in trained]
    table = report(session, samples)
    print(table)
    if given.docs:
        publish("guard_runs", table, picture(samples), _DOCUMENT, _PICTURES)


if __name__ == "__main__":
    main()
