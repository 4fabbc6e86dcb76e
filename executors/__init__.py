"""Executors launch replicas on machines of some provider. Imports nothing else of the project.

Classes load at first use; `__init__.pyi` lists their names.
"""

import importlib
from typing import Any

from diloco_orchestrator.executors.names import unknown_name
from diloco_orchestrator.import_names import give_short_name, public_names


def __getattr__(name: str) -> Any:
    names = public_names(__file__)
    if name not in names:
        raise AttributeError(unknown_name("name in executors", name, names))
    return getattr(importlib.import_module(names[name]), name)


def __dir__() -> list[str]:
    return sorted(public_names(__file__))


if __name__ == "executors":  # imported by the short name
    give_short_name(__name__)
