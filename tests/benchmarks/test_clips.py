"""The benchmark of healthy fleets at a tiny size: each fleet has a row, and its norms are trained once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows(norms: Path) -> list[list[str]]:
    """The cells of each row, of the fleets with a policy."""
    command = [sys.executable, str(ROOT / "benchmarks/clips.py"), "--norms", str(norms)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    chosen = ["--only", "policy gradient, sgd", "--rounds", "3"]
    done = subprocess.run([*command, *chosen], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]


@pytest.mark.slow
def test_each_fleet_has_a_row_and_rules_are_tried_on_norms_that_are_recorded_once(tmp_path):
    file = tmp_path / "norms.json"
    first = rows(file)
    assert [row[1:3] for row in first[1:]] == [["4", "12"], ["", "12"]]
    recorded = json.loads(file.read_text())
    (norms,) = recorded.values()
    norms[2] = [1.0, 1.0, 1.0, 2.5]
    file.write_text(json.dumps(recorded))
    assert rows(file)[1][3:] == ["2.5", "1", "1"]
