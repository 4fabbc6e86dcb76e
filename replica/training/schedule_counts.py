"""Learning-rate schedules that go on where the run is, also after missed rounds and rounds that were not applied.

A schedule in `stateful` counts the steps that its own replica took. After rounds that were committed without the
replica, it has made fewer than those of the others, whose learning rates are then further down. After a round that was
not applied, which all train again, it has made more than the run: it would be at its end before the run is.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.training.small_state import (
    SmallState,
    rates_in,
    stateful_in,
    states_in,
    torch_schedule,
)

log = logging.getLogger(__name__)


def catch_up(
    stateful: Mapping[str, Any], inner_steps: int, of_base: Callable[[], Iterable[Contribution]], published_at: int
) -> bool:
    """Step torch's schedules until each has made `inner_steps` steps, those of the run so far. Returns whether any was.

    Only a schedule that is stepped once in each inner step is: the one of the same name in one of the manifests
    `of_base`, which made the newest base, had made exactly `published_at` steps, those of the run when such a manifest
    is published. `of_base` is called only where a schedule has made fewer than `inner_steps`.
    """
    behind = {name: count for name, count in _counts(stateful).items() if count < inner_steps}
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
        _step(stateful[name], inner_steps - behind[name])
    return bool(follow)


def go_back(
    stateful: Mapping[str, Any], small: SmallState, inner_steps: int, made: Iterable[tuple[Mapping[str, Any], int]]
) -> bool:
    """Set torch's schedules that have made more than `inner_steps` steps, those of the run so far, back to these.

    Returns whether any was. Only a schedule that is stepped once in each inner step is: one in `made`, earlier rates of
    this replica (`SmallState.rates`), newest first, with the run's inner steps at that time, had made exactly these.
    What they set in their optimizers goes back with them. `made` is only read where a schedule has made more than
    `inner_steps`.
    """
    ahead = {name: count for name, count in _counts(stateful).items() if count > inner_steps}
    for rates, steps in made if ahead else ():
        back = sorted(name for name in ahead if _counted(states_in(rates).get(name)) == steps)
        if not back:
            continue
        small.set_rates(rates, back, alone=True)
        for name in back:
            log.info("stateful %r: the schedule goes back to step %d; it had made %d", name, inner_steps, ahead[name])
            _step(stateful[name], inner_steps - steps)
        return True
    return False


def earlier_rates(
    applied: Iterable[tuple[Contribution, int]], first: Mapping[str, Any] | None
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Rates in manifests of this replica, each with the run's inner steps beside it; then `first`, at step 0."""
    for manifest, steps in applied:
        with suppress(RecordInvalid):
            yield rates_in(manifest.progress.stateful if manifest.progress else "", "a manifest of this replica"), steps
    if first is not None:
        yield first, 0


def _counts(stateful: Mapping[str, Any]) -> dict[str, int]:
    """The steps that each of torch's schedules has made, by name; without those that do not count their steps."""
    schedules = {name: schedule for name, each in stateful.items() if (schedule := torch_schedule(each)) is not None}
    counts = {name: _steps_of(schedule) for name, schedule in schedules.items()}
    return {name: count for name, count in counts.items() if count is not None}


def _step(given: Any, times: int) -> None:
    schedule = torch_schedule(given)
    assert schedule is not None, "schedules of torch alone are counted"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about a schedule that is stepped before its optimizer
        for _ in range(times):
            schedule.step()


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
