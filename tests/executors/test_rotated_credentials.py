"""Credentials that are rewritten while the launcher runs: a refusal makes executors read them again, once."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import loopback_eks
import pytest
from loopback_hf import LoopbackHF
from loopback_kubernetes import TOKEN, LoopbackKubernetes, running_kubernetes
from loopback_modal import LoopbackModal

from executors.contract import ExecutorDenied, ReplicaState
from executors.eks_jobs import EKSExecutor
from executors.hf_jobs import HFJobsExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.modal_sandboxes import ModalExecutor
from executors.testing import request_of, wait_until

STAY = "import time; time.sleep(600)"


@pytest.fixture
def cluster() -> Iterator[LoopbackKubernetes]:
    with running_kubernetes() as cluster:
        yield cluster


def test_a_kubeconfig_with_another_token_is_read_again(cluster: LoopbackKubernetes, tmp_path: Path):
    executor = KubernetesExecutor(kubeconfig=cluster.write_kubeconfig(tmp_path / "kubeconfig"), image="any")
    handle = executor.launch(request_of(STAY))
    cluster.accepts = lambda token: token == "the-next-one"
    before = len(cluster.tokens)
    with pytest.raises(ExecutorDenied, match="401"):
        executor.find("run")
    assert cluster.tokens[before:] == [TOKEN, TOKEN]  # once more, and no more than once
    cluster.write_kubeconfig(tmp_path / "kubeconfig", token="the-next-one")
    wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "it runs")
    assert cluster.tokens[before + 2 : before + 4] == [TOKEN, "the-next-one"]


def test_half_of_a_kubeconfig_is_denied_until_it_is_whole(cluster: LoopbackKubernetes, tmp_path: Path):
    config = tmp_path / "kubeconfig"
    executor = KubernetesExecutor(kubeconfig=cluster.write_kubeconfig(config), image="any")
    executor.find("run")
    whole = config.read_text().replace(TOKEN, "the-next-one")
    cluster.accepts = lambda token: token == "the-next-one"
    for half in (whole[: len(whole) // 2], ""):
        config.write_text(half)
        with pytest.raises(ExecutorDenied, match="no Kubernetes cluster is configured"):
            executor.find("run")
    config.write_text(whole)
    assert executor.find("run") == []


def test_aws_credentials_that_were_rewritten_open_the_cluster_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """EKS's tokens are signed for each request, with credentials that boto3 reads once for a session."""

    def write(secret: str) -> None:
        lines = ["[default]", f"aws_access_key_id={loopback_eks.ACCESS_KEY}", f"aws_secret_access_key={secret}"]
        (tmp_path / "credentials").write_text("\n".join(lines))

    write("of-yesterday")
    with loopback_eks.running_aws() as aws:
        for name, value in loopback_eks.environ(aws).items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_DEFAULT_REGION", loopback_eks.REGION)
        with loopback_eks.running_cluster(aws) as cluster:
            executor = EKSExecutor(loopback_eks.CLUSTER, region=loopback_eks.REGION, image="any")
            with pytest.raises(ExecutorDenied, match="401"):
                executor.find("run")
            write(loopback_eks.SECRET_KEY)
            assert executor.find("run") == []
            assert loopback_eks.is_let_in(cluster.tokens[-1])


def test_a_token_file_of_hugging_face_is_read_for_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with LoopbackHF() as service:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        (tmp_path / "token").write_text(service.token)
        executor = HFJobsExecutor(endpoint=service.endpoint)
        handle = executor.launch(request_of(STAY))
        service.token = "hf_the_next_one"
        with pytest.raises(ExecutorDenied, match="401"):
            executor.find("run")
        (tmp_path / "token").write_text(service.token)
        assert executor.poll(handle).state is ReplicaState.RUNNING
        executor.cancel(handle)


@pytest.fixture
def modal_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modal's configuration file, which the SDK of this process uses."""
    import modal.config
    from modal.client import _Client

    monkeypatch.setattr(modal.config, "user_config_path", str(tmp_path / "modal.toml"))
    monkeypatch.setattr(modal.config, "_user_config", {})
    monkeypatch.setattr(modal.config, "_profile", "default")
    _Client._set_env_client(None)
    yield tmp_path / "modal.toml"
    _Client._set_env_client(None)


def test_a_configuration_of_modal_with_another_token_is_read_again(modal_file: Path):
    def write(server: LoopbackModal) -> None:
        modal_file.write_text(
            f'[work]\ntoken_id = "{server.token_id}"\ntoken_secret = "{server.token_secret}"\nactive = true\n'
        )

    with LoopbackModal() as server, mock.patch.dict(os.environ, {"MODAL_SERVER_URL": server.url}):
        for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_PROFILE"):
            os.environ.pop(name, None)
        executor = ModalExecutor("tests")
        with pytest.raises(ExecutorDenied, match="modal token"):
            executor.find("run")
        write(server)  # by `modal token new`
        handle = executor.launch(request_of(STAY))
        server.token_secret = "as-the-next-one"
        with pytest.raises(ExecutorDenied, match="modal token"):
            executor.poll(handle)
        write(server)
        assert executor.poll(handle).state is ReplicaState.RUNNING
        assert executor.launch(request_of(STAY)) == handle
        executor.cancel(handle)
