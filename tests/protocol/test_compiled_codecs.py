"""Codecs compiled by numba give the bytes and values of the tensor operations, whatever the numbers."""

import math

import pytest
import torch

from diloco_orchestrator.codecs import plain
from diloco_orchestrator.codecs.table import CODECS

pytest.importorskip("numba", reason="numba is not installed")
CODED = [name for name, codec in CODECS.items() if codec.group > 1]
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 2.0**-126, 2.0**-100, 3.4e38)


def vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [
        torch.randn(numel, generator=generator) * 2.0**exponent
        for numel in (1, 2, 127, 128, 129, 300, 4097, 9000)
        for exponent in (-149, -127, -126, -110, -100, -99, 0, 60, 126)
    ]
    found += [torch.full((4100,), value) for value in SPECIAL]
    for value in SPECIAL:
        found.append(torch.randn(5000, generator=generator))
        found[-1][140] = value
    # Halves, which are rounded to even, and whole numbers, of which many are as large as the smallest that is kept.
    return [*found, *(torch.randint(-14, 15, (8192,), generator=generator) / step for step in (2, 1))]


@pytest.mark.parametrize("name", CODED)
def test_compiled_codecs_have_the_bits_of_tensor_operations(name: str, monkeypatch):
    codec, found = CODECS[name], []
    for compiled in (plain.compiled(), None):
        monkeypatch.setattr(plain, "compiled", lambda compiled=compiled: compiled)
        found.append([(packed := codec.pack(each), codec.unpack(packed, len(each))) for each in vectors()])
    for (ours, decoded), (theirs, expected) in zip(*found, strict=True):
        assert len(ours) == codec.body_size(len(expected)) and torch.equal(ours, theirs)
        assert torch.equal(decoded.isnan(), expected.isnan())
        assert torch.equal(decoded.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("name", CODED)
def test_bytes_at_any_place_are_decoded(name: str):
    """Of a span behind others, which begins anywhere."""
    packed = CODECS[name].pack(torch.randn(5000, generator=torch.Generator().manual_seed(1)))
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])[3:]
    assert torch.equal(CODECS[name].unpack(moved, 5000), CODECS[name].unpack(packed, 5000))
