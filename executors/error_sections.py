"""`Documented`, the base of all errors: a traceback ends with the section of the docs about its error."""

TROUBLESHOOTING = "docs/reference/troubleshooting.md"  # has a section for each public type
_PACKAGES = ("diloco_orchestrator", "executors", "replica")


class Documented(Exception):
    """An error with a note, below the message in a traceback, that names the section of the docs about its type."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Indented, so that readers of a traceback do not take the line for the name of an error.
        self.add_note(f"  More: {section_of(type(self))}")


def section_of(kind: type[Exception]) -> str:
    """The section of the docs about an error type: that of its nearest public class that is defined in this project."""
    ours = (each for each in kind.__mro__ if each.__module__.partition(".")[0] in _PACKAGES)
    return f"{TROUBLESHOOTING}#{next(each.__name__ for each in ours if not each.__name__.startswith('_')).lower()}"
