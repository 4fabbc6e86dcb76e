"""Modal Sandboxes: the executor contract through the genuine SDK and a loopback server, and what is special there.

The SDK speaks to an older backend for GPUs and to a newer one without: the contract holds on both.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import modal
import pytest
from grpclib import Status

pytest.importorskip("modal")

from loopback_modal import STATUS, LoopbackModal

from executors.contract import (
    ExecutorDenied,
    LaunchRequest,
    MissingSdk,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
)
from executors.modal_api import end_of
from executors.modal_objects import status_of
from executors.modal_sandboxes import TAG_CANCELLED, ModalExecutor
from executors.remote_base import LABEL_RUN, run_label
from executors.testing import SECRET, ExecutorContract, Rig, ended_state, request_of, wait_until

STAY = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("here", flush=True)
signal.pause()
"""


class ModalRig(Rig):
    def __init__(self, server: LoopbackModal, gpu: str | None) -> None:
        self.server, self.gpu = server, gpu
        self.construct = f"from executors.modal_sandboxes import ModalExecutor as E; executor = E('tests', gpu={gpu!r})"
        self.environ = server.environ()
        self.credentials = (server.token_secret,)
        self._client = server.client()

    def executor(self) -> ModalExecutor:
        return ModalExecutor("tests", gpu=self.gpu, client=self._client)

    def denied(self) -> ModalExecutor:
        return ModalExecutor("tests", gpu=self.gpu, client=self.server.client("as-wrong"))

    def preempt(self, handle: ReplicaHandle) -> None:
        self.server.preempt(handle.native_id)

    def no_capacity(self, on: bool) -> None:
        self.server.no_capacity = on

    def failing(self, on: bool) -> None:
        self.server.failing = Status.UNAVAILABLE if on else None

    def forget(self, handle: ReplicaHandle) -> None:
        self.server.forget(handle.native_id)

    def refuse(self, replica_id: int) -> None:
        self.server.refused.add(f"-r{replica_id}-")

    def machines(self, run_id: str) -> int:
        return len(self.server.sandboxes_of(**{LABEL_RUN: run_label(run_id)}))


class ModalRigWithoutGpu(ModalRig):
    def hold(self, on: bool) -> None:
        self.server.hold(on)


@pytest.fixture
def server() -> Iterator[LoopbackModal]:
    with LoopbackModal() as server:
        yield server


@pytest.mark.slow
class TestModalSandboxesWithGpu(ExecutorContract):
    """A launch that waits for a machine blocks here, so none is pending; a test below looks at it."""

    @pytest.fixture
    def rig(self, server: LoopbackModal) -> ModalRig:
        return ModalRig(server, "T4")

    @pytest.mark.slow  # two processes that import the SDK; local processes show the same in less time
    def test_two_processes_that_launch_the_same_attempt_get_the_same_one(self, rig, executor):
        super().test_two_processes_that_launch_the_same_attempt_get_the_same_one(rig, executor)


class TestModalSandboxesWithoutGpu(ExecutorContract):
    @pytest.fixture
    def rig(self, server: LoopbackModal) -> ModalRig:
        return ModalRigWithoutGpu(server, None)

    @pytest.mark.slow  # two processes that import the SDK; local processes show the same in less time
    def test_two_processes_that_launch_the_same_attempt_get_the_same_one(self, rig, executor):
        super().test_two_processes_that_launch_the_same_attempt_get_the_same_one(rig, executor)


# -- the request ------------------------------------------------------------------------------------------------------


