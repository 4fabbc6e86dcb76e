"""PRIME-RL's default loss (DPPO mask, squared log-ratio) as the file for its trainer's custom-loss setting:

    [trainer.loss]
    type = "custom"
    import_path = "composer.prime_rl_loss.loss_fn"
    kwargs = { kl_tau = 1e-3 }

prime-rl is not imported, and not on PyPI: its inputs are used by their attributes. It hands over log-probabilities of
sampled tokens only, so the channels of `losses` that need whole distributions cannot exist there.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class LossOutputs:
    """Shaped as prime-rl's own."""

    loss: Tensor
    metrics: dict[str, Tensor]


def loss_fn(
    inputs: Any,
    *,
    dppo_mask_high: float = 0.2,
    dppo_mask_low: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    alpha_sdpo: float = 0.0,
    beta_dpo: float = 0.0,
) -> LossOutputs:
    """sum_t w (-keep * adv_tau A r + kl_tau (log r)^2) of one sample, r = p / q, p the trainer's, q the sampler's.

    A token is left out of the first term where p - q is above `dppo_mask_high` with A > 0, or below -`dppo_mask_low`
    with A <= 0.

    Args:
        inputs: `trainer_logprobs`, `inference_logprobs`, `advantages` (seq,) float, `loss_mask` (seq,) bool, and
            perhaps `loss_weights` (seq,) or None.
    """
    if alpha_sdpo > 0:
        raise NotImplementedError(
            f"alpha_sdpo={alpha_sdpo!r}: self-distillation compares whole distributions, and prime-rl hands over the "
            "log-probabilities of sampled tokens only. Use compose_loss in a trainer that holds the logits."
        )
    if beta_dpo != 0:
        warnings.warn(
            f"beta_dpo={beta_dpo!r} has no effect: prime-rl's batches hold no preference pairs.", stacklevel=2
        )
    p, q, advantages = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages
    mask = inputs.loss_mask
    for name in ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask"):
        shape = tuple(getattr(inputs, name).shape)
        if len(shape) != 1 or shape != tuple(p.shape):
            raise ValueError(f"{name} is {shape}: the loss is called per sample, with (seq,) tensors of one length.")
    log_ratio = p - q
    moved = p.exp() - q.exp()
    invalid = torch.where(advantages > 0, moved > dppo_mask_high, moved < -dppo_mask_low)
    keep = mask & ~invalid
    per_token = kl_tau * mask * log_ratio.square() - keep * adv_tau * advantages * log_ratio.exp()
    weights = getattr(inputs, "loss_weights", None)
    if weights is not None:
        per_token = per_token * weights
    count = mask.sum().clamp_min(1)
    metrics = {
        "kept": keep.detach(),
        "masked_share": (mask & invalid).sum() / count,
        "mismatch_kl": ((log_ratio.exp() - log_ratio - 1) * mask).sum().detach() / count,
    }
    return LossOutputs(per_token.sum(), metrics)
