"""Run folders of schema version 1 are refused, by every command, with the version of this package that reads them.

`tests/fixtures/old_runs` has one that version 0.1.0 wrote. Only what users call is called here: the `diloco` command
and exported names.
"""

import io
import sys
import tarfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from diloco_orchestrator import LocalProcessExecutor, RecordTooOld, attach
from diloco_orchestrator.cli.main import main

ARCHIVE = Path(__file__).parent.parent / "fixtures" / "old_runs" / "runs.tar.xz"
READING = [
    ("status",),
    ("snapshots",),
    ("report", "page.html"),
    ("pull", "model"),
    ("verify",),
    ("gc", "--dry-run"),
    ("halt",),
    ("resume",),
]
WORDS = ("run.json has schema version 1", "this package reads version 2 only", "diloco-orchestrator 0.2.x reads it")


def diloco(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command. In this process, because importing torch takes longer than most
    commands do; `tests/cli` runs it in processes of its own."""
    output, errors, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["diloco", *args]
    try:
        with redirect_stdout(output), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = argv
    assert isinstance(ended.value.code, int)
    return ended.value.code, output.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old_runs")
    with tarfile.open(ARCHIVE, "r:xz") as packed:
        packed.extractall(folder, filter="data")
    return folder / "halted"


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_every_command_refuses_an_old_run_and_names_the_version_that_reads_it(command, unpacked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")}
    code, _, errors = diloco(command[0], str(unpacked), *command[1:])
    words = " ".join(errors.split())
    assert code != 0 and all(each in words for each in WORDS), errors
    assert "Traceback" not in errors
    assert {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")} == before  # nothing is written
    assert not list(tmp_path.iterdir())


def test_attach_refuses_an_old_run(unpacked, tmp_path):
    with pytest.raises(RecordTooOld, match=r"diloco-orchestrator 0\.2\.x reads it"):
        attach(str(unpacked), executor=LocalProcessExecutor(tmp_path / "executor"))
