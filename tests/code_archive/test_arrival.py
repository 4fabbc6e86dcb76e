"""The program that another machine starts with, run as it runs there: as text, on the standard library alone."""

import hashlib
import http.server
import io
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.code_archive.bootstrap import has_expired
from executors import process_contract
from executors.remote_base import program_text

PROGRAM = program_text(bootstrap)
SIGNATURE = "X-Amz-Signature=0123456789abcdef"
# Stands for our package in the archive: tells what it was started with.
REPLICA = """
import json, os, sys
import executors, users_module
from diloco_orchestrator.process_contract import unpacked_code
with unpacked_code():
    assert "DILOCO_CODE_FOLDER" not in os.environ
    if token := os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        os.environ["token"] = open(token).read()
        os.environ["mode"] = str(os.stat(token).st_mode)
    print(json.dumps({"argv": sys.argv[1:], "safe_path": sys.flags.safe_path, "env": dict(os.environ),
                      "users": users_module.WORD, "executors": executors.WORD}))
"""


def archive(requirements: list[dict[str, str]] | None = None, **details: object) -> bytes:
    files = {
        "ours/diloco_orchestrator/__init__.py": "",
        "ours/diloco_orchestrator/process_contract.py": Path(process_contract.__file__).read_text(),
        "ours/diloco_orchestrator/replica/__init__.py": "",
        "ours/diloco_orchestrator/replica/__main__.py": REPLICA,
        "ours/executors/__init__.py": "WORD = 'ours'",
        "users/users_module.py": "WORD = 'hello'",
        "users/executors.py": "WORD = 'theirs'",
        "users/replica.py": "raise SystemExit('the wrong replica')",
        "delivery.json": json.dumps({"requirements": requirements or [], "constraints": [], **details}),
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    return packed.getvalue()


@contextmanager
def serving(answers: list[tuple[int, bytes]], cut_first: bool = False) -> Iterator[str]:
    """A server that gives these answers one after another, the last one for ever. `cut_first`: half of the first."""
    cuts = [2] if cut_first else []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // cuts.pop()] if cuts else body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/code.zip?{SIGNATURE}"
    finally:
        server.shutdown()


def arrive(url: str, data: bytes, **env: str) -> "subprocess.CompletedProcess[str]":
    environ = {
        "PATH": "/usr/bin:/bin",
        bootstrap.ENV_URL: url,
        bootstrap.ENV_SHA256: hashlib.sha256(data).hexdigest(),
        **env,
    }
    command = [sys.executable, "-u", "-c", PROGRAM, "--replica-id", "3"]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def told(done: "subprocess.CompletedProcess[str]") -> Mapping[str, object]:
    assert done.returncode == 0, done.stdout + done.stderr
    found: Mapping[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_fetches_checks_unpacks_and_becomes_the_replica():
    data = archive()
    with serving([(200, data)]) as url:
        found = told(arrive(url, data, PLAIN="value"))
    assert (found["argv"], found["users"], found["safe_path"]) == (["--replica-id", "3"], "hello", True)
    assert found["executors"] == "theirs"  # a user's own module of that name is not hidden by ours
    env = found["env"]
    assert isinstance(env, dict) and env["PLAIN"] == "value"
    assert bootstrap.ENV_URL not in env and SIGNATURE not in json.dumps(found)  # the credential goes no further


def test_nothing_is_left_in_the_machines_temporary_folder(tmp_path: Path):
    data = archive()
    (tmp_path / "code.zip").write_bytes(data)
    (temporary := tmp_path / "tmp").mkdir()
    assert told(arrive(str(tmp_path / "code.zip"), data, TMPDIR=str(temporary)))["users"] == "hello"
    assert arrive(str(tmp_path / "absent.zip"), data, TMPDIR=str(temporary)).returncode == 78
    assert not list(temporary.iterdir())


def test_a_mounted_bucket_is_read_as_a_file(tmp_path: Path):
    data = archive()
    (tmp_path / "code.zip").write_bytes(data)
    assert told(arrive(str(tmp_path / "code.zip"), data))["users"] == "hello"
    gone = arrive(str(tmp_path / "absent.zip"), data)
    assert gone.returncode == 78 and "Is the bucket mounted" in gone.stdout


def test_an_outage_is_ridden_out():
    data = archive()
    with serving([(503, b""), (200, data)]) as url:
        done = arrive(url, data)
    assert told(done)["users"] == "hello" and "trying again in 1 s" in done.stdout


@pytest.mark.parametrize("status", [401, 403])
def test_an_expired_url_fails_clearly_and_shows_no_signature(status: int):
    data = archive()
    with serving([(status, b"expired")]) as url:
        done = arrive(url, data)
    assert done.returncode == 1 and "it expired while this attempt waited" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1].removeprefix("DILOCO_EXIT "))["code"] == 1
    assert SIGNATURE not in done.stdout + done.stderr


