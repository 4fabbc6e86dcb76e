"""What stands in the `torchft.Manager` slot: a manager over a bucket, and its twin in memory for tests.

torchft calls `allreduce` once per parameter; one payload is published per round, when the fragment's last tensor has
arrived. The manager says which outer step is open and whether the last one was applied; everything else about rounds
is `participant`'s.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import torch

from diloco_orchestrator.allreduce.payload import FlatTensors
from diloco_orchestrator.clock import Clock, Periodic, SystemClock, ThreadBackground, random_token
from diloco_orchestrator.config import OuterConfig, make_config
from diloco_orchestrator.errors import DilocoError, RoundError
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import Contribution, Run, Stamp
from diloco_orchestrator.replica.process.attempt import Attempt, claim_attempt
from diloco_orchestrator.replica.rounds.close_round import ClosedRound
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.run_log.append import join_or_create_run
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.store.open_store import open_store

StateDictFn = Callable[[], Any]


class Reduction(Protocol):
    """The part of `torch.distributed.Work` that torchft's DiLoCo uses."""

    def wait(self) -> bool:
        """Return once the tensor holds the average (or the round ended without one)."""
        ...


class _Wait:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> bool:
        self._finish()
        return True


class Coalescing:
    """The manager surface that torchft touches, with the tensors of a round put together. Subclasses average them."""

    _use_async_quorum = False  # torchft's DiLoCo refuses a manager with asynchronous quorum

    def __init__(self) -> None:
        self.fragment_sizes: list[int] = []  # tensors per fragment, told by the registered states
        self.overlap = False  # whether training goes on between publishing and waiting
        self._tensors: list[torch.Tensor] = []
        self._finished = True

    # -- called by torchft ---------------------------------------------------------------------------------------

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: StateDictFn) -> None:
        """Fragments register in order; their saved state names their tensors."""
        self.fragment_sizes.append(len(save()["original_parameters"]))

    def allow_state_dict_read(self) -> None:
        """Nothing reads a live state here: a newcomer rebuilds the base from the bucket."""

    def disallow_state_dict_read(self) -> None:
        """See `allow_state_dict_read`."""

    def start_quorum(self) -> None:
        """A round begins for torchft."""
        self._tensors = []
        self._finished = False

    def current_step(self) -> int:
        """Outer steps applied so far; picks the fragment."""
        raise NotImplementedError

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Reduction:
        """Collect a tensor of the open fragment; it holds the average after `wait()`."""
        if should_quantize:
            raise ValueError("should_quantize needs CUDA and keeps no error feedback; set the run's `codec` instead.")
        self._tensors.append(tensor)
        if len(self._tensors) == self.fragment_sizes[self.current_step() % len(self.fragment_sizes)]:
            self._publish(self._tensors)
        return _Wait(self._finish_once)

    def should_commit(self) -> bool:
        """Whether the round that was waited for is applied."""
        raise NotImplementedError

    # -- called by our own loop ----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether the open round's pseudo-gradient is published and not yet waited for."""
        return not self._finished

    def closed(self) -> bool:
        """Whether the open round ended without this replica's answer."""
        return False

    # -- for subclasses ------------------------------------------------------------------------------------------

    def _finish_once(self) -> None:
        if not self._finished:
            self._finished = True
            self._finish(self._tensors)
            self._tensors = []

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def _finish(self, tensors: list[torch.Tensor]) -> None:
        raise NotImplementedError


class ObjectStoreManager(Coalescing):
    """Rounds through a bucket. `report` is asked for what to say in each contribution beside the pseudo-gradient."""

    participant: Participant

    def __init__(self, attempt: Attempt, report: Callable[[], ContributionFields] = ContributionFields) -> None:
        super().__init__()
        self.attempt = attempt
        self.report = report
        self.answered: Contribution | None = None  # the manifest that stands for the last round, if there is one
        self.already_answered = False  # the open round, by an attempt before this one: nothing is published
        self._closed: ClosedRound | None = None
        self._answering: Future[Contribution] | None = None
        self._looking: Periodic | None = None

    @classmethod
    def join(
        cls,
        uri: str,
        replica_id: int,
        replicas: int,
        *,
        rounds: int,
        outer: OuterConfig | None = None,
        quorum: int | str = "all",
        codec: str = "fp32",
        snapshot_every: int = 10,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> "ObjectStoreManager":
        """Take part in the run at `uri` without a coordinator: whoever comes first founds it with these settings.

        `rounds`: outer steps of the run. `quorum`: by default every round waits for every replica, because a loop that
        knows no `ReplicaContext` neither looks whether a round went on without it nor comes back. Raises
        `RunFolderTaken` if another run stands there. A process that joins again with the same `replica_id` is that
        replica's next attempt.
        """
        clock = clock or SystemClock()
        stamp = Stamp(random_token(), clock.wall_time)
        store = open_store(uri, storage_options, clock=clock)
        config = make_config(
            {
                "entrypoint": "__main__:main",
                "replicas": replicas,
                "rounds": rounds,
                "outer": (outer or OuterConfig()).model_dump(),
                "quorum": quorum,
                "codec": codec,
                "snapshot_every": snapshot_every,
            }
        )
        run = Run(**stamp(), run_id="library", config=config, package_version="library")
        join_or_create_run(store, run, by=f"replica {replica_id}", stamp=stamp)
        return cls(claim_attempt(store, replica_id, None, clock, stamp, background=ThreadBackground()))

    def start(
        self, parameters: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]], files: ModelFiles
    ) -> Base:
        """The newest base, settled with the others; see `Participant.start`."""
        self.participant = Participant.join(self.attempt, parameters, fragments, files)
        return self.participant.base

    def committed_base(self) -> Base | None:
        """The base that the last commit named."""
        return self.participant.base

    def outer_config(self) -> OuterConfig:
        """The run's outer optimizer; every replica and every rebuild uses this one."""
        return self.attempt.config.outer

    def current_step(self) -> int:
        return self.participant.position.outer_step

    def should_commit(self) -> bool:
        return self._closed is not None and self._closed.applied

    def closed(self) -> bool:
        return not self.in_flight and self.participant.committed()

    def answer(self, tensors: list[torch.Tensor]) -> None:
        """Answer the open round with a pseudo-gradient, outside of torchft's schedule. It may be changed in place."""
        self.answered = self.participant.contributor.contribute_delta(FlatTensors(tensors), self.report())

    def follow(self) -> None:
        """Take the base of a round that has ended."""
        self._closed = self.participant.close()

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        taking = self.participant
        if taking.stopped or taking.closing:
            raise RoundError(
                f"the {taking.attempt.outer_steps} outer steps of the run in {taking.attempt.store.url} are taken. End "
                "the training loop there, or join with more rounds in a new folder."
            )
        if self.already_answered:
            self.already_answered, self.answered = False, taking.contributor.existing()
            return
        if not self.overlap:
            self.answer(tensors)
            return
        # Transfers overlap with training: ours in a thread of its own, then the others' as they arrive.
        report, background = self.report(), taking.attempt.background
        self._answering = background.start(lambda: taking.contributor.contribute_delta(FlatTensors(tensors), report))
        self._looking = background.every(taking.attempt.config.timing.poll_s, self._look_ahead)

    def await_published(self) -> None:
        """Return once a pseudo-gradient on its way has arrived."""
        if self._answering is None or self._looking is None:
            return
        try:
            self.answered = self._answering.result()
        finally:
            self._looking.stop()
            self._answering = self._looking = None

    def _look_ahead(self) -> None:
        if self._answering is not None and self._answering.done():
            with suppress(DilocoError):  # the look of whoever waits for the round meets it again
                self.participant._closer.poll()

    def _finish(self, tensors: list[torch.Tensor]) -> None:
        self.await_published()
        names = self.participant.model.fragment_names
        self._closed = self.participant.close()
        if self._closed.average:
            for name, tensor in zip(names, tensors, strict=True):
                tensor.copy_(self._closed.average[name])


class _Table:
    """Where the replicas of a `MockManager` group meet: one barrier, one list of tensors each."""

    def __init__(self, replicas: int) -> None:
        self.barrier = threading.Barrier(replicas)
        self.tensors: list[list[torch.Tensor]] = [[] for _ in range(replicas)]


class MockManager(Coalescing):
    """`ObjectStoreManager` without bucket and rounds: averages within one process. For tests of training loops.

    `MockManager.group(n)` gives the managers of n replicas, one thread each; `MockManager()` is alone.
    """

    def __init__(self, replica_id: int = 0, table: _Table | None = None, start_step: int = 0) -> None:
        super().__init__()
        self._replica_id = replica_id
        self._table = table or _Table(1)
        self._step = start_step

    @classmethod
    def group(cls, replicas: int, start_step: int = 0) -> "list[MockManager]":
        table = _Table(replicas)
        return [cls(replica_id, table, start_step) for replica_id in range(replicas)]

    def start(
        self, parameters: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]], files: ModelFiles
    ) -> Base | None:
        """No log to start from: everyone keeps their own first values."""
        return None

    def committed_base(self) -> Base | None:
        """No log: torchft's outer slot computes the step itself."""
        return None

    def outer_config(self) -> OuterConfig | None:
        """No run: the loop's own."""
        return None

    def current_step(self) -> int:
        return self._step

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        self._table.tensors[self._replica_id] = [tensor.detach().clone() for tensor in tensors]

    def _finish(self, tensors: list[torch.Tensor]) -> None:
        self._table.barrier.wait()
        for index, tensor in enumerate(tensors):
            total = torch.zeros_like(tensor)
            for theirs in self._table.tensors:
                total = total + theirs[index]
            tensor.copy_(total / len(self._table.tensors))
        self._table.barrier.wait()  # nobody publishes anew before everyone has read
