"""EKS lets the executor in with AWS credentials: moto for AWS, a loopback Kubernetes that looks at the token."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import boto3
import pytest
from loopback_eks import (
    CLUSTER,
    REGION,
    SECRET_KEY,
    environ,
    is_let_in,
    running_aws,
    running_cluster,
    signed_url,
)
from loopback_kubernetes import LoopbackKubernetes

from executors.contract import ExecutorDenied, MissingSdk, ReplicaState
from executors.eks_jobs import EKSExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.testing import ended_state, request_of, wait_until


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    with running_aws() as url:
        yield url


@pytest.fixture
def cluster(aws: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackKubernetes]:
    for name, value in environ(aws).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with running_cluster(aws) as kubernetes:
        yield kubernetes


def executor(**options: Any) -> EKSExecutor:
    return EKSExecutor(CLUSTER, region=REGION, image="python:3.12", **options)


def test_a_job_runs_on_a_cluster_entered_with_aws_credentials(cluster: LoopbackKubernetes):
    eks = executor()
    handle = eks.launch(request_of("print('inside')"))
    assert ended_state(eks, handle) is ReplicaState.SUCCEEDED
    assert list(executor().logs(handle)) == ["inside"]
    assert (handle.executor, handle.native["cluster"], handle.native["region"]) == ("eks", CLUSTER, REGION)


def test_the_token_is_a_signed_question_to_sts_that_names_the_cluster(cluster: LoopbackKubernetes, aws: str):
    executor().find("run")
    url = urlparse(signed_url(cluster.tokens[-1]))
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    assert f"{url.scheme}://{url.netloc}" == aws  # STS of the region, here moto's
    assert (query["Action"], query["X-Amz-Expires"]) == ("GetCallerIdentity", "60")
    assert query["X-Amz-SignedHeaders"] == "host;x-k8s-aws-id"
    assert query["X-Amz-Credential"].endswith(f"/{REGION}/sts/aws4_request")
    assert not cluster.tokens[-1].endswith("=")


def test_without_an_endpoint_of_its_own_the_question_goes_to_the_regions_sts(
    cluster: LoopbackKubernetes, monkeypatch: pytest.MonkeyPatch
):
    from executors.eks_jobs import token_maker

    monkeypatch.delenv("AWS_ENDPOINT_URL")
    url = signed_url(token_maker(boto3.Session(region_name=REGION), CLUSTER)())
    assert url.startswith(f"https://sts.{REGION}.amazonaws.com/?Action=GetCallerIdentity&Version=2011-06-15&X-Amz-")


def test_a_long_lived_executor_never_shows_an_old_token(cluster: LoopbackKubernetes):
    eks = executor()
    eks.find("run")
    first = cluster.tokens[-1]
    cluster.accepts = lambda token: token != first and is_let_in(token)  # as after 15 minutes

    def is_let_in_again() -> bool:
        try:
            return eks.find("run") == []
        except ExecutorDenied:
            return False  # within the same second the signature is the same

    wait_until(is_let_in_again, "a token of a later second")


def test_no_credential_is_in_a_plan_a_handle_a_repr_or_an_error(cluster: LoopbackKubernetes):
    eks = executor()
    handle = eks.launch(request_of("raise SystemExit(3)"))
    texts = [repr(eks), repr(eks.plan(request_of(""))), json.dumps(handle.to_json()), repr(eks.poll(handle))]
    cluster.accepts = lambda token: False
    with pytest.raises(ExecutorDenied, match="401") as caught:
        eks.find("run")
    texts += [str(caught.value), repr(caught.value.__cause__)]
    for secret in (SECRET_KEY, "k8s-aws-v1.", "X-Amz-Signature", *cluster.tokens):
        assert not any(secret in text for text in texts)


def test_a_cluster_that_is_not_there_is_said_plainly(cluster: LoopbackKubernetes):
    with pytest.raises(ExecutorDenied, match="no-such in eu-central-1"):
        EKSExecutor("no-such", region=REGION).find("run")


def test_missing_aws_credentials_and_region_are_said_plainly(
    cluster: LoopbackKubernetes, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ExecutorDenied, match="AWS_DEFAULT_REGION"):
        EKSExecutor(CLUSTER).find("run")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ExecutorDenied, match="AWS credentials"):
        executor().find("run")


def test_credentials_that_vanish_later_are_said_plainly(cluster: LoopbackKubernetes, monkeypatch: pytest.MonkeyPatch):
    from botocore.exceptions import NoCredentialsError

    eks = executor()
    eks.find("run")
    monkeypatch.setattr("botocore.signers.RequestSigner.generate_presigned_url", _raises(NoCredentialsError()))
    with pytest.raises(ExecutorDenied, match="no working AWS credentials"):
        eks.find("run")


def test_an_sso_login_that_has_ended_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is refused until somebody logs in again, and not an outage of AWS, which is waited out for hours."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # which has no token of a login
    where = "sso_start_url = https://team.awsapps.com/start\nsso_region = eu-central-1\n"
    who = "sso_account_id = 111122223333\nsso_role_name = Trainer\n"
    (tmp_path / "config").write_text(f"[profile team]\n{where}{who}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(ExecutorDenied, match=r"Token for https://team.awsapps.com/start does not exist.*aws sso login"):
        executor().find("run")


def _raises(error: Exception) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


def test_replicas_go_to_spot_nodes_unless_told_otherwise():
    def affinity(executor: KubernetesExecutor) -> bool:
        return "affinity" in executor.plan(request_of(""))["job"]["spec"]["template"]["spec"]

    assert affinity(executor()) and not affinity(executor(spot=False))
    assert not affinity(KubernetesExecutor(image="x"))


def test_two_ways_to_the_cluster_are_refused():
    with pytest.raises(ValueError, match="Give one of them"):
        EKSExecutor(CLUSTER, kubeconfig="file")
    with pytest.raises(ValueError, match=r"cluster=\.\.\."):
        EKSExecutor(region=REGION)


def test_a_missing_boto3_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    for name in ("boto3", "boto3.session"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingSdk, match=r"diloco-orchestrator\[eks\]"):
        executor().find("run")
