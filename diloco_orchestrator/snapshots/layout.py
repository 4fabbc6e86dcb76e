"""Writes snapshots: the global model in Hugging Face layout, and the outer optimizer's state beside it.

    model.safetensors   the whole model in its own dtypes, loadable with `AutoModelForCausalLM.from_pretrained`
    config.json, …      what the model and tokenizer classes write beside it; for others a README.md
    outer.safetensors   outer momenta ("momentum.<name>"); in fp32 ("base.<name>") parameters the dtype rounds,
                        and residuals of exact LoRA means (`outer.adapter_products`)
    snapshot.json       digests of these files; written last, so a snapshot that has it is complete

For an adapter of PEFT `adapter_model.safetensors` and `adapter_config.json` are there instead, as PEFT writes them.

Above `OBJECT_LIMIT` bytes the model's file and the outer one are several files with an index (`snapshots.file_plan`);
one of them at a time is in memory. The same model gives the same bytes, whatever the run, host or time. Reading a
complete snapshot is `snapshots.stored`'s; bases between snapshots are `snapshots.rebuild`'s.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.errors import ModelMismatch, RecordInvalid
from diloco_orchestrator.outer.adapter_products import merged
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import FileInfo, Snapshot
from diloco_orchestrator.protocol.start_records import AdapterPair, ParameterInfo
from diloco_orchestrator.run_log.reader import read
from diloco_orchestrator.run_log.run_store import is_signed
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.snapshots.adapter_folder import adapter_folder
from diloco_orchestrator.snapshots.file_of_ranks import FileOfRanks
from diloco_orchestrator.snapshots.file_plan import (
    OUTER_GROUP,
    Naming,
    index_bytes,
    index_name,
    plan_files,
)
from diloco_orchestrator.snapshots.model_tensors import (
    Untrained,
    address,
    plain_name,
    trainable,
    unwrapped,
    whole_here,
)
from diloco_orchestrator.snapshots.pieces_of_ranks import InRanks, PiecesOfRanks
from diloco_orchestrator.snapshots.side_files import side_files
from diloco_orchestrator.snapshots.tensor_file import (
    LiveTensors,
    Overlaid,
    TensorSource,
    TensorSpec,
    encode_each,
)
from diloco_orchestrator.store.base import OBJECT_LIMIT, Store

T = TypeVar("T")

MOMENTUM, BASE = "momentum.", "base."  # before the names in the outer file

log = logging.getLogger(__name__)


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
    """Raise `ModelMismatch`, naming the first difference between this replica's parameters and the run's."""
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


# -- what a snapshot is made of ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotFile:
    """A file of a snapshot that is to be written. Each call of `encode` produces its bytes, if one process holds the
    base.
    """

    name: str
    size: int  # bytes
    encode: Callable[[], bytes]
    of_ranks: FileOfRanks | None = None  # for a base whose shards are in several ranks


@dataclass(frozen=True)
class ModelFiles:
    """The parts of a snapshot from the user's model and not from the base: dtypes, untrained tensors, config files."""

    dtypes: Mapping[str, torch.dtype]  # of the trainable parameters
    rest: Callable[[], TensorSource]  # what files hold of the others, frozen or buffers, by name in files
    extra: Mapping[str, bytes]  # config.json and other files, by name
    naming: Naming = field(default_factory=Naming)
    untrained: Untrained | None = None  # of the live model; None for what a snapshot holds
    adapters: tuple[AdapterPair, ...] = ()  # averaged exactly: the base has residuals of their frozen weights
    in_ranks: InRanks = field(default_factory=InRanks)  # what files hold of the frozen ones that are sharded

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        tokenizer: Any = None,
        adapters: tuple[AdapterPair, ...] = (),
        frozen: Mapping[str, torch.Tensor] | None = None,
        pieces: PiecesOfRanks | None = None,
    ) -> "ModelFiles":
        """The parts of a snapshot from a torch module: a PEFT model's adapter, and transformers' config files.

        The module is not changed. With `adapters` (exactly averaged) it is stored whole, with residuals in its frozen
        weights; `frozen` has their values without residuals, by name. Readers get an adapter
        (`snapshots.reader_folder`). `pieces`: the frozen parameters that are sharded.
        """
        model = unwrapped(model)
        dtypes = {name: parameter.dtype for name, parameter in trainable(model).items()}
        untrained = Untrained(model, set(dtypes), frozen, pieces)
        adapter = adapter_folder(model, dtypes, adapters)
        extra = side_files(model, tokenizer, adapter, untrained.tied)
        if adapter is not None and not adapters:
            stored = adapter.naming.by_file(untrained.buffers.first)
            rest, names = dict[str, torch.Tensor](), dict[str, str]()
            in_model = {address(each): plain_name(name) for name, each in model.named_parameters()}
            for name, tensor in adapter.untrained.items():
                whole = untrained.buffers.first[stored[name]] if name in stored else whole_here(tensor)
                if whole is None:
                    names[name] = in_model[address(tensor)]
                else:
                    rest[name] = whole
            specs = {name: untrained.sharded[each] for name, each in names.items()}
            in_ranks = InRanks(pieces, names, specs)
            return cls(dtypes, lambda: LiveTensors(rest), extra, adapter.naming, untrained, in_ranks=in_ranks)
        source = LiveTensors(untrained.frozen | untrained.buffers.first)
        in_ranks = InRanks(pieces, {name: name for name in untrained.sharded}, untrained.sharded)
        naming = adapter.naming if adapter else Naming()
        return cls(dtypes, lambda: source, extra, naming, untrained, adapters, in_ranks)

    def with_buffers(self, changed: Mapping[str, torch.Tensor]) -> "ModelFiles":
        """A copy in which `changed`, buffers by name in the model, replace the values from the run's start."""
        if not changed:
            return self
        values = {self.naming.in_file(name): value for name, value in changed.items()}
        if self.naming.is_adapter:
            values = {name: value for name, value in values.items() if name in self.rest().specs()}
        return replace(self, rest=lambda: Overlaid(self.rest(), values))

    def planned(self, base: Base, limit: int = OBJECT_LIMIT) -> list[SnapshotFile]:
        """The files of the snapshot of `base`, not encoded yet, at most `limit` bytes each; model tensors first."""
        rest, in_model = self.rest(), self.naming.by_file(self.dtypes)
        shapes = base.shapes(list(self.dtypes))
        trained = {
            self.naming.in_file(name): TensorSpec(dtype_name(dtype), tuple(shapes[name]))
            for name, dtype in self.dtypes.items()
        }
        adapted = {pair.weight: pair for pair in self.adapters}
        low = [name for name, dtype in self.dtypes.items() if dtype != torch.float32]
        held = [*low, *(pair.residual for pair in self.adapters)]
        names = [*((MOMENTUM + name, name) for name in base.momenta), *((BASE + name, name) for name in held)]
        outer = {stored: TensorSpec("float32", tuple(base.shapes([name])[name])) for stored, name in names}

        def of_model(stored: str) -> torch.Tensor:
            if (name := in_model.get(stored)) is not None:
                return base.parameters[name].to(self.dtypes[name])
            if (pair := adapted.get(stored)) is not None:
                return merged(rest.read(stored), base.parameters[pair.residual], pair.scaling)
            return rest.read(stored)

        def of_outer(name: str) -> torch.Tensor:
            if name.startswith(MOMENTUM):
                return base.momenta[name.removeprefix(MOMENTUM)]
            return base.parameters[name.removeprefix(BASE)]

        def in_base(names: Mapping[str, str], momenta: Collection[str]) -> FileOfRanks | None:
            if base.owners.ranks == 1:
                return None
            return FileOfRanks.of(base, names, momenta, self.in_ranks, rest.read)

        momenta = {MOMENTUM + name for name in base.momenta}
        specs = {**rest.specs(), **self.in_ranks.specs, **trained}
        model_limit = sys.maxsize if self.naming.is_adapter else limit  # PEFT reads one file
        return [
            *_group(self.naming.group, specs, of_model, model_limit, in_base(in_model, {})),
            *_group(OUTER_GROUP, outer, of_outer, limit, in_base(dict(names), momenta)),
            *(SnapshotFile(name, len(data), partial(bytes, data)) for name, data in sorted(self.extra.items())),
        ]


