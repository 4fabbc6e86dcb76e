"""Writes and reads snapshots: the global model in Hugging Face layout, and the outer optimizer's state beside it.

    model.safetensors   the whole model in its own dtypes, loadable with `AutoModelForCausalLM.from_pretrained`
    config.json, …      what the model and tokenizer classes write beside it
    outer.safetensors   outer momenta ("momentum.<name>"), and the fp32 base ("base.<name>") of parameters whose dtype
                        cannot hold it
    snapshot.json       digests of these files; written last, so a snapshot that has it is complete

The same model gives the same bytes, whatever the run, host or time. Bases between snapshots are `snapshots.rebuild`'s.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from diloco_orchestrator.errors import ModelMismatch, RecordInvalid
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import FileInfo, ParameterInfo, Snapshot, Stamp, sha256_hex
from diloco_orchestrator.store.base import Store

MODEL = "model.safetensors"
OUTER = "outer.safetensors"
_MOMENTUM, _BASE = "momentum.", "base."


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters by name, in name order; a tied parameter has one entry."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: found[name] for name in sorted(found)}


def describe(parameters: Mapping[str, torch.Tensor]) -> tuple[ParameterInfo, ...]:
    """Name, shape and dtype of parameters in name order: the form in which start.json holds them."""
    return tuple(
        ParameterInfo(name=name, shape=tuple(parameters[name].shape), dtype=dtype_name(parameters[name].dtype))
        for name in sorted(parameters)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in records, such as "float32" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_same_model(ours: tuple[ParameterInfo, ...], theirs: tuple[ParameterInfo, ...]) -> None:
    """Raise `ModelMismatch` naming the first difference between this replica's model and the run's first base."""
    ours_by_name, theirs_by_name = {p.name: p for p in ours}, {p.name: p for p in theirs}
    for name in sorted(ours_by_name.keys() | theirs_by_name.keys()):
        mine, run = ours_by_name.get(name), theirs_by_name.get(name)
        if mine == run:
            continue
        raise ModelMismatch(
            f"this replica's model differs from the run's first base at parameter {name!r}: here {_words(mine)}, in "
            f"the run {_words(run)}. All replicas must build the same model: check what its construction depends on."
        )


def _words(parameter: ParameterInfo | None) -> str:
    return "absent" if parameter is None else f"{parameter.dtype}{list(parameter.shape)}"


@dataclass(frozen=True)
class ModelFiles:
    """The parts of a snapshot that come from the workload's model and not from the base."""

    dtypes: Mapping[str, torch.dtype]  # of the trainable parameters
    rest: Callable[[], dict[str, torch.Tensor]]  # frozen parameters and buffers, by state-dict name
    extra: Mapping[str, bytes]  # config.json and other files, by name

    @classmethod
    def of(cls, model: torch.nn.Module, tokenizer: Any = None) -> "ModelFiles":
        """The parts of a snapshot that come from `model`; config and tokenizer files only if it can save them."""
        dtypes = {name: parameter.dtype for name, parameter in trainable(model).items()}
        return cls(dtypes, lambda: _rest_of(model, set(dtypes)), _side_files(model, tokenizer))

    def model_bytes(self, base: Base) -> bytes:
        """The bytes of `model.safetensors` for a base: its parameters in the model's dtypes, and all other tensors."""
        trained = {name: base.parameters[name].to(dtype) for name, dtype in self.dtypes.items()}
        # No more than one metadata entry: safetensors writes several in hash order, which differs between processes.
        return save_tensors({**self.rest(), **trained}, metadata={"format": "pt"})


def _rest_of(model: torch.nn.Module, trained: set[str]) -> dict[str, torch.Tensor]:
    """The state dict without the trained parameters and without second names of tied tensors."""
    state = model.state_dict()
    seen = {state[name].data_ptr() for name in trained if state[name].numel()}
    rest = {}
    for name, tensor in state.items():
        if name in trained or (tensor.numel() and tensor.data_ptr() in seen):
            continue
        seen.add(tensor.data_ptr())
        rest[name] = tensor.detach().cpu().contiguous()
    return rest


def _side_files(model: torch.nn.Module, tokenizer: Any) -> dict[str, bytes]:
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    with tempfile.TemporaryDirectory(prefix="diloco-model-files-") as folder:
        if hasattr(config, "save_pretrained"):
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def outer_bytes(base: Base, dtypes: Mapping[str, torch.dtype]) -> bytes:
    """The bytes of `outer.safetensors` for a base: momenta, and fp32 parameters that their own dtype cannot hold.

    `dtypes`: the dtype of each trainable parameter in the model.
    """
    tensors = {_MOMENTUM + name: tensor for name, tensor in base.momenta.items()}
    for name, dtype in dtypes.items():
        if dtype != torch.float32:
            tensors[_BASE + name] = base.parameters[name]
    return save_tensors(tensors, metadata={"format": "pt"})


