"""Requirements of the user's: read here, checked by hash over there."""

import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.code_archive.pack import pack
from diloco_orchestrator.code_archive.requirements import read_requirements
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.supervision.launch_request import archive_for
from executors import HFJobsExecutor, LocalProcessExecutor

HASH = "sha256:" + "0a" * 32
FILE = (
    "# made by a tool\n--index-url https://index.example.org/simple\n"
    f"first==1.0 \\\n    --hash={HASH} \\\n    --hash={HASH}  # two\n"
)


def test_a_file_with_hashes_travels_as_it_is(tmp_path: Path):
    (tmp_path / "requirements.txt").write_text(FILE)
    found = read_requirements(tmp_path / "requirements.txt")
    assert found is not None and found.hashed and [each.name for each in found.packages] == ["first"]
    (tmp_path / "my_train.py").write_text("def train(ctx):\n    ...\n")
    archive = archive_for(HFJobsExecutor(), tmp_path / "my_train.py", "my_train:train", "s3://b/x", found)
    assert archive is not None
    with zipfile.ZipFile(BytesIO(archive.data)) as opened:
        assert opened.read(bootstrap.REQUIREMENTS).decode() == FILE
        details = json.loads(opened.read(bootstrap.DETAILS))
    assert details["hashed"] is True and details["users"] == [{"name": "first", "spec": "first==1.0", "pin": "1.0"}]
    assert archive.sha256 != pack(tmp_path / "my_train.py", "my_train:train", ["s3"]).sha256


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_is_read_in_the_encoding_that_its_byte_order_mark_names(encoding: str, tmp_path: Path):
    (tmp_path / "requirements.txt").write_bytes("# größer\r\npackaging>=20\r\n".encode(encoding))
    found = read_requirements(tmp_path / "requirements.txt")
    assert found is not None and [each.name for each in found.packages] == ["packaging"]


def test_a_file_in_another_encoding_is_refused_in_a_sentence(tmp_path: Path):
    (tmp_path / "requirements.txt").write_bytes("# größer\npackaging>=20\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cannot be read: 'utf-8' codec can't decode.* Name another file"):
        read_requirements(tmp_path / "requirements.txt")


def test_a_list_needs_no_hashes():
    found = read_requirements(["packaging>=20", "pip; python_version >= '3.8'"])
    assert found is not None and not found.hashed and found.missing_here() == []
    assert read_requirements(None) is None and read_requirements([]) is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["first=1.0"], "is none that pip takes"),
        ([f"first==1.0 --hash={HASH}", "second==2.0"], "second have no hash"),
        (["first==1.0 --hash=sha256:beef"], "is no hash that pip takes"),
        (["-e ."], "names a file of this machine"),
        (["-r other.txt"], "names a file of this machine"),
        (["mine @ file:///home/me/mine"], "Hand the package over with code="),
        (["mine @ https://me:token@[host/mine.whl"], "readable in the bucket"),
        (["mine @ git+https://user:token@host/mine"], "readable in the bucket"),
        (["mine @ git+https://user:pa$$word@host/mine"], "readable in the bucket"),
        (["--index-url https://${USER}:token@index.example.org/simple"], "readable in the bucket"),
        (["--extra-index-url https://index.example.org/simple", "first==1.0"], "name a further package index"),
        (["--find-links https://files.example.org", "first==1.0"], "name a further package index"),
        (["# --index-url https://me:token@index.example.org/simple", "numpy"], "readable in the bucket"),
        (["numpy  # from https://token@index.example.org/simple"], "readable in the bucket"),
        (["--extra-index-url https://me:token@index.example.org/simple"], "readable in the bucket"),
    ],
)
def test_what_pip_would_refuse_over_there_is_refused_here(lines: list[str], words: str):
    with pytest.raises(ConfigError) as refused:
        read_requirements(lines)
    assert words in str(refused.value)


def test_a_token_in_a_url_is_a_variable():
    for who in ("${TOKEN}", "me:${TOKEN}", "${USER}:${TOKEN}"):
        found = read_requirements([f"mine @ git+https://{who}@host/mine"])
        assert found is not None and found.packages[0].name == "mine"


def test_a_machine_that_replicas_share_has_to_have_them():
    wanted = read_requirements(["packaging>=20", "no-such-package-of-ours==1.0"])
    with pytest.raises(ConfigError, match=r"lacks no-such-package-of-ours==1.0\. Install"):
        archive_for(LocalProcessExecutor(), None, "my_train:train", "bucket", wanted)


def test_pip_is_run_with_the_users_file_and_checks_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], check: bool) -> Done:
        commands.append(command)
        return Done()

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    there = [{"name": "packaging", "spec": "packaging", "pin": ""}]
    absent = [{"name": "no-such-package-of-ours", "spec": "no-such-package-of-ours==1.0", "pin": "1.0"}]
    bootstrap.install_hashed({"requirements": there, "users": there, "hashed": True}, tmp_path)
    bootstrap.install_unhashed({"requirements": [], "constraints": []}, tmp_path)  # an archive of an older version
    assert commands == []
    bootstrap.install_hashed({"requirements": there, "users": absent, "hashed": True}, tmp_path)
    assert commands[0][-3:] == ["--require-hashes", "-r", str(tmp_path / "requirements.txt")]
    bootstrap.install_unhashed(
        {"requirements": [], "users": absent, "constraints": ["a==1"], "hashed": False}, tmp_path
    )
    assert "-c" in commands[1] and (tmp_path / "constraints.txt").read_text() == "a==1\n"
