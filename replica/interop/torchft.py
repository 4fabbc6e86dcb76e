"""`ObjectStoreManager`: takes part in rounds for a training loop that its user starts, without a coordinator.

It serves two loops: ours (`make_diloco_outer_loop`), which calls `start`, and torchft's own `DiLoCo` and `LocalSGD`, as
their `manager` (call `attach` first). torchft is not imported here; only users of its classes need it. Rounds are in
`replica.rounds`.
"""

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diloco_orchestrator.allreduce.vectors import FlatTensors, Vector
from diloco_orchestrator.clock import Clock, SystemClock, ThreadBackground, random_token
from diloco_orchestrator.config import OuterConfig, make_config
from diloco_orchestrator.errors import ConfigError, RoundError
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.replica.attempt.attempt import Attempt, adopted_attempt, claim_attempt
from diloco_orchestrator.replica.interop.group_ranks import group_of_replica, joined_in_group
from diloco_orchestrator.replica.rounds.interface import ClosedRound, ContributionFields, Rounds
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.diloco_loop import trainable_parameters
from diloco_orchestrator.replica.training.exchange import is_sharded
from diloco_orchestrator.replica.training.fp32_shadow import PseudoGradient, check_whole
from diloco_orchestrator.replica.training.fragments import split_fragments
from diloco_orchestrator.replica.training.ranks import Ranks
from diloco_orchestrator.run_log.append import join_or_create_run
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.store.open_store import open_store

LoadStateDict = Callable[[Any], None]
SaveStateDict = Callable[[], Any]


