"""Runs with adapters="exact": whole rounds, restarts, snapshots, verification, and the adapters that are refused."""

from typing import Any

import pytest
import torch
from in_one_process import SmallRun
from lora_models import LoraLinear, lora_mlp
from tiny_workloads import batch_of, inner_step

from diloco_orchestrator import ConfigError, ModelMismatch
from diloco_orchestrator.config import make_config
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild_files, write_rebuilt_snapshot
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.snapshots.tensor_file import views
from replica.context import ReplicaContext
from replica.training.diloco_loop import DiLoCoLoop

BATCHES = [batch_of(i) for i in range(40)]
EXACT = {"adapters": "exact", "rounds": 3, "snapshot_every": 2}


def train(
    context: ReplicaContext, steps: int | None = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> torch.nn.Sequential:
    model = lora_mlp(dtype, **settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    with context.attach(model, optimizer) as replica:
        for index, (x, y) in enumerate(replica.batches(BATCHES)):
            inner_step(model, optimizer, (x.to(dtype), y.to(dtype)))
            if index + 1 == steps:
                break
    return model


def digests(run: SmallRun) -> list[str]:
    return [commit.base_digest for commit in run.commits()]


def residual_share(model: torch.nn.Sequential) -> float:
    """How much of the first layer's weight came from the residual."""
    moved = model[0].base_layer.weight.double() - lora_mlp()[0].base_layer.weight.double()  # type: ignore[union-attr]
    return float(moved.norm())


def test_replicas_end_with_equal_weights_that_verify_and_a_snapshot_confirm():
    run = SmallRun(2, **EXACT)
    one, two = run.train(train)
    for (name, ours), theirs in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert residual_share(one) > 1e-3
    assert verify_run(run.store).disagreement is None
    snapshot = views(run.store.get(keys.snapshot(3, "model.safetensors")), "model")
    assert sorted(snapshot) == sorted(one.state_dict())
    for name, tensor in one.state_dict().items():
        assert torch.equal(snapshot[name], tensor), name


def test_only_factors_travel():
    exact, plain = SmallRun(1, **EXACT), SmallRun(1, rounds=3)
    train(exact.context())
    train(plain.context())
    assert exact.manifest(1).payload == plain.manifest(1).payload
    assert digests(exact)[0] != digests(plain)[0]  # the layout has residuals


def test_one_replica_is_trained_as_with_the_plain_mean():
    """The mean of one product is that product: with a plain outer step nothing is left for the residual."""
    outer = {"lr": 1.0, "momentum": 0.0}
    exact, plain = (SmallRun(1, rounds=3, adapters=form, outer=outer) for form in ("exact", "mean"))
    one, two = train(exact.context()), train(plain.context())
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("steps", [4, 7])
def test_a_killed_replica_goes_on_with_the_undisturbed_bits(steps):
    undisturbed, run = SmallRun(**EXACT), SmallRun(**EXACT)
    whole = train(undisturbed.context())
    train(run.context(), steps)
    resumed = train(run.context())
    assert digests(run) == digests(undisturbed)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_snapshot_written_from_the_bucket_has_the_bytes_of_a_replicas():
    run = SmallRun(2, **EXACT)
    run.train(train)
    log, name = RunLog(run.store), "model.safetensors"
    tip, files = rebuild_files(log, 3)
    rebuilt = {each.name: each.encode() for each in files.planned(tip.base)}
    for name in ("model.safetensors", "outer.safetensors"):
        assert rebuilt[name] == run.store.get(keys.snapshot(3, name))
    write_rebuilt_snapshot(log, 1, Stamp("test", lambda: 0.0))
    start = log.start()
    assert start is not None
    assert StoredSnapshot(run.store, 1, log.snapshot(1)).base(start.record).digest() == digests(run)[1]


def test_a_bf16_model_gets_the_residual_rounded_and_the_base_keeps_its_digits():
    run = SmallRun(2, **EXACT)
    model, _ = run.train(lambda context: train(context, dtype=torch.bfloat16))
    assert model[0].base_layer.weight.dtype == torch.bfloat16
    assert verify_run(run.store).disagreement is None
    held = views(run.store.get(keys.snapshot(3, "outer.safetensors")), "outer")
    residual = held["base.0.lora_residual.default"]
    assert residual.dtype == torch.float32 and residual.abs().max() > 0
    before = lora_mlp(torch.bfloat16)[0].base_layer.weight
    expected = (before.float() + 2.0 * residual).to(torch.bfloat16)
    assert torch.equal(model[0].base_layer.weight, expected)


def test_a_delay_and_a_frozen_factor_are_supported():
    run = SmallRun(2, **EXACT, fragment_sync_delay=1)

    def workload(context: ReplicaContext) -> torch.nn.Sequential:
        model = lora_mlp()
        model[2].lora_A["default"].weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        with context.attach(model, optimizer) as replica:
            for batch in replica.batches(BATCHES):
                inner_step(model, optimizer, batch)
        return model

    one, two = run.train(workload)
    assert verify_run(run.store).disagreement is None and residual_share(one) > 0
    assert torch.equal(one[2].base_layer.weight, lora_mlp()[2].base_layer.weight)
    assert torch.equal(one[0].base_layer.weight, two[0].base_layer.weight)


def test_an_earlier_base_is_held_with_its_own_residuals_and_then_the_newest_again():
    run = SmallRun(2, **EXACT)
    loops: dict[int, DiLoCoLoop] = {}

    def workload(context: ReplicaContext) -> torch.nn.Sequential:
        model = train(context)
        assert context.session is not None
        loops[context.replica_id] = context.session._training._loop
        return model

    model, _ = run.train(workload)
    newest = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fresh, log = lora_mlp(), RunLog(run.store)
    start = log.start()
    assert start is not None
    first = StoredSnapshot(run.store, 0, log.snapshot(0)).base(start.record)
    with loops[0].holding(first):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, fresh.state_dict()[name]), name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, newest[name]), name


