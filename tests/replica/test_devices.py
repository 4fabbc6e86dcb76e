"""Compiled models, default devices, loss scaling, several optimizers, changed dtypes: each works, or is refused."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_one_process import SmallRun
from tiny_workloads import batch_of, inner_step, mlp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from diloco_orchestrator import ConfigError
from diloco_orchestrator.outer.golden_arithmetic import check_arithmetic, is_golden
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.snapshots.tensor_file import views
from replica.context import ReplicaContext
from replica.process.rank import Events, RankPlace, joined

BATCHES = [batch_of(i) for i in range(40)]
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def train(
    context: ReplicaContext, model: torch.nn.Module | None = None, between: Callable[[], Any] = lambda: None
) -> torch.nn.Module:
    """A replica's whole training; `between` is called once attached."""
    torch.manual_seed(0)
    model = mlp() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with context.attach(model, optimizer) as replica:
        between()
        for batch in replica.batches(BATCHES):
            replica.observe(loss=inner_step(model, optimizer, batch))
    return model


def digests(run: SmallRun) -> list[str]:
    return [commit.base_digest for commit in run.commits()]


def snapshot(run: SmallRun, round_: int) -> dict[str, torch.Tensor]:
    key = keys.snapshot(round_, "model.safetensors")
    return views(run.store.get(key), key)


def plain_run() -> SmallRun:
    run = SmallRun()
    train(run.context())
    return run


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "mps", "device"), [(False, False, "cpu"), (True, False, "cuda:0"), (False, True, "mps:0")]
)
def test_the_context_names_the_device_to_train_on(monkeypatch, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert str(ReplicaContext(None).device) == device  # type: ignore[arg-type]


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = RankPlace(0, 6, on_machine=3, leg=1, claim_sha256="", timeout_s=1.0, meeting="")
    with pytest.raises(ConfigError, match=r"3 ranks on this machine, which sees 2 GPUs.*or set ranks_per_replica"):
        joined(place)


def test_several_ranks_are_refused_where_the_kernel_is_not_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"need Linux.*leave ranks_per_replica at 1"):
        joined(RankPlace(0, 2, on_machine=2, leg=1, claim_sha256="", timeout_s=1.0, meeting=""))


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64)])
def test_torchs_defaults_change_no_bit(defaults, device, dtype):
    undisturbed, run = plain_run(), SmallRun()

    def set_defaults() -> None:
        torch.set_default_device(device)  # "meta" has no values: whatever is made there by mistake fails
        torch.set_default_dtype(dtype)

    torch.manual_seed(0)
    model, context = mlp(), run.context()
    set_defaults()
    train(context, model)
    resumed = run.context()
    assert digests(run) == digests(undisturbed)
    assert resumed.device == torch.device("cpu")


def test_random_states_and_the_golden_step_need_no_default_device(defaults):
    torch.set_default_device("meta")
    state = rng.capture()
    drawn = torch.rand((), device="cpu")
    rng.restore(state)
    assert torch.equal(torch.rand((), device="cpu"), drawn)
    is_golden.cache_clear()
    check_arithmetic()


# -- compiled models --------------------------------------------------------------------------------------------------


def test_a_model_compiled_before_attach_has_the_names_and_bits_of_the_plain_one():
    plain, run, parts = plain_run(), SmallRun(), SmallRun()
    torch.manual_seed(0)
    whole = torch.compile(mlp(), backend="eager")
    train(run.context(), whole)  # type: ignore[arg-type]
    torch.manual_seed(0)
    in_parts = mlp()
    in_parts[0] = torch.compile(in_parts[0], backend="eager")  # type: ignore[index,operator]
    train(parts.context(), in_parts)
    assert digests(run) == digests(parts) == digests(plain)
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert sorted(snapshot(run, 2)) == sorted(snapshot(parts, 2)) == names


def test_a_model_in_data_parallel_has_the_names_and_bits_of_the_plain_one():
    """Beside it a replica with one GPU, which wraps nothing, was refused."""
    run = SmallRun()
    torch.manual_seed(0)
    train(run.context(), torch.nn.DataParallel(mlp()))
    assert digests(run) == digests(plain_run())


