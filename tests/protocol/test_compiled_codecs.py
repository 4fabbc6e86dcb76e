"""Codecs compiled by numba give the bytes and values of the tensor operations, whatever the numbers."""

import math
import struct
import subprocess
import sys

import pytest
import torch

from diloco_orchestrator.codecs import plain
from diloco_orchestrator.codecs.table import CODECS, LARGEST_GROUP, Encoded, encode

pytest.importorskip("numba", reason="numba is not installed")
CODED = [name for name, codec in CODECS.items() if codec.group > 1]
SUMMED = [name for name, codec in CODECS.items() if codec.add is not None]  # without being decoded
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


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_compiled_sums_have_the_bits_of_decoded_values(name: str, weight: float):
    """Each value times its weight, added in float32: from the beginning, and from a group within."""
    for values in vectors():
        encoded = Encoded(encode(values, name), name, len(values))
        assert encoded.adds
        for start in range(0, len(values), LARGEST_GROUP):
            summed = torch.linspace(-1, 1, len(values) - start)
            expected = summed + encoded.values(start) * torch.tensor(weight)
            encoded.add_to(summed, start, weight)
            assert torch.equal(summed.isnan(), expected.isnan())
            assert torch.equal(summed.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("name", SUMMED)
def test_what_is_measured_from_the_encoded_form_is_that_of_decoded_values(name: str, monkeypatch):
    encoded, found = [Encoded(encode(each, name), name, len(each)) for each in vectors()], []
    for compiled in (plain.compiled(), None):
        monkeypatch.setattr(plain, "compiled", lambda compiled=compiled: compiled)
        found.append([each.measure() for each in encoded])
    for ours, theirs in zip(*found, strict=True):
        assert ours.nonfinite == theirs.nonfinite
        assert ours.squares == pytest.approx(theirs.squares, rel=1e-5)


@pytest.mark.parametrize("name", SUMMED)
def test_a_scale_too_large_for_its_numbers_is_not_finite_in_the_encoded_form_either(name: str):
    """No encoder writes it: the product of a whole number and the largest scale is above all finite numbers."""
    data = bytearray(encode(torch.ones(256), name))
    header = len(data) - CODECS[name].body_size(256)
    data[header : header + 4] = struct.pack("<f", 3e38)
    measure = Encoded(bytes(data), name, 256).measure()
    assert measure.nonfinite == 128 and measure.squares == math.inf


def test_numbers_that_are_not_scaled_are_averaged_without_numba():
    """Importing it takes 60 MB of each replica's memory."""
    code = (
        "import sys, torch; from diloco_orchestrator.codecs.table import Encoded, encode\n"
        "for name in ('fp32', 'bf16'): assert not Encoded(encode(torch.ones(300), name), name, 300).adds\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
