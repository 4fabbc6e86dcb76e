"""Learning-rate schedules that go on where the run is: those of a replica that has missed rounds, or is new in them.

A schedule in `stateful` counts the steps that its own replica took. After rounds that were committed without the
replica, it has made fewer than those of the others, whose learning rates are then further down.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.training.small_state import stateful_in, torch_schedule

log = logging.getLogger(__name__)


def catch_up(
    stateful: Mapping[str, Any], inner_steps: int, of_base: Callable[[], Iterable[Contribution]], published_at: int
) -> bool:
    """Step torch's schedules until each has made `inner_steps` steps, those of the run so far. Returns whether any was.

    Only a schedule that is stepped once in each inner step is: the one of the same name in one of the manifests
    `of_base`, which made the newest base, had made exactly `published_at` steps, those of the run when such a manifest
    is published. `of_base` is called only where a schedule has made fewer than `inner_steps`.
    """
    schedules = {name: schedule for name, each in stateful.items() if (schedule := torch_schedule(each)) is not None}
    counts = {name: _steps_of(schedule) for name, schedule in schedules.items()}
    behind = {name: count for name, count in counts.items() if count is not None and count < inner_steps}
    if not behind:
        return False
    follow: set[str] = set()
    for manifest in of_base():
        try:
            states = stateful_in(manifest.progress.stateful if manifest.progress else "", "a manifest of the base")
        except RecordInvalid:  # its author's own error
            continue
        follow |= {name for name in behind if _counted(states.get(name)) == published_at}
        if len(follow) == len(behind):
            break
    for name in sorted(follow):
        log.info("stateful %r: the schedule goes on at step %d; it had made %d", name, inner_steps, behind[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about a schedule that is stepped before its optimizer
            for _ in range(inner_steps - behind[name]):
                schedules[name].step()
    return bool(follow)


def _steps_of(schedule: LRScheduler) -> int | None:
    """The steps that a schedule has made; None for one that steps by a metric."""
    return None if isinstance(schedule, ReduceLROnPlateau) else _counted(schedule.state_dict())


def _counted(state: Any) -> int | None:
    """The count of steps in the state of a schedule; a `ChainedScheduler` has that of its first part. None without."""
    if not isinstance(state, Mapping):
        return None
    count = state.get("last_epoch")
    if count is None and state.get("_schedulers"):
        return _counted(state["_schedulers"][0])
    return count if isinstance(count, int) else None
