"""Source files as syntax trees, parsed once in a process whichever tests read them."""

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, in the order of `ast.walk`."""
    return tuple(ast.walk(tree_of(path)))
