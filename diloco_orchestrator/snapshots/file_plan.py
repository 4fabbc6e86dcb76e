"""The files of a snapshot in Hugging Face layout: their names, and which tensors are in which, under which names.

Tensors that fit into one file of at most `limit` bytes are `<group>.safetensors`. Others are cut, in name order, into
`<group>-00001-of-0000K.safetensors` of at most `limit` bytes each, and `<group>.safetensors.index.json` maps tensors to
files, as transformers writes and reads it. A tensor larger than `limit` is a file of its own, because readers expect
every tensor whole.

Tensor names are the model's own in a snapshot of the whole model, those of PEFT's adapter folder in one of an adapter.
For exactly averaged adapters the snapshot is a whole model, of which `snapshots.reader_folder` makes an adapter folder.

The plan depends on names, shapes and dtypes only. `snapshots.layout` has the list of tensors.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, empty_size, file_size, largest_share

MODEL_GROUP, ADAPTER_GROUP, OUTER_GROUP = "model", "adapter_model", "outer"
MODEL_GROUPS = (MODEL_GROUP, ADAPTER_GROUP)
GROUPS = (*MODEL_GROUPS, OUTER_GROUP)


@dataclass(frozen=True)
class Naming:
    """Names of a snapshot's files and tensors. `group`: of the model's files. `stored`: model name -> name in files.

    An adapter's file is never cut, whatever its size, because PEFT reads one. `for_readers`: model name -> name in the
    adapter folder made for readers of a whole model with residuals; empty for every other snapshot.
    """

    group: str = MODEL_GROUP
    stored: Mapping[str, str] = field(default_factory=dict)
    for_readers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, start: Start) -> "Naming":
        """The file and tensor names in the snapshots of the run with this start record: whole models or adapters."""
        if start.adapters:
            return cls(for_readers=start.adapter or {})
        return cls() if start.adapter is None else cls(ADAPTER_GROUP, start.adapter)

    @property
    def adapter(self) -> dict[str, str] | None:
        """The adapter's tensor names as start.json stores them; None for whole models."""
        return dict(self.stored if self.is_adapter else self.for_readers) or None

    @property
    def is_adapter(self) -> bool:
        return self.group == ADAPTER_GROUP

    def in_file(self, name: str) -> str:
        """The name under which a snapshot's files store the model's tensor `name`."""
        return self.stored.get(name, name)

    def by_file(self, names: Collection[str]) -> dict[str, str]:
        """Stored name -> name in the model, of the model's tensors `names`."""
        return {self.in_file(name): name for name in names}


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file of a snapshot and the tensors that it will hold."""

    name: str
    specs: Mapping[str, TensorSpec]

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return file_size(self.specs)


def plan_files(group: str, specs: Mapping[str, TensorSpec], limit: int) -> list[PlannedFile]:
    """The safetensors files, in the order of their names, that hold these tensors of a group ("model", "outer").

    `specs`: by name. `limit`: bytes of the largest file.
    """
    whole = PlannedFile(f"{group}.safetensors", dict(specs))
    if whole.size <= limit:
        return [whole]
    cut: list[dict[str, TensorSpec]] = []
    room = 0
    for name in sorted(specs):
        share = largest_share(name, specs[name])
        if not cut or share > room:
            cut.append({})
            room = limit - empty_size()
        cut[-1][name] = specs[name]
        room -= share
    if len(cut) == 1:
        return [whole]  # one tensor larger than the limit
    return [
        PlannedFile(f"{group}-{number:05d}-of-{len(cut):05d}.safetensors", each) for number, each in enumerate(cut, 1)
    ]


def index_name(group: str) -> str:
    return f"{group}.safetensors.index.json"


def index_bytes(files: Iterable[PlannedFile]) -> bytes:
    """The index file of a group of tensors ("model", "outer") in more than one file, in transformers' format."""
    files = list(files)
    index = {
        "metadata": {"total_size": sum(spec.nbytes for each in files for spec in each.specs.values())},
        "weight_map": {name: each.name for each in files for name in each.specs},
    }
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def group_files(group: str, names: Collection[str], where: str) -> list[str]:
    """Files in `names` with tensors of a group ("model", "outer"), in order. Raises `RecordInvalid` if one is
    missing.
    """
    if (whole := f"{group}.safetensors") in names:
        return [whole]
    shard = re.compile(rf"{group}-(\d{{5}})-of-(\d{{5}})\.safetensors")
    found = sorted(name for name in names if shard.fullmatch(name))
    count = int(found[0][-17:-12]) if found else 1
    expected = [f"{group}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if found != expected:
        missing = next((name for name in expected if name not in found), found[-1] if found else whole)
        raise RecordInvalid(f"{where} does not name its files of the {group} one by one, see {missing}. Use another.")
    return found


def is_tensor_file(group: str, name: str) -> bool:
    """Whether a file name belongs to a group ("model", "outer"), in this layout or another one."""
    return re.fullmatch(rf"{group}(-\d{{5}}-of-\d{{5}})?\.safetensors", name) is not None


def is_side_file(name: str) -> bool:
    """Whether a snapshot's file holds no tensors and is no index of files that do, such as config.json."""
    return not any(is_tensor_file(group, name) or name == index_name(group) for group in GROUPS)


def why_no_file(name: str, start: Start) -> str:
    """Reason why no snapshot of a run may have a file of this name besides its tensors; empty if it may."""
    if is_side_file(name):
        known = start.first_files is None or name in start.first_files
        return "" if known else f"{keys.START} names no such file"
    own = (Naming.of(start).group, OUTER_GROUP)
    known = any(is_tensor_file(group, name) or name == index_name(group) for group in own)
    return "" if known else "the model of this run has no such file"
