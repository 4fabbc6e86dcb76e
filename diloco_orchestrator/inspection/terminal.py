"""Shows a run while it goes on: a live panel on a terminal or in a notebook, elsewhere one plain line per round.

Draws the statuses that `RunReader` read; uses no store and no executor.
"""

import io
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TypeVar

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from diloco_orchestrator.inspection.doctor import Finding
from diloco_orchestrator.inspection.status import ReplicaRow, RoundRow, RunStatus
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.protocol.verdict import Statistic
from diloco_orchestrator.redaction import shown

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHOWN_ROUNDS = 10  # newest rounds in the live panel
_SHOWN_UNREADABLE = 3


class Console(rich.console.Console):
    """A console of rich without markup and highlighting, which replaces control characters in all text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(
        self, renderable: RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are rich's own, such as those that redraw a live table.
            yield segment if segment.control else Segment(shown(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise the `BrokenPipeError` that is being handled: rich itself would end the process."""
        raise


def lasting(draw: Callable[[T], None]) -> Callable[[T], None]:
    """A function that calls `draw` until that raises `OSError`, which is logged, and nothing from then on.

    A pipe that nobody reads any more, or a full disk below the output, must not end a process that supervises a run:
    its replicas would go on, and cost money without a limit.
    """
    broken = False

    def drawn(what: T) -> None:
        nonlocal broken
        if broken:
            return
        try:
            draw(what)
        except OSError as error:
            broken = True
            log.warning("nothing is shown here any more, and supervision goes on: %s", error)

    return drawn


Show = Callable[[RunStatus], None]  # shows the newest status of a run


@contextmanager
def display_for(console: Console, *, below: int, supervises: bool = False) -> Iterator[Show]:
    """Context that shows a run while it goes on: yields what to call with each status that was read.

    A live panel on a terminal, plain lines elsewhere. `below`: lines that follow the last drawing, the prompt included.
    `supervises`: whether this process also logs how replicas end.
    """
    if console.is_terminal:
        with live_panel(console, below) as show:
            yield show
    else:
        yield PlainLines(console, with_attempts=not supervises).show


def log_to(console: Console) -> None:
    """Send this process's log, from INFO on, to `console`, which prints its lines above a live display, not into it."""
    handler: logging.Handler = logging.StreamHandler(console.file)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)
    for announcer in ("botocore", "aiobotocore"):  # at every client where credentials are from
        logging.getLogger(announcer).setLevel(logging.WARNING)


@contextmanager
def live_panel(console: Console, below: int) -> Iterator[Show]:
    """Context with a run's progress, replicas and newest rounds on a terminal, redrawn in place by what it yields.

    The last drawing stays on the screen. `below`: lines that will be printed under it, the prompt included.
    """
    live = Live(console=console, auto_refresh=False)

    def show(status: RunStatus) -> None:
        height = console.size.height - (below if status.state in _ENDS else 1)
        live.update(fitted(status, console, height), refresh=True)

    live.start()
    try:
        yield show
    finally:
        with suppress(OSError):  # of a screen that is gone
            live.stop()


class NotebookPanel:
    """The live panel as the output of a notebook's cell, redrawn in place. The last drawing stays with the notebook."""

    def __init__(self) -> None:
        # By its name, so that mypy does not look for IPython, which only notebooks have.
        self._output = import_module("IPython.display").display({}, raw=True, display_id=True)
        self._drawn = ""

    def show(self, status: RunStatus) -> None:
        options = {"width": _NOTEBOOK_COLUMNS, "color_system": "standard", "force_jupyter": False}
        console = Console(
            file=io.StringIO(), record=True, **options
        )  # a console in Jupyter prints into the cell itself
        console.print(fitted(status, console, _NOTEBOOK_LINES))
        html = console.export_html(inline_styles=True, code_format=_IN_A_CELL, clear=False)
        if html != self._drawn:
            self._output.update({"text/plain": console.export_text().rstrip(), "text/html": html}, raw=True)
            self._drawn = html


_NOTEBOOK_COLUMNS, _NOTEBOOK_LINES = 115, 40
_IN_A_CELL = "<pre style='line-height: normal'>{code}</pre>"


