"""How long the last rounds took, from the times that contributions tell."""

from collections.abc import Iterable

from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.protocol.rounds import PACE_ROUNDS, Pace


class PaceBook:
    """Train times of the last rounds, late ones included. `round_steps`: inner steps of a whole round."""

    def __init__(self, round_steps: int) -> None:
        self._round_steps = round_steps
        self._times_s: dict[tuple[int, int], float] = {}  # by round and replica

    def note(self, manifests: Iterable[Contribution]) -> None:
        """Remember the times of contributions; seeing one again changes nothing."""
        for manifest in manifests:
            steps = sum(origin.steps for origin in manifest.origins if origin.round == manifest.round)
            if manifest.kind == "delta" and steps:
                # One that was cut tells of a part of a round.
                whole = max(1.0, self._round_steps / steps)
                self._times_s[manifest.round, manifest.replica_id] = manifest.train_s * whole
        newest = max((round_ for round_, _ in self._times_s), default=0)
        self._times_s = {at: time for at, time in self._times_s.items() if at[0] > newest - PACE_ROUNDS}

    def pace(self) -> Pace | None:
        return Pace.of([self._times_s[at] for at in sorted(self._times_s)])