def test_a_model_whose_parts_are_recomputed_has_the_names_and_bits_of_the_plain_one():
    """torch's wrapper of activation checkpointing adds to the names of parameters what a `state_dict` leaves out."""

    def trained(run: SmallRun, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        torch.manual_seed(0)
        model = mlp()
        model[2].register_buffer("scale", torch.ones(3))  # type: ignore[index,operator]
        for index in (0, 2):
            model[index] = wrap(model[index])  # type: ignore[index,operator]
        train(run.context(), model)

    plain, recomputed, both = [SmallRun() for _ in range(3)]
    trained(plain, lambda part: part)
    trained(recomputed, checkpoint_wrapper)
    trained(both, lambda part: checkpoint_wrapper(torch.compile(part, backend="eager")))
    assert digests(recomputed) == digests(both) == digests(plain)
    names = ["0.bias", "0.weight", "2.bias", "2.scale", "2.weight"]
    assert [sorted(snapshot(run, 2)) for run in (plain, recomputed, both)] == [names] * 3


def test_a_model_compiled_after_attach_is_trained():
    run = SmallRun()
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with run.context().attach(model, optimizer) as replica:
        compiled = torch.compile(model, backend="eager")
        for batch in replica.batches(BATCHES):
            inner_step(compiled, optimizer, batch)  # type: ignore[arg-type]
    assert digests(run) == digests(plain_run())


def test_buffers_of_compiled_parts_have_the_plain_names_and_values():
    def normalised(run: SmallRun, before: bool, after: bool) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        if before:
            model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with run.context().attach(model, optimizer) as replica:
            if after:
                model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]
            for batch in replica.batches(BATCHES):
                inner_step(model, optimizer, batch)

    plain, before, after = runs = [SmallRun() for _ in range(3)]
    for run in runs:
        normalised(run, run is before, run is after)
    assert float(snapshot(plain, 2)["1.running_mean"].abs().max()) > 0
    for run in (before, after):
        ours, theirs = snapshot(run, 2), snapshot(plain, 2)
        assert sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_loss_that_is_observed_as_a_tensor_is_a_number_in_a_ranks_sign_of_life(tmp_path):
    run, model = SmallRun(), mlp()
    context, optimizer = run.context(), torch.optim.AdamW(model.parameters(), lr=0.01)
    said, events = tmp_path / "events", Events(os.open(tmp_path / "events", os.O_CREAT | os.O_WRONLY))
    with context.attach(model, optimizer) as replica:
        for x, y in replica.batches(BATCHES):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with warnings.catch_warnings(action="error"):
                replica.observe(loss=loss)
            events.alive(context._attempt.pulse)
    newest = json.loads(said.read_text().splitlines()[-1])["pulse"]
    assert newest["loss"] == loss.item()


# -- loss scaling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_not_counted(fused):
    run, model = SmallRun(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    counts = []
    with run.context().attach(model, optimizer, stateful={"scaler": scaler}) as replica:
        for index, (x, y) in enumerate(replica.batches(BATCHES)):
            loss = torch.nn.functional.mse_loss(model(x), y) * (float("inf") if index in (0, 2) else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            counts.append(replica.step_count)
    assert counts == [0, 1, 1, 2, 3, 4, 5, 6]
    assert [run.manifest(round_).progress.inner_steps for round_ in (1, 2)] == [3, 6]  # type: ignore[union-attr]


# -- several optimizers -----------------------------------------------------------------------------------------------


def train_with_two(context: ReplicaContext, steps: int | None = None, reverse: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    model = mlp()
    pair = [torch.optim.AdamW(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), 0.01, 0.9)]  # type: ignore[index]
    with context.attach(model, pair) as replica:
        for index, (x, y) in enumerate(replica.batches(BATCHES)):
            for each in pair:
                each.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            for each in reversed(pair) if reverse else pair:
                each.step()
            if index + 1 == steps:
                break
    return model


@pytest.mark.parametrize("reverse", [False, True])
def test_an_inner_step_of_two_optimizers_is_one_step_of_each(reverse):
    run = SmallRun()
    train_with_two(run.context(), reverse=reverse)
    assert [run.manifest(round_).progress.inner_steps for round_ in (1, 2)] == [3, 6]  # type: ignore[union-attr]
    undisturbed = SmallRun()
    train_with_two(undisturbed.context())
    assert digests(run) == digests(undisturbed)


def test_the_states_of_two_optimizers_survive_a_restart():
    undisturbed, run = SmallRun(rounds=3), SmallRun(rounds=3)
    train_with_two(undisturbed.context())
    train_with_two(run.context(), steps=5)
    train_with_two(run.context())
    assert digests(run) == digests(undisturbed)


def test_a_state_of_other_optimizers_is_refused():
    model = mlp()
    one, two = (torch.optim.SGD(each.parameters(), 0.1) for each in (model[0], model[2]))  # type: ignore[index]
    state = InnerOptimizers([one, two]).state_dict()
    with pytest.raises(ConfigError, match="attaches 1 optimizers, and the saved state of this replica holds 2"):
        InnerOptimizers(one).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "empty list of optimizers"),
        (["sgd"], "a str as optimizer"),
        ([torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1)], "holds no parameter of the model"),
    ],
)
def test_optimizers_that_train_nothing_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        SmallRun().context().attach(mlp(), given)


