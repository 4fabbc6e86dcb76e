"""Sends each round's metrics to an experiment tracker: TensorBoard, trackio or Weights & Biases.

Their libraries are imported only when used. Metrics are read from the commit log, so replicas need no library: by the
process that supervises a run (`RoundTracker`), or by any process that can read the bucket (`send_run`). Which tracker,
folder or project is always said by the caller, never by the bucket.
"""

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.config import check_track
from diloco_orchestrator.errors import ConfigError, TrackerFailed
from diloco_orchestrator.inspection.status import RoundRow, RunReader
from diloco_orchestrator.protocol.round_metrics import EXTRA_PREFIX
from diloco_orchestrator.run_log.seen_store import SeenStore

log = logging.getLogger(__name__)

_POLL_S = 1.0  # between two polls of a run that is followed; most polls cost no request

_MODULES = {"tensorboard": "tensorboard.summary", "trackio": "trackio", "wandb": "wandb"}
_METRICS = ("loss", "reward", "heldout", "proxy_real_gap", "tokens", "bytes_up", "bytes_down", "train_s", "outer_step")

LAST = "contributors"  # written last of a round: a tracker that has it has the whole round
GUARD = "guard/"  # before the guard's statistics; each has a second curve, its threshold


class Tracker(Protocol):
    """An open experiment in an experiment tracker such as TensorBoard."""

    def newest(self) -> int:
        """The last round that the experiment had when it was opened; 0 if it is new, or if the library does not say."""
        ...

    def log(self, round_: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one round, by name. Called once per round, in order."""
        ...

    def close(self) -> None:
        """Write buffered metrics and end the experiment."""
        ...


class RoundSender:
    """Sends the rounds of a run, oldest first, to the tracker that `open_` opens; those that it has are left out.

    The tracker is opened with the first round. All methods raise what the tracker's library raises.
    """

    def __init__(self, open_: Callable[[], Tracker]) -> None:
        self._open = open_
        self._tracker: Tracker | None = None
        self._last = 0  # the last round that the tracker has
        self.sent = 0  # how many rounds were sent by this object

    def send(self, row: RoundRow) -> None:
        """Send the metrics of one round, unless the tracker has that round or a later one."""
        if self._tracker is None:
            self._tracker = self._open()
            self._last = self._tracker.newest()
        if row.round > self._last:
            self._tracker.log(row.round, values_of(row))
            self._last = row.round
            self.sent += 1

    def close(self) -> None:
        """Write buffered metrics and end the experiment, if it was opened."""
        if self._tracker is not None:
            self._tracker.close()


def values_of(row: RoundRow) -> dict[str, float]:
    """The metrics of a round by the names that they have in a tracker; those that were not observed are left out."""
    values = {name: float(value) for name in _METRICS if (value := getattr(row, name)) is not None}
    values |= {EXTRA_PREFIX + name: value for name, value in row.extra.items()}
    for each in row.statistics:
        name = f"{GUARD}{each.name.lower().replace(' ', '_')}"
        values |= {name: each.value, f"{name}_threshold": each.threshold}
    return {**values, LAST: float(len(row.contributors))}


class RoundTracker:
    """A `RoundSender` for a process that supervises: the first error of the tracker is logged, and the run goes on."""

    def __init__(self, open_: Callable[[], Tracker]) -> None:
        self._sender = RoundSender(open_)
        self._failed = False

    def update(self, rows: Iterable[RoundRow]) -> None:
        """Send the metrics of those rounds in `rows`, one row a round, oldest first, that were not sent yet.

        Raises what reading `rows` raises, nothing that the tracker raises.
        """
        for row in rows:
            self._guarded(lambda row=row: self._sender.send(row))  # type: ignore[misc]

    def close(self) -> None:
        """Write buffered metrics and end the experiment. The tracker's errors are logged, not raised."""
        self._guarded(self._sender.close)

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # the tracker's library and network are not ours to trust
            self._failed = True
            log.warning("no more metrics are sent to the tracker, the run goes on: %s: %s", type(error).__name__, error)


@dataclass(frozen=True)
class SentRun:
    """The result of one call of `send_run`: the experiment, the run's rounds, and how many of them were sent."""

    run_id: str  # the experiment's name in the tracker
    rounds: int  # of the run, when it was read last
    sent: int  # rounds that the tracker did not have yet


def send_run(reader: RunReader, track: str, follow: Clock | None = None) -> SentRun:
    """Send the rounds of a run to a tracker, from the bucket alone; those that the tracker has are left out.

    `track`: as of `open_tracker`. `follow`: a clock to wait by for further rounds, until the run has stopped; None
    sends those committed now. Raises `ConfigError` for a tracker that is unknown or not installed, `TrackerFailed` if
    its library or service fails, `RecordInvalid` where the commits' hash chain breaks.
    """
    check_track(track)
    library_of(track)
    if follow is not None:
        seen = SeenStore.of(reader.store, follow)
        reader = RunReader(seen)
    run, rounds = reader.run, 0
    sender = RoundSender(lambda: open_tracker(track, run.run_id, run.config.model_dump(mode="json")))
    try:
        while True:
            stopped = follow is None or reader.has_stopped()  # asked before reading, so that no round is left out
            if follow is not None and stopped:
                seen.forget()
            for row in reader.rows()[rounds:]:  # held-out scores on the scale that they have by now
                _or_failed(track, lambda row=row: sender.send(row))  # type: ignore[misc]
                rounds += 1
            if follow is None or stopped:
                return SentRun(run.run_id, rounds, sender.sent)
            seen.follow(reader.log)
            follow.sleep(_POLL_S)
    finally:
        _or_failed(track, sender.close)


def _or_failed(track: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # of any library
        raise TrackerFailed(
            f"{track} did not take the rounds: {type(error).__name__}: {error}. What it has is kept: the same command "
            "goes on with the next round."
        ) from error


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
        self._folder = folder
        self._newest = _newest_in(folder)
        self._writer = library.Writer(folder)
        log.info("metrics: tensorboard --logdir %s", quote(folder))

    def newest(self) -> int:
        return self._newest

    def log(self, round_: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _newest_in(folder: str) -> int:
    """The last round that is whole in the event files of a folder; 0 if there is none."""
    if not Path(folder).is_dir():
        return 0
    reading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(folder, size_guidance={"tensors": 1}).Reload()  # keeps the last of each series
    points = events.Tensors(LAST) if LAST in events.Tags()["tensors"] else ()
    return max((int(point.step) for point in points), default=0)


class _Project:
    """A run of trackio or wandb, whose interfaces agree in the calls used here."""

    def __init__(self, library: Any, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        # wandb finds a run again by its id, trackio by its name.
        identity = {"id": run_id} if library.__name__ == "wandb" else {}
        self._run = library.init(project=project, name=run_id, config=dict(config), resume="allow", **identity)

    def newest(self) -> int:
        # The step that would come next, which trackio has no public name for. wandb knows it only while it is online.
        following: int = getattr(self._run, "starting_step", 0) or getattr(self._run, "_next_step", 0)
        return max(0, following - 1)

    def log(self, round_: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round_)

    def close(self) -> None:
        self._run.finish()
