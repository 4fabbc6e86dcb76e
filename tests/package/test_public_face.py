"""The public names: complete, typed for mypy and pyright, and errors that can be imported where they are documented."""

import re
import subprocess
import sys
from collections.abc import Callable
from inspect import getdoc, isclass, isfunction
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel, JsonValue

import diloco_orchestrator
from diloco_orchestrator import config
from diloco_orchestrator.code_archive.entrypoint import entrypoint_of
from diloco_orchestrator.config import keywords
from diloco_orchestrator.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "typing"
MARK = "# refused"


def refused_lines(path: Path) -> set[int]:
    return {n for n, line in enumerate(path.read_text().splitlines(), 1) if line.endswith(MARK)}


def errors_of(command: list[str], path: Path) -> tuple[set[int], str]:
    done = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    return {int(n) for n in re.findall(rf"{path.name}:(\d+)(?::\d+)?(?: -)?:? error", told)}, told


MYPY = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]


@pytest.mark.slow
def test_mypy_accepts_what_users_write_and_refuses_what_they_misspell():
    assert errors_of(MYPY, CASES / "accepted.py")[0] == set()
    found, told = errors_of(MYPY, CASES / "refused.py")
    assert found == refused_lines(CASES / "refused.py"), told


@pytest.mark.slow  # pyright brings its own JavaScript and needs node
def test_pyright_agrees_with_mypy(tmp_path):
    pyright = [str(Path(sys.executable).parent / "pyright"), "--pythonpath", sys.executable]
    assert errors_of(pyright, CASES / "accepted.py")[0] == set()
    found, told = errors_of(pyright, CASES / "refused.py")
    assert found == refused_lines(CASES / "refused.py"), told


# -- settings ---------------------------------------------------------------------------------------------------------


def as_keyword(annotation: Any) -> Any:
    """How a setting of this type is typed as a keyword argument."""
    if isclass(annotation) and issubclass(annotation, BaseModel):
        named = annotation | getattr(keywords, annotation.__name__.replace("Config", "Settings"))
        words = {config.GuardConfig: Literal["off"], config.OuterConfig: Literal["sparse"]}
        return named | words[annotation] if annotation in words else named
    if isinstance(annotation, UnionType) and isclass(get_args(annotation)[0]) and type(None) in get_args(annotation):
        first = get_args(annotation)[0]
        return as_keyword(first) | None if issubclass(first, BaseModel) else annotation
    if get_origin(annotation) is dict:
        from collections.abc import Mapping

        key, value = get_args(annotation)
        return Mapping[key, Any if value is JsonValue else value]  # type: ignore[valid-type]
    return annotation


@pytest.mark.parametrize("name", ["Run", "Outer", "Guard", "Timing", "Retry", "Retention", "OnHalt"])
def test_the_settings_that_type_checkers_know_are_those_of_the_configuration(name):
    model, typed = getattr(config, f"{name}Config"), getattr(keywords, f"{name}Settings")
    elsewhere = {"entrypoint", "heldout_items"} if name == "Run" else set()  # arguments of `launch` itself
    fields = {k: as_keyword(f.annotation) for k, f in model.model_fields.items() if k not in elsewhere}
    hints = get_type_hints(typed)
    assert list(hints) == list(fields)
    for field, expected in fields.items():
        assert same(hints[field], expected), f"{name}Settings.{field}: {hints[field]} instead of {expected}"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, UnionType) or get_origin(one) is Literal or "Optional" in str(one) or "Union" in str(one):
        return set(map(str, get_args(one))) == set(map(str, get_args(other)))
    return str(one) == str(other)


# -- errors -----------------------------------------------------------------------------------------------------------


