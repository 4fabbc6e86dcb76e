"""A PEFT adapter in the layout of PEFT's `save_pretrained`: the tensors of its file, and `adapter_config.json`.

For exactly averaged adapters this is the folder that `snapshots.reader_folder` makes: there the product of an adapter's
factors includes the residual, so that the factors have full rank. PEFT is recognised by duck typing and called through
the module that made the model; it is never imported here.
"""

import copy
import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.start_records import AdapterPair
from diloco_orchestrator.snapshots.file_plan import ADAPTER_GROUP, Naming
from diloco_orchestrator.snapshots.model_tensors import address, plain_name

log = logging.getLogger(__name__)

_PREFIX = "base_model.model."  # of every name in an adapter's file
# With another `init_lora_weights`, such as "pissa", PEFT changes the frozen weights: they are not those of the base.
_INITS = (True, False, "gaussian", "orthogonal", "eva")
_WHOLE = "snapshots hold the whole model, under names that PeftModel.from_pretrained does not read"


@dataclass(frozen=True)
class AdapterFolder:
    """The parts of an adapter folder that come from the model: tensor names, untrained tensors, config."""

    naming: Naming
    untrained: Mapping[str, torch.Tensor]  # what the file holds beside trained parameters, by name in the file
    base_name: str  # of the base model, for `from_pretrained`; empty if it has none
    config: bytes  # adapter_config.json


def adapter_folder(
    model: torch.nn.Module, trained: Collection[str], exact: Sequence[AdapterPair] = ()
) -> AdapterFolder | None:
    """The adapter folder of a model of PEFT, or of a transformers model with an adapter; None for any other model.

    None, with a warning, if the trained parameters are not exactly one adapter.

    Args:
        trained: names of the trained parameters.
        exact: adapters with residuals; the folder is then the one made for readers of a whole-model snapshot.
    """
    configs, library = getattr(model, "peft_config", None), sys.modules.get("peft")
    if not isinstance(configs, dict) or library is None:
        return None
    named = ((plain_name(name), each) for name, each in model.named_parameters())
    parameters = {name: each for name, each in named if name in trained}
    for adapter, config in sorted(configs.items()):
        tensors = _prompt_in_ranks(config, parameters)
        tensors = tensors or library.get_peft_model_state_dict(model, adapter_name=adapter)
        tensors = {_in_file(model, plain_name(name)): each for name, each in tensors.items()}
        stored = _stored_names(parameters, tensors)
        if stored is None:
            continue
        rest = {name: each for name, each in tensors.items() if name not in stored.values()}
        buffers = {address(each): plain_name(name) for name, each in model.named_buffers()}
        stored |= {buffers[address(each)]: name for name, each in rest.items() if address(each) in buffers}
        if exact and (config.peft_type != "LORA" or config.init_lora_weights not in _INITS):
            log.warning("the frozen weights under the adapter are not those of its base: %s", _WHOLE)
            return None
        base_name = _base_name(model, config)
        if not base_name:
            log.warning(
                "the model under the adapter has no name_or_path, so that no adapter folder can name its base. "
                "Keep the base where you find it, or save it and load it with from_pretrained."
            )
        if exact:
            names = _names_for_readers(model, tensors, exact)
            written = _full_rank(_config(model, config, base_name), exact, names, parameters)
            return AdapterFolder(Naming(for_readers=names), {}, base_name, written)
        return AdapterFolder(Naming(ADAPTER_GROUP, stored), rest, base_name, _config(model, config, base_name))
    log.warning("what is trained is not one adapter of PEFT: %s", _WHOLE)
    return None


