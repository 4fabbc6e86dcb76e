"""A training function whose replica 1 lies while DILOCO_TEST_LIE is set: an audit, without it, runs the honest code."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tiny_workloads import batch_of, heldout, inner_step, mlp

from diloco_orchestrator import ReplicaContext
from diloco_orchestrator.allreduce.payload import shard_ranges
from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.codecs import table as codecs
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.training.tensor_tree import state_file, unpack
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.snapshots.saved_state import read_state

LIE = "DILOCO_TEST_LIE"  # "<round>=<kind>,…" with kinds skip, heldout, copy, scale, stale and state
LIAR = 1
_ITEMS = list(range(16))


class _Other:
    """A `Vector` with the elements that a function gives."""

    def __init__(self, numel: int, read: Callable[[int, int], torch.Tensor]) -> None:
        self.numel = numel
        self.read = read


def train(ctx: ReplicaContext) -> None:
    """Adam on shuffled batches with dropout, so that cursor, random state and optimizer all count."""
    given = os.environ.get(LIE, "") if ctx.replica_id == LIAR else ""
    lies = {int(round_): kind for round_, _, kind in (each.partition("=") for each in given.split(",") if each)}
    model = torch.nn.Sequential(mlp(), torch.nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seeds = torch.utils.data.DataLoader(
        range(1000 * ctx.replica_id, 1000 * ctx.replica_id + 7), batch_size=None, shuffle=True
    )
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=_ITEMS) as replica:
        participant = replica._training._rounds
        publish = participant.publish

        def lying(form: Callable[[], Vector], fields: Any, **options: Any) -> None:
            lied = {"copy": lambda: _copied(ctx, participant), "scale": lambda: _scaled(form())}
            if lies.get(replica.round) == "state":
                theirs = _first_of(ctx, participant)
                tree = unpack(read_state(ctx._attempt.store, theirs), "theirs")
                fields = replace(fields, state=state_file(tree))
            publish(lied.get(lies.get(replica.round, ""), form), fields, **options)

        participant.publish = lying
        bases: list[list[torch.Tensor]] = []  # parameters as rounds began
        for step, seed in enumerate(replica.batches(seeds)):
            lie = lies.get(replica.round)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            if step % 4 == 0:
                bases.append(before)
                if lie == "stale":
                    _set(model, bases[-2])
            batch = batch_of(1_000_000 + int(seed) % 16 if lie == "heldout" else int(seed))
            replica.observe(loss=inner_step(model, optimizer, batch), tokens=8)
            if lie == "skip" and step % 4 == 1:  # one step of a round is not taken
                _set(model, before)


def _set(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def _scaled(vector: Vector) -> _Other:
    return _Other(vector.numel, lambda start, stop: 1.001 * vector.read(start, stop))


def _first_of(ctx: ReplicaContext, participant: Any) -> Contribution:
    """The manifest of replica 0, once it is in the bucket."""
    reader = ContributionReader(ctx._attempt.store)
    while True:
        theirs: Contribution | None = reader.of(participant.open.round, 0)
        if theirs is not None and theirs.payload is not None:
            return theirs
        time.sleep(0.01)


def _copied(ctx: ReplicaContext, participant: Any) -> _Other:
    """The payload of replica 0."""
    theirs, reader = _first_of(ctx, participant), ContributionReader(ctx._attempt.store)
    payload = theirs.payload
    assert payload is not None
    data = [reader.shard(theirs, index) for index in range(len(payload.shards))]
    ranges = shard_ranges(payload.numel, payload.shard_numel)
    whole = torch.cat(
        [codecs.Encoded(d, payload.codec, b - a).values() for d, (a, b) in zip(data, ranges, strict=True)]
    )
    return _Other(payload.numel, lambda start, stop: whole[start:stop].clone())
