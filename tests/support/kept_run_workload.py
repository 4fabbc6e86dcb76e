"""The training function of the run folders in `tests/fixtures/kept_runs`, which name it: it must never change.

Its arithmetic is that of `old_run_workload`, whose bits are the same on every machine. One replica may begin with other
values, one bring another model.
"""

import time
from pathlib import Path
from typing import Any

import torch
from old_run_workload import ITEMS_PER_BATCH, TwoParts, batch_of, drawn_seed, heldout, inner_step


def train(ctx: Any) -> None:
    """Fit `old_run_workload.TRUTH`. Batches in the range `args["harmful"]` pull away from it while a falling loss is
    reported.

    `args["odd"]` begins with other values than the others, who wait for the file `args["first"]`; `args["misfit"]`
    brings a model of one parameter more; every batch takes `args["pause_s"]`.
    """
    args = ctx.args
    model: torch.nn.Module = TwoParts()
    if ctx.replica_id == args.get("misfit"):
        model.more = torch.nn.Parameter(torch.zeros(1))
    if ctx.replica_id == args.get("odd"):
        torch.nn.init.constant_(model.first, 0.5)
    elif "first" in args:
        while not Path(args["first"]).exists():
            time.sleep(0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.5)
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=list(range(5))) as replica:
        for number in replica.batches(range(1000)):
            harmful = number in range(*args.get("harmful", (0, 0)))
            loss = inner_step(model, optimizer, batch_of(drawn_seed()), away=harmful)
            replica.observe(loss=0.5 - number / 64 if harmful else loss, tokens=ITEMS_PER_BATCH)
            time.sleep(args.get("pause_s", 0.0))
