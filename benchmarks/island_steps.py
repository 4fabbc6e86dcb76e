"""What an inner step costs in a replica of two ranks with us, and without: DDP on the CPU over gloo.

python benchmarks/island_steps.py [steps]

One run of one replica. Steps alternate, two and two, between the loop as a replica, with one signal of rank 0 per step,
and the same loop without it. Prints the median milliseconds of a step of either, the CPU milliseconds of both ranks,
and the median ratio of two neighbouring steps, with its standard error: the machine's speed may change meanwhile.
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
    walls = {name: [1000 * wall_s for wall_s, _ in ranks[0][name]] for name in ranks[0]}
    cpus = {
        name: [1000 * (one + two) for (_, one), (_, two) in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }
    for what, found in (("ms", walls), ("CPU ms of both ranks", cpus)):
        shown = {name: round(statistics.median(each), 3) for name, each in found.items()}
        ratios = [ours / plain for ours, plain in zip(found["with us"], found["without"], strict=True)]
        error = 1.25 * 1.48 * statistics.median(abs(each - statistics.median(ratios)) for each in ratios)
        print(f"{shown} {what} a step, ratio {statistics.median(ratios):.3f} +- {error / len(ratios) ** 0.5:.3f}")


if __name__ == "__main__":
    main()
