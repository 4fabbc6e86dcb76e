"""docs/recipes/boto3.md on two kept runs: one whose start.json was outvoted, a signed one whose keys were replaced."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from fast_s3 import running_fast_s3
from page_blocks import blocks

from diloco_orchestrator import RunReader, open_store

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests/fixtures/kept_runs"
(PROGRAM,) = blocks(ROOT / "docs/recipes/boto3.md", "python")


def test_the_program_finds_head_and_newest_model_of_a_run(tmp_path: Path):
    for archive in KEPT.glob("*.tar.xz"):
        with tarfile.open(archive, "r:xz") as packed:
            packed.extractall(tmp_path / "bucket", filter="data")
    runs = [tmp_path / "bucket" / name for name in ("voted", "signed")]
    (tmp_path / "read_run.py").write_text(PROGRAM)
    with running_fast_s3(tmp_path) as server:
        for run in runs:
            command = [sys.executable, "read_run.py", "bucket", run.name]
            environ = {**os.environ, **server.environ()}
            done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (run.name, done.stderr)
            reader = RunReader(open_store(str(run)))
            newest = Path(reader.snapshot_url(reader.snapshots()[-1]))
            assert f"head {reader.status().head}\n" in done.stdout
            assert (tmp_path / "model.safetensors").read_bytes() == (newest / "model.safetensors").read_bytes()
