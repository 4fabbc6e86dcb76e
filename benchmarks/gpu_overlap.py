"""On a GPU: what a synchronisation in flight does to the steps of a bf16 model of a billion parameters.

    make bench-gpu

It needs a CUDA GPU with about 12 GiB for the default model, and refuses to run without one. One replica trains on the
GPU, synchronises fragments with a delay through a folder, and every inner step is timed with the GPU synchronised at
its end. Steps are sorted by the schedule: those in which a fragment is taken and published, those while its
transfer is in flight, those that install the new fragment, and the rest. Values leave the GPU through pinned memory on
a stream of their own and come back from there, so all four should take as long. The limit is .05 s for any step beyond
the median of the rest, while the transfer takes at most .7 of the delay.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import Results, Sample, Source, markdown, middle, parser_of, pick, run, scratch_folder, spread
from svg_chart import Bar, Group, bars

GOAL_BLOCKED_S = 0.05
KINDS = ("no sync in flight", "sync in flight", "fragment published", "fragment installed")
_FOREVER = 1_000_000_000


@dataclass(frozen=True)
class Settings:
    """A training to be timed. A fragment is synchronised every `sync_every / fragments` steps."""

    device: str
    parameters: int
    layers: int
    batch: int
    rounds: int
    sync_every: int
    fragments: int
    delay: int  # steps between publishing and installing
    folder: str

    @property
    def round_steps(self) -> int:
        return self.sync_every // self.fragments

    def kind_of(self, step: int) -> str:
        """The kind of a step within its round, from 1. Publishing and installing happen behind the optimizer's step."""
        if step == self.round_steps:
            return "fragment installed"
        published_at = self.round_steps - self.delay
        if step == published_at:
            return "fragment published"
        return "sync in flight" if step > published_at else "no sync in flight"


def step_times(settings: Settings) -> list[tuple[str, float]]:
    """The kind and the seconds of every inner step, without those of the first round, which warms up."""
    import torch

    from diloco_orchestrator import ObjectStoreManager, make_diloco_outer_loop

    torch.manual_seed(0)
    width = max(1, round(math.sqrt(settings.parameters / settings.layers)))
    layers = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(settings.layers)]
    model = torch.nn.Sequential(*layers).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(settings.batch, width, device=settings.device, dtype=torch.bfloat16)
    manager = ObjectStoreManager.join(settings.folder, 0, 1, rounds=_FOREVER, codec="bf16", snapshot_every=_FOREVER)
    loop = make_diloco_outer_loop(
        model,
        optimizer,
        manager,
        settings.sync_every,
        fragments=settings.fragments,
        fragment_sync_delay=settings.delay,
    )

    def finish() -> None:
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize()

    found = []
    with loop:
        for index in range((settings.rounds + 1) * settings.round_steps):
            finish()
            began = time.perf_counter()
            _inner_step(model, optimizer, batch)
            finish()
            if index >= settings.round_steps:
                found.append((settings.kind_of(index % settings.round_steps + 1), time.perf_counter() - began))
    return found


def _inner_step(model: Any, optimizer: Any, batch: Any) -> None:
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # the loop's hooks publish and synchronise in here


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    if len(sources) > 1:
        raise SystemExit("the GPU holds one model: measure one checkout at a time.")
    sys.path.insert(0, str(sources[0].path))
    with scratch_folder(given.folder) as folder:
        settings = Settings(
            device="cuda",
            parameters=round(given.million * 1e6),
            layers=given.layers,
            batch=given.batch,
            rounds=given.repetitions,
            sync_every=given.sync_every,
            fragments=given.fragments,
            delay=given.delay,
            folder=f"{folder}/run",
        )
        for index, (kind, wall_s) in enumerate(step_times(settings)):
            results.add(arm=sources[0].name, kind=kind, repetition=index, wall_s=wall_s, million=given.million)


def table(samples: Sequence[Sample]) -> str:
    rest = middle(pick(samples, kind=KINDS[0]), "wall_s")
    rows = []
    for kind in KINDS:
        own = pick(samples, kind=kind)
        if not own:
            continue
        beyond = max(sample["wall_s"] for sample in own) - rest
        cells = [f"{middle(own, 'wall_s') / rest:.2f}", f"{max(0.0, beyond):.3f}", f"{GOAL_BLOCKED_S:g}"]
        rows.append([kind, f"{len(own)}", *spread(own, "wall_s", 4), *cells])
    columns = ("steps", "count", "s, median", "min", "max", "x the rest", "greatest beyond the rest, s", "limit, s")
    words = f"{samples[0]['million']:g} million parameters in bf16, one replica on one GPU."
    return f"{words}\n\n{markdown(columns, rows)}"


def picture(samples: Sequence[Sample]) -> str:
    rest = middle(pick(samples, kind=KINDS[0]), "wall_s")
    drawn = []
    for kind in KINDS:
        walls = [sample["wall_s"] for sample in pick(samples, kind=kind)]
        if walls:
            own = pick(samples, kind=kind)
            drawn.append(Bar(kind, [middle(own, "wall_s")], min(walls), max(walls), rest + GOAL_BLOCKED_S))
    return bars("Inner steps on a GPU, seconds", [Group("", drawn)], "s", limit="0.05 s more than the rest")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--million", type=float, default=1000, help="parameters; default 1000")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--sync-every", type=int, default=800, help="inner steps; default 800")
    parser.add_argument("--fragments", type=int, default=8)
    parser.add_argument("--delay", type=int, default=60, help="inner steps a transfer may take; default 60")
    parser.add_argument("--folder", type=Path, help="where the run is written; default /dev/shm")
    if not parser.parse_args().table:
        _refuse_without_gpu()
    run("gpu_overlap", parser, measure, table, picture)


def _refuse_without_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "gpu_overlap needs a CUDA GPU, and torch finds none on this machine: there is nothing to measure. Run it "
            "on a machine with one; `--table` prints what was measured there."
        )


if __name__ == "__main__":
    main()
