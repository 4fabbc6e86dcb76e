"""The files of a snapshot without tensors: config, tokenizer, and a README for models that take more than one call.

They are equal in every snapshot of a run.
"""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diloco_orchestrator.snapshots.adapter_folder import AdapterFolder
from diloco_orchestrator.snapshots.model_tensors import class_name

README = "README.md"

_LOAD_TORCH = """\
import glob

from safetensors.torch import load_file

tensors = {name: each for path in sorted(glob.glob("model*.safetensors")) for name, each in load_file(path).items()}
model.load_state_dict(tensors%s)
"""

_LOAD_ADAPTER = """\
from peft import AutoPeftModelForCausalLM, PeftModel

model = PeftModel.from_pretrained(base_model, ".")     # base_model: the model under the adapter
model = AutoPeftModelForCausalLM.from_pretrained(".")  # the same, where adapter_config.json names it
model = model.merge_and_unload()                       # one model without adapter
"""

_RESIDUALS = """
These are a model and its adapter, of which the frozen weights hold the residuals of `adapters="exact"`: the lines above
load them into the model with its adapter. `diloco pull` makes an ordinary adapter folder of them, for
`PeftModel.from_pretrained`, to which `adapter_config.json` belongs.
"""


def side_files(
    model: torch.nn.Module, tokenizer: Any, adapter: AdapterFolder | None, tied: Mapping[str, str]
) -> dict[str, bytes]:
    """A snapshot's files without tensors, by name. `tied`: second names of tied tensors, not in the model's file."""
    config: Any = copy.deepcopy(getattr(model, "config", None))  # `architectures` of the user's own stays
    generation: Any = getattr(model, "generation_config", None)
    # Tensors of a model with adapters that is stored whole have names that `from_pretrained` does not know.
    has_adapters = isinstance(getattr(model, "peft_config", None), dict)
    is_of_transformers = hasattr(config, "save_pretrained") and not has_adapters
    if is_of_transformers:
        config.architectures = [class_name(model)]
    savers = [config] if is_of_transformers else []
    savers += [generation] if generation is not None and not has_adapters else []
    savers += [tokenizer] if tokenizer is not None else []
    files = _saved(savers) if savers else {}
    if adapter is not None:
        files["adapter_config.json"] = adapter.config
    if not is_of_transformers:
        files[README] = readme(class_name(model), adapter, tied).encode()
    return files


def _saved(savers: Sequence[Any]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="diloco-model-files-") as folder:
        for each in savers:
            each.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def readme(class_name: str, adapter: AdapterFolder | None, tied: Mapping[str, str]) -> str:
    """Instructions to load a snapshot of a model that `AutoModel.from_pretrained` does not know.

    `class_name`: the model's. `tied`: second names of tied tensors, with the names under which they are stored.
    """
    if adapter is not None and adapter.naming.is_adapter:
        return adapter_readme(adapter.base_name)
    strict, words = "", "" if adapter is None else _RESIDUALS
    if tied:
        strict = ", strict=False"
        pairs = "; ".join(f"`{second}` is `{first}`" for second, first in sorted(tied.items()))
        words += f"\nTied tensors are stored once: {pairs}.\n"
    return f"The tensors of a `{class_name}`. In this folder:\n\n```python\n{_LOAD_TORCH % strict}```\n{words}"


def adapter_readme(base_name: str) -> str:
    """Instructions to load an adapter folder. `base_name`: name of the base model; empty if unknown."""
    base = f"`{base_name}`" if base_name else "a model without a name: keep it where you find it"
    return f"An adapter of PEFT. Its base: {base}. In this folder:\n\n```python\n{_LOAD_ADAPTER}```\n"
