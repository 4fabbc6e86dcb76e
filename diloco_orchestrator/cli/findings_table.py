"""The table of `diloco doctor`: what was checked, what was found, what to do."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from diloco_orchestrator.inspection.machine_checks import Finding


def findings_table(found: Sequence[Finding]) -> Table:
    """One row for each finding."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("check", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for each in found:
        mark = Text("ok", style="green") if each.ok else Text("FAIL", style="bold red")
        table.add_row(mark, Text(each.name), Text(each.detail), Text(each.todo, style="" if each.ok else "bold"))
    return table
