"""The README's first example is executed as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_in(folder: Path, code: str) -> str:
    (folder / "first_run.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "first_run.py"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_example_runs_and_the_bucket_tells_about_it(tmp_path):
    first, reader = code_blocks()[:2]
    assert len(first.strip().splitlines()) <= 15
    assert first.strip().splitlines()[-1].lstrip().startswith("assert ")
    run_in(tmp_path, first)
    rows = run_in(tmp_path, reader).splitlines()
    assert len(rows) == 5 and rows[0].startswith("1 [0, 1] ")


def test_settings_and_names_in_the_readme_exist():
    import diloco_orchestrator

    imported = re.findall(r"from diloco_orchestrator import (.+)", README)
    for name in ", ".join(imported).split(", "):
        assert hasattr(diloco_orchestrator, name), name
