"""`RerunResult`: what the process that repeats one replica's training in one round reports to the auditing process."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class RerunResult:
    """Comparison of one replica's training in one round, repeated for an audit, with what the bucket holds of it.

    Distances are L2 norms of differences, relative to the recorded values.
    """

    not_auditable: str = ""  # why nothing could be compared, in words; the fields below are empty then
    lost: str = ""  # which object that training begins from was changed, or removed from a run that keeps all
    differing: tuple[str, ...] = ()  # what is not equal, such as "payload" and "cursor"
    payload: str = ""  # digest over the digests of the payload that came out
    distance: float | None = None  # of the payload; None if the bucket's is gone
    state_distance: float | None = None  # the largest of any tensor of the saved state; None without two states
    noise: float | None = None  # distance of this payload from that of the re-run before; None for the first
    other_class: tuple[str, ...] = ()  # facts by which this machine is of another class than the replica's
    follows: int = 0  # round whose saved state training began from; 0: from the start
    micro_batches: bool = False  # whether more than one batch was taken for a step, or that is not known

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The result in `text`, which `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("differing", "other_class"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
