"""A whole run with a stranger: a link, a machine without any account, temporary credentials of a token service."""

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from genuine_azurite import Azurite
from genuine_gcs import Gcs
from iam_server import ADMIN, BUCKET, ROLE, IamServer, running_iam_server
from joined import ROOT
from loopback_r2 import SECRET, running_r2
from real_runs import FAST
from signed_s3 import running_signed_s3

from diloco_orchestrator import RunReader, launch
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.join.link import Link
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_store import identity_of_user, of_run
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.presigned import Requests
from diloco_orchestrator.store.s3 import open_s3

pytestmark = pytest.mark.slow
ON_R2 = "s3://bucket/runs/a"
URL = f"s3://{BUCKET}/run"
TOKEN_S = 120.0  # of life of temporary credentials: the stranger's seat lasts longer
SETTINGS = {**FAST, "replicas": 3, "invited": [2], "aggregate": "mean", "rounds": 4, "sync_every": 3, "quorum": "all"}
# Replicas wait for the stranger for minutes, and should not keep the server busy meanwhile.
SETTINGS |= {
    "snapshot_every": 2,
    "env": {"OMP_NUM_THREADS": "1"},
    "timing": {**FAST["timing"], "poll_s": 0.5, "heartbeat_s": 1.0},
}
EVERY_S = "1"


@pytest.fixture
def server() -> Iterator[IamServer]:
    with running_iam_server({}, token_s=TOKEN_S) as found:
        yield found


