"""Import names of our packages and of the objects in them: public, registered and short names.

Public names: a package whose `__init__.pyi` lists them hands each one on at first use, so that importing the package
stays light, and type checkers read the same list.

Registered names: what can be added by other packages is found by the names of their entry points.

Short names: `executors` and `replica` stand for `diloco_orchestrator.executors` and `….replica`. Our own code uses the
long names, which no file of a user can shadow. For users without files of these names `import executors`, `import
replica.context` and so on give the same module objects as the long names, so that a class is the same class under both.
A user's own `executors.py` or `replica/` is found before ours, and then nothing is registered here.
"""

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SHORT_NAMES = ("executors", "replica")
T = TypeVar("T")


@functools.cache
def public_names(package_file: str) -> dict[str, str]:
    """A package's public names, each with the defining module, from the `__init__.pyi` beside `package_file`."""
    tree = ast.parse(Path(package_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def _long(name: str) -> str:
    return f"diloco_orchestrator.{name}"


def registered_names(group: str) -> list[str]:
    """Names that installed packages register under an entry point group."""
    from importlib.metadata import entry_points  # takes longer to import than all else that this package needs first

    return sorted({each.name for each in entry_points(group=group)})


def registered(kind: str, group: str, name: str, taken: bool = False) -> tuple[Any, str]:
    """(object that another package registers under `name`, text that says where: "command 'x' of package y (y.cli:x)").

    `kind`: what the object is, such as "command". `group`: of the entry points. Raises `LookupError` if no package
    registers the name, and ValueError if more than one does (`taken`: this package has it too) or if it does not load.
    """
    from importlib.metadata import entry_points

    found = list(entry_points(group=group, name=name))
    if not found:
        raise LookupError(name)
    owners = [*(["diloco-orchestrator"] if taken else []), *map(_package_of, found)]
    if len(owners) > 1:
        raise ValueError(
            f"{kind} {name!r} is registered by {' and '.join(sorted(owners))}, so that nobody can "
            "tell which one is meant. Uninstall all but one."
        )
    where = f"{kind} {name!r} of package {_package_of(found[0])} ({found[0].value})"
    try:
        return found[0].load(), where
    except (Exception, SystemExit) as error:  # the other package's code runs here, and may raise anything
        words = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where} does not load: {words}. Repair or uninstall that package.") from error


def registered_class(kind: str, group: str, name: str, base: type[T], taken: bool = False) -> type[T]:
    """The class derived from `base` that another package registers under `name`, which the class has as its `name`.

    Raises ValueError for any other object, for a class that lacks methods of `base`, and as `registered`, which
    describes the arguments.
    """
    found, where = registered(kind, group, name, taken)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{where} is no class derived from `{base.__name__}`. Repair that package, or name another.")
    if getattr(found, "name", None) != name:
        raise ValueError(
            f"{where} calls itself {getattr(found, 'name', None)!r}, and records hold that name. The package has to "
            "register it under its own name."
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"{where} lacks what `{base.__name__}` asks for: {', '.join(missing)}. Repair that package.")
    return found


def _package_of(entry: "EntryPoint") -> str:
    return entry.dist.name if entry.dist is not None else entry.value


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
    """Register `name` as a second name of our package. The package's `__init__` calls this if imported by that name."""
    if not any(isinstance(finder, _ShortNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ShortNames())
    sys.modules[name] = importlib.import_module(_long(name))
