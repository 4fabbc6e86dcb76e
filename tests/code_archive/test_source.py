"""Which commit a launch ran: of a repository, of one with changes, of none."""

import subprocess
from pathlib import Path

from diloco_orchestrator.code_archive.pack import folder_of, source_of


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=n", "-c", "user.email=e@x"]
    done = subprocess.run(["git", "-C", str(folder), *named, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_named_and_whether_tracked_files_differ(tmp_path: Path):
    assert source_of(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert source_of(tmp_path) == ""  # no commit yet
    (tmp_path / "train.py").write_text("one")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("untracked")
    below = tmp_path / "below"
    below.mkdir()
    assert source_of(tmp_path) == source_of(below) == commit
    (tmp_path / "train.py").write_text("two")
    assert source_of(tmp_path) == f"{commit}+changes"


def test_without_git_nothing_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_of(tmp_path) == ""


def test_the_folder_is_that_of_the_code(tmp_path: Path, monkeypatch):
    (tmp_path / "mine_to_train.py").write_text("def train(ctx): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert folder_of(None, "mine_to_train:train") == folder_of(tmp_path, "m:f") == tmp_path.resolve()
    assert folder_of(None, "no_such_module_here:train") == Path.cwd()
