"""The shipped policies are enough for a whole run and no more: what each user may do, asked of a server that checks."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from iam_server import ADMIN, BUCKET, CREATES, IamServer, Question, allows, denies, running_iam_server
from real_runs import FAST

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch
from diloco_orchestrator.errors import ObjectMissing, StoreDenied
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

pytestmark = pytest.mark.slow

IAM = Path(__file__).parent.parent.parent / "infra" / "iam"
PREFIX = "runs/a"
URL = f"s3://{BUCKET}/{PREFIX}"
ROLES = ("replica", "coordinator", "inspect")
HERE = f"arn:aws:s3:::{BUCKET}/{PREFIX}"


def policy(name: str) -> dict[str, Any]:
    """A shipped policy, filled in as infra/iam/README.md says."""
    text = (IAM / f"{name}.json").read_text().replace("BUCKET", BUCKET).replace("PREFIX", PREFIX)
    return dict(json.loads(text))


@dataclass(frozen=True)
class Trained:
    """How the run ended, and what its two users asked for until then."""

    status: str
    calls: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def server() -> Iterator[IamServer]:
    blind = {**policy("replica"), "Statement": policy("replica")["Statement"][:1]}  # may not list
    with running_iam_server({**{name: policy(name) for name in ROLES}, "blind": blind}) as server:
        yield server


@pytest.fixture(scope="module")
def trained(server: IamServer, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose launcher had the coordinator's policy and whose replicas had theirs, as users would do it: one's own
    credentials in the environment, the replicas' as secrets."""
    users = ("replica", "coordinator")
    before = {user: len(server.calls(user)) for user in users}  # other tests of this file use the server, too
    with pytest.MonkeyPatch.context() as environ:
        for name, value in {**server.environ("coordinator"), "AWS_ENDPOINT_URL": server.url}.items():
            environ.setenv(name, value)
        run = launch(
            "tiny_workloads:train",
            store=URL,
            executor=LocalProcessExecutor(tmp_path_factory.mktemp("executor")),
            secrets=server.environ("replica"),
            replicas=2,
            rounds=4,
            sync_every=2,
            snapshot_every=1,
            retention={"payloads": "needed", "snapshots": 2},
            **FAST,
        )
        status = run.wait().status
    return Trained(status, {user: server.calls(user)[before[user] :] for user in users})


def as_user(server: IamServer, user: str, url: str = URL) -> Store:
    return open_store(url, server.options(user))


# -- a whole run ------------------------------------------------------------------------------------------------------


def test_a_whole_run_completes_with_the_two_policies(trained: Trained):
    assert trained.status == "completed"
    assert [call for calls in trained.calls.values() for call in calls if call["refused"]] == []


@pytest.mark.parametrize("user", ["replica", "coordinator"])
def test_every_right_in_a_policy_was_used_by_the_run(trained: Trained, user: str):
    granted = {action for each in policy(user)["Statement"] for action in listed(each["Action"])}
    assert {call["action"] for call in trained.calls[user]} == granted


def test_inspecting_takes_no_more_than_reading(server: IamServer, trained: Trained, tmp_path: Path):
    store = as_user(server, "inspect")
    assert RunReader(store).status().state == "completed"
    assert verify_run(store).agrees
    assert copy_model(RunLog(store), tmp_path / "model") == 4 and (tmp_path / "model" / "model.safetensors").exists()
    assert {call["action"] for call in server.calls("inspect")} == {"s3:GetObject", "s3:ListBucket"}
    with pytest.raises(StoreDenied):
        store.put("run.json", b"another run")


