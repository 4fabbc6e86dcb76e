"""`KLProbe` and `token_mean_kl`: the KL divergence of a model from a reference, in nats per token.

It is summed over the whole vocabulary, so it is neither negative nor noisy, unlike estimates from sampled tokens. In a
run the reference is the run's start, of which `replica.training.drift_meter` takes it; both can be used alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.shares import content_hash
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.replica.training.heldout_scorer import undisturbed

ForwardFn = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]

_MOST_ITEMS = 64


def token_mean_kl(logits: torch.Tensor, reference_logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(p || r) = sum_v p (log p - log r), averaged over tokens: sum_t m KL_t / sum_t m. A scalar, nats per token.

    Args:
        logits: (B, T, V), any float dtype; p is their softmax, computed in fp32.
        reference_logits: (B, T, V); r is their softmax. Log-probabilities are logits too.
        mask: (B, T), bool or 0 and 1: the tokens that count.

    Raises `ValueError`, naming both shapes, if they do not fit together, and for a mask without a token.
    """
    if logits.shape != reference_logits.shape:
        raise ValueError(
            f"logits are {_shape(logits)}, reference_logits {_shape(reference_logits)}: they must be equal."
        )
    if mask.shape != logits.shape[:-1]:
        raise ValueError(f"mask is {_shape(mask)}, logits {_shape(logits)}: the mask must be (batch, tokens).")
    chosen = mask.bool()
    if not bool(chosen.any()):
        raise ValueError(f"the mask {_shape(mask)} has no token to average: set it to 1 where a token counts.")
    return _kl_of_tokens(logits[chosen], reference_logits[chosen]).mean()


def _kl_of_tokens(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """KL(p || r) of every token, (tokens, V) -> (tokens,) fp32."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_r = torch.log_softmax(reference_logits.float(), dim=-1)
    p = log_p.exp()
    # A token that p rules out contributes nothing, also where r rules it out too: 0 (inf - inf) would be NaN.
    return torch.where(log_p == -torch.inf, 0.0, p * (log_p - log_r)).sum(dim=-1)


class KLProbe:
    """Measures the drift of a model from a reference, KL(model || reference), on a few fixed items.

    In a run the reference is the model at the run's start; alone, it is the model given to `reference_of`.

    Args:
        items: at most 64, the same on all replicas: text, tensors, JSON, or mappings of such.
        forward: `forward(model, item)` returns (logits, mask): (T, V) and (T,), or (B, T, V) and (B, T). The mask says
            which tokens count.
        every: in a run, rounds between measurements.

    The reference is kept as log-probabilities of the counted tokens in bf16, (tokens, V) per item: 2 bytes times tokens
    times vocabulary. It is normalised again when it is used, so that KL stays >= 0; rounding shows as a drift of about
    1e-5 nats per token.
    """

    def __init__(self, items: Sequence[Any], forward: ForwardFn, *, every: int = 1) -> None:
        if not 1 <= len(items) <= _MOST_ITEMS:
            raise ConfigError(
                f"a KLProbe of {len(items)} items: pass 1 to {_MOST_ITEMS}. The reference of each takes 2 bytes for "
                "every counted token and word of the vocabulary."
            )
        if every < 1:
            raise ConfigError(f"KLProbe(every={every}): the number of rounds between measurements is at least 1.")
        self.every = every
        self.items_digest = sha256_hex("".join(_item_digest(item) for item in items).encode())
        self._items = list(items)
        self._forward = forward
        self._reference: Mapping[str, torch.Tensor] = {}

    @property
    def has_reference(self) -> bool:
        """Whether `load` was called."""
        return bool(self._reference)

    def reference_of(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Log-probabilities of the counted tokens, (tokens, V) bf16 on the CPU, by item. The model is left unchanged.

        Raises `ConfigError` if no token of any item counts.
        """
        with undisturbed(model):
            found = {
                _name(index): torch.log_softmax(self._counted(model, item).float(), dim=-1)
                .bfloat16()
                .cpu()
                .contiguous()
                for index, item in enumerate(self._items)
            }
        if not sum(len(each) for each in found.values()):
            raise ConfigError("the KLProbe has no token to average: no mask that forward returned counts a token.")
        return found

    def load(self, reference: Mapping[str, torch.Tensor]) -> None:
        """Use `reference`, a result of `reference_of`. Raises `ConfigError` for another number of items."""
        names = [_name(index) for index in range(len(self._items))]
        if sorted(reference) != names:
            raise ConfigError(
                f"the reference has {len(reference)} items, the KLProbe {len(names)}: take it by `reference_of` of a "
                "probe with the same items."
            )
        self._reference = reference

    def measure(self, model: torch.nn.Module) -> float:
        """KL(model || reference), the mean over all counted tokens of all items, in nats per token.

        The model is scored in evaluation mode without gradients; modes and random generators are restored. Raises
        `ConfigError` without a reference, and if `forward` counts other tokens than in the reference.
        """
        if not self.has_reference:
            raise ConfigError("the KLProbe has no reference: call probe.load(probe.reference_of(model)) at the start.")
        total, tokens = 0.0, 0
        with undisturbed(model):
            for index, item in enumerate(self._items):
                logits, reference = self._counted(model, item), self._reference[_name(index)]
                if logits.shape != reference.shape:
                    raise ConfigError(
                        f"item {index} of the KLProbe has {_shape(logits)} counted (tokens, vocabulary), its reference "
                        f"{_shape(reference)}: forward must count the same tokens every time."
                    )
                if len(logits):
                    found = _kl_of_tokens(logits, reference.to(logits.device)).cpu()  # Apple's GPU has no float64
                    total += float(found.double().sum())
                    tokens += len(logits)
        return total / tokens

    def _counted(self, model: torch.nn.Module, item: Any) -> torch.Tensor:
        """The logits of the tokens that count, (tokens, V)."""
        logits, mask = self._forward(model, item)
        if mask.shape != logits.shape[:-1]:
            raise ConfigError(
                f"forward returned logits {_shape(logits)} and a mask {_shape(mask)}: the mask has one number for each "
                "token of the logits."
            )
        return logits[mask.bool()]


def _item_digest(item: Any) -> str:
    if isinstance(item, Mapping):
        return sha256_hex("".join(f"{name}\0{_item_digest(item[name])}" for name in sorted(item)).encode())
    return content_hash(item)


def _name(index: int) -> str:
    return f"item.{index:03d}"


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
