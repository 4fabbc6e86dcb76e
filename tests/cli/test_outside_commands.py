"""Commands of other packages: an installed distribution adds `diloco xyz` by an entry point."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0"

[project.entry-points."diloco_orchestrator.commands"]
{entries}

[tool.setuptools]
py-modules = ["{module}"]
"""
TIDES = '''
import click

@click.command()
@click.option("--at", default="noon", show_default=True, help="Time of day.")
def tides(at):
    """Tell the tides."""
    click.echo(f"low at {at}")
    return 7

text = "not a command"
'''


def laid_out(tmp_path: Path, name: str, code: str, **entries: str) -> Path:
    """A folder with a package of one module and these entry points, as pip would lay it out."""
    folder, module = tmp_path / name, name.replace("-", "_")
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{command} = {module}:{symbol}\n" for command, symbol in entries.items())
    (metadata / "entry_points.txt").write_text(f"[diloco_orchestrator.commands]\n{lines}")
    (folder / f"{module}.py").write_text(code)
    return folder


def installed(tmp_path: Path, name: str, code: str, **entries: str) -> Path:
    """A folder in which pip has installed a package with one module and these entry points."""
    source, module = tmp_path / f"source-{name}", name.replace("-", "_")
    source.mkdir()
    lines = "\n".join(f'{command} = "{module}:{symbol}"' for command, symbol in entries.items())
    (source / "pyproject.toml").write_text(PROJECT.format(name=name, module=module, entries=lines))
    (source / f"{module}.py").write_text(code)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / name), str(source)], check=True)
    return tmp_path / name


def diloco(*args: str, sites: list[Path]) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join(map(str, [ROOT, *sites]))
    return subprocess.run(
        [sys.executable, "-m", "diloco_orchestrator.cli.main", *args],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_installed_package_adds_a_command(tmp_path):
    sites = [installed(tmp_path, "tide-tables", TIDES, tides="tides")]
    listed = diloco("--help", sites=sites)
    assert (
        "Of other packages:\n  tides      Tell the tides\n" in listed.stdout
        and "status     Show the state" in listed.stdout
    )
    assert "Time of day.  [default: noon]" in diloco("tides", "--help", sites=sites).stdout
    done = diloco("tides", "--at", "dawn", sites=sites)
    assert (done.stdout, done.returncode) == ("low at dawn\n", 7)


def test_a_command_that_cannot_be_had_says_why_and_leaves_the_others_alone(tmp_path):
    sites = [
        laid_out(tmp_path, "broken-one", "import nowhere_to_be_found\n", broken="it", twice="it"),
        laid_out(tmp_path, "no-command", TIDES, words="text", twice="tides"),
        laid_out(tmp_path, "quitter", "raise SystemExit('no licence')\n", quits="it"),
    ]
    listed = diloco("--help", sites=sites)
    assert listed.returncode == 0 and "explain    Say in plain words" in listed.stdout
    for command, why in (
        ("broken", "of package broken-one (broken_one:it) does not load: ModuleNotFoundError"),
        ("words", "of package no-command (no_command:text) is no `click.Command`"),
        ("twice", "registered by broken-one and no-command"),
        ("quits", "of package quitter (quitter:it) does not load: SystemExit: no licence"),
    ):
        done = diloco(command, "runs/x", "--json", sites=sites)
        assert done.returncode == 2 and why in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_no_package_can_take_one_of_our_names(tmp_path):
    sites = [laid_out(tmp_path, "taker", TIDES, status="tides")]
    assert "Show the state of the run" in diloco("status", "--help", sites=sites).stdout
    assert "registers a command 'status', which is not used" in diloco("--help", sites=sites).stderr


def test_a_name_that_nobody_registers_is_a_usage_error(tmp_path):
    done = diloco("tides", sites=[])
    assert done.returncode == 2 and "unknown command 'tides'" in done.stderr


@pytest.mark.parametrize("command", ["tides", "split", "status"])
def test_asking_for_one_command_imports_no_other(command, tmp_path):
    code = (
        "import sys; from diloco_orchestrator.cli.main import diloco; diloco.get_command(None, sys.argv[1]); "
        "print([m for m in sys.modules if m.startswith('diloco') and m.endswith(('_commands', 'command'))])"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    home = {"tides": "[]", "split": "['diloco_orchestrator.split.command']"}
    assert done.stdout.strip() == home.get(command, "['diloco_orchestrator.cli.read_commands']")
