"""Contexts that watch a training function: in a real run (`WatchedContext`), and without one (`PlainContext`).

Both accept the calls of `ReplicaContext` and write observations into a folder, as `Notes` and tensors, for `rows` to
judge. They run only in processes of a check.
"""

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import BulkHasher
from diloco_orchestrator.protocol.process import load_entrypoint
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.context import ReplicaContext, ReplicaSession
from diloco_orchestrator.replica.process.run_attempt import LoadEntrypoint
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.attached_model import AttachedModel
from diloco_orchestrator.replica.training.exchange import local_part
from diloco_orchestrator.replica.training.follower import served
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers, NeverStepped
from diloco_orchestrator.replica.training.island import Island
from diloco_orchestrator.replica.training.position import DataCursor
from diloco_orchestrator.replica.training.ranks import END, Ranks
from diloco_orchestrator.replica.training.session import TrainingSession
from diloco_orchestrator.replica.training.tensor_tree import state_file, stored_tree, unpack
from diloco_orchestrator.snapshots.model_tensors import plain_name
from diloco_orchestrator.snapshots.stored_state import StoredState

PATIENCE = 256  # batches without a step of the attached optimizer: more micro-batches than anybody accumulates

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Watch:
    """Settings of a watched process: the folder for observations, and how the training function is disturbed."""

    folder: str  # for notes and tensors, in a folder of each rank
    plain: bool = False  # without a run
    scored: bool = True  # whether its held-out set is scored
    killed_after: int | None = None  # inner steps, after which the process gets SIGKILL, and the one above its ranks
    planted: str | None = None  # hash of a training item that counts as held out, as hex digits
    disturbed: bool = False  # plain only: parameters are moved after the first round, and training ends a step later


@dataclass
class Notes:
    """Observations made in one process that ran a training function, of its model, optimizers and data."""

    scores: bool = False  # it has a held-out set
    compares: bool = False  # it has training items compared with the held-out set
    metric: str = "loss"
    steps: int = 0  # inner steps of this process
    trainable: int = 0  # parameters
    unmoved: list[str] = field(default_factory=list)  # trainable parameters that end as they began
    frozen: int = 0  # parameters
    frozen_moved: list[str] = field(default_factory=list)
    at_round: list[str] = field(default_factory=list)  # digests of the model at each round's first step
    state_tensors: int = 0  # of the optimizers
    state_lost: list[str] = field(default_factory=list)  # parts that are others after the state was saved and loaded
    last_item: str | None = None  # hash of the last training item that was compared, as hex digits
    hooked: bool = False  # it gave a function to `on_round`

    @classmethod
    def read(cls, folder: Path) -> "Notes":
        """The observations in a folder of the ranks of one replica; none of a rank that ended before writing them.

        Each rank has observed its own part of the model: a parameter that moved in any of them has moved, and a digest
        is those of all ranks. Everything else is rank 0's.
        """
        found = [cls(**json.loads(path.read_text())) for path in sorted(folder.glob("*/notes.json"))]
        if not found:
            return cls()
        first = found[0]
        first.unmoved = [name for name in first.unmoved if all(name in each.unmoved for each in found)]
        first.frozen_moved = sorted({name for each in found for name in each.frozen_moved})
        first.at_round = [" ".join(models) for models in zip(*(each.at_round for each in found), strict=False)]
        return first


def read_tensors(folder: Path, name: str) -> Tensors | None:
    """Tensors that ranks of one replica kept under `name`: where there are several, each rank's part by itself."""
    found = {path.parent.name: load_file(path) for path in sorted(folder.glob(f"*/{name}.safetensors"))}
    if found.keys() == {"0"}:
        return found["0"]
    parts = {f"{each} (rank {rank})": part for rank, of in found.items() for each, part in of.items()}
    return parts or None


