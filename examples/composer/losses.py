"""The losses: generalized JSD, DPO and SimPO, TAID, entropy-aware OPD, and `compose_loss` over them.

Knows tensors and a Hugging Face causal language model; where batches come from is `collate`. Everything is computed in
fp32 and returned as a scalar with a gradient. Masks are (B, T) of 0 and 1; each loss is a mean over tokens of mask 1.
"""

import difflib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from composer.taid_schedule import TAIDScheduler as TAIDScheduler
from composer.taid_schedule import in_unit_interval

log = logging.getLogger(__name__)

IGNORED = -100  # label of a token without cross entropy

_LEAST_LOG_PROB = -1e4  # exp gives 0 in fp32, and 0 * (finite - finite) is 0 where -inf would give NaN


# -- divergences of two distributions over the vocabulary --------------------------------------------------------------


def _log_probs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1).clamp_min(_LEAST_LOG_PROB)


def _kl_terms(p: Tensor, q: Tensor) -> Tensor:
    """p (log p - log q) of each vocabulary entry, from log-probabilities; their sum is KL(P || Q)."""
    return p.exp() * (p - q)


def _masked_mean(per_token: Tensor, mask: Tensor) -> Tensor:
    """Mean of (B, T) over the tokens of mask 1."""
    weights = mask.to(per_token.dtype)
    return (per_token * weights).sum() / weights.sum()


def _check(student: Tensor, teacher: Tensor, mask: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ValueError(f"student logits are {_shape(student)}, teacher logits {_shape(teacher)}: they must be equal.")
    if mask.shape != student.shape[:-1]:
        raise ValueError(f"mask is {_shape(mask)} for logits {_shape(student)}: it must be {_shape(student[..., 0])}.")
    _check_not_empty(mask)


def _check_not_empty(mask: Tensor) -> None:
    if not mask.any():
        raise ValueError(f"mask {_shape(mask)} has no token to average over: leave such a batch out.")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def generalized_jsd(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_clip: float | None = None,
) -> Tensor:
    """b KL(T || M) + (1 - b) KL(S || M) with M = (1 - b) S + b T: eq. 1 of GKD, arXiv 2306.13649, as upstream has it.

    `beta` 0 is KL(T || S), 1 is KL(S || T). Self-distillation (SDPO, arXiv 2601.20802) has the model itself, shown a
    hint, as teacher.

    Args:
        student: logits (B, T, V).
        teacher: logits (B, T, V); no gradient flows into them.
        mask: (B, T).
        temperature: divides both logits.
        token_clip: upper bound of each vocabulary entry's term before the sum over V (OPSD).
    """
    _check(student, teacher, mask)
    in_unit_interval("jsd beta", beta)
    if temperature <= 0:
        raise ValueError(f"jsd temperature={temperature!r} is not above 0.")
    s, t = _log_probs(student / temperature), _log_probs(teacher.detach() / temperature)
    if beta == 0:
        terms = _kl_terms(t, s)
    elif beta == 1:
        terms = _kl_terms(s, t)
    else:
        mixture = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
        terms = beta * _kl_terms(t, mixture) + (1 - beta) * _kl_terms(s, mixture)
    if token_clip is not None:
        terms = terms.clamp(max=token_clip)
    return _masked_mean(terms.sum(-1), mask)


def taid_loss(student: Tensor, teacher: Tensor, mask: Tensor, t: float) -> Tensor:
    """Cross entropy to p_t = softmax((1 - t) sg(student) + t teacher): TAID, arXiv 2501.16937, eq. 3.

    Logits (B, T, V); entries whose student logit is infinite contribute 0. At t = 0 the gradient vanishes.
    """
    _check(student, teacher, mask)
    in_unit_interval("taid t", t)
    own, other = student.detach().float(), teacher.detach().float()
    # 0 * inf is NaN: the term of weight 0 is left out.
    mixed = own if t == 0 else other if t == 1 else (1 - t) * own + t * other
    terms = mixed.softmax(-1) * torch.log_softmax(student.float(), dim=-1)
    return -_masked_mean(terms.masked_fill(student.isinf(), 0.0).sum(-1), mask)


def entropy_opd_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    h_max: float | None = None,
    form: Literal["gated", "additive"] = "gated",
    tau: float | None = None,
) -> Tensor:
    """Forward and reverse KL, chosen for each token by the teacher's entropy H: entropy-aware on-policy distillation.

    "gated": w KL(T || S) + (1 - w) KL(S || T) with w = clamp(H / h_max, 0, 1); `h_max` in nats, None = ln V. This is a
    deviation from the paper (arXiv 2603.07079), which adds the forward KL where H is high to a standing reverse KL.
    "additive" is that form: KL(S || T) + [H > tau] KL(T || S); `tau` in nats has no default, because only the abstract
    was at hand.
    """
    _check(student, teacher, mask)
    if form not in ("gated", "additive"):
        raise ValueError(_unknown("form", form, ("gated", "additive")))
    if h_max is not None and h_max <= 0:
        raise ValueError(f"h_max={h_max!r} is not above 0.")
    s, t = _log_probs(student), _log_probs(teacher.detach())
    forward, reverse = _kl_terms(t, s).sum(-1), _kl_terms(s, t).sum(-1)
    entropy = -(t.exp() * t).sum(-1)
    if form == "additive":
        if tau is None:
            raise ValueError('form="additive" needs tau, the entropy in nats above which the forward KL is added.')
        return _masked_mean(reverse + (entropy > tau) * forward, mask)
    weight = (entropy / (math.log(student.shape[-1]) if h_max is None else h_max)).clamp(0, 1)
    return _masked_mean(weight * forward + (1 - weight) * reverse, mask)


