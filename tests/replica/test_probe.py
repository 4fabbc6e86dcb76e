"""`token_mean_kl` and `KLProbe`: exact figures, and one reference for all replicas and attempts of a run."""

import logging
import math
import random
from typing import Any

import pytest
import torch
from in_one_process import SmallRun

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Contribution, Probe
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.tensor_file import encode
from replica.context import ReplicaContext
from replica.training.kl_probe import KLProbe, token_mean_kl

LOGITS = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
REFERENCE = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
BOTH = torch.ones(1, 2)


# -- the formula ------------------------------------------------------------------------------------------------------


def test_the_golden_figures():
    """By hand: p = softmax, sum p (log p - log r): .123285 and .098886 nats, mean .111085."""
    assert token_mean_kl(LOGITS, REFERENCE, BOTH).item() == pytest.approx(0.111085, abs=1e-6)
    for index, value in ((0, 0.123285), (1, 0.098886)):
        mask = torch.zeros(1, 2, dtype=torch.bool)
        mask[0, index] = True
        assert token_mean_kl(LOGITS, REFERENCE, mask).item() == pytest.approx(value, abs=1e-6)
    assert token_mean_kl(LOGITS, LOGITS, BOTH).item() <= 1e-7


def test_it_is_the_sum_over_the_vocabulary_in_double_precision():
    g = torch.Generator().manual_seed(7)
    logits, reference = torch.randn(2, 5, 11, generator=g), 1.5 * torch.randn(2, 5, 11, generator=g)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    total = 0.0
    for b, t in mask.nonzero().tolist():
        p, r = (torch.softmax(x[b, t].double(), -1).tolist() for x in (logits, reference))
        total += math.fsum(p[v] * (math.log(p[v]) - math.log(r[v])) for v in range(11))
    assert token_mean_kl(logits, reference, mask).item() == pytest.approx(total / 7, abs=1e-6)
    shifted = token_mean_kl(logits + 3, reference.log_softmax(-1), mask)
    assert shifted.item() == pytest.approx(total / 7, abs=1e-6)
    assert token_mean_kl(logits.bfloat16(), reference.bfloat16(), mask).dtype == torch.float32


def test_tokens_that_cannot_occur_count_nothing_and_gradients_pass():
    logits, reference = LOGITS.clone(), REFERENCE.clone()
    logits[..., 2] = reference[..., 2] = -torch.inf
    two = token_mean_kl(logits[..., :2], reference[..., :2], BOTH)
    assert token_mean_kl(logits, reference, BOTH).item() == pytest.approx(two.item(), abs=1e-7)
    leaf = LOGITS.clone().requires_grad_()
    token_mean_kl(leaf, REFERENCE, BOTH).backward()
    assert leaf.grad is not None and bool(leaf.grad.abs().sum() > 0)


def test_what_does_not_fit_is_refused_by_shape():
    with pytest.raises(ValueError, match=r"logits are \(1, 2, 3\), reference_logits \(1, 1, 3\)"):
        token_mean_kl(LOGITS, REFERENCE[:, :1], BOTH)
    with pytest.raises(ValueError, match=r"mask is \(2,\), logits \(1, 2, 3\)"):
        token_mean_kl(LOGITS, REFERENCE, torch.ones(2))
    with pytest.raises(ValueError, match="no token to average"):
        token_mean_kl(LOGITS, REFERENCE, torch.zeros(1, 2))
    assert math.isnan(token_mean_kl(LOGITS * math.nan, REFERENCE, BOTH).item())


# -- the probe alone --------------------------------------------------------------------------------------------------

VOCABULARY = 11


