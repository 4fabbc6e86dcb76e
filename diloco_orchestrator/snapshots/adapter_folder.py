"""An adapter of PEFT in the layout of its own `save_pretrained`: what its file holds, and `adapter_config.json`.

PEFT is found by its looks and asked through the module that made the model; it is never imported here.
"""

import copy
import logging
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco_orchestrator.snapshots.naming import ADAPTER_GROUP, Naming
from diloco_orchestrator.snapshots.parameter_names import plain_name

log = logging.getLogger(__name__)

_WHOLE = "snapshots hold the whole model, under names that PeftModel.from_pretrained does not read"


@dataclass(frozen=True)
class AdapterFolder:
    """The parts of an adapter folder that come from the model."""

    naming: Naming
    untrained: Mapping[str, torch.Tensor]  # what the file holds beside trained parameters, by name in the file
    base_name: str  # of the model under the adapter, as `from_pretrained` takes it; empty if it has none
    config: bytes  # adapter_config.json


def adapter_folder(model: torch.nn.Module, trained: Collection[str]) -> AdapterFolder | None:
    """The adapter folder of a model of PEFT, or with an adapter of transformers; None for any other model.

    `trained`: names of the parameters that are trained. None, with a warning, if they are not those of one adapter.
    """
    configs, library = getattr(model, "peft_config", None), sys.modules.get("peft")
    if not isinstance(configs, dict) or library is None:
        return None
    named = ((plain_name(name), each) for name, each in model.named_parameters())
    parameters = {name: each for name, each in named if name in trained}
    for adapter, config in sorted(configs.items()):
        tensors = library.get_peft_model_state_dict(model, adapter_name=adapter)
        tensors = {_in_file(model, plain_name(name)): each for name, each in tensors.items()}
        stored = _stored_names(parameters, tensors)
        if stored is None:
            continue
        rest = {name: each for name, each in tensors.items() if name not in stored.values()}
        buffers = {each.data_ptr(): plain_name(name) for name, each in model.named_buffers()}
        stored |= {buffers[each.data_ptr()]: name for name, each in rest.items() if each.data_ptr() in buffers}
        base_name = _base_name(model, config)
        if not base_name:
            log.warning(
                "the model under the adapter has no name_or_path: snapshots hold the adapter alone and cannot name its "
                "base. Keep the base where you find it, or save it and load it with from_pretrained."
            )
        return AdapterFolder(Naming(ADAPTER_GROUP, stored), rest, base_name, _config(model, config, base_name))
    log.warning("what is trained is not one adapter of PEFT: %s", _WHOLE)
    return None


def _stored_names(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, str] | None:
    """The name in `tensors` of every parameter; None unless each is there once."""
    in_file: dict[int, list[str]] = {}
    for name, each in tensors.items():
        in_file.setdefault(each.data_ptr(), []).append(name)
    found = {name: in_file.get(each.data_ptr(), []) for name, each in parameters.items()}
    if len(parameters) == len(tensors) == 1:  # PEFT hands out a copy of a learned prompt
        ((name, ours),), ((stored, theirs),) = parameters.items(), tensors.items()
        if ours.shape == theirs.shape and torch.equal(ours.cpu(), theirs.cpu()):
            return {name: stored}
    return {name: each[0] for name, each in found.items()} if all(len(each) == 1 for each in found.values()) else None


def _in_file(model: torch.nn.Module, name: str) -> str:
    """The name in an adapter's file. Models of transformers that got an adapter by `add_adapter` lack its prefix."""
    return name if hasattr(model, "get_base_model") else f"base_model.model.{name}"


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
