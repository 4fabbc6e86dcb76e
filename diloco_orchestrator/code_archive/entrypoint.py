"""Checks that a module's source defines a function, so that a misspelt one is found before machines are paid for."""

import ast
from pathlib import Path

from diloco_orchestrator.errors import ConfigError, nearest


def check_defined(entrypoint: str, source: Path) -> None:
    """Raise `ConfigError` if the module in `source` cannot have the function that `entrypoint` names.

    A module that fills itself in otherwise (`from x import *`, `__getattr__`) is taken at its word.
    """
    wanted = entrypoint.partition(":")[2].partition(".")[0]
    try:
        names = _top_level_names(ast.parse(source.read_text()))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"entrypoint {entrypoint!r}: {source} is not Python: {error}.") from None
    if wanted in names or names & {"*", "__getattr__"}:
        return
    close = nearest(wanted, names)
    hint = f"Did you mean {close!r}?" if close else "Check its spelling."
    raise ConfigError(f"entrypoint {entrypoint!r}: {source.name} defines no {wanted!r}. {hint}")


def _top_level_names(module: ast.Module) -> set[str]:
    """All names that a module may bind outside functions and classes, in any branch."""
    names: set[str] = set()
    todo: list[ast.AST] = list(module.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo += ast.iter_child_nodes(node)
    return names
