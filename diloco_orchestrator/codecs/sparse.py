"""The codecs "topk64" and "topk128": of each chunk of 4,096 elements the 64 or 128 largest by |x|, in 14 bits each.

A chunk is four means, bf16, the places of the kept elements in it, ascending, 12 bits each (two in three bytes, the
first in the lowest bits), then their classes, two bits each, as in `codecs.means`, but 1.0 times the mean of |x| of the
kept elements is between small and large. Among equal |x| the lower place is kept. All other elements decode to 0 (arXiv
2508.15706). The last chunk of a vector, if shorter, keeps the same share of its elements, rounded up. numpy and torch
are imported inside functions, because the cost forecast needs only sizes.
"""

from typing import TYPE_CHECKING

from diloco_orchestrator.codecs import plain
from diloco_orchestrator.codecs.means import MEANS, classified, means_of, packed_pairs, unpacked_pairs
from diloco_orchestrator.errors import PayloadCorrupt

if TYPE_CHECKING:
    import torch

CHUNK = 4096  # elements; a place among them takes 12 bits
_BAD_PLACES = "the places of kept elements in a chunk are not ascending, or not in the chunk."
_LARGE = 1.0  # times the mean of |x|: the kept elements are the tail of a distribution


def size_topk(kept: int, numel: int) -> int:
    """Encoded size in bytes of `numel` elements from a chunk's beginning on; `kept` of each 4,096 are stored."""
    whole, rest = divmod(numel, CHUNK)
    return whole * _row_size(kept) + (_row_size(_share(kept, rest)) if rest else 0)


def pack_topk(kept: int, values: "torch.Tensor") -> "torch.Tensor":
    import torch

    whole = values.numel() // CHUNK * CHUNK
    rows = [_pack(kept, values[:whole].view(-1, CHUNK))] if whole else []
    if rest := values.numel() - whole:
        rows.append(_pack(_share(kept, rest), values[whole:].view(1, rest)))
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8, device=values.device)


def unpack_topk(kept: int, body: "torch.Tensor", numel: int) -> "torch.Tensor":
    """Decode `numel` elements, fp32, from chunks of which `kept` are stored.

    Raises `PayloadCorrupt` for places that are not ascending or not in their chunk.
    """
    import torch

    whole, rest = divmod(numel, CHUNK)
    values = torch.zeros(numel, dtype=torch.float32, device=body.device)
    split = whole * _row_size(kept)
    if whole:
        _unpack(kept, body[:split].view(whole, -1), values[: whole * CHUNK].view(whole, CHUNK))
    if rest:
        _unpack(_share(kept, rest), body[split:].view(1, -1), values[whole * CHUNK :].view(1, rest))
    return values


def _share(kept: int, numel: int) -> int:
    """The number of elements that are stored of a vector's last chunk of `numel` elements, fewer than 4,096.

    `kept`: the number stored of a whole chunk.
    """
    return -(-kept * numel // CHUNK)


def _row_size(kept: int) -> int:
    return MEANS + (3 * kept + 1) // 2 + (kept + 3) // 4


def _pack(kept: int, chunks: "torch.Tensor") -> "torch.Tensor":
    """The encoded bytes, flat uint8, of chunks of n elements, (g, n) fp32; `kept` elements of each are stored."""
    import torch

    if chunks.is_cpu and (fast := plain.compiled()) is not None:
        packed: torch.Tensor | None = fast.pack_largest(chunks, kept, _LARGE)
        if packed is not None:
            return packed
    # Bits of |x| as whole numbers have the order of |x|, with NaN above all.
    flat = (_largest if chunks.is_cpu else _largest_on_gpu)(kept, chunks.abs().view(torch.int32))
    places = (flat % chunks.shape[1]).view(-1, kept)
    missing = -kept % 4
    values = torch.nn.functional.pad(chunks.reshape(-1)[flat].view(-1, kept), (0, missing))
    classes, means = classified(values, _LARGE, missing)
    pairs = torch.nn.functional.pad(places, (0, kept % 2)).view(len(chunks), -1, 2)
    low, high = pairs.unbind(2)
    bytes_of_places = torch.stack([low & 255, low >> 8 | (high & 15) << 4, high >> 4], 2).to(torch.uint8)
    places_size = (3 * kept + 1) // 2
    rows = [means, bytes_of_places.view(len(chunks), -1)[:, :places_size], packed_pairs(classes)]
    return torch.cat(rows, 1).view(-1)


def _largest(kept: int, sizes: "torch.Tensor") -> "torch.Tensor":
    """Flat indices, ascending, of the `kept` largest numbers of each row of `sizes`, (g, n) int32 on the CPU.

    The first ones of equal numbers are kept. numpy finds a row's smallest kept number fastest.
    """
    import numpy as np
    import torch

    rows = sizes.numpy()
    dropped = rows.shape[1] - kept
    least = np.partition(rows, dropped, axis=1)[:, dropped : dropped + 1]
    is_kept = rows >= least
    if np.count_nonzero(is_kept) > len(rows) * kept:  # several elements are as large as the smallest that is kept
        ties = rows == least
        room = kept - np.count_nonzero(rows > least, axis=1)[:, None]
        is_kept &= ~ties | (np.cumsum(ties, axis=1) <= room)
    return torch.from_numpy(np.flatnonzero(is_kept))


def _largest_on_gpu(kept: int, sizes: "torch.Tensor") -> "torch.Tensor":
    """The result of `_largest` for `sizes` on a GPU, computed by torch."""
    import torch

    least = sizes.topk(kept, dim=1).values[:, -1:]
    ties = sizes == least
    room = kept - (sizes > least).sum(1, keepdim=True)
    is_kept = (sizes >= least) & (~ties | (ties.cumsum(1, dtype=torch.int32) <= room))
    return is_kept.view(-1).nonzero().view(-1)


def _unpack(kept: int, rows: "torch.Tensor", values: "torch.Tensor") -> None:
    """Decode the stored elements of chunks and write them to their places in `values`, (g, n) fp32 zeros.

    `rows`: the encoded chunks, (g, row size) uint8. `kept`: number of elements stored of each.
    """
    import torch

    if rows.is_cpu and (fast := plain.compiled()) is not None:
        if not fast.unpack_largest(rows, kept, values):
            raise PayloadCorrupt(_BAD_PLACES)
        return
    places_size = (3 * kept + 1) // 2
    triples = torch.nn.functional.pad(rows[:, MEANS : MEANS + places_size], (0, -places_size % 3))
    first, second, third = triples.view(len(rows), -1, 3).to(torch.int64).unbind(2)
    places = torch.stack([first | (second & 15) << 8, second >> 4 | third << 4], 2).view(len(rows), -1)[:, :kept]
    if not bool((places[:, 1:] > places[:, :-1]).all()) or bool((places[:, -1:] >= values.shape[1]).any()):
        raise PayloadCorrupt(_BAD_PLACES)
    classes = unpacked_pairs(rows[:, MEANS + places_size :])[:, :kept]
    values.scatter_(1, places, means_of(rows[:, :MEANS], classes))
