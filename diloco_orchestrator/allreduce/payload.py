"""Payloads: a flat fp32 vector cut into shards, encoded, written once and verified on every read.

Knows how bytes become trusted numbers. Who contributes, and when, is decided elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt, RoundReused
from diloco_orchestrator.protocol import codecs
from diloco_orchestrator.protocol.records import Payload, Shard, sha256_hex
from diloco_orchestrator.store.base import Store

_READS = 2  # a flipped bit on the way is gone at the second look; one in the store is not


class FlatTensors:
    """Several tensors read and written as one flat fp32 vector, without ever joining them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self.numel = sum(tensor.numel() for tensor in self._tensors)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy of elements [start, stop)  # (stop - start,), float32, CPU."""
        out = torch.empty(stop - start, dtype=torch.float32)
        for piece, low, high in self._pieces(start, stop):
            out[low:high].copy_(piece)
        return out

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace elements from `start` on by `values`  # (n,), float32, CPU."""
        for piece, low, high in self._pieces(start, start + values.numel()):
            piece.copy_(values[low:high])

    def extremes(self) -> torch.Tensor:
        """The smallest and largest element of each tensor, NaN where it holds one  # (<= 2 tensors,), float32, CPU."""
        pairs = [pair for tensor in self._tensors if tensor.numel() for pair in torch.aminmax(tensor)]
        return torch.stack([each.to(device="cpu", dtype=torch.float32) for each in pairs]) if pairs else torch.empty(0)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(view of a tensor's part, its place in the window) for every tensor that the window touches."""
        offset = 0
        for tensor in self._tensors:
            low, high = max(start, offset), min(stop, offset + tensor.numel())
            if low < high:
                yield tensor.view(-1)[low - offset : high - offset], low - start, high - start
            offset += tensor.numel()


def shard_ranges(numel: int, shard_numel: int) -> list[tuple[int, int]]:
    """[start, stop) of every shard; an empty vector has none."""
    return [(start, min(start + shard_numel, numel)) for start in range(0, numel, shard_numel)]


class PayloadGone(PayloadCorrupt):
    """The object is not there any more: collected, or deleted by hand."""


class NotFinite(PayloadCorrupt):
    """The vector holds NaN or infinity."""


def publish(
    store: Store,
    key_of_shard: Callable[[int], str],
    flat: FlatTensors,
    codec: str,
    shard_numel: int,
    keep: Callable[[str, str, bytes], None] | None = None,
) -> Payload:
    """Write the shards, create-only, and return what a manifest says of them.

    `keep` gets each shard's key, digest and bytes as well. Raises `NotFinite` before anything is written, and
    `RoundReused` if a key holds other bytes. Safe to repeat with the same numbers.
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
    """Raise `NotFinite` if the vector holds NaN or infinity, or would once encoded.

    bf16 turns the largest fp32 numbers into infinity. Codecs round monotonically, so the extremes decide for all
    elements, and no shard is encoded or kept for this check.
    """
    if _count_nonfinite(_rounded(flat.extremes(), codec)):
        count = sum(_count_nonfinite(_rounded(flat.read(start, stop), codec)) for start, stop in ranges)
        raise NotFinite(f"this tensor holds {count} elements that are not finite.")


def _rounded(values: torch.Tensor, codec: str) -> torch.Tensor:
    """What a reader gets of `values` once they were encoded."""
    return codecs.decode(codecs.encode(values, codec), codec, values.numel())


def _count_nonfinite(values: torch.Tensor) -> int:
    return values.numel() - int(torch.isfinite(values).sum())


def _create_same(store: Store, key: str, data: bytes) -> None:
    if not store.create(key, data) and store.get(key) != data:
        raise RoundReused(
            f"{key} in {store.url} already holds another payload: this round was run before with other numbers. "
            "Use a new folder, or the next round id."
        )


def check_shape(payload: Payload, codec: str, numel: int, shard_numel: int) -> None:
    """Raise `PayloadCorrupt` unless the manifest describes exactly this vector."""
    expected = (codec, numel, shard_numel, len(shard_ranges(numel, shard_numel)))
    found = (payload.codec, payload.numel, payload.shard_numel, len(payload.shards))
    if found != expected:
        raise PayloadCorrupt(
            f"the payload is (codec, elements, elements per shard, shards) = {found}; this round needs {expected}."
        )


def fetch(store: Store, key: str, payload: Payload, index: int) -> bytes:
    """A shard's bytes, their digest checked; read again once before giving up with `PayloadCorrupt`."""
    return fetch_shard(store, key, payload.shards[index])


def fetch_shard(store: Store, key: str, shard: Shard) -> bytes:
    """The bytes of an object that a manifest names; see `fetch`."""
    for _ in range(_READS):
        try:
            data = store.get(key)
        except ObjectMissing:
            raise PayloadGone(f"{key} in {store.url} is gone although a manifest names it.") from None
        if sha256_hex(data) == shard.sha256:
            return data
    raise PayloadCorrupt(
        f"{key} in {store.url}: {len(data)} bytes with sha256 {sha256_hex(data)[:12]}, read {_READS} times; the "
        f"manifest names {shard.size} bytes with {shard.sha256[:12]}. They are not used."
    )


def decode(data: bytes, payload: Payload, index: int, whose: str) -> torch.Tensor:
    """A verified shard's numbers  # (n,), float32. Raises `PayloadCorrupt` for a wrong form, NaN or infinity."""
    start, stop = shard_ranges(payload.numel, payload.shard_numel)[index]
    values = codecs.decode(data, payload.codec, stop - start)
    if count := _count_nonfinite(values):
        raise NotFinite(f"{whose} holds {count} elements that are not finite.")
    return values
