"""What readers get of a model with residuals: an adapter folder whose product is the whole one, to the last bit."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from lora_models import lora_mlp

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.outer.adapter_products import with_residuals
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.replica.training.exact_adapters import ExactAdapters
from diloco_orchestrator.snapshots.adapter_folder import _full_rank
from diloco_orchestrator.snapshots.file_plan import Naming
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import same_bytes, trainable
from diloco_orchestrator.snapshots.reader_folder import files_of
from diloco_orchestrator.snapshots.tensor_file import views

PREFIX = "base_model.model."
CONFIG = {"base_model_name_or_path": "ada/base", "r": 2, "lora_alpha": 4}


def in_file(name: str) -> str:
    return PREFIX + name.replace(".default", "")


def moved() -> tuple[Base, ModelFiles]:
    """A base of two adapters, (8, 4) and (6, 8), with residuals, and a frozen factor."""
    model = lora_mlp()
    model[2].lora_A["frozen"] = torch.nn.Linear(8, 2, bias=False).requires_grad_(False)  # type: ignore[operator,index]
    parameters = trainable(model)
    adapters = ExactAdapters(model, parameters)
    values, fragments = with_residuals(parameters, [tuple(parameters)], adapters.pairs)
    base = Base.fresh(values, OuterConfig(), fragments)
    generator = torch.Generator().manual_seed(3)
    for name in values:
        base.parameters[name].uniform_(-1, 1, generator=generator)
    names = {name: in_file(name) for name in [*parameters, "2.lora_A.frozen.weight"]}
    files = ModelFiles.of(model, None, adapters.pairs)
    extra = {"adapter_config.json": json.dumps(CONFIG).encode(), "README.md": b"the snapshot's"}
    rest = files.rest
    return base, ModelFiles(files.dtypes, rest, extra, Naming(for_readers=names), None, adapters.pairs)


def read(base: Base, files: ModelFiles) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
    found = {name: b"".join(data) for name, data in files_of(base, files)}
    return views(found["adapter_model.safetensors"], "adapter"), found


def test_the_product_of_the_factors_is_the_residual_and_the_trained_product():
    base, files = moved()
    tensors, found = read(base, files)
    assert set(found) == {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    assert b"`ada/base`" in found["README.md"] and b"PeftModel.from_pretrained" in found["README.md"]
    for pair, shape in zip(files.adapters, ((8, 4), (6, 8)), strict=True):
        a, b = tensors[in_file(pair.a)], tensors[in_file(pair.b)]
        assert b.shape == (shape[0], min(shape)) and a.shape == (min(shape), shape[1])
        p = base.parameters
        whole = p[pair.residual].double() + p[pair.b].double() @ p[pair.a].double()
        assert torch.allclose(b.double() @ a.double(), whole, atol=1e-6, rtol=0)
        assert torch.equal(b @ a, a if min(shape) == shape[0] else b)  # the other one is the identity


def test_what_has_no_residual_is_stored_as_it_is_and_one_tensor_at_a_time():
    base, files = moved()
    tensors, _ = read(base, files)
    assert same_bytes(tensors[in_file("3.weight")], base.parameters["3.weight"])
    assert same_bytes(tensors[in_file("2.lora_A.frozen.weight")], files.rest().read("2.lora_A.frozen.weight"))
    assert read(base, files)[1] == read(base, files)[1]
    _, pieces = next(files_of(base, files))
    sizes = [len(piece) for piece in pieces]
    assert len(sizes) == 1 + len(tensors) and max(sizes[1:]) == 4 * 6 * 8  # the largest product


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"extra": {}}, "adapter_config.json is missing"),
        ({"extra": {"adapter_config.json": b"[]"}}, "is none of PEFT's"),
        ({"extra": {"adapter_config.json": b"\xff"}}, "is none of PEFT's"),
        ({"naming": Naming(for_readers={"9.weight": "9.weight"})}, "needs '9.weight', which this snapshot lacks"),
    ],
)
def test_a_snapshot_that_lacks_what_the_folder_needs_is_named(changed, words: str):
    """Its record and files may have been written by anybody who may write to the bucket."""
    base, files = moved()
    with pytest.raises(RecordInvalid, match=words):
        read(base, replace(files, **changed))


@pytest.mark.parametrize("rslora", [False, True])
def test_the_config_gives_each_layer_its_full_rank_and_the_scaling_that_it_had(rslora: bool):
    _, files = moved()
    names, parameters = files.naming.for_readers, trainable(lora_mlp())
    before = CONFIG | {"use_rslora": rslora, "rank_pattern": {"2": 5}, "init_lora_weights": "gaussian"}
    written = json.loads(_full_rank(json.dumps(before).encode(), files.adapters, names, parameters))
    for layer, rank in (("0", 4), ("2", 6)):
        # As PEFT does: the first pattern that fits, from the end of the layer's name.
        key = next(each for each in written["rank_pattern"] if re.match(rf"(.*\.)?({each})$", layer))
        assert written["rank_pattern"][key] == rank
        alpha = written["alpha_pattern"][key]
        assert alpha / (math.sqrt(rank) if rslora else rank) == pytest.approx(2.0, rel=1e-12)
        assert not re.match(rf"(.*\.)?({key})$", f"other.{layer}")
    assert written["init_lora_weights"] is True and written["r"] == 2
