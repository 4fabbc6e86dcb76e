"""The loss file for prime-rl: upstream's figure, its gates, bad input."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.prime_rl_loss import loss_fn


def sample(**changes: Any) -> SimpleNamespace:
    values = {
        "trainer_logprobs": torch.tensor([0.5, 0.9, 0.2, 0.05, 0.6, 0.3]).log(),
        "inference_logprobs": torch.tensor([0.45, 0.5, 0.25, 0.4, 0.6, 0.1]).log(),
        "advantages": torch.tensor([1.0, 1, -1, -1, 0, 1]),
        "loss_mask": torch.tensor([1, 1, 1, 1, 1, 0]).bool(),
    }
    return SimpleNamespace(**values | changes)


def test_upstreams_figure_and_the_tokens_it_keeps():
    found = loss_fn(sample())
    assert found.loss.item() == pytest.approx(-0.30638081, abs=1e-6)
    assert found.metrics["kept"].tolist() == [True, False, True, False, True, False]


def test_a_zero_advantage_takes_the_low_gate():
    moved = {"trainer_logprobs": torch.tensor([0.9, 0.1]).log(), "inference_logprobs": torch.tensor([0.1, 0.9]).log()}
    found = loss_fn(sample(**moved, advantages=torch.zeros(2), loss_mask=torch.ones(2).bool()))
    assert found.metrics["kept"].tolist() == [True, False]


def test_weights_apply_to_each_token():
    halves = loss_fn(sample(loss_weights=torch.full((6,), 0.5)))
    assert halves.loss.item() == pytest.approx(-0.30638081 / 2, abs=1e-6)
    assert loss_fn(sample(loss_weights=None)).loss == loss_fn(sample()).loss


def test_only_kept_and_masked_tokens_get_a_gradient():
    p = sample().trainer_logprobs.requires_grad_()
    loss_fn(sample(trainer_logprobs=p), kl_tau=0.0).loss.backward()
    assert (p.grad != 0).tolist() == [True, False, True, False, False, False]  # the fifth has no advantage


def test_what_cannot_exist_there_is_refused():
    with pytest.raises(ValueError, match=r"trainer_logprobs is \(1, 6\): the loss is called per sample"):
        loss_fn(sample(trainer_logprobs=torch.zeros(1, 6)))
    with pytest.raises(ValueError, match=r"advantages is \(5,\)"):
        loss_fn(sample(advantages=torch.zeros(5)))
    with pytest.raises(NotImplementedError, match="log-probabilities of sampled tokens only"):
        loss_fn(sample(), alpha_sdpo=0.1)
    with pytest.warns(UserWarning, match="beta_dpo=0.5 has no effect"):
        loss_fn(sample(), beta_dpo=0.5)
