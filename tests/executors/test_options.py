"""Executors by name, and made again from what a record holds."""

import json

import pytest

from executors import (
    EKSExecutor,
    HFJobsExecutor,
    KubernetesExecutor,
    LocalProcessExecutor,
    MixedExecutor,
    ModalExecutor,
)
from executors.constructor_options import plain_options
from executors.contract import ExecutorError, LaunchRequest, ReplicaHandle, ReplicaState, ReplicaStatus
from executors.registry import OURS, constructor_options, executor_class, make_fleet, recreate, spec_of


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_executor_is_named_as_the_command_line_names_it_and_explains_its_options(name: str):
    assert executor_class(name).name == name
    unexplained = [option.name for option in constructor_options(name) if not option.help]
    assert unexplained == []


@pytest.mark.parametrize(
    "executor",
    [
        ModalExecutor(
            gpu=["H100", "A100"],
            region=("eu", "us"),
            volumes={"/data": "corpus", "/models": {"bucket_name": "weights", "secret": "aws", "read_only": True}},
        ),
        ModalExecutor("mine", gpu="A100", cpu=2.5, memory=4096, secrets=["a", "b"], oidc=True, timeout_s=600),
        HFJobsExecutor("l4x1", env={"HF_HOME": "/cache"}, volumes=["hf://datasets/org/text:/data:ro"], hourly_usd=0.8),
        HFJobsExecutor("t4-small", image="x", namespace="org", token="hf_secret", timeout="90m", endpoint="http://h"),
        EKSExecutor("cluster", region="eu-central-1", gpu=1, memory="16Gi", spot=False, service_account="s"),
        KubernetesExecutor(namespace="n", queue="gpus", context="c"),
    ],
    ids=lambda executor: executor.name,
)
def test_an_executor_is_made_again_from_its_record(executor):
    spec = json.loads(json.dumps(spec_of(executor)))
    request = LaunchRequest("run", 0, 1, ["python"], secrets={"KEY": "x"})
    assert recreate(spec).plan(request) == executor.plan(request)
    assert "hf_secret" not in json.dumps(spec)


def test_a_mixed_fleet_is_made_again_too():
    mixed = MixedExecutor([(ModalExecutor("a"), 2), (HFJobsExecutor("t4-small"), 1)])
    again = recreate(json.loads(json.dumps(spec_of(mixed))))
    assert again.name == mixed.name == "modal:2+hf-jobs:1"
    assert again.plan(LaunchRequest("run", 2, 1, ["python"]))["flavor"] == "t4-small"


def test_a_users_own_executor_is_not_guessed_from_its_record(tmp_path):
    class Mine(LocalProcessExecutor):
        name = "mine"

    class Looks(LocalProcessExecutor):
        """Named as its base, but something else."""

    assert spec_of(Mine(tmp_path)) is None and spec_of(Looks(tmp_path)) is None
    assert spec_of(MixedExecutor([(Mine(tmp_path), 1)])) is None


def test_plain_options_leave_credentials_and_objects_out():
    given = {
        "self": 1,
        "token": "t",
        "gpu": "A100",
        "names": ("a", "b"),
        "x": None,
    }
    assert plain_options(given) == {"gpu": "A100", "names": ["a", "b"]}


def test_an_executor_that_was_given_what_no_record_may_hold_is_not_made_again():
    assert plain_options({"client": object()}) is None and plain_options({"env": {"API_KEY": "b"}}) is None
    assert plain_options({"env": {"A": "b"}, "template": {"spec": [{"a": None}]}}) == {
        "env": {"A": "b"},
        "template": {"spec": [{"a": None}]},
    }
    spec = spec_of(HFJobsExecutor(secrets={"AWS_SECRET_ACCESS_KEY": "hidden-0011"}))
    assert "hidden-0011" not in json.dumps(spec)
    for described in (spec, {"shares": [{"executor": spec, "replicas": 2}]}):
        with pytest.raises(ExecutorError, match=r"it is HFJobsExecutor with secrets, which no record holds. Make it"):
            recreate(described)
    assert spec_of(HFJobsExecutor(secrets={})) is not None


def test_a_fleet_needs_counts_where_it_has_several_parts():
    executor, count = make_fleet([], {})
    assert (executor.name, count) == ("local", None)
    assert make_fleet(["modal:3"], {"modal": {"gpu": "T4"}})[1] == 3
    with pytest.raises(ValueError, match="say how many replicas go to eks"):
        make_fleet(["modal:3", "eks"], {})
    with pytest.raises(ValueError, match="at least one replica"):
        MixedExecutor([])


class Told(LocalProcessExecutor):
    """Answers for everything with its own name."""

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return ReplicaStatus(ReplicaState.RUNNING, native_state=self.name)


def test_a_mixed_fleet_asks_the_one_that_launched(tmp_path):
    first, second = Told(tmp_path / "a"), Told(tmp_path / "b")
    second.name = "second"
    mixed = MixedExecutor([(first, 1), (second, 2)])
    handles = [ReplicaHandle("x", "run", replica_id, 1, "n") for replica_id in (2, 0, 1)]
    assert [status.native_state for status in mixed.poll_many(handles)] == ["second", "local", "second"]
    assert mixed.shares_machine
    with pytest.raises(ValueError, match="has executors for 3 replicas"):
        mixed.poll(ReplicaHandle("x", "run", 3, 1, "n"))
