"""Strangers on ground on which no number of `guard.strangers` was chosen: other models, optimizers, rates and data.

    PYTHONPATH=tests/support python benchmarks/other_strangers.py --docs      # two minutes of one core
    PYTHONPATH=tests/support python benchmarks/other_strangers.py --attacks   # half an hour

Five launched replicas and three strangers, as in benchmarks/strangers.py, of which nobody or all three follow a script.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from attackers import quiet
from healthy_norms import TASKS, Kind, make_optimizer, trained_of
from hostile_replicas import CLASSES, HELDOUT, INPUTS, Task, Values, logits
from measuring import markdown, publish
from quality_runs import corpus, losses
from strangers import DOCUMENT, HALF, HOSTILE, Outcome, excess, played
from strangers import FLEETS as IN_FLEETS
from torch import nn

REPLICAS = 8
WINDOW = 33  # bytes of a held-out item, the first one not scored
NAMES = ("sign flip x1", "drift: a constant direction added", HALF)


class Dealt(Task):
    """The classifier at another rate, or with other data of each replica, or of the last one."""

    def __init__(
        self,
        seed: int,
        lr: float = 1.0,
        falls: bool = True,
        alpha: float = 0.0,
        shift: float = 0.0,
        few: int = 0,
        everybody: bool = True,
    ) -> None:
        """`alpha`: of the Dirichlet distribution from which a replica's shares of the classes are drawn. `shift`: how
        far its items lie from the others'. `few`: items that it has; 0: new ones in each step.
        """
        draw = torch.Generator().manual_seed(9000 + seed)
        torch.manual_seed(9000 + seed)
        ways = torch.randn((REPLICAS, INPUTS), generator=draw)
        self._where = shift * ways / ways.norm(dim=1, keepdim=True)
        even = torch.full((REPLICAS, CLASSES), 1.0 / CLASSES)
        self._shares = torch.distributions.Dirichlet(alpha * CLASSES * even).sample() if alpha else None
        if not everybody:
            self._where[:-1] = 0.0
            self._shares = None if self._shares is None else torch.cat([even[:-1], self._shares[-1:]])
        self._lr, self._falls, self._few = lr, falls, few
        super().__init__(seed)
        self._own = [self._of(i, few) for i in range(REPLICAS)] if few else []

    def rate(self, done: float) -> float:
        return self._lr * (1.0 - 0.9 * done if self._falls else 1.0)

    def batch(self, size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Items and labels, (replicas, n) of each replica, or (n,) of all in equal parts."""
        parts = [self._part(i, size[1]) if len(size) > 1 else self._of(i, size[0] // REPLICAS) for i in range(REPLICAS)]
        joined = torch.stack if len(size) > 1 else torch.cat
        return joined([items for items, _ in parts]), joined([labels for _, labels in parts])

    def _part(self, replica_id: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._few:
            return self._of(replica_id, count)
        which = torch.randint(self._few, (count,), generator=self._draw)
        items, labels = self._own[replica_id]
        return items[which], labels[which]

    def _of(self, replica_id: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        many = count if self._shares is None else 20 * count
        items = torch.randn((many, INPUTS), generator=self._draw) + self._where[replica_id]
        labels = logits(self._teacher, items).argmax(dim=-1)
        if self._shares is not None:
            weights = (self._shares[replica_id] / torch.bincount(labels, minlength=CLASSES).clamp(min=1))[labels]
            which = torch.multinomial(weights + 1e-12, count, generator=self._draw)
            items, labels = items[which], labels[which]
        noisy = torch.rand(count, generator=self._draw) < 0.1
        return items, torch.where(noisy, torch.randint(CLASSES, (count,), generator=self._draw), labels)


class OfKind(Task):
    """A fleet of `healthy_norms` that trains on text, each replica on files of its own; held out are other files."""

    def __init__(self, seed: int, kind: Kind) -> None:
        self._kind = replace(kind, replicas=REPLICAS, seed=seed)
        self._loss_of = TASKS[kind.task](self._kind)[1]
        self._models = [self.model(seed) for _ in range(REPLICAS)]
        self._optimizers = [make_optimizer(model, self._kind) for model in self._models]
        self._draws = [torch.Generator().manual_seed(1000 * seed + i) for i in range(REPLICAS)]
        self._steps = 0
        named = sorted(self._models[0].named_parameters())
        self.shapes = {name: tuple(value.shape) for name, value in named if value.requires_grad}
        items = [list(item.encode("latin-1")) for item in corpus().heldout_items(2 * HELDOUT, WINDOW)]
        windows = torch.tensor(items)[torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))]
        self._windows, self._fresh = windows[:HELDOUT], windows[HELDOUT:]

    def model(self, seed: int) -> nn.Module:
        return TASKS[self._kind.task](self._kind)[0]

    def _losses(self, model: Mapping[str, torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
        self._take(self._models[0], model)
        with torch.no_grad():
            return losses(self._models[0], windows).mean(dim=1)

    def losses(self, model: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._losses(model, self._windows)

    def losses_at(self, model: Mapping[str, torch.Tensor], begin: int, count: int) -> list[float]:
        return [float(loss) for loss in self._losses(model, self._windows[begin:][:count])]

    def fresh_loss(self, model: Mapping[str, torch.Tensor], seed: int) -> float:
        return float(self._losses(model, self._fresh).mean())

    def trained(self, base: Mapping[str, torch.Tensor], replicas: int, lr: float) -> tuple[list[Values], list[float]]:
        kind, deltas, means = self._kind, list[Values](), list[float]()
        for i, (model, optimizer) in enumerate(zip(self._models, self._optimizers, strict=True)):
            self._take(model, base)
            total = 0.0
            for step in range(kind.steps):
                optimizer.param_groups[0]["lr"] = kind.rate(self._steps + step)
                optimizer.zero_grad()
                loss = self._loss_of(model, i, self._draws[i], kind.batch)
                loss.backward()
                nn.utils.clip_grad_norm_(trained_of(model), 1.0)
                optimizer.step()
                total += loss.item()
            own = dict(model.named_parameters())
            deltas.append({name: base[name] - own[name].detach() for name in self.shapes})
            means.append(total / kind.steps)
        self._steps += kind.steps
        return deltas, means

    def _take(self, model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name in self.shapes:
                own[name].copy_(values[name])


def grounds(rounds: int) -> dict[str, partial[Task]]:
    """Tasks in which nobody's data differ, by name; each is called with a seed."""
    text = Kind("text", REPLICAS, "scratch", 3e-3, rounds=rounds)
    return {
        "classifier, a tenth of the rate": partial(Dealt, lr=0.1),
        "classifier, three tenths of the rate, constant": partial(Dealt, lr=0.3, falls=False),
        "classifier, 640 items each, read twice a round": partial(Dealt, few=640),
        "text from scratch, AdamW": partial(OfKind, kind=text),
        "text from a trained model, AdamW, decaying": partial(OfKind, kind=replace(text, task="text", decays=True)),
    }


SPLITS = {
    **{f"all: Dirichlet {alpha:g} of the classes": partial(Dealt, alpha=alpha) for alpha in (100.0, 10.0, 1.0)},
    **{f"all: items moved by {shift:g}": partial(Dealt, shift=shift) for shift in (0.25, 0.5, 1.0)},
    **{
        f"the last one: items moved by {shift:g}": partial(Dealt, shift=shift, everybody=False)
        for shift in (0.25, 0.5, 1.0)
    },
    "the last one: Dirichlet 10 of the classes": partial(Dealt, alpha=10.0, everybody=False),
}


def counted(runs: list[Outcome]) -> list[str]:
    left, of, again = (sum(getattr(each, name) for each in runs) for name in ("honest", "of_honest", "repeating"))
    return [f"{left} of {of}" + (f", {again} for repetition" if again else "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="only ground with this in its name")
    parser.add_argument("--attacks", action="store_true", help="play attackers where nobody's data differ, too")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/attacks.md")
    given = parser.parse_args()
    fleet, seeds = next(iter(IN_FLEETS)), range(given.first_seed, given.first_seed + given.seeds)
    chosen = {name: task for name, task in (grounds(given.rounds) | SPLITS).items() if given.only in name}
    attacked = [name for name in chosen if given.attacks and name not in SPLITS]
    names = NAMES if given.attacks else ()
    rows = []
    with ProcessPoolExecutor(given.processes, initializer=quiet) as pool:

        def begun(ground: str, name: str | None, scored: bool = True) -> list[Future[Outcome]]:
            play = partial(played, fleet, name, given.rounds, scored, task_of=chosen[ground])
            return [pool.submit(play, seed) for seed in seeds]

        honest = {ground: begun(ground, None) for ground in chosen}
        hostile = {(ground, name): begun(ground, name) for ground in attacked for name in NAMES}
        for ground, runs in honest.items():
            clean = [each.result() for each in runs]
            cells = counted(clean)
            for name in NAMES if ground in attacked else ():
                found = [each.result() for each in hostile[ground, name]]
                left = sum(each.hostile for each in found) / (HOSTILE * given.rounds * len(seeds))
                cells.append(f"{excess(found, clean)}, {100 * left:.0f} %")
            rows.append([ground, *cells, *[""] * (1 + len(names) - len(cells))])
            print(rows[-1], file=sys.stderr, flush=True)
    table = markdown(["ground", "honest strangers left out", *names], rows)
    command = shlex.join(["python", "benchmarks/other_strangers.py", *sys.argv[1:]])
    text = (
        f"Taken {time.strftime('%Y-%m-%d')}; {given.rounds} rounds, {given.seeds} seeds from {given.first_seed} on.\n\n"
        f"```\nPYTHONPATH=tests/support .venv/bin/{command}\n```\n\n{table}"
    )
    print(text)
    if given.docs:
        publish("other_strangers", text, None, DOCUMENT)


if __name__ == "__main__":
    main()