def documented_errors(public: Any) -> set[str]:
    """Error types that the docstrings of a public function, or of a class and its methods, name."""
    members = [public, *(m for m in vars(public).values() if isfunction(m))] if isclass(public) else [public]
    text = "\n".join(getdoc(member) or "" for member in members)
    raised = re.findall(r"[Rr]aises?:?\s(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    names = set(re.findall(r"\b([A-Z][a-z]+(?:[A-Z]\w+)+)\b", " ".join(raised)))
    return {name for name in names if is_error(name)}


def is_error(name: str) -> bool:
    from diloco_orchestrator import errors
    from diloco_orchestrator.executors import contract
    from diloco_orchestrator.guard import heldout

    found = next((vars(m)[name] for m in (errors, contract, heldout) if name in vars(m)), None)
    return isclass(found) and issubclass(found, Exception)


@pytest.mark.parametrize("name", diloco_orchestrator.__all__)
def test_every_documented_error_can_be_imported_from_the_top(name):
    missing = documented_errors(getattr(diloco_orchestrator, name)) - set(diloco_orchestrator.__all__)
    assert not missing, f"{name} documents {sorted(missing)}"


def test_a_name_that_needs_torch_says_how_to_install_it():
    code = "import sys; sys.modules['torch'] = None; from diloco_orchestrator import ObjectStoreAllReduce"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    words = "ObjectStoreAllReduce needs torch, which is not installed here: pip install 'diloco-orchestrator[train]'."
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {words}"


def test_documented_errors_are_found():
    assert {"ConfigError", "RunFolderTaken", "ExecutorDenied"} <= documented_errors(diloco_orchestrator.launch)
    assert {"RunFailed", "RunNotFinished", "CollapseStopError"} <= documented_errors(diloco_orchestrator.Run)


# -- functions as entrypoints -----------------------------------------------------------------------------------------


def top_level(ctx: Any) -> None: ...


class Holder:
    def method(self, ctx: Any) -> None: ...

    @staticmethod
    def static(ctx: Any) -> None: ...


def make() -> Callable[[Any], None]:
    def inner(ctx: Any) -> None: ...

    return inner


shadowed = top_level


def renamed(ctx: Any) -> None: ...


renamed, original = make(), renamed

made_by_exec: dict[str, Any] = {}
exec("def train(ctx): ...", made_by_exec)


def test_a_function_is_named_as_replicas_import_it():
    assert entrypoint_of(top_level) == entrypoint_of(shadowed) == f"{__name__}:top_level"
    assert entrypoint_of(Holder.static) == f"{__name__}:Holder.static"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda ctx: None, "a lambda .*Define it with `def` at the top level"),
        (make(), "defined inside another function.*args="),
        (original, "another object than the function that was passed"),
        (made_by_exec["train"], "of no imported module, as functions made by exec are.*Put its source into a file"),
        (Holder().method, "not a function"),
        (Holder, "not a function"),
        (print, "not a function"),
    ],
    ids=["lambda", "closure", "rebound", "exec", "method", "class", "builtin"],
)
def test_what_no_other_process_can_import_is_refused_with_the_remedy(function, words):
    with pytest.raises(ConfigError, match=words):
        entrypoint_of(function)


PROGRAM = """
from diloco_orchestrator import launch

def train(ctx):
    pass

if __name__ == "__main__":
    launch(train, store="runs/x", replicas=1)
"""


def test_a_function_of_the_program_itself_is_refused_with_the_name_that_works(tmp_path):
    (tmp_path / "first_run.py").write_text(PROGRAM)
    as_script = [sys.executable, "first_run.py"]
    done = subprocess.run(as_script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and 'Pass "first_run:train" instead' in done.stderr
    as_notebook = [sys.executable, "-c", PROGRAM]  # as there, `__main__` has no file
    done = subprocess.run(as_notebook, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "%%writefile train.py" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_windows_is_refused_in_one_sentence_that_says_where_it_runs():
    there = "import sys; sys.platform = 'win32'; import diloco_orchestrator"
    done = subprocess.run([sys.executable, "-c", there], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "On Windows, install it in WSL 2 (`wsl --install`)" in done.stderr.splitlines()[-1]
