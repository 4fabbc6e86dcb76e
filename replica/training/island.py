"""`Island`: what all ranks of a replica do together. Rank 0 begins it; the others wait for it at step boundaries.

Rank 0 runs the training session and the rounds as a replica of one process does. Where those need the other ranks, for
values of the model, optimizer state, scores or metrics, rank 0 calls a method of its island by `Island.call`, and every
rank runs the same method at the same time.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from diloco_orchestrator.allreduce.vectors import has_nonzero
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer.base import Base, BaseLayout
from diloco_orchestrator.protocol.records import Consumed
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.attached_model import AttachedModel
from diloco_orchestrator.replica.training.exchange import (
    Move,
    is_sharded,
    local_part,
    owned_by_shard,
    ranks_on_one_batch,
)
from diloco_orchestrator.replica.training.fp32_shadow import Piece, PseudoGradient
from diloco_orchestrator.replica.training.heldout_scorer import HeldoutFn, undisturbed, values_of
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.ranks import Exchange, Ranks, pieces_in, read_in_parts
from diloco_orchestrator.replica.training.small_state import SmallState
from diloco_orchestrator.snapshots.model_tensors import plain_name
from diloco_orchestrator.snapshots.pieces_of_ranks import PiecesOfRanks, TensorInRanks
from diloco_orchestrator.snapshots.stored_state import StoredTensor
from diloco_orchestrator.snapshots.tensor_file import TensorSpec

_BLOCK = 1 << 20  # elements, of a sum
_GROUP = 1 << 26  # bytes of stored tensors for each rank, after which their memory is freed


class RankMetrics(NamedTuple):
    """Observations of one rank since the last contribution: values by name in step order, tokens, compared items.

    `drawn`: the epoch of its data, and the states of its data's own random generators when that began.
    """

    values: Mapping[str, Sequence[float]]
    tokens: int
    consumed: Consumed | None
    drawn: Mapping[str, Any] = {}


class Island:
    """The calls that all ranks of a replica make together, with one rank's model, optimizers and functions.

    All ranks make one at the same time. Raises `ConfigError` in every rank, naming the first difference, if their
    models differ, and for a parameter of which a part is on no rank.

    Args:
        stateful: the user's objects, by name, which take rank 0's state after a restart.
        heldout: scores items on this rank's model; None without a held-out set.
        replica: names run and replica, from which the other ranks' random numbers follow.
    """

    def __init__(
        self,
        ranks: Ranks,
        attached: AttachedModel,
        optimizers: InnerOptimizers,
        stateful: Mapping[str, Any],
        heldout: HeldoutFn | None = None,
        replica: str = "",
    ) -> None:
        self.ranks = ranks
        self.take_metrics: Callable[[], RankMetrics] = lambda: RankMetrics({}, 0, None)
        self.show_round: Callable[[Any], None] = lambda view: None
        self.seek: Callable[[int, int, Mapping[str, Any]], None] = lambda epoch, batches, drawn: None
        self.reseed: Callable[[], None] = lambda: None
        self.replica = replica
        self._attached = attached
        self._optimizers = optimizers
        self._stateful = stateful
        self._heldout = heldout
        self._held: list[dict[str, torch.Tensor]] = []  # local values put aside by `hold`, innermost last
        persistent = {plain_name(name) for name in attached.module.state_dict()}
        named = ((plain_name(name), each) for name, each in attached.module.named_buffers())
        self._buffers = {name: each for name, each in named if name in persistent}
        self._check_same_model()
        # Ranks with one batch, as of tensor parallelism, are a group: the scores, tokens and items of its first count.
        groups = ranks.everyone(ranks_on_one_batch(attached.module, ranks.rank))
        self._groups = sorted(set(groups))
        self._group = self._groups.index(groups[ranks.rank])
        self._pieces = pieces_in(ranks, attached.parameters)
        self._dealt: tuple[BaseLayout, Exchange] | None = None  # a base's layout, and the exchange with its shards

    def _check_same_model(self) -> None:
        ours = {name: (tuple(p.shape), str(p.dtype)) for name, p in self._attached.parameters.items()}
        every = self.ranks.everyone(ours)
        for rank, theirs in enumerate(every):
            for name in sorted(every[0].keys() | theirs.keys()):
                if every[0].get(name) != theirs.get(name):
                    raise ConfigError(
                        f"rank {rank} of this replica brings another model than rank 0: parameter {name!r} is "
                        f"{_words(theirs.get(name))} there and {_words(every[0].get(name))} in rank 0. Build the same "
                        "model in every rank; stages of a pipeline cannot be attached."
                    )

    def call(self, name: str, *args: Any) -> Any:
        """In rank 0: run the method `name` with `args` in all ranks at the same time; returns rank 0's result."""
        self.ranks.signal_call(name, args)
        return getattr(self, name)(*args)

    def make(self, name: str, *args: Any) -> Any:
        """In rank 0: run the method `name` in all ranks, each of which keeps the object that it returns.

        Returns rank 0's object, which as an argument of later calls stands for each rank's own (`Owners.make`).
        """
        number = self.ranks.new_number()
        self.ranks.signal_call(name, args, number)
        return self.ranks.kept(number, getattr(self, name)(*args))

    # -- values of the model ---------------------------------------------------------------------------------------

    def first_base(self, outer: OuterConfig, fragments: Sequence[Sequence[str]], shard_numel: int) -> Base:
        """The first base, from the model's values; each rank gets the shards that it owns. Arguments as of
        `Base.fresh`.

        Raises `ConfigError` if a parameter that is whole in every rank has other values in one.
        """
        self._attached.reshard()
        shapes = {name: parameter.shape for name, parameter in self._attached.parameters.items()}
        self._check_alike(list(shapes))
        base = Base.zeros(shapes, fragments, shard_numel, self.ranks.owners, momenta=outer.momentum > 0)
        self._with_shards_of(base).collect(list(shapes), lambda move, values: base.write(move.name, move.start, values))
        return base

    def local(self, names: Sequence[str], base: Base, copies: bool) -> PseudoGradient:
        """The pseudo-gradient `base - local` of one fragment's parameters `names`; each rank gets the shards that it
        owns.

        It is computed when it is read: with `copies` from copies of the values as they are now, else from the model
        where this rank holds them. Raises `ConfigError` if a parameter that is whole in every rank has other values in
        one.
        """
        self._attached.reshard()
        self._check_alike(names)
        pieces: list[Piece] = []

        def put(move: Move, values: torch.Tensor) -> None:
            kept = values.to("cpu", copy=True) if copies and move.holder == move.owner else values
            pieces.append(Piece(base.parameter_at(move.name)[1] + move.start, move.name, move.start, kept))

        self._with_shards_of(base).collect(names, put)
        return PseudoGradient(base, pieces, base.numel(names))

    def install(self, names: Sequence[str], base: Base) -> None:
        """Set the model's parameters `names` in all ranks to those of a base."""
        self._attached.reshard()
        whole = {name: local_part(p) for name, p in self._attached.parameters.items() if name in names}
        if self.ranks.ranks == 1 and all(each.numel() == base.parameters[name].numel() for name, each in whole.items()):
            with torch.no_grad():
                base.copy_into({name: each.view(base.parameters[name].shape) for name, each in whole.items()})
            return

        def read(name: str, start: int, stop: int) -> torch.Tensor:
            vector, first = base.parameter_at(name)
            return vector.read(first + start, first + stop)

        self._with_shards_of(base).spread(names, read)

    def _with_shards_of(self, base: Base) -> Exchange:
        """The exchange of values between the model in all ranks and the shards of a base. Sends nothing itself."""
        if self._dealt is None or self._dealt[0] != base.layout:
            owned = owned_by_shard(base.layout, self.ranks.ranks)
            self._dealt = base.layout, Exchange(self.ranks, self._attached.parameters, self._pieces, owned)
        return self._dealt[1]

    def restore(self, stored: Mapping[str, StoredTensor]) -> None:
        """Set the model's parameters of these names in all ranks to stored tensors."""
        self._attached.reshard()
        self._take({name: self._attached.parameters[name] for name in stored}, stored)

    def hold(self, names: Sequence[str]) -> None:
        """Copy this rank's values of the parameters `names` aside, until `release`."""
        self._attached.reshard()
        self._held.append({name: local_part(self._attached.parameters[name]).clone() for name in names})

    @torch.no_grad()
    def release(self) -> None:
        """Restore the parameter values that the last `hold` copied aside."""
        self._attached.reshard()
        for name, value in self._held.pop().items():
            local_part(self._attached.parameters[name]).copy_(value)

    def _check_alike(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` unless parameters that are whole in every rank have the same bits in all."""
        if self.ranks.ranks == 1:
            return
        whole = [name for name in names if not is_sharded(self._attached.parameters[name])]
        every = self.ranks.everyone({name: _checksum(self._attached.parameters[name]) for name in whole})
        for rank, theirs in enumerate(every):
            for name in whole:
                if theirs[name] != every[0][name]:
                    raise ConfigError(
                        f"parameter {name!r} has other values in rank {rank} than in rank 0: the ranks of a replica "
                        "train one model. Wrap it in DistributedDataParallel or shard it with fully_shard before "
                        "ctx.attach."
                    )

    # -- scores ----------------------------------------------------------------------------------------------------

    def scored_by_all(self, heldout: HeldoutFn) -> HeldoutFn:
        """`heldout` for rank 0's scorer: every rank scores a part of the items on its own model."""
        if self.ranks.ranks == 1:
            return heldout

        @functools.wraps(heldout)
        def scores(model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
            found: list[float] = self.call("score", list(items))
            return found

        return scores

    def score(self, items: Sequence[Any]) -> list[float]:
        """Held-out scores, one per item in their order, in every rank. Each of R ranks scores every R-th item.

        Ranks between which tensors are parallel score the same items, as one rank. A rank that is dealt fewer scores
        its last item again, because a sharded model needs all ranks in each forward pass.
        """
        groups, count = len(self._groups), -(-len(items) // len(self._groups))
        if self._heldout is None:
            raise ConfigError(
                f"rank {self.ranks.rank} was given no heldout function, and rank 0 was: pass it to ctx.attach in every "
                "rank."
            )
        self.share_buffers()
        mine = [items[index] for index in range(self._group, len(items), groups)]
        padded = [*mine, *[(mine or list(items))[-1]] * (count - len(mine))]
        with undisturbed(self._attached.module):
            values = values_of(self._heldout, self._attached.module, padded, f"rank {self.ranks.rank}")
        every = self.ranks.everyone(values[: len(mine)])
        return [every[self._groups[index % groups][0]][index // groups] for index in range(len(items))]

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Set this rank's persistent buffers to rank 0's."""
        if not self._buffers or self.ranks.ranks == 1:
            return
        theirs = self.ranks.shared({} if self.ranks.rank else {n: b.detach().cpu() for n, b in self._buffers.items()})
        for name, value in theirs.items() if self.ranks.rank else ():
            self._buffers[name].copy_(value)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def frozen(self) -> PiecesOfRanks:
        """The sharded parameters of the model that are not trained, in the ranks that hold them."""
        self._attached.reshard()
        named = self._attached.module.named_parameters(remove_duplicate=False)
        sharded = {plain_name(name): each for name, each in named if not each.requires_grad and is_sharded(each)}
        return read_in_parts(self.ranks, sharded)

    def metrics(self) -> list[RankMetrics]:
        """The observations of each rank since the last call: metrics of its inner steps, in rank order.

        Those of ranks that train on the same batches have its tokens and items only once.
        """
        found, first = self.ranks.everyone(self.take_metrics()), {group[0] for group in self._groups}
        return [each if rank in first else each._replace(tokens=0, consumed=None) for rank, each in enumerate(found)]

    # -- training state --------------------------------------------------------------------------------------------

    def optimizer_pieces(self) -> PiecesOfRanks:
        """The sharded tensors in the optimizers' state, in the ranks that hold them, by name of their key."""
        state = self._optimizers.local_state_dict()
        return read_in_parts(self.ranks, {_name(key): each for key, each in _state_tensors(state) if is_sharded(each)})

    def model_pieces(self, names: Sequence[str]) -> PiecesOfRanks:
        """The sharded ones among the model's parameters of these names, in the ranks that hold them."""
        self._attached.reshard()
        named = {name: self._attached.parameters[name] for name in names}
        return read_in_parts(self.ranks, {name: each for name, each in named.items() if is_sharded(each)})

    def in_ranks(self, names: Sequence[str]) -> dict[str, torch.Tensor | TensorInRanks]:
        """In rank 0: the model's parameters of these names as they are saved: those that are sharded, in the ranks."""
        pieces: PiecesOfRanks = self.make("model_pieces", names)
        return {name: _in_ranks(self._attached.parameters[name], pieces, name) for name in names}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load an optimizer state, of a replica of any number of ranks, into all ranks.

        Tensors like the parameter that they are of are stored ones, of which each rank takes what it holds.
        """
        parameters = self._optimizers.numbered_parameters()
        stored = {key: each for key, each in _state_tensors(state) if isinstance(each, StoredTensor)}
        found = {key: _piece_like(parameters[key[:2]], each.dtype) for key, each in stored.items()}
        self._take({_name(key): each for key, each in found.items()}, {_name(key): stored[key] for key in stored})
        self._optimizers.load_local_state_dict(_replaced(state, found))

    def _take(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
        """Set tensors, plain or sharded, in all ranks to stored ones of the same names, and free those part by part."""
        groups: list[dict[str, StoredTensor]] = [{}]
        for name, each in sorted(stored.items(), key=lambda pair: pair[1].start):
            if sum(other.spec.nbytes for other in groups[-1].values()) > _GROUP * self.ranks.ranks:
                groups.append({})
            groups[-1][name] = each
        for group in groups:
            of_group = {name: tensors[name] for name in group}
            owned = {name: each.owned() for name, each in group.items()}
            exchange = Exchange(self.ranks, of_group, pieces_in(self.ranks, of_group), owned)
            exchange.spread(list(group), lambda name, start, stop: stored[name].read(start, stop))
            for each in group.values():
                each.release()

    def clear(self) -> None:
        """Drop the optimizers' state in all ranks."""
        self._optimizers.clear_local()

    def clear_not_finite(self) -> int:
        """Drop the optimizers' state of each parameter for which it is not finite in any rank; returns their number."""
        poisoned = set().union(*self.ranks.everyone(self._optimizers.not_finite()))
        return self._optimizers.clear_numbers(poisoned)

    def zero_grad(self) -> None:
        """Drop all gradients in all ranks."""
        for each in self._optimizers.all:
            each.zero_grad()

    def follow(
        self, small: str, large: Mapping[str, Any], epoch: int, batches: int, drawn: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """In the other ranks: take over rank 0's stateful objects, learning rates, and position in the data.

        `small`: states as in a manifest. `large`: states of other objects, by name. `epoch`, `batches`: position at
        which rank 0 continues; another rank goes to the same batch of its own data. A negative epoch: each continues
        where it is. `drawn`: `RankMetrics.drawn` of each other rank there; of another number of ranks it is not used.
        """
        if not self.ranks.rank:
            return
        SmallState(self._optimizers, self._stateful).load(small, "the call of rank 0")
        for name, state in large.items():
            if name in self._stateful:
                self._stateful[name].load_state_dict(state)
        if epoch >= 0:
            self.seek(epoch, batches, drawn[self.ranks.rank - 1] if len(drawn) == self.ranks.ranks - 1 else {})

    def opened(self, inner_steps: int) -> None:
        """Set all ranks' buffers to rank 0's, and the other ranks' random generators, at the opening of a round.

        Their generators are seeded from run, replica, the replica's inner steps so far, and the rank; those of ranks
        that share rank 0's batches get its state. So a restarted replica draws the same numbers, though no record holds
        the generators of any rank but 0.
        """
        self.share_buffers()
        if len(self._groups[0]) > 1:
            state = self.ranks.shared(None if self.ranks.rank else rng.capture())
            if state is not None and self.ranks.rank in self._groups[0][1:]:
                rng.restore(state)
        self.reseed = lambda: self.seed(f"{self.replica}/step {inner_steps}")
        self.reseed()

    def seed(self, words: str) -> None:
        """Seed the random generators of a rank from `words` and its number, unless it shares the batches of rank 0."""
        if self._group:
            digest = hashlib.sha256(f"{words}/rank {self._groups[self._group][0]}".encode()).digest()
            rng.seed_all(int.from_bytes(digest[:4], "little"))

    def show(self, view: Any) -> None:
        """Call the functions that the user gave to `on_round` in the other ranks. `view`: of the committed round."""
        if self.ranks.rank:
            self.show_round(view)


class RankedOptimizers(InnerOptimizers):
    """Inner optimizers of a replica of several ranks, in rank 0: state is saved, loaded and dropped in all ranks."""

    island: Island  # set once it is made, of these optimizers

    def state_dict(self) -> dict[str, Any]:
        state, pieces = self.local_state_dict(), self.island.make("optimizer_pieces")
        sharded = [(key, each) for key, each in _state_tensors(state) if is_sharded(each)]
        found: dict[str, Any] = _replaced(state, {key: _in_ranks(each, pieces, _name(key)) for key, each in sharded})
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of stored tensors: each rank takes its part of those that are like their parameter."""
        self.check_number(state)
        parameters, stored = self.numbered_parameters(), dict(_state_tensors(state))
        whole = {
            key: each.whole()
            for key, each in stored.items()
            if isinstance(each, StoredTensor) and getattr(parameters.get(key[:2]), "shape", None) != each.shape
        }
        self.island.call("load_optimizer_state", _replaced(state, whole))

    def zero_grad(self) -> None:
        self.island.call("zero_grad")

    def clear(self) -> None:
        self.island.call("clear")

    def clear_not_finite(self) -> int:
        cleared: int = self.island.call("clear_not_finite")
        return cleared


class IslandView:
    """A fragment of a model whose parameters `names` are in several ranks, perhaps sharded (`FragmentView`)."""

    def __init__(self, island: Island, names: Sequence[str]) -> None:
        self._island = island
        self._names = tuple(names)

    def pseudo_gradient(self, base: Base) -> PseudoGradient:
        found: PseudoGradient = self._island.make("local", self._names, base, False)
        return found

    def handed_over(self, base: Base) -> Callable[[], PseudoGradient]:
        """Copy the fragment's values now. The returned function gives `base - local` of them, in any thread."""
        found: PseudoGradient = self._island.make("local", self._names, base, True)
        return lambda: found

    def stage(self, base: Base) -> None:
        """Does nothing: ranks take the base when it is installed, in the training thread."""

    def install(self, base: Base, keep: float = 0.0) -> None:
        """Set the fragment's parameters in all ranks to the base. Raises `ValueError` if a share of the local values is
        to stay.
        """
        if keep:
            raise ValueError("a share of sharded local values cannot be kept.")
        self._island.call("install", self._names, base)

    @contextmanager
    def holding(self, base: Base) -> Iterator[None]:
        """Context in which the model in all ranks has the values of a base; restores its own values after it."""
        self._island.call("hold", self._names)
        self.install(base)
        try:
            yield
        finally:
            self._island.call("release")

    def values(self) -> dict[str, torch.Tensor | TensorInRanks]:
        return self._island.in_ranks(self._names)

    def restore(self, values: Mapping[str, StoredTensor]) -> None:
        self._island.call("restore", {name: values[name] for name in self._names})


@dataclass(frozen=True, kw_only=True)
class IslandModel(OwnModel):
    """The model that a replica of several ranks, or one with sharded parameters, brings to the run."""

    island: Island
    is_whole: ClassVar[bool] = False

    def first_base(self, outer: OuterConfig, shard_numel: int) -> Base:
        found: Base = self.island.make("first_base", outer, self.fragments, shard_numel)
        return found

    def has_values_of(self, base: Base) -> bool:
        for fragment, names in enumerate(base.fragments):
            change: PseudoGradient = self.island.make("local", names, base, False)
            differs = has_nonzero(change, base.owners, fragment, base.shard_numel)
            base.owners.each(PseudoGradient.close, change)  # others would keep theirs until rank 0's next call
            if differs:
                return False
        return True


# -- optimizer states, as trees of dicts ------------------------------------------------------------------------------

_Key = tuple[int, Any, str]  # number of the optimizer, number of the parameter, name of the value


def _state_tensors(state: Any) -> list[tuple[_Key, Any]]:
    """The values of each parameter in a result of `InnerOptimizers.local_state_dict`, by key, sorted."""
    found = []
    for number, each in enumerate(InnerOptimizers.states_in(state)):
        of_parameters = each.get("state")
        for index, values in of_parameters.items() if isinstance(of_parameters, Mapping) else ():
            for name, value in values.items() if isinstance(values, Mapping) else ():
                if isinstance(value, torch.Tensor | StoredTensor):
                    found.append(((number, index, name), value))
    return sorted(found, key=lambda pair: tuple(map(str, pair[0])))


def _replaced(state: Any, values: Mapping[_Key, Any]) -> Any:
    """A copy of an optimizer state with the values at some keys replaced. The state itself is unchanged."""
    states = [
        {
            **each,
            "state": {
                index: {name: values.get((number, index, name), value) for name, value in of_parameter.items()}
                for index, of_parameter in each["state"].items()
            },
        }
        if any(key[0] == number for key in values)
        else each
        for number, each in enumerate(InnerOptimizers.states_in(state))
    ]
    return InnerOptimizers.joined_states(states)


def _in_ranks(tensor: torch.Tensor, pieces: PiecesOfRanks, name: str) -> torch.Tensor | TensorInRanks:
    """A tensor as it is saved: itself if this rank has it whole, else a reference to its pieces in the ranks."""
    return TensorInRanks(pieces, name, TensorSpec.of(tensor)) if is_sharded(tensor) else tensor.detach()


def _name(key: _Key) -> str:
    return ".".join(map(str, key))


def _piece_like(parameter: Any, dtype: torch.dtype) -> Any:
    """A tensor like a parameter, sharded as it is, with new memory for what this rank holds."""
    local = torch.zeros_like(local_part(parameter), dtype=dtype)
    if not is_sharded(parameter):
        return local
    from torch.distributed.tensor import DTensor  # imported late: only sharded models need it

    where = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, *where, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _checksum(tensor: torch.Tensor) -> int:
    """A checksum of the bits of a tensor; other values give another one, unless they are contrived."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_BLOCK))  # a sum copies what it adds up


def _words(found: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if found is None else f"{found[1].removeprefix('torch.')}{list(found[0])}"
