"""Turns the training function into its importable name, and checks before launch that replicas can import it."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import ConfigError, nearest


def entrypoint_of(function: Callable[..., Any]) -> str:
    """The "module:function" under which replicas import `function`.

    Raises `ConfigError` with the remedy for an object that other processes cannot import by name: a function of
    `__main__`, a lambda, a function defined inside another, or anything that is not a function.
    """
    if not inspect.isfunction(function):
        raise ConfigError(
            f"{function!r} is a {type(function).__name__}, not a function that replicas could import by name. Define a "
            "function with `def` at the top level of a module, and pass that."
        )
    module, name = function.__module__, function.__qualname__
    where = f"{Path(function.__code__.co_filename).name}, line {function.__code__.co_firstlineno}"
    if "<lambda>" in name:
        raise ConfigError(
            f"a lambda ({where}) has no name by which replicas could import it. Define it with `def` at the top level "
            "of a module."
        )
    if "<locals>" in name:
        raise ConfigError(
            f"{name} ({where}) is defined inside another function, where replicas cannot import it. Move it to the top "
            "level of its module, and hand over what it closes over with args={…}: it arrives as ctx.args."
        )
    if module == "__main__":
        raise ConfigError(_defined_in_main(name))
    if module not in sys.modules:
        raise ConfigError(
            f"{name} ({where}) is of no imported module, as functions made by exec are, so that replicas cannot import "
            "it. Put its source into a file, such as train.py, then `from train import "
            f"{name}` and pass that."
        )
    if _found(module, name) is not function:
        raise ConfigError(
            f"{module}:{name} is another object than the function that was passed ({where}); replicas would import "
            'that one. Pass the name under which it can be imported, "package.module:function".'
        )
    return f"{module}:{name}"


def _defined_in_main(name: str) -> str:
    """The text of the error about a function of the running program itself, which has no importable name."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    stem = Path(file).stem if file else ""
    if stem.isidentifier():
        return (
            f"{name} is defined in the program that runs, which replicas cannot import as `__main__`. Pass "
            f'"{stem}:{name}" instead, and call launch below `if __name__ == "__main__":`, so that importing {stem}.py '
            "launches nothing."
        )
    return (
        f"{name} is defined in this session (`__main__`), which replicas cannot import. Put it into a file, such as "
        f"train.py (in a notebook: %%writefile train.py), then `from train import {name}` and pass that."
    )


def _found(module: str, name: str) -> Any:
    """The object `name` of the imported module `module`; None if this process has imported no such object."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def check_importable(entrypoint: str, args: Collection[str] = ()) -> None:
    """Raise `ConfigError` if this process, and so a replica on this machine, cannot import the entrypoint or torch.

    Also for a function that `check_defined` refuses. `args`: names of the run's arguments.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "replicas on this machine need torch, which is not installed: pip install torch transformers, or "
            "diloco-orchestrator[train]."
        )
    module = entrypoint.partition(":")[0]
    try:
        found = None if module == "__main__" else importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"entrypoint {entrypoint!r}: there is no module {module!r} that replicas could import. Put the function "
            "into a file of its own on sys.path (the folder of this program is)."
        )
    if found.origin is not None and found.origin.endswith(".py"):
        check_defined(entrypoint, Path(found.origin), args)


def check_defined(entrypoint: str, source: Path, args: Collection[str] = ()) -> None:
    """Raise `ConfigError` if the module file `source` is not Python or does not define the entrypoint's function.

    Also if that function cannot be called with one argument, the context, has a parameter named as one of the run's
    arguments `args`, or importing the module would launch a run, as each replica would. A module that may bind names in
    other ways (`from x import *`, `__getattr__`) passes, and what is named inside a class is not judged.
    """
    wanted, _, inside = entrypoint.partition(":")[2].partition(".")
    try:
        module = ast.parse(source.read_bytes(), source.name)  # bytes: a file may name its encoding
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"entrypoint {entrypoint!r}: {source} is not Python: {error}.") from None
    names = _top_level_names(module)
    if wanted in names:
        if line := _launching_line(module):
            raise ConfigError(
                f"entrypoint {entrypoint!r}: line {line} of {source.name} calls launch whenever the file is imported, "
                'so every replica would launch a run. Put that call below `if __name__ == "__main__":`.'
            )
        if not inside and (why := _why_no_training_function(module, wanted, args)):
            raise ConfigError(f"entrypoint {entrypoint!r}: {wanted} in {source.name} {why}")
        return
    if names & {"*", "__getattr__"}:
        return
    close = nearest(wanted, names)
    hint = f"Did you mean {close!r}?" if close else "Check its spelling."
    raise ConfigError(f"entrypoint {entrypoint!r}: {source.name} defines no {wanted!r}. {hint}")


def _launching_line(module: ast.Module) -> int | None:
    """The line on which importing `module` calls `diloco_orchestrator.launch`; None if it does not.

    Calls in functions, in classes, and below a condition on `__name__` do not count.
    """
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        alias.asname or alias.name if isinstance(node, ast.ImportFrom) else f"{alias.asname or alias.name}.launch"
        for node in imports
        for alias in node.names
        if (getattr(node, "module", ""), alias.name) in (("diloco_orchestrator", "launch"), ("", "diloco_orchestrator"))
    }
    todo: list[ast.AST] = list(module.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            return node.lineno
        todo += ast.iter_child_nodes(node)
    return None


def _why_no_training_function(module: ast.Module, name: str, args: Collection[str]) -> str:
    """The reason that replicas cannot train by calling `name`(context), and the remedy; empty if they can, or may.

    `args`: names of the arguments that replicas read from the context.
    Only a plain value or an undecorated function is judged, and only where the module binds the name once.
    """
    binding = [node for node in module.body if name in _top_level_names(ast.Module([node], []))]
    match binding:
        case [ast.Assign(value=ast.Constant() | ast.List() | ast.Tuple() | ast.Dict() | ast.Set() | ast.JoinedStr())]:
            return "is a value. Name a function that takes the context: def train(ctx)."
        case [ast.AsyncFunctionDef()]:
            return "is a coroutine, of which a call runs nothing. Write `def` instead of `async def`."
        case [ast.FunctionDef(decorator_list=[]) as function]:
            given = function.args
            required = len(given.posonlyargs) + len(given.args) - len(given.defaults)
            keywords = [
                a.arg for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
            ]
            if required > 1 or keywords or not (given.posonlyargs or given.args or given.vararg):
                taken = ast.unparse(given) or "nothing"
                return (
                    f"takes {taken}. It is called with one argument, the context: write def {name}(ctx), and hand over "
                    "more with args={…} (--arg), which arrives as ctx.args."
                )
            further = (*(*given.posonlyargs, *given.args)[1:], *given.kwonlyargs)
            if unread := [each.arg for each in further if each.arg in args]:
                return (
                    f"has a parameter {unread[0]!r}, which no call sets: an argument of the run arrives as "
                    f"ctx.args[{unread[0]!r}]. Read it there."
                )
            if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function)):
                return "is a generator, of which a call runs nothing. Move its `yield` into a function of its own."
    return ""


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The syntax nodes of a function's body, without those of functions and classes inside it."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


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
