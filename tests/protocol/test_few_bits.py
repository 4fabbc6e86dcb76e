"""The codecs of few bits, each against its description, one number after another; and bytes that no encoder wrote."""

import struct
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diloco_orchestrator.codecs.fine import fine_ranges, is_fine, within
from diloco_orchestrator.codecs.table import CODECS, Encoded, encode
from diloco_orchestrator.errors import PayloadCorrupt

FEW = [name for name, codec in CODECS.items() if codec.feedback]
CHUNK, GROUP = 4096, 256


def bf16(number: np.float32) -> bytes:
    """Rounded to nearest, to even among two."""
    bits = int(np.float32(number).view(np.uint32))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def means_and_classes(numbers: NDArray[np.float32], large: float) -> tuple[bytes, list[int]]:
    """By the words of `codecs.means`."""
    largest = float(np.abs(numbers).max())
    if largest < 2.0**-100:
        return bytes(8), [0] * len(numbers)
    exponent = 14 - np.frexp(largest)[1]
    whole = [int(np.rint(np.ldexp(float(x), exponent))) for x in numbers]
    threshold = np.float32(np.float32(sum(map(abs, whole))) * np.float32(large)) / np.float32(len(whole))
    classes = [2 * (x < 0) + (abs(x) > threshold) for x in whole]
    means = b""
    for each in range(4):
        members = [x for x, its in zip(whole, classes, strict=True) if its == each]
        mean = np.float32(sum(members)) / np.float32(len(members)) if members else np.float32(0)
        means += bf16(np.float32(np.ldexp(mean, -exponent)))
    return means, classes


def packed(numbers: list[int], bits: int) -> bytes:
    """Numbers of `bits` bits one after another, from the lowest bit of the first byte on."""
    whole = sum(int(number) << bits * place for place, number in enumerate(numbers))
    return whole.to_bytes(-(-bits * len(numbers) // 8), "little")


def as_described(values: torch.Tensor, codec: str) -> bytes:
    """The bytes behind the header."""
    body = b""
    for group in values.split(GROUP if codec == "2bit" else CHUNK) if len(values) else ():
        numbers = group.numpy()
        if codec == "2bit":
            means, classes = means_and_classes(numbers, 1.25)
            body += means + packed(classes, 2)
        else:
            kept = -(-int(codec[4:]) * len(numbers) // CHUNK)
            places = sorted(sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i]), i))[:kept])
            means, classes = means_and_classes(numbers[places], 1.0)
            body += means + packed(places, 12) + packed(classes, 2)
    return body