# -- preferences -------------------------------------------------------------------------------------------------------


def dpo_loss(chosen: Tensor, rejected: Tensor, chosen_ref: Tensor, rejected_ref: Tensor, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta ((chosen - chosen_ref) - (rejected - rejected_ref))), mean over pairs: arXiv 2305.18290.

    All (P,): log-probabilities summed over each response's tokens, of the policy and of a frozen reference.
    """
    _check_pairs(chosen=chosen, rejected=rejected, chosen_ref=chosen_ref, rejected_ref=rejected_ref)
    margins = (chosen - chosen_ref) - (rejected - rejected_ref)
    return -logsigmoid(beta * margins.float()).mean()


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-log sigmoid(beta (chosen - rejected) - gamma), mean over pairs: SimPO, arXiv 2405.14734, without a reference.

    Both (P,): mean log-probability of each response's tokens. The paper tunes beta and gamma for each model; these are
    this package's defaults.
    """
    _check_pairs(chosen=chosen, rejected=rejected)
    return -logsigmoid(beta * (chosen - rejected).float() - gamma).mean()


def _check_pairs(**sums: Tensor) -> None:
    first, *others = sums
    for name in others:
        if sums[name].shape != sums[first].shape:
            raise ValueError(
                f"{first} is {_shape(sums[first])}, {name} {_shape(sums[name])}: there is one number for each pair."
            )


def response_log_probs(logits: Tensor, input_ids: Tensor, response_mask: Tensor, average: bool = False) -> Tensor:
    """(P,): log p of the tokens of mask 1, summed or averaged. Logits (P, L, V), ids and mask (P, L).

    The first token of a sequence is predicted by nothing and does not count. Raises `ValueError` with the index of a
    sequence whose response has no token.
    """
    if response_mask.shape != input_ids.shape:
        raise ValueError(f"response mask is {_shape(response_mask)} for ids {_shape(input_ids)}: they must be equal.")
    mask = response_mask[:, 1:].float()
    lengths = mask.sum(-1)
    if not lengths.all():
        raise ValueError(f"the response of pair {int((lengths == 0).nonzero()[0])} has no token: leave the pair out.")
    predicted = _log_probs(logits[:, :-1]).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    sums = (predicted * mask).sum(-1)
    return sums / lengths if average else sums


# -- three channels as one loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossComponents:
    """The scalars of one batch. A channel that is not in `active` is a constant 0."""

    total: Tensor
    lm_ce: Tensor  # 0 where `primary` stands in its place
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor
    active: frozenset[str]  # of "lm_ce", "primary", "sdpo_jsd", "trace_replay_dpo"


