"""The mean of the contributions that agree most with the others, chosen per shard, with the same bits on every machine.

The agreement of a contribution is the median of its cosines with each of the others. In each shard the quarter with the
lowest agreement is left out, even if all are honest: so a contribution that points elsewhere than most, of whatever
norm, is not averaged.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from diloco_orchestrator.allreduce.mean import LeftOut, Part, ShardBlocks, WeightedMean, check_cut
from diloco_orchestrator.allreduce.vectors import empty
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.protocol.records import Disagreeing

_LARGEST = 127.0  # of the whole numbers that stand for a shard's values
_RUN = 1024  # products of which a sum is below 2**24, so that float32 holds every partial sum exactly
_PIECE = 16 * _RUN  # elements that are rounded at once: eight contributions of them fit a core's cache


class AgreeingMean:
    """The weighted mean of the contributions that agree most with the others, one shard at a time.

    A quarter of the parts that are not all zeros in a shard, rounded down, is left out there. Raises `PayloadCorrupt`
    for a payload of another length or cut into other shards.
    """

    def __init__(self, parts: Sequence[Part], lengths: Sequence[int]) -> None:
        self._parts = sorted(parts, key=lambda part: part.replica_id)
        self._lengths = lengths
        self.left_out: list[LeftOut] = []  # of the shards that were asked for
        for part in self._parts:
            check_cut(lengths, part)

    def shard(self, index: int) -> ShardBlocks:
        """The mean of one shard without the least agreeing contributions. Every contribution's shard is read once."""
        held = [_once_read(part, index) for part in self._parts]
        numel = self._lengths[index]
        values = [Encoded(part.read(index), part.payload.codec, numel) for part in held]
        found = agreements(values, [part.payload.norms[index] for part in held])
        judged = sorted((each, position) for position, each in enumerate(found) if each is not None)
        out = judged[: len(judged) // 4]
        for agreement, position in out:
            usual = judged[(len(judged) - 1) // 2][0]
            self.left_out.append(LeftOut(self._parts[position].replica_id, index, agreement, usual))
        without = {position for _, position in out}
        kept = [part for position, part in enumerate(held) if position not in without]
        return WeightedMean(kept, self._lengths).shard(index)


def summary(left_out: Sequence[LeftOut], round_: int) -> tuple[Disagreeing, ...]:
    """The contributions left out of round `round_` in some shards, as a manifest lists them: in replica_id order.

    Cosines are rounded to three digits.
    """
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


def agreements(values: Sequence[Encoded], norms: Sequence[float]) -> list[float | None]:
    """The lower median of each vector's cosines with the others; None for a vector of zeros.

    Values are rounded to integers (root mean square 16 to 32, at most 127), so that sums of products are exact in
    whatever order a machine adds. `values`: of equal length, finite. `norms`: of each vector, as its manifest declares
    it, which is the same number on every machine.
    """
    scales = [_scale(norm, vector.numel) for norm, vector in zip(norms, values, strict=True)]
    gram = _products(values, scales)
    found: list[float | None] = []
    for i, row in enumerate(gram):
        others = [j for j in range(len(gram)) if j != i and gram[j][j]]
        cosines = sorted(row[j] / math.sqrt(row[i] * gram[j][j]) for j in others) if row[i] else []
        found.append(cosines[(len(cosines) - 1) // 2] if cosines else None)
    return found


def _digits(cosine: float) -> float:
    return min(max(round(cosine, 3), -1.0), 1.0)


def _scale(norm: float, numel: int) -> float:
    """The power of two, at most 2**127, that makes a vector's root mean square 16 to 32; 0.0 for a zero vector."""
    return math.ldexp(1.0, min(5 - math.frexp(norm / math.sqrt(numel))[1], 127)) if norm else 0.0


def _products(vectors: Sequence[Encoded], scales: Sequence[float]) -> list[list[int]]:
    """The exact dot product of every pair of vectors, each rounded to integers at its scale in `scales`."""
    count = len(vectors)
    total = torch.zeros(count, count, dtype=torch.int64, device="cpu")
    rows = empty(count * _PIECE).view(count, _PIECE)
    for pieces in zip(*(vector.blocks(0, vector.numel, _PIECE) for vector in vectors), strict=True):
        if pieces[0].numel() < _PIECE:
            rows.zero_()
        for row, piece, scale in zip(rows, pieces, scales, strict=True):
            row[: piece.numel()] = piece
            row.mul_(scale).round_().clamp_(-_LARGEST, _LARGEST)
        runs = rows.view(count, -1, _RUN).transpose(0, 1)
        with torch.autocast("cpu", enabled=False):  # a training loop's own would round the sums to bf16
            total += torch.bmm(runs, runs.transpose(1, 2)).to(torch.int64).sum(dim=0)
    exact: list[list[int]] = total.tolist()
    return exact


def _once_read(part: Part, index: int) -> Part:
    """The contribution `part` with the bytes of one shard fetched, so that they are not read again."""
    data = part.read(index)
    return replace(part, read=lambda _: data)
