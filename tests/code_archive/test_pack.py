"""What travels to other machines, and what must not."""

import io
import json
import os
import zipfile
from pathlib import Path

import pytest

from diloco_orchestrator.code_archive.pack import Archive, CodeBundle, pack
from diloco_orchestrator.errors import ConfigError

ENTRYPOINT = "my_pkg.train:train"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a package, as a user has it."""
    for name, text in {
        "my_pkg/__init__.py": "",
        "my_pkg/train.py": "def train(ctx): ...",
        "my_pkg/data/words.txt": "one two",
        "other.py": "def train(ctx): pass",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(archive: Archive, folder: str = "users") -> list[str]:
    found = zipfile.ZipFile(io.BytesIO(archive.data)).namelist()
    return sorted(name.removeprefix(f"{folder}/") for name in found if name.startswith(f"{folder}/"))


def test_a_folders_content_goes_where_import_looks(project: Path):
    assert names(pack(project, ENTRYPOINT)) == [
        "my_pkg/__init__.py",
        "my_pkg/data/words.txt",
        "my_pkg/train.py",
        "other.py",
    ]


def test_a_package_goes_there_itself(project: Path):
    assert names(pack(project / "my_pkg", ENTRYPOINT)) == [
        "my_pkg/__init__.py",
        "my_pkg/data/words.txt",
        "my_pkg/train.py",
    ]


def test_without_code_the_package_of_the_entrypoint_is_found(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(project))
    assert "my_pkg/train.py" in names(pack(None, ENTRYPOINT))
    assert names(pack(None, "other:train")) == ["other.py"]


def test_our_own_package_travels_too(project: Path):
    ours = names(pack(project, ENTRYPOINT), "ours")
    modules = ("config/__init__.py", "executors/contract.py", "replica/__main__.py")
    assert {f"diloco_orchestrator/{name}" for name in modules} <= set(ours)
    assert any(name.endswith(".dist-info/METADATA") for name in ours)
    assert not any("__pycache__" in name for name in ours)


def test_the_same_files_are_the_same_bytes(project: Path):
    first = pack(project, ENTRYPOINT)
    for path in project.rglob("*"):
        path.touch()
    assert pack(project, ENTRYPOINT).sha256 == first.sha256
    (project / "other.py").write_text("x = 2")
    assert pack(project, ENTRYPOINT).sha256 != first.sha256


def test_what_git_ignores_stays_here(project: Path):
    (project / ".gitignore").write_text("*.log\n/runs/\n!keep.log\n")
    (project / "my_pkg/.gitignore").write_text("secret_*.py\n")
    for name in ("a.log", "keep.log", "runs/big.bin", "my_pkg/secret_plan.py", "my_pkg/runs/kept.py", ".venv/x.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    found = names(pack(project, ENTRYPOINT))
    assert "keep.log" in found and "my_pkg/runs/kept.py" in found
    assert not {"a.log", "runs/big.bin", "my_pkg/secret_plan.py", ".venv/x.py"} & set(found)


def test_git_and_its_rules_know_names_in_any_encoding(project: Path):
    hidden = os.fsencode(project) + b"/my_pkg/donn\xe9es.py"
    Path(os.fsdecode(hidden)).write_text("")
    (project / ".gitignore").write_bytes(b"donn\xe9es.py\n")
    assert not [each for each in names(pack(project, ENTRYPOINT)) if "donn" in each]


def test_rules_of_the_repository_above_count(project: Path):
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("my_pkg/data/\n")
    assert "my_pkg/data/words.txt" not in names(pack(project / "my_pkg", ENTRYPOINT))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "A=b"),
        ("my_pkg/server.pem", "x"),
        ("credentials.json", "{}"),
        ("my_pkg/settings.py", "KEY = 'AKIAABCDEFGHIJKLMNOP'"),
        ("my_pkg/hub.py", "TOKEN = 'hf_" + "a" * 34 + "'"),
        ("notes.txt", "-----BEGIN RSA PRIVATE KEY-----"),
    ],
)
def test_files_that_look_like_secrets_are_refused_by_name(project: Path, name: str, text: str):
    (project / name).write_text(text)
    with pytest.raises(ConfigError, match="look like secrets") as caught:
        pack(project, ENTRYPOINT)
    assert name in str(caught.value)
    assert name in names(pack(CodeBundle([project], include_secrets=[name]), ENTRYPOINT))


def test_an_entrypoint_that_would_not_be_there_is_told_now(project: Path):
    (project / ".gitignore").write_text("my_pkg/train.py\n")
    with pytest.raises(ConfigError, match=r"there is no my_pkg/train\.py"):
        pack(project, ENTRYPOINT)
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        pack(None, "nowhere:train")
    with pytest.raises(ConfigError, match="neither a folder nor a file"):
        pack(project / "absent", ENTRYPOINT)


def test_an_entrypoint_of_an_installed_package_may_come_with_the_image(project: Path):
    assert names(pack(project, "numpy.random:rand"))


def test_too_much_code_is_refused_with_the_largest_files(project: Path):
    import random

    (project / "weights.bin").write_bytes(random.Random(0).randbytes(2**20 + 1))
    with pytest.raises(ConfigError, match=r"The largest files are weights\.bin"):
        pack(CodeBundle([project], largest_mib=1), ENTRYPOINT)
    assert pack(project, ENTRYPOINT).users["weights.bin"] == 2**20 + 1


def test_a_folder_of_data_is_refused_before_its_files_are_in_memory(project: Path):
    with (project / "checkpoint.bin").open("wb") as file:
        file.truncate(2**26)  # zeros, which would be small once packed
    with pytest.raises(ConfigError, match=r"64 MiB.* more than 1 MiB.* The largest files are checkpoint\.bin"):
        pack(CodeBundle([project], largest_mib=1), ENTRYPOINT)


def test_what_to_install_is_named_with_the_versions_of_this_machine(project: Path):
    from importlib.metadata import version

    archive = pack(CodeBundle([project], requirements=["numpy>=1", "six==1.16.0"]), ENTRYPOINT, extras=["s3"])
    details = json.loads(zipfile.ZipFile(io.BytesIO(archive.data)).read("delivery.json"))
    wanted = {each["name"]: each for each in details["requirements"]}
    assert {"torch", "obstore", "boto3", "numpy"} <= set(wanted) and "modal" not in wanted
    assert wanted["six"] == {"name": "six", "spec": "six==1.16.0", "pin": "1.16.0"}
    assert f"torch=={version('torch').partition('+')[0]}" in details["constraints"]


def test_a_folder_that_is_ignored_as_a_whole_is_told(project: Path):
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("*\n")
    with pytest.raises(ConfigError, match="nothing is there to send"):
        pack(project / "my_pkg", ENTRYPOINT)


def test_linked_folders_travel_and_loops_are_told(project: Path):
    (project / "shared").mkdir()
    (project / "shared" / "shared.py").write_text("y = 2")
    (project / "my_pkg" / "linked").symlink_to(project / "shared")
    assert "my_pkg/linked/shared.py" in names(pack(project, ENTRYPOINT))
    (project / "my_pkg" / "loop").symlink_to(project)
    with pytest.raises(ConfigError, match="a link to a folder that holds it"):
        pack(project, ENTRYPOINT)


def test_two_folders_that_link_to_each_other_are_refused(project: Path):
    for one, other in (("first", "second"), ("second", "first")):
        (project / one).mkdir(exist_ok=True)
        (project / one / "other").symlink_to(project / other, target_is_directory=True)
    with pytest.raises(ConfigError, match="a link to a folder that holds it"):
        pack(project, ENTRYPOINT)


def test_a_worktree_leaves_the_path_of_its_repository_behind(project: Path):
    before = pack(project, ENTRYPOINT)
    (project / ".git").write_text("gitdir: /home/somebody/private/.git/worktrees/project\n")
    assert pack(project, ENTRYPOINT) == before


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_out_of_the_folder_is_refused(project: Path, tmp_path_factory: pytest.TempPathFactory, link: str):
    """Whoever made the folder would choose what of this machine is sent."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "private.txt").write_text("diary")
    target = elsewhere / "private.txt" if link == "file" else elsewhere
    (project / "my_pkg" / "notes").symlink_to(target)
    with pytest.raises(ConfigError, match=r"private\.txt, which is outside of"):
        pack(project, ENTRYPOINT)
    (project / ".gitignore").write_text("notes\n")
    assert "my_pkg/train.py" in names(pack(project, ENTRYPOINT))


