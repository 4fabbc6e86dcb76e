"""A policy loss for VeRL, registered as "composer": its own PPO loss and the preference channel of `losses`.

    actor_rollout_ref.model.external_lib=composer.verl_policy_loss
    actor_rollout_ref.actor.policy_loss.loss_mode=composer

Tried as a function with verl 0.9.1 on a CPU; not in VeRL's trainer, which needs a Ray cluster and an inference engine.
A policy loss gets log-probabilities of sampled tokens only, so the channel of whole distributions cannot be here.
"""

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss

from composer.losses import dpo_loss

BETA_REPLAY, DPO_BETA = 0.2, 0.1


@register_policy_loss("composer")
def composer_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """VeRL's clipped PPO loss + `BETA_REPLAY` * DPO over neighbouring rows. All (batch, response length).

    Rows 2i and 2i + 1 must answer one prompt: that of the larger advantage is preferred, equal ones are left out. The
    reference is the policy that sampled them (`old_log_prob`).
    """
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
    if len(log_prob) % 2:
        raise ValueError(f"{len(log_prob)} rows are no pairs: set an even micro-batch size and rollout.n.")
    own, reference, worth = (
        (each * response_mask).sum(-1).view(-1, 2) for each in (log_prob, old_log_prob, advantages)
    )
    worth = worth / response_mask.sum(-1).view(-1, 2).clamp_min(1)
    differ = worth[:, 0] != worth[:, 1]
    if not differ.any():
        return loss, metrics | {"composer/pairs": 0.0}
    chosen = worth.argmax(-1, keepdim=True)[differ]
    sides = [each[differ].gather(1, side).squeeze(1) for each in (own, reference) for side in (chosen, 1 - chosen)]
    preference = dpo_loss(sides[0], sides[1], sides[2], sides[3], DPO_BETA)
    metrics |= {"composer/pairs": float(differ.sum()), "composer/dpo": preference.detach().item()}
    return loss + BETA_REPLAY * preference, metrics
