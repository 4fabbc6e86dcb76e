"""Makes `executors` and `replica` importable as short names of `diloco_orchestrator.executors` and `….replica`.

Our own code uses the long names, which no file of a user can shadow. For users without files of these names `import
executors`, `import replica.context` and so on give the same module objects as the long names, so that a class is the
same class under both. A user's own `executors.py` or `replica/` is found before ours, and then this module does
nothing.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SHORT_NAMES = ("executors", "replica")


def _long(name: str) -> str:
    return f"diloco_orchestrator.{name}"


class _ShortNames(MetaPathFinder, Loader):
    """Import hook: resolves `executors.x` and `replica.x` to the modules below `diloco_orchestrator`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a submodule, whose loader returns the module of the long name; None for any other module."""
        top, _, below = fullname.partition(".")
        if top not in SHORT_NAMES or not below or below == "__main__":  # `python -m` needs a module of its own
            return None
        if sys.modules.get(top) is not sys.modules.get(_long(top)):
            return None  # a package of the user's has the name
        found = importlib.util.find_spec(_long(fullname))
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def exec_module(self, module: ModuleType) -> None:
        # What sys.modules holds after this call is what the import returns (importlib's documented hook).
        sys.modules[module.__name__] = importlib.import_module(_long(module.__name__))


def give_short_name(name: str) -> None:
    """Register `name` as a second name of our package. Its `__init__` calls this when imported by its short name."""
    if not any(isinstance(finder, _ShortNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ShortNames())
    sys.modules[name] = importlib.import_module(_long(name))
