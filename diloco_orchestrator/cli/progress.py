"""Shows a run to its end, for commands that launch or watch one: display, summary, exit code."""

import json
import math
from collections.abc import Callable
from shlex import quote
from typing import Any

import click

from diloco_orchestrator.cli.shared import EXIT_COMPLETED, EXIT_FAILED, EXIT_HALTED
from diloco_orchestrator.clock import Clock, SystemClock
from diloco_orchestrator.errors import RunFailed
from diloco_orchestrator.guard import CollapseStopError
from diloco_orchestrator.inspection.explain import go_on, why_still
from diloco_orchestrator.inspection.status import RunReader, RunStatus
from diloco_orchestrator.inspection.terminal import Console, display_for, lasting, log_to
from diloco_orchestrator.launching.run import Run, RunResult
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.store.base import Store

_EXIT_OF_STATE = {"completed": EXIT_COMPLETED, "failed": EXIT_FAILED, "halted": EXIT_HALTED}
_POLL_S = 1.0  # between two polls; most of them cost no request
_LONG_S = 60.0  # a poll that took so long has waited for the store


def follow(
    start: Callable[[], Run],
    *,
    as_json: bool,
    on_status: Callable[[RunStatus], None] | None = None,
    summarise: Callable[[RunResult, Console], None] | None = None,
) -> int:
    """Show the run that `start` launches or attaches to until it ends, and return the exit code.

    With `as_json` stdout gets one JSON object at the end and everything else goes to stderr. `on_status` is called with
    every status that was read; `summarise` prints the last lines. Raises `RunFailed`.
    """
    console = Console(stderr=as_json)
    log_to(console)
    run = start()
    lasting(lambda words: say(console, words))(f"run folder: {run.url}")
    try:
        _watch(run, console, on_status, below=8 if summarise is None else 15)
    except CollapseStopError:
        pass  # the result holds the verdict
    except RunFailed as error:
        if as_json:
            click.echo(json.dumps({"status": "failed", "url": run.url, "reason": str(error)}))
        raise
    result = run.result()
    (summarise or _summarise)(result, console)
    if as_json:
        click.echo(json.dumps(result.to_json()))
    return EXIT_COMPLETED if result.status == "completed" else EXIT_HALTED


def watch_until_stopped(store: Store, *, as_json: bool, clock: Clock | None = None) -> int:
    """Show a run, reading only, until it has stopped (its newest leg is over); returns the exit code.

    After an outage of the store, in which nobody could write either, the run's processes have `retry.hung_after_s` for
    a record before this says that nobody works on the run.
    """
    console, clock, said, trusts_at = Console(stderr=as_json), clock or SystemClock(), False, -math.inf
    if console.is_terminal:
        log_to(console)
    seen = SeenStore.of(store, clock)
    reader = RunReader(seen)
    with display_for(console, below=3) as show:
        while True:
            began = clock.now()
            status = reader.status()
            if status.state not in ("starting", "running"):
                break
            seen.follow(reader.log)
            show(status)
            if clock.now() - began > _LONG_S:
                trusts_at = clock.now() + status.hung_after_s
            still = why_still(status, clock.wall_time()) if clock.now() >= trusts_at else []
            if still and not said:
                say(console, "\n".join([*still, go_on(status)]))
            said = bool(still)
            clock.sleep(_POLL_S)
        seen.forget()
        show(status := reader.status())
    say(console, f"{status.state}: {status.reason}")
    if as_json:
        click.echo(json.dumps(status.to_json()))
    return _EXIT_OF_STATE[status.state]


def _watch(run: Run, console: Console, on_status: Callable[[RunStatus], None] | None, below: int) -> None:
    with display_for(console, below=below, supervises=True) as display:
        show = lasting(display)

        def on_poll() -> None:
            status = run.status(as_seen=True)
            show(status)
            if on_status is not None:
                on_status(status)

        run.wait(on_poll=on_poll)


def _summarise(result: RunResult, console: Console) -> None:
    say(console, f"{result.status}: {result.reason}")
    say(console, f"snapshot: {result.snapshot}")
    say(console, f"model:    {result.model.words()}")
    say(console, f"head:     {result.head}")
    how = "look at it: diloco status" if result.status == "completed" else "why, and how to go on: diloco explain"
    say(console, f"{how} {quote(result.url)}")


def say(console: Console, *parts: Any) -> None:
    """Print one line of text without markup, wrapped only by the terminal."""
    console.print(*parts, highlight=False, markup=False, soft_wrap=True)