_SDPO_KEYS = ("ctx_teacher_input_ids", "sdpo_student_index", "sdpo_teacher_index")
_PAIR_KEYS = tuple(f"dpo_{side}_{what}" for side in ("chosen", "rejected") for what in ("input_ids", "response_mask"))
_REF_KEYS = ("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
_WRAPPERS = ("none", "taid", "entropy_opd")
_VARIANTS = ("dpo", "simpo")
_warned: set[tuple[str, ...]] = set()  # missing keys, each set of them once a process


def compose_loss(
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    *,
    alpha_sdpo: float = 0.0,
    beta_replay: float = 0.0,
    dpo_beta: float = 0.1,
    dpo_variant: Literal["dpo", "simpo"] = "dpo",
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    jsd_beta: float = 0.5,
    jsd_temperature: float = 1.0,
    jsd_token_clip: float | None = None,
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = "none",
    taid_t: float | None = None,
    entropy_opd_h_max: float | None = None,
    primary: Tensor | None = None,
    strict: bool = False,
) -> LossComponents:
    """first + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo.

    `first` is the mean cross entropy of `labels`, or `primary`, such as a GRPO loss. Sequences are padded
    on the right. A channel is off at weight 0, and where its keys are missing or empty: that is logged once, and an
    error with `strict`.

    Batch:
        input_ids, labels: (B, T) int64; label -100 does not count.
        ctx_teacher_input_ids: (B, Tc), the same responses after a context with the hint.
        sdpo_student_index, sdpo_teacher_index: (B, K) int64, -1 for padding: the positions in `input_ids` and
            `ctx_teacher_input_ids` whose next token is the same token of the response.
        dpo_chosen_input_ids, dpo_rejected_input_ids, dpo_chosen_response_mask, dpo_rejected_response_mask: (P, L).
        dpo_chosen_ref_logprobs, dpo_rejected_ref_logprobs: (P,), of the reference, summed over the mask; not for SimPO.
    """
    for name, weight in (("alpha_sdpo", alpha_sdpo), ("beta_replay", beta_replay)):
        if not weight >= 0:
            raise ValueError(f"{name}={weight!r} is negative: a channel's weight is 0 (off) or more.")
    for name, value, known in (("sdpo_wrapper", sdpo_wrapper, _WRAPPERS), ("dpo_variant", dpo_variant, _VARIANTS)):
        if value not in known:
            raise ValueError(_unknown(name, value, known))
    if sdpo_wrapper != "none" and alpha_sdpo == 0:
        raise ValueError(f"sdpo_wrapper={sdpo_wrapper!r} wraps a channel that is off: set alpha_sdpo above 0.")
    if sdpo_wrapper == "taid" and taid_t is None:
        raise ValueError('sdpo_wrapper="taid" needs taid_t: pass the t of a TAIDScheduler.')
    if taid_t is not None:
        in_unit_interval("taid_t", taid_t)
    zero = torch.zeros((), device=next(model.parameters()).device)
    needed = _PAIR_KEYS if dpo_variant == "simpo" else (*_PAIR_KEYS, *_REF_KEYS)
    distils = alpha_sdpo > 0 and _has(batch, _SDPO_KEYS, "sdpo_jsd", strict)
    prefers = beta_replay > 0 and _has(batch, needed, "trace_replay_dpo", strict)
    active = {"lm_ce" if primary is None else "primary"}
    lm_ce, jsd, dpo = zero, zero, zero
    if primary is None or distils:
        logits = model(input_ids=batch["input_ids"]).logits
    if primary is None:
        lm_ce = _cross_entropy(logits, batch["labels"])
    total = lm_ce if primary is None else primary
    if distils:
        aligned = _aligned_logits(model, batch, logits)
        if taid_t is not None and sdpo_wrapper == "taid":
            jsd = taid_loss(*aligned, t=taid_t)
        elif sdpo_wrapper == "entropy_opd":
            jsd = entropy_opd_loss(*aligned, h_max=entropy_opd_h_max)
        else:
            jsd = generalized_jsd(*aligned, beta=jsd_beta, temperature=jsd_temperature, token_clip=jsd_token_clip)
        active.add("sdpo_jsd")
        total = total + alpha_sdpo * jsd
    if prefers:
        chosen, rejected = (_of_side(model, batch, side, dpo_variant == "simpo") for side in ("chosen", "rejected"))
        if dpo_variant == "simpo":
            dpo = simpo_loss(chosen, rejected, simpo_beta, simpo_gamma)
        else:
            dpo = dpo_loss(chosen, rejected, batch[_REF_KEYS[0]], batch[_REF_KEYS[1]], dpo_beta)
        active.add("trace_replay_dpo")
        total = total + beta_replay * dpo
    return LossComponents(total, lm_ce, jsd, dpo, frozenset(active))


def _has(batch: Mapping[str, Tensor], keys: tuple[str, ...], channel: str, strict: bool) -> bool:
    missing = tuple(key for key in keys if key not in batch or batch[key].numel() == 0)
    if "sdpo_student_index" in keys and not missing and not (batch["sdpo_student_index"] >= 0).any():
        missing = ("sdpo_student_index",)
    if missing and strict:
        raise ValueError(f"channel {channel} has a weight, and the batch has no {', '.join(missing)}.")
    if missing and missing not in _warned:
        _warned.add(missing)
        log.warning("channel %s is off for batches without %s", channel, ", ".join(missing))
    return not missing


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels are {_shape(labels)} for input_ids {_shape(logits[..., 0])}: they must be equal.")
    _check_not_empty(labels[:, 1:] != IGNORED)
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def _aligned_logits(
    model: torch.nn.Module, batch: Mapping[str, Tensor], logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Student and teacher logits (B, K, V) at the pairs of the index, and their mask (B, K)."""
    own, other = batch["sdpo_student_index"], batch["sdpo_teacher_index"]
    ids, teacher_ids = batch["input_ids"], batch["ctx_teacher_input_ids"]
    if own.shape != other.shape or len(own) != len(ids) or len(teacher_ids) != len(ids):
        raise ValueError(
            f"sdpo_student_index is {_shape(own)}, sdpo_teacher_index {_shape(other)} for input_ids {_shape(ids)} and "
            f"ctx_teacher_input_ids {_shape(teacher_ids)}: both are (B, K)."
        )
    mask = own >= 0
    if not torch.equal(mask, other >= 0):
        raise ValueError("sdpo_student_index and sdpo_teacher_index have their -1 at different places.")
    # A position and the next one must exist: that is where the same token is.
    if own.max() > ids.shape[1] - 2 or other.max() > teacher_ids.shape[1] - 2:
        raise ValueError(
            f"sdpo indices reach {int(own.max())} and {int(other.max())}: they must be below T - 1 = "
            f"{ids.shape[1] - 1} and {teacher_ids.shape[1] - 1}, since they name the position before a token."
        )
    own, other = own.clamp_min(0), other.clamp_min(0)
    same = ids.gather(1, own + 1) == teacher_ids.gather(1, other + 1)
    if not (same | ~mask).all():
        row, column = (~(same | ~mask)).nonzero()[0].tolist()
        raise ValueError(f"sdpo pair {column} of row {row} compares different tokens: the next ones must be equal.")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            teacher = model(input_ids=teacher_ids).logits
    finally:
        model.train(was_training)
    vocabulary = logits.shape[-1]
    student = logits.gather(1, own[..., None].expand(-1, -1, vocabulary))
    return student, teacher.gather(1, other[..., None].expand(-1, -1, vocabulary)), mask


def _of_side(model: torch.nn.Module, batch: Mapping[str, Tensor], side: str, average: bool) -> Tensor:
    ids = batch[f"dpo_{side}_input_ids"]
    return response_log_probs(model(input_ids=ids).logits, ids, batch[f"dpo_{side}_response_mask"], average)


def _unknown(what: str, value: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(value, known, n=1, cutoff=0.0)
    return f"{what}={value!r} is none of {', '.join(known)}. Did you mean {close[0]!r}?"