class Watcher:
    """Counts inner steps of a training function, and observes its model."""

    def __init__(self, watch: Watch, round_steps: int, ranks: Ranks) -> None:
        folder = Path(watch.folder) / str(ranks.rank)
        folder.mkdir()
        self.watch = replace(watch, folder=str(folder))
        self._has_others = ranks.ranks > 1
        self.notes = Notes()
        self.before_step: Callable[[], None] = lambda: None  # called before every step of an optimizer
        self._round_steps = round_steps
        self._idle = 0  # batches since the last step
        self._attached: AttachedModel | None = None
        self._first: Tensors = {}
        self._frozen: dict[str, str] = {}

    def attach(self, model: torch.nn.Module, optimizer: Any, options: Mapping[str, Any]) -> None:
        """Begin to watch a model that has the base's parameters. An inner step is one step of every optimizer."""
        self._attached = AttachedModel(model)
        self.notes.scores = options.get("heldout") is not None
        self.notes.metric = options.get("in_loop", "loss")
        self._first = self.parameters()
        self._frozen = {name: digest_of({name: value}) for name, value in self._named(trainable=False)}
        self.notes.trainable, self.notes.frozen = len(self._first), len(self._frozen)
        optimizers = InnerOptimizers(optimizer)
        optimizers.watch(self._before_step, self._after_step)
        # An optimizer that is not attached may step the model before.
        attached = optimizers.all
        register_optimizer_step_pre_hook(lambda other, *_: None if other in attached else self._before_other())

    def parameters(self) -> Tensors:
        """Copies of this rank's parts of the trainable parameters that the model has now, on the CPU."""
        return {name: value.to("cpu", copy=True) for name, value in self._named(trainable=True)}

    def _named(self, *, trainable: bool) -> list[tuple[str, torch.Tensor]]:
        """This rank's parts of the parameters with or without `requires_grad`, in name order, without a compiler's
        wrapper.
        """
        assert self._attached is not None
        self._attached.reshard()
        named = self._attached.module.named_parameters()
        found = {plain_name(n): local_part(p) for n, p in named if p.requires_grad is trainable}
        return sorted(found.items())

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors into the folder of observations, under `name`."""
        save_file({each: value.clone() for each, value in tensors.items()}, self._path(f"{name}.safetensors"))

    def batch(self) -> None:
        """Count a batch, or a call of `replica.step`. Raises `NeverStepped` when there are too many between steps."""
        self._idle += 1
        if self._idle > PATIENCE:
            raise NeverStepped(f"{PATIENCE} batches and not one step of the attached optimizer.")

    def note_state(self, optimizers: InnerOptimizers, owners: Owners) -> None:
        """Save and load the optimizers' state, as for a restarted attempt, and record lost parts. At the end only."""
        where, saved = "the optimizer's state", state_file(optimizers.state_dict(), owners).whole()
        optimizers.load_state_dict(stored_tree(StoredState.of(owners, saved), where))
        before = dict(_leaves(unpack([saved], where)))
        after = dict(_leaves(unpack([state_file(optimizers.state_dict(), owners).whole()], where)))
        self.notes.state_tensors = sum(isinstance(each, torch.Tensor) for each in before.values())
        self.notes.state_lost = [name for name in before | after if not _is_same(before.get(name), after.get(name))]

    def hooked(self) -> None:
        self.notes.hooked = True

    def write(self) -> None:
        """Write the notes, and the model after training."""
        if self._attached is not None:
            last = self.parameters()
            self.notes.unmoved = [n for n, v in self._first.items() if n in last and torch.equal(v, last[n])]
            now = {name: digest_of({name: value}) for name, value in self._named(trainable=False)}
            self.notes.frozen_moved = [name for name, digest in self._frozen.items() if now.get(name) != digest]
            self.keep("model", last)
        Path(self._path("notes.json")).write_text(json.dumps(asdict(self.notes)))

    def _path(self, name: str) -> str:
        return str(Path(self.watch.folder) / name)

    def _before_step(self) -> None:
        self.before_step()
        self._note_first_model()

    def _before_other(self) -> None:
        if self._idle or not self.notes.steps:  # after the last inner step was processed
            self._note_first_model()

    def _note_first_model(self) -> None:
        """Record a digest of the model before any optimizer's first step of a round."""
        if self.notes.steps == len(self.notes.at_round) * self._round_steps:
            self.notes.at_round.append(digest_of(self.parameters()))

    def _after_step(self) -> None:
        self.notes.steps, self._idle = self.notes.steps + 1, 0
        if self.notes.steps == self.watch.killed_after:
            if self._has_others:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and scalars of a nested state, with their paths."""
    match tree:
        case dict():
            for key, value in tree.items():
                yield from _leaves(value, f"{name}[{key!r}]")
        case list() | tuple():
            for index, value in enumerate(tree):
                yield from _leaves(value, f"{name}[{index}]")
        case _:
            yield name, tree


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and digest_of({"": one}) == digest_of({"": other})
    return type(one) is type(other) and bool(one == other)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of the tensors' bytes, in order."""
    hasher = BulkHasher()
    for tensor in tensors.values():
        flat = tensor.detach().to("cpu").contiguous().flatten()
        hasher.update(flat.view(torch.uint8).numpy().data)
    return str(hasher.digest())


