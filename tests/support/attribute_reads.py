"""`fields_read`: which fields of which classes a set of files reads, by the types that their annotations give.

An approximation for a lint, without imports or inference of generics: a container counts as its items, a call of what
is not ours as its arguments, and an expression may have several types. So a field may count as read though it is not,
where one variable holds two classes; one that no typed expression reads is found, whatever other classes have its name.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from parsed import tree_of

Types = frozenset[str]
NONE: Types = frozenset()
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class _Program:
    """The classes of all files: their bases, and the types of their attributes, and of functions by name."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.trees = list(trees)
        nodes = [node for tree in self.trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.classes = {node.name for node in nodes}  # those of one name in two files are taken for one
        self.bases = {node.name: [_last(base) for base in node.bases] for node in nodes}
        self.attributes: dict[str, dict[str, Types]] = defaultdict(dict)
        self.functions: dict[str, Types] = {}
        for node in nodes:
            known = self.attributes[node.name]
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    name, annotation = part.target.id, part.annotation
                elif isinstance(part, _FUNCTIONS):
                    name, annotation = part.name, part.returns
                else:
                    continue
                known[name] = known.get(name, NONE) | self.mentioned(annotation)
        for tree in self.trees:
            for part in tree.body:
                if isinstance(part, _FUNCTIONS):
                    self.functions[part.name] = self.mentioned(part.returns)
        self.reads: set[tuple[str, str]] = set()

    def mentioned(self, annotation: ast.expr | None) -> Types:
        """Our classes that an annotation names, in quotes too."""
        found = set()
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= self.mentioned(ast.parse(node.value, mode="eval").body) if node.value.isidentifier() else NONE
            found |= {_last(node)} & self.classes if isinstance(node, ast.Name | ast.Attribute) else set()
        return frozenset(found)

    def family(self, name: str) -> Iterator[str]:
        """A class and those that it is derived from."""
        yield name
        for base in self.bases.get(name, ()):
            yield from self.family(base) if base != name else ()

    def attribute(self, types: Types, name: str) -> Types:
        """The types of an attribute of these types. Notes that it is read."""
        found: set[str] = set()
        for each in types:
            for owner in self.family(each):
                if name in self.attributes.get(owner, {}):
                    self.reads.add((owner, name))
                    found |= self.attributes[owner][name] or types - {each}  # such as `record` of an `Entry[Begin]`
                    break
        return frozenset(found)


class _Scope(ast.NodeVisitor):
    """Walks one function, or the top level of a file, and notes what its variables hold."""

    def __init__(self, program: _Program, known: dict[str, Types], owner: str = "") -> None:
        self.program, self.known, self.owner = program, known, owner

    def of(self, node: ast.expr | None) -> Types:
        """The types that an expression may have; notes every attribute that it reads."""
        if node is None or isinstance(node, ast.Constant):
            return NONE
        if isinstance(node, ast.Name):
            return self.known.get(node.id, frozenset({node.id} & self.program.classes))
        if isinstance(node, ast.Attribute):
            return self.program.attribute(self.of(node.value), node.attr)
        if isinstance(node, ast.Call):
            arguments = [self.of(each) for each in (*node.args, *(keyword.value for keyword in node.keywords))]
            called = self.of(node.func)
            if isinstance(node.func, ast.Name):
                called |= self.program.functions.get(node.func.id, NONE)
            elif isinstance(node.func, ast.Attribute):
                called |= self.of(node.func.value) if not called else NONE  # such as `sorted`, `items`, `get`
            kinds = {each.id for each in node.args if isinstance(each, ast.Name)} & self.program.classes
            return called | kinds if called else frozenset().union(*arguments)
        if isinstance(node, ast.NamedExpr):
            self.assign(node.target, self.of(node.value))
            return self.of(node.target)
        if isinstance(node, _COMPREHENSIONS):
            for each in node.generators:
                self.assign(each.target, self.of(each.iter))
                for test in each.ifs:
                    self.of(test)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return frozenset().union(*map(self.of, parts))
        if isinstance(node, ast.Lambda):
            return self.of(node.body)
        return frozenset().union(*(self.of(each) for each in _expressions(node)))

    def assign(self, target: ast.expr, types: Types) -> None:
        if isinstance(target, ast.Name):
            self.known[target.id] = self.known.get(target.id, NONE) | types
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            of_class = self.program.attributes[self.owner]
            of_class[target.attr] = of_class.get(target.attr, NONE) | types
        else:
            for each in _expressions(target):
                self.assign(each, types)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, self.of(node.value))
        elif isinstance(node, ast.AnnAssign):
            self.assign(node.target, self.program.mentioned(node.annotation) | self.of(node.value))
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.assign(node.target, self.of(node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self.assign(node.optional_vars, self.of(node.context_expr))
        elif isinstance(node, ast.expr):
            self.of(node)
            return
        elif isinstance(node, ast.match_case):
            for part in ast.walk(node.pattern):
                if isinstance(part, ast.MatchClass):
                    for name in (*part.kwd_attrs, *self._positional(part)):
                        self.program.attribute(frozenset({_last(part.cls)}), name)
        super().generic_visit(node)

    def _positional(self, part: ast.MatchClass) -> list[str]:
        fields = list(self.program.attributes.get(_last(part.cls), {}))
        return fields[: len(part.patterns)]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            _Scope(self.program, dict(self.known), node.name).visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        typed = {each.arg: self.program.mentioned(each.annotation) for each in given if each.annotation is not None}
        me = {"self": frozenset({self.owner}), "cls": frozenset({self.owner})} if self.owner else {}
        inner = _Scope(self.program, {**self.known, **me, **typed}, self.owner)
        for part in node.body:
            inner.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast calls


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    return (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))


def _last(node: ast.AST) -> str:
    """The last name of `a.b.C[D]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def fields_read(paths: Iterable[Path]) -> set[tuple[str, str]]:
    """(class, attribute) of every attribute that these files read of a class of theirs."""
    program = _Program(tree_of(path) for path in paths)
    for _ in range(2):  # attributes that a method sets are known in the second
        for tree in program.trees:
            _Scope(program, {}).visit(tree)
    return program.reads