def _prompt_in_ranks(config: Any, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensor of a learned prompt that is sharded, by its name in the file; empty for any other adapter.

    PEFT computes it, and in one rank a sharded layer waits for the others without end. A prompt without layers is its
    embedding; raises `ConfigError` for another.
    """
    values = list(trained.values())
    if not getattr(config, "is_prompt_learning", False) or not any(hasattr(each, "to_local") for each in values):
        return {}
    if len(values) == 1 and config.peft_type in ("PROMPT_TUNING", "PREFIX_TUNING"):
        return {"prompt_embeddings": values[0]}
    raise ConfigError(
        f"the learned prompt of this {config.peft_type} adapter comes from {len(values)} sharded parameters, and no "
        "rank could compute it alone for a snapshot. Train it in DistributedDataParallel instead of fully_shard, or "
        "learn the prompt without layers (PromptTuningConfig)."
    )


def _stored_names(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, str] | None:
    """The name in `tensors` of every parameter, found by its memory address; None unless each is found once."""
    in_file: dict[int, list[str]] = {}
    for name, each in tensors.items():
        in_file.setdefault(address(each), []).append(name)
    found = {name: in_file.get(address(each), []) for name, each in parameters.items()}
    if all(len(each) == 1 for each in found.values()):
        return {name: each[0] for name, each in found.items()}
    if len(parameters) == len(tensors) == 1:  # PEFT hands out a copy of a learned prompt
        ((name, ours),), ((stored, theirs),) = parameters.items(), tensors.items()
        if ours.shape == theirs.shape and torch.equal(ours.cpu(), theirs.cpu()):
            return {name: stored}
    return None


def _in_file(model: torch.nn.Module, name: str) -> str:
    """The name of a model's tensor in an adapter file; transformers' `add_adapter` leaves the prefix out."""
    return name if hasattr(model, "get_base_model") else f"{_PREFIX}{name}"


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _base_name(model: torch.nn.Module, config: Any) -> str:
    base = _base_of(model)
    return str(config.base_model_name_or_path or getattr(base, "name_or_path", None) or "")


def _config(model: torch.nn.Module, config: Any, base_name: str) -> bytes:
    config = copy.deepcopy(config)  # the user's own is in use
    config.base_model_name_or_path = base_name or None
    config.inference_mode = True
    for name, value in vars(config).items():
        if isinstance(value, set):  # written in the order of hashes, which differs between processes
            setattr(config, name, sorted(value))
    mapping = None
    if config.task_type is None:
        base = type(_base_of(model))
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with tempfile.TemporaryDirectory(prefix="diloco-adapter-config-") as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / "adapter_config.json").read_bytes()


def _names_for_readers(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], exact: Sequence[AdapterPair]
) -> dict[str, str]:
    """Model name -> name in `tensors`, without adapted embedding weights, which PEFT stores but the base model has."""
    ours = {address(each): plain_name(name) for name, each in (*model.named_buffers(), *model.named_parameters())}
    adapted = {pair.weight for pair in exact}
    found = {ours[address(each)]: name for name, each in tensors.items() if address(each) in ours}
    return {name: stored for name, stored in found.items() if name not in adapted}


def _full_rank(
    config: bytes, exact: Sequence[AdapterPair], names: Mapping[str, str], parameters: Mapping[str, torch.Tensor]
) -> bytes:
    """adapter_config.json changed so that the factors of `exact` have full rank, with the same effective scaling."""
    written = json.loads(config)
    ranks, alphas = {}, {}
    for pair in exact:
        rank = min(parameters[pair.b].shape[0], parameters[pair.a].shape[1])
        alpha = pair.scaling * (math.sqrt(rank) if written.get("use_rslora") else rank)
        layer = names[pair.a].removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        pattern = f"^{re.escape(layer)}"  # PEFT looks for it at the end of a layer's name
        ranks[pattern], alphas[pattern] = rank, int(alpha) if alpha == int(alpha) else alpha
    # The first pattern that fits is taken.
    written["rank_pattern"] = ranks | (written.get("rank_pattern") or {})
    written["alpha_pattern"] = alphas | (written.get("alpha_pattern") or {})
    written["init_lora_weights"] = True  # others are costly at full rank, and their values are replaced
    written["eva_config"] = None
    return json.dumps(written, indent=2).encode()