def watched(watch: Watch) -> LoadEntrypoint:
    """A loader of training functions, each of which is called with a context of this module, that watches it."""

    def load(entrypoint: str) -> Callable[[Any], None]:
        function = load_entrypoint(entrypoint)

        def call(ctx: ReplicaContext) -> None:
            context = (PlainContext if watch.plain else WatchedContext)(ctx._attempt, watch, ctx._ranks)
            try:
                function(context)
            finally:
                ctx.session = context.session
                context.end()

        return call

    return load


# -- in a run ---------------------------------------------------------------------------------------------------------


class WatchedContext(ReplicaContext):
    """The context of a real attempt in a check, changed only as the settings `watch` say."""

    def __init__(self, attempt: Attempt, watch: Watch, ranks: Ranks) -> None:
        super().__init__(attempt, ranks)
        self.watcher = Watcher(watch, attempt.config.round_steps, ranks)

    def attach(self, model: torch.nn.Module, optimizer: Any, **options: Any) -> ReplicaSession:
        watch = self.watcher.watch
        given = options if watch.scored else {**options, "heldout": None, "kl_probe": None}
        session = super().attach(model, optimizer, **given)
        items = session._evidence.items
        self.watcher.notes.compares = items is not None
        if items is not None and watch.planted is not None:
            items.forbid(bytes.fromhex(watch.planted), "planted")
        # On the objects, which `attach` makes.
        for name, told in (("batches", self._batches), ("step", self._step), ("on_round", self._on_round)):
            setattr(session, name, told(getattr(session, name)))
        training, name = session._training, "detach"
        setattr(training, name, self._detach(session, training.detach))
        self.watcher.attach(model, optimizer, options)
        return session

    def end(self) -> None:
        """Write all observations; called in every case, also after an error."""
        if self.session is not None:
            training = self.session._training
            if self.session.stopped and isinstance(training, TrainingSession):
                self.watcher.note_state(training._optimizers, training._attempt.owners)  # rank 0 calls all ranks for it
                self._ranks.signal(END)
            elif self.session.stopped:
                served(training._island)
            if (items := self.session._evidence.items) is not None and items.last is not None:
                self.watcher.notes.last_item = items.last.hex()
        self.watcher.write()

    def _detach(self, session: ReplicaSession, detach: Callable[[], None]) -> Callable[[], None]:
        def kept() -> None:
            if session.stopped:
                self.watcher.keep("base", self.watcher.parameters())
            detach()

        return kept

    def _batches(self, batches: Callable[[Iterable[Any]], Iterator[Any]]) -> Callable[[Iterable[Any]], Iterator[Any]]:
        def counted(data: Iterable[Any]) -> Iterator[Any]:
            return map(self._counted, batches(data))

        return counted

    def _counted(self, batch: Any) -> Any:
        self.watcher.batch()
        return batch

    def _step(self, step: Callable[..., bool]) -> Callable[..., bool]:
        def counted(*values: Any, **named: Any) -> bool:
            self.watcher.batch()
            return step(*values, **named)

        return counted

    def _on_round(self, on_round: Callable[..., None]) -> Callable[..., None]:
        def noted(function: Any) -> None:
            self.watcher.hooked()
            on_round(function)

        return noted


# -- without a run ----------------------------------------------------------------------------------------------------