@contextmanager
def drawn_live(read: Callable[[], RunStatus]) -> Iterator[Callable[[], None] | None]:
    """Context with a live panel in a notebook's cell or on stderr: yields what draws the status returned by `read`.

    Yields None where there is neither a notebook nor a terminal.
    """
    console = Console(stderr=True)
    if console.is_jupyter:
        notebook = NotebookPanel()
        yield lambda: notebook.show(read())
    elif console.is_terminal:
        with live_panel(console, below=2) as show:
            draw = lasting(show)
            yield lambda: draw(read())
    else:
        yield None


_ENDS = ("completed", "halted", "failed")
_ROUND_AND_GUARD, _ROOMY = 5, 20  # lines for the newest round and the guard, on a screen that has at least so many


def fitted(status: RunStatus, console: Console, height: int) -> RenderableType:
    """A run's status on a screen of `height` lines: headline, all replicas, then as many rounds and guard lines as fit.

    The guard gets a table if that leaves half of the lines below the replicas to rounds, else one line for the
    statistic closest to its threshold. A fleet that does not fit is shown by its unusual replicas and a count of the
    others.
    """
    head = _headline(status)
    lines = height - _lines(console, head)
    parts: list[RenderableType] = [head]
    if status.replicas:
        reserved = _ROUND_AND_GUARD if height >= _ROOMY else 0
        shown = _replicas_table(status, most=max(2, lines - 2 - reserved))
        parts += [Text(), shown]
        lines -= 1 + _lines(console, shown)
    statistics = status.verdict.statistics if status.verdict is not None else ()
    guard: RenderableType | None = _guard_table(statistics) if statistics else None
    if guard is not None and 2 * (1 + _lines(console, guard)) > lines:
        guard = _nearest(statistics)
    lines -= 1 + _lines(console, guard) if guard is not None else 0
    newest = min(len(status.rounds), _SHOWN_ROUNDS)
    while newest and 1 + _lines(console, table := _rounds_table(status, newest)) > lines:
        newest -= 1
    if newest:
        parts += [Text(), table]
    if guard is not None and lines >= 0:
        parts += [Text(), guard]
    return Group(*parts)


def _lines(console: Console, part: RenderableType) -> int:
    return len(console.render_lines(part, pad=False))


class PlainLines:
    """A display of a run as text lines: one per round, and what the first round waits for, or that the disk is full.

    `with_attempts`: whether to print how attempts fail and begin too, each one line for all replicas with the same
    text.
    """

    def __init__(self, console: Console, with_attempts: bool = True) -> None:
        self._console = console
        self._with_attempts = with_attempts
        self._rounds = 0
        self._attempts: dict[int, int] = {}
        self._failed: set[tuple[int, int]] = set()
        self._no_room = False  # as of the newest status
        self._waits: set[str] = set()  # what the slowest waited for before the first round, as printed

    def show(self, status: RunStatus) -> None:
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
        if status.no_room and not self._no_room:
            self._print(f"nobody can write: {status.no_room}")
        self._no_room = bool(status.no_room)
        for ids, words in _furthest_from_training(status):
            if words not in self._waits:
                self._waits.add(words)
                self._print(f"{replicas(ids)}: {words}")
        # A run that somebody begins to watch later, or has resumed: of its new leg there is no round yet.
        is_resumed = status.state == "starting" and status.leg > 1
        before = len(status.rounds) - (0 if is_resumed else _SHOWN_ROUNDS)
        if not self._rounds and before > 0:
            self._print(f"rounds {status.rounds[0].round} to {status.rounds[before - 1].round} came before")
        for row in status.rounds[self._rounds or max(before, 0) :]:
            # Why the run has stopped is printed below its rounds by whoever shows it.
            self._print(round_line(row, status.outer_steps, known=status.reason if row.stop != "none" else ""))
        if not self._rounds and _is_unscored(status):
            self._print(_UNSCORED)
        self._rounds = len(status.rounds)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _furthest_from_training(status: RunStatus) -> list[tuple[Sequence[int], str]]:
    """Replicas that need longest until they train, by what they wait for; empty once a round is committed."""
    alive = [each for each in status.replicas if status.state == "starting" and each.state in _BEFORE_TRAINING]
    last = min((_BEFORE_TRAINING.index(each.state) for each in alive), default=0)
    return grouped((each.replica_id, each.words()) for each in alive if each.state == _BEFORE_TRAINING[last])


