"""What an inner step costs in a replica of two ranks with us, and without: DDP on the CPU over gloo.

python benchmarks/island_steps.py [steps]

One run of one replica. Steps alternate, two and two, between the loop as a replica, with one signal of rank 0 per step,
and the same loop without it. Prints the median milliseconds of a step of either, the CPU milliseconds of both ranks,
and the ratios.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from diloco_orchestrator import LocalProcessExecutor, launch

BLOCK = 2  # steps


def train(ctx):
    """Trains in blocks that end with `replica.step` after every step, or do not call it."""
    width = ctx.args["width"]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    plain = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch, seconds = torch.randn(32, width), {"with us": [], "without": []}  # wall and CPU of each step
    with ctx.attach(model, optimizer) as replica:
        for block in range(2 * ctx.args["steps"] // BLOCK):
            ours = block % 2 == 0
            for _ in range(BLOCK):
                began, used = time.perf_counter(), time.process_time()
                stepping = optimizer if ours else plain
                stepping.zero_grad()
                model(batch).square().mean().backward()
                stepping.step()
                if ours:
                    replica.step()
                spent = time.perf_counter() - began, time.process_time() - used
                seconds["with us" if ours else "without"].append(spent)
        Path(ctx.args["output"], f"{ctx.rank}.json").write_text(json.dumps(seconds))
        while replica.step():
            optimizer.step()


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    folder = Path(tempfile.mkdtemp())
    args = {"steps": steps, "width": 1024, "output": str(folder)}
    settings = {"replicas": 1, "ranks_per_replica": 2, "rounds": 1, "sync_every": steps + 10, "guard": "off"}
    executor = LocalProcessExecutor(folder / "executor")
    launch("island_steps:train", store=str(folder / "run"), executor=executor, args=args, **settings).wait()
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    wall, cpu = {}, {}
    for name in ("with us", "without"):
        wall[name] = 1000 * statistics.median(wall_s for wall_s, _ in ranks[0][name])
        cpu[name] = 1000 * statistics.median(
            one + other for (_, one), (_, other) in zip(*(r[name] for r in ranks), strict=True)
        )
    for what, found in (("ms", wall), ("CPU ms of both ranks", cpu)):
        shown = {name: round(each, 3) for name, each in found.items()}
        print(f"{shown} {what} a step, ratio {found['with us'] / found['without']:.3f}")


if __name__ == "__main__":
    main()
