"""The replica's image, as far as it can be judged without building it."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
IMAGE = ROOT / "infra" / "image"


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, lines joined, comments left out."""
    lines = [line for line in (IMAGE / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined if line.strip())]


def arguments(dockerfile: list[tuple[str, str]], instruction: str) -> list[str]:
    return [rest for word, rest in dockerfile if word == instruction]


def test_the_base_is_one_slim_python_pinned_to_its_last_number(dockerfile: list[tuple[str, str]]):
    (base,) = arguments(dockerfile, "FROM")
    version = re.fullmatch(r"python:(\d+\.\d+\.\d+)-slim-[a-z]+", base)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version is not None and SpecifierSet(project["requires-python"]).contains(version[1])


def test_it_runs_as_a_numbered_user_who_is_not_root(dockerfile: list[tuple[str, str]]):
    user = arguments(dockerfile, "USER")[-1]
    uid, gid = re.fullmatch(r"(\d+):(\d+)", user).groups()  # type: ignore[union-attr]
    assert int(uid) > 0 and int(gid) > 0
    assert f"useradd --uid {uid} " in arguments(dockerfile, "RUN")[-1]
    after = [word for word, _ in dockerfile[[word for word, _ in dockerfile].index("USER") :]]
    assert "RUN" not in after and "COPY" not in after


def test_sigterm_reaches_python(dockerfile: list[tuple[str, str]]):
    """No shell in between, and no entrypoint before what an executor starts."""
    assert arguments(dockerfile, "ENTRYPOINT") == []
    assert all(command.startswith("[") for command in arguments(dockerfile, "CMD"))
    assert "PYTHONUNBUFFERED=1" in arguments(dockerfile, "ENV")[0].split()


def test_nothing_is_fetched_but_packages_and_nothing_stays_that_is_not_needed(dockerfile: list[tuple[str, str]]):
    assert arguments(dockerfile, "ADD") == []
    (run,) = arguments(dockerfile, "RUN")
    assert "--no-cache-dir" in run and "rm -r /tmp/build" in run
    assert not re.search(r"apt-get|curl|wget|build-essential|https?:", run)


def test_no_secret_and_no_address_is_written_down(dockerfile: list[tuple[str, str]]):
    assert arguments(dockerfile, "ARG") == ['TORCH_INDEX=""']
    settings = " ".join(arguments(dockerfile, "ENV"))
    assert not re.search(r"KEY|SECRET|TOKEN|PASSWORD", settings, re.IGNORECASE)
    for path in IMAGE.iterdir():
        assert "://" not in path.read_text(), path


def test_what_is_copied_exists_and_passes_the_ignore_file(dockerfile: list[tuple[str, str]]):
    ignored = (IMAGE / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    passing = {rule.removeprefix("!") for rule in rules[1:]}
    copied = {path for copy in arguments(dockerfile, "COPY") for path in copy.split()[:-1]}
    assert copied == passing
    assert all((ROOT / path).is_file() for path in copied)


def test_what_is_installed_is_what_a_replica_with_a_bucket_needs():
    """The list that the image is built from is ours and the extra's, every one of them pinned."""
    command = [sys.executable, str(IMAGE / "requirements.py"), str(ROOT / "pyproject.toml")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {canonicalize_name((each := Requirement(line)).name): each.specifier for line in printed}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in project["dependencies"] + extras["train"] + extras["s3"]]
    assert found == {canonicalize_name(each.name): each.specifier for each in wanted}
    lock = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lock)}
    assert all(name in pinned and specifier.contains(pinned[name]) for name, specifier in found.items())


def test_no_file_of_infra_names_a_package_registry_or_holds_a_credential():
    forbidden = re.compile(r"pypi\.|pythonhosted|download\.pytorch|AKIA[0-9A-Z]{16}|hf_[A-Za-z0-9]{30}", re.IGNORECASE)
    for path in (ROOT / "infra").rglob("*"):
        if path.is_file() and not fnmatch(path.name, "*.pyc"):
            assert not forbidden.search(path.read_text()), path
