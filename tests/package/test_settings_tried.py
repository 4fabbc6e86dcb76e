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
def passed() -> dict[tuple[str, str], list[ast.expr]]:
    """Every value that the tests pass for a setting, by section and name."""
    found: dict[tuple[str, str], list[ast.expr]] = {}
    sections: dict[str, set[str]] = {}
    for section, name, _ in leaves():
        sections.setdefault(name, set()).add(section)
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):  # guard = {"min_steps": 2}, settings["guard"] = {…}
                for target in map(name_of, node.targets):
                    for name, value in pairs(node.value):
                        found.setdefault((target, name), []).append(value)
            if not isinstance(node, ast.Call | ast.Dict):
                continue
            if isinstance(node, ast.Dict):  # handed on by a test's own function, for a name that one section has
                for name, value in pairs(node):
                    if len(of := sections.get(name, ())) == 1:
                        found.setdefault((*of, name), []).append(value)
            made = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            for name, value in pairs(node):
                section, dot, leaf = name.partition(".")
                found.setdefault((section, leaf) if dot else (section_of(made), name), []).append(value)
                for inner, inner_value in pairs(value):
                    found.setdefault((name, inner), []).append(inner_value)
    return found


def test_every_setting_is_passed_by_some_test_with_another_value_than_its_default():
    untried = {
        f"{section}.{name}".lstrip(".")
        for section, name, default in leaves()
        if not any(is_another(value, default) for value in passed().get((section, name), []))
    }
    assert untried == set()


def test_a_setting_that_nobody_passes_is_noticed():
    assert ("guard", "min_steps") in passed() and ("", "rounds") in passed() and ("", "sections") not in passed()
    assert is_another(ast.parse("3", mode="eval").body, 4) and not is_another(ast.parse("4", mode="eval").body, 4)
    assert len(list(leaves())) > 40 and ("retry", "max_errors", 3) in list(leaves())