class Tiny(torch.nn.Module):
    """Logits of the next token from this one, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.table(tokens))


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


ITEMS = [torch.arange(start, start + 6) % VOCABULARY for start in range(5)]


def forward(model: torch.nn.Module, item: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    random.random(), torch.rand(3)
    return model(item), torch.arange(len(item)) > 0  # (T, V), (T,)


def test_the_probe_measures_the_mean_over_all_counted_tokens():
    start, moved = tiny(), tiny(1)
    probe = KLProbe(ITEMS, forward)
    probe.load(probe.reference_of(start))
    start.eval(), moved.eval()
    with torch.no_grad():
        exact = token_mean_kl(
            torch.stack([moved(i) for i in ITEMS]), torch.stack([start(i) for i in ITEMS]), torch.ones(5, 6).triu(0)
        )
        masks = torch.ones(5, 6)
        masks[:, 0] = 0
        exact = token_mean_kl(torch.stack([moved(i) for i in ITEMS]), torch.stack([start(i) for i in ITEMS]), masks)
    assert probe.measure(moved) == pytest.approx(exact.item(), abs=2e-3) and exact.item() > 0.5
    assert 0 <= probe.measure(start) < 1e-4  # the reference is rounded to bf16
    batched = KLProbe(ITEMS, lambda m, i: tuple(x[None] for x in forward(m, i)))
    batched.load(batched.reference_of(start))
    assert batched.measure(moved) == probe.measure(moved)


def test_modes_and_random_generators_are_restored():
    model = tiny()
    model.dropout.eval()
    probe = KLProbe(ITEMS, forward)
    before = torch.get_rng_state(), random.getstate()
    probe.load(probe.reference_of(model))
    probe.measure(model)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert model.training and not model.dropout.training and model.table.weight.grad is None


def test_a_probe_that_cannot_measure_says_why():
    model = tiny()
    with pytest.raises(ConfigError, match="a KLProbe of 0 items: pass 1 to 64"):
        KLProbe([], forward)
    with pytest.raises(ConfigError, match=r"every=0\)"):
        KLProbe(ITEMS, forward, every=0)
    with pytest.raises(ConfigError, match=r"has no reference: call probe\.load"):
        KLProbe(ITEMS, forward).measure(model)
    with pytest.raises(ConfigError, match="no token to average"):
        KLProbe(ITEMS, lambda m, i: (m(i), torch.zeros(6))).reference_of(model)
    with pytest.raises(ConfigError, match=r"logits \(6, 11\) and a mask \(5,\)"):
        KLProbe(ITEMS, lambda m, i: (m(i), torch.ones(5))).reference_of(model)
    probe = KLProbe(ITEMS, forward)
    with pytest.raises(ConfigError, match="the reference has 4 items, the KLProbe 5"):
        probe.load(KLProbe(ITEMS[:4], forward).reference_of(model))
    probe.load(KLProbe(ITEMS, lambda m, i: (m(i), torch.arange(6) > 2)).reference_of(model))
    with pytest.raises(ConfigError, match=r"item 0 of the KLProbe has \(5, 11\) counted .* its reference \(3, 11\)"):
        probe.measure(model)


def test_items_of_every_kind_have_a_digest_that_depends_on_their_order():
    digest = KLProbe(ITEMS, forward).items_digest
    assert KLProbe([i.clone() for i in ITEMS], forward).items_digest == digest
    assert KLProbe(ITEMS[::-1], forward).items_digest != digest
    mappings = [KLProbe([{"input_ids": ITEMS[k], "text": "a"}], forward).items_digest for k in (0, 0, 1)]
    assert mappings[0] == mappings[1] != mappings[2]


# -- in a run ---------------------------------------------------------------------------------------------------------


def score(model: torch.nn.Module, items: Any) -> list[float]:
    return [float(loss_of(model, ITEMS[item])) for item in items]


def loss_of(model: torch.nn.Module, item: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(item)[:-1], item[1:])


def workload(ctx: ReplicaContext, steps: int | None = None, lr: float = 0.5, **attach: Any) -> Tiny:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    attach = {"kl_probe": KLProbe(ITEMS[:3], forward), "heldout": score, "heldout_items": list(range(5)), **attach}
    with ctx.attach(model, optimizer, **attach) as replica:
        for taken, batch in enumerate(replica.batches(ITEMS), start=1):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item())
            if taken == steps:
                break
    return model


def drift(manifest: Contribution) -> float | None:
    return manifest.metrics["kl_to_init"].mean if "kl_to_init" in manifest.metrics else None


def test_the_drift_of_every_base_is_in_the_manifests_and_in_the_guards_state():
    run = SmallRun(rounds=3)
    model = workload(run.context())
    drifts = [drift(run.manifest(r)) for r in (1, 2, 3, 4)]
    assert drifts[0] == 0.0 and drifts[1] is not None and drifts[1] > 0.01 and drifts == sorted(drifts)
    probe = KLProbe(ITEMS[:3], forward)
    probe.load(probe.reference_of(tiny()))
    assert drifts[3] == pytest.approx(probe.measure(model), abs=1e-6)  # the final evaluation, of the last model
    guard = run.commits()[-1].guard
    assert guard is not None and guard["guard"]["kl"]
    assert verify_run(run.store).agrees


def test_all_replicas_measure_the_same_drift_and_store_no_reference():
    run = SmallRun(replicas=2)
    run.train(workload)
    for round_ in (1, 2, 3):
        assert drift(run.manifest(round_, 0)) == drift(run.manifest(round_, 1)) is not None
    assert not [info.key for info in run.store.list("") if info.key.startswith("probe")]


REFERENCES = ["junk", "of a later version", "of another model", "of other items"]


@pytest.mark.parametrize(
    "kind", [REFERENCES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in REFERENCES[1:])]
)
def test_a_reference_that_somebody_put_there_first_is_read_by_nobody(kind: str):
    """As earlier versions stored it: whoever created it first chose what all replicas measured from."""
    run, undisturbed = SmallRun(rounds=4), SmallRun(rounds=4)
    other = {name: each.flip(0) for name, each in KLProbe(ITEMS[:3], forward).reference_of(tiny()).items()}
    data = encode(other)
    fields = {"base_digest": "b3:" + "0" * 64, "items": "0" * 64, "digest": bulk_digest(data), "size": len(data)}
    record = Probe(write_id="x", at=0.0, tokens=15, **fields)
    if kind == "of another model":
        record = record.model_copy(update={"items": KLProbe(ITEMS[:3], forward).items_digest})
    version = b'{"record":"probe","schema_version":99}\n'
    run.store.create(keys.KL_RECORD, {"junk": b"[", "of a later version": version}.get(kind, record.to_bytes()))
    run.store.create(keys.KL_REFERENCE, data)
    workload(run.context(), steps=7)
    workload(run.context())
    workload(undisturbed.context())
    found, expected = ([drift(each.manifest(round_)) for round_ in range(1, 6)] for each in (run, undisturbed))
    assert found == expected
    done = verify_run(run.store)
    assert done.disagreement is not None and done.disagreement.key == keys.KL_RECORD


def test_a_probe_measures_from_the_start_of_the_run_that_it_is_used_in():
    probe, run = KLProbe(ITEMS[:3], forward), SmallRun(rounds=2)
    probe.load({name: each.flip(0) for name, each in probe.reference_of(tiny()).items()})
    undisturbed = SmallRun(rounds=2)
    workload(run.context(), kl_probe=probe)
    workload(undisturbed.context())
    assert [drift(run.manifest(r)) for r in (1, 2, 3)] == [drift(undisturbed.manifest(r)) for r in (1, 2, 3)]


def test_a_restart_measures_from_the_runs_start(caplog):
    caplog.set_level(logging.INFO)
    run, undisturbed = SmallRun(rounds=4, snapshot_every=1), SmallRun(rounds=4, snapshot_every=1)
    workload(run.context(), steps=7)  # into round 3
    workload(run.context())
    workload(undisturbed.context())
    assert "kl_to_init is computed from snapshot 0" in caplog.text
    found, expected = ([drift(r.manifest(round_)) for round_ in range(1, 6)] for r in (run, undisturbed))
    assert found == expected and expected[4] is not None and expected[4] > (expected[1] or 0)


def test_the_probe_changes_no_bit_of_training_and_measures_only_every_so_many_rounds():
    probed, plain = SmallRun(rounds=4), SmallRun(rounds=4)
    workload(probed.context(), kl_probe=KLProbe(ITEMS[:3], forward, every=2))
    workload(plain.context(), kl_probe=None)
    assert [c.base_digest for c in probed.commits()] == [c.base_digest for c in plain.commits()]
    measured = [drift(probed.manifest(r)) is not None for r in (1, 2, 3, 4, 5)]
    assert measured == [True, False, True, False, True]
    assert drift(plain.manifest(1)) is None


def test_fragments_are_measured_on_the_base_not_on_local_parameters():
    run = SmallRun(rounds=4, sync_every=4, fragment_update_alpha=0.5)
    workload(run.context())
    base = drift(run.manifest(3))
    from diloco_orchestrator.snapshots.rebuild import rebuild

    log = RunLog(run.store)
    model = tiny()
    rebuild(log, log.newest_begin().record, until=2).base.copy_into(dict(model.named_parameters()))
    probe = KLProbe(ITEMS[:3], forward)
    probe.load(probe.reference_of(tiny()))
    assert base == pytest.approx(probe.measure(model), abs=1e-6)


@pytest.mark.parametrize("guard", [{"rule": "heldout", "max_proxy_real_gap": 99.0}, {"rule": "sequential"}])
def test_drift_above_its_budget_halts_the_run(guard: dict[str, Any]):
    run = SmallRun(rounds=12, guard={"min_steps": 3, "kl_hard_stop": 0.05, **guard})
    workload(run.context(), lr=3.0)
    last = run.commits()[-1]
    assert last.stop == "halted" and last.verdict is not None and "kl_to_init" in last.verdict.reason


def test_a_drift_that_is_not_finite_is_reported_as_such():
    run = SmallRun(rounds=2)

    def broken(model: torch.nn.Module, item: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, mask = forward(model, item)
        moved = not torch.equal(model.table.weight, tiny().table.weight)  # type: ignore[attr-defined]
        return logits * (math.nan if moved else 1.0), mask

    workload(run.context(), kl_probe=KLProbe(ITEMS[:3], broken))
    assert run.manifest(2).metrics["kl_to_init"].sum is None
    halted = SmallRun(rounds=6, guard={"rule": "sequential"})
    workload(halted.context(), kl_probe=KLProbe(ITEMS[:3], broken))
    last = halted.commits()[-1]
    assert last.stop == "halted" and last.round == 3 and last.verdict is not None
    assert "finite" in last.verdict.reason


def test_observed_drift_beside_a_probe_and_sequence_sums_are_pointed_out(caplog):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = SmallRun().context().attach(model, optimizer, kl_probe=KLProbe(ITEMS, forward))
    with replica, pytest.raises(ConfigError, match="leave one out"):
        replica.observe(kl_to_init=0.1)

    def observes(value: float) -> str:
        caplog.clear()
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with caplog.at_level(logging.WARNING), SmallRun().context().attach(model, optimizer) as replica:
            for _ in replica.batches(ITEMS):
                replica.observe(loss=1.0, kl_to_init=value)
                optimizer.step()
        return caplog.text

    assert "in nats per token, not a sum over sequences" in observes(0.5)
    assert "kl_to_init" not in observes(0.3)
