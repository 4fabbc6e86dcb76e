"""Runs the `diloco` command: as a user does, in a process of its own, or in this one where nothing is started."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

from diloco_orchestrator.cli.main import main

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


def diloco_here(*args: str, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command in this process, which saves a second: for commands that read, and for those that are refused."""
    out, err = StringIO(), StringIO()
    with (
        chdir(cwd),
        mock.patch.dict(os.environ, {"COLUMNS": "200", **(environ or {})}),
        mock.patch.object(sys, "argv", ["diloco", *args]),
        mock.patch.object(sys, "path", [str(cwd), *sys.path]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())
