"""LoRA adapters averaged exactly: the outer step of a product B·A, and the residual that its factors cannot hold.

The mean of products has a higher rank than the factors: mean(B_i A_i) = mean(B_i) mean(A_i) + a residual of rank up to
N·r (FedEx-LoRA, arXiv 2410.09432). So the factors take their own outer step, as any parameter, and the base holds
beside them one dense residual R for each adapted weight, with the outer momentum of the product:

    P = R + B A    what the adapter adds to its weight W, up to the factor `scaling`: W + scaling * P
    G = B A - mean(B_i A_i)    the pseudo-gradient of the product; R is the same on all replicas and cancels
    P' = nesterov(P, G)    the outer step of full-rank averaging
    R' = P' - B' A'    with the factors after their own step

All in float32 on the CPU, with separate multiply and add and a fixed order of sums, without BLAS or LAPACK: the same
bits on every machine, as those of `outer_step`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from diloco_orchestrator.allreduce.threads import in_threads, one_torch_thread
from diloco_orchestrator.allreduce.vectors import BLOCK, FlatTensors, aligned, empty
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.arithmetic import nesterov_step
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.start_records import AdapterPair

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LocalFactors:
    """One contribution's pseudo-gradients of the LoRA factors, by parameter name, and its weight in the average."""

    weight: float
    values: Named


@dataclass(frozen=True)
class _Factors:
    """The two factors of a LoRA product, B (out, r) and A (r, in), float32 on the CPU."""

    b: torch.Tensor
    a: torch.Tensor


def factors_of(base: Base, pairs: Sequence[AdapterPair]) -> dict[str, torch.Tensor]:
    """Copies of the LoRA factors in a base, by parameter name. `pairs`: the adapters."""
    return {name: base.parameters[name].clone() for pair in pairs for name in (pair.a, pair.b)}


@torch.no_grad()
@one_torch_thread()
def step_residuals(
    base: Base,
    pairs: Sequence[AdapterPair],
    before: Named,
    average: Named,
    contributions: Sequence[LocalFactors],
    outer: OuterConfig,
) -> None:
    """Step the residuals and the products' momenta of `base` in place, after its factors have taken their outer step.

    `before`: the factors before that step. `average`: averaged pseudo-gradients of the factors. `contributions`: the
    averaged contributions, in `replica_id` order.
    """
    largest = max(each.weight for each in contributions)
    # Divided by the largest, as in `allreduce.mean`: equal weights become exactly 1.
    weighted = [(each.values, each.weight / largest) for each in contributions]
    total = sum(weight for _, weight in weighted)
    for pair in pairs:
        old, mean = _Factors(before[pair.b], before[pair.a]), _Factors(average[pair.b], average[pair.a])
        new = _Factors(base.parameters[pair.b], base.parameters[pair.a])
        local = [_Factors(values[pair.b] * weight, values[pair.a]) for values, weight in weighted]
        gradient = partial(_gradient, old, mean, local, total)
        calls = [partial(_step_rows, base, pair.residual, rows, gradient, old, new, outer) for rows in _row_blocks(old)]
        in_threads(calls)


def _gradient(old: _Factors, mean: _Factors, local: Sequence[_Factors], total: float, rows: slice) -> torch.Tensor:
    """Rows of a LoRA product's pseudo-gradient G = B A - mean((B - b_i)(A - a_i)).

    Computed as mean(b) A + B mean(a) - mean(b_i a_i), in which no large terms cancel. `old`: B, A; `mean` and `local`:
    mean and single pseudo-gradients b_i, a_i of the factors; `total`: sum of the weights.
    """
    gradient = _product(_Factors(mean.b, old.a), rows)
    _add_product(_Factors(old.b, mean.a), rows, gradient)
    crossed = empty(gradient.numel()).zero_().view_as(gradient)
    for each in local:
        _add_product(each, rows, crossed)
    return gradient.sub_(crossed.div_(total))


