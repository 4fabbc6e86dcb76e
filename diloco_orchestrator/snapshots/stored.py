"""`StoredSnapshot`: reads a complete snapshot file by file, and checks every digest that its record names.

The files are written by `snapshots.layout`.
"""

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Snapshot
from diloco_orchestrator.protocol.start_records import ParameterInfo, Start
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.file_plan import (
    GROUPS,
    MODEL_GROUPS,
    OUTER_GROUP,
    Naming,
    group_files,
    index_name,
    is_tensor_file,
)
from diloco_orchestrator.snapshots.layout import BASE, MOMENTUM, ModelFiles
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, read_header, views
from diloco_orchestrator.store.base import OBJECT_LIMIT, Store


class StoredSnapshot:
    """A complete snapshot in the bucket; `record` is its `snapshot.json`."""

    def __init__(self, store: Store, round_: int, record: Snapshot, take: str = keys.SHARED_TAKE) -> None:
        self.store = store
        self.round = round_
        self.take = take
        self.record = record
        self._where = f"snapshot {round_} in {store.url}"
        self._model_file: tuple[str, dict[str, torch.Tensor]] | None = None  # the one read last

    def file(self, name: str) -> bytes:
        """A file of the snapshot. Raises `RecordInvalid` if its digest is not the one in `snapshot.json`."""
        key = keys.snapshot(self.round, name, self.take)
        named = self.record.files[name]
        data = self.store.get(key, 0, named.size + 1)
        if len(data) != named.size or bulk_digest(data) != named.digest:
            raise RecordInvalid(
                f"{key} in {self.store.url} was changed after it was written: its digest is not the one in "
                f"{keys.SNAPSHOT_RECORD}. Use another snapshot."
            )
        return data

    def base(self, start: Start) -> Base:
        """The base in the snapshot. Raises `RecordInvalid` if its digest is not the one in `snapshot.json`.

        Reads each file with a part of the base once; none if one is longer by the record than it can be, because a file
        is in memory as a whole. `start`: the run's start record.
        """
        dtypes, naming = dtypes_of(start.parameters), Naming.of(start)
        shapes = {parameter.name: torch.Size(parameter.shape) for parameter in start.parameters}
        base, missing = Base.zeros(shapes, start.fragments, start.shard_numel), set(dtypes)
        files, most = files_of_base(self.record.files, naming, dtypes, self._where), _longest_file(start)
        for file in files:
            if (size := self.record.files[file].size) > most:
                raise RecordInvalid(f"{self._where} has {file} with {size} bytes by its record; {most} are the most.")
        for file in files:
            parameters, momenta = _parts_of_base(self._load(file), naming, dtypes, is_tensor_file(OUTER_GROUP, file))
            _check_shapes((*parameters.items(), *momenta.items()), shapes, self._where)
            base.fill(parameters, momenta)
            missing -= set(parameters)
            del parameters, momenta  # before the next file is read
        for name in sorted(missing):
            raise RecordInvalid(f"{self._where} does not hold the run's parameter {name!r}. Use another snapshot.")
        if (digest := base.digest()) != self.record.base_digest:
            raise RecordInvalid(
                f"snapshot {self.round} in {self.store.url} holds base {digest[:12]}, its record names "
                f"{self.record.base_digest[:12]}. Use another snapshot."
            )
        return base

    def check(self, start: Start, but: Collection[str] = ()) -> Base:
        """The base, after reading every file of the snapshot and comparing its digest with `snapshot.json`.

        `start`: the run's start record. `but`: names of files that the caller checks itself, skipped here unless they
        hold a part of the base. Raises `RecordInvalid` if a file or the base has another digest than recorded.
        """
        base = self.base(start)
        needed = files_of_base(self.record.files, Naming.of(start), dtypes_of(start.parameters), self._where)
        for name in self.record.files:
            if name not in needed and name not in but:
                self.file(name)
        return base

    def model_files(self, start: Start, extra: Mapping[str, bytes]) -> ModelFiles:
        """The parts of this snapshot beside the base, from which a snapshot of another base can be written.

        With exact adapters it must be snapshot 0, whose residuals are zero. `start`: the run's start record. `extra`:
        the bytes of the files without tensors, by name.
        """
        residuals, naming = {pair.residual for pair in start.adapters}, Naming.of(start)
        dtypes = {name: dtype for name, dtype in dtypes_of(start.parameters).items() if name not in residuals}
        return ModelFiles(
            dtypes,
            lambda: RestOfSnapshot(self, naming, dtypes),
            extra,
            naming,
            adapters=start.adapters,
        )

    def model_file_names(self, naming: Naming) -> list[str]:
        """The names of the files with the model's tensors, in order. Raises `RecordInvalid` if one is not recorded."""
        return group_files(naming.group, self.record.files, self._where)

    def specs(self, name: str) -> dict[str, TensorSpec]:
        """The names, shapes and dtypes of the tensors that a file holds."""
        if self._model_file is not None and self._model_file[0] == name:
            return {each: TensorSpec.of(tensor) for each, tensor in self._model_file[1].items()}
        key = keys.snapshot(self.round, name, self.take)
        return read_header(lambda start, end: self.store.get(key, start, end), f"{key} in {self.store.url}").specs

    def tensor(self, file: str, name: str) -> torch.Tensor:
        """One tensor of a file with the model's tensors. The file that was read last is not read again."""
        return self._load(file)[name]

    def _load(self, name: str) -> Mapping[str, torch.Tensor]:
        if self._model_file is not None and self._model_file[0] == name:
            return self._model_file[1]
        self._model_file = None  # before the next one is read
        key = keys.snapshot(self.round, name, self.take)
        tensors = views(self.file(name), f"{key} in {self.store.url}")
        if any(is_tensor_file(group, name) for group in MODEL_GROUPS):
            self._model_file = (name, tensors)
        return tensors