def write_snapshot(store: Store, round_: int, base: Base, digest: str, files: ModelFiles, stamp: Stamp) -> None:
    """Write the snapshot of `base`, whose digest is `digest`. Safe to repeat and to race: each file is created once.

    A writer that dies halfway leaves files without `snapshot.json`. The next writer keeps those files and completes
    the snapshot; it raises `RecordInvalid` if they hold another base.
    """
    contents = {MODEL: files.model_bytes(base), OUTER: outer_bytes(base, files.dtypes), **files.extra}
    infos = {name: _write_file(store, keys.snapshot(round_, name), contents[name]) for name in sorted(contents)}
    if any(infos[name].sha256 != sha256_hex(contents[name]) for name in (MODEL, OUTER)):
        _check_existing(store, round_, digest, files.dtypes)
    record = Snapshot(**stamp(), round=round_, base_digest=digest, files=infos)
    store.create(keys.snapshot(round_, keys.SNAPSHOT_RECORD), record.to_bytes())


def _write_file(store: Store, key: str, data: bytes) -> FileInfo:
    if not store.create(key, data):
        data = store.get(key)
    return FileInfo(sha256=sha256_hex(data), size=len(data))


def _check_existing(store: Store, round_: int, digest: str, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise `RecordInvalid` unless the files of a half-written snapshot hold the base with this digest.

    The files' bytes may differ from ours all the same: buffers are not averaged, so replicas have different ones.
    """
    model, outer = (read_tensors(store, keys.snapshot(round_, name)) for name in (MODEL, OUTER))
    if _base_of(model, outer, dtypes).digest() != digest:
        raise RecordInvalid(
            f"snapshot {round_} in {store.url} is half-written with another base than the log names ({digest[:12]}). "
            f"Delete the folder {keys.snapshot(round_, '')} if nobody is writing it."
        )


def read_tensors(store: Store, key: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors object, by name, on the CPU. Raises the store's errors."""
    tensors: dict[str, torch.Tensor] = load_tensors(store.get(key))
    return tensors


class StoredSnapshot:
    """A complete snapshot in the bucket; `record` is its `snapshot.json`. Each file is fetched at most once."""

    def __init__(self, store: Store, round_: int, record: Snapshot) -> None:
        self._store = store
        self.round = round_
        self.record = record
        self._tensors: dict[str, torch.Tensor] | None = None  # of model.safetensors

    def file(self, name: str) -> bytes:
        """A file that the record names. Raises `RecordInvalid` if its digest is not the recorded one."""
        key = keys.snapshot(self.round, name)
        data = self._store.get(key)
        if sha256_hex(data) != self.record.files[name].sha256:
            raise RecordInvalid(
                f"{key} in {self._store.url} was changed after it was written: its sha256 is not the one in "
                f"{keys.SNAPSHOT_RECORD}. Use another snapshot."
            )
        return data

    def _model(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = load_tensors(self.file(MODEL))
        return self._tensors

    def base(self, parameters: Sequence[ParameterInfo]) -> Base:
        """The base that the snapshot holds. `parameters`: as start.json has them.

        Raises `RecordInvalid` if the base's digest is not the one in `snapshot.json`.
        """
        base = _base_of(self._model(), load_tensors(self.file(OUTER)), _dtypes(parameters))
        if (digest := base.digest()) != self.record.base_digest:
            raise RecordInvalid(
                f"snapshot {self.round} in {self._store.url} holds base {digest[:12]}, its record names "
                f"{self.record.base_digest[:12]}. Use another snapshot."
            )
        return base

    def model_files(self, parameters: Sequence[ParameterInfo]) -> ModelFiles:
        """The parts of the snapshot beside the base, for the snapshot of another base. `parameters`: of start.json."""
        dtypes = _dtypes(parameters)
        rest = {name: tensor for name, tensor in self._model().items() if name not in dtypes}
        names = [name for name in self.record.files if name not in (MODEL, OUTER)]
        return ModelFiles(dtypes, lambda: rest, {name: self.file(name) for name in names})


def _dtypes(parameters: Sequence[ParameterInfo]) -> dict[str, torch.dtype]:
    return {parameter.name: getattr(torch, parameter.dtype) for parameter in parameters}


def _base_of(
    model: Mapping[str, torch.Tensor], outer: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> Base:
    parameters = {
        name: outer[_BASE + name] if dtypes[name] != torch.float32 else model[name] for name in sorted(dtypes)
    }
    momenta = {name: outer[_MOMENTUM + name] for name in sorted(dtypes) if _MOMENTUM + name in outer}
    return Base(parameters, momenta)