def _group(
    group: str,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], torch.Tensor],
    limit: int,
    of_ranks: FileOfRanks | None,
) -> Iterator[SnapshotFile]:
    """The safetensors files of a group of tensors ("model", "outer"), and their index if there are several.

    `specs`: shapes and dtypes by name; `read`: returns a tensor; `limit`: bytes of a file; `of_ranks`: for a base in
    several ranks.
    """
    planned = plan_files(group, specs, limit)
    for each in planned:
        of_each = replace(of_ranks, specs=each.specs) if of_ranks else None
        yield SnapshotFile(each.name, each.size, partial(encode_each, each.specs, read), of_each)
    if len(planned) > 1:
        index = index_bytes(planned)
        yield SnapshotFile(index_name(group), len(index), partial(bytes, index))


# -- writing ----------------------------------------------------------------------------------------------------------


def write_snapshot(
    store: Store,
    round_: int,
    base: Base,
    digest: str,
    files: ModelFiles,
    stamp: Stamp,
    limit: int = OBJECT_LIMIT,
    by: int | None = None,
) -> str | None:
    """Write the snapshot of `base` with digest `digest`; returns its version, or None if `base` changed meanwhile.

    Safe to repeat and to race: each file is created once. A writer that dies halfway leaves files without
    `snapshot.json`; the next writer keeps those with equal bytes, and completes the snapshot. If the shared version has
    any other file, it is left as it is, and the writer's own version is written, and if that has one too, in a signed
    run, a version with a random name, which nobody else can have taken; the first base has only the shared one. Raises
    `RecordInvalid` if all these versions have other files.

    Args:
        limit: bytes of the largest file.
        by: the replica that writes; None for a process that is no replica.
    """
    planned = files.planned(base, limit)
    takes = [keys.SHARED_TAKE, *([keys.own_take(by)] if round_ else [])]
    if round_ and is_signed(store):
        takes.append(keys.unforeseen_take(stamp.unforeseen()))
    for take in takes:
        infos = _write_take(store, round_, take, planned, base.owners)
        if infos is None:
            log.warning(
                "%s has other files than this snapshot of base %s", keys.snapshot(round_, "", take), digest[:12]
            )
            continue
        if base.digest() != digest:  # a bit changed in memory, perhaps before it was in the files
            log.error("the base changed while snapshot %d was written, which stays without a record", round_)
            return None
        record = Snapshot(**stamp(), round=round_, base_digest=digest, by=by, files=infos)
        key = keys.snapshot(round_, keys.SNAPSHOT_RECORD, take)
        if create_snapshot_record(store, record, take):
            return take
        log.warning("%s is not the record of this snapshot of base %s", key, digest[:12])
    raise RecordInvalid(
        f"snapshot {round_} of base {digest[:12]} cannot be written: {', '.join(repr(take) for take in takes)} of its "
        f"takes in {store.url} hold other files already. See who wrote {keys.snapshot(round_, '', takes[-1])}, and "
        "delete that folder if nobody is writing it."
    )


