"""The training function of a run folder in `tests/fixtures/kept_runs`, which names it: it must never change.

Its arithmetic is that of `old_run_workload`, whose bits are the same on every machine.
"""

from typing import Any

import torch
from old_run_workload import ITEMS_PER_BATCH, TwoParts, batch_of, drawn_seed, heldout, inner_step


def train(ctx: Any) -> None:
    """Fit `old_run_workload.TRUTH`, with so many held-out items that strangers' work is scored."""
    model = TwoParts()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.5)
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=list(range(16))) as replica:
        for _ in replica.batches(range(1000)):
            loss = inner_step(model, optimizer, batch_of(drawn_seed()), away=False)
            replica.observe(loss=loss, tokens=ITEMS_PER_BATCH)
