"""rich's console for text of the bucket, which can neither move the terminal nor be taken for markup."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from diloco_orchestrator.cli.shown import shown


class Console(rich.console.Console):
    """rich's console without markup and highlighting in strings, whose text is printed as `shown` returns it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are rich's own, such as those that redraw a live table.
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
