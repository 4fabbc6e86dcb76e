"""The shape of the package: imports go down only, the surface is light and complete."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from parsed import nodes_of, tree_of

import diloco_orchestrator
import executors
from diloco_orchestrator.import_names import public_names

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("diloco_orchestrator", "executors", "replica")
SHORT_NAMES = ("executors", "replica")  # of packages whose long names begin with diloco_orchestrator

# Lowest layer first; a module may import from its own layer and those before it.
LAYERS = [
    ("diloco_orchestrator.executors", "diloco_orchestrator.import_names"),
    (
        "diloco_orchestrator.clock",
        "diloco_orchestrator.codecs",
        "diloco_orchestrator.errors",
        "diloco_orchestrator.redaction",
    ),
    ("diloco_orchestrator.config",),
    ("diloco_orchestrator.protocol", "diloco_orchestrator.store"),
    ("diloco_orchestrator.signing",),
    (
        "diloco_orchestrator.run_log",
        "diloco_orchestrator.guard",
        "diloco_orchestrator.split",
        "diloco_orchestrator.allreduce",
    ),
    ("diloco_orchestrator.outer", "diloco_orchestrator.snapshots"),
    (
        "diloco_orchestrator.inspection",
        "diloco_orchestrator.replica",
        "diloco_orchestrator.code_archive",
        "diloco_orchestrator.join",
    ),
    ("diloco_orchestrator.supervision",),
    (
        "diloco_orchestrator.launching",
        "diloco_orchestrator.testing",
    ),
    ("diloco_orchestrator.cli", "diloco_orchestrator.demo"),
]


def long_name(name: str) -> str:
    return f"diloco_orchestrator.{name}" if name.partition(".")[0] in SHORT_NAMES else name


@functools.cache
def modules() -> dict[str, Path]:
    """Our modules by their long names; each file once, where it lies."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not any((ROOT / Path(*parts[:depth])).is_symlink() for depth in range(1, len(parts))):
                found[long_name(".".join(parts)).removesuffix(".__init__")] = path
    return found


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Long names of our own modules that a file imports, inside functions too; type-checking imports count."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {long_name(name) for name in found if name.split(".")[0] in PACKAGES}


@functools.cache
def layer_of(name: str) -> int:
    """The layer of the longest listed name that `name` lies in."""
    listed = [
        (len(prefix), level)
        for level, row in enumerate(LAYERS)
        for prefix in row
        if (name + ".").startswith(prefix + ".")
    ]
    return max(listed)[1]


def test_imports_go_down_only():
    up = [
        f"{name} imports {imported}, which lies above it"
        for name, path in modules().items()
        for imported in imports_of(path)
        if name != "diloco_orchestrator" and layer_of(imported) > layer_of(name)
    ]
    assert not up, "\n".join(up)


def rooms(depth: int) -> dict[str, set[str]]:
    """By room, the others that it imports. A room is a file or a folder, `depth` levels below the package."""
    found: dict[str, set[str]] = {}
    known = modules()
    for name, path in known.items():
        room = name.split(".")[: depth + 1]
        imported = {i if i in known else i.rpartition(".")[0] for i in imports_of(path)}
        reached = {".".join(i.split(".")[: depth + 1]) for i in imported if i != "diloco_orchestrator"}
        found.setdefault(".".join(room), set()).update(reached - {".".join(room)})
    return {room: to for room, to in found.items() if room != "diloco_orchestrator"}  # whose face hands on names only


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_no_rooms_import_each_other_in_a_circle(depth):
    """Neither the package's rooms, nor the files and folders inside one, nor single files."""
    assert list(TopologicalSorter(rooms(depth)).static_order())  # raises CycleError, which names the circle


def test_the_package_has_few_rooms_and_few_ways_between_them():
    """Bounds of the last reorganisation: a new room or way takes the place of one that is no longer needed."""
    ways = rooms(1)
    assert len(ways) <= 26
    assert sum(map(len, ways.values())) <= 145


def test_our_code_uses_long_names_only():
    """A short name may be a user's own module: `executors.py` beside the script."""
    for name, path in modules().items():
        short = [i for i in all_imports(path) if i.partition(".")[0] in SHORT_NAMES]
        assert not short, f"{name} imports {short}: write diloco_orchestrator.{short[0]}"


def test_replicas_know_no_coordinator_and_no_executor():
    for name, path in modules().items():
        if name.startswith("diloco_orchestrator.replica"):
            above = ("diloco_orchestrator.executors", "diloco_orchestrator.supervision")
            bad = [i for i in imports_of(path) if i.startswith(above)]
            assert not bad, f"{name} imports {bad}"


def test_executors_are_a_leaf():
    for name, path in modules().items():
        if name.startswith("diloco_orchestrator.executors"):
            allowed = ("diloco_orchestrator.executors", "diloco_orchestrator.import_names")
            assert not [i for i in imports_of(path) if not i.startswith(allowed)], name