def numbers(numel: int, seed: int = 0, exponent: int = 0) -> torch.Tensor:
    """Normal numbers, of which many are equal to others."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn.abs() > 1.5, (4 * drawn).round() / 4, drawn) * 2.0**exponent


@pytest.mark.parametrize("codec", FEW)
@settings(max_examples=12, deadline=None)
@given(numel=st.integers(0, 2 * CHUNK + 300), seed=st.integers(0, 99), exponent=st.integers(-120, 120))
def test_its_bytes_are_those_of_its_description(codec: str, numel: int, seed: int, exponent: int):
    values = numbers(numel, seed, exponent)
    assert encode(values, codec) == CODECS[codec].header(numel) + as_described(values, codec)


@pytest.mark.parametrize("codec", FEW)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5, 63, 257, CHUNK - 1, CHUNK, CHUNK + 1, 9001])
def test_any_number_of_elements_is_encoded_to_the_promised_size(codec: str, numel: int):
    values = numbers(2 * numel)[::2]  # not contiguous
    data = encode(values, codec)
    assert data == encode(values.clone(), codec) and len(data) == CODECS[codec].encoded_size(numel)
    found = Encoded(data, codec, numel).values()
    assert found.shape == (numel,) and float((values - found).norm()) <= float(values.norm())


@pytest.mark.parametrize("codec", FEW)
def test_any_range_is_decoded_like_the_whole(codec: str):
    numel, fine = 3 * CHUNK + 77, [(0, 3), (1000, 1130), (5000, 9000), (12300, 12365)]
    values = numbers(numel)
    encoded = Encoded(encode(values, codec, fine), codec, numel)
    whole = encoded.values()
    for start, stop in [(0, 1), (2, 4), (999, 1131), (1130, 4999), (5001, 5002), (8000, 12365), (12300, 12365), (7, 7)]:
        assert torch.equal(encoded.values(start, stop), whole[start:stop])
    assert torch.equal(torch.cat(list(encoded.blocks(5, 12000, 1000))), whole[5:12000])
    assert encoded.measure().norm == pytest.approx(float(whole.norm()), rel=1e-3)


@pytest.mark.parametrize("codec", FEW)
def test_fine_ranges_travel_as_vectors_of_their_own_in_the_finer_codec(codec: str):
    values, fine = numbers(1000), [(100, 260), (900, 1000)]
    data = encode(values, codec, fine)
    found, bodies = CODECS[codec], [(0, 100, codec), (100, 260, "int8"), (260, 900, codec), (900, 1000, "int8")]
    assert data[: len(found.header(1000, fine))] == struct.pack(
        "<4sHHQ5Q", b"DLCO", 1, found.number, 1000, 4, 100, 160, 640, 100
    )
    body = b"".join(encode(values[a:b], each)[len(CODECS[each].header(b - a)) :] for a, b, each in bodies)
    assert data == found.header(1000, fine) + body and len(data) == found.encoded_size(1000, fine)
    assert (values - Encoded(data, codec, 1000).values())[100:260].abs().max() < 4 / 127


@pytest.mark.parametrize("codec", CODECS)
@settings(derandomize=True)
@given(lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=40), first=st.integers(0, 1))
def test_no_encoded_vector_has_more_bytes_than_its_elements_can_have(codec: str, lengths: list[int], first: int):
    ends, found = list(accumulate(lengths)), CODECS[codec]
    fine = [(ends[i] - lengths[i], ends[i]) for i in range(first, len(lengths), 2)]
    assert found.encoded_size(ends[-1], fine) <= found.most_size(ends[-1])
    assert found.fine or found.encoded_size(ends[-1]) == found.most_size(ends[-1])


@pytest.mark.parametrize(
    ("name", "shape", "fine"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), False),
        ("model.layers.0.self_attn.q_proj.bias", (64,), True),
        ("model.layers.0.input_layernorm.weight", (64,), True),
        ("model.embed_tokens.weight", (256, 64), True),
        ("tok_embeddings.weight", (256, 64), True),
        ("lm_head.weight", (256, 64), True),
        ("output.weight", (256, 64), True),
        ("encoder.layer.0.attention.output.dense.weight", (64, 64), False),
        ("transformer.wte.weight", (256, 64), True),
        ("transformer.h.0.mlp.c_fc.weight", (64, 256), False),
        ("layers.0.q_proj.lora_A.weight", (8, 64), False),
        ("layer1.0.conv1.weight", (8, 3, 3, 3), False),
        ("weight", (8, 8), False),
        ("scale", (), True),
    ],
)
def test_embeddings_norms_and_heads_are_the_fine_parameters(name: str, shape: tuple[int, ...], fine: bool):
    assert is_fine(name, shape) == fine


def test_ranges_of_fine_parameters_follow_the_layout_and_are_joined():
    shapes = {"a.bias": (3,), "a.norm": (2,), "b.weight": (4, 5), "c.empty": (0,), "c.scale": (), "d.weight": (2, 2)}
    assert fine_ranges(shapes) == [(0, 5), (25, 26)]
    assert within([(0, 5), (25, 26)], 3, 25) == [(0, 2)] and within([(0, 5), (25, 26)], 25, 30) == [(0, 1)]


@pytest.mark.parametrize("codec", FEW)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(codec: str, bad: float):
    values = numbers(2 * CHUNK)
    values[CHUNK + 5] = bad
    found = Encoded(encode(values, codec), codec, len(values))
    assert found.measure().nonfinite > 0 and bool(found.values(0, CHUNK).isfinite().all())


@pytest.mark.parametrize("codec", FEW)
@pytest.mark.parametrize(
    ("mean", "is_finite"), [(b"\xc0\x7f", False), (b"\x80\x7f", False), (b"\0\0", True), (b"\1\0", True)]
)
def test_a_mean_that_is_no_number_is_found_and_zero_or_denormal_ones_are_numbers(codec, mean, is_finite):
    data, begin = bytearray(encode(torch.ones(CHUNK), codec)), len(CODECS[codec].header(CHUNK))
    for at in range(0, 8, 2):
        data[begin + at : begin + at + 2] = mean
    assert (Encoded(bytes(data), codec, CHUNK).measure().nonfinite == 0) == is_finite


@pytest.mark.parametrize("places", [[1, 1, 2], [2, 1, 3], [1, 2, 190]], ids=["repeated", "unsorted", "beyond the end"])
def test_places_that_no_encoder_writes_are_refused(places: list[int]):
    values = torch.zeros(130)  # a chunk that keeps three
    values[[1, 2, 3]] = 1.0
    data, begin = bytearray(encode(values, "topk64")), len(CODECS["topk64"].header(130)) + 8
    assert data[begin : begin + 5] == packed([1, 2, 3], 12)
    data[begin : begin + 5] = packed(places, 12)
    with pytest.raises(PayloadCorrupt, match="not ascending, or not in the chunk"):
        Encoded(bytes(data), "topk64", 130).measure()


@pytest.mark.parametrize("codec", FEW)
@pytest.mark.parametrize(
    "lengths",
    [(), (1000,), (900, 101), (899, 100), (900, 0, 100), (2**64 - 1, 1001), (500, 500), (900, 100, 0)],
    ids=[
        "none",
        "one",
        "too many elements",
        "too few, in as many bytes",
        "an empty one",
        "more than fit",
        "another cut",
        "an empty last one",
    ],
)
def test_spans_that_are_not_those_of_the_bytes_are_refused(codec: str, lengths: tuple[int, ...]):
    data, fine = encode(numbers(1000), codec, [(900, 1000)]), [(900, 1000)]
    header = struct.pack(f"<4sHHQ{1 + len(lengths)}Q", b"DLCO", 1, CODECS[codec].number, 1000, len(lengths), *lengths)
    for count in (len(lengths), 2**63):
        forged = header[:16] + struct.pack("<Q", count) + header[24:] + data[len(CODECS[codec].header(1000, fine)) :]
        with pytest.raises(PayloadCorrupt, match="the bytes are not 1000 elements"):
            Encoded(forged, codec, 1000)
