"""`Documented`, the base of all errors: a traceback ends with the places that explain its error."""

TROUBLESHOOTING = "docs/reference/troubleshooting.md"  # sections of public types; an installed `diloco explain` has it
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
    return f"More: diloco explain {name}, or {TROUBLESHOOTING}#{name.lower()}"