@pytest.mark.parametrize("neighbour", ["runs/ab", "runs/b"])
@pytest.mark.parametrize("user", ROLES)
def test_other_runs_of_the_bucket_are_out_of_reach(server: IamServer, user: str, neighbour: str):
    as_user(server, ADMIN, f"s3://{BUCKET}/{neighbour}").put("run.json", b"theirs")
    other = as_user(server, user, f"s3://{BUCKET}/{neighbour}")
    for call in (
        lambda: other.put("run.json", b"ours"),
        lambda: other.create("new.json", b"ours"),
        lambda: other.get("run.json"),
        lambda: other.get("missing.json"),
        lambda: other.list(""),
        lambda: other.delete("run.json"),
        lambda: as_user(server, user, f"s3://{BUCKET}").list(""),
    ):
        with pytest.raises(StoreDenied):
            call()
    assert as_user(server, ADMIN, f"s3://{BUCKET}/{neighbour}").get("run.json") == b"theirs"


@pytest.mark.parametrize("user", ["replica", "inspect"])
def test_only_the_coordinator_removes_objects(server: IamServer, user: str):
    as_user(server, ADMIN).put("replicas/0/kept", b"kept")
    with pytest.raises(StoreDenied):
        as_user(server, user).delete("replicas/0/kept")
    assert as_user(server, ADMIN).get("replicas/0/kept") == b"kept"
    as_user(server, "coordinator").delete("replicas/0/kept")
    assert "replicas/0/kept" not in {info.key for info in as_user(server, ADMIN).list("replicas/0/")}


def test_only_who_may_list_is_told_that_an_object_is_missing(server: IamServer):
    """Replicas ask for commits that are not there yet all the time: as with S3, without this right that is a 403."""
    with pytest.raises(ObjectMissing):
        as_user(server, "replica").get("rounds/00000099/commit.json")
    with pytest.raises(StoreDenied):
        as_user(server, "blind").get("rounds/00000099/commit.json")


def test_a_wrong_secret_is_refused(server: IamServer):
    with pytest.raises(StoreDenied):
        open_store(URL, {**server.options("replica"), "secret": "guessed"}).list("")


# -- the documents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROLES)
def test_a_policy_is_one_that_iam_takes(name: str):
    from moto.iam.policy_validation import IAMPolicyDocumentValidator

    IAMPolicyDocumentValidator(json.dumps(policy(name))).validate()
    assert "BUCKET" not in json.dumps(policy(name)) and "PREFIX" not in json.dumps(policy(name))


def test_the_create_only_policy_lets_pass_what_a_run_writes_and_stops_what_overwrites(trained: Trained):
    create_only = policy("create-only-bucket-policy")
    calls = [call for calls in trained.calls.values() for call in calls]
    asked = [Question(call["action"], call["resource"], call["context"]) for call in calls]
    assert [each for each in asked if denies(create_only, each)] == []
    plainly = [
        Question(each.action, each.resource, {CREATES: "true"}) for each in asked if each.action == "s3:PutObject"
    ]
    free = {each.resource.removeprefix(f"{HERE}/") for each in plainly if not denies(create_only, each)}
    overwritten = {Path(key).parent.name for key in free if not key.startswith(".probe/")}  # names of a signed run
    assert overwritten == {"heartbeat.json", "log.txt"}


def one_replica(replica_id: int) -> dict[str, Any]:
    return dict(json.loads(json.dumps(policy("one-replica")).replace("REPLICA", str(replica_id))))


def may_put(replica_id: int, key: str) -> bool:
    return allows(one_replica(replica_id), Question("s3:PutObject", f"{HERE}/{key}", {}))


def test_a_replicas_own_policy_lets_pass_what_it_writes(trained: Trained):
    puts = {call["resource"].removeprefix(f"{HERE}/") for call in trained.calls["replica"] if _is_put(call)}
    shared = {key for key in puts if may_put(0, key) and may_put(1, key)}
    own = [{key for key in puts - shared if may_put(i, key)} for i in range(2)]
    assert puts == shared | own[0] | own[1] and own[0].isdisjoint(own[1])
    assert {key.split("/")[0] for key in own[0]} == {"replicas", "rounds", "start"}


def _is_put(call: dict[str, Any]) -> bool:
    return bool(call["action"] == "s3:PutObject")


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
