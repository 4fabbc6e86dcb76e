"""Fields of snapshot.json: names, digests and sizes of a snapshot's files. A name is one part of a path and no more."""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from diloco_orchestrator.protocol.digests import BulkDigest
from diloco_orchestrator.protocol.record_format import Part

_LONGEST_NAME = 255  # bytes, of the common file systems


def _check_name(name: str) -> str:
    if name in ("", ".", "..") or set(name) & set("/\\\0") or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name[:_LONGEST_NAME]!r} is no file name")
    return name


FileName: TypeAlias = Annotated[str, AfterValidator(_check_name)]  # str in code; records check its form


class FileInfo(Part):
    """One file of a snapshot."""

    digest: BulkDigest
    size: int
