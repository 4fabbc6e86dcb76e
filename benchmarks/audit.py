"""What an audit proves: how often it draws one of a liar's ranges, and how far rounding moves a range.

    PYTHONPATH=. .venv/bin/python benchmarks/audit.py --draws        # seconds, no training
    PYTHONPATH=. .venv/bin/python benchmarks/audit.py --rounding     # minutes on one core

The second trains the demo's model from one seed with AdamW, in a process for each kind of vector unit and number of
threads, and compares pseudo-gradients. Distances are norms of differences, over the norm of the first.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measuring import markdown

from diloco_orchestrator.inspection.audit.findings import TrainingRange, bound_of, caught_probability, drawn
from diloco_orchestrator.protocol.head import Head

SEEDS = 1000
RANGES, DRAWS = 400, (1, 5, 10, 20, 50, 100)  # 4 replicas, 100 rounds
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)  # of the ranges in which somebody lied
STEPS = (10, 30)
VARIANTS = {  # name -> environment of the process, and the step that it leaves out
    "the same again": ({}, None),
    "AVX2 in place of the widest": ({"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, None),
    "no vector unit in torch's own kernels": ({"ATEN_CPU_CAPABILITY": "default"}, None),
    "two threads in place of one": ({"OMP_NUM_THREADS": "2"}, None),
    "one step left out, in the middle": ({}, 2),
    "the last step left out": ({}, 1),
}


def draws() -> list[dict[str, str]]:
    """Probability of catching a liar by formula, and its frequency over seeds, for shares of dishonest ranges."""
    ranges = [TrainingRange(round_, replica_id) for round_ in range(1, RANGES // 4 + 1) for replica_id in range(4)]
    head = Head(RANGES // 4 + 1, "0" * 64)
    orders = [drawn(ranges, max(DRAWS), seed, head) for seed in range(SEEDS)]
    rows = []
    for share in SHARES:
        lied = set(drawn(ranges, round(share * RANGES), -1, head))  # any set; drawn by another seed
        row = {"dishonest": f"{100 * share:g} %"}
        for draw in DRAWS:
            caught = sum(not lied.isdisjoint(order[:draw]) for order in orders) / SEEDS
            exact = caught_probability(RANGES, len(lied), draw)
            row[f"{draw} drawn"] = f"{100 * exact:.1f} % ({100 * caught:.1f})"
        rows.append(row)
    return rows


def train(steps: int, left_out: int | None, output: Path) -> None:
    """Train the demo's model and write its pseudo-gradient. `left_out`: the step that is not taken, from 0."""
    from diloco_orchestrator.demo.workload import LEARNING_RATE, Batches, build_model, token_losses

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    model = build_model()
    base = torch.cat([each.detach().flatten().clone() for each in model.parameters()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    text = b"".join(path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("*.py"))[:40])
    for index, batch in zip(range(steps), Batches(text, seed=1), strict=False):
        if index == left_out:
            continue
        loss = token_losses(model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(base - torch.cat([each.detach().flatten() for each in model.parameters()]), output)


def rounding(lengths: tuple[int, ...]) -> list[dict[str, str]]:
    """The distance of each variant from the first training, by the number of steps."""
    rows = [{"variant": name} for name in (*VARIANTS, "the bound")]
    with tempfile.TemporaryDirectory() as folder:
        for steps in lengths:
            first = _trained(Path(folder), steps, {}, None)
            for row, (environ, part) in zip(rows, VARIANTS.values(), strict=False):
                left_out = None if part is None else steps // part - (part == 1)
                other = _trained(Path(folder), steps, environ, left_out)
                row[f"H = {steps}"] = f"{float((other - first).norm() / first.norm()):.2g}"
            rows[-1][f"H = {steps}"] = f"{bound_of(steps):.2g}"
    return rows


def _trained(folder: Path, steps: int, environ: dict[str, str], left_out: int | None) -> torch.Tensor:
    output = folder / "delta.pt"
    command = [sys.executable, __file__, "--train", str(steps), str(-1 if left_out is None else left_out), str(output)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, check=True)
    found: torch.Tensor = torch.load(output)
    return found


def _table(rows: list[dict[str, str]]) -> str:
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", action="store_true")
    parser.add_argument("--rounding", action="store_true")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        steps, left_out, output = options.train
        train(int(steps), None if left_out == "-1" else int(left_out), Path(output))
        return
    if options.draws:
        print(_table(draws()))
    if options.rounding:
        print(_table(rounding(tuple(options.steps))))


if __name__ == "__main__":
    main()
