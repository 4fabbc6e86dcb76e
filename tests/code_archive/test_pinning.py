"""The list with hashes that a launch makes by itself: asked of uv, and installed where an image lacks packages."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fake_uv import HASH, Answer, fake_uv, no_uv
from wheels import wheel

from diloco_orchestrator import CodeBundle
from diloco_orchestrator.code_archive import bootstrap, pinning
from diloco_orchestrator.code_archive.pack import LOCK_NAME, needed_there, pack
from diloco_orchestrator.code_archive.pinning import check_pinned, pinned, uv_command
from diloco_orchestrator.code_archive.requirements import MadeList, read_requirements
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.launching.plan import plan_launch
from executors import HFJobsExecutor, LocalProcessExecutor

ROOT = Path(__file__).parents[2]
NEEDED = [each.name for each in needed_there(["s3"])]
TOKEN = "hf_" + "q" * 30
PASSWORD = "correct-horse-battery"
UV_WRITES = f"""\
boto3==1.43.117 \\
    --hash={HASH} \\
    --hash={HASH}
    # via -r /tmp/x/wanted.in
botocore==1.43.117 \\
    --hash={HASH}
    # via
    #   boto3
    #   viaduct
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash={HASH}
    # via viaduct
viaduct==2.0 \\
    --hash={HASH}
    # via
    #   -c /tmp/x/limits.txt
    #   -r /tmp/x/wanted.in
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (folder := tmp_path / "code").mkdir()
    (folder / "my_train.py").write_text("def train(ctx):\n    ...\n")
    return folder


def planned(code: object, image: str = "python:3.11", **given: Any) -> str:
    secrets = {"AWS_ACCESS_KEY_ID": "a" * 20, "AWS_SECRET_ACCESS_KEY": "b" * 40}
    executor = given.pop("executor", None) or HFJobsExecutor(image=image)
    made = plan_launch("my_train:train", "s3://b/x", executor=executor, code=code, secrets=secrets, **given)  # type: ignore[arg-type]
    return "\n".join(made.lines())


def listed(requirements: list[str] | None = None, **secrets: str) -> pinning.Pinned:
    return pinned("auto", read_requirements(requirements), False, ["s3"], (), secrets)


# -- what a launch sends ----------------------------------------------------------------------------------------------


