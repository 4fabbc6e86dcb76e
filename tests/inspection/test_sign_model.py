"""Models are signed in the format of OpenSSF's model-signing: that library's own verifier takes them, and no others."""

import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import diloco_here
from kept_run import kept_run

from diloco_orchestrator import pull
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.sign_model import public_pem, sign_folder


def test_without_the_library_nothing_is_pulled_and_what_to_install_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(ConfigError, match="pip install"):
        pull(str(kept_run(tmp_path)), tmp_path / "model", sign=True)
    assert not (tmp_path / "model").exists()


def test_the_public_key_is_this_users_and_stays(tmp_path: Path):
    said = [diloco_here("key", "--models", cwd=tmp_path).stdout for _ in range(2)]
    assert said[0] == said[1] == public_pem() and said[0].startswith("-----BEGIN PUBLIC KEY-----")
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "another user")}
    assert diloco_here("key", "--models", cwd=tmp_path, environ=elsewhere).stdout != said[0]


@pytest.mark.slow
def test_openssfs_verifier_takes_a_pulled_model_and_refuses_a_changed_one(tmp_path: Path):
    pytest.importorskip("model_signing", reason="pip install model-signing pyOpenSSL")
    model, key = tmp_path / "model", tmp_path / "key.pem"
    pull(str(kept_run(tmp_path)), model, sign=True)
    key.write_text(public_pem())

    def verified() -> bool:
        command = [sys.executable, "-m", "model_signing", "verify", "key", str(model)]
        command += ["--signature", str(model / "model.sig"), "--public_key", str(key)]
        return subprocess.run(command, capture_output=True).returncode == 0

    assert verified()
    (model / "extra.py").write_text("print()")
    assert not verified(), "a file that was added"
    (model / "extra.py").unlink()
    assert verified()
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert not verified(), "a file that was changed"


@pytest.mark.slow
def test_what_is_not_sent_is_not_signed(tmp_path: Path):
    pytest.importorskip("model_signing", reason="pip install model-signing pyOpenSSL")
    from model_signing import verifying

    folder, key = tmp_path / "model", tmp_path / "key.pem"
    folder.mkdir()
    for name in ("model.safetensors", "README.md", "outer.safetensors"):
        (folder / name).write_bytes(name.encode())
    sign_folder(folder, but=["outer.safetensors"])
    key.write_text(public_pem())
    (folder / "outer.safetensors").unlink()
    verifying.Config().use_elliptic_key_verifier(public_key=key).verify(folder, folder / "model.sig")
