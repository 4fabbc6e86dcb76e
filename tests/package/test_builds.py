"""sdist and wheel as `python -m build` makes them: what is in them, the commit that `diloco --version` says, and what
works where they are installed without torch, or run by pipx and uvx.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a sdist and two wheels are built

ROOT = Path(__file__).parents[2]
SAYS = "from diloco_orchestrator.cli.installed_version import installed_version as says; print(says())"
BACKEND = "import setuptools.build_meta as build, sys; print(getattr(build, sys.argv[1])(sys.argv[2]))"


@dataclass(frozen=True)
class Built:
    """A checkout with one commit, the sdist built in it, and the wheel built from the unpacked sdist."""

    checkout: Path
    sdist: Path
    wheel: Path
    commit: str


def git(*words: str, cwd: Path) -> str:
    own = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "core.hooksPath=/dev/null"]
    return subprocess.run(["git", *own, *words], cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def built(what: str, tree: Path, folder: Path) -> Path:
    """What setuptools, the build backend that pyproject.toml names, makes of a tree. `what`: a hook of PEP 517."""
    done = subprocess.run([sys.executable, "-c", BACKEND, what, str(folder)], cwd=tree, capture_output=True, check=True)
    return folder / done.stdout.decode().splitlines()[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "checkout"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if name.startswith(("diloco_orchestrator/", "executors/", "replica/", "docs/reference/")) or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    git("init", "-q", cwd=tree)
    git("add", "-A", cwd=tree)
    git("commit", "-qm", "all", cwd=tree)
    sdist = built("build_sdist", tree, folder)
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    shutil.rmtree(tree / "diloco_orchestrator.egg-info", ignore_errors=True)
    return Built(tree, sdist, built("build_wheel", unpacked, folder), git("rev-parse", "HEAD", cwd=tree))


def said(folder: Path) -> str:
    """The version that an interpreter with our dependencies says of the package in `folder`."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", "-c", SAYS]
    return subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, check=True).stdout.strip()


def test_a_wheel_of_an_sdist_says_the_commit_wherever_it_is_installed(made, tmp_path):
    git("init", "-q", cwd=tmp_path)  # a repository of its user
    (tmp_path / "a.txt").write_text("a")
    git("add", "-A", cwd=tmp_path)
    git("commit", "-qm", "theirs", cwd=tmp_path)
    zipfile.ZipFile(made.wheel).extractall(tmp_path / "site")
    assert said(tmp_path / "site") == f"0.3.0 ({made.commit[:7]})"


def test_a_checkout_says_its_commit_and_whether_files_differ(made):
    assert said(made.checkout) == f"0.3.0 ({made.commit[:7]})"
    assert not (made.checkout / "diloco_orchestrator/COMMIT").exists()  # builds leave none there
    readme = made.checkout / "README.md"
    before = readme.read_text()
    readme.write_text(before + "more")
    assert said(made.checkout) == f"0.3.0 ({made.commit[:7]}+changes)"
    readme.write_text(before)


def test_a_copy_of_the_files_says_the_version_alone(made, tmp_path):
    git("init", "-q", cwd=tmp_path)  # of somebody else, a folder above
    shutil.copytree(made.checkout, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    assert said(tmp_path / "copy") == "0.3.0"


def test_the_wheel_of_an_sdist_holds_code_page_and_licences(made):
    names = zipfile.ZipFile(made.wheel).namelist()
    ours = set(git("ls-files", "diloco_orchestrator", cwd=ROOT).splitlines())
    kept = {name for name in ours if "/html-page/" in name or name.endswith((".py", ".pyi", "py.typed"))}
    assert not kept - set(names) and any("/html-page/curves.js" in name for name in kept)
    licences = [name for name in names if "/licenses/" in name]
    assert sorted(Path(name).name for name in licences) == ["LICENSE", "LICENSE-uPlot"]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]


# -- an installation that only looks ----------------------------------------------------------------------------------

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def light(made: Built, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`diloco` of the wheel without extras, in an environment of its own, with kept runs in its folder."""
    folder = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    pip = [str(folder / "venv/bin/pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(made.wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip reaches no index: {done.stderr.strip().splitlines()[-1]}")
    for name in ("runs", "later"):
        with tarfile.open(ROOT / f"tests/fixtures/kept_runs/{name}.tar.xz") as packed:
            packed.extractall(folder, filter="data")

    def diloco(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [str(folder / "venv/bin/diloco"), *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    python = str(folder / "venv/bin/python")
    code = "import importlib.util as found; print(found.find_spec('torch'), found.find_spec('transformers'))"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout == "None None\n"
    return diloco


RUNS = ("voted", "joined", "dealt", "signed")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("command", ["status", "report", "explain", "snapshots", "logs"])
def test_a_run_is_read_without_torch(light, command, run):
    words = ["--replica", "0"] if command == "logs" else [f"{run}.html"] if command == "report" else []
    done = light(command, run, *words)
    assert done.returncode == 0 and done.stdout and "Traceback" not in done.stderr, done.stderr


def test_an_installed_command_prints_the_section_about_an_error(light):
    refused = light("status", "nowhere")
    command = refused.stderr.partition("More: diloco ")[2].partition(", or docs/reference")[0]
    assert light(*command.split()).stdout.startswith("NoSuchRun: There is no run in this folder. Do: ")


def test_help_to_join_needs_no_torch(light):
    assert "Usage: diloco join" in light("join", "--help").stdout


def test_doctor_without_torch_says_so_and_goes_on_to_the_store(light):
    done = light("doctor", "a-store")
    assert done.returncode == 1 and "FAIL  torch          it does not import" in done.stdout
    assert "ok    throughput" in done.stdout and "arithmetic" not in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("run", RUNS)
def test_verify_without_torch_checks_the_rest_and_says_what_it_did_not_derive(light, run):
    done = light("verify", run)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "not derived: averages, outer steps, bases, and the tensors of snapshots: needs torch" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("NOT VERIFIED: what was checked agrees")
    assert "everything agrees" not in done.stdout
    (says,) = [line for line in done.stdout.splitlines() if line.startswith("checked:")]
    assert all(words in says for words in ("rounds", "manifests", "payloads and states", "files of snapshots"))
