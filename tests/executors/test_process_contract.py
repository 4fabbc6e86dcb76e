"""What a process and its executor agree on has one home, and reaches programs that travel without our packages."""

import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from parsed import nodes_of

from diloco_orchestrator.code_archive import bootstrap
from executors import process_bootstrap
from executors.process_contract import EXIT_LINE, parse_exit_line
from executors.remote_base import program_text

ROOT = Path(__file__).parents[2]
PROGRAMS = [process_bootstrap, bootstrap]
HOMES = ("executors/process_contract.py", "diloco_orchestrator/protocol/process.py", "diloco_orchestrator/redaction.py")


def run_bare(program: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """The program as text, by an interpreter that has the standard library alone."""
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_the_bare_interpreter_of_these_tests_has_none_of_our_packages():
    for package in ("diloco_orchestrator", "executors", "replica", "click"):
        assert run_bare(f"import {package}").returncode == 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda module: module.__name__)
def test_a_program_that_travels_imports_the_standard_library_alone(program: types.ModuleType):
    imported = set()
    for node in ast.walk(ast.parse(program_text(program))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported <= sys.stdlib_module_names


def test_the_program_of_launch_replicas_runs_where_our_packages_are_not():
    done = run_bare(
        program_text(process_bootstrap),
        DILOCO_ENTRYPOINT="operator:add",
        DILOCO_ENTRYPOINT_ARGS="{}",
    )
    assert done.returncode == 1  # operator.add takes its arguments by position only
    fields = parse_exit_line(done.stdout.splitlines())
    assert fields is not None and fields["code"] == 1 and fields["error"].startswith("TypeError")
    done = run_bare(program_text(process_bootstrap), DILOCO_ENTRYPOINT="platform:python_version")
    assert (done.returncode, parse_exit_line(done.stdout.splitlines())) == (
        0,
        {"code": 0, "value": sys.version.partition(" ")[0].rstrip("+")},
    )


def test_the_program_that_fetches_code_runs_where_our_packages_are_not(tmp_path: Path):
    done = run_bare(program_text(bootstrap), DILOCO_CODE_URL=str(tmp_path / "absent.zip"), DILOCO_CODE_SHA256="0" * 64)
    fields = parse_exit_line(done.stdout.splitlines())
    assert done.returncode == 78 and fields is not None and fields["code"] == 78, done.stdout + done.stderr
    assert "Is the bucket mounted" in fields["error"]


def test_a_module_that_cannot_travel_is_refused(tmp_path: Path):
    module = types.ModuleType("program")
    module.__file__ = str(tmp_path / "program.py")
    for source, imports in (
        ("import json\n", 0),
        ("from executors.process_contract import EXIT_DONE as DONE\n", 1),
        ("def main():\n    from executors.process_contract import EXIT_DONE\n", 0),
    ):
        Path(module.__file__).write_text(source)
        with pytest.raises(ValueError, match=f"it has {imports} imports from process_contract"):
            program_text(module)


def test_names_and_codes_are_written_down_once():
    """Text such as REPLICA_RANK stands in one file of ours; others import it."""
    texts = {
        node.value: home
        for home in HOMES
        for node in nodes_of(ROOT / home)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("DILOCO", "REPL"))
    }
    assert {"REPLICA_RANK", "REPLICA_WORLD_SIZE", "DILOCO_LEAVE_AFTER_S", EXIT_LINE} <= set(texts)
    assert {"DILOCO_STORAGE_OPTIONS", "DILOCO_SECRET_NAMES"} <= set(texts)
    for package in ("diloco_orchestrator", "replica", "executors"):
        for path in sorted((ROOT / package).rglob("*.py")):
            here, source = path.relative_to(ROOT).as_posix(), path.read_text()
            for node in nodes_of(path) if any(text in source for text in texts) else ():
                if isinstance(node, ast.Constant) and node.value in texts:
                    assert texts[node.value] == here, f"{here} repeats {node.value!r} of {texts[node.value]}"


def test_the_last_whole_exit_line_counts():
    lines = [f'{EXIT_LINE}{{"code": 1}}', "words", f'{EXIT_LINE}{{"code": 75}}', f'{EXIT_LINE}{{"code":']
    assert parse_exit_line(lines) == {"code": 75}
    assert parse_exit_line(["words"]) is None and parse_exit_line([f"{EXIT_LINE}3"]) is None


def test_a_value_that_json_cannot_hold_becomes_null():
    code = "print_exit_line(0, value=object())"
    contract = (ROOT / "executors/process_contract.py").read_text()
    done = run_bare(f"{contract}\n{code}")
    assert json.loads(done.stdout.splitlines()[-1].removeprefix(EXIT_LINE)) == {"code": 0, "value": None}
