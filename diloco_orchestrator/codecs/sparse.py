"""The codecs "topk64" and "topk128": of each chunk of 4,096 elements the 64 or 128 largest by |x|, in 14 bits each.

A chunk is four means, bf16, the places of the kept elements in it, ascending, 12 bits each (two in three bytes, the
first in the lowest bits), then their classes, two bits each, as in `codecs.means`, but 1.0 times the mean of |x| of the
kept elements is between small and large. Among equal |x| the lower place is kept. All other elements decode to 0 (arXiv
2508.15706). The last chunk of a vector, if shorter, keeps the same share of its elements, rounded up. numpy and torch
are imported inside functions, because the cost forecast needs only sizes.
"""

from typing import TYPE_CHECKING

from diloco_orchestrator.codecs.means import MEANS, classified, means_of, packed_pairs, unpacked_pairs
from diloco_orchestrator.errors import PayloadCorrupt

if TYPE_CHECKING:
    import torch

CHUNK = 4096  # elements; a place among them takes 12 bits
_LARGE = 1.0  # times the mean of |x|: the kept elements are the tail of a distribution


def size_topk(kept: int, numel: int) -> int:
    """Encoded size in bytes of `numel` elements from a chunk's beginning on; `kept` of each 4,096 are stored."""
    whole, rest = divmod(numel, CHUNK)
    return whole * _row_size(kept) + (_row_size(_share(kept, rest)) if rest else 0)


def pack_topk(kept: int, values: "torch.Tensor") -> memoryview:
    import torch

    whole = values.numel() // CHUNK * CHUNK
    rows = [_pack(kept, values[:whole].view(-1, CHUNK))] if whole else []
    if rest := values.numel() - whole:
        rows.append(_pack(_share(kept, rest), values[whole:].view(1, rest)))
    return (torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)).numpy().data


def unpack_topk(kept: int, body: "torch.Tensor", numel: int) -> "torch.Tensor":
    """Decode `numel` elements, fp32, from chunks of which `kept` are stored.

    Raises `PayloadCorrupt` for places that are not ascending or not in their chunk.
    """
    import torch

    whole, rest = divmod(numel, CHUNK)
    values = torch.zeros(numel, dtype=torch.float32, device="cpu")
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
    import numpy as np
    import torch

    # Bits of |x| as whole numbers have the order of |x|, with NaN above all, and numpy finds a row's threshold fastest.
    sizes = chunks.abs().view(torch.int32).numpy()
    dropped = sizes.shape[1] - kept
    least = np.partition(sizes, dropped, axis=1)[:, dropped : dropped + 1]
    is_kept = sizes >= least
    if np.count_nonzero(is_kept) > len(sizes) * kept:  # several elements are as large as the smallest that is kept
        ties = sizes == least
        room = kept - np.count_nonzero(sizes > least, axis=1)[:, None]
        is_kept &= ~ties | (np.cumsum(ties, axis=1) <= room)
    flat = np.flatnonzero(is_kept)
    places = torch.from_numpy(flat % sizes.shape[1]).view(-1, kept)
    missing = -kept % 4
    values = torch.nn.functional.pad(chunks.reshape(-1)[torch.from_numpy(flat)].view(-1, kept), (0, missing))
    classes, means = classified(values, _LARGE, missing)
    pairs = torch.nn.functional.pad(places, (0, kept % 2)).view(len(chunks), -1, 2)
    low, high = pairs.unbind(2)
    bytes_of_places = torch.stack([low & 255, low >> 8 | (high & 15) << 4, high >> 4], 2).to(torch.uint8)
    places_size = (3 * kept + 1) // 2
    rows = [means, bytes_of_places.view(len(chunks), -1)[:, :places_size], packed_pairs(classes)]
    return torch.cat(rows, 1).view(-1)


def _unpack(kept: int, rows: "torch.Tensor", values: "torch.Tensor") -> None:
    """Decode the stored elements of chunks and write them to their places in `values`, (g, n) fp32 zeros.

    `rows`: the encoded chunks, (g, row size) uint8. `kept`: number of elements stored of each.
    """
    import torch

    places_size = (3 * kept + 1) // 2
    triples = torch.nn.functional.pad(rows[:, MEANS : MEANS + places_size], (0, -places_size % 3))
    first, second, third = triples.view(len(rows), -1, 3).to(torch.int64).unbind(2)
    places = torch.stack([first | (second & 15) << 8, second >> 4 | third << 4], 2).view(len(rows), -1)[:, :kept]
    if not bool((places[:, 1:] > places[:, :-1]).all()) or bool((places[:, -1:] >= values.shape[1]).any()):
        raise PayloadCorrupt("the places of kept elements in a chunk are not ascending, or not in the chunk.")
    classes = unpacked_pairs(rows[:, MEANS + places_size :])[:, :kept]
    values.scatter_(1, places, means_of(rows[:, :MEANS], classes))