def test_replicas_over_another_frozen_weight_are_refused_in_a_later_round_too():
    run = SmallRun(2, **EXACT)
    run.train(train)
    run.context(0).attach(model := lora_mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    other = lora_mlp()
    with torch.no_grad():
        other[0].base_layer.weight[0, 0] += 1.0  # type: ignore[index,union-attr]
    with pytest.raises(ModelMismatch, match="Its base model is another"):
        run.context(1).attach(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_replicas_with_another_scaling_are_refused():
    run = SmallRun(2, **EXACT)
    context = run.context(0)
    context.attach(model := lora_mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ModelMismatch, match=r"scaling 4, the run's in .* 2: .*lora_alpha"):
        model = lora_mlp(alpha=8.0)
        run.context(1).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


# -- refusals ---------------------------------------------------------------------------------------------------------


def without_adapters() -> torch.nn.Module:
    return torch.nn.Linear(4, 1)


def trained_itself() -> torch.nn.Module:
    model = lora_mlp()
    model[0].base_layer.weight.requires_grad_(True)  # type: ignore[union-attr]
    return model


def only_a() -> torch.nn.Module:
    model = lora_mlp()
    model[0].lora_B["default"].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    return model


def quantised() -> torch.nn.Module:
    model = lora_mlp()
    model[0].base_layer.weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.int8), requires_grad=False)  # type: ignore[union-attr]
    return model


def dora() -> torch.nn.Module:
    model = lora_mlp()
    model[0].lora_magnitude_vector = torch.nn.Parameter(torch.ones(8))
    return model


def of_an_embedding() -> torch.nn.Module:
    model = lora_mlp()
    model[0].lora_embedding_A = torch.nn.Parameter(torch.ones(2, 8))
    return model


def of_a_convolution() -> torch.nn.Module:
    model = lora_mlp()
    model[0].lora_A["default"].weight = torch.nn.Parameter(torch.ones(2, 4, 3))  # type: ignore[index,union-attr]
    return model


