"""Runs the `diloco` command as a user does."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def diloco(*args: str, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "diloco_orchestrator.cli.main", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )
