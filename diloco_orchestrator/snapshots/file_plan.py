"""The files of a snapshot: their names, which tensors are in which, and under which names, in Hugging Face's layout.

Tensors that fit into one file of at most `limit` bytes are `<group>.safetensors`. Others are cut, in name order, into
`<group>-00001-of-0000K.safetensors` of at most `limit` bytes each, and `<group>.safetensors.index.json` says which file
holds which tensor, as transformers writes and reads it. A tensor that is larger than `limit` is a file of its own: a
reader of the layout expects every tensor whole.

Names of tensors are those of the model itself in a snapshot of the whole model; those of PEFT's adapter folder in one
of an adapter. The snapshot of adapters averaged exactly is a whole model, of which `snapshots.reader_folder` makes an
adapter folder.

The plan depends on names, shapes and dtypes only. Which tensors there are is `snapshots.layout`'s.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol.records import Start
from diloco_orchestrator.snapshots.tensor_file import TensorSpec, empty_size, file_size, largest_share

MODEL_GROUP, ADAPTER_GROUP, OUTER_GROUP = "model", "adapter_model", "outer"
MODEL_GROUPS = (MODEL_GROUP, ADAPTER_GROUP)
GROUPS = (*MODEL_GROUPS, OUTER_GROUP)


@dataclass(frozen=True)
class Naming:
    """`group`: of the files with the model's tensors. `stored`: names in them, by name in the model, where they differ.

    An adapter's file is never cut, whatever its size: PEFT reads one. `for_readers`: names in the adapter folder that
    readers get of a whole model with residuals, by name in the model; empty for every other snapshot.
    """

    group: str = MODEL_GROUP
    stored: Mapping[str, str] = field(default_factory=dict)
    for_readers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, start: Start) -> "Naming":
        """The naming of a run's snapshots."""
        if start.adapters:
            return cls(for_readers=start.adapter or {})
        return cls() if start.adapter is None else cls(ADAPTER_GROUP, start.adapter)

    @property
    def adapter(self) -> dict[str, str] | None:
        """The names that start.json gives it."""
        return dict(self.stored if self.is_adapter else self.for_readers) or None

    @property
    def is_adapter(self) -> bool:
        return self.group == ADAPTER_GROUP

    def in_file(self, name: str) -> str:
        """The name in files of a tensor of the model."""
        return self.stored.get(name, name)

    def by_file(self, names: Collection[str]) -> dict[str, str]:
        """Names in the model, by name in files."""
        return {self.in_file(name): name for name in names}


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file and the tensors in it."""

    name: str
    specs: Mapping[str, TensorSpec]

    @property
    def size(self) -> int:
        """Bytes."""
        return file_size(self.specs)


def plan_files(group: str, specs: Mapping[str, TensorSpec], limit: int) -> list[PlannedFile]:
    """The files of a group ("model", "outer") with these tensors, in the order of their names."""
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
    """The index of a group that has more than one file, in transformers' form."""
    files = list(files)
    index = {
        "metadata": {"total_size": sum(spec.nbytes for each in files for spec in each.specs.values())},
        "weight_map": {name: each.name for each in files for name in each.specs},
    }
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def group_files(group: str, names: Collection[str], where: str) -> list[str]:
    """Those of `names` that hold a group's tensors, in order. Raises `RecordInvalid` if one of several is missing."""
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
    """Whether a file name belongs to a group, in this layout or another one."""
    return re.fullmatch(rf"{group}(-\d{{5}}-of-\d{{5}})?\.safetensors", name) is not None


def is_side_file(name: str) -> bool:
    """Whether a file of a snapshot neither holds tensors nor is an index of files that do."""
    return not any(is_tensor_file(group, name) or name == index_name(group) for group in GROUPS)
