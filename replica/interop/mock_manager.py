"""`MockManager`: an `ObjectStoreManager` for tests of a training loop, with rounds in memory instead of a bucket."""

import threading
from collections.abc import Callable, Sequence

import torch

from diloco_orchestrator.allreduce.vectors import FlatTensors, Vector, copied
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base, NamedVector
from diloco_orchestrator.replica.interop.torchft import TorchftManager
from diloco_orchestrator.replica.rounds.interface import ClosedRound, ContributionFields, Rounds
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.rounds.tip import OpenRound


class MockManager(TorchftManager):
    """`ObjectStoreManager` without a bucket: rounds among threads of one process, which never fail.

    For `make_diloco_outer_loop` and for torchft's classes. `MockManager.group(n)` makes the managers of n replicas, one
    thread each; `MockManager()` is a single replica. Every replica begins with its own model's values. `start_step`:
    the first base's number of outer steps.
    """

    def __init__(
        self,
        replica_id: int = 0,
        table: "_Table | None" = None,
        start_step: int = 0,
        outer: OuterConfig | None = None,
    ) -> None:
        super().__init__()
        self._replica_id = replica_id
        self._table = table or _Table(1)
        self._start_step = start_step
        self._outer = outer or OuterConfig()

    @classmethod
    def group(cls, replicas: int, start_step: int = 0, outer: OuterConfig | None = None) -> "list[MockManager]":
        """The managers of `replicas` replicas that average with each other, one per thread, in order of their ids.

        `start_step`: number of outer steps in the first base. `outer`: the outer optimizer; default: `OuterConfig()`.
        """
        table = _Table(replicas)
        return [cls(replica_id, table, start_step, outer) for replica_id in range(replicas)]

    def start(self, own: OwnModel, outer: OuterConfig | None) -> Rounds:
        """Rounds in memory whose first base holds copies of the parameters, which must be whole in this process."""
        if not own.is_whole:
            raise ConfigError("a MockManager has no rounds for a sharded model, or for several ranks.")
        self._outer = outer or self._outer
        self._rounds = rounds = _RoundsInMemory(
            self._table,
            self._replica_id,
            Base.fresh(own.parameters, self._outer),
            [tuple(names) for names in own.fragments],
            self._outer,
            self._start_step,
        )
        return rounds

    def outer_config(self) -> OuterConfig:
        return self._outer


class _Table:
    """The memory shared by the replicas of a `MockManager` group: a barrier, and their published pseudo-gradients."""

    def __init__(self, replicas: int) -> None:
        self.barrier = threading.Barrier(replicas)
        self.vectors = [FlatTensors([]) for _ in range(replicas)]


class _RoundsInMemory:
    """The rounds of one replica of a `MockManager` group: every round waits for every replica, and is applied."""

    def __init__(
        self,
        table: _Table,
        replica_id: int,
        base: Base,
        fragments: Sequence[tuple[str, ...]],
        outer: OuterConfig,
        outer_step: int,
    ) -> None:
        self.base = base
        self._outer_step = outer_step
        self._table = table
        self._replica_id = replica_id
        self._fragments = fragments
        self._outer = outer

    @property
    def open(self) -> OpenRound:
        index = self._outer_step % len(self._fragments)
        return OpenRound(self._outer_step + 1, index, self._fragments[index], self._outer_step)

    def publish(self, form: Callable[[], Vector], fields: ContributionFields, *, in_background: bool = False) -> None:
        self._table.vectors[self._replica_id] = copied(form())

    def close_beside_training(self, then: Callable[[], None], *, keep_average: bool = True) -> None:
        """Does nothing: there is no transfer to overlap; `close` does all the work."""

    def close(self, *, keep_average: bool = True) -> ClosedRound:
        table, names = self._table, self.open.names
        table.barrier.wait()  # everyone has published
        values = [vector.read(0, vector.numel) for vector in table.vectors]
        table.barrier.wait()  # everyone has read
        average = NamedVector(self.base.shapes(names), [sum(values, torch.zeros(())) / len(values)])
        self.base = outer_step.step(self.base, average, self._outer)
        self._outer_step += 1
        return ClosedRound(applied=True, skipped=False, average=average)
