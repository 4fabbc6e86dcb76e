"""Before a launch: whether replicas elsewhere get credentials for the bucket, and where it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_orchestrator import launch
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.store.open_store import options_elsewhere
from diloco_orchestrator.supervision.credential_routes import check_route
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from executors import (
    EKSExecutor,
    HFJobsExecutor,
    KubernetesExecutor,
    LocalProcessExecutor,
    MixedExecutor,
    ModalExecutor,
)
from executors.contract import LaunchRequest

S3 = "s3://bucket/run"
HF = "hf://buckets/me/b/run"
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
ROLE = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/x"}


def request(env: dict[str, str] | None = None, secrets: dict[str, str] | None = None, replica: int = 0):
    return LaunchRequest("run", replica, 1, ["python"], env=env or {}, secrets=secrets or {})


@pytest.mark.parametrize(
    ("executor", "url", "options", "given"),
    [
        (HFJobsExecutor(), S3, {"key": "a", "secret": "b"}, request()),
        (HFJobsExecutor(), S3, {"anon": True}, request()),
        (HFJobsExecutor(), S3, {}, request(secrets=KEYS)),
        (HFJobsExecutor(secrets=KEYS), S3, {}, request()),
        (ModalExecutor(secrets=["aws"]), S3, {}, request()),
        (ModalExecutor(oidc=True), S3, {}, request(env=ROLE)),
        (KubernetesExecutor(service_account="trainer"), S3, {}, request()),
        (HFJobsExecutor(), S3, {}, request(env={"AWS_PROFILE": "p", "AWS_CONFIG_FILE": "/etc/aws"})),
        (HFJobsExecutor(), "gs://bucket/run", {}, request(secrets={"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"})),
        (HFJobsExecutor(), "gs://bucket/run", {"service_account_key": "{}"}, request()),
        (HFJobsExecutor(), "/mnt/bucket", {}, request()),
        (HFJobsExecutor(), HF, {}, request(secrets=KEYS)),
        (HFJobsExecutor(), "webdav://host/x", {}, request()),  # of other stores nothing is known here
        (LocalProcessExecutor(), S3, {}, request()),  # replicas inherit this machine's
    ],
)
def test_a_launch_with_a_route_is_let_through(executor, url: str, options: dict[str, Any], given: LaunchRequest):
    check_route(url, options, given, executor)


@pytest.mark.parametrize(
    ("executor", "url", "options", "given", "words"),
    [
        (HFJobsExecutor(), S3, {}, request(), "secrets={…} with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (HFJobsExecutor(), S3, {"endpoint_url": "http://h"}, request(), "would have no credentials for s3://bucket"),
        (HFJobsExecutor(), S3, {}, request(secrets={"AWS_ACCESS_KEY_ID": "a"}), "would have no credentials"),
        (ModalExecutor(), "fsspec+s3://bucket/run", {}, request(), "oidc=True"),
        (ModalExecutor(oidc=True), S3, {}, request(), "Modal's identity token is one only with the variable AWS_ROLE"),
        (KubernetesExecutor(), S3, {}, request(), "IRSA"),
        (HFJobsExecutor(), HF, {"endpoint_url": "http://h"}, request(), "secrets={…} with AWS_ACCESS_KEY_ID"),
        (ModalExecutor(), HF, {}, request(), "AWS_SECRET_ACCESS_KEY (--secret NAME)."),
        (HFJobsExecutor(), "gs://bucket/run", {}, request(), "GOOGLE_APPLICATION_CREDENTIALS"),
        (HFJobsExecutor(), S3, {"profile": "work"}, request(secrets=KEYS), "profile 'work', a section of ~/.aws"),
        (HFJobsExecutor(), S3, {}, request(env={"AWS_PROFILE": "work"}), "images have no such profile"),
        (MixedExecutor([(LocalProcessExecutor(), 1), (HFJobsExecutor(), 1)]), S3, {}, request(replica=1), "on hf-jobs"),
    ],
)
def test_a_launch_without_one_is_refused_in_words_that_name_the_way(
    executor, url: str, options: dict[str, Any], given: LaunchRequest, words: str
):
    with pytest.raises(ConfigError) as refused:
        check_route(url, options, given, executor)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("executor", "ways"),
    [
        (HFJobsExecutor(endpoint="http://127.0.0.1:1"), ["secrets={…}"]),
        (ModalExecutor(), ["secrets={…}", "oidc=True"]),
        pytest.param(KubernetesExecutor(), ["secrets={…}", "IRSA"], marks=pytest.mark.slow),
        pytest.param(EKSExecutor("c", region="eu-central-1"), ["secrets={…}", "IRSA"], marks=pytest.mark.slow),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_launch_is_refused_before_anything_is_written(
    executor, ways: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """This machine has good credentials. The bucket's address leads nowhere: a request would be another error."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_CONFIG_FILE": "/none"}
    clear(monkeypatch, AWS_ENDPOINT_URL="http://127.0.0.1:1", AWS_REGION="eu-central-1", **keys)
    (tmp_path / "my_train.py").write_text("def train(ctx):\n    ...\n")
    with pytest.raises(ConfigError, match="would have no credentials for s3://bucket/run") as refused:
        launch("my_train:train", store=S3, executor=executor, code=tmp_path, pin="given")
    assert [way for way in ways if way not in str(refused.value)] == []


