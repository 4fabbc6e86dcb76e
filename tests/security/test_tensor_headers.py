"""Attacks by who may write to the bucket: headers of safetensors files whose tensors overlap, or leave holes."""

import json
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.snapshots.tensor_file import encode, read_header, views

TENSORS = {"a": torch.arange(4, dtype=torch.float32), "b": torch.ones(2, 3), "empty": torch.zeros(0)}


def with_header(change: dict[str, Any]) -> bytes:
    """The file of `TENSORS`, with other entries in its header. The tensors' bytes stay."""
    data = encode(TENSORS)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for name, fields in change.items():
        header[name] = {**header.get(name, {}), **fields}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


OTHERS: dict[str, dict[str, Any]] = {
    "overlapping": {"b": {"data_offsets": [0, 24]}},
    "all the same": {"b": {"data_offsets": [0, 24]}, "a": {"data_offsets": [0, 16]}},
    "negative": {"a": {"data_offsets": [-16, 0]}},
    "past the end": {"b": {"data_offsets": [4000, 4024]}},
    "a hole": {"b": {"data_offsets": [20, 44]}},
    "longer than its shape": {"b": {"data_offsets": [16, 48]}},
    "turned around": {"b": {"data_offsets": [40, 16]}},
    "no whole numbers": {"b": {"data_offsets": [16.0, 40.0]}},
    "truth values": {"a": {"data_offsets": [False, 16]}},
    "three offsets": {"b": {"data_offsets": [16, 40, 64]}},
    "a shape below zero": {"b": {"shape": [-2, -3]}},
    "a shape of fractions": {"b": {"shape": [2.0, 3]}},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_offsets_that_do_not_tile_the_data_are_refused_as_the_safetensors_library_does(change):
    data = with_header(change)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(data)
    with pytest.raises(RecordInvalid, match="is no safetensors file"):
        views(data, "model.safetensors")
    with pytest.raises(RecordInvalid, match="is no safetensors file"):
        read_header(lambda start, end: data[start:end], "model.safetensors")


def test_tensors_in_another_order_are_read_from_where_they_lie():
    data = with_header({"a": {"data_offsets": [24, 40]}, "b": {"data_offsets": [0, 24]}})
    ours, theirs = views(data, "x"), safetensors.torch.load(data)
    assert all(torch.equal(ours[name], theirs[name]) for name in TENSORS)