class RestOfSnapshot:
    """A stored model's untrained tensors by name in its files, each of which is fetched once if read in order."""

    def __init__(self, snapshot: StoredSnapshot, naming: Naming, trained: Collection[str]) -> None:
        self._snapshot = snapshot
        self._specs: dict[str, TensorSpec] = {}
        self._file: dict[str, str] = {}
        stored = naming.by_file(trained)
        for file in snapshot.model_file_names(naming):
            rest = {name: spec for name, spec in snapshot.specs(file).items() if name not in stored}
            self._specs.update(rest)
            self._file.update(dict.fromkeys(rest, file))

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def read(self, name: str) -> torch.Tensor:
        return self._snapshot.tensor(self._file[name], name)


def dtypes_of(parameters: Sequence[ParameterInfo]) -> dict[str, torch.dtype]:
    return {parameter.name: getattr(torch, parameter.dtype) for parameter in parameters}


def files_of_base(names: Collection[str], naming: Naming, dtypes: Mapping[str, torch.dtype], where: str) -> list[str]:
    """Names of the snapshot's files that hold a base: those of the group "outer", and the model's if it has fp32
    parameters.
    """
    outer = group_files(OUTER_GROUP, names, where)
    in_model = any(dtype == torch.float32 for dtype in dtypes.values())
    return [*outer, *(group_files(naming.group, names, where) if in_model else ())]


def _longest_file(start: Start) -> int:
    """The most bytes of a file with a part of a base: 1 GiB, more only for tensors that the run's first files have, and
    for parameters and momenta.
    """
    if start.first_files is None:
        return sys.maxsize
    first = sum(info.size for info in start.first_files.values())
    return max(OBJECT_LIMIT, first + 12 * sum(math.prod(parameter.shape) for parameter in start.parameters))


def _check_shapes(found: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, torch.Size], where: str) -> None:
    for name, tensor in found:
        if tensor.shape != shapes[name]:
            theirs, ours = list(tensor.shape), list(shapes[name])
            raise RecordInvalid(f"{where} holds {name!r} as {theirs}, the run has {ours}. Use another snapshot.")


def _parts_of_base(
    tensors: Mapping[str, torch.Tensor], naming: Naming, dtypes: Mapping[str, torch.dtype], is_outer: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and momenta of the base, by name, among the tensors of one file."""

    def found(prefix: str) -> dict[str, torch.Tensor]:
        named = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        return {name: each for name, each in named.items() if name in dtypes}

    if is_outer:
        return found(BASE), found(MOMENTUM)
    stored = ((name, naming.in_file(name)) for name, dtype in dtypes.items() if dtype == torch.float32)
    return {name: tensors[each] for name, each in stored if each in tensors}, {}


def first_snapshot_in(run_log: RunLog, start: Start, take: str) -> StoredSnapshot:
    """A version of snapshot 0, checked against the run's start record. Raises `ObjectMissing` if it is incomplete."""
    record = run_log.snapshot(0, take)
    files = record.files
    if start.first_files is not None:
        files = {name: info for name, info in files.items() if _is_derived(name)} | start.first_files
    named = record.model_copy(update={"base_digest": start.base_digest, "files": files})
    return StoredSnapshot(run_log.store, 0, named, take)


def _is_derived(name: str) -> bool:
    """Whether a file of snapshot 0 is computed from files that `start.json` names, so that it needs no digest there."""
    return is_tensor_file(OUTER_GROUP, name) or any(name == index_name(group) for group in GROUPS)