def test_without_a_list_uv_makes_one_for_this_launch_and_writes_nothing_beside_the_code(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uv = fake_uv(tmp_path / "bin", monkeypatch)
    bundle = CodeBundle([code], requirements=["first>=1", "second>=2; python_version >= '3.8'"])
    words = planned(bundle, requirements=["--index-url https://index.example.org/simple", "third<3"], pin="auto")
    count = len(NEEDED) + 3
    assert f"packages:  {count} by hash (listed by uv for this launch); nothing is installed without one" in words
    (call,) = uv.calls
    assert set(call["wanted"]) > {"first>=1", 'second>=2; python_version >= "3.8"', "third<3"}  # type: ignore[call-overload]
    assert {"--universal", "--generate-hashes", "--no-build"} <= set(call["argv"])  # type: ignore[call-overload]
    assert [path.name for path in code.iterdir()] == ["my_train.py"]


def test_the_list_travels_with_the_users_index_and_what_the_user_asked_for(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_uv(tmp_path / "bin", monkeypatch)
    index = "--index-url https://index.example.org/simple"
    made = listed([index, "third<3"]).requirements
    assert isinstance(made, MadeList) and made.options == [index]
    with zipfile.ZipFile(BytesIO(pack(code, "my_train:train", ["s3"], made).data)) as opened:
        details = json.loads(opened.read(bootstrap.DETAILS))
        lines = opened.read(bootstrap.REQUIREMENTS).decode().splitlines()
    assert [each["spec"] for each in details["asked"]] == ["third<3"]
    assert lines[0] == index and len(lines) == 1 + len(details["users"]) == 1 + len(details["needed_by"])
    named = [line.partition("==")[0] for line in lines[1:]]
    assert named == [each["name"] for each in details["users"]] and "third" in named


def test_uv_gets_no_credentials_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uv = fake_uv(tmp_path / "bin", monkeypatch)
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "UV_INDEX_OURS_PASSWORD"):
        monkeypatch.setenv(name, PASSWORD)
    listed()
    given = set(uv.calls[0]["env"])  # type: ignore[call-overload]
    assert {"UV_INDEX_OURS_PASSWORD", "PATH"} < given and not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN"} & given


@pytest.mark.parametrize("given", [{"env": {"PIP_INDEX_URL": "x"}}, {"secrets": {"PIP_INDEX_URL": PASSWORD}}])
def test_a_replica_with_an_index_of_its_own_gets_no_list_from_another(
    given: dict[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A private package may have a namesake on the public index, whose hash would then be listed."""
    uv = fake_uv(tmp_path / "bin", monkeypatch)
    found = pinned("auto", None, False, ["s3"], (), given.get("secrets", {}), given.get("env", {}))
    assert found.requirements is None and found.note.startswith("PIP_INDEX_URL names an index") and uv.calls == []


def test_what_the_user_pins_is_not_held_to_the_version_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uv = fake_uv(tmp_path / "bin", monkeypatch)
    listed(["Click==0.1"])
    limits = str(uv.calls[0]["limits"]).splitlines()
    assert f"pytest=={pytest.__version__}" in limits and not [each for each in limits if each.startswith("click==")]


def test_uv_is_asked_for_the_oldest_python_and_then_within_fewer_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pinning, "_pythons", lambda newest: ["3.11", "3.12"])
    uv = fake_uv(tmp_path / "bin", monkeypatch, of_python={"3.11": (1, "no such set", None)})
    assert listed().requirements is not None and len(uv.calls) == 2
    uv = fake_uv(tmp_path / "second", monkeypatch, (1, "no such set", None))
    assert listed().note == "uv: no such set" and len(uv.calls) == 4
    every, fewer = str(uv.calls[0]["limits"]), str(uv.calls[3]["limits"])
    assert "pytest==" in every and "pytest==" not in fewer and "torch==" in fewer
    uv = fake_uv(tmp_path / "third", monkeypatch, (2, "cannot be reached", None))
    assert listed().note == "uv: cannot be reached" and len(uv.calls) == 1  # no other version would help


def test_without_a_list_the_launch_goes_on_and_says_why(code: Path):
    """Whether uv is installed here or not: these tests keep it offline."""
    words = planned(code)
    reason = "uv, which lists them, is not installed here" if uv_command() is None else "the network was disabled"
    assert "packages:  without hashes (uv" in words and reason in words and all(name in words for name in NEEDED)


LOCAL = f"torch==2.6.0+cpu --hash={HASH}\n"


@pytest.mark.parametrize(
    ("answer", "asked", "words"),
    [
        ((2, f"one\ntwo\nthree of {PASSWORD}\n\nfour {TOKEN}\n\x1b[31mfive\n", None), [], "uv: three of <DB_PASSWORD"),
        ((2, "error: https://me:secret-of-mine@index.example.org/simple", None), [], "uv: error: https://<redacted>@"),
        ((2, "", None), [], "uv: it ended without a word"),
        ((2, "x" * 1000, None), [], f"uv: {'x' * 300}…"),
        ((0, "", "first==1.0\n"), [], "no hashes for these packages"),
        ((0, "", f"first==1.0\nsecond==1.0 --hash={HASH}\n"), [], "uv's list cannot be used: requirements: first have"),
        ((0, "", LOCAL), [], "torch==2.6.0+cpu is a local build"),
        ((0, "", None), ["mine @ git+https://${TOKEN}@host/mine"], "mine is named by URL"),
    ],
)
def test_whatever_uv_does_the_launch_goes_on_without_and_without_credentials(
    answer: Answer, asked: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_uv(tmp_path / "bin", monkeypatch, answer)
    given = read_requirements(["packaging", *asked])
    found = pinned("auto", given, False, ["s3"], (), {"DB_PASSWORD": PASSWORD})
    assert found.requirements is given and words in found.note
    assert not [each for each in (PASSWORD, TOKEN, "secret-of-mine", "\n", "\x1b") if each in found.note]


def test_uv_that_does_not_end_or_cannot_be_run_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_uv(tmp_path / "bin", monkeypatch, (-1, "", None))
    monkeypatch.setattr(pinning, "LIMIT_S", 0.2)
    assert listed().note == "uv had not listed them after 0.2 s"
    (tmp_path / "bin" / "uv").write_bytes(b"\x7fELF of another machine")
    assert listed().note.startswith("uv cannot be run: ")


def test_what_is_given_is_taken_and_nothing_is_asked(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uv = fake_uv(tmp_path / "bin", monkeypatch)
    assert "packages:  without hashes: replicas take" in planned(code, pin="given")
    hashed = read_requirements([f"first==1.0 --hash={HASH}"])
    assert pinned("auto", hashed, False, (), (), {}) == pinning.Pinned(hashed)
    assert pinned("auto", None, True, (), (), {}) == pinning.Pinned(None)  # replicas share this machine
    (code / LOCK_NAME).write_text("".join(f"{name}==1.0 --hash={HASH}\n" for name in NEEDED))
    assert f"packages:  {len(NEEDED)} by hash; nothing" in planned(code)
    assert uv.calls == []


def test_require_refuses_packages_without_a_hash_and_images_by_tag(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    no_uv(tmp_path / "empty", monkeypatch)
    with pytest.raises(ConfigError) as refused:
        planned(code, pin="require")
    assert f"without hashes: {', '.join(sorted(NEEDED))} (uv, which lists them, is not installed" in str(refused.value)
    assert "images by tag: python:3.11. List packages with `diloco lock`" in str(refused.value)
    some = pack(code, "my_train:train", ["s3"], read_requirements([f"{NEEDED[0]}==1.0 --hash={HASH}"]))
    with pytest.raises(ConfigError, match=rf"without hashes: {', '.join(sorted(NEEDED[1:]))}\. List"):
        check_pinned(some, [])
    fake_uv(tmp_path / "bin", monkeypatch)
    assert "by hash (listed by uv" in planned(code, image=f"python@{HASH}", pin="require")
    monkeypatch.syspath_prepend(str(code))
    planned(code, executor=LocalProcessExecutor(tmp_path / "local"), pin="require")  # nothing is installed
    with pytest.raises(ConfigError, match="unknown pin 'requires': did you mean 'require'"):
        pinned("requires", None, True, (), (), {})


def test_the_annotations_of_uv_are_the_dependencies():
    lines, needed_by = pinning._parsed(UV_WRITES)
    assert lines[0] == f"boto3==1.43.117 --hash={HASH} --hash={HASH}" and len(lines) == 4
    assert lines[2] == f"colorama==0.4.6 ; sys_platform == 'win32' --hash={HASH}"
    assert needed_by == ((), ("boto3", "viaduct"), ("viaduct",), ())


# -- what a replica installs of it ------------------------------------------------------------------------------------


def entry(name: str, pin: str = "", marker: str = "") -> dict[str, str]:
    found = {"name": name, "spec": f"{name}=={pin}" if pin else name, "pin": pin}
    return {**found, "marker": marker} if marker else found


# Beside what no machine has, packaging and pip, which these tests run with.
LISTED: dict[str, list[str]] = {
    "Absent_Root": [],
    "absent-part": ["absent-root"],
    "absent-of-part": ["Absent.Part"],
    "packaging": ["absent-root"],
    "absent-of-packaging": ["packaging"],
    "absent-other": [],
    "absent-of-other": ["absent-other"],
    "absent-elsewhere": ["absent-root"],
}


def details_of(roots: list[str], listed: Mapping[str, list[str]] = LISTED, **asked: str) -> dict[str, Any]:
    users = [entry(name, "1.0", "sys_platform == 'win32'" if "elsewhere" in name else "") for name in listed]
    return {
        "requirements": [entry(name) for name in roots],
        "asked": [entry(name, version) for name, version in asked.items()],
        "users": users,
        "needed_by": list(listed.values()),
        "hashed": True,
        "constraints": [],
    }


@pytest.mark.parametrize(
    ("lacking", "keep", "words"),
    [
        ({"absent-root"}, True, "Absent_Root absent-part absent-of-part"),
        ({"absent-root"}, False, "Absent_Root absent-part absent-of-part packaging absent-of-packaging"),
        ({"absent-root", "packaging"}, True, "Absent_Root absent-part absent-of-part packaging absent-of-packaging"),
        ({"absent-other"}, True, "absent-other absent-of-other"),
    ],
)
def test_what_a_lacking_package_depends_on_is_needed(lacking: set[str], keep: bool, words: str):
    """What the image brings stays, and so does what only that would need: no CUDA for a CPU build of torch."""
    names = list(LISTED)
    assert [names[i] for i in bootstrap.needed(details_of([]), lacking, keep)] == words.split()


def runs(monkeypatch: pytest.MonkeyPatch, folder: Path, *succeeds: bool) -> list[tuple[list[str], str]]:
    """What pip is run with, and the file that it is given; each run in turn succeeds or fails."""
    seen: list[tuple[list[str], str]] = []

    def run(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        seen.append((command[3:], Path(command[-1]).read_text()))
        return subprocess.CompletedProcess(command, 0 if succeeds[len(seen) - 1] else 1)

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    lines = [f"{name}==1.0 --hash={HASH}" for name in LISTED]
    (folder / bootstrap.REQUIREMENTS).write_text("\n".join(["--index-url https://index.example.org", *lines]) + "\n")
    return seen


def test_an_image_that_has_all_runs_no_pip_and_one_that_lacks_some_gets_those_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = runs(monkeypatch, tmp_path, True)
    bootstrap.install_made(details_of(["packaging", "pip"]), tmp_path)
    assert seen == []  # whatever versions the list has
    bootstrap.install_made(details_of(["packaging", "absent-root"]), tmp_path)
    ((command, file),) = seen
    assert {"--require-hashes", "--only-binary"} <= set(command)
    names = [line.partition("==")[0] for line in file.splitlines()[1:]]
    assert names == ["Absent_Root", "absent-part", "absent-of-part"]
    assert file.startswith("--index-url https://index.example.org\n") and file.count(HASH) == 3


def test_a_version_that_the_user_pins_replaces_what_the_image_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = runs(monkeypatch, tmp_path, True)
    bootstrap.install_made(details_of(["pip"], packaging="1.0"), tmp_path)
    assert f"packaging==1.0 --hash={HASH}" in seen[0][1]


def test_what_pip_cannot_put_beside_the_image_is_installed_with_all_it_depends_on_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = runs(monkeypatch, tmp_path, False, True, False, False, False)
    bootstrap.install_made(details_of(["absent-root"]), tmp_path)
    assert "packaging==" not in seen[0][1] and "packaging==1.0" in seen[1][1]
    with pytest.raises(bootstrap.Stopped, match=r'by hash \(see above\)\..*pin="given"'):
        bootstrap.install_made(details_of(["absent-root"]), tmp_path)
    with pytest.raises(bootstrap.Stopped):  # the image has nothing that could be replaced
        bootstrap.install_made(details_of(["absent-other"]), tmp_path)
    assert len(seen) == 5 and all("--require-hashes" in command for command, _ in seen)


def test_a_package_that_the_list_lacks_for_this_machine_ends_the_replica_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = runs(monkeypatch, tmp_path)
    for name in ("absent-and-unlisted", "absent-elsewhere"):
        with pytest.raises(bootstrap.Stopped, match=f"the image lacks {name}, and the list") as stopped:
            bootstrap.install_made(details_of([name]), tmp_path)
        assert stopped.value.code == bootstrap.EXIT_PERMANENT
    assert seen == []


# -- with pip and uv themselves ---------------------------------------------------------------------------------------


class Image:
    """A virtual environment with pip, and an index: a folder of wheels."""

    def __init__(self, folder: Path) -> None:
        (index := folder / "index").mkdir()
        self.index, self._folder = index, folder
        subprocess.run([sys.executable, "-m", "venv", str(folder / "image")], check=True)
        self._python = str(folder / "image" / "bin" / "python")
        self._env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PYTHONPATH": str(ROOT)}
        self._env.pop("PIP_TARGET", None)

    def has(self, *specs: str) -> None:
        subprocess.run([self._python, "-m", "pip", "install", "-q", *specs], env=self._env, check=True)

    def versions(self) -> dict[str, str]:
        command = [self._python, "-m", "pip", "list", "--format", "json"]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=True)
        found = {each["name"]: each["version"] for each in json.loads(done.stdout)}
        return {name: version for name, version in found.items() if name.startswith("thing")}

    def install(self, lines: list[str], needed_by: dict[str, list[str]], roots: list[str], **asked: str) -> str:
        """What `install_made` says and pip with it, in this image."""
        (self._folder / bootstrap.REQUIREMENTS).write_text("".join(f"{line}\n" for line in lines))
        details = details_of(roots, needed_by, **asked)
        program = (
            "import json, sys; from pathlib import Path; from diloco_orchestrator.code_archive import bootstrap\n"
            "try: bootstrap.install_made(json.loads(sys.argv[1]), Path(sys.argv[2]))\n"
            "except bootstrap.Stopped as reason: print('stopped:', reason)"
        )
        command = [self._python, "-c", program, json.dumps(details), str(self._folder)]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


@pytest.mark.slow  # pip itself, and an environment of its own
def test_pip_keeps_what_is_there_checks_what_comes_and_takes_nothing_that_was_replaced(image: Image):
    for version in ("1.0", "2.0"):
        wheel(image.index, "thing-there", version, body=f"x = '{version}'")
    image.has("thing-there==1.0")
    root = wheel(image.index, "thing-root", body="x = 1", needs=["thing-there>=1", "thing-part"])
    part = wheel(image.index, "thing-part")
    there = wheel(image.index, "thing-there", "2.0", body="x = '2.0'")
    needed_by: dict[str, list[str]] = {"thing-root": [], "thing-part": ["thing-root"], "thing-there": ["thing-root"]}
    lines = [
        f"thing-root==1.0 --hash={root}",
        f"thing-part==1.0 --hash={part}",
        f"thing-there==2.0 --hash={there}",
    ]
    wheel(image.index, "thing-part", body="x = 'not what was listed'")
    said = image.install(lines, needed_by, ["thing-there", "thing-root"])
    assert "DO NOT MATCH THE HASHES" in said and "stopped: pip could not install the packages by hash" in said
    assert image.versions() == {"thing-there": "1.0"}  # nothing of it came in, by neither try
    assert wheel(image.index, "thing-part") == part
    said = image.install(lines, needed_by, ["thing-there", "thing-root"])
    assert "installing 2 packages by hash" in said and "stopped" not in said
    assert image.versions() == {"thing-part": "1.0", "thing-root": "1.0", "thing-there": "1.0"}
    assert image.install(lines, needed_by, ["thing-there", "thing-root"]) == ""  # and then there is nothing to do


@pytest.mark.slow  # pip itself, and an environment of its own
def test_pip_replaces_by_hash_what_is_there_in_a_version_that_does_not_do(image: Image):
    wheel(image.index, "thing-there", "1.0")
    wheel(image.index, "thing-pinned", "1.0")
    image.has("thing-there", "thing-pinned")
    root = wheel(image.index, "thing-root", needs=["thing-there>=2"])
    there, newer = wheel(image.index, "thing-there", "2.0"), wheel(image.index, "thing-there", "3.0")
    pin = wheel(image.index, "thing-pinned", "0.5")
    needed_by: dict[str, list[str]] = {"thing-root": [], "thing-there": ["thing-root"], "thing-pinned": []}
    lines = [
        f"thing-root==1.0 --hash={root}",
        f"thing-there==2.0 --hash={there}",
        f"thing-pinned==0.5 --hash={pin}",
    ]
    unlisted = [lines[0], f"thing-there==2.0 --hash={newer}", lines[2]]  # the hash of another file
    said = image.install(unlisted, needed_by, ["thing-root"])
    assert "pip cannot install them beside what the image has" in said and "stopped" in said
    assert image.versions() == {"thing-there": "1.0", "thing-pinned": "1.0"}
    said = image.install(lines, needed_by, ["thing-root"], **{"thing-pinned": "0.5"})
    assert "pip cannot install them beside what the image has" in said and "stopped" not in said
    assert image.versions() == {"thing-there": "2.0", "thing-root": "1.0", "thing-pinned": "0.5"}


@pytest.mark.slow  # asks the package index: two seconds
@pytest.mark.skipif(uv_command() is None, reason="needs uv: pip install uv")
def test_uv_itself_lists_what_a_launch_needs(code: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("UV_OFFLINE")
    words = planned(code, image=f"python@{HASH}", pin="require")
    assert "by hash (listed by uv for this launch); nothing is installed without one" in words
    made = listed().requirements
    assert isinstance(made, MadeList)
    parents = dict(zip((each.name for each in made.packages), made.needed_by, strict=True))
    assert parents["botocore"] and "boto3" in parents["botocore"] and parents["torch"] == ()
