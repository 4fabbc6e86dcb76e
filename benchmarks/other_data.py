"""What each aggregate costs where replicas are honest and their data differ: held-out loss at the end of a run.

    PYTHONPATH=tests/support python benchmarks/other_data.py --docs      # about twenty minutes of one core

The runs are those of benchmarks/attackers.py without attackers. The last replica, or every one, draws from a
distribution of its own; held-out items are drawn from all replicas' distributions in equal parts.
"""

import argparse
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import mean

import torch
from attackers import DOCUMENT, REPLICAS, ROUNDS, quiet
from hostile_replicas import CLASSES, HELDOUT, INPUTS, Classifier, HostileFleet, Task, logits
from measuring import markdown, publish

KINDS = (
    "nobody's data differ",
    "the last one's items are elsewhere",
    "the last one lacks two of four classes",
    "60 % of the last one's labels are another teacher's",
    "everybody's items are elsewhere",
    "everybody lacks two of four classes",
)
AGGREGATES = ("mean", "agreeing_mean", "trimmed_mean", "median")


class OtherData(Task):
    """A task in which replicas draw from different distributions."""

    def __init__(self, seed: int, kind: str) -> None:
        self._kind = kind
        draw = torch.Generator().manual_seed(5000 + seed)
        ways = torch.randn((REPLICAS, INPUTS), generator=draw)
        self._elsewhere = 2.25 * ways / ways.norm(dim=1, keepdim=True)
        self._other_teacher = {name: 2.0 * value.detach() for name, value in Classifier(seed + 177).named_parameters()}
        super().__init__(seed)

    def batch(self, size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Items and labels, (replicas, n) of each replica, or (n,) of all in equal parts, in replica order."""
        each = size[1:] if len(size) > 1 else (size[0] // REPLICAS,)
        drawn = [self._of_replica(i, each) for i in range(REPLICAS)]
        joined = torch.stack if len(size) > 1 else torch.cat
        return joined([items for items, _ in drawn]), joined([labels for _, labels in drawn])

    def _of_replica(self, replica_id: int, size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        differs = self._kind.startswith("everybody") or (replica_id == REPLICAS - 1 and self._kind != KINDS[0])
        items = torch.randn((*size, INPUTS), generator=self._draw)
        if differs and "elsewhere" in self._kind:
            items = items + self._elsewhere[replica_id]
        labels = logits(self._teacher, items).argmax(dim=-1)
        if differs and "classes" in self._kind:
            lacking = torch.tensor([replica_id % CLASSES, (replica_id + 1) % CLASSES])
            while bool((again := torch.isin(labels, lacking)).any()):
                items[again] = torch.randn((int(again.sum()), INPUTS), generator=self._draw)
                labels = logits(self._teacher, items).argmax(dim=-1)
        if differs and "teacher" in self._kind:
            others = torch.rand(size, generator=self._draw) < 0.6
            labels = torch.where(others, logits(self._other_teacher, items).argmax(dim=-1), labels)
        noisy = torch.rand(size, generator=self._draw) < 0.1
        return items, torch.where(noisy, torch.randint(CLASSES, size, generator=self._draw), labels)


def played(kind: str, aggregate: str, rounds: int, seed: int) -> tuple[float, float, float]:
    """Play one run. Held-out loss over all items and the last replica's; how often that is left out, per round."""
    weights = {} if aggregate in ("mean", "agreeing_mean") else {"weights": "uniform"}
    task = OtherData(seed, kind)
    fleet = HostileFleet(REPLICAS, rounds, seed, 0, lambda _: None, task=task, aggregate=aggregate, **weights)
    commits = fleet.play()
    losses = task.losses(fleet.deciders[0].base.parameters)
    left_out = [each for commit in commits if commit.figures for each in commit.figures.disagreeing]
    last = sum(each.replica_id == REPLICAS - 1 for each in left_out) / rounds
    return float(losses.mean()), float(losses[-(HELDOUT // REPLICAS) :].mean()), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/attacks.md")
    given = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(given.processes, initializer=quiet) as pool:
        for kind in KINDS:
            found = {a: list(pool.map(partial(played, kind, a, given.rounds), range(given.seeds))) for a in AGGREGATES}
            cells = []
            for aggregate in AGGREGATES[1:]:
                pairs = list(zip(found[aggregate], found["mean"], strict=True))
                everybody, own = (mean(other[i] / beside[i] - 1.0 for other, beside in pairs) for i in (0, 1))
                cells.append(f"{100 * everybody:+.1f} % ({100 * own:+.1f} %)")
            left_out = mean(each[2] for each in found["agreeing_mean"])
            rows.append([kind, *cells, f"{100 * left_out:.0f} %"])
            print(rows[-1], file=sys.stderr, flush=True)
    columns = ["honest replicas", *AGGREGATES[1:], "rounds without the last one, agreeing_mean"]
    command = shlex.join(["python", "benchmarks/other_data.py", *sys.argv[1:]])
    text = (
        f"Taken {time.strftime('%Y-%m-%d')}; {REPLICAS} replicas, {given.rounds} rounds, mean over {given.seeds} "
        "seeds, against `mean`, in brackets over the last replica's part of the held-out items."
        f"\n\n```\nPYTHONPATH=tests/support .venv/bin/{command}\n```\n\n{markdown(columns, rows)}"
    )
    print(text)
    if given.docs:
        publish("other_data", text, None, DOCUMENT)


if __name__ == "__main__":
    main()
