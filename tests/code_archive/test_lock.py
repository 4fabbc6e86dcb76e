"""Hashes in what travels: a lock made once, taken by itself, and nothing installed over there that it does not list."""

import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from fake_uv import HASH, fake_uv, no_uv
from wheels import wheel

from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.code_archive.pack import LOCK_NAME, CodeBundle, lock_file_of, needed_there, pack
from diloco_orchestrator.code_archive.pinning import uv_command, write_lock
from diloco_orchestrator.code_archive.requirements import read_requirements
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.launching.plan import plan_launch
from executors import HFJobsExecutor

NEEDED = [each.name for each in needed_there(["s3"])]
WHOLE = "".join(f"{name}==1.0 \\\n    --hash={HASH}\n" for name in NEEDED)
ABSENT = {"name": "no-such-package-of-ours", "spec": "no-such-package-of-ours>=1", "pin": ""}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (folder := tmp_path / "code").mkdir()
    (folder / "my_train.py").write_text("def train(ctx):\n    ...\n")
    return folder


def planned(code: Path, **given: object) -> str:
    secrets = {"AWS_ACCESS_KEY_ID": "a" * 20, "AWS_SECRET_ACCESS_KEY": "b" * 40}
    made = plan_launch("my_train:train", "s3://b/x", executor=HFJobsExecutor(), code=code, secrets=secrets, **given)  # type: ignore[arg-type]
    return "\n".join(made.lines())


def test_without_hashes_the_plan_names_every_package_and_image_that_is_not_pinned(code: Path):
    words = planned(code)
    assert "packages:  without hashes" in words and all(name in words for name in NEEDED)
    assert "images:    python:3.11 by tag" in words


def test_a_lock_beside_the_code_is_taken_and_an_image_by_digest_is_not_named(code: Path):
    (code / LOCK_NAME).write_text(WHOLE)
    assert f"packages:  {len(NEEDED)} by hash; nothing is installed without one" in planned(code)
    assert "without hashes" in planned(code, requirements=["packaging"])  # what the caller names goes first
    pinned = plan_launch(
        "my_train:train", "s3://b/x", executor=HFJobsExecutor(image=f"python@{HASH}"), code=code, secrets={"A": "b" * 9}
    )
    assert pinned.images == () and "images:" not in "\n".join(pinned.lines())


def test_it_is_found_beside_a_module_and_a_package_and_not_further_up(code: Path):
    (code / LOCK_NAME).write_text(WHOLE)
    (package := code / "pkg").mkdir()
    (package / "__init__.py").touch()
    (plain := code / "plain").mkdir()
    for given in (code, code / "my_train.py", package, CodeBundle([plain, package])):
        assert lock_file_of(given, "my_train:train") == code / LOCK_NAME
    assert lock_file_of(plain, "my_train:train") is None


def test_a_list_with_hashes_of_some_packages_names_the_others(code: Path):
    words = planned(code, requirements=[f"{NEEDED[0]}==1.0 --hash={HASH}"])
    assert "packages:  1 by hash" in words and f"the image must have {', '.join(sorted(NEEDED[1:]))}" in words


