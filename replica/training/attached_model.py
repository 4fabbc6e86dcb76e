"""`AttachedModel`: the user's model in a replica, checked at `attach` and before every contribution."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.config.run_config import NEED_WHOLE_MODEL
from diloco_orchestrator.config.schedule import SyncSchedule
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.diloco_loop import trainable_parameters
from diloco_orchestrator.replica.training.exact_adapters import ExactAdapters, ExactView
from diloco_orchestrator.replica.training.fp32_shadow import check_whole, views_of
from diloco_orchestrator.replica.training.fragments import FragmentView, split_fragments
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import plain_name, unwrapped
from diloco_orchestrator.snapshots.pieces_of_ranks import PiecesOfRanks

log = logging.getLogger(__name__)


class AttachedModel:
    """A model without its `torch.compile` wrapper, and its trainable parameters by name.

    Raises `ModelMismatch` if it has none, and `ConfigError` for a parameter that no `FragmentView` supports.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = unwrapped(model)
        self.parameters = trainable_parameters(self.module)
        for name, parameter in self.parameters.items():
            check_whole(name, parameter)
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}
        self._reshards = _of_class(self.module, "FSDPModule")
        _check_sharding(self.module, bool(self._reshards))

    def reshard(self) -> None:
        """Free the whole parameters that FSDP2 keeps after a forward pass, so that the model has its shards again."""
        for module in self._reshards:
            module.reshard()

    def split(
        self,
        config: RunConfig,
        tokenizer: Any,
        view: Callable[[Sequence[str]], FragmentView] | None,
        frozen: PiecesOfRanks | None,
    ) -> "ModelParts":
        """The model's fragments, access to their values, and its parts of a snapshot. Raises `ConfigError`.

        `view`: makes the access to a fragment of named parameters, for a model in several ranks or sharded; None: all
        values are in this process. `frozen`: the parameters that are not trained and are sharded.
        """
        schedule = config.schedule
        names, views = split_fragments(self.parameters, config.fragments), list[FragmentView]()
        if view is None:
            views += views_of(self.parameters, names, mixes=schedule.alpha > 0, in_background=schedule.delay > 0)
        else:
            self._check_ranks_support(config)
            views += map(view, names)
        if config.adapters == "mean":
            return ModelParts(self, names, views, schedule, ModelFiles.of(self.module, tokenizer, pieces=frozen))
        exact = ExactAdapters(self.module, self.parameters)
        return ModelParts(self, names, [ExactView(views[0], exact)], schedule, exact.model_files(tokenizer))

    @staticmethod
    def _check_ranks_support(config: RunConfig) -> None:
        """Raise `ConfigError` for settings that need all values of a model in one process."""
        for name in NEED_WHOLE_MODEL:
            value, usual = getattr(config, name), RunConfig.model_fields[name].default
            if value != usual:
                raise ConfigError(
                    f"{name}={value!r} needs the whole model in one process; this one is sharded, or in several ranks. "
                    f"Set {name}={usual!r}, or train with one rank and without fully_shard."
                )

    def check_optimized(self, optimizers: InnerOptimizers, stateful: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless the optimizers train this model; log parameters that none of them trains.

        `stateful`: the user's objects; optimizers among them count too.
        """
        trained = set(map(id, optimizers.parameters()))
        if not any(id(parameter) in trained for parameter in self.parameters.values()):
            raise ConfigError(
                "the optimizer holds no parameter of the model: its steps would not train it. Make the "
                "optimizer from the parameters of this model, after the model has its final form."
            )
        trained |= {id(parameter) for each in stateful.values() for parameter in _parameters_in(each)}
        left = [name for name, parameter in self.parameters.items() if id(parameter) not in trained]
        if left:
            log.warning(
                "%d trainable parameters, %r the first, are in no optimizer given here. If another one trains "
                "them, attach it too, as in attach(model, [one, other]), so that its state is saved.",
                len(left),
                left[0],
            )

    def check_unchanged(self) -> None:
        """Raise `ConfigError` if the parameters are other objects than at `attach`: those are not synchronised."""
        self.reshard()
        now = {plain_name(name): parameter for name, parameter in self.module.named_parameters()}
        for name, parameter in self.parameters.items():
            if now.get(name) is not parameter:
                raise ConfigError(
                    f"the model's parameter {name!r} was replaced after the model was attached, which keeps the old "
                    "one. Change the model before."
                )
            if parameter.dtype != self._dtypes[name]:
                raise ConfigError(
                    f"the model's parameter {name!r} was {_short(self._dtypes[name])} when it was attached and is "
                    f"{_short(parameter.dtype)} now: the run's snapshots hold the former. Call model.to(dtype) before."
                )
        for name, parameter in now.items():
            if parameter.requires_grad and name not in self.parameters:
                raise ConfigError(
                    f"the model's parameter {name!r} is trained since after the model was attached, and would be "
                    "synchronised nowhere. Set requires_grad before; to train it later, give it lr=0 until then."
                )


@dataclass(frozen=True)
class ModelParts:
    """An attached model's fragments: their names, access to their values, schedule; and its parts of snapshots."""

    attached: AttachedModel
    names: Sequence[tuple[str, ...]]
    views: Sequence[FragmentView]
    schedule: SyncSchedule
    files: ModelFiles


def _of_class(model: torch.nn.Module, name: str) -> list[Any]:
    """The modules of a class of `torch.distributed.fsdp`, by its name: that takes a second to import."""
    return [each for each in model.modules() if any(kind.__name__ == name for kind in type(each).__mro__)]


def _check_sharding(model: torch.nn.Module, is_sharded: bool) -> None:
    """Raise `ConfigError` for a model sharded by FSDP1, or in a way that has untied its weights."""
    if _of_class(model, "FullyShardedDataParallel"):
        raise ConfigError(
            "the model is in FullyShardedDataParallel (FSDP1), which flattens parameters into buffers of its own. "
            "Shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead; in Lightning by ModelParallelStrategy, "
            'in a Trainer by TrainingArguments(fsdp=True, fsdp_config={"version": 2}).'
        )
    if not is_sharded or not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = [getattr(end, "weight", None) for end in ends]
    if weights[0] is not None and weights[1] is not None and weights[0] is not weights[1]:
        raise ConfigError(
            "the model's config has tie_word_embeddings=True, and its embedding and head are two parameters: "
            "fully_shard in two groups has untied them, as torch before 2.13 does without an error (this is "
            f"{torch.__version__}). Shard them in one group, fully_shard([embedding, head]), which needs torch 2.13."
        )


def _parameters_in(stateful: Any) -> Iterable[torch.Tensor]:
    groups = getattr(stateful, "param_groups", None) or ()
    return (parameter for group in groups for parameter in group["params"])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
