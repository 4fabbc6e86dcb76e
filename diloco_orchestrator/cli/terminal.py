"""Shows a run on a terminal while it goes on: a live panel, or one plain line per round where there is no terminal.

Draws the statuses that `RunReader` read; knows no store and no executor.
"""

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_orchestrator.cli.console import Console
from diloco_orchestrator.inspection.status import ReplicaRow, RoundRow, RunStatus
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.protocol.verdict import Statistic

_SHOWN_ROUNDS = 10  # newest rounds in the live panel


class Display(Protocol):
    """Shows a run's statuses as they change. Used as a context manager around the polling loop."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, status: RunStatus) -> None:
        """Show the newest status of the run."""
        ...


def display_for(console: Console, *, supervises: bool = False) -> Display:
    """The live panel on a terminal, plain lines elsewhere.

    `supervises`: whether this process launches the replicas, and so logs how they end.
    """
    return LivePanel(console) if console.is_terminal else PlainLines(console, with_attempts=not supervises)


def log_to(console: Console) -> None:
    """Send this process's warnings and progress notes through `console`, so that they do not tear the panel."""
    handler: logging.Handler = logging.StreamHandler(console.file)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("botocore").setLevel(logging.WARNING)  # announces at every client where credentials are from


class LivePanel:
    """Progress, the newest rounds and the replicas, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, status: RunStatus) -> None:
        self._live.update(overview(status, _SHOWN_ROUNDS), refresh=True)


class PlainLines:
    """One line per round, one when attempts fail, and one when replicas begin another attempt; both say why.

    `with_attempts`: whether to print the latter two, of which each is one line for all replicas with the same words.
    """

    def __init__(self, console: Console, with_attempts: bool = True) -> None:
        self._console = console
        self._with_attempts = with_attempts
        self._rounds = 0
        self._attempts: dict[int, int] = {}
        self._failed: set[tuple[int, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, status: RunStatus) -> None:
        said: list[tuple[int, str]] = []
        for replica in status.replicas:
            if replica.attempt > self._attempts.get(replica.replica_id, 1):
                why = f", after {replica.why}" if replica.why else ""
                said.append((replica.replica_id, f": attempt {replica.attempt}{why}"))
            self._attempts[replica.replica_id] = replica.attempt
            who = replica.replica_id, replica.attempt
            if replica.exit_code not in (None, 0) and who not in self._failed:
                self._failed.add(who)
                said.append((replica.replica_id, f", attempt {replica.attempt} {replica.state}"))
        for ids, words in grouped(said) if self._with_attempts else ():
            self._print(f"{replicas(ids)}{words}")
        for row in status.rounds[self._rounds :]:
            self._print(round_line(row, status.outer_steps))
        self._rounds = len(status.rounds)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def round_line(row: RoundRow, outer_steps: int) -> str:
    """A round as one line of text: metrics, bytes moved, seconds, what is unusual. `outer_steps`: of the whole run."""
    parts = [f"round {row.round}", f"outer step {row.outer_step}/{outer_steps}"]
    parts += [f"loss {row.loss:.3f}"] if row.loss is not None else []
    parts += [f"reward {row.reward:.3f}"] if row.reward is not None else []
    parts += [f"held-out before {row.heldout:.3f}"] if row.heldout is not None else []
    nearest = max(row.statistics, key=lambda each: each.share, default=None)
    if nearest is not None and nearest.share > 0:
        parts.append(f"guard: {nearest.name} {nearest.value:.3g} of {nearest.threshold:g}")
    parts += [f"up {megabytes(row.bytes_up)}, down {megabytes(row.bytes_down)}", f"{row.train_s:.1f} s"]
    return "  ".join(parts) + (f"  ({_remark(row)})" if _remark(row) else "")


def overview(status: RunStatus, rounds: int) -> RenderableType:
    """A run's state, its newest `rounds` rounds and its replicas, for one screen."""
    parts: list[RenderableType] = [_headline(status)]
    if status.rounds:
        parts += [Text(), _rounds_table(status, rounds)]
    if status.verdict is not None and status.verdict.statistics:
        parts += [Text(), _guard_table(status.verdict.statistics)]
    if status.replicas:
        parts += [Text(), _replicas_table(status.replicas, _metric(status))]
    return Group(*parts)


