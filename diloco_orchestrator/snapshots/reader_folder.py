"""The model files that readers get: those of a snapshot, or for exactly averaged adapters an adapter folder.

With `adapters="exact"` an adapter and its residual add P = R + B A to a weight, (out, in). The factors cannot hold the
rank of P, but factors of full rank do, without a factorisation: the identity and P where out <= in, else P and the
identity. PEFT loads them as any adapter, of the ranks in `adapter_config.json` (`snapshots.adapter_folder`), over the
unchanged base model. They are float32.
"""

import json
from collections.abc import Iterable, Iterator

import torch

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.outer.adapter_products import whole_product
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.start_records import AdapterPair
from diloco_orchestrator.snapshots.file_plan import ADAPTER_GROUP
from diloco_orchestrator.snapshots.layout import ModelFiles, dtype_name
from diloco_orchestrator.snapshots.side_files import README, adapter_readme
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, tensor_pieces

# Name below the folder, such as "model-00001-of-00002.safetensors", and content in pieces, to be written in order. The
# pieces of a file are to be taken before the next file is asked for.
Files = Iterator[tuple[str, Iterable[bytes | memoryview]]]


def files_of(base: Base, files: ModelFiles) -> Files:
    """The model files of `base`, by name, as pieces of which one at a time is in memory.

    A piece is a whole file, of at most 1 GiB unless a single tensor is larger; in an adapter folder, a header or a
    tensor.

    Args:
        base: float32 tensors on the CPU, in the model's shapes; with residuals if adapters are averaged exactly.
        files: of the same run's model: dtypes to write, untrained tensors, side files and names in files.

    Reading untrained tensors may raise while the pieces are consumed.
    """
    if not files.naming.for_readers:
        return ((each.name, [each.encode()]) for each in files.planned(base))
    return _adapter_folder(base, files)


def _adapter_folder(base: Base, files: ModelFiles) -> Files:
    """The adapter's tensors, then its side files. Factors are (rank, in) and (out, rank) in float32, of full rank.

    Raises `RecordInvalid` if base and files lack what the run's start record names.
    """
    factors = {name: pair for pair in files.adapters for name in (pair.a, pair.b)}
    in_model = {stored: name for name, stored in files.naming.for_readers.items()}
    rest, shapes = files.rest(), base.shapes(list(files.dtypes))
    untrained, base_name = rest.specs(), _base_name(files)
    if lacking := sorted(set(in_model.values()) - factors.keys() - files.dtypes.keys() - untrained.keys()):
        raise RecordInvalid(
            f"the adapter folder needs {lacking[0]!r}, which this snapshot lacks. Use another snapshot."
        )

    def spec(name: str) -> TensorSpec:
        if name in factors:
            return TensorSpec("float32", _shape(base, factors[name], name))
        if name in files.dtypes:
            return TensorSpec(dtype_name(files.dtypes[name]), tuple(shapes[name]))
        return untrained[name]

    def read(stored: str) -> torch.Tensor:
        name = in_model[stored]
        if name in factors:
            return _factor(base, factors[name], name)
        return base.parameters[name].to(files.dtypes[name]) if name in files.dtypes else rest.read(name)

    yield f"{ADAPTER_GROUP}.safetensors", tensor_pieces({stored: spec(name) for stored, name in in_model.items()}, read)
    for name, data in sorted(files.extra.items()):
        if name != README:
            yield name, [data]
    yield README, [adapter_readme(base_name).encode()]


def _base_name(files: ModelFiles) -> str:
    """The name of the model under the adapter, from `adapter_config.json`; empty if that names none.

    Raises `RecordInvalid` if the file is missing or is no config of PEFT.
    """
    try:
        return str(json.loads(files.extra["adapter_config.json"])["base_model_name_or_path"] or "")
    except (KeyError, TypeError, ValueError):
        raise RecordInvalid(
            "this snapshot's adapter_config.json is missing or is none of PEFT's. Use another snapshot."
        ) from None


def _shape(base: Base, pair: AdapterPair, name: str) -> tuple[int, int]:
    """The shape of factor `name` of `pair` at full rank: A is (rank, in), B is (out, rank)."""
    rows, columns = base.parameters[pair.residual].shape
    rank = min(rows, columns)
    return (rank, columns) if name == pair.a else (rows, rank)


def _factor(base: Base, pair: AdapterPair, name: str) -> torch.Tensor:
    """Factor `name` of `pair` at full rank, float32 on the CPU: the identity or the whole product P."""
    rows, columns = base.parameters[pair.residual].shape
    if (name == pair.a) == (rows <= columns):
        return whole_product(base, pair)
    return torch.eye(min(rows, columns), dtype=torch.float32, device="cpu")
