"""Run folders of schema version 2 are read as the version that wrote them read them: same digests, same words.

`tests/fixtures/make_kept_runs.py` made them with version 0.3.0. Only what users call is called here: the `diloco`
command and exported names.
"""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cli_support import diloco_here

from diloco_orchestrator import LocalProcessExecutor, RunReader, attach, open_store

FIXTURES = Path(__file__).parent.parent / "fixtures" / "kept_runs"
NAMES = ("voted", "joined", "dealt", "signed", "scored")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept_runs")
    for archive in FIXTURES.glob("*.tar.xz"):
        with tarfile.open(archive, "r:xz") as packed:
            packed.extractall(folder, filter="data")
    return folder


def then(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def said_now(*args: str, cwd: Path) -> Any:
    """What the command prints with --json."""
    done = diloco_here(*args, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def base_digests(folder: Path) -> list[str | None]:
    return [commit.base_digest for commit in RunReader(open_store(str(folder))).commits()]


def check_kept(now: Any, said: Any, where: str = "") -> None:
    """Every field of then is there with the same value; later versions may say more."""
    if isinstance(said, dict):
        for name, value in said.items():
            assert name in now, f"{where}.{name}"
            check_kept(now[name], value, f"{where}.{name}")
    elif isinstance(said, list) and all(isinstance(each, str) for each in said):
        assert [each for each in now if each in said] == said, where  # a sentence may be added, none may go
    elif isinstance(said, list):
        assert len(now) == len(said), where
        for number, value in enumerate(said):
            check_kept(now[number], value, f"{where}[{number}]")
    else:
        assert now == said, where


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("status", ()),
        ("verify", ()),
        ("snapshots", ()),
        ("explain", ()),
        ("gc", ("--payloads", "needed", "--keep-snapshots", "2", "--dry-run")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_says_of_a_kept_run_what_it_said_when_the_run_was_made(name, command, options, unpacked, tmp_path):
    now = said_now(command, str(unpacked / name), *options, cwd=tmp_path)
    check_kept(json.loads(json.dumps(now).replace(str(unpacked / name), "RUN")), then(name)[command], command)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", ["newest", "rebuilt"])
def test_a_model_that_is_pulled_from_a_kept_run_has_the_same_bytes(name, which, unpacked, tmp_path):
    said = then(name)["pull"][which]
    options = ("--round", str(said["round"])) if which == "rebuilt" else ()
    now = said_now("pull", str(unpacked / name), str(tmp_path / "model"), *options, cwd=tmp_path)
    assert now["round"] == said["round"]
    pulled = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "model").iterdir()}
    check_kept(pulled, said["files"])


@pytest.mark.parametrize("name", NAMES)
def test_the_bases_of_a_kept_run_are_those_that_its_replicas_had(name, unpacked):
    assert base_digests(unpacked / name) == then(name)["base_digests"]


@pytest.mark.slow
def test_segments_of_a_kept_run_that_are_trained_again_give_the_same_payloads(unpacked, tmp_path):
    options = ("--draw", "2", "--seed", "1", "--trust-bucket")
    said, now = then("joined")["audit"], said_now("audit", str(unpacked / "joined"), *options, cwd=tmp_path)
    assert now["agrees"] and now["segments"] == said["segments"] and now["head"] == said["head"]
    drawn = [[(each["round"], each["replica"], each["outcome"]) for each in of["findings"]] for of in (now, said)]
    assert drawn[0] == drawn[1] == [(6, 1, "equal"), (4, 1, "equal")]


@pytest.mark.slow
def test_a_kept_run_that_is_resumed_ends_with_the_same_base(unpacked, tmp_path):
    shutil.copytree(unpacked / "joined", tmp_path / "run")
    run = attach(str(tmp_path / "run"), executor=LocalProcessExecutor(tmp_path / "executor"), trust_bucket=True)
    assert run.resume().wait().status == "completed"
    assert base_digests(tmp_path / "run") == then("joined")["base_digests_once_resumed"]