def transposed() -> torch.nn.Module:
    model = lora_mlp()
    model[0].fan_in_fan_out = True  # type: ignore[assignment]
    return model


def tied() -> torch.nn.Module:
    model = lora_mlp()
    model[3] = torch.nn.Linear(4, 8)
    model[3].weight = model[0].base_layer.weight  # type: ignore[union-attr]
    return model


def two_adapters() -> torch.nn.Module:
    model = lora_mlp()
    layer: Any = model[0]
    other = LoraLinear(layer.base_layer, adapter="other")
    layer.lora_A.update(other.lora_A)
    layer.lora_B.update(other.lora_B)
    layer.scaling |= other.scaling
    return model


def without_scaling() -> torch.nn.Module:
    model = lora_mlp()
    del model[0].scaling
    return model


def a_variant() -> torch.nn.Module:
    model = lora_mlp()
    model[0].lora_variant = {"default": torch.nn.Identity()}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (a_variant, r"'0.lora_A.default.weight' is a variant of LoRA \(Identity\)"),
        (without_adapters, "the model has none whose lora_A and lora_B are both trained"),
        (trained_itself, "'0.base_layer.weight', which is trained itself or quantised"),
        (quantised, "which is trained itself or quantised"),
        (only_a, "'0.lora_A.default.weight' is trained and '0.lora_B.default.weight' is not"),
        (dora, "belongs to DoRA"),
        (of_an_embedding, "belongs to an adapter of an embedding"),
        (of_a_convolution, r"only linear layers with a weight of \(out, in\)"),
        (transposed, r"only linear layers with a weight of \(out, in\)"),
        (tied, "'0.base_layer.weight' is tied to '3.weight'"),
        (two_adapters, "second trained adapter of '0.base_layer.weight'"),
        (without_scaling, "without a weight or a `scaling`"),
    ],
)
def test_what_cannot_be_averaged_exactly_is_refused_with_the_remedy(build, words):
    model = build()
    with pytest.raises(ConfigError, match=words) as caught:
        SmallRun(**EXACT).context().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert 'adapters="mean"' in str(caught.value)


@pytest.mark.parametrize("setting", [{"fragments": 3, "sync_every": 3}, {"fragment_update_alpha": 0.5}])
def test_factors_that_would_not_move_together_are_refused(setting):
    with pytest.raises(ConfigError, match="wholly and in the same round"):
        make_config({"entrypoint": "m:f", "adapters": "exact", **setting})


def test_adapters_of_peft_are_found_with_their_scaling():
    peft = pytest.importorskip("peft")
    from tiny_trainers import llama

    lora = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(llama(), lora)
    run = SmallRun(**EXACT | {"rounds": 1})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.arange(3, 15).reshape(2, 6)
    with run.context().attach(model, optimizer) as replica:
        for _ in replica.batches(BATCHES):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    start = RunLog(run.store).start()
    assert start is not None
    layers = [f"base_model.model.model.layers.{i}" for i in range(2)]
    names = sorted(f"{layer}.{each}" for layer in layers for each in ("self_attn.q_proj", "mlp.down_proj"))
    assert [pair.weight for pair in start.record.adapters] == [f"{name}.base_layer.weight" for name in names]
    assert {pair.scaling for pair in start.record.adapters} == {3.0}
    assert verify_run(run.store).agrees


def test_loralibs_form_is_found_too():
    class Layer(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.weight.requires_grad_(False)
            self.lora_A, self.lora_B = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 4), (3, 2)))
            self.scaling = 0.5

    model = torch.nn.Sequential(Layer())
    run = SmallRun(**EXACT)
    run.context().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    start = RunLog(run.store).start()
    assert start is not None
    (pair,) = start.record.adapters
    assert (pair.a, pair.b, pair.weight, pair.residual) == ("0.lora_A", "0.lora_B", "0.weight", "0.lora_residual")
    assert pair.scaling == 0.5
