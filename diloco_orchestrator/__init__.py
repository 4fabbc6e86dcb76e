"""DiLoCo training whose only infrastructure is a bucket.

Every public name is importable from here and is loaded at first use: importing this package loads no torch. The names
are listed in `__init__.pyi`.
"""

import sys

if sys.platform == "win32":
    raise ImportError("diloco-orchestrator runs on Linux and macOS. On Windows, install it in WSL 2 (`wsl --install`).")

from diloco_orchestrator.import_names import public_names
from diloco_orchestrator.protocol.version import VERSION

__version__ = VERSION


def __getattr__(name: str) -> object:
    names = public_names(__file__)
    if name == "__all__":
        return sorted(names)
    if name not in names:
        from diloco_orchestrator.errors import unknown_name

        raise AttributeError(unknown_name(f"name in {__name__}", name, names))
    from importlib import import_module

    try:
        return getattr(import_module(names[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        words = f"{name} needs {error.name}, which is not installed here: pip install 'diloco-orchestrator[train]'."
        raise ModuleNotFoundError(words, name=error.name) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *public_names(__file__)])
