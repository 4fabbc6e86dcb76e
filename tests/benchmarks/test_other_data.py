"""The benchmark of honest replicas with different data at a tiny size: its table has a row for each kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_kind_of_data_has_a_row():
    command = [sys.executable, str(ROOT / "benchmarks/other_data.py"), "--seeds", "1", "--rounds", "2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6 and all(row.count("%") >= 7 for row in rows)