def test_a_request_becomes_the_arguments_of_a_sandbox():
    executor = ModalExecutor(
        "training",
        gpu=["H100", "A100"],
        image="registry.example/train:7",
        cpu=4,
        memory=65536,
        region="us-east",
        volumes={"/data": "corpus", "/models": {"bucket_name": "weights", "secret": "bucket", "read_only": True}},
        secrets=["bucket"],
        environment="dev",
    )
    request = LaunchRequest(
        run_id="Big Run",
        replica_id=3,
        attempt=2,
        command=["python", "-m", "train"],
        env={"A": "b"},
        secrets={"KEY": SECRET},
        timeout_s=90.5,
    )
    run = run_label("Big Run")
    assert executor.plan(request) == {
        "app": "training",
        "environment": "dev",
        "name": f"dl-{run}-r3-a2",
        "tags": {"diloco-run": run, "diloco-replica": "3", "diloco-attempt": "2"},
        "command": ["python", "-m", "train"],
        "image": "registry.example/train:7",
        "env": {"A": "b", "DILOCO_LEAVE_AFTER_S": "81.9"},
        "secrets": {"KEY": "<redacted>"},
        "named_secrets": ["bucket"],
        "timeout": 91,
        "gpu": ["H100", "A100"],
        "cpu": 4,
        "memory": 65536,
        "region": ["us-east"],
        "volumes": {"/data": "corpus", "/models": {"bucket_name": "weights", "secret": "bucket", "read_only": True}},
        "include_oidc_identity_token": False,
    }


