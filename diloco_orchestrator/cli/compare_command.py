"""`diloco compare`: several runs in one table on the screen, and on one page with their curves."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco_orchestrator.cli.shared import EXIT_COMPLETED, EXIT_FAILED, echo, json_option, reader_of

if TYPE_CHECKING:
    from rich.table import Table

    from diloco_orchestrator.inspection.comparison import ComparedRun, Comparison, Point


@click.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option(
    "--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with their curves there, too."
)
@json_option
def compare(urls: tuple[str, ...], page: Path | None, as_json: bool) -> int:
    """Compare runs in one table: scores, rounds, tokens, hours, bytes, dollars, and the settings that differ.

    A run that cannot be read is named, the others are shown, and the exit code is 1.
    """
    from diloco_orchestrator.inspection.comparison import compare as compared
    from diloco_orchestrator.inspection.terminal import Console

    found = compared(urls, reader_of)
    if page is not None:
        page.write_text(html_of(found), encoding="utf-8")
    if as_json:
        echo(json.dumps(found.to_json()))
    else:
        if found.runs:
            Console().print(_table_of(found))
        for line in [
            *found.bits(),
            *found.warnings(),
            *(f"{url} is not shown: {why}" for url, why in found.missing.items()),
        ]:
            echo(line)
    return EXIT_FAILED if found.missing else EXIT_COMPLETED


def _figures(found: "Comparison") -> list[tuple[str, list[str]]]:
    """The rows of the comparison's table beside the settings: name and one value per run."""
    figures = [_figures_of(run) for run in found.runs]
    return [(name, [each[name] for each in figures]) for name in (figures[0] if figures else ())]


def _figures_of(run: "ComparedRun") -> dict[str, str]:
    from diloco_orchestrator.inspection.costs import duration
    from diloco_orchestrator.inspection.terminal import megabytes

    last = "not scored" if run.final is None else f"{run.final:.4f} ({_UNITS[run.metric]})"
    unknown = f" and {run.unpriced} attempts of unknown price" if run.unpriced else ""
    return {
        "state": f"{run.state}: {run.reason}",
        "held-out, last": last,
        "held-out, best": "not scored" if run.best is None else f"{run.best:.4f}, after round {run.best_round}",
        "outer steps": f"{run.outer_steps}",
        "tokens": f"{run.tokens:,}" if run.tokens else "not observed",
        "took": duration(run.hours * 3600),
        "payload moved": megabytes(run.bytes),
        "cost": "price not known" if run.usd is None else f"${run.usd:.2f}{unknown}",
        "guard": run.verdict,
    }


_UNITS = {"loss": "loss, nats per token", "reward": "reward"}


def _table_of(found: "Comparison") -> "Table":
    from rich.table import Table

    drawn = Table("", *(run.name for run in found.runs), pad_edge=False)
    for name, values in _figures(found):
        drawn.add_row(name, *values)
    drawn.add_section()
    for name, values in found.differing().items():
        drawn.add_row(f"  {name}", *values)
    return drawn


def html_of(found: "Comparison") -> str:
    """The HTML page of a comparison: a table, and curves over rounds, tokens and dollars for each metric."""
    from diloco_orchestrator.cli.html_page import document, section, table

    head = ["", *(run.name for run in found.runs)]
    figures = [("address", [run.url for run in found.runs]), *_figures(found)]
    sections = [
        table(head, [(name, *values) for name, values in figures]) if found.runs else "",
        section("Settings", table(head, [(n, *values) for n, values in found.differing().items()]), "that differ"),
        section("Bits", table(("",), [(words,) for words in found.bits()]), "by the digests of their bases"),
        section("Not comparable", table(("",), [(words,) for words in found.warnings()]), ""),
        section("Not shown", table(("run", "why"), list(found.missing.items())), "these runs could not be read"),
    ]
    for metric in found.metrics():
        runs = [run for run in found.runs if run.metric == metric]
        words = "score of the base that each round began with"
        sections.append(section(f"Held-out {metric}", _charts(runs, lambda run: run.heldout), words))
    for metric in sorted({name for run in found.runs for name in run.training}):
        drawn = _charts(found.runs, lambda run, metric=metric: run.training.get(metric, ()))  # type: ignore[misc]
        sections.append(section(f"Training {metric}", drawn, "mean of each round over the replicas that were averaged"))
    return document(f"{len(found.runs)} runs compared", sections)


def _charts(runs: Sequence["ComparedRun"], points: Callable[["ComparedRun"], Sequence["Point"]]) -> str:
    """The curves of compared runs over rounds, tokens and dollars; without axes of which no run has values."""
    from diloco_orchestrator.inspection.charts import DOLLARS, ROUNDS, TOKENS, Line, chart

    drawn = ""
    for axis, x_of in (
        (ROUNDS, lambda point: float(point.round)),
        (TOKENS, lambda point: float(point.tokens)),
        (DOLLARS, lambda point: point.usd),
    ):
        lines = [Line(run.name, [(x, p.value) for p in points(run) if (x := x_of(p)) is not None]) for run in runs]
        if any(x > 0 for line in lines for x, _ in line.points):  # nothing observed tokens, or every price is 0
            drawn += chart(lines, axis=axis)
    return drawn
