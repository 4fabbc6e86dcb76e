"""Executors of other packages, found by their entry points: on the command line, in a run's record, in `attach`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cli_support import diloco, diloco_here

ROOT = Path(__file__).parents[2]
GROUP = "diloco_orchestrator.executors"
# An executor of somebody else: local processes, each with a variable of its own.
THEIRS = '''
from executors import LocalProcessExecutor, plain_options


class TheirExecutor(LocalProcessExecutor):
    """Runs each attempt as a process of their farm.

    Args:
        queue: Name of the queue.
        slots: Slots per replica.
        directory: Where the farm keeps its files.
    """

    name = "their_farm"

    def __init__(self, queue: str, slots: int = 1, directory: str | None = None) -> None:
        super().__init__(directory)
        self.options = plain_options(locals())
        self.queue, self.slots = queue, slots

    def plan(self, request):
        return {**super().plan(request), "queue": self.queue, "slots": self.slots}
'''
TRAIN = """
import torch

def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ctx.attach(model, optimizer) as replica:
        for x in replica.batches([torch.ones(4, 2)]):
            loss = model(x).pow(2).mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step(), replica.observe(loss=loss.item())
"""
FAST = ["--replicas", "1", "--rounds", "2", "--sync-every", "2", "--timing-poll-s", "0.05"]

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Installs a distribution into a folder of its own, as pip would lay it out, and returns the folder."""

    def install(package: str, entry_points: Mapping[str, str], **modules: str) -> Path:
        folder = tmp_path / f"site-{package}"
        metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}\n" for name, value in entry_points.items()]
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        return folder

    return install


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_train.py").write_text(TRAIN)
    return folder


def path_of(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *folders]))}


def python(code: str, *folders: Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, **path_of(*folders)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


def test_an_installed_executor_has_its_options_on_the_command_line(
    install: Install, project: Path, monkeypatch: pytest.MonkeyPatch
):
    site = install("their-package", {"their_farm": "their_module:TheirExecutor"}, their_module=THEIRS)
    monkeypatch.syspath_prepend(site)
    done = diloco_here("run", "--executor", "their_farm", "--help", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "eks, hf-jobs, join, kubernetes, local, modal, ray, slurm, their_farm" in " ".join(done.stdout.split())
    assert "--queue VALUE" in done.stdout and "Slots per replica.  [default: 1]" in done.stdout

    run = ["plan", "my_train:train", "--store", "bucket", "--executor", "their_farm:2", "--pin", "given"]
    done = diloco_here(*run, "--queue", "night", "--slots", "3", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)["requests"]["replica 0 (their_farm)"]
    assert (sent["queue"], sent["slots"]) == ("night", 3)

    done = diloco_here(*run, cwd=project)
    assert done.returncode == 2 and "TheirExecutor needs queue: --queue VALUE" in done.stderr


@pytest.mark.slow
def test_a_run_on_an_installed_executor_is_attached_to_by_its_address_alone(install: Install, project: Path):
    site = install("their-package", {"their_farm": "their_module:TheirExecutor"}, their_module=THEIRS)
    farm = ["--executor", "their_farm", "--queue", "night", "--directory", str(project / "farm")]
    where = ["run", "my_train:train", "--store", "bucket"]
    done = diloco(*where, *farm, *FAST, cwd=project, environ=path_of(site))
    assert done.returncode == 0, done.stdout + done.stderr
    spec = json.loads((project / "bucket" / "run.json").read_text())["executor"]
    assert spec == {"name": "their_farm", "options": {"queue": "night", "slots": 1, "directory": str(project / "farm")}}

    attach = (
        "from diloco_orchestrator import attach\n"
        "run = attach('bucket').resume(rounds=1)\n"
        "print(run.wait().status, type(run._means.executor).__module__, run._means.executor.queue)\n"
    )
    done = python(attach, site, cwd=project)
    assert done.stdout.splitlines()[-1:] == ["completed their_module night"], done.stdout + done.stderr

    done = diloco("attach", "bucket", cwd=project)  # on a machine without their package
    assert done.returncode == 1, done.stdout + done.stderr
    assert "unknown executor 'their_farm'" in done.stderr and "Install the package that provides it" in done.stderr


@pytest.mark.slow
def test_a_broken_entry_point_is_an_error_only_where_its_name_is_used(install: Install, project: Path):
    entries = {
        "absent": "no_such_module:X",
        "crash": "crashes:X",
        "number": "fine:X",
        "other": "fine:Other",
        "alike": "fine:Alike",
        "half": "fine:Half",
    }
    fine = (
        "from executors import RemoteExecutor\n"
        "X = 3\nclass Other(RemoteExecutor):\n    name = 'another'\n"
        "class Half(RemoteExecutor):\n    name = 'half'\n"
        "class Alike:\n    name = 'alike'\n    shares_machine = True\n    launch = poll = None\n"
    )
    site = install("broken-package", entries, crashes="raise RuntimeError('no licence')", fine=fine)
    run = ["plan", "my_train:train", "--store", "bucket"]
    assert diloco(*run, "--executor", "local", cwd=project, environ=path_of(site)).returncode == 0
    for name, words in (
        ("absent", "does not load: ModuleNotFoundError: No module named 'no_such_module'"),
        ("crash", "does not load: RuntimeError: no licence"),
        ("number", "is no class derived from `ServerlessExecutor`"),
        ("other", "calls itself 'another'"),
        ("alike", "is no class derived from `ServerlessExecutor`"),
        ("half", "lacks what `ServerlessExecutor` asks for: cancel, find, launch, logs, plan, statuses."),
    ):
        done = diloco(*run, "--executor", name, "--queue", "night", cwd=project, environ=path_of(site))
        assert done.returncode == 2 and words in done.stderr, done.stdout + done.stderr
        assert f"executor {name!r} of package broken-package" in done.stderr


@pytest.mark.slow
def test_a_name_that_two_packages_claim_is_refused_with_both(install: Install, project: Path):
    first = install("first-farm", {"farm": "first:X"}, first="")
    second = install("second-farm", {"farm": "second:X", "modal": "second:X"}, second="")
    run = ["plan", "my_train:train", "--store", "bucket", "--executor"]
    done = diloco(*run, "farm", cwd=project, environ=path_of(first, second))
    assert done.returncode == 2 and "registered by first-farm and second-farm" in done.stderr
    done = diloco(*run, "modal", cwd=project, environ=path_of(first, second))
    assert done.returncode == 2 and "registered by diloco-orchestrator and second-farm" in done.stderr
    assert diloco(*run, "local", cwd=project, environ=path_of(first, second)).returncode == 0


def test_our_own_executors_are_found_in_a_plain_checkout():
    """Without any metadata: an interpreter without site-packages has our packages by their folder alone."""
    code = (
        "from executors.registry import OURS, executor_class, executor_names\n"
        "assert executor_names() == sorted(OURS), executor_names()\n"
        "light = [name for name in OURS if name != 'join']  # which reads records, and those need pydantic\n"
        "print([executor_class(name).name for name in light] == light)\n"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
