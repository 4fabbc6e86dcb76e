"""`compose_loss` on a real Llama and real chat templates: three channels, their gradients, bad input."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import composer.losses
import pytest
import torch
from composer.losses import compose_loss, entropy_opd_loss, generalized_jsd, taid_loss
from composer_batches import batches, small_model, trained_lines

ALL = {"lm_ce", "sdpo_jsd", "trace_replay_dpo"}
BOTH = {"alpha_sdpo": 0.5, "beta_replay": 0.2}


@pytest.fixture(scope="module")
def prepared() -> tuple[Any, dict[str, torch.Tensor]]:
    model = small_model()
    return model, batches(model, count=1)[0]


def without(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if not key.startswith(names)}


# -- channels ---------------------------------------------------------------------------------------------------------


def test_all_channels_fire_in_every_step_on_two_alternating_batches():
    lines = [line.split() for line in trained_lines()]
    values = [[float.fromhex(each) for each in line[:4]] for line in lines]
    assert all(set(line[4:]) == ALL for line in lines)
    assert all(ce > 0 and jsd > 0 and dpo > 0 for _, ce, jsd, dpo in values)
    assert values[0][3] == pytest.approx(math.log(2), abs=1e-6)  # the model is the reference still
    assert values[-1][1] < values[1][1] and values[-1][3] < values[1][3]


@pytest.mark.slow
def test_two_processes_print_the_same_ten_lines(examples: Path):
    here = Path(__file__).parent
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(examples), str(here), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(here / "composer_batches.py")]
    printed = [subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout for _ in "ab"]
    assert printed[0] == printed[1] and len(printed[0].splitlines()) == 10


def test_with_the_weights_at_zero_the_loss_is_the_cross_entropy_bit_for_bit(prepared):
    model, batch = prepared
    plain = compose_loss(model, batch)
    assert torch.equal(plain.total, plain.lm_ce) and plain.active == {"lm_ce"}
    labels, logits = batch["labels"], model(input_ids=batch["input_ids"]).logits
    assert plain.lm_ce.item() == pytest.approx(model.loss_function(logits, labels, logits.shape[-1]).item(), abs=1e-6)
    for weights in ({"alpha_sdpo": 0.5}, {"beta_replay": 0.2}):
        assert torch.equal(compose_loss(model, batch, **weights).lm_ce, plain.lm_ce)


def test_the_total_is_the_weighted_sum(prepared):
    model, batch = prepared
    found = compose_loss(model, batch, **BOTH)
    assert torch.equal(found.total, found.lm_ce + 0.5 * found.sdpo_jsd + 0.2 * found.trace_replay_dpo)


def test_a_trainers_loss_stands_in_the_place_of_the_cross_entropy(prepared):
    model, batch = prepared
    primary = torch.tensor(3.0, requires_grad=True)
    found = compose_loss(model, batch, **BOTH, primary=primary)
    assert found.active == {"primary", "sdpo_jsd", "trace_replay_dpo"} and found.lm_ce == 0
    assert torch.equal(found.total, primary + 0.5 * found.sdpo_jsd + 0.2 * found.trace_replay_dpo)
    assert torch.equal(compose_loss(model, batch, primary=primary).total, primary)


@pytest.mark.parametrize("channel", ["lm_ce", "sdpo_jsd", "trace_replay_dpo"])
def test_each_channel_alone_moves_the_whole_model(prepared, channel: str):
    model, batch = prepared
    model.zero_grad()
    getattr(compose_loss(model, batch, **BOTH), channel).backward()
    seen = {
        "lm_ce": batch["input_ids"],
        "sdpo_jsd": batch["input_ids"],
        "trace_replay_dpo": torch.cat([batch["dpo_chosen_input_ids"], batch["dpo_rejected_input_ids"]], 1),
    }[channel].unique()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if name == "model.embed_tokens.weight":
            gradient = gradient[seen[seen != 0]]  # rows of tokens that occur; 0 is padding
        assert (gradient != 0).float().mean() >= 0.99, name


@pytest.mark.parametrize(
    ("wrapper", "settings", "expected"),
    [
        ("none", {"jsd_beta": 0.1, "jsd_temperature": 2.0}, lambda s, t, m: generalized_jsd(s, t, m, 0.1, 2.0)),
        ("taid", {"taid_t": 0.3}, lambda s, t, m: taid_loss(s, t, m, 0.3)),
        ("entropy_opd", {"entropy_opd_h_max": 2.0}, lambda s, t, m: entropy_opd_loss(s, t, m, 2.0)),
    ],
)
def test_a_wrapper_takes_the_place_of_the_divergence(prepared, wrapper: str, settings: dict[str, Any], expected: Any):
    model, batch = prepared
    found = compose_loss(model, batch, alpha_sdpo=1.0, sdpo_wrapper=wrapper, **settings)  # type: ignore[arg-type]
    logits = [model(input_ids=batch[key]).logits for key in ("input_ids", "ctx_teacher_input_ids")]
    index = [batch[f"sdpo_{side}_index"] for side in ("student", "teacher")]
    rows = torch.arange(len(index[0]))[:, None]
    aligned = [each[rows, where.clamp_min(0)] for each, where in zip(logits, index, strict=True)]
    assert found.sdpo_jsd.item() == pytest.approx(expected(*aligned, index[0] >= 0).item(), rel=1e-6)


def test_simpo_needs_no_reference(prepared):
    model, batch = prepared
    batch = without(batch, "dpo_chosen_ref", "dpo_rejected_ref")
    found = compose_loss(model, batch, beta_replay=0.2, dpo_variant="simpo", strict=True)
    assert "trace_replay_dpo" in found.active and found.trace_replay_dpo > 0


def test_the_teacher_is_evaluated_without_dropout_and_the_mode_comes_back(prepared):
    _, batch = prepared
    model = small_model()
    modes = []
    model.register_forward_pre_hook(lambda module, *_: modes.append((module.training, torch.is_grad_enabled())))
    model.train()
    compose_loss(model, batch, alpha_sdpo=1.0)
    assert modes == [(True, True), (False, False)] and model.training
    model.eval()
    compose_loss(model, batch, alpha_sdpo=1.0)
    assert not model.training


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_channel_without_its_keys_is_off_and_logged_once_or_refused(prepared, caplog, monkeypatch):
    model, batch = prepared
    monkeypatch.setattr(composer.losses, "_warned", set())
    cut = without(batch, "ctx_teacher", "dpo_chosen")
    for _ in range(2):
        assert compose_loss(model, cut, **BOTH).active == {"lm_ce"}
    assert [each.message for each in caplog.records] == [
        "channel sdpo_jsd is off for batches without ctx_teacher_input_ids",
        "channel trace_replay_dpo is off for batches without dpo_chosen_input_ids, dpo_chosen_response_mask, "
        "dpo_chosen_ref_logprobs",
    ]
    with pytest.raises(ValueError, match="channel sdpo_jsd has a weight, and the batch has no ctx_teacher_input_ids"):
        compose_loss(model, cut, **BOTH, strict=True)
    unhinted = {**batch, "sdpo_student_index": torch.full((3, 2), -1), "sdpo_teacher_index": torch.full((3, 2), -1)}
    with pytest.raises(ValueError, match="has no sdpo_student_index"):
        compose_loss(model, unhinted, **BOTH, strict=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha_sdpo": -0.1}, "alpha_sdpo=-0.1 is negative"),
        ({"beta_replay": math.nan}, "beta_replay=nan is negative"),
        ({"dpo_variant": "simp"}, "dpo_variant='simp' is none of dpo, simpo. Did you mean 'simpo'"),
        ({"sdpo_wrapper": "tade", "alpha_sdpo": 1.0}, "Did you mean 'taid'"),
        ({"sdpo_wrapper": "taid"}, "wraps a channel that is off"),
        ({"sdpo_wrapper": "taid", "alpha_sdpo": 1.0}, "needs taid_t"),
        ({"taid_t": 1.2}, r"taid_t=1.2 is not in \[0, 1\]"),
        ({"jsd_beta": 2.0, "alpha_sdpo": 1.0}, "jsd beta=2.0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(prepared, settings: dict[str, Any], words: str):
    model, batch = prepared
    with pytest.raises(ValueError, match=words):
        compose_loss(model, batch, **settings)


def changed(batch: dict[str, Any], key: str, change: Any) -> dict[str, Any]:
    return {**batch, key: change(batch[key].clone())}


def test_index_pairs_that_compare_different_tokens_are_refused(prepared):
    model, batch = prepared
    with pytest.raises(ValueError, match="sdpo pair 0 of row 0 compares different tokens"):
        compose_loss(model, changed(batch, "sdpo_teacher_index", lambda x: torch.where(x >= 0, x - 1, x)), **BOTH)
    with pytest.raises(ValueError, match="have their -1 at different places"):
        compose_loss(
            model, changed(batch, "sdpo_teacher_index", lambda x: x.index_fill(1, torch.tensor([0]), -1)), **BOTH
        )
    with pytest.raises(ValueError, match=r"they must be below T - 1 = \d+ and \d+"):
        compose_loss(model, changed(batch, "sdpo_teacher_index", lambda x: torch.where(x >= 0, x + 999, x)), **BOTH)
    with pytest.raises(ValueError, match=r"both are \(B, K\)"):
        compose_loss(model, changed(batch, "sdpo_teacher_index", lambda x: x[:, :-1]), **BOTH)


def test_shapes_that_differ_are_named(prepared):
    model, batch = prepared
    shapes = tuple(batch["input_ids"].shape)
    with pytest.raises(ValueError, match=re.escape(f"for input_ids {shapes}")):
        compose_loss(model, changed(batch, "labels", lambda x: x[:, :-1]))
    with pytest.raises(ValueError, match="has no token to average over"):
        compose_loss(model, changed(batch, "labels", lambda x: torch.full_like(x, -100)))
    with pytest.raises(ValueError, match="response of pair 0 has no token"):
        compose_loss(model, changed(batch, "dpo_chosen_response_mask", torch.zeros_like), **BOTH)
    with pytest.raises(ValueError, match=r"chosen is \(1,\), chosen_ref \(2,\)"):
        compose_loss(model, changed(batch, "dpo_chosen_ref_logprobs", lambda x: x.repeat(2)), **BOTH)