_UNSCORED = "no held-out score is taken: the kill-switch is off"


def _is_unscored(status: RunStatus) -> bool:
    return any(row.applied for row in status.rounds) and all(row.heldout is None for row in status.rounds)


_BEFORE_TRAINING = ("launching", "starting", "scoring", "training")


def round_line(row: RoundRow, outer_steps: int, known: str = "") -> str:
    """A round as one line of text: metrics, bytes moved, seconds, and unless it is `known`, what is unusual.

    `outer_steps`: with which the newest leg ends; a leg that was given up may have taken more.
    """
    of = f"/{outer_steps}" if row.outer_step <= outer_steps else ""
    parts = [f"round {row.round}", f"outer step {row.outer_step}{of}"]
    parts += [f"loss {row.loss:.3f}"] if row.loss is not None else []
    parts += [f"reward {row.reward:.3f}"] if row.reward is not None else []
    parts += [f"held-out before {row.heldout:.3f}"] if row.heldout is not None else []
    nearest = max(row.statistics, key=lambda each: each.share, default=None)
    if nearest is not None and nearest.share > 0:
        parts.append(f"guard: {nearest.name} {nearest.value:.3g} of {nearest.threshold:g}")
    parts += [f"up {megabytes(row.bytes_up)}, down {megabytes(row.bytes_down)}", f"{row.train_s:.1f} s"]
    remark = row.remark()
    return "  ".join(parts) + (f"  ({remark})" if remark and remark != known else "")


def overview(status: RunStatus, rounds: int, still: Sequence[str] = ()) -> RenderableType:
    """A run's state, its replicas, the guard and its newest `rounds` rounds, whatever the height of the screen.

    `still`: sentences saying that no process works on the run (`inspection.explain`), or empty.
    """
    parts: list[RenderableType] = [_headline(status, still)]
    if status.replicas:
        parts += [Text(), _replicas_table(status)]
    if status.verdict is not None and status.verdict.statistics:
        parts += [Text(), _guard_table(status.verdict.statistics)]
        parts += (
            [Text(f"the guard {status.outlook}", style="dim")] if status.outlook and status.state == "running" else []
        )
    parts += [Text(), Text(_UNSCORED, style="dim")] if _is_unscored(status) else []
    if status.rounds:
        parts += [Text(), _rounds_table(status, rounds)]
    return Group(*parts)


def _headline(status: RunStatus, still: Sequence[str] = ()) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    moved = sum(row.bytes_up + row.bytes_down for row in status.rounds)
    grid.add_row(
        Text("stands still", style="red") if still else Text(status.state, style=_STATE_STYLE.get(status.state, "")),
        ProgressBar(total=status.outer_steps, completed=status.outer_step, width=30),
        f"{status.outer_step}/{status.outer_steps} outer steps, {megabytes(moved)} moved",
    )
    cost = status.spent.words() if status.spent else ""
    ahead = status.to_the_end.words() if status.to_the_end and not still else ""
    about = "; ".join(words for words in (f"{status.url}: {status.reason}", cost, ahead) if words)
    head = [f"head: {Head.parse(status.head).short}"] if status.head else []
    head += [f"signed by: {status.signed_by}"] if status.signed_by else []
    lines = [
        Text(words, style="dim", overflow="fold") for words in (about, *head, *_of_leg(status), *_passed_over(status))
    ]
    no_room = [Text(f"nobody can write: {status.no_room}", style="red", overflow="fold")] if status.no_room else []
    return Group(grid, *lines, *no_room, *(Text(words, overflow="fold") for words in still))


def _of_leg(status: RunStatus) -> list[str]:
    """Peculiarities since the last start or resume, one line each: guard, settings, places, model after a halt."""
    changed = ", ".join(f"{name}={value}" for name, value in status.settings.items())
    lines = [f"leg {status.leg}: the guard began anew: {status.override_guard}"] if status.override_guard else []
    lines += [f"leg {status.leg} has other settings: {changed}"] if changed else []
    lines += status.place_words()
    return lines + ([f"model: {status.model.words()}"] if status.model.after_verdict else [])