@pytest.mark.parametrize(
    "library", ["torchft", "trl", "peft", "accelerate", "datasets", "lightning", "data_juicer", "verl", "monarch"]
)
def test_none_of_our_code_imports_the_trainers_of_others(library):
    users = [name for name, path in modules().items() if library in {i.split(".")[0] for i in all_imports(path)}]
    assert users == []


@functools.cache
def all_imports(path: Path) -> set[str]:
    nodes = nodes_of(path)
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


READS_OF_TIME = re.compile(r"\b(datetime|date)\.(now|utcnow|today)$")
DRAWS = re.compile(r"^random\.(?!(Random|seed|getstate|setstate)\b)")  # from the generator that all of a process share


def ambient_reads(nodes: Iterable[ast.AST]) -> set[str]:
    """How a file reads time or randomness that nobody passed to it."""
    nodes = list(nodes)
    imported = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    found = {"time", "secrets", "uuid"} & (names | {n.module for n in imported if isinstance(n, ast.ImportFrom)})
    found |= {f"random.{a.name}" for n in imported if getattr(n, "module", "") == "random" for a in n.names}
    uses = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return found | {use for use in uses if READS_OF_TIME.search(use) or DRAWS.search(use)}


def test_only_the_clock_and_process_entries_read_time_or_randomness():
    allowed = {
        "diloco_orchestrator.clock",
        "diloco_orchestrator.code_archive.bootstrap",
        "diloco_orchestrator.executors.attempt_folder",  # names of drafts
        "diloco_orchestrator.executors.clock",
        "diloco_orchestrator.executors.ray_jobs",  # names of uploaded packages
        "diloco_orchestrator.executors.remote_base",  # run ids of `launch_replicas`
        "diloco_orchestrator.executors.testing.rig",
        "diloco_orchestrator.store.s3_credentials",  # of an expiry that obstore compares with its own clock
        "diloco_orchestrator.cli.demo_command",
    }
    for name, path in modules().items():
        found = ambient_reads(nodes_of(path))
        if name in allowed:
            assert found, f"{name} reads neither: take it off the list"
        else:
            assert not found, (
                f"{name} uses {', '.join(sorted(found))}: take `clock: Clock` as an argument and call clock.now(), "
                "clock.wall_time() or clock.sleep(); for randomness take a random.Random or `random_token` of the clock"
            )


def test_ambient_reads_are_found():
    for text in (
        "import time",
        "from uuid import uuid4",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import UTC, datetime\nnow = datetime.now",
        "import random\nrandom.uniform(0, 1)",
        "from random import choice",
    ):
        assert ambient_reads(ast.walk(ast.parse(text))), text
    assert not ambient_reads(ast.walk(ast.parse("import random\nfrom datetime import date\nrandom.Random(3).random()")))


def test_every_broad_except_has_its_reason_beside_it():
    """A comment on its line: why every kind of error ends here. Otherwise name the kinds."""
    broad = re.compile(r"^\s*except(\s*:|\s+(Exception|BaseException)\b)")
    for name, path in modules().items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not broad.match(line) or "  # " in line, f"{name}, line {number}: {line.strip()}"


# -- the surface ------------------------------------------------------------------------------------------------------


def test_importing_the_package_loads_nothing_heavy():
    heavy = "[m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules]"
    code = f"import sys, diloco_orchestrator, executors; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_supervising_a_run_and_reading_its_records_imports_no_torch():
    """Importing torch takes longer than most commands do."""
    rooms = (
        "launching.run",
        "launching.plan",
        "inspection.status",
        "inspection.pull",
        "inspection.audit",
        "supervision.coordinator",
    )
    commands = [f"cli.{name}_commands" for name in ("run", "read", "before", "derive")]
    code = f"import sys, {', '.join(f'diloco_orchestrator.{name}' for name in (*rooms, *commands))}; "
    code += "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("module", [diloco_orchestrator, executors])
def test_every_exported_name_is_there(module):
    names = public_names(module.__file__)
    assert len(names) > 30
    for name, home in names.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert getattr(module, name).__name__ == name
        assert name in dir(module)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'LocalProcessExecutor'"):
        diloco_orchestrator.LocalProcesExecutor  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'LocalProcessExecutor'"):
        executors.LocalProcesExecutor  # noqa: B018


def test_every_file_says_first_what_it_is_for():
    for name, path in modules().items():
        if path.read_text().strip():
            assert ast.get_docstring(tree_of(path)), f"{name} has no docstring"


def test_no_file_is_too_long_to_read():
    """An alarm, not a target: a file beyond it holds two jobs."""
    for name, path in modules().items():
        lines = len(path.read_text().splitlines())
        assert lines <= 600, f"{path} has {lines} lines: split {name} by what it answers"
