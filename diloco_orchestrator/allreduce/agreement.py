"""The mean of the contributions that agree most with the others, chosen shard by shard, with the same bits everywhere.

The agreement of a contribution is the median of the cosines between it and each of the others. The quarter with the
lowest is left out of the shard, whatever it is: a contribution that points elsewhere than most, of whatever norm, is
not averaged, and as many are left out when all are honest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from diloco_orchestrator.allreduce.mean import LeftOut, Part, WeightedMean, check_cut
from diloco_orchestrator.protocol import codecs
from diloco_orchestrator.protocol.records import Disagreeing

_PIECE = 16 * 1024  # elements that are multiplied at once: eight contributions of them fit a core's cache
_LARGEST = 2.0**14  # of the whole numbers that stand for a shard's values


class AgreeingMean:
    """The weighted mean of those parts that agree most with the others, one shard at a time.

    A quarter of the parts that are not zero in a shard, rounded down, is left out there. Arguments and errors as of
    `WeightedMean`.
    """

    def __init__(self, parts: Sequence[Part], lengths: Sequence[int]) -> None:
        self._parts = sorted(parts, key=lambda part: part.replica_id)
        self._lengths = lengths
        self.left_out: list[LeftOut] = []  # of the shards whose blocks were asked for
        for part in self._parts:
            check_cut(lengths, part)

    def blocks(self, index: int) -> Iterator[torch.Tensor]:
        """The mean of one shard, as `Aggregate` promises it. The shard of every part is read once."""
        held = [_once_read(part, index) for part in self._parts]
        numel = self._lengths[index]
        values = [codecs.view(part.read(index), part.payload.codec, numel) for part in held]
        found = agreements(values)
        judged = sorted((each, position) for position, each in enumerate(found) if each is not None)
        out = judged[: len(judged) // 4]
        for agreement, position in out:
            usual = judged[(len(judged) - 1) // 2][0]
            self.left_out.append(LeftOut(self._parts[position].replica_id, index, agreement, usual))
        without = {position for _, position in out}
        kept = [part for position, part in enumerate(held) if position not in without]
        return WeightedMean(kept, self._lengths).blocks(index)


def summary(left_out: Sequence[LeftOut], round_: int) -> tuple[Disagreeing, ...]:
    """What a manifest says of those who were left out of a round, in replica_id order; cosines in three digits."""
    found: dict[int, list[LeftOut]] = {}
    for each in left_out:
        found.setdefault(each.replica_id, []).append(each)
    lowest = {replica_id: min(of, key=lambda each: each.agreement) for replica_id, of in sorted(found.items())}
    return tuple(
        Disagreeing(
            replica_id=replica_id,
            round=round_,
            shards=len(found[replica_id]),
            agreement=_digits(each.agreement),
            usual=_digits(each.usual),
        )
        for replica_id, each in lowest.items()
    )


def agreements(values: Sequence[torch.Tensor]) -> list[float | None]:
    """The median cosine of each vector to the others, of an even number the lower one; None for a vector of zeros.

    Values are rounded to whole numbers of at most 2**14, relative to the largest of their vector, so that every sum of
    products is exact, in whatever order a machine adds. `values`: (numel,) each, of a floating dtype, finite.
    """
    scales = [_scale(vector) for vector in values]
    rows = [row for row, scale in enumerate(scales) if scale]
    gram = _products([values[row] for row in rows], [scales[row] for row in rows])
    found: list[float | None] = [None] * len(values)
    for i, row in enumerate(rows):
        cosines = sorted(gram[i][j] / math.sqrt(gram[i][i] * gram[j][j]) for j in range(len(rows)) if j != i)
        found[row] = cosines[(len(cosines) - 1) // 2] if cosines else 1.0
    return found


def _digits(cosine: float) -> float:
    return min(max(round(cosine, 3), -1.0), 1.0)


def _scale(vector: torch.Tensor) -> float:
    """The power of two that brings the largest value of a vector to between 2**13 and 2**14; 0.0 if all are zero."""
    largest = float(vector.abs().max()) if vector.numel() else 0.0
    return math.ldexp(_LARGEST, -math.frexp(largest)[1]) if largest else 0.0


def _products(vectors: Sequence[torch.Tensor], scales: Sequence[float]) -> list[list[int]]:
    """The sum of products of each two vectors, rounded to whole numbers at their scales. Exact."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.int64)
    factors = torch.tensor(scales, dtype=torch.float64).unsqueeze(1)
    for pieces in zip(*(vector.split(_PIECE) for vector in vectors), strict=True):
        whole = torch.stack(pieces).to(torch.float64).mul_(factors).round_()
        total += (whole @ whole.T).to(torch.int64)  # at most 2**42: float64 holds every partial sum exactly
    return total.tolist()


def _once_read(part: Part, index: int) -> Part:
    """The part with the bytes of one shard in hand."""
    data = part.read(index)
    return replace(part, read=lambda _: data)
