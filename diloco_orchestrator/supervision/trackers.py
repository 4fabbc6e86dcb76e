"""Sends each round's metrics to an experiment tracker: TensorBoard, trackio or Weights & Biases.

Their libraries are imported only when used. The supervising process sends the metrics from the commit log, so replicas
need no library. A process that attaches later sends all rounds to the tracker that its own caller names.
"""

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from shlex import quote
from typing import Any, Protocol

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.status import RoundRow
from diloco_orchestrator.protocol.round_metrics import EXTRA_PREFIX

log = logging.getLogger(__name__)

_MODULES = {"tensorboard": "tensorboard.summary", "trackio": "trackio", "wandb": "wandb"}
_METRICS = ("loss", "reward", "heldout", "proxy_real_gap", "tokens", "bytes_up", "bytes_down", "train_s", "outer_step")

GUARD = "guard/"  # before the guard's statistics; each has a second curve, its threshold


class Tracker(Protocol):
    """An open experiment of a tracker's library."""

    def log(self, round_: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one round, by name. Called once per round, in order."""
        ...

    def close(self) -> None:
        """Write buffered metrics and end the experiment."""
        ...


class RoundTracker:
    """Sends the rounds of a run to the tracker that `open_` opens, until its first error; the run goes on."""

    def __init__(self, open_: Callable[[], Tracker]) -> None:
        self._open = open_
        self._tracker: Tracker | None = None
        self._sent = 0  # the last round
        self._failed = False

    def update(self, rows: Iterable[RoundRow]) -> None:
        """Send the metrics of those rounds in `rows`, one row a round, oldest first, that were not sent yet."""
        for row in rows:
            if row.round > self._sent:
                self._guarded(lambda row=row: self._send(row))  # type: ignore[misc]
                self._sent = row.round

    def close(self) -> None:
        """Write buffered metrics and end the experiment. The tracker's errors are logged, not raised."""
        if self._tracker is not None:
            self._guarded(self._tracker.close)

    def _send(self, row: RoundRow) -> None:
        self._tracker = self._tracker or self._open()
        values = {name: float(value) for name in _METRICS if (value := getattr(row, name)) is not None}
        values |= {EXTRA_PREFIX + name: value for name, value in row.extra.items()}
        for each in row.statistics:
            name = f"{GUARD}{each.name.lower().replace(' ', '_')}"
            values |= {name: each.value, f"{name}_threshold": each.threshold}
        self._tracker.log(row.round, {**values, "contributors": float(len(row.contributors))})

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # the tracker's library and network are not ours to trust
            self._failed = True
            log.warning("no more metrics are sent to the tracker, the run goes on: %s: %s", type(error).__name__, error)


def library_of(track: str) -> Any:
    """The tracker's module for the setting `track`. Raises `ConfigError` if the library is not installed."""
    name = track.partition(":")[0]
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ConfigError(
            f"track={track!r} needs the {name} library ({error}): pip install 'diloco-orchestrator[{name}]'."
        ) from None


def open_tracker(track: str, run_id: str, config: Mapping[str, Any]) -> Tracker:
    """Open the experiment of a run. Raises `ConfigError` if the library is not installed.

    `track`: "tensorboard", "trackio" or "wandb"; optionally ":" and a folder (TensorBoard) or a project follow.
    `run_id` names the experiment; `config` is recorded with it where the tracker can.
    """
    name, _, where = track.partition(":")
    library = library_of(track)
    if name == "tensorboard":
        return _TensorBoard(library, f"{where or 'runs/tensorboard'}/{run_id}")
    return _Project(library, where or "diloco", run_id, config)


class _TensorBoard:
    """A run in TensorBoard's event files."""

    def __init__(self, library: Any, folder: str) -> None:
        self._writer = library.Writer(folder)
        log.info("metrics: tensorboard --logdir %s", quote(folder))

    def log(self, round_: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Project:
    """A run of trackio or wandb, whose interfaces agree in the calls used here."""

    def __init__(self, library: Any, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        # wandb finds a run again by its id, trackio by its name.
        identity = {"id": run_id} if library.__name__ == "wandb" else {}
        self._run = library.init(project=project, name=run_id, config=dict(config), resume="allow", **identity)

    def log(self, round_: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round_)

    def close(self) -> None:
        self._run.finish()
