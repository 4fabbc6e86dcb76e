"""The README's first example is executed as it stands."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from page_blocks import blocks

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"


def run_in(folder: Path, code: str) -> str:
    (folder / "first_run.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "first_run.py"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def on_a_terminal(folder: Path) -> str:
    """What first_run.py draws while stderr is a terminal."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "first_run.py"], cwd=folder, env=environ, stderr=theirs)
    os.close(theirs)
    drawn = b""
    with suppress(OSError):  # how Linux says that the other side is closed
        while piece := os.read(ours, 65_536):
            drawn += piece
    os.close(ours)
    assert process.wait() == 0, drawn.decode()
    return drawn.decode()


@pytest.mark.slow
def test_the_first_example_runs_and_the_bucket_tells_about_it(tmp_path):
    first, reader = blocks(README, "python")
    assert len(first.strip().splitlines()) <= 15
    assert first.strip().splitlines()[-1].lstrip().startswith("assert ")
    (tmp_path / "first_run.py").write_text(first)
    drawn = on_a_terminal(tmp_path)  # `wait` shows the run by itself
    assert "launching: no heartbeat yet" in drawn and "4/4 outer steps" in drawn
    rows = run_in(tmp_path, reader).splitlines()
    assert len(rows) == 5 and rows[0].startswith("1 [0, 1] ")


def test_settings_and_names_in_the_readme_exist():
    import diloco_orchestrator

    imported = re.findall(r"from diloco_orchestrator import (.+)", README.read_text())
    for name in ", ".join(imported).split(", "):
        assert hasattr(diloco_orchestrator, name), name