def _write_take(
    store: Store,
    round_: int,
    take: str,
    planned: Sequence[SnapshotFile],
    owners: Owners,
) -> dict[str, FileInfo] | None:
    """Write or complete the files of one snapshot version. None if it has other files, or files with other bytes.

    The first base has one version: a foreign file there stays, but has another digest than the record will name, so
    that nobody loads it.
    """
    existing, names = existing_files(store, round_, take), {each.name for each in planned}
    foreign = existing - names - {keys.SNAPSHOT_RECORD}
    if foreign and round_:
        log.warning("%s is no file of this model's snapshots", keys.snapshot(round_, min(foreign), take))
        return None
    infos: dict[str, FileInfo] = {}
    for group in in_groups(sorted(planned, key=lambda each: each.name not in existing), owners):
        args = [(store, keys.snapshot(round_, each.name, take), each.name in existing) for each in group]
        for each, (info, ours) in zip(group, with_bytes(owners, group, _write_file, args), strict=True):
            infos[each.name] = info
            if not ours:
                log.warning("%s has other bytes than this replica would write", keys.snapshot(round_, each.name, take))
            if not ours and round_:
                return None
    return infos


def create_snapshot_record(store: Store, ours: Snapshot, take: str) -> bool:
    """Create the record `ours` as the `snapshot.json` that completes the snapshot version `take`.

    True if it was created, or an existing one names the same base and files; False if that one differs or is invalid.
    """
    key = keys.snapshot(ours.round, keys.SNAPSHOT_RECORD, take)
    if Writer(store, Role.ANYBODY).create(ours, key) is not None:
        return True
    try:
        theirs = read(store, Snapshot, key)
    except RecordInvalid:
        return False
    return theirs is not None and (theirs.record.base_digest, theirs.record.files) == (ours.base_digest, ours.files)


