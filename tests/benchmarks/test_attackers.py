"""The benchmarks of attackers at a tiny size: they run, with a row for each attack and what came of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_attack_has_a_row_with_what_the_commits_say():
    command = [sys.executable, str(ROOT / "benchmarks/attackers.py"), "--seeds", "1", "--rounds", "2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    only = ["--only", "scaled x50", "--only", "abstaining"]
    done = subprocess.run([*command, *only], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert "clipped 4 of 4" in next(row for row in rows if row.startswith("| scaled x50"))
    assert "abstention 4 of 4" in next(row for row in rows if row.startswith("| abstaining"))


@pytest.mark.slow
def test_hostile_strangers_have_a_row_with_what_was_left_out():
    command = [sys.executable, str(ROOT / "benchmarks/strangers.py"), "--seeds", "1", "--rounds", "2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    only = ["--only", "sign flip x10"]
    done = subprocess.run([*command, *only], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert next(row for row in rows if "sign flip x10" in row[1])[4].strip() == "100 %"


@pytest.mark.slow
def test_a_weighed_agreement_has_a_row_for_each_attack_and_kind_of_honest_replicas():
    command = [sys.executable, str(ROOT / "benchmarks/weighed_agreement.py"), "--seeds", "1", "--rounds", "2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 7 and all(len(row) == 4 and all(cell.strip() for cell in row[1:]) for row in rows)
    assert rows[1][2] != rows[1][1]  # it is another rule
