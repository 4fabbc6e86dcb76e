"""A training function that writes down the times of its steps, in seconds since 1970; for `startup.py`."""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


def train(ctx: Any) -> None:
    """One inner step of a tiny model."""
    marks = {"process": _process_began(), "called": time.time()}
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(ctx.replica_id))]
    marks["model"] = time.time()
    with ctx.attach(model, optimizer) as replica:
        marks["attached"] = time.time()
        for x in replica.batches(batches):
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item(), tokens=len(x))
            marks.setdefault("stepped", time.time())
            marks.setdefault("cpu_stepped", _cpu_s())
    Path(ctx.args["folder"], f"{ctx.replica_id}.json").write_text(json.dumps(marks))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _process_began() -> float:
    """When this process was started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / _TICKS
