"""`Documented`, the base of all errors: a traceback ends with the places that explain its error.

`error_line` reads the error out of such a traceback.
"""

TROUBLESHOOTING = "docs/reference/troubleshooting.md"  # sections of public types; an installed `diloco explain` has it
_MORE = "More: "
_PACKAGES = ("diloco_orchestrator", "executors", "replica")


class Documented(Exception):
    """An error with a note, below the message in a traceback, that names the places that explain its type."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Indented, so that readers of a traceback do not take the line for the name of an error.
        self.add_note(f"  {more_about(type(self))}")


def more_about(kind: type[Exception]) -> str:
    """The line that names a command and a section of the docs about an error type: its nearest public class of ours."""
    ours = (each for each in kind.__mro__ if each.__module__.partition(".")[0] in _PACKAGES)
    name = next(each.__name__ for each in ours if not each.__name__.startswith("_"))
    return f"{_MORE}diloco explain {name}, or {TROUBLESHOOTING}#{name.lower()}"


def error_line(traceback: str) -> str:
    """Type and message at the end of a traceback, in one line, without the places that explain it; "" for ""."""
    lines = [line for line in traceback.splitlines() if line.strip() and not line.startswith(f"  {_MORE}")]
    heads = [i for i, line in enumerate(lines) if not line.startswith((" ", "\t"))] or [0]
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    head = next((i for i in heads if frames and i > frames[-1]), heads[-1])  # a message may have several lines
    return " ".join(line.strip() for line in lines[head:])