def test_parameters_that_no_optimizer_trains_are_named(caplog):
    model = mlp()
    one, two = (torch.optim.SGD(each.parameters(), 0.1) for each in (model[0], model[2]))  # type: ignore[index]
    with caplog.at_level(logging.WARNING):
        SmallRun().context().attach(model, one, stateful={"two": two})
        assert "in no optimizer" not in caplog.text
        SmallRun().context().attach(model, one)
    assert "2 trainable parameters, '2.bias' the first, are in no optimizer" in caplog.text


# -- models that cannot be replicas -----------------------------------------------------------------------------------


def to_bf16(model: torch.nn.Module) -> None:
    model.to(torch.bfloat16)


def replace_head(model: Any) -> None:
    model[2].weight = torch.nn.Parameter(model[2].weight.clone())


def unfreeze(model: Any) -> None:
    model[0].bias.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (to_bf16, "'0.weight' was float32 when it was attached and is bfloat16 now.*Call model.to"),
        (replace_head, "'2.weight' was replaced after the model was attached"),
        (unfreeze, "'0.bias' is trained since after the model was attached"),
    ],
)
def test_a_model_changed_after_attach_is_refused_before_anything_is_published(change, words):
    run, model = SmallRun(), mlp()
    model[0].bias.requires_grad_(False)  # type: ignore[index,union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(ConfigError, match=words), run.context().attach(model, optimizer) as replica:
        change(model)
        for x, y in replica.batches(BATCHES):
            dtype = model[2].bias.dtype  # type: ignore[index]
            inner_step(model, optimizer, (x.to(dtype), y.to(dtype)))
    assert not list(run.store.list("rounds/"))


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        empty = mlp()
    for model, words in (
        (empty, "'0.bias' is on the meta device"),
        (torch.nn.LazyLinear(3), "'bias' has no shape yet"),
    ):
        with pytest.raises(ConfigError, match=words):
            SmallRun().context().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def group_of_one(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield pytest.importorskip("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_model_that_one_process_shards_trains_the_bits_of_a_plain_one(group_of_one):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    torch.manual_seed(0)
    model, run = mlp(), SmallRun()
    fsdp.fully_shard(model, mesh=group_of_one)
    train(run.context(), model)
    assert digests(run) == digests(plain_run())


class Flat(torch.optim.AdamW):
    """An optimizer as torchtitan has them, whose state has no part for each parameter: all is by name."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()["state"]
        return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


class Copies:
    """A moving average of a model, perhaps sharded as it is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: each.detach().clone() for name, each in self._model.named_parameters()}

    load_state_dict = torch.nn.Module.load_state_dict


@pytest.mark.parametrize("stateful", [False, True])
def test_a_sharded_state_that_cannot_be_saved_is_refused_at_the_first_step(group_of_one, stateful):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model, run = mlp(), SmallRun(replica_state="round")
    fsdp.fully_shard(model, mesh=group_of_one)
    optimizer = (torch.optim.AdamW if stateful else Flat)(model.parameters(), lr=0.01)
    objects = {"average": Copies(model)} if stateful else {}
    steps = 0
    with (
        pytest.raises(
            ConfigError, match=r"average.*sharded over.*leave" if stateful else r"sharded over.*attach those"
        ),
        run.context().attach(model, optimizer, stateful=objects) as replica,
    ):
        for batch in replica.batches(BATCHES):
            steps += 1
            inner_step(model, optimizer, batch)
    assert steps == 1


def test_a_model_sharded_by_fsdp1_or_untied_by_sharding_is_refused(group_of_one):
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    class Untied(torch.nn.Sequential):
        """As torch before 2.13 leaves tied weights that were sharded in two groups."""

        config = SimpleNamespace(tie_word_embeddings=True)

        def get_input_embeddings(self):
            return self[0]

        def get_output_embeddings(self):
            return self[1]

    untied = Untied(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    fsdp.fully_shard(untied, mesh=group_of_one)
    one = fsdp.FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), use_orig_params=True)
    refused = ((untied, r"untied them.*fully_shard\(\[embedding, head\]\)"), (one, "FSDP1.*ModelParallelStrategy"))
    for model, words in refused:
        with pytest.raises(ConfigError, match=words):
            SmallRun().context().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_of_another_kind_of_tensor_is_refused():
    class Quantised(torch.Tensor):
        pass

    model = torch.nn.Linear(2, 1)
    model.weight = torch.nn.Parameter(torch.zeros(1, 2).as_subclass(Quantised))
    with pytest.raises(ConfigError, match=r"'weight' is a Quantised: .* must be plain"):
        SmallRun().context().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