@pytest.mark.parametrize(("now", "expired"), [("2026-11-22T11:59:59", False), ("2026-11-22T12:00:01", True)])
def test_an_attempt_that_queued_for_longer_than_its_url_lives_is_no_error(now: str, expired: bool):
    """The URL says when it ends, so that an attempt that came too late does not spend the budget of errors."""
    url = "https://host/x?X-Amz-Date=20261122T000000Z&X-Amz-Expires=43200&X-Amz-Signature=ab"
    assert has_expired(url, datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()) is expired
    assert not has_expired("https://host/x", 1e12) and not has_expired("https://host/x?X-Amz-Date=now", 1e12)


def test_code_that_is_gone_is_permanent():
    """Each replica would spend its budget of errors on it."""
    data = archive()
    with serving([(404, b"")]) as url:
        done = arrive(url, data)
    assert done.returncode == 78 and "not in the bucket any more" in done.stdout


def test_a_body_that_breaks_off_is_fetched_again():
    data = archive()
    with serving([(200, data)], cut_first=True) as url:
        done = arrive(url, data)
    assert told(done)["users"] == "hello" and "trying again" in done.stdout


def test_other_bytes_are_not_run():
    with serving([(200, archive() + b"x")]) as url:
        done = arrive(url, archive())
    assert done.returncode == 1 and "not running them" in done.stdout


def test_what_is_missing_is_installed_and_a_failure_names_it():
    absent = {"name": "no-such-package-of-ours", "spec": "no-such-package-of-ours==1.0", "pin": "1.0"}
    data = archive([absent, {"name": "pip", "spec": "pip", "pin": ""}])
    with serving([(200, data)]) as url:
        done = arrive(url, data, PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert "installing no-such-package-of-ours==1.0 (" in done.stdout and "pip could not install" in done.stdout


def test_with_hashes_nothing_else_is_installed():
    absent = {"name": "no-such-package-of-ours", "spec": "no-such-package-of-ours==1.0", "pin": "1.0"}
    data = archive([absent], users=[], hashed=True)
    with serving([(200, data)]) as url:
        done = arrive(url, data, PIP_NO_INDEX="1")
    assert done.returncode == 78 and "installing" not in done.stdout
    assert (
        "the image lacks no-such-package-of-ours==1.0" in done.stdout and "nothing is installed without" in done.stdout
    )


def test_a_list_that_the_launch_made_replaces_nothing_that_the_image_has():
    """Of a lock that the user made, all is installed as soon as any of it is absent."""
    absent = {"name": "no-such-package-of-ours", "spec": "no-such-package-of-ours==1.0", "pin": "1.0"}
    there = {"name": "pip", "spec": "pip", "pin": ""}
    listed = {"users": [{**there, "pin": "0.1"}, absent], "needed_by": [[], ["another"]], "hashed": True}
    data = archive([there], asked=[], **listed)
    with serving([(200, data)]) as url:
        assert told(arrive(url, data, PIP_NO_INDEX="1"))["users"] == "hello"


def test_missing_looks_at_pins_and_not_at_local_versions():
    from importlib.metadata import version

    installed = {"name": "torch", "spec": "torch==x", "pin": version("torch").partition("+")[0]}
    other = {"name": "pip", "spec": "pip==0.1", "pin": "0.1"}
    assert bootstrap.missing([installed, other]) == ["pip==0.1"]


def test_modals_identity_becomes_a_file_for_aws():
    data = archive()
    with serving([(200, data)]) as url:
        env = told(arrive(url, data, MODAL_IDENTITY_TOKEN="a.b.c", AWS_ROLE_ARN="arn:aws:iam::1:role/x"))["env"]
    assert isinstance(env, dict)
    assert env["token"] == "a.b.c" and int(env["mode"]) & 0o077 == 0
    assert not Path(env["AWS_WEB_IDENTITY_TOKEN_FILE"]).exists()  # the token does not outlive its process