def clear(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_endpoint_and_region_of_this_machine_travel(monkeypatch: pytest.MonkeyPatch):
    clear(monkeypatch, AWS_ENDPOINT_URL="https://s3.example.org", AWS_REGION="eu-central-1")
    found = {"endpoint_url": "https://s3.example.org", "region_name": "eu-central-1"}
    assert options_elsewhere(S3, {}) == found
    assert options_elsewhere(S3, {"key": "a", "region_name": "us-west-2"}) == {
        "key": "a",
        "region_name": "us-west-2",
        "endpoint_url": "https://s3.example.org",
    }
    assert options_elsewhere(f"fsspec+{S3}", {"key": "a"}) == {"key": "a", "client_kwargs": found}
    assert options_elsewhere("gs://bucket/run", {"x": 1}) == {"x": 1} and options_elsewhere("/folder", {}) == {}


def test_of_amazons_own_endpoint_only_the_region_travels(monkeypatch: pytest.MonkeyPatch):
    clear(monkeypatch, AWS_DEFAULT_REGION="ap-south-1")
    assert options_elsewhere(S3, {}) == {"region_name": "ap-south-1"}
    clear(monkeypatch)
    assert options_elsewhere(S3, {}) == {}


def test_a_profiles_endpoint_and_region_travel_without_the_profile(monkeypatch: pytest.MonkeyPatch, tmp_path):
    config = tmp_path / "config"
    config.write_text("[profile work]\nregion = eu-west-1\nendpoint_url = https://store.example.org\n")
    clear(monkeypatch, AWS_CONFIG_FILE=str(config), AWS_PROFILE="work")
    assert options_elsewhere(S3, {}) == {"region_name": "eu-west-1", "endpoint_url": "https://store.example.org"}


def test_a_replica_elsewhere_gets_them_as_a_secret_and_one_here_does_not(monkeypatch: pytest.MonkeyPatch):
    clear(monkeypatch, AWS_REGION="eu-central-1")
    config = make_config({"entrypoint": "m:f", "replicas": 1, "rounds": 1})
    run = Run(**Stamp("t", lambda: 0.0)(), run_id="r", config=config, package_version="0", code_sha256="0" * 64)
    launching = LaunchRequests(run, Launched("0" * 64), S3, dry=True)
    assert json.loads(launching.request(0, 1, False).secrets["DILOCO_STORAGE_OPTIONS"]) == {
        "region_name": "eu-central-1"
    }
    assert "DILOCO_STORAGE_OPTIONS" not in launching.request(0, 1, True).secrets