def test_what_is_planned_is_what_modal_receives(server: LoopbackModal):
    executor = ModalExecutor(
        "tests",
        gpu="A100",
        cpu=1.5,
        memory=512,
        region=["eu", "us-east"],
        volumes=["/data=corpus"],
        oidc=True,
        timeout_s=600,
        client=server.client(),
    )
    server.named_volumes.add("corpus")
    executor.launch(request_of("pass"))
    (sent,) = received(server, "SandboxCreate")
    definition = sent.definition
    assert (definition.name, definition.timeout_secs) == ("dl-contract-run-r0-a1", 600)
    assert (definition.resources.gpu_config.gpu_type, definition.resources.gpu_config.count) == ("A100", 1)
    assert (definition.resources.milli_cpu, definition.resources.memory_mb) == (1500, 512)
    placed = list(definition.scheduler_placement.regions)
    assert (placed, definition.include_oidc_identity_token) == (["eu", "us-east"], True)
    assert [(mount.volume_id, mount.mount_path) for mount in definition.volume_mounts] == [("vo-corpus", "/data")]
    assert {tag.tag_name: tag.tag_value for tag in sent.tags} == executor.plan(request_of("pass"))["tags"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_s": 86401}, "1 to 86400"),
        ({"timeout_s": 0.5}, "1 to 86400"),
        ({"gpu": "A100:0"}, "'A100'"),
        ({"region": ["eu", ""]}, "us-east"),
        ({"volumes": {"data": "corpus"}}, "no absolute path"),
        ({"volumes": ["/data"]}, "/path=NAME"),
        ({"volumes": {"/data": {"bucket_nam": "x"}}}, "did you mean 'bucket_name'"),
        ({"volumes": {"/data": {"key_prefix": "x"}}}, "names no bucket"),
        ({"cpu": 0}, "cores"),
        ({"memory": "2Gi"}, "MiB"),
        ({"secrets": "bucket"}, r"\['bucket'\]"),
        ({"app": "my app"}, "letters"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        ModalExecutor(**options)


def test_a_bad_time_limit_of_a_request_is_refused():
    with pytest.raises(ValueError, match="1 to 86400"):
        ModalExecutor().plan(request_of("", timeout_s=1e6))


def test_secrets_travel_as_modal_secrets_only(server: LoopbackModal):
    server.named_secrets["bucket"] = {"BUCKET_KEY": "of the bucket"}
    for gpu, rpc in (("T4", "SandboxCreate"), (None, "SandboxCreateV2")):
        executor = ModalExecutor("tests", gpu=gpu, secrets=["bucket"], client=server.client())
        code = "import os; print(os.environ['BUCKET_KEY'], len(os.environ['HIDDEN']))"
        handle = executor.launch(request_of(code, run_id=f"run-{rpc.lower()}", secrets={"HIDDEN": SECRET}))
        assert ended_state(executor, handle) is ReplicaState.SUCCEEDED
        assert list(executor.logs(handle)) == [f"of the bucket {len(SECRET)}"]
        (sent,) = received(server, rpc)
        assert SECRET not in str(sent.definition) + str(sent.tags)


def test_a_secret_that_modal_does_not_have_is_refused_for_good(server: LoopbackModal):
    with pytest.raises(ExecutorDenied, match="bukcet"):
        ModalExecutor("tests", secrets=["bukcet"], client=server.client()).launch(request_of("pass"))


def test_the_next_gpu_is_taken_where_modal_has_none_of_the_first(server: LoopbackModal):
    server.gpus_without_room.add("H100")
    executor = ModalExecutor("tests", gpu=["H100", "A100"], client=server.client())
    for replica_id in range(2):
        executor.launch(request_of("pass", replica_id=replica_id))
    kinds = [sent.definition.resources.gpu_config.gpu_type for sent in received(server, "SandboxCreate")]
    assert kinds == ["H100", "A100", "A100"]  # what had no room comes last for a while
    server.gpus_without_room.add("A100")
    with pytest.raises(NoCapacity):
        executor.launch(request_of("pass", replica_id=2))


def test_a_volume_that_does_not_exist_is_refused_for_good(server: LoopbackModal):
    executor = ModalExecutor("tests", gpu="T4", volumes={"/data": "corpsu"}, client=server.client())
    with pytest.raises(ExecutorDenied, match="corpsu"):
        executor.launch(request_of("pass"))


def test_modals_own_objects_are_taken_as_they_are(server: LoopbackModal):
    image = modal.Image.debian_slim().pip_install("torch==2.9")
    bucket = modal.CloudBucketMount("weights", key_prefix="a/", read_only=True)
    executor = ModalExecutor("tests", gpu="T4", image=image, volumes={"/models": bucket}, client=server.client())
    executor.launch(request_of("pass"))
    (sent,) = received(server, "SandboxCreate")
    (mount,) = sent.definition.cloud_bucket_mounts
    assert (mount.bucket_name, mount.key_prefix, mount.read_only, mount.mount_path) == (
        "weights",
        "a/",
        True,
        "/models",
    )
    assert any(
        "torch==2.9" in line for r in received(server, "ImageGetOrCreate") for line in r.image.dockerfile_commands
    )
    assert executor.options is None and executor.withheld == ("client", "image", "volumes")


def test_an_image_is_built_once_for_a_fan_out(server: LoopbackModal):
    executor = ModalExecutor("tests", gpu="T4", image="registry.example/train:7", client=server.client())
    requests = [request_of("pass", replica_id=replica_id) for replica_id in range(4)]
    with ThreadPoolExecutor(4) as threads:
        handles = list(threads.map(executor.launch, requests))
    assert len({handle.native_id for handle in handles}) == 4
    (built,) = received(server, "ImageGetOrCreate")
    assert "FROM registry.example/train:7" in list(built.image.dockerfile_commands)


def test_an_image_is_built_from_the_digest_that_a_run_pins(server: LoopbackModal):
    executor, digest = ModalExecutor("tests", image="python:3.11", client=server.client()), "sha256:" + "0a" * 32
    for attempt in (1, 2):
        executor.launch(replace(request_of("", attempt=attempt), images={"python:3.11": digest}))
    executor.launch(request_of("", attempt=3))
    asked = [list(each.image.dockerfile_commands) for each in received(server, "ImageGetOrCreate")]
    built = [line for lines in asked for line in lines if line.startswith("FROM")]
    assert built == [f"FROM python@{digest}", "FROM python:3.11"]


def test_without_the_sdk_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(MissingSdk, match=r"diloco-orchestrator\[modal\]"):
        ModalExecutor().launch(request_of("pass"))
    with pytest.raises(MissingSdk):
        ModalExecutor().poll(ReplicaHandle("modal", "contract-run", 0, 1, "sb-1"))
    assert ModalExecutor().plan(request_of("pass"))["app"] == "diloco"


def test_importing_the_executor_loads_no_sdk():
    code = "import sys, executors.modal_sandboxes; sys.exit('modal' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- the reply --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "code", "status"),
    [
        ("UNSPECIFIED", None, ReplicaStatus(ReplicaState.RUNNING, "", None, "UNSPECIFIED")),
        ("SUCCESS", 0, ReplicaStatus(ReplicaState.SUCCEEDED, "exit", 0, "SUCCESS")),
        ("FAILURE", 1, ReplicaStatus(ReplicaState.FAILED, "exit", 1, "FAILURE", "exit code 1")),
        ("FAILURE", 75, ReplicaStatus(ReplicaState.PREEMPTED, "exit", 75, "FAILURE", "exit code 75")),
        ("FAILURE", 76, ReplicaStatus(ReplicaState.FAILED, "superseded", 76, "FAILURE", "exit code 76")),
        ("FAILURE", 78, ReplicaStatus(ReplicaState.FAILED, "permanent", 78, "FAILURE", "exit code 78")),
        ("FAILURE", 137, ReplicaStatus(ReplicaState.PREEMPTED, "lost", 137, "FAILURE", "exit code 137")),
        ("TERMINATED", 137, ReplicaStatus(ReplicaState.PREEMPTED, "lost", 137, "TERMINATED", "Modal says TERMINATED")),
        ("TIMEOUT", 124, ReplicaStatus(ReplicaState.TIMED_OUT, "deadline", 124, "TIMEOUT", "Modal says TIMEOUT")),
        (
            "INIT_FAILURE",
            0,
            ReplicaStatus(ReplicaState.FAILED, "image", None, "INIT_FAILURE", "Modal says INIT_FAILURE"),
        ),
        ("ABDUCTED", 0, ReplicaStatus(ReplicaState.UNKNOWN, "", None, "ABDUCTED", "Modal says ABDUCTED")),
    ],
)
def test_an_end_at_modal_becomes_a_status(word: str, code: int | None, status: ReplicaStatus):
    assert status_of(word, code) == status


@pytest.mark.parametrize(
    ("result", "state", "reason"),
    [
        (STATUS.GENERIC_STATUS_INIT_FAILURE, ReplicaState.FAILED, "image"),  # its exit code is 0
        (STATUS.GENERIC_STATUS_KERNEL_OOM_KILL, ReplicaState.FAILED, "oom"),
        (STATUS.GENERIC_STATUS_INTERNAL_FAILURE, ReplicaState.PREEMPTED, "lost"),
        (99, ReplicaState.UNKNOWN, ""),
    ],
)
def test_an_end_without_a_telling_exit_code_is_understood(
    server: LoopbackModal, result: int, state: ReplicaState, reason: str
):
    executor = ModalExecutor("tests", gpu="T4", client=server.client())
    handle = executor.launch(request_of(STAY))
    server.sandboxes[handle.native_id].result = result
    status = executor.poll(handle)
    assert (status.state, status.reason) == (state, reason)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (None, ReplicaState.RUNNING),
        (0, ReplicaState.SUCCEEDED),
        (3, ReplicaState.FAILED),
        (75, ReplicaState.PREEMPTED),
        (124, ReplicaState.TIMED_OUT),
        (137, ReplicaState.PREEMPTED),
    ],
)
def test_an_sdk_that_tells_exit_codes_only_is_understood(code: int | None, state: ReplicaState):
    sandbox = SimpleNamespace(returncode=code)
    assert status_of(end_of(sandbox)[0], code).state is state


