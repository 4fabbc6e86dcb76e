"""Payloads: writes a flat fp32 vector as encoded shards, and verifies shards when they are read.

Which contributions are averaged is decided by `protocol.rounds`; the encodings are `protocol.codecs`'.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from diloco_orchestrator.errors import PayloadCorrupt, RoundReused
from diloco_orchestrator.protocol import codecs
from diloco_orchestrator.protocol.records import Payload, Shard, sha256_hex
from diloco_orchestrator.store.base import Store


class FlatTensors:
    """Several contiguous tensors that are read and written as one flat fp32 vector, without joining them in memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self.numel = sum(tensor.numel() for tensor in self._tensors)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy of elements [start, stop), of shape (stop - start,), float32, on the CPU."""
        out = torch.empty(stop - start, dtype=torch.float32)
        for piece, low, high in self._pieces(start, stop):
            out[low:high].copy_(piece)
        return out

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the elements from `start` on by `values`, of shape (n,), float32, on the CPU."""
        for piece, low, high in self._pieces(start, start + values.numel()):
            piece.copy_(values[low:high])

    def extremes(self) -> torch.Tensor:
        """The smallest and the largest element of each non-empty tensor, NaN where it holds NaN; float32, CPU."""
        pairs = [pair for tensor in self._tensors if tensor.numel() for pair in torch.aminmax(tensor)]
        return torch.stack([each.to(device="cpu", dtype=torch.float32) for each in pairs]) if pairs else torch.empty(0)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(view of a tensor's part, its bounds within [start, stop)) for every tensor that [start, stop) overlaps."""
        offset = 0
        for tensor in self._tensors:
            low, high = max(start, offset), min(stop, offset + tensor.numel())
            if low < high:
                yield tensor.view(-1)[low - offset : high - offset], low - start, high - start
            offset += tensor.numel()


def shard_ranges(numel: int, shard_numel: int) -> list[tuple[int, int]]:
    """[start, stop) of every shard of a vector; an empty vector has no shards."""
    return [(start, min(start + shard_numel, numel)) for start in range(0, numel, shard_numel)]


class NotFinite(PayloadCorrupt):
    """The payload holds NaN or infinity."""


def publish(
    store: Store,
    key_of_shard: Callable[[int], str],
    flat: FlatTensors,
    codec: str,
    shard_numel: int,
    keep: Callable[[str, str, bytes], None] | None = None,
) -> Payload:
    """Create the shards of a vector and return their description for the manifest. Safe to repeat with equal numbers.

    Raises `NotFinite` if the vector holds NaN or infinity, also after encoding, before anything is written;
    `RoundReused` if a shard exists with other bytes.

    Args:
        key_of_shard: shard index -> key.
        codec: name of the encoding.
        shard_numel: elements per shard.
        keep: called with key, digest and bytes of each shard, for a reader in this process.
    """
    ranges = shard_ranges(flat.numel, shard_numel)
    _check_encodable(flat, codec, ranges)
    shards = []
    for index, (start, stop) in enumerate(ranges):
        key, data = key_of_shard(index), codecs.encode(flat.read(start, stop), codec)
        _create_same(store, key, data)
        shards.append(Shard(sha256=sha256_hex(data), size=len(data)))
        if keep is not None:
            keep(key, shards[-1].sha256, data)
    return Payload(codec=codec, numel=flat.numel, shard_numel=shard_numel, shards=tuple(shards))


def _check_encodable(flat: FlatTensors, codec: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Raise `NotFinite` if the vector holds NaN or infinity, before or after encoding.

    bf16 turns the largest fp32 numbers into infinity. Codecs round monotonically, so it is enough to encode the
    extremes of each tensor; no shard is encoded or kept for this check.
    """
    if _count_nonfinite(_rounded(flat.extremes(), codec)):
        count = sum(_count_nonfinite(_rounded(flat.read(start, stop), codec)) for start, stop in ranges)
        raise NotFinite(f"this tensor holds {count} elements that are not finite.")


def _rounded(values: torch.Tensor, codec: str) -> torch.Tensor:
    """`values` after encoding and decoding: what a reader of the payload gets."""
    return codecs.decode(codecs.encode(values, codec), codec, values.numel())


def _count_nonfinite(values: torch.Tensor) -> int:
    return values.numel() - int(torch.isfinite(values).sum())


def _create_same(store: Store, key: str, data: bytes) -> None:
    """Create an object. Raises `RoundReused` if it exists with other bytes."""
    if not store.create(key, data) and store.get(key) != data:
        raise RoundReused(
            f"{key} in {store.url} already holds another payload: this round id was used before with other numbers. "
            "Use a new folder, or the next round id."
        )


def check_shape(payload: Payload, codec: str, numel: int, shard_numel: int) -> None:
    """Raise `PayloadCorrupt` unless the manifest describes a vector of this length, codec and shard size."""
    expected = (codec, numel, shard_numel, len(shard_ranges(numel, shard_numel)))
    found = (payload.codec, payload.numel, payload.shard_numel, len(payload.shards))
    if found != expected:
        raise PayloadCorrupt(
            f"the payload is (codec, elements, elements per shard, shards) = {found}; this round needs {expected}."
        )


def decode(data: bytes, payload: Payload, index: int, whose: str) -> torch.Tensor:
    """The numbers in a shard's bytes, of shape (n,), float32. `whose`: opens the message of errors.

    Raises `PayloadCorrupt` if the bytes have another codec or length than the payload says, `NotFinite` for NaN or
    infinity.
    """
    start, stop = shard_ranges(payload.numel, payload.shard_numel)[index]
    values = codecs.decode(data, payload.codec, stop - start)
    if count := _count_nonfinite(values):
        raise NotFinite(f"{whose} holds {count} elements that are not finite.")
    return values
