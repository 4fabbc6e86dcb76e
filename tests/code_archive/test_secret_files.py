"""Which files stay here because they look like secrets: by their names, by known tokens, by detect-secrets."""

import gzip
import logging
import sys
from pathlib import Path

import pytest

from diloco_orchestrator.code_archive.secret_files import suspicious_files

HEX40, B40 = "0f1e2d3c4b" * 4, "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzQmN3vLp0s"
# Found without detect-secrets.
OURS = {
    "prod.env": "MODE=fast",
    ".env.production": "MODE=fast",
    "conf/.envrc": "export MODE=fast",
    "server.pem": "x",
    "id_ed25519": "x",
    ".netrc": "machine x",
    ".git-credentials": "x",
    "main.tfvars": 'mode = "fast"',
    "secrets.toml": "x = 1",
    "aws.ini": f"[default]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = {B40}",
    "boto.py": f"config = dict(aws_secret_access_key='{B40}')",
    "hub.py": f"TOKEN = 'hf_{'aB3' * 12}'",
    "ci.yaml": f"token: github_pat_11ABCDEFG0{'x9' * 20}",
    "gitlab.py": f"x = 'glpat-{'aB3x' * 5}'",
    "modal.toml": f'token_secret = "as-{"aB3x" * 5}yz"',
    "track.py": f"wandb.login(key='{HEX40}')",
    "notes.md": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r",
    "openai.py": f"client = Client('sk-proj-{'aB3' * 14}')",
    "db.py": "engine = create_engine('postgres://app:s3cr3t@db.internal/x')",
    "nb.ipynb": f'{{"source": ["!curl -H \\"Authorization: Bearer {"aB3x" * 6}\\""]}}',
}
# Found by detect-secrets alone.
SCANNED = {
    "stripe.py": "stripe.api_key = 'sk_live_" + "aB3d" * 6 + "'",
    "settings.py": "DB_PASSWORD = 'correct-horse-9battery'",
    "sendgrid.py": "KEY = 'SG." + "aB3d_" * 4 + "xy." + "aB3d-" * 8 + "xyz'",
}
INNOCENT = {
    "train.py": "token = os.environ['HF_TOKEN']\npad_token = '<pad>'\nheaders = {'Authorization': f'Bearer {token}'}\n",
    "url.py": "url = f'postgres://{user}:{password}@{host}/x'\nsha256 = '" + "ab12" * 16 + "'\n",
    "data.bin": "\0\1\2",
    "environment.yaml": "name: x\n",
}


def written(folder: Path, texts: dict[str, str]) -> dict[str, Path]:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


@pytest.fixture
def no_scanner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "detect_secrets.core.scan", None)


def test_twenty_files_that_must_not_travel(tmp_path: Path, no_scanner: None, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        found = suspicious_files(written(tmp_path, OURS | INNOCENT), ())
    assert sorted(found) == sorted(OURS) and len(OURS) == 20
    assert "detect-secrets is not installed" in caplog.text


TOKEN_LINE = f"TOKEN = 'hf_{'aB3' * 12}'\n"
DOCKER = '{"auths": {"https://index.docker.io/v1/": {"auth": "dXNlcjpodW50ZXIyLWh1bnRlcjI="}}}'
OTHER_FORMS = {
    "backup.py.gz": gzip.compress(TOKEN_LINE.encode()),
    "many.gz": gzip.compress(b"x = 1\n" * 10_000 + TOKEN_LINE.encode()),
    "windows.py": TOKEN_LINE.encode("utf-16"),
    "windows_be.py": b"\xfe\xff" + TOKEN_LINE.encode("utf-16-be"),
    "without_a_mark.py": TOKEN_LINE.encode("utf-16-le"),
    "docker/config.json": DOCKER.encode(),
    ".dockercfg": b"{}",
}
NO_SECRETS = {
    "broken.gz": b"\x1f\x8bnothing",
    "text.gz": gzip.compress(b"token = os.environ['HF_TOKEN']"),
    "windows.txt": "no token".encode("utf-16"),
    "config.json": b'{"auths": {}, "credsStore": "desktop"}',
    "zeros.bin": b"\0" * 4096,
}


def test_compressed_files_utf_16_and_dockers_logins_stay_here(tmp_path: Path, no_scanner: None):
    files = {}
    for name, data in (OTHER_FORMS | NO_SECRETS).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
        files[name] = tmp_path / name
    assert sorted(suspicious_files(files, ())) == sorted(OTHER_FORMS)


def test_a_file_that_is_named_as_innocent_is(tmp_path: Path, no_scanner: None):
    files = written(tmp_path, {"a/hub.py": OURS["hub.py"], "b/hub.py": OURS["hub.py"]})
    assert list(suspicious_files(files, ["a/hub.py"])) == ["b/hub.py"]
    assert suspicious_files(files, ["hub.py"]) == {}


def test_detect_secrets_finds_more(tmp_path: Path):
    pytest.importorskip("detect_secrets", reason="the extra `scan` is not installed")
    found = suspicious_files(written(tmp_path, SCANNED | INNOCENT), ())
    assert sorted(found) == sorted(SCANNED)
    assert found["settings.py"] == "Secret Keyword, line 1"
    allowed = {"settings.py": SCANNED["settings.py"] + "  # pragma: allowlist secret"}
    assert suspicious_files(written(tmp_path, allowed), ()) == {}