def info_of(data: bytes) -> FileInfo:
    """The entry of a file in `snapshot.json`: digest and size of `data`."""
    return FileInfo(digest=bulk_digest(data), size=len(data))


def existing_files(store: Store, round_: int, take: str = keys.SHARED_TAKE) -> set[str]:
    """The names of a snapshot's files in the bucket, complete or not. One LIST request. `take`: the version."""
    folder = keys.snapshot(round_, "", take)
    return {info.key.removeprefix(folder) for info in store.list(folder)}


def in_groups(files: Sequence[SnapshotFile], owners: Owners) -> Iterator[Sequence[SnapshotFile]]:
    """The files in groups of one for each rank, which are written at the same time."""
    for first in range(0, len(files), owners.ranks):
        yield files[first : first + owners.ranks]


def with_bytes(
    owners: Owners, files: Sequence[SnapshotFile], task: Callable[..., T], args: Sequence[tuple[Any, ...]]
) -> list[T]:
    """The results of `task(data, *args)` for the bytes and arguments of each of some files, at most one for each rank.

    With several ranks, each puts one file together from the shards in all of them and calls the task, which is a
    function of a module.
    """
    if owners.ranks == 1:
        return [task(file.encode(), *each) for file, each in zip(files, args, strict=True)]
    sent = [each.of_ranks or each.encode() for each in files]
    found = owners.each(_with_own_bytes, owners, sent, task, args)
    return [each for each in found[: len(files)] if each is not None]


def _with_own_bytes(
    owners: Owners, files: Sequence[FileOfRanks | bytes], task: Callable[..., T], args: Sequence[tuple[Any, ...]]
) -> T | None:
    """Assemble files together with the other ranks, then call the task for this rank's file, if it has one."""
    own = None
    for writer, file in enumerate(files):
        data = file if isinstance(file, bytes) else file.assembled(owners, writer)
        if owners.rank == writer:
            own = data
    return None if own is None else task(own, *args[owners.rank])


def _write_file(data: bytes, store: Store, key: str, exists: bool) -> tuple[FileInfo, bool]:
    """Create a snapshot's file unless it exists. Returns the entry of `data`, and whether the object has its bytes."""
    ours = info_of(data)
    if not exists and store.without_read_back().create(key, data):
        return ours, True
    del data  # before the existing one is read
    return ours, info_of(store.get(key, 0, ours.size + 1)) == ours