class PlainContext(ReplicaContext):
    """A context in which nothing is synchronised between replicas, scored or compared: training without a run."""

    def __init__(self, attempt: Attempt, watch: Watch, ranks: Ranks) -> None:
        super().__init__(attempt, ranks)
        self.watcher = Watcher(watch, attempt.config.round_steps, ranks)

    def attach(self, model: torch.nn.Module, optimizer: Any, **options: Any) -> ReplicaSession:
        if self.session is not None:
            raise ConfigError("attach was called twice: one replica trains one model.")
        self.watcher.attach(model, optimizer, options)
        attached, replica = AttachedModel(model), f"{self.seed}/replica {self.replica_id}"
        island = Island(self._ranks, attached, InnerOptimizers(optimizer), {}, replica=replica)
        self.session = PlainSession(self.watcher, self._attempt, attached, island)
        return self.session

    def end(self) -> None:
        self.watcher.write()


class PlainSession(ReplicaSession):
    """Every public method of `ReplicaSession`, for training without a run: it ends after the run's inner steps.

    After each round's steps the parameters are rounded as an outer step of rate 1 rounds them, `b - (b - p)` in fp32
    with b the parameters at the last such place, so that one replica and plain training can be compared bit by bit.
    `island`: gives the ranks of a replica of several the buffers and random numbers that they have in a run.
    """

    is_unheard = False  # no notice comes to training without a run

    def __init__(self, watcher: Watcher, attempt: Attempt, attached: AttachedModel, island: Island) -> None:
        config = attempt.config
        self._watcher = watcher
        self._island = island
        self._seed = config.seed + 1 + attempt.replica_id  # as in `TrainingPosition`
        self._round_steps = config.round_steps
        self._steps = attempt.outer_steps * config.round_steps
        if watcher.watch.disturbed:
            self._steps = min(self._steps, self._round_steps + 1)
        # Parameters that are replaced later are not synchronised in a run either.
        self._held = attached.parameters
        self._base = {name: local_part(p).float().clone() for name, p in self._held.items()}
        self._settled = 0  # steps that were processed
        self._before = watcher.parameters()  # the last step's
        watcher.before_step = self._settle

    def __enter__(self) -> Self:
        rng.seed_all(self._seed)
        self._island.opened(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle()

    @property
    def step_count(self) -> int:
        return self._watcher.notes.steps

    @property
    def round(self) -> int:
        return 1  # plain training has no rounds

    @property
    def stopped(self) -> bool:
        return self.step_count >= self._steps

    @property
    def preempted(self) -> bool:
        return False

    def batches(self, data: Iterable[Any]) -> Iterator[Any]:
        island = self._island
        cursor = DataCursor(data, lambda epoch: island.seed(f"{island.replica}/epoch {epoch}"))
        rng.seed_all(self._seed)
        island.reseed()
        while not self.stopped:
            self._watcher.batch()
            yield cursor.next()
            self._settle()

    def step(self, *_: Any, **__: Any) -> bool:
        self._watcher.batch()
        self._settle()
        return not self.stopped

    def observe(self, *_: Any, **__: Any) -> None:
        pass

    def declare(self, items: Iterable[Any]) -> None:
        pass

    @property
    def compares_items(self) -> bool:
        return False

    def checked(self, batch: Any) -> Any:
        return batch

    def on_round(self, function: Any) -> None:
        self._watcher.hooked()

    @torch.no_grad()
    def _settle(self) -> None:
        """Round the parameters at a round's end as a run's outer step does, once for each step of the round."""
        count = self.step_count
        if count == self._settled:
            return
        self._settled = count
        if count == self._round_steps + 1:
            self._watcher.keep("next", self._watcher.parameters())
        if count == self._round_steps - 1:
            self._before = self._watcher.parameters()
        if count % self._round_steps == 0:
            for name, parameter in self._held.items():
                local = local_part(parameter)
                base = self._base[name] - (self._base[name] - local.float())
                self._base[name] = base
                local.copy_(base)
            self._island.opened(count)
            if count == self._round_steps and self._watcher.watch.disturbed:
                self._disturb()

    def _disturb(self) -> None:
        """Move every parameter by ten times the largest change that the last step made in its tensor."""
        moved = {}
        for name, parameter in self._held.items():
            before = self._before.get(name)
            local, last = local_part(parameter), 0.0
            if before is not None and before.numel():
                last = float((local.cpu() - before).float().abs().max())
            local.add_(10 * last)
            moved[name] = torch.tensor(10 * last)
        self._watcher.keep("moved", moved)