class TorchftManager:
    """The part of `torchft.Manager` that torchft's `DiLoCo` and `LocalSGD` use, implemented over `Rounds`.

    torchft calls `allreduce` once per parameter; one contribution is published per round, when the fragment's last
    tensor has arrived. `DiLoCo` passes pseudo-gradients and reads their average; `LocalSGD` passes parameters and reads
    the next base. Subclasses implement `start` and `outer_config`.
    """

    _use_async_quorum = False  # torchft's DiLoCo refuses a manager with asynchronous quorum

    def __init__(self) -> None:
        self.ranks = Ranks.alone()
        self._rounds: Rounds | None = None
        self._trained: frozenset[str] = frozenset()
        # Shapes by parameter name, in the order in which torchft passes tensors.
        self._fragments: list[dict[str, torch.Size]] = []
        self._registered = 0  # fragments of torchft's DiLoCo; LocalSGD registers none
        self._tensors: list[torch.Tensor] = []
        self._closed: ClosedRound | None = None

    # -- before torchft's class is made --------------------------------------------------------------------------

    def attach(
        self,
        model: torch.nn.Module,
        fragments: Sequence[torch.nn.Module] | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Join the rounds with this model and load the newest base into it. Call it before making torchft's object.

        `fragments`: the modules that are passed to `DiLoCo`, in that order; by default the whole model is one fragment.
        Frozen parameters keep their values and are not published. Raises `ConfigError` unless every trainable parameter
        is in exactly one fragment, whole in this process and real, `ModelMismatch` if the model is not the run's.
        """
        parameters = trainable_parameters(model)
        if self.ranks.ranks > 1 or any(map(is_sharded, parameters.values())):
            raise ConfigError(
                "torchft's classes average whole parameters of one process; this replica has "
                f"{self.ranks.ranks} ranks, or a sharded model. Use make_diloco_outer_loop, in every rank."
            )
        for name, parameter in parameters.items():
            check_whole(name, parameter)
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        parts = [model] if fragments is None else fragments
        self._fragments = [{name_of.get(id(p), name): p.shape for name, p in part.named_parameters()} for part in parts]
        self._trained = frozenset(parameters)
        names = split_fragments(parameters, [[n for n in part if n in parameters] for part in self._fragments])
        rounds = self.start(OwnModel(parameters, names, ModelFiles.of(model, tokenizer)), None)
        rounds.base.copy_into(parameters)

    def start(self, own: OwnModel, outer: OuterConfig | None) -> Rounds:
        """Join the rounds with a model; returns them. `outer`: the outer optimizer's settings; None: the run's own."""
        raise NotImplementedError

    def leave(self) -> None:
        """End the background work of the rounds. Safe to repeat, and before the rounds were joined."""

    def outer_config(self) -> OuterConfig:
        """The settings of the outer optimizer of the rounds."""
        raise NotImplementedError

    # -- called by torchft ---------------------------------------------------------------------------------------

    def register_state_dict_fn(self, key: str, load: LoadStateDict, save: SaveStateDict) -> None:
        """Called by torchft's DiLoCo for each fragment in order; loads the base's momenta into its outer optimizer.

        Raises `ConfigError` if the fragment is not the one that `attach` was given, or if its outer optimizer is not
        the run's: replaying the commit log would give another model.
        """
        rounds, state = self._attached(), save()
        fragment = self._fragments[self._registered] if self._registered < len(self._fragments) else {}
        self._registered += 1
        shapes = [tuple(tensor.shape) for tensor in state["original_parameters"].values()]
        if shapes != [tuple(shape) for shape in fragment.values()]:
            raise ConfigError(
                f"torchft's {key} has parameters of shapes {shapes}, which are not those of the module that "
                "manager.attach was given. Give both the same modules in the same order."
            )
        held = self._held_by(state["outer_optimizer"], list(fragment))
        if rounds.open.outer_step and self.outer_config().momentum:
            momenta = {index: rounds.base.momentum(name) for index, name in enumerate(held) if name in self._trained}
            state["outer_optimizer"]["state"] = {index: {"momentum_buffer": m} for index, m in momenta.items()}
            load(state)

    def allow_state_dict_read(self) -> None:
        """Does nothing: no other replica reads a live state here; a newcomer rebuilds the base from the bucket."""

    def disallow_state_dict_read(self) -> None:
        """Does nothing: no other replica reads a live state here (see `allow_state_dict_read`)."""

    def start_quorum(self) -> None:
        """Begin a round. Raises `ConfigError` without `attach`, and for LocalSGD without plain averaging."""
        self._attached()
        outer = self.outer_config()
        if self._averages_parameters and (outer.lr != 1.0 or outer.momentum):
            raise ConfigError(
                f"LocalSGD averages parameters, which is an outer step with lr=1 and no momentum; the run has {outer}. "
                "Join with outer=OuterConfig(lr=1.0, momentum=0.0)."
            )
        self._tensors, self._closed = [], None

    def current_step(self) -> int:
        """Number of outer steps in the base, by which torchft picks the fragment. Changes when a round is closed."""
        return self._attached().open.outer_step

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> "_Work":
        """Collect a tensor of the open fragment; it holds the result after `wait()` of the returned work.

        Publishes the contribution with the fragment's last tensor. Raises `ConfigError` for `should_quantize`.
        """
        if should_quantize:
            raise ConfigError("should_quantize needs CUDA and keeps no error feedback; set the run's `codec` instead.")
        self._tensors.append(tensor)
        if len(self._tensors) == len(self._open_fragment()):
            self._publish()
        return _Work(self._close_once)

    def should_commit(self) -> bool:
        """Whether torchft uses the result: with DiLoCo if the round was applied, with LocalSGD always.

        If a round is not applied, LocalSGD would keep its trained parameters; but that work is carried into the next
        contribution and must not count twice, so the parameters are set to the base.
        """
        return self._averages_parameters or (self._closed is not None and self._closed.applied)

    # -- a round -------------------------------------------------------------------------------------------------

    @property
    def _averages_parameters(self) -> bool:
        return not self._registered

    def _attached(self) -> Rounds:
        if self._rounds is None:
            raise ConfigError(
                "the manager knows no model yet: call manager.attach(model), or manager.attach(model, fragments), "
                "before torchft's DiLoCo or LocalSGD is made."
            )
        return self._rounds

    def _open_fragment(self) -> Mapping[str, torch.Size]:
        return self._fragments[self._attached().open.fragment]

    def _by_name(self) -> dict[str, torch.Tensor]:
        found = dict(zip(self._open_fragment(), self._tensors, strict=True))
        return {name: found[name] for name in sorted(found) if name in self._trained}

    def _publish(self) -> None:
        rounds = self._attached()
        tensors = {name: _fp32(tensor) for name, tensor in self._by_name().items()}
        pseudo_gradient: Vector = FlatTensors(list(tensors.values()))
        if self._averages_parameters:
            pseudo_gradient = PseudoGradient.of(rounds.base, tensors)
        # In the background, because torchft may wait some inner steps later (`fragment_sync_delay`).
        rounds.publish(lambda: pseudo_gradient, ContributionFields(), in_background=True)
        rounds.close_beside_training(lambda: None, keep_average=not self._averages_parameters)

    def _close_once(self) -> None:
        """Close the round at the first `wait()` on one of its tensors, and write the results into all its tensors."""
        if self._closed is not None:
            return
        rounds, tensors = self._attached(), self._by_name()
        self._closed = rounds.close(keep_average=not self._averages_parameters)
        if self._closed.skipped:
            raise RoundError(
                "payloads of the open round were deleted by retention, and the rounds have gone on from a newer "
                "snapshot. Start this process again: attach loads the newest base."
            )
        if self._averages_parameters:
            rounds.base.copy_into(tensors)
        elif self._closed.applied:
            for name, tensor in tensors.items():
                tensor.copy_(self._closed.average[name])

    def _held_by(self, state: Mapping[str, Any], names: Sequence[str]) -> Sequence[str]:
        """Names of the parameters in an outer optimizer's state: the whole fragment, or its trained part.

        Raises `ConfigError` if it has other parameters, or is not the run's outer optimizer.
        """
        groups = state["param_groups"]
        count = sum(len(group["params"]) for group in groups)
        trained = [name for name in names if name in self._trained]
        if count not in (len(names), len(trained)):
            raise ConfigError(
                f"an outer optimizer holds {count} parameters, its fragment {len(trained)}. Give DiLoCo a list with "
                "one outer optimizer per fragment: a shared one would move those that are not being synchronised."
            )
        outer = self.outer_config()
        settings = ("lr", "momentum", "nesterov") if outer.momentum else ("lr", "momentum")
        for group in groups:
            found = {setting: group.get(setting) for setting in settings}
            extra = [setting for setting in ("dampening", "weight_decay", "maximize") if group.get(setting)]
            if extra or found != outer.model_dump(include=set(found)):
                given = {**found, **{setting: group[setting] for setting in extra}}
                raise ConfigError(
                    f"torchft's outer optimizer is {given}, the run's is {outer}. Give both the same numbers, "
                    "Nesterov(list(module.parameters()), outer) has them: the log's base is computed from the run's."
                )
        return names if count == len(names) else trained


class _Work:
    """The part of `torch.distributed.Work` that torchft uses, for one tensor of a round."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> bool:
        """Block until the round is closed and the tensor holds the result; returns True. Raises the round's errors."""
        self._finish()
        return True


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def _leave(participant: "weakref.ref[Participant]") -> None:
    """End the participant's background work at the interpreter's exit, while threads still run."""
    found = participant()
    if found is not None:
        found.leave()


class ObjectStoreManager(TorchftManager):
    """Takes part in the rounds of a run in a bucket, as torchft's manager or for our loop. Create it with `join`."""

    def __init__(self, attempt: Attempt, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.ranks = ranks or self.ranks
        self._attempt = attempt
        self._participant: Participant | None = None

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
        path: str = "gather",
        snapshot_every: int = 10,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> "ObjectStoreManager":
        """Take part in the run at `uri`; the first replica to arrive creates it with these settings.

        A process that joins again with the same `replica_id` is that replica's next attempt. Where torch's default
        process group exists, as under torchrun, and all its processes join with one `replica_id`, they are the ranks of
        that replica, which train one model together.

        Args:
            rounds: number of outer steps of the run.
            outer: the outer optimizer; default: `OuterConfig()`.
            quorum: by default "all": every round waits for every replica, because a loop without a `ReplicaContext`
                neither polls whether a round went on without it nor announces itself when it comes back.
            storage_options: credentials and endpoint as s3fs spells them.

        Raises:
            ConfigError: some processes of torch's default group, but not all, join with the same `replica_id`.
            RunFolderTaken: the folder holds a run with another configuration.
        """
        clock = clock or SystemClock()
        stamp = Stamp(random_token(), clock.wall_time)
        store = of_run(open_store(uri, storage_options, clock=clock))
        config = make_config(
            {
                "entrypoint": "__main__:main",
                "replicas": replicas,
                "rounds": rounds,
                "outer": (outer or OuterConfig()).model_dump(),
                "quorum": quorum,
                "codec": codec,
                "path": path,
                "snapshot_every": snapshot_every,
            }
        )

        def claimed() -> Attempt:
            run = Run(**stamp(), run_id="library", config=config, package_version="library")
            join_or_create_run(store, run, by=f"replica {replica_id}", stamp=stamp)
            return claim_attempt(store, replica_id, None, clock, stamp, background=ThreadBackground())

        def adopted(number: int, leg: int, claim_sha256: str, launched: Launched) -> Attempt:
            given = clock, stamp, lambda: False, ThreadBackground(), launched
            return adopted_attempt(store, replica_id, number, leg, claim_sha256, *given)

        if (group := group_of_replica(replica_id)) is None:
            return cls(claimed())
        return cls(*joined_in_group(group, claimed, adopted, config.retry.hung_after_s))

    @property
    def participant(self) -> Participant:
        """This replica's `Participant`. Raises `ConfigError` before `attach` or `start` was called."""
        self._attached()
        assert self._participant is not None
        return self._participant

    def leave(self) -> None:
        if self._participant is not None:
            self._participant.leave()

    def start(self, own: OwnModel, outer: OuterConfig | None) -> Rounds:
        """Agree on the first base with the other replicas and rebuild the newest base from the bucket."""
        if outer is not None and outer != self.outer_config():
            raise ConfigError(
                f"outer={outer!r} is not the run's ({self.outer_config()!r}); a run has one outer optimizer. "
                "Leave it out."
            )
        participant = Participant.join(self._attempt, own)
        self._rounds = self._participant = participant
        participant.buffers.resume()
        atexit.register(_leave, weakref.ref(participant))
        return participant

    def outer_config(self) -> OuterConfig:
        """The run's outer optimizer, used by every replica and every rebuild."""
        return self._attempt.config.outer