def test_a_cancel_is_seen_by_every_process(server: LoopbackModal):
    executor, other = (ModalExecutor("tests", gpu="T4", client=server.client()) for _ in range(2))
    handle = executor.launch(request_of(STAY))
    tags = dict(server.sandboxes[handle.native_id].tags)
    executor.cancel(handle)
    assert ended_state(other, handle) is ReplicaState.CANCELLED
    assert server.sandboxes[handle.native_id].tags == {**tags, TAG_CANCELLED: "user"}  # it is found by the others
    server.forget(handle.native_id)
    assert (executor.poll(handle).state, other.poll(handle).state) == (ReplicaState.CANCELLED, ReplicaState.PREEMPTED)
    assert list(executor.logs(handle)) == []


def test_a_fleet_is_polled_by_one_listing_and_what_is_not_live_is_polled_alone(server: LoopbackModal):
    executor = ModalExecutor("tests", client=server.client())
    handles = [executor.launch(request_of(STAY, replica_id=replica_id)) for replica_id in range(4)]
    server.page_size = 3

    def polled() -> tuple[list[ReplicaState], list[str]]:
        server.requests.clear()
        states = [status.state for status in executor.poll_many(handles)]
        return states, sorted(rpc for rpc, _ in server.requests)

    executor.poll_many(handles)  # each one's machine is asked for once
    assert polled() == ([ReplicaState.RUNNING] * 4, ["SandboxListV2", "SandboxListV2"])  # four on pages of three
    executor.cancel(handles[1])
    wait_until(lambda: server.sandboxes[handles[1].native_id].ended(), "it ends")
    server.forget(handles[2].native_id)
    states, calls = polled()
    assert states == [ReplicaState.RUNNING, ReplicaState.CANCELLED, ReplicaState.PREEMPTED, ReplicaState.RUNNING]
    assert calls.count("SandboxListV2") == 2  # the second, empty one ends the search for the two
    server.failing = Status.UNAVAILABLE
    assert polled()[0] == [ReplicaState.UNKNOWN] * 4


