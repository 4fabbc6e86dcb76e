"""`Naming`: the names that a snapshot's files have for the tensors of the model.

Those of the model itself in a snapshot of the whole model; those of PEFT's adapter folder in one of an adapter. The
snapshot of adapters averaged exactly is a whole model, of which `snapshots.reader_folder` makes an adapter folder.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from diloco_orchestrator.protocol.records import Start

MODEL_GROUP, ADAPTER_GROUP, OUTER_GROUP = "model", "adapter_model", "outer"
MODEL_GROUPS = (MODEL_GROUP, ADAPTER_GROUP)


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
