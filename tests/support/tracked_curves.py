"""Reads back what trackers wrote, by their own libraries: TensorBoard's event files, W&B's offline logs."""

import json
import struct
from pathlib import Path
from typing import Any


def tensorboard_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) points of each series, as they were written, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    names = events.Tags()["tensors"]
    return {
        name: [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in events.Tensors(name)]
        for name in names
    }


def wandb_histories(folder: Path) -> list[list[dict[str, Any]]]:
    """The rows of each offline run below `folder`, by name of the metric."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return [[row_of(r) for r in wandb_records(file) if r.WhichOneof("record_type") == "history"] for file in files]


def row_of(record: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def wandb_records(file: Path) -> list[Any]:
    """The log that LevelDB defines: 32 KiB blocks of chunks, each with crc32, size and part (whole, first, …)."""
    from wandb.proto import wandb_internal_pb2

    data, at, found, whole = file.read_bytes(), 7, [], b""  # after the file's own 7 bytes
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room  # a header is never split over blocks
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found
