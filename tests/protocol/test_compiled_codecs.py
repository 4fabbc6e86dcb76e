"""int8 and int4 compiled by numba give the bytes and values of the tensor operations, whatever the numbers."""

import math

import pytest
import torch

from diloco_orchestrator.codecs import scaled

compiled = pytest.importorskip("diloco_orchestrator.codecs.compiled", reason="numba is not installed")

PACKS = {
    127: (scaled.pack_int8, scaled.unpack_int8, scaled.size_int8),
    7: (scaled.pack_int4, scaled.unpack_int4, scaled.size_int4),
}
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 2.0**-126, 3.4e38)


def vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [
        torch.randn(numel, generator=generator) * 2.0**exponent
        for numel in (0, 1, 2, 127, 128, 129, 300, 4097)
        for exponent in (-149, -140, -127, -126, -120, 0, 60, 126)
    ]
    found += [torch.full((130,), value) for value in SPECIAL]
    for value in SPECIAL:
        found.append(torch.randn(300, generator=generator))
        found[-1][140] = value
    return [*found, torch.randint(-14, 15, (4096,), generator=generator) / 2]  # and halves, which are rounded to even


@pytest.mark.parametrize("levels", PACKS)
def test_compiled_codecs_have_the_bits_of_tensor_operations(levels: int, monkeypatch):
    pack, unpack, size = PACKS[levels]
    fast, plain = [], []
    monkeypatch.setattr(scaled, "_compiled", lambda: compiled)
    for values in vectors():
        fast.append((pack(values), unpack(pack(values), values.numel())))
    monkeypatch.setattr(scaled, "_compiled", lambda: None)
    for values in vectors():
        plain.append((pack(values), unpack(pack(values), values.numel())))
    for (ours, decoded), (theirs, expected) in zip(fast, plain, strict=True):
        assert len(ours) == size(expected.numel()) and torch.equal(ours, theirs)
        assert torch.equal(decoded.isnan(), expected.isnan())
        assert torch.equal(decoded.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


def test_bytes_at_any_place_are_decoded():
    """Of a span behind others, which begins anywhere; read-only, as mapped files are."""
    packed = scaled.pack_int4(torch.randn(1000, generator=torch.Generator().manual_seed(1)))
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])[3:]
    assert torch.equal(compiled.unpack(moved, 1000, 7), scaled.unpack_int4(packed, 1000))