def test_two_files_of_one_name_are_told(project: Path):
    (project / "more").mkdir()
    (project / "more" / "other.py").write_text("x = 3")
    with pytest.raises(ConfigError, match=r"would both be other\.py"):
        pack(CodeBundle([project, project / "more"]), ENTRYPOINT)


def test_requirements_keep_where_they_come_from(project: Path):
    wanted = ["mine @ https://host.example/mine.zip", "other>=1; python_version < '3'"]
    details = json.loads(
        zipfile.ZipFile(io.BytesIO(pack(CodeBundle([project], requirements=wanted), ENTRYPOINT).data)).read(
            "delivery.json"
        )
    )
    specs = {each["name"]: each["spec"] for each in details["requirements"]}
    assert specs["mine"] == "mine @ https://host.example/mine.zip" and "other" not in specs
    with pytest.raises(ConfigError, match="is none that pip takes"):
        pack(CodeBundle([project], requirements=["git+https://host.example/x"]), ENTRYPOINT)
    with pytest.raises(ConfigError, match="readable in the bucket"):
        pack(CodeBundle([project], requirements=["x @ https://me:pass@host.example/x.whl"]), ENTRYPOINT)


def test_the_innermost_ignore_rule_decides_as_it_does_for_git(project: Path):
    (project / ".gitignore").write_text("*.txt\n")
    (project / "my_pkg" / "data" / ".gitignore").write_text("!words.txt\n")
    (project / "my_pkg" / "data" / "notes.txt").write_text("left at home")
    found = names(pack(project, ENTRYPOINT))
    assert "my_pkg/data/words.txt" in found and "my_pkg/data/notes.txt" not in found


def test_an_archive_does_not_tell_when_it_was_made(project: Path):
    """The same files give the same bytes, today and tomorrow."""
    found = zipfile.ZipFile(io.BytesIO(pack(project, ENTRYPOINT).data)).infolist()
    assert {info.date_time for info in found} == {(1980, 1, 1, 0, 0, 0)}
