"""The first base of a run: made from the first model file of snapshot 0 that a replica creates, and equal on all.

How a base is stored is in `snapshots.layout`.
"""

from collections.abc import Mapping, Sequence

import torch

from diloco_orchestrator.errors import ModelMismatch
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Start
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.run_log.run_log import Entry
from diloco_orchestrator.snapshots.layout import (
    MODEL,
    ModelFiles,
    check_same_model,
    describe,
    read_tensors,
    write_snapshot,
)


def agree_on_first_base(
    attempt: Attempt, parameters: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]], files: ModelFiles
) -> Entry[Start]:
    """Create snapshot 0 and `start.json` unless they exist. Returns the start that all replicas share.

    Safe to race and to repeat: the next process completes what a process that died has left. Raises `ModelMismatch` if
    the run's first base is of another model.
    """
    store, key, outer = attempt.store, keys.snapshot(0, MODEL), attempt.config.outer
    store.create(key, files.model_bytes(Base.fresh(parameters, outer)))
    existing = read_tensors(store, key)
    for name in parameters:
        if name not in existing:
            raise ModelMismatch(f"this replica trains {name!r}, which the run's first base ({key}) does not have.")
    first = {name: existing[name] for name in parameters}
    check_same_model(describe(parameters), describe(first))
    base = Base.fresh(first, outer)
    write_snapshot(store, 0, base, base.digest(), files, attempt.stamp)
    start = Start(
        **attempt.stamp(),
        run_sha256=attempt.log.run_sha256,
        parameters=describe(first),
        fragments=tuple(tuple(names) for names in fragments),
        base_digest=base.digest(),
    )
    store.create(keys.START, start.to_bytes())
    shared = attempt.log.start()
    assert shared is not None
    return shared
