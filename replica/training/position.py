"""`TrainingPosition`: the position of a replica's training: data cursor, random generators, counters.

It goes into every manifest as `Progress`, from which the next attempt continues.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import JsonValue

from diloco_orchestrator.protocol.records import Progress
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.data_cursor import DataCursor
from diloco_orchestrator.replica.training.round_metrics import RoundMetrics


class TrainingPosition:
    """The position of one attempt. `fresh_seed`: of the random generators of a replica that has no manifest yet."""

    def __init__(self, metrics: RoundMetrics, fresh_seed: int) -> None:
        self._metrics = metrics
        self._fresh_seed = fresh_seed
        self._cursor: DataCursor | None = None  # None in a loop that takes its batches elsewhere
        self._resumed: Progress | None = None  # that this attempt continued from

    def continue_from(self, progress: Progress | None) -> None:
        """Set counters, random generators and cursor to a manifest's, or to those of a new replica."""
        self._resumed = progress
        if progress is not None:
            self._metrics.resume(progress)
        self._seek()

    def take(self, data: Iterable[Any]) -> DataCursor:
        """A cursor over the data, where an earlier attempt ended. Random generators begin there again."""
        self._cursor = DataCursor(data)
        self._seek()
        return self._cursor

    def progress(self, stateful: str) -> Progress:
        """The position now. `stateful`: the small state, encoded."""
        return Progress(
            cursor=self._cursor_position(),
            rng=rng.capture(),
            inner_steps=self._metrics.total_inner_steps,
            tokens=self._metrics.total_tokens,
            stateful=stateful,
        )

    def _cursor_position(self) -> dict[str, JsonValue]:
        if self._cursor is not None:
            return self._cursor.position()
        return dict(self._resumed.cursor) if self._resumed else {}

    def _seek(self) -> None:
        if self._resumed is None:
            # Data order and dropout differ between replicas from here on; the model was built from the same seed.
            rng.seed_all(self._fresh_seed)
            return
        if self._cursor is not None and self._resumed.cursor:
            self._cursor.seek(self._resumed.cursor)
        rng.restore(self._resumed.rng)
