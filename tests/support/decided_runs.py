"""Runs whose decisions are chosen by a test, and questions about other decisions: for tests of `whatif`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from in_one_process import SmallRun
from lora_models import lora_mlp
from protocol_fleet import Fleet, close, report, together
from tiny_workloads import batch_of, heldout, inner_step, mlp

from diloco_orchestrator import WhatIf
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.config import RetentionConfig
from diloco_orchestrator.inspection.whatif import whatif_of
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.retention import plan
from replica.context import ReplicaContext
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)
NOBODY: frozenset[tuple[int, int]] = frozenset()


def contribution(round_: int, replica_id: int, shapes: Sequence[Sequence[int]] = ((3,), (3, 3))) -> FlatTensors:
    """A pseudo-gradient that depends on round and replica alone, whatever the base."""
    generator = torch.Generator().manual_seed(100 * round_ + replica_id)
    return FlatTensors([torch.randn(list(shape), generator=generator) for shape in shapes])


def play_round(
    participants: Sequence[Participant], absent: Collection[tuple[int, int]] = NOBODY, loud: int | None = None
) -> None:
    """One round of these contributions; who is absent abstains, because its gradient is not finite.

    `loud`: the replica whose contribution is a thousand times as large.
    """

    def take_part(participant: Participant) -> None:
        round_, replica_id = participant.open.round, participant._attempt.replica_id
        said = report(steps=30)
        if participant.open.final_evaluation:
            participant._contributor.contribute_scores(said)
        else:
            delta = contribution(round_, replica_id)
            if (round_, replica_id) in absent:
                delta = FlatTensors([torch.full((12,), float("nan"))])
            if replica_id == loud:
                delta = FlatTensors([1000 * delta.read(0, 12)])
            participant._contributor.contribute_delta(delta, said)
        close(participant)

    together([lambda each=each: take_part(each) for each in participants])


def played(
    rounds: int = 3, absent: Collection[tuple[int, int]] = NOBODY, loud: int | None = None, **settings: Any
) -> Fleet:
    """A run of four replicas whose contributions are always the same. One further round closes it."""
    fleet = Fleet(**{"replicas": 4, "rounds": rounds, "quorum": 2, "guard": "off", **settings})
    participants = fleet.join_all()
    for _ in range(rounds + 1):
        play_round(participants, absent, loud)
    return fleet


def claimed(fleet: Fleet, round_: int) -> str:
    """The digest of the base after a round, as the replicas of the run claim it."""
    digest = fleet.commits()[round_].base_digest
    assert digest is not None
    return digest


def asked(store: Store, round_: int, more: Mapping[str, Any] | None = None, **decided: Any) -> WhatIf:
    return whatif_of(RunLog(store), round_, decided, **(more or {}))


def collect(fleet: Fleet) -> None:
    """Let retention delete the payloads of the first five rounds."""
    for round_ in (5, 6):
        write_rebuilt_snapshot(RunLog(fleet.store), round_, STAMP)
    for info in plan(RunLog(fleet.store), RetentionConfig(payloads="needed")).objects:
        fleet.store.delete(info.key)


class ReadOnly(MemoryStore):
    """A copy of a store that refuses to be changed."""

    def __init__(self, store: Store) -> None:
        super().__init__("memory://read-only")
        for info in store.list(""):
            self._set(info.key, store.get(info.key))

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("this command only reads")

    put = create = delete = _refuse


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """The same values at every call. Not by torch's global generator: replicas that are threads share it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


def train(ctx: ReplicaContext) -> None:
    """Trains with a number of tokens that differs between replicas."""
    model = filled(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ctx.attach(model, optimizer, heldout=heldout, heldout_items=list(range(16)), in_loop="loss") as replica:
        for batch in replica.batches([batch_of(1000 * ctx.replica_id + i) for i in range(50)]):
            replica.observe(loss=inner_step(model, optimizer, batch), tokens=8 + 5 * ctx.replica_id)


def trained(**settings: Any) -> SmallRun:
    run = SmallRun(2, rounds=2, sync_every=4, guard="off", **settings)
    run.train(train)
    return run


def train_adapters(ctx: ReplicaContext) -> None:
    """Trains LoRA adapters."""
    model = lora_mlp()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with ctx.attach(model, optimizer) as replica:
        for batch in replica.batches([batch_of(100 * ctx.replica_id + i) for i in range(40)]):
            inner_step(model, optimizer, batch)


def normalised() -> torch.nn.Module:
    """A model with buffers."""
    return filled(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))


def buffer_score(model: torch.nn.Module, items: Sequence[int]) -> list[float]:
    """A score of the buffers of such a model alone."""
    return [item * float(model.get_buffer("1.running_mean").sum()) for item in items]


def train_normalised(ctx: ReplicaContext, lost: int | None = None, **attach: Any) -> None:
    """Trains a model with buffers. `lost`: the replica whose first round is not finite; `attach`: for `ctx.attach`."""
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ctx.attach(model, optimizer, **attach) as replica:
        for index, (x, _) in enumerate(replica.batches([batch_of(100 * ctx.replica_id + i) for i in range(40)])):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            if index == 0 and ctx.replica_id == lost:
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))