def _step_rows(
    base: Base,
    name: str,
    rows: slice,
    gradient_of: Callable[[slice], torch.Tensor],
    old: _Factors,
    new: _Factors,
    outer: OuterConfig,
) -> None:
    """Step rows of a LoRA residual R in place: R' = nesterov(R, G) + (B A - B' A').

    `old`: the factors B, A before the outer step; `new`: B', A' after it. `gradient_of`: returns the rows of G, the
    pseudo-gradient of the product.
    """
    gradient = gradient_of(rows)
    # B A - B' A' = (B - B') A + B' (A - A')
    moved = _product(_Factors(old.b - new.b, old.a), rows)
    _add_product(_Factors(new.b, old.a - new.a), rows, moved)
    start = rows.start * old.a.shape[1]
    vector, offset = base.parameter_at(name)
    parts = [(vector, offset + start), (FlatTensors([gradient]), 0), (FlatTensors([moved]), 0)]
    if (momentum := base.momentum_at(name)) is not None:
        parts.append((momentum[0], momentum[1] + start))
    for residual, change, returned, *rest in aligned(gradient.numel(), *parts):
        nesterov_step(residual, rest[0] if rest else None, change, outer)
        residual.add_(returned)


def _row_blocks(factors: _Factors) -> Iterator[slice]:
    """Slices of rows of a product, as many rows at a time as fit a core's cache."""
    rows, columns = factors.b.shape[0], factors.a.shape[1]
    step = max(1, BLOCK // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _product(factors: _Factors, rows: slice) -> torch.Tensor:
    """Rows of the LoRA product B A, (rows, in) float32."""
    out = empty((rows.stop - rows.start) * factors.a.shape[1]).zero_().view(-1, factors.a.shape[1])
    _add_product(factors, rows, out)
    return out


@torch.no_grad()
def whole_product(base: Base, pair: AdapterPair) -> torch.Tensor:
    """P = R + B A of a base, (out, in) float32: what the adapter and its residual add to the weight, unscaled."""
    factors = _Factors(base.parameters[pair.b], base.parameters[pair.a])
    whole = base.parameters[pair.residual].clone()
    for rows in _row_blocks(factors):
        _add_product(factors, rows, whole[rows])
    return whole


def _add_product(factors: _Factors, rows: slice, out: torch.Tensor) -> None:
    """Add rows of the LoRA product B A to `out`, one rank of the factors after another.

    BLAS is not used: its sums are in another order, and fused, on other CPUs and with other numbers of threads.
    """
    b, term = factors.b[rows], torch.empty_like(out)
    for rank in range(factors.a.shape[0]):
        out.add_(torch.mul(b[:, rank : rank + 1], factors.a[rank], out=term))


@torch.no_grad()
def merged(weight: torch.Tensor, residual: torch.Tensor, scaling: float) -> torch.Tensor:
    """The frozen weight plus its residual, W + scaling * R, rounded once to the weight's dtype, on the CPU.

    Where the residual is zero the weight keeps its bytes: -0 + 0 would be +0, which has another digest.
    """
    change, own = residual.to("cpu", torch.float32) * scaling, weight.detach().to("cpu", torch.float32)
    return torch.where(change == 0, own, own + change).to(weight.dtype).contiguous()


def with_residuals(
    parameters: Named, fragments: Sequence[Sequence[str]], pairs: Sequence[AdapterPair]
) -> tuple[dict[str, torch.Tensor], list[tuple[str, ...]]]:
    """The first base's parameters with a zero residual for each adapter pair, and its fragments with one of residuals
    last.

    A residual is the part of an adapter's averaged product B·A that its factors do not hold. The zeros take no memory
    yet.
    """
    zero = torch.zeros((), dtype=torch.float32, device="cpu")
    residuals = {pair.residual: zero.expand(parameters[pair.b].shape[0], parameters[pair.a].shape[1]) for pair in pairs}
    return {**parameters, **residuals}, [*map(tuple, fragments), tuple(sorted(residuals))]