def _passed_over(status: RunStatus) -> list[str]:
    """The first objects of the run that were ignored as unreadable, one line each, and the number of the others."""
    found = status.unreadable
    more = [f"passed over: {len(found) - _SHOWN_UNREADABLE} more"] if len(found) > _SHOWN_UNREADABLE else []
    return [f"passed over: {words}" for words in found[:_SHOWN_UNREADABLE]] + more


_LONG = 40  # characters of a remark that is not repeated for the next round
_STATE_STYLE = {"running": "cyan", "completed": "green", "halted": "yellow", "failed": "red"}


def _rounds_table(status: RunStatus, shown: int) -> Table:
    table = _table("round", _metric(status), "held-out before", "gap", "up", "down", "seconds")
    table.add_column("", overflow="fold")
    remarks: dict[str, int] = {}  # by words: the first round shown that has them
    for row in status.rounds[-shown:]:
        remark, long = row.remark(), len(row.remark()) > _LONG
        if long and remarks.setdefault(remark, row.round) != row.round:
            remark = f"as in round {remarks[remark]}"
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
    rewarded = any(row.reward is not None for row in status.rounds)
    return "reward" if rewarded and all(row.loss is None for row in status.rounds) else "loss"


def _nearest(statistics: Sequence[Statistic]) -> RenderableType:
    """One line about the guard: the statistic closest to its threshold."""
    near = max(statistics, key=lambda each: each.share)
    if near.share <= 0:
        return Text("guard: every statistic is at 0; a run stops above a threshold", style="dim")
    return Text(f"guard: {near.name} {near.value:.3g}, stops above {near.threshold:g}")


def _guard_table(statistics: Sequence[Statistic]) -> Table:
    table = _table("guard")
    for name in ("", "value", "stops above"):
        table.add_column(name, justify="right")
    for each in statistics:
        bar = ProgressBar(total=1.0, completed=min(each.share, 1.0), width=20)
        table.add_row(each.name, bar, f"{each.value:.3g}", f"{each.threshold:g}")
    return table


_USUAL = ("starting", "training", "scoring", "publishing", "waiting", "snapshot")


def _replicas_table(status: RunStatus, most: int | None = None) -> Table:
    """A table row for each replica; if more than `most`, those in unusual states first, and a count of the rest."""
    replicas, stopped = status.replicas, status.state not in ("starting", "running")
    shown, rest = replicas, list[ReplicaRow]()
    if most is not None and len(replicas) > most:
        unusual_first = sorted(replicas, key=lambda replica: (replica.state in _USUAL, replica.replica_id))
        shown, rest = unusual_first[: most - 1], unusual_first[most - 1 :]
    table = _table("replica", "attempt", "round", "inner step", _metric(status))
    table.add_column("state", overflow="fold")
    for replica in shown:
        table.add_row(
            f"{replica.replica_id}" + (f" ({replica.ranks} ranks)" if replica.ranks > 1 else ""),
            str(replica.attempt),
            str(max(replica.round, replica.ended_after) or "-"),
            str(replica.inner_step) if replica.round >= replica.ended_after else "-",
            _number(replica.loss),
            replica.words(stopped=stopped),
        )
    if rest:
        states = Counter(replica.state for replica in rest)
        counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        table.add_row(f"{len(rest)} more", "", "", "", "", counted)
    return table


def _table(*numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def megabytes(count: int) -> str:
    """A number of bytes as text in MB (10^6 bytes), in kB where it would read 0.0 MB; of nothing "0 B"."""
    if not count:
        return "0 B"
    return f"{count / 1e3:.1f} kB" if 0 < count < 50_000 else f"{count / 1e6:.1f} MB"


def finding_lines(finding: Finding) -> Text:
    """One check of `diloco doctor`: its mark, name and finding in a line, and below it what to do where it failed."""
    mark = ("ok  ", "green") if finding.ok else ("FAIL", "bold red")
    line = Text.assemble(mark, f"  {finding.name:<14} {finding.detail}")
    return line.append(f"\n      {finding.todo}", style="" if finding.ok else "bold") if finding.todo else line
