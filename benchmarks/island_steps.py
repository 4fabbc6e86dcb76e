"""What an inner step costs in a replica of two ranks with us, and without: DDP on the CPU over gloo.

python benchmarks/island_steps.py [steps]

One run of one replica. Blocks of steps alternate between the loop as a replica, with one signal of rank 0 per step, and
the same loop without it. Prints the median milliseconds of a step of either, and their ratio.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from diloco_orchestrator import LocalProcessExecutor, launch

BLOCK = 20  # steps


def train(ctx):
    """Trains in blocks that end with `replica.step` after every step, or do not call it."""
    width = ctx.args["width"]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    plain = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch, seconds = torch.randn(32, width), {"with us": [], "without": []}
    with ctx.attach(model, optimizer) as replica:
        for block in range(2 * ctx.args["steps"] // BLOCK):
            ours = block % 2 == 0
            for _ in range(BLOCK):
                began = time.perf_counter()
                stepping = optimizer if ours else plain
                stepping.zero_grad()
                model(batch).square().mean().backward()
                stepping.step()
                if ours:
                    replica.step()
                seconds["with us" if ours else "without"].append(time.perf_counter() - began)
        if ctx.rank == 0:
            Path(ctx.args["output"]).write_text(json.dumps(seconds))
        while replica.step():
            optimizer.step()


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    folder = Path(tempfile.mkdtemp())
    output = folder / "seconds.json"
    args = {"steps": steps, "width": 1024, "output": str(output)}
    settings = {"replicas": 1, "ranks_per_replica": 2, "rounds": 1, "sync_every": steps + 10, "guard": "off"}
    executor = LocalProcessExecutor(folder / "executor")
    launch("island_steps:train", store=str(folder / "run"), executor=executor, args=args, **settings).wait()
    seconds = json.loads(output.read_text())
    medians = {name: 1000 * statistics.median(each) for name, each in seconds.items()}
    print({name: round(each, 3) for name, each in medians.items()}, "ms a step")
    print(f"ratio {medians['with us'] / medians['without']:.3f}")


if __name__ == "__main__":
    main()
