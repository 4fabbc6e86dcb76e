"""Every way in which our packages reach a machine holds each module once, under a name that no user's file shadows."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from real_runs import FAST

from diloco_orchestrator.code_archive.pack import our_files
from executors.local_process import LocalProcessExecutor

pytestmark = pytest.mark.slow  # wheels and archives are built and installed

ROOT = Path(__file__).parents[2]
PACKAGES = ("diloco_orchestrator", "executors", "replica")
LAYOUTS = ("checkout", "wheel", "archive")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # a copy: setuptools leaves a build folder, from which deleted files come back
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(tree)]
    subprocess.run(build, check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By layout, the folder in which its packages lie."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder / "wheel")
    for name, data in our_files():
        (folder / "archive" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "archive" / name).write_bytes(data)
    return {"checkout": ROOT, "wheel": folder / "wheel", "archive": folder / "archive"}


def python(*args: str, path: list[Path], cwd: Path) -> str:
    """Output of an interpreter with our dependencies, which finds our packages in `path` first."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-P", *args], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_each_of_our_modules_once_and_nothing_else(wheel: zipfile.ZipFile):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    short = {f"{package}/{name}" for package in ("executors", "replica") for name in ("__init__.py", "py.typed")}
    short.add("executors/__init__.pyi")
    modules = {
        ("" if package == "diloco_orchestrator" else "diloco_orchestrator/") + path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} - short == modules
    assert {name for name in names if not name.startswith("diloco_orchestrator/")} == short
    assert "diloco_orchestrator/py.typed" in names


def test_the_archive_of_a_run_holds_the_same_files(wheel: zipfile.ZipFile):
    packed = {name: data for name, data in our_files() if ".dist-info/" not in name}
    apart = (".dist-info/", "/html-page/")  # no replica renders a page
    assert packed == {name: wheel.read(name) for name in wheel.namelist() if not any(part in name for part in apart)}


def test_the_licence_is_the_whole_text_of_apache_2_and_travels_in_the_wheel(wheel: zipfile.ZipFile):
    """The sha256 is that of https://www.apache.org/licenses/LICENSE-2.0.txt."""
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert wheel.read(name) == text
    metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata.splitlines()


def test_the_cloud_sdks_are_no_dependencies(wheel: zipfile.ZipFile):
    metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    sdks = ("boto3", "modal", "kubernetes", "s3fs")
    assert needed and not [line for line in needed if any(sdk in line for sdk in sdks)]


SHORT_FIRST = """
import executors, replica
from executors.contract import LaunchRequest
from replica.rounds import debt
import executors.testing.rig
"""
LONG_FIRST = """
import diloco_orchestrator.executors.contract, diloco_orchestrator.replica.rounds.debt
import diloco_orchestrator.executors.testing.rig
"""
SAME = """
import importlib, sys
for name in ("executors", "executors.contract", "executors.testing.rig", "replica", "replica.rounds.debt"):
    short, long = importlib.import_module(name), importlib.import_module(f"diloco_orchestrator.{name}")
    assert short is long and short is sys.modules[name], name
    assert long.__name__ == long.__spec__.name == f"diloco_orchestrator.{name}", long.__spec__
    assert importlib.util.find_spec(name).origin == long.__file__, name
    print(long.__file__)
from diloco_orchestrator import LocalProcessExecutor
assert executors.LocalProcessExecutor is LocalProcessExecutor is executors.local_process.LocalProcessExecutor
try:
    import executors.no_such_module
except ModuleNotFoundError as error:
    assert "executors.no_such_module" in str(error)
else:
    raise AssertionError("imported")
"""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [SHORT_FIRST, LONG_FIRST + SHORT_FIRST], ids=["short first", "long first"])
def test_a_module_is_one_object_under_both_names(installed: dict[str, Path], tmp_path: Path, layout: str, order: str):
    files = python("-c", order + SAME, path=[installed[layout]], cwd=tmp_path).splitlines()
    assert files and all(file.startswith(str(installed[layout] / "diloco_orchestrator")) for file in files)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["replica", "diloco_orchestrator.replica"])
