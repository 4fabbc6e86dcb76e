"""Half-open connections: the server never answers, or stops in the middle. Every call of an executor ends."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from half_open import half_open

from executors.answers import answer_within, items_while
from executors.contract import ExecutorError, ReplicaHandle, ReplicaState, ServerlessExecutor, Unavailable
from executors.hf_jobs import HFJobsExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.testing import request_of

SHORT_S = 0.1
_KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "%s"}}]
users: [{name: u, user: {token: t}}]
"""

CALLS: dict[str, Callable[[ServerlessExecutor, ReplicaHandle], object]] = {
    "launch": lambda executor, handle: executor.launch(request_of("pass")),
    "cancel": lambda executor, handle: executor.cancel(handle),
    "find": lambda executor, handle: executor.find(handle.run_id),
    "logs": lambda executor, handle: list(executor.logs(handle)),
    "logs that are followed": lambda executor, handle: list(executor.logs(handle, follow=True)),
}


def check_that_every_call_ends(executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
    for call in CALLS.values():
        with pytest.raises(Unavailable, match=r"ry again|this machine reaches"):
            call(executor, handle)
    other = ReplicaHandle(handle.executor, handle.run_id, 1, 1, f"{handle.native_id}-other", handle.native)
    assert executor.poll(handle).state is ReplicaState.UNKNOWN
    assert {status.state for status in executor.poll_many([handle, other])} == {ReplicaState.UNKNOWN}


@pytest.fixture(params=["silent", "half"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with half_open(request.param) as url:
        yield url


def test_no_call_to_hugging_face_waits_for_ever(url: str, monkeypatch: pytest.MonkeyPatch):
    """The SDK's own client has no time limit."""
    for limit in ("_READ_TIMEOUT_S", "_LIST_TIMEOUT_S", "_CALL_S", "_SILENCE_S"):
        monkeypatch.setattr(f"executors.hf_api.{limit}", SHORT_S)
    executor = HFJobsExecutor("t4-small", endpoint=url, token="hf_x", namespace="ada")
    where = {"endpoint": url, "namespace": "ada", "job_id": "1"}
    check_that_every_call_ends(executor, ReplicaHandle("hf-jobs", "r", 0, 1, "1", where))
    assert executor.price(request_of("pass")) is not None  # from the table


def test_a_launch_whose_post_hangs_is_unavailable(monkeypatch: pytest.MonkeyPatch):
    """The listing before it was answered."""
    monkeypatch.setattr("executors.hf_api._READ_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr("executors.hf_api._CALL_S", SHORT_S)
    with half_open("silent") as url:
        executor = HFJobsExecutor(endpoint=url, token="hf_x", namespace="ada")
        monkeypatch.setattr(executor._api, "find", lambda labels: [])
        with pytest.raises(Unavailable, match=r"launching .*: no answer for 0\.1 s"):
            executor.launch(request_of("pass"))


def test_no_call_to_kubernetes_waits_for_ever(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for limits in ("_CALL_S", "_FOLLOW_S"):
        monkeypatch.setattr(f"executors.kubernetes_api.{limits}", (SHORT_S, SHORT_S))
    monkeypatch.setattr("executors.kubernetes_jobs._FOLLOWS_FOR_S", SHORT_S)
    config = tmp_path / "kubeconfig"
    config.write_text(_KUBECONFIG % url)
    executor = KubernetesExecutor(kubeconfig=str(config))
    where = {"namespace": "default", "job": "dl-r-r0-a1", "uid": "u-1"}
    check_that_every_call_ends(executor, ReplicaHandle("kubernetes", "r", 0, 1, "default/dl", where))


@pytest.mark.slow
def test_no_login_to_eks_waits_for_ever(url: str, monkeypatch: pytest.MonkeyPatch):
    import loopback_eks

    from executors.eks_jobs import EKSExecutor

    monkeypatch.setattr("executors.eks_jobs._CALL_S", (SHORT_S, SHORT_S))
    monkeypatch.setattr("executors.kubernetes_jobs._FOLLOWS_FOR_S", SHORT_S)
    for name, value in loopback_eks.environ(url).items():
        monkeypatch.setenv(name, value)
    executor = EKSExecutor(loopback_eks.CLUSTER, region=loopback_eks.REGION)
    where = {"namespace": "default", "job": "dl-r-r0-a1", "uid": "u-1"}
    check_that_every_call_ends(executor, ReplicaHandle("eks", "r", 0, 1, "default/dl", where))


@pytest.mark.slow
def test_no_call_to_modal_waits_for_ever(monkeypatch: pytest.MonkeyPatch):
    """The server takes every request, answers pings, and never a request."""
    from loopback_modal import LoopbackModal

    from executors.modal_sandboxes import ModalExecutor

    with LoopbackModal() as server:
        executor = ModalExecutor("tests", client=server.client())
        server.hold(True)
        handle = executor.launch(request_of("pass"))
        server.slow_s = 3600.0
        with monkeypatch.context() as patched:  # a busy machine may need longer where the server does answer
            patched.setattr("executors.modal_api.CALL_S", 3 * SHORT_S)
            patched.setattr("executors.modal_api.LAUNCH_S", 3 * SHORT_S)
            patched.setattr("executors.modal_sandboxes.CALL_S", 5 * SHORT_S)
            check_that_every_call_ends(executor, handle)
        server.slow_s = 0.0
        assert executor.launch(request_of("pass")) == handle  # no lock is held by a call that hangs


# -- what ends the wait -----------------------------------------------------------------------------------------------


def test_an_answer_in_time_is_returned_or_raised():
    assert answer_within(5.0, "adding", lambda: 1 + 1) == 2
    with pytest.raises(ExecutorError, match="as it was raised"):
        answer_within(5.0, "failing", raising(ExecutorError("as it was raised")))


def test_a_call_that_hangs_is_unavailable_and_keeps_no_process_alive():
    forever = threading.Event()
    with pytest.raises(Unavailable, match=r"asking: no answer for 0\.05 s"):
        answer_within(0.05, "asking", forever.wait)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "call: asking")
    forever.set()


def test_items_come_though_they_pause_while_somebody_is_there():
    released = threading.Event()

    def slowly() -> Iterator[int]:
        yield 1
        released.wait()
        yield 2

    def is_there() -> bool:
        released.set()
        return True

    assert list(items_while(is_there, 0.05, slowly())) == [1, 2]


def test_items_end_when_nobody_is_there_any_more():
    forever = threading.Event()

    def hanging() -> Iterator[int]:
        yield 1
        forever.wait()

    assert list(items_while(lambda: False, 0.05, hanging())) == [1]
    forever.set()


def test_what_comes_after_nobody_is_there_any_more_is_an_item_too():
    """The last lines of a replica may arrive after its provider says that it has ended."""
    asked, taken, forever = threading.Event(), threading.Event(), threading.Event()

    def late() -> Iterator[int]:
        yield 1
        asked.wait()
        yield 2
        taken.set()
        forever.wait()

    def is_there() -> bool:
        asked.set()
        taken.wait()
        return False

    assert list(items_while(is_there, 0.05, late())) == [1, 2]
    forever.set()


def test_nobody_reads_on_after_the_items_were_given_up():
    closed, read_on = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        closed.wait()
        yield 2
        read_on.set()

    others = set(threading.enumerate())
    stream = items_while(lambda: True, 5.0, items())
    assert next(stream) == 1
    (reader,) = set(threading.enumerate()) - others
    stream.close()  # type: ignore[attr-defined]
    closed.set()
    reader.join()
    assert not read_on.is_set()


def test_items_end_with_the_error_of_whoever_is_asked_and_with_their_own():
    forever = threading.Event()

    def hanging() -> Iterator[int]:
        forever.wait()
        yield 1

    with pytest.raises(Unavailable, match="nobody answers"):
        list(items_while(raising(Unavailable("nobody answers")), 0.05, hanging()))
    forever.set()
    with pytest.raises(ExecutorError, match="broken"):
        list(items_while(lambda: True, 5.0, map(raising(ExecutorError("broken")), itertools.count())))


def raising(error: Exception) -> Callable[..., bool]:
    def call(*_: object) -> bool:
        raise error

    return call
