"""A `uv` that asks no index: it lists what it is given, and tells how it was called."""

import json
import os
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HASH = "sha256:" + "0a" * 32
SCRIPT = """#!{python} -IS
import json, os, sys, time
from pathlib import Path
given = sys.argv[1:]
named = dict(zip(given, given[1:]))
lines = Path(next(each for each in given if each.endswith("wanted.in"))).read_text().splitlines()
wanted = [each for each in lines if each and not each.startswith("-")]
names = [each.partition(";")[0].partition(">")[0].partition("<")[0].partition("=")[0] for each in wanted]
limits, python = Path(named["-c"]).read_text(), named["--python-version"]
call = {{"argv": given, "wanted": wanted, "limits": limits, "env": sorted(os.environ)}}
with open({told!r}, "a") as told:
    told.write(json.dumps(call) + "\\n")
answers = json.loads({answers!r})
code, says, text = answers.get(python) or answers.get("")
sys.stderr.write(says)
if code < 0:
    time.sleep(3600)
if code == 0:
    each_one = "".join(f"{{name}}==1.0 \\\\\\n    --hash={hash}\\n    # via -r wanted.in\\n" for name in names)
    Path(named["-o"]).write_text(each_one if text is None else text)
sys.exit(code)
"""
Answer = tuple[int, str, str | None]  # exit code (below 0: it never ends), standard error, list (None: what is wanted)


class FakeUv:
    """How a fake `uv` was called, oldest call first."""

    def __init__(self, told: Path) -> None:
        self._told = told

    @property
    def calls(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._told.read_text().splitlines()] if self._told.exists() else []


def fake_uv(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer = (0, "", None),
    of_python: dict[str, Answer] | None = None,
) -> FakeUv:
    """Put a `uv` before all others that gives `answer`, or the one in `of_python` for that version of Python."""
    folder.mkdir(exist_ok=True)
    answers = json.dumps({"": answer, **(of_python or {})})
    script, told = folder / "uv", folder / "told.jsonl"
    script.write_text(SCRIPT.format(python=sys.executable, told=str(told), answers=answers, hash=HASH))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    hide_uv_package(monkeypatch)
    return FakeUv(told)


def no_uv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no `uv` that could be found."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(folder))
    hide_uv_package(monkeypatch)


def hide_uv_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this environment's own package `uv`, if it has one, look absent."""

    def found(name: str, *given: str) -> object:
        return None if name == "uv" else find_spec(name, *given)

    monkeypatch.setattr("importlib.util.find_spec", found)