def _headline(status: RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    moved = sum(row.bytes_up + row.bytes_down for row in status.rounds)
    grid.add_row(
        Text(status.state, style=_STATE_STYLE.get(status.state, "")),
        ProgressBar(total=status.outer_steps, completed=status.outer_step, width=30),
        f"{status.outer_step}/{status.outer_steps} outer steps, {megabytes(moved)} moved",
    )
    cost = status.spent.words() if status.spent else ""
    ahead = status.to_the_end.words() if status.to_the_end else ""
    about = "; ".join(words for words in (f"{status.url}: {status.reason}", cost, ahead) if words)
    head = [f"head: {Head.parse(status.head).short}"] if status.head else []
    lines = [Text(words, style="dim", overflow="fold") for words in (about, *head, *_of_leg(status))]
    return Group(grid, *lines)


def _of_leg(status: RunStatus) -> list[str]:
    """What sets the newest leg apart, one line each: an overridden guard, settings, the model after a halt."""
    changed = ", ".join(f"{name}={value}" for name, value in status.settings.items())
    lines = [f"leg {status.leg}: the guard began anew: {status.override_guard}"] if status.override_guard else []
    lines += [f"leg {status.leg} has other settings: {changed}"] if changed else []
    return lines + ([f"model: {status.model.words()}"] if status.model.after_verdict else [])


_STATE_STYLE = {"running": "cyan", "completed": "green", "halted": "yellow", "failed": "red"}


def _rounds_table(status: RunStatus, shown: int) -> Table:
    table = _table("round", _metric(status), "held-out before", "gap", "up", "down", "seconds")
    table.add_column("", overflow="fold")
    for row in status.rounds[-shown:]:
        remark = _remark(row)
        table.add_row(
            str(row.round),
            _number(row.loss if row.loss is not None else row.reward),
            _number(row.heldout),
            _number(row.proxy_real_gap),
            megabytes(row.bytes_up),
            megabytes(row.bytes_down),
            f"{row.train_s:.1f}",
            row.stop if remark == status.reason else remark,  # the headline has the reason
        )
    return table


def _metric(status: RunStatus) -> str:
    """The name of the training metric that the tables show."""
    rewarded = any(row.reward is not None for row in status.rounds)
    return "reward" if rewarded and all(row.loss is None for row in status.rounds) else "loss"


def _remark(row: RoundRow) -> str:
    """What is unusual about a round: not applied, replicas missing, late steps, a warning; empty if nothing is."""
    if row.stop != "none" or not row.applied:
        return row.reason
    remarks = [f"without {', '.join(map(str, row.without))}"] if row.without else []
    remarks += [f"replica {replica_id} {why}" for replica_id, why in sorted(row.judgements.items())]
    remarks += [f"{row.late_steps} late inner steps came in"] if row.late_steps else []
    remarks += [f"{row.dropped_steps} late inner steps dropped"] if row.dropped_steps else []
    return "; ".join([*remarks, *([row.warning] if row.warning else [])])


def _guard_table(statistics: Sequence[Statistic]) -> Table:
    """Each statistic of the guard against the threshold above which it stops the run."""
    table = _table("guard")
    for name in ("", "value", "stops above"):
        table.add_column(name, justify="right")
    for each in statistics:
        bar = ProgressBar(total=1.0, completed=min(each.share, 1.0), width=20)
        table.add_row(each.name, bar, f"{each.value:.3g}", f"{each.threshold:g}")
    return table


def _replicas_table(replicas: list[ReplicaRow], metric: str) -> Table:
    table = _table("replica", "attempt", "round", "inner step", metric)
    table.add_column("state", overflow="fold")
    for replica in replicas:
        table.add_row(
            str(replica.replica_id),
            str(replica.attempt),
            str(replica.round or "-"),
            str(replica.inner_step),
            _number(replica.loss),
            replica.state,
        )
    return table


def _table(*numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def megabytes(count: int) -> str:
    """A number of bytes as text in MB (10^6 bytes)."""
    return f"{count / 1e6:.1f} MB"
