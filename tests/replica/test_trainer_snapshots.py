"""What trainers of transformers, TRL and PEFT leave in the bucket loads as people expect. Needs the extra `trl`."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra [trl] is not installed")
pytest.importorskip("peft", reason="the extra [trl] is not installed")

import peft
import tiny_trainers as tiny
import torch
import torch.distributed as dist
from loopback_hub import LoopbackHub
from peft import LoraConfig
from protocol_fleet import Fleet
from sessions import context_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from diloco_orchestrator import train_as_replica
from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import ConfigError, ModelMismatch
from diloco_orchestrator.inspection.pull import pull
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.inspection.verify.loading import OwnCode, check_loading
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.snapshots.adapter_folder import adapter_folder
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.store.open_store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

ITEMS = list(range(tiny.ITEMS))
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def base(tmp_path: Path) -> str:
    """The folder of a base model, under whose name it is loaded."""
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")  # where pipelines look for it under an adapter
    return str(tmp_path / "base")


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


def trained(tmp_path: Path, model: Any, peft_config: Any = None, **settings: Any) -> Fleet:
    """A run of one replica, in a folder."""
    fleet = Fleet(replicas=1, rounds=3, sync_every=4, store=open_store(str(tmp_path / "run")), **settings)
    torch.manual_seed(0)
    # TRL's default, autocast in bf16, moves the score that is logged by 1e-4.
    trainer = tiny.sft(tmp_path / "trainer", model=model, peft_config=peft_config, learning_rate=3e-2, bf16=False)
    train_as_replica(trainer, context_of(fleet, 0, SystemClock()), heldout=tiny.heldout, heldout_items=ITEMS)
    return fleet


def logged(tmp_path: Path) -> float:
    """The held-out score of the last base, as the replicas logged it."""
    score = RunReader(open_store(str(tmp_path / "run"))).heldout_of_base(3)
    assert score is not None
    return score


def scored(model: Any) -> float:
    with torch.no_grad():
        return sum(tiny.heldout(model.eval(), ITEMS)) / len(ITEMS)


def test_an_adapter_loads_with_peft_and_merged_it_scores_as_logged(tmp_path: Path, base: str):
    fleet = trained(tmp_path, AutoModelForCausalLM.from_pretrained(base), lora())
    assert pull(str(tmp_path / "run"), tmp_path / "model") == 3
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base and config["inference_mode"]
    under = AutoModelForCausalLM.from_pretrained(base)
    start = scored(under)
    loaded = peft.PeftModel.from_pretrained(under, tmp_path / "model")
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    for model in (loaded, auto, auto.merge_and_unload()):
        assert scored(model) == pytest.approx(logged(tmp_path), abs=1e-4)
    assert logged(tmp_path) < start - 0.02
    done = verify_run(fleet.store)
    check_loading(fleet.store, done, OwnCode(score=tiny.heldout, items=ITEMS))
    assert done.agrees and done.unchecked == [] and done.checked["snapshots scored"] == 2


def test_a_sharded_adapter_has_the_folder_of_a_whole_one(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = peft.get_peft_model(tiny.llama(), lora())
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        whole = adapter_folder(model, trained)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert adapter_folder(model, trained) == whole is not None
    finally:
        dist.destroy_process_group()


SHAPES = {
    "attention": {},
    "wide and tall": {"target_modules": ["q_proj", "gate_proj", "down_proj"], "use_rslora": True},
    "other ranks": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "biases": {"lora_bias": True},  # which PEFT does not merge into layers without one
}


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_adapters_are_pulled_as_an_adapter_that_scores_as_logged(shape: str, tmp_path: Path, base: str):
    config = lora(**SHAPES[shape])
    fleet = trained(tmp_path, AutoModelForCausalLM.from_pretrained(base), config, adapters="exact")
    pull(str(tmp_path / "run"), tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json"} <= names
    assert not {"model.safetensors", "outer.safetensors", "config.json"} & names
    assert "AutoPeftModelForCausalLM" in (tmp_path / "model" / "README.md").read_text()
    start = scored(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    assert logged(tmp_path) < start - 0.001
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "model")
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    for model in (loaded, auto, *([] if config.lora_bias else [auto.merge_and_unload()])):
        assert scored(model) == pytest.approx(logged(tmp_path), abs=1e-5)
    moved = loaded.base_model.model.model.layers[0].self_attn.q_proj.get_delta_weight("default")
    assert torch.linalg.matrix_rank(moved.double(), rtol=1e-4) > 3  # more than the trained factors can move
    done = verify_run(fleet.store)
    check_loading(fleet.store, done, OwnCode(score=tiny.heldout, items=ITEMS))
    assert done.agrees and done.unchecked == [] and done.checked["snapshots scored"] == 2
    fleet.store.delete(keys.snapshot(3, keys.SNAPSHOT_RECORD))  # so that the model has to be rebuilt
    pull(str(tmp_path / "run"), tmp_path / "rebuilt")
    for path in sorted((tmp_path / "model").iterdir()):
        assert (tmp_path / "rebuilt" / path.name).read_bytes() == path.read_bytes(), path.name


def test_exact_adapters_of_a_bf16_model_are_pulled_as_an_adapter_too(tmp_path: Path, base: str):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    fleet = trained(tmp_path, model, lora(), adapters="exact")
    pull(str(tmp_path / "run"), tmp_path / "model")
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype=torch.bfloat16)
    for each in (auto, auto.merge_and_unload()):
        assert scored(each) == pytest.approx(logged(tmp_path), abs=1e-4)
    done = verify_run(fleet.store)
    check_loading(fleet.store, done, OwnCode(score=tiny.heldout, items=ITEMS))
    assert done.agrees and done.unchecked == [] and done.checked["snapshots scored"] == 2


def test_a_snapshot_of_exact_adapters_is_the_whole_model_with_its_adapter(tmp_path: Path, base: str):
    fleet = trained(tmp_path, AutoModelForCausalLM.from_pretrained(base), lora(), adapters="exact")
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    folder = tmp_path / "run" / "snapshots" / "00000003"
    lines = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(lines.replace("model*", f"{folder}/model*"), {"model": model})
    assert scored(model) == pytest.approx(logged(tmp_path), abs=1e-6)
    assert scored(model.merge_and_unload()) == pytest.approx(logged(tmp_path), abs=1e-4)
    assert verify_run(fleet.store).agrees


def test_exact_adapters_whose_initialisation_changed_the_base_stay_a_whole_model(
    tmp_path: Path, base: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, AutoModelForCausalLM.from_pretrained(base), lora(init_lora_weights="pissa"), adapters="exact")
    assert "the frozen weights under the adapter are not those of its base" in caplog.text
    pull(str(tmp_path / "run"), tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"model.safetensors", "README.md"} <= names and not any("adapter" in name for name in names)


def test_another_base_under_the_same_adapter_is_refused(tmp_path: Path, base: str):
    fleet = Fleet(replicas=2, rounds=3)
    adapter = lambda under: peft.get_peft_model(under, lora())  # noqa: E731
    fleet.join(0, model=adapter(AutoModelForCausalLM.from_pretrained(base)))
    fleet.join(1, model=adapter(AutoModelForCausalLM.from_pretrained(base)))
    frozen = fleet.start().frozen
    assert frozen is not None and frozen.tensors == 21
    with pytest.raises(ModelMismatch, match=r"replica 1 has 21 frozen tensors .* Its base model is another"):
        fleet.join(1, model=adapter(tiny.llama(seed=1)))


def test_pipeline_runs_what_pull_leaves(tmp_path: Path, base: str):
    for name, adapter, how in (("whole", None, "mean"), ("adapter", lora(), "mean"), ("exact", lora(), "exact")):
        trained(tmp_path / name, AutoModelForCausalLM.from_pretrained(base), adapter, adapters=how)
        destination = tmp_path / name / "model"
        pull(str(tmp_path / name / "run"), destination)
        # In a process of its own, where nothing of ours is imported.
        code = (
            "import sys; from transformers import pipeline\n"
            "for more in ({}, {'tokenizer': sys.argv[1]}):\n"
            "    run = pipeline('text-generation', sys.argv[1], **more)\n"
            "    print(run('w1 w2 w3', max_new_tokens=3, do_sample=False)[0]['generated_text'])"
        )
        command = [sys.executable, "-c", code, str(destination)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        first, second = done.stdout.splitlines()
        assert first.startswith("w1 w2 w3w") and second == first  # and words that follow


def test_a_snapshot_of_several_files_is_loaded_back_by_verify(tmp_path: Path, base: str):
    fleet = Fleet(replicas=1, rounds=1, object_limit=2**14, store=open_store(str(tmp_path / "run")))
    participant = fleet.join(0, model=AutoModelForCausalLM.from_pretrained(base))
    assert len(list((tmp_path / "run").glob("snapshots/00000000/model-*.safetensors"))) > 1
    done = verify_run(participant._attempt.store)
    check_loading(participant._attempt.store, done)
    assert done.agrees and done.checked["snapshots loaded"] == 1


KINDS = {
    "lora": lora(),
    "without task": lora(task_type=None),
    "dora": lora(use_dora=True),
    "head": lora(modules_to_save=["lm_head"]),
    "embedding": lora(target_modules=["q_proj", "embed_tokens"]),
    "all linear, biases": lora(target_modules="all-linear", bias="all"),
    "tokens": lora(trainable_token_indices=[1, 2]),
    "vera": peft.VeraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_file_is_the_one_that_peft_writes(kind: str, tmp_path: Path, base: str):
    torch.manual_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), KINDS[kind])
    before = model.peft_config["default"].to_dict()
    written = Base.fresh(trainable(model), OuterConfig())
    files = ModelFiles.of(model)
    write_snapshot(open_store(str(tmp_path)), 1, written, written.digest(), files, Stamp("test", lambda: 0.0))
    assert model.peft_config["default"].to_dict() == before
    model.save_pretrained(str(tmp_path / "theirs"))
    ours, theirs = tmp_path / "snapshots" / "00000001", tmp_path / "theirs"
    name = "adapter_model.safetensors"
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (ours, theirs)]
    for each in configs:
        if isinstance(each.get("target_modules"), list):
            each["target_modules"].sort()  # a set, which PEFT writes in any order
    assert configs[0] == configs[1]


def test_a_sharded_prompt_is_stored_as_its_embedding_and_one_of_layers_is_refused(tmp_path: Path, base: str):
    """PEFT would compute the prompt by its sharded layers, in one rank alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for kind in ("prompt", "prefix"):
            model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), KINDS[kind])
            fully_shard(model.prompt_encoder["default"], mesh=mesh)
            stored = ModelFiles.of(model).naming.stored
            assert stored == {"prompt_encoder.default.embedding.weight": "prompt_embeddings"}
        layers = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), layers)
        fully_shard(model.prompt_encoder["default"], mesh=mesh)
        with pytest.raises(ConfigError, match=r"P_TUNING adapter .* DistributedDataParallel instead of fully_shard"):
            ModelFiles.of(model)
    finally:
        dist.destroy_process_group()