def test_the_process_of_a_replica_starts_under_both_names(
    installed: dict[str, Path], tmp_path: Path, layout: str, name: str
):
    assert "--replica-id" in python("-m", name, "--help", path=[installed[layout]], cwd=tmp_path)


# -- a user's own files of these names --------------------------------------------------------------------------------

# What lies in the folder of a user's script. The training function uses both of the user's own.
USERS = {
    "executors.py": "WORD = 'my executors'\n",
    "replica/__init__.py": "from replica.words import WORD\n",
    "replica/words.py": "WORD = 'my replica'\n",
    "my_train.py": """
import executors, replica, torch
from replica.words import WORD

def train(ctx):
    print("they say", executors.WORD, "and", replica.WORD, flush=True)
    assert (executors.WORD, replica.WORD, WORD) == ("my executors", "my replica", "my replica")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ctx.attach(model, optimizer) as session:
        for x in session.batches([torch.ones(4, 2)]):
            loss = model(x).pow(2).mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step(), session.observe(loss=loss.item())
""",
    "elsewhere.py": """
import os, sys
from dataclasses import replace
from diloco_orchestrator import LocalProcessExecutor

class Elsewhere(LocalProcessExecutor):
    '''Runs commands with nothing of this process's environment, as another machine would.'''

    name = "elsewhere"
    shares_machine = False

    def launch(self, request):
        given = [f"{name}={value}" for name, value in {**request.env, **request.secrets}.items()]
        command = ["env", "-i", "PATH=/usr/bin:/bin", *given, sys.executable, *request.command[1:]]
        return super().launch(replace(request, command=command))
""",
    "script.py": """
import json, sys
import executors, replica
from diloco_orchestrator import LocalProcessExecutor, launch
from elsewhere import Elsewhere

def main(kind):
    here = LocalProcessExecutor("processes") if kind == "local" else Elsewhere("processes")
    run = launch("my_train:train", store="bucket", executor=here, code=None if kind == "local" else ".",
                 replicas=2, rounds=2, sync_every=2, **json.loads(sys.argv[2]))
    result = run.wait()
    print(result.status, executors.WORD, replica.WORD, sep=", ")
    print(*run.logs(0), sep="\\n")

if __name__ == "__main__":
    main(sys.argv[1])
""",
    ".gitignore": "bucket/\nprocesses/\n",
}


@pytest.fixture
def script_folder(tmp_path: Path) -> Path:
    for name, text in USERS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "archive"])
def test_a_users_own_modules_of_our_short_names_neither_break_us_nor_are_hidden(script_folder: Path, kind: str):
    """A whole run: in the launching process, in local replicas, and in replicas to which the code travelled."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py", kind, json.dumps(FAST)],
        cwd=script_folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed, my executors, my replica" in done.stdout
    assert "they say my executors and my replica" in done.stdout


def test_launch_replicas_finds_the_users_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "executors.py").write_text("def answer():\n    return 'mine'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    executor = LocalProcessExecutor(tmp_path / "processes")
    handles = executor.launch_replicas(1, "executors:answer", {})
    assert executor.collect(handles)[0].value == "mine"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_users_module_beside_the_script_is_the_users_in_every_layout(
    installed: dict[str, Path], script_folder: Path, layout: str
):
    code = (
        "import executors, replica, sys\n"
        "from diloco_orchestrator import LocalProcessExecutor, ReplicaContext, launch\n"
        "import diloco_orchestrator.replica.__main__, diloco_orchestrator.cli.main\n"
        "print(executors.WORD, replica.WORD, sys.modules['executors'].__file__)"
    )
    found = python("-c", code, path=[script_folder, installed[layout]], cwd=script_folder)
    assert found == f"my executors my replica {script_folder / 'executors.py'}\n"