# -- launchers that die or wait ---------------------------------------------------------------------------------------


def test_a_launch_that_waits_for_a_gpu_blocks_and_another_process_adopts_it(server: LoopbackModal):
    executor, other = (ModalExecutor("tests", gpu="T4", client=server.client()) for _ in range(2))
    server.hold(True)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(executor.launch, request_of(STAY))
        wait_until(lambda: other.find("contract-run") != [], "it is listed")
        adopted = other.launch(request_of(STAY))
        assert other.poll(adopted).state is ReplicaState.PENDING and not waiting.done()
        assert list(other.logs(adopted)) == []
        server.hold(False)
        assert waiting.result(30) == adopted
    assert other.poll(adopted).state is ReplicaState.RUNNING


def test_ctrl_c_in_the_launcher_ends_no_replica(server: LoopbackModal):
    code = (
        "import json, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it\n"
        "from executors.modal_sandboxes import ModalExecutor\n"
        "from executors.testing import request_of\n"
        f"handle = ModalExecutor('tests', gpu='T4').launch(request_of({STAY!r}))\n"
        "print(json.dumps(handle.to_json()), flush=True)\n"
        "signal.pause()\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **server.environ()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert launcher.stdout is not None
    handle = ReplicaHandle.from_json(json.loads(launcher.stdout.readline()))
    launcher.send_signal(signal.SIGINT)
    launcher.communicate()
    assert ModalExecutor("tests", client=server.client()).poll(handle).state is ReplicaState.RUNNING
    assert received(server, "SandboxTerminate") == []


# -- output -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_long_output_arrives_whole_and_in_order_while_it_is_followed(server: LoopbackModal):
    executor = ModalExecutor("tests", gpu="T4", client=server.client())
    code = "for n in range(6000): print(n, 'x' * 60, flush=n % 1000 == 0)"
    handle = executor.launch(request_of(code))
    followed = [line.split()[0] for line in executor.logs(handle, follow=True)]
    assert followed == [str(n) for n in range(6000)]
    assert [line.split()[0] for line in executor.logs(handle, tail=3)] == ["5997", "5998", "5999"]
    assert list(executor.logs(handle, tail=0)) == []


def test_following_the_tail_goes_on_with_what_is_written_next(server: LoopbackModal):
    executor = ModalExecutor("tests", gpu="T4", client=server.client())
    code = "print('a'); print('b')" + STAY.replace("sys.exit(75)", "sys.exit(print('bye'))")
    handle = executor.launch(request_of(code))
    wait_until(lambda: "here" in list(executor.logs(handle)), "it has started")
    lines = executor.logs(handle, follow=True, tail=1)
    assert list(islice(lines, 1)) == ["here"]
    executor.cancel(handle)
    assert list(lines) == ["bye"]


def received(server: LoopbackModal, rpc: str) -> list[Any]:
    return [message for name, message in server.requests if name == rpc]