def test_what_has_no_hash_is_not_installed_over_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With hashes for some packages, those that we need were installed without any before."""
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: pytest.fail("pip was run"))
    details = {"requirements": [ABSENT], "constraints": [], "users": [], "hashed": True}
    with pytest.raises(
        bootstrap.Stopped, match="lacks no-such-package-of-ours>=1, and the run's requirements"
    ) as refused:
        bootstrap.install_hashed(details, tmp_path)
    assert refused.value.code == bootstrap.EXIT_PERMANENT
    there = {"name": "Packaging", "spec": "packaging", "pin": ""}
    bootstrap.install_hashed({**details, "requirements": [there]}, tmp_path)


def test_packages_of_other_systems_are_not_wanted():
    elsewhere = {**ABSENT, "marker": "sys_platform == 'win32'"}
    here = {**ABSENT, "marker": "python_version >= '3.8'"}
    assert bootstrap.missing([elsewhere]) == [] and bootstrap.missing([here]) == [ABSENT["spec"]]
    packed = read_requirements([f"a==1; sys_platform == 'win32' --hash={HASH}"])
    assert packed is not None and str(packed.packages[0].marker) == 'sys_platform == "win32"'


@pytest.mark.slow  # pip takes seconds
def test_pip_refuses_a_file_that_was_replaced_on_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip itself runs, once with the file that the lock means and once with one that another put in its place."""
    (index := tmp_path / "index").mkdir()
    digest = wheel(index, "hashed-thing", body="x = 1")
    lines = f"--no-index\n--find-links {index}\nhashed-thing==1.0 --hash={digest}"
    (tmp_path / "requirements.txt").write_text(lines)
    thing = {"name": "hashed-thing", "spec": "hashed-thing>=1", "pin": ""}
    details = {"requirements": [thing], "users": [{**thing, "pin": "1.0"}], "hashed": True}
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "target"))
    bootstrap.install_hashed(details, tmp_path)
    assert (tmp_path / "target" / "hashed_thing.py").read_text() == "x = 1"
    wheel(index, "hashed-thing", body="x = 2  # not what was locked")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "second"))
    with pytest.raises(bootstrap.Stopped, match="pip could not install the requirements"):
        bootstrap.install_hashed(details, tmp_path)
    assert not (tmp_path / "second").exists()


def test_a_lock_lists_what_we_and_the_user_need_in_the_versions_of_this_machine(tmp_path: Path, monkeypatch):
    uv = fake_uv(tmp_path / "bin", monkeypatch)
    found = write_lock(tmp_path / LOCK_NAME, extras=["s3"], requirements=["httpx>=0.28"], options=["--some-index", "x"])
    (got,) = uv.calls
    assert sorted(each.name for each in found.packages) == sorted([*NEEDED, "httpx"])
    assert {"--universal", "--generate-hashes", "--some-index"} <= set(got["argv"])
    assert f"pytest=={pytest.__version__}\n" in got["limits"] and "+" not in got["limits"]
    read = read_requirements(tmp_path / LOCK_NAME)
    assert read is not None and read.hashed


def test_a_lock_without_hashes_or_without_uv_is_refused(tmp_path: Path, monkeypatch):
    fake_uv(tmp_path / "bin", monkeypatch, (0, "", "first==1.0\n"))
    with pytest.raises(ConfigError, match="uv wrote no hashes"):
        write_lock(tmp_path / LOCK_NAME)
    no_uv(tmp_path / "empty", monkeypatch)
    with pytest.raises(ConfigError, match="uv, which is not installed here"):
        write_lock(tmp_path / LOCK_NAME)
    assert not (tmp_path / LOCK_NAME).exists()


@pytest.mark.slow
@pytest.mark.skipif(uv_command() is None, reason="needs uv: pip install uv")
def test_uv_itself_locks_what_a_replica_needs(code: Path, monkeypatch: pytest.MonkeyPatch):
    """Needs a package registry: a few seconds, because nothing is downloaded but metadata."""
    monkeypatch.delenv("UV_OFFLINE")
    found = write_lock(code / LOCK_NAME, extras=["s3"])
    assert {bootstrap.canonical(name) for name in NEEDED} < {bootstrap.canonical(each.name) for each in found.packages}
    archive = pack(code, "my_train:train", ["s3"], read_requirements(code / LOCK_NAME))
    assert archive.unhashed == () and archive.hashed == len(found.packages)
    with zipfile.ZipFile(BytesIO(archive.data)) as opened:
        details = json.loads(opened.read(bootstrap.DETAILS))
    assert "colorama" not in [spec.partition("=")[0] for spec in bootstrap.missing(details["users"])]  # for Windows
