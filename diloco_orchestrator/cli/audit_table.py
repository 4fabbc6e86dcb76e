"""The table of `diloco audit`: one line for each segment, printed as soon as it is known."""

from diloco_orchestrator.cli.shown import echo
from diloco_orchestrator.inspection.audit.findings import Audit, SegmentFinding

_COLUMNS = (("round", 7), ("replica", 9), ("steps", 7), ("state of", 10), ("s", 8))
_TITLE = "payload"


class AuditTable:
    """Prints head and seed of the draw, then a line for each finding. `silent`: prints nothing."""

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent

    def begin(self, drawn: Audit) -> None:
        """Print what the draw is made from."""
        if self._silent:
            return
        echo(f"log up to {drawn.head}, {drawn.segments} segments; the draw: --seed {drawn.seed}")
        echo("".join(f"{name:<{width}}" for name, width in _COLUMNS) + _TITLE)

    def row(self, found: SegmentFinding) -> None:
        """Print one finding."""
        if not self._silent:
            echo(row_of(found))


def row_of(found: SegmentFinding) -> str:
    """The line of one finding."""
    follows = f"round {found.follows}" if found.follows else "start"
    cells = (found.segment.round, found.segment.replica_id, found.steps, follows, f"{found.seconds:.1f}")
    line = "".join(f"{cell!s:<{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    bound = f" (bound {found.bound:.2g})" if found.bound is not None else ""
    away = f", distance {found.distance:.2g}{bound}" if found.distance else ""
    return f"{line}{found.outcome}{away}{f': {found.words}' if found.words else ''}"