def test_what_is_not_one_adapter_is_stored_whole_and_a_base_without_name_is_said(
    base: str, caplog: pytest.LogCaptureFixture
):
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    model.base_model.model.lm_head.weight.requires_grad_(True)
    with caplog.at_level(logging.WARNING):
        files = ModelFiles.of(model)
    assert not files.naming.is_adapter and "what is trained is not one adapter" in caplog.text
    nameless = ModelFiles.of(peft.get_peft_model(tiny.llama(), lora()))
    assert nameless.naming.is_adapter and "has no name_or_path" in caplog.text
    assert b"a model without a name" in nameless.extra["README.md"]
    with_adapter = AutoModelForCausalLM.from_pretrained(base)
    with_adapter.add_adapter(lora())
    of_transformers, of_peft = (
        ModelFiles.of(each).naming.stored.values()
        for each in (with_adapter, peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()))
    )
    assert sorted(of_transformers) == sorted(of_peft)


@pytest.mark.parametrize("adapters", [None, "mean", "exact"])
def test_a_pushed_model_loads_from_the_hub(adapters: str | None, tmp_path: Path, base: str):
    settings = {"adapters": adapters} if adapters else {}
    trained(tmp_path, AutoModelForCausalLM.from_pretrained(base), lora() if adapters else None, **settings)
    with LoopbackHub() as hub:
        environ = {**os.environ, **hub.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")}
        code = (
            "import sys; from diloco_orchestrator import push; from transformers import pipeline; "
            "print(push(sys.argv[1], 'ada/tiny', [0, 3])); run = pipeline('text-generation', 'ada/tiny'); "
            "print(run('w1 w2 w3', max_new_tokens=3, do_sample=False)[0]['generated_text'])"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1].startswith("w1 w2 w3w")  # and words that follow
        card = hub.repositories["ada/tiny"].files["README.md"].decode()
        assert f"| held-out score | {logged(tmp_path):.4f} |" in card
