"""Every setting is passed by some test with another value than its default.

Read from the tests' source: a setting of the tree counts as tried where a call, or a mapping that is passed for its
section, names it with something that is not its default; a section's class counts as that section.
"""

import ast
import functools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from diloco_orchestrator.config import RunConfig

TESTS = Path(__file__).parent.parent


def parts_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Classes of the configuration tree in a field's annotation."""
    inside = (field.annotation, *typing.get_args(field.annotation))
    return [each for each in inside if isinstance(each, type) and issubclass(each, BaseModel)]


def leaves(of: type[BaseModel] = RunConfig, section: str = "") -> Iterator[tuple[str, str, Any]]:
    """(section, name, default) of every setting; the section of those of a run itself is empty."""
    for name, field in of.model_fields.items():
        if parts := parts_of(field):
            for part in parts:
                yield from leaves(part, name)
        else:
            yield section, name, field.get_default(call_default_factory=True)


@functools.cache
def section_of(class_name: str) -> str:
    """The section that a class of the tree describes; empty for any other name."""
    fields = RunConfig.model_fields.items()
    return next((name for name, field in fields if any(part.__name__ == class_name for part in parts_of(field))), "")


def is_another(value: ast.expr, default: Any) -> bool:
    """Whether an expression may have another value than the default. What is computed counts as another."""
    try:
        return bool(ast.literal_eval(value) != default)
    except ValueError:
        return True


def pairs(node: ast.expr) -> list[tuple[str, ast.expr]]:
    """Names and values of a dict literal, or of a call's keywords."""
    if isinstance(node, ast.Call):
        return [(each.arg, each.value) for each in node.keywords if each.arg]
    if isinstance(node, ast.Dict):
        named = zip(node.keys, node.values, strict=True)
        return [
            (key.value, value) for key, value in named if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
    return []


def name_of(target: ast.expr) -> str:
    """The variable or key that is assigned to; empty for anything else."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return target.id if isinstance(target, ast.Name) else ""


@functools.cache
def sections_of() -> dict[str, set[str]]:
    """By the name of a setting, the sections that have one of that name."""
    found: dict[str, set[str]] = {}
    for section, name, _ in leaves():
        found.setdefault(name, set()).add(section)
    return found


def passed(source: str) -> Iterator[tuple[str, str, ast.expr]]:
    """(section, name, value) of everything in a file of tests that may be a setting."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):  # guard = {"min_steps": 2}, settings["guard"] = {…}
            yield from ((target, *pair) for target in map(name_of, node.targets) for pair in pairs(node.value))
        if not isinstance(node, ast.Call | ast.Dict):
            continue
        if isinstance(node, ast.Dict):  # handed on by a test's own function, for a name that one section has
            yield from (
                (*of, name, value) for name, value in pairs(node) if len(of := sections_of().get(name, ())) == 1
            )
        made = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        for name, value in pairs(node):
            section, dot, leaf = name.partition(".")
            yield (section, leaf, value) if dot else (section_of(made), name, value)
            yield from ((name, *inner) for inner in pairs(value))


def test_every_setting_is_passed_by_some_test_with_another_value_than_its_default():
    untried = {(section, name): default for section, name, default in leaves()}
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text()
        if any(name in source for _, name in untried):
            for section, name, value in passed(source):
                if (section, name) in untried and is_another(value, untried[section, name]):
                    del untried[section, name]
    assert not untried, sorted(untried)


def test_a_setting_that_nobody_passes_is_noticed():
    source = """
launch(f, rounds=3, guard={"min_steps": 2}, **{"outer.lr": 1.0})
GuardConfig(item_sd=0.5)
print(retry["backoff_s"])
"""
    found = {(section, name) for section, name, _ in passed(source)}
    assert found >= {("", "rounds"), ("guard", "min_steps"), ("outer", "lr"), ("guard", "item_sd")}
    assert ("retry", "backoff_s") not in found and ("", "sections") not in found
    assert is_another(ast.parse("3", mode="eval").body, 4) and not is_another(ast.parse("4", mode="eval").body, 4)
    assert len(list(leaves())) > 40 and ("retry", "max_errors", 3) in list(leaves())
