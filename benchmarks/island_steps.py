"""What an inner step costs in a replica of two ranks with us, and without: DDP on the CPU over gloo.

python benchmarks/island_steps.py [steps]

One run of one replica, in blocks of five steps: a block with the signal of rank 0 after each step, two without, one
with, and so on, so that a machine whose speed drifts disturbs neither. Prints the median milliseconds of a step of
either, wall-clock and CPU of both ranks, and the median ratio of neighbouring blocks with its standard error; then the
CPU time of each rank inside `replica.step`, and that of our threads beside training.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from diloco_orchestrator import LocalProcessExecutor, launch

BLOCK = 5  # steps
WITH, WITHOUT = "with us", "without"


def train(ctx):
    """Trains in blocks that end with `replica.step` after every step, or do not call it."""
    width = ctx.args["width"]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-6) for name in (WITH, WITHOUT)}
    batch, blocks, calls = torch.randn(32, width), [], []
    with ctx.attach(model, optimizers[WITH]) as replica:
        beside = _seconds_beside()
        for number in range(2 * ctx.args["steps"] // BLOCK):
            name = WITH if number % 4 in (0, 3) else WITHOUT
            began, used = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                optimizers[name].zero_grad()
                model(batch).square().mean().backward()
                optimizers[name].step()
                if name == WITH:
                    called = time.thread_time()
                    replica.step()
                    calls.append(time.thread_time() - called)
            blocks.append((name, (time.perf_counter() - began) / BLOCK, (time.process_time() - used) / BLOCK))
        beside = _seconds_beside() - beside
        found = {"blocks": blocks, "calls": calls, "beside": beside / (len(blocks) * BLOCK)}
        Path(ctx.args["output"], f"{ctx.rank}.json").write_text(json.dumps(found))
        while replica.step():
            optimizers[WITH].step()


def _seconds_beside() -> float:
    """CPU seconds so far of this process's Python threads but this one; all of them are ours."""
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in others)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    folder = Path(tempfile.mkdtemp())
    args = {"steps": steps, "width": 1024, "output": str(folder)}
    settings = {"replicas": 1, "ranks_per_replica": 2, "rounds": 1, "sync_every": steps + 10, "guard": "off"}
    executor = LocalProcessExecutor(folder / "executor")
    launch("island_steps:train", store=str(folder / "run"), executor=executor, args=args, **settings).wait()
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    wall = [(name, 1000 * wall_s) for name, wall_s, _ in ranks[0]["blocks"]]
    cpu = [
        (name, 1000 * (one + two))
        for (name, _, one), (_, _, two) in zip(*(rank["blocks"] for rank in ranks), strict=True)
    ]
    for what, blocks in (("ms", wall), ("CPU ms of both ranks", cpu)):
        found = {each: [ms for name, ms in blocks if name == each] for each in (WITH, WITHOUT)}
        shown = {each: round(statistics.median(values), 3) for each, values in found.items()}
        ratios = [ours / plain for ours, plain in zip(*found.values(), strict=True)]
        error = 1.25 * 1.48 * statistics.median(abs(each - statistics.median(ratios)) for each in ratios)
        print(f"{shown} {what} a step, ratio {statistics.median(ratios):.3f} +- {error / len(ratios) ** 0.5:.3f}")
    for rank, found in enumerate(ranks):
        inside, beside = 1000 * statistics.median(found["calls"]), 1000 * found["beside"]
        print(f"rank {rank}: {inside:.3f} CPU ms a step in replica.step, {beside:.3f} in threads beside training")


if __name__ == "__main__":
    main()