def diloco(folder: Path, environ: dict[str, str], *args: str) -> "subprocess.Popen[str]":
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    environ = {**kept, "XDG_STATE_HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    program = [sys.executable, "-m", "diloco_orchestrator.cli.main", *args]
    return subprocess.Popen(program, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def none_left(machines: "list[subprocess.Popen[str]]") -> None:
    left = [each for each in machines if each.poll() not in (None, 0)]
    assert not left, [each.communicate()[1] for each in left]


def test_a_machine_without_an_account_takes_part_by_a_link(server: IamServer, tmp_path: Path, monkeypatch):
    """In the second round its replica waits until the credentials of the link have ended."""
    account = {**server.environ(ADMIN), "AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1"}
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"])))
    monkeypatch.syspath_prepend(ROOT / "tests/support")
    executor = JoinExecutor(machines=(identity_of_user().public.text(),))
    args = {"folder": str(tmp_path), "hold": [2]}
    run = launch("tiny_workloads:train_holding", store=URL, executor=executor, args=args, **SETTINGS)
    folder = of_run(open_store(URL))
    key = RunReader(folder).run.signed_by
    assert key is not None
    mine = {**account, "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    made = diloco(tmp_path, mine, "invite", URL, "--replica", "2", "--expires", "1h", "--role", ROLE)
    link, said = made.communicate()
    assert made.returncode == 0, said
    (tmp_path / "stranger").mkdir()
    machines = [
        diloco(tmp_path, mine, "join", URL, "--signed-by", key.key, "--replica", str(each), "--every", EVERY_S)
        for each in (0, 1)
    ]
    machines.append(diloco(tmp_path / "stranger", {}, "join", link.strip(), "--every", EVERY_S))

    def supervise() -> None:
        left = [each for each in machines if each.poll() is not None]
        assert not left or (tmp_path / "release").exists(), [each.communicate()[1] for each in left]
        if (tmp_path / "held-2").exists() and len(list(folder.list(keys.GRANTS))) >= 3:
            (tmp_path / "release").touch()

    try:
        result = run.wait(on_poll=supervise)
        said = "".join(each.communicate(timeout=60)[1] for each in machines)
    finally:
        for each in machines:
            each.kill()
    assert result.status == "completed" and [each.returncode for each in machines] == [0, 0, 0], said
    reader = RunReader(open_store(URL))
    commits = reader.commits()
    applied = [each for each in commits if each.applied]
    averaged = [{answer.replica_id for answer in each.answers if answer.averaged} for each in applied]
    check_averaged(averaged)
    read = ContributionReader(of_run(open_store(URL)))
    # Both launched replicas have scored the stranger's work before it was averaged.
    for commit in (each for each, names in zip(applied, averaged, strict=True) if 2 in names):
        checks = [read.checked(commit, each) for each in commit.checks or ()]
        scored = {(each.replica_id, score.replica_id) for each in checks for score in each.scored or ()}
        assert scored == {(0, 2), (1, 2)}
    assert not any(str(each.by).startswith("replica 2") for each in commits)
    assert verify_run(of_run(open_store(URL))).agrees
    calls = server.calls("diloco-replica-2")
    assert calls and not [each for each in calls if each["refused"]]
    assert len({each["key"] for each in calls}) >= 2  # sets of credentials with which it has asked
    bucket = open_store(URL)
    for info in bucket.list(""):
        assert link.strip().encode() not in bucket.get(info.key), info.key


def check_averaged(averaged: list[set[int]]) -> None:
    """A round in which its scores come too late, as where many processes share two cores, leaves the stranger out."""
    assert [each - {2} for each in averaged] == 4 * [{0, 1}] and sum(2 in each for each in averaged) >= 2, averaged


def take_part(
    url: str,
    account: dict[str, str],
    alone: dict[str, str],
    invitation: list[str],
    tmp_path: Path,
    monkeypatch: Any,
    has_ended: Callable[[Link], bool] = lambda link: True,
) -> str:
    """Play a run of two machines with the account and a stranger's, averaged in most rounds; returns the link.

    `alone`: the environment of the stranger's machine, beside that of every process. `has_ended`: whether the access in
    the link has; the stranger's replica waits for it in the second round.
    """
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"])))
    monkeypatch.syspath_prepend(ROOT / "tests/support")
    executor = JoinExecutor(machines=(identity_of_user().public.text(),))
    args = {"folder": str(tmp_path), "hold": [2]}
    run = launch("tiny_workloads:train_holding", store=url, executor=executor, args=args, **SETTINGS)
    mine = {**account, "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    made = diloco(tmp_path, mine, "invite", url, "--replica", "2", "--expires", "1h", *invitation)
    link, said = made.communicate()
    assert made.returncode == 0 and len(link) < 3000, said
    (tmp_path / "stranger").mkdir()
    key = RunReader(of_run(open_store(url))).run.signed_by
    assert key is not None
    machines = [
        diloco(tmp_path, mine, "join", url, "--signed-by", key.key, "--replica", str(each), "--every", EVERY_S)
        for each in (0, 1)
    ]
    machines.append(diloco(tmp_path / "stranger", alone, "join", link.strip(), "--every", EVERY_S))

    def supervise() -> None:
        none_left(machines)
        if (tmp_path / "held-2").exists() and has_ended(Link.parse(link)):
            (tmp_path / "release").touch()

    try:
        result = run.wait(on_poll=supervise)
        said = "".join(each.communicate(timeout=60)[1] for each in machines)
    finally:
        for each in machines:
            each.kill()
    assert result.status == "completed" and [each.returncode for each in machines] == [0, 0, 0], said
    store = of_run(open_store(url))
    commits = RunReader(store).commits()
    averaged = [{answer.replica_id for answer in each.answers if answer.averaged} for each in commits if each.applied]
    check_averaged(averaged)
    assert not any(str(each.by).startswith("replica 2") for each in commits)
    assert verify_run(store).agrees
    return link.strip()


def test_a_machine_without_an_account_takes_part_by_a_link_to_a_run_on_r2(tmp_path: Path, monkeypatch):
    with running_r2() as server:
        account = server.environ()
        alone = {"http_proxy": account["http_proxy"]}
        link = take_part(ON_R2, account, alone, [], tmp_path, monkeypatch)
        bucket = open_s3(ON_R2, {})
        everything = b"".join(bucket.get(info.key) for info in bucket.list(""))
        assert SECRET.encode() not in everything and link.encode() not in everything


def requests_have_ended(link: Link) -> bool:
    """Whether those in the link have."""
    requests = Requests.from_bytes(base64.urlsafe_b64decode(link.requests))
    try:
        urllib.request.urlopen(requests.read[keys.RUN][1]).close()
    except urllib.error.HTTPError as error:
        return error.code in (400, 403)  # GCS's answer, and others'
    return False


SIGNED_FOR_A_MINUTE = ["--presigned", "--credentials-last", "1m"]


def test_a_machine_without_an_account_takes_part_by_signed_requests_alone(tmp_path: Path, monkeypatch):
    """Each of a minute: in the second round its replica waits until those of the link have ended."""

    with running_signed_s3() as server:
        environ = server.environ()
        link = take_part(ON_R2, environ, {}, SIGNED_FOR_A_MINUTE, tmp_path, monkeypatch, requests_have_ended)
        by_url, refused = server.server.by_url, server.server.refused_urls
        print(len(by_url), "different requests")
        assert {path for _, path in refused} == {"/bucket/runs/a/run.json"}, refused  # ours, above
        written = [path for method, path in by_url if method == "PUT"]
        bucket = open_s3(ON_R2, {})
        theirs = [
            i.key for i in bucket.list(keys.ROUNDS) if "/contributions/2.json/" in i.key or "/payload/2/" in i.key
        ]
        assert len(theirs) >= 8 and all(any(path.endswith(each) for path in written) for each in theirs)
        everything = b"".join(bucket.get(info.key) for info in bucket.list(""))
        assert b"X-Amz-Signature" not in everything and link.encode() not in everything


@pytest.mark.parametrize("kind", ["az", "gs"])
def test_a_machine_without_an_account_takes_part_by_signed_requests_on_azure_and_gcs(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch
):
    """As above: on a genuine Azurite, and on a fake-gcs-server whose front checks signatures."""
    if kind == "az":
        azurite: Azurite = request.getfixturevalue("azurite")
        options = azurite.options()
        account = {f"AZURE_STORAGE_{name.upper()}": value for name, value in options.items()}
        url = f"az://{azurite.make_container('strangers')}/runs/a"
    else:
        gcs: Gcs = request.getfixturevalue("gcs")
        (tmp_path / "account.json").write_text(json.dumps(gcs.account))
        account = {"GOOGLE_BASE_URL": gcs.front, "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "account.json")}
        url = f"gs://{gcs.make_bucket('strangers')}/runs/a"
    link = take_part(url, account, {}, SIGNED_FOR_A_MINUTE, tmp_path, monkeypatch, requests_have_ended)
    bucket = open_store(url)
    everything = b"".join(bucket.get(info.key) for info in bucket.list(""))
    assert not any(secret in everything for secret in (b"&sig=", b"X-Goog-Signature", link.encode()))
