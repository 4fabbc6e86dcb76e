"""Encodings, pinned byte by byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_orchestrator.codecs import table as codecs
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt

VALUES = torch.tensor([0.0, 1.0, -2.5, 3.14159274, 1e-40, -65504.0])
HEADER = "444c434f0100{codec}0600000000000000"
ONE_SPAN = "01000000000000000600000000000000"
GOLDEN = {
    "fp32": HEADER.format(codec="0100") + "000000000000803f000020c0db0f4940c216010000e07fc7",
    "bf16": HEADER.format(codec="0200") + "0000803f20c04940010080c7",
    "int8": HEADER.format(codec="0300") + "e4f10044000000000081",
    "int4": HEADER.format(codec="0400") + "db361246888818",
    "2bit": HEADER.format(codec="0500") + ONE_SPAN + "803f000080c080c7200c",
    "topk64": HEADER.format(codec="0600") + ONE_SPAN + "0000000080c70000050002",
    "topk128": HEADER.format(codec="0700") + ONE_SPAN + "0000000080c70000050002",
}


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_golden_bytes(codec: str):
    assert codecs.encode(VALUES, codec).hex() == GOLDEN[codec]


def test_every_codec_is_pinned():
    assert sorted(GOLDEN) == sorted(codecs.CODECS)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_fp32_loses_nothing(values: list[float]):
    flat = torch.tensor(values, dtype=torch.float32)
    decoded = codecs.Encoded(codecs.encode(flat, "fp32"), "fp32", len(values)).values()
    assert decoded.numpy().tobytes() == flat.numpy().tobytes()


@given(st.lists(st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100)))
def test_bf16_keeps_eight_bits_and_is_stable(values: list[float]):
    flat = torch.tensor(values, dtype=torch.float32)
    once = codecs.Encoded(codecs.encode(flat, "bf16"), "bf16", len(values)).values()
    assert torch.allclose(once, flat, rtol=2**-8, atol=1e-38)
    assert torch.equal(codecs.Encoded(codecs.encode(once, "bf16"), "bf16", len(values)).values(), once)


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: b"XXXX" + data[4:],
        lambda data: data[:4] + b"\x02" + data[5:],
        lambda data: data[:6] + b"\x09" + data[7:],
        lambda data: data[:8] + b"\x07" + data[9:],
    ],
    ids=["short", "long", "empty", "magic", "version", "codec", "count"],
)
def test_anything_else_than_the_promised_bytes_is_refused(codec, spoil):
    with pytest.raises(PayloadCorrupt, match=f"6 elements encoded as {codec}"):
        codecs.Encoded(spoil(codecs.encode(VALUES, codec)), codec, 6).values()


def test_an_unknown_codec_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown codec 'bf61': did you mean 'bf16'\?"):
        codecs.encode(VALUES, "bf61")


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_blocks_encode_to_the_bytes_of_the_whole(codec: str):
    values = torch.cat([VALUES, torch.tensor([torch.nan, 3.4028235e38, -torch.inf]), torch.arange(300.0)])
    found, whole = codecs.get_codec(codec), codecs.encode(values, codec)
    blocks = [found.encode_block(each) for each in values.split(max(2, found.group))]
    assert b"".join([found.header(values.numel()), *(each.data for each in blocks)]) == whole
    encoded = codecs.Encoded(whole, codec, values.numel())
    assert sum(each.measure.nonfinite for each in blocks) == encoded.measure().nonfinite
    decoded = torch.cat([each.values for each in blocks])  # what was lost is the difference to the values
    assert torch.equal(decoded.view(torch.int32), encoded.values().view(torch.int32))


@pytest.mark.parametrize("codec", codecs.CODECS)
@given(values=st.lists(st.floats(width=32) | st.sampled_from([3.4028235e38, -3.4028235e38, float("-inf")])))
def test_what_is_not_finite_is_counted_in_the_encoded_form(codec: str, values: list[float]):
    data = codecs.encode(torch.tensor(values, dtype=torch.float32), codec)
    encoded = codecs.Encoded(data, codec, len(values))
    assert encoded.measure().nonfinite == int((~torch.isfinite(encoded.values())).sum())


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_a_view_shares_memory_with_the_bytes_and_keeps_them_alive(codec: str, recwarn):
    data = codecs.encode(VALUES, codec)
    values = codecs.Encoded(data, codec, 6).values()
    del data
    assert torch.equal(values, codecs.Encoded(codecs.encode(VALUES, codec), codec, 6).values())
    assert not recwarn.list  # torch warns about tensors over memory that is not writable


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("numel", [0, 1])
def test_vectors_of_no_and_of_one_element_are_encoded(codec: str, numel: int):
    data = codecs.encode(torch.full((numel,), -2.0), codec)
    assert torch.equal(codecs.Encoded(data, codec, numel).values(), torch.full((numel,), -2.0))
