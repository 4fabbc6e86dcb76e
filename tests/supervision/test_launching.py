"""Launches that take their time, are refused, or meet no machine; what is sent to machines elsewhere."""

import errno
import json
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from scripted import STAMP, Scene, ScriptedExecutor

from diloco_orchestrator.clock import ManualClock, NoBackground
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError, StoreDenied, StoreUnavailable
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, fault_in, reason_of
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.supervision.attempt_types import GivenUp
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from executors.contract import ExecutorDenied, ExecutorError, NoCapacity, ReplicaState, ReplicaStatus, Unavailable
from replica.process.run_attempt import LeavingNotice


class Later(NoBackground):
    """Work that is done when the test says so."""

    def __init__(self) -> None:
        self.waiting = []

    def start(self, call):
        future = Future()
        self.waiting.append((future, call))
        return future

    def work(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, call in waiting:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


class Slow(Scene):
    """A vendor that takes its time to launch."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.background = Later()

    def coordinator(self) -> Coordinator:
        return Coordinator(RunReader(self.fleet.store), Means(self.executor, self.clock, STAMP), self.background)


def test_a_launch_that_takes_minutes_holds_nobody_up():
    scene = Slow()
    coordinator = scene.coordinator()
    scene.steps(coordinator, 300.0, every=10.0)
    assert scene.executor.launched == [] and len(scene.background.waiting) == 2
    scene.background.work()
    scene.steps(coordinator, 1.0)
    assert scene.executor.launched == [(0, 1), (1, 1)]
    handle = coordinator.reader.attempts.handle(1, 1)
    assert handle is not None and handle.handle["replica_id"] == 1


def test_what_was_given_up_while_it_was_launched_is_cancelled_when_it_is_there():
    scene = Slow()
    coordinator = scene.coordinator()
    coordinator.step()
    coordinator.cancel_all("the run is over")
    scene.background.work()
    scene.steps(coordinator, 1.0)
    assert scene.executor.cancelled == [(0, 1), (1, 1)]


def test_what_a_call_starts_after_its_attempt_was_counted_as_ended_is_cancelled():
    scene = Slow()
    coordinator = scene.coordinator()
    coordinator.step()
    coordinator.cancel_all("nobody needs it")
    scene.steps(coordinator, 121.0)
    assert coordinator.alive() == [] and scene.executor.cancelled == []
    scene.background.work()
    coordinator.step()
    assert sorted(scene.executor.cancelled) == [(0, 1), (1, 1)]


class LosesReplies(ScriptedExecutor):
    """A provider that starts what it is asked for, and whose replies are lost."""

    def launch(self, request):
        super().launch(request)
        raise Unavailable("no answer for 60 s")


def test_what_a_call_without_an_answer_has_started_is_cancelled_where_nobody_needs_it_any_more():
    scene = Slow()
    scene.executor = LosesReplies()
    coordinator = scene.coordinator()
    coordinator.step()
    coordinator.cancel_all("nobody needs it")
    scene.background.work()
    scene.steps(coordinator, 3.0)
    assert sorted(scene.executor.cancelled) == [(0, 1), (1, 1)]


def test_a_launcher_that_has_no_process_left_for_a_moment_tries_the_same_attempt_again():
    scene = Scene(retry={"max_errors": 0})
    scene.executor.refuse_launch[0, 1] = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    coordinator = scene.coordinator()
    scene.steps(coordinator, 30.0)
    assert scene.executor.launched == [(1, 1)]
    del scene.executor.refuse_launch[0, 1]
    scene.steps(coordinator, 60.0)
    assert scene.executor.launched == [(1, 1), (0, 1)]
    scene.executor.denied = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    scene.steps(coordinator, 60.0)
    assert coordinator.alive() == [0, 1], "a poll that this machine cannot make says nothing"


def test_a_file_that_is_not_there_is_an_error_of_the_launch():
    scene = Scene(retry={"max_errors": 0})
    scene.executor.refuse_launch[0, 1] = FileNotFoundError(errno.ENOENT, "no such interpreter")
    coordinator = scene.coordinator()
    scene.steps(coordinator, 3.0)
    result = coordinator.reader.log.result(1)
    assert result is not None and result.status == "failed" and "no such interpreter" in result.reason


def test_a_coordinator_that_dies_while_it_launches_leaves_the_attempt_to_the_next():
    scene = Slow()
    scene.coordinator().step()
    scene.background = Later()
    successor = scene.coordinator()
    scene.steps(successor, 60.0, every=5.0)
    scene.background.work()
    scene.steps(successor, 1.0)
    assert scene.executor.launched == [(0, 1), (1, 1)]  # the same attempts, which executors adopt if they are there


def test_refused_credentials_are_raised_and_not_tried_again():
    scene = Scene()
    scene.executor.refuse_launch[0, 1] = ExecutorDenied("the token is not taken")
    coordinator = scene.coordinator()
    coordinator.step()
    with pytest.raises(ExecutorDenied, match=r"the token is not taken.*attach to"):
        coordinator.wait_for_launches(60.0)
    assert (
        scene.executor.launched == [(1, 1)] and coordinator.reader.attempts.handle(1, 1) is not None
    )  # the other one goes on


def test_a_providers_words_are_recorded_without_the_secrets_that_it_was_sent():
    scene = Scene(replicas=1, retry={"max_errors": 1, "backoff_s": 0.0})
    words = "env LICENCE='blue-blue-blue' and 'hf_" + "aB3" * 12 + "' are too long"
    scene.executor.refuse_launch[0, 1] = ExecutorError(words)
    coordinator = Coordinator(
        RunReader(scene.fleet.store),
        Means(scene.executor, scene.clock, STAMP, secrets={"LICENCE": "blue-blue-blue"}),
    )
    scene.steps(coordinator, 3.0)
    intent = coordinator.reader.attempts.intent(0, 2)
    assert intent is not None and "LICENCE='<LICENCE redacted>' and '<token redacted>' are too long" in intent.why


def test_a_lack_of_machines_has_a_budget_of_its_own():
    scene = Scene(retry={"max_errors": 0, "max_no_capacity": 3})
    for attempt in (1, 2, 3):
        scene.executor.refuse_launch[0, attempt] = NoCapacity("no A100 today")
    coordinator = scene.coordinator()
    scene.steps(coordinator, 200.0, every=5.0)
    assert (0, 4) in scene.executor.launched and coordinator.alive() == [0, 1]


# -- what is sent -----------------------------------------------------------------------------------------------------


def launching(tmp_path, **changes) -> LaunchRequests:
    config = make_config({"entrypoint": "m:f", "env": {"PLAIN": "1", **changes.pop("env", {})}})
    fields = {"code_sha256": "a" * 64, **changes.pop("run", {})}
    run = Run(**STAMP(), run_id="run-1", config=config, package_version="0", **fields)
    return LaunchRequests(run, Launched("0" * 64), changes.pop("url", str(tmp_path)), **changes)


def test_a_replica_elsewhere_is_sent_the_address_of_its_code_as_a_secret(tmp_path):
    secrets, options = {"WANDB": "w" * 20}, {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    sending = launching(tmp_path, url="s3://bucket/run", secrets=secrets, storage_options=options)
    request = sending.request(1, 2, shares_machine=False)
    address = request.secrets["DILOCO_CODE_URL"]
    assert address.startswith(f"http://127.0.0.1:9/bucket/run/code/{'a' * 64}.zip?") and "X-Amz-Signature=" in address
    assert "X-Amz-Expires=43200" in address  # seconds: 12 hours
    assert json.loads(request.secrets["DILOCO_STORAGE_OPTIONS"]) == options
    assert set(request.secrets) == {"WANDB", "DILOCO_STORAGE_OPTIONS", "DILOCO_CODE_URL"}
    assert request.env["PLAIN"] == "1" and request.env["DILOCO_SECRET_NAMES"] == "WANDB"
    assert not set(request.secrets) & set(request.env)
    where = ["--store", "s3://bucket/run", "--replica-id", "1", "--attempt", "2"]
    assert request.command[-8:] == [*where, "--run-sha256", "0" * 64]
    assert "w" * 20 not in redact("it failed with " + "w" * 20, {**request.env, **request.secrets})
    assert "w" * 20 not in repr(request) + json.dumps(request.command)


def test_every_replica_of_a_run_of_ranks_is_told_its_number_of_them(tmp_path):
    """Also the one rank of a replica, which then has torch's process group, and after a resume with one for all."""

    def told(of_run: Any, of_leg: Any = None) -> list[str]:
        first, *legs = (
            make_config({"entrypoint": "m:f", "replicas": 2, "ranks_per_replica": each})
            for each in (of_run, of_leg or 1)
        )
        run = Run(**STAMP(), run_id="run-1", config=first, package_version="0")
        sending = LaunchRequests(run, Launched("0" * 64), str(tmp_path), leg=legs[0] if of_leg else None)
        return [" ".join(sending.request(each, 1, shares_machine=True).command) for each in (0, 1)]

    assert "--ranks 1" in told([1, 2])[0] and "--ranks 2" in told([1, 2])[1]
    assert all("--ranks 1" in each for each in told(2, of_leg=1))
    assert not any("--ranks" in each for each in told(1))


def test_on_this_machine_nothing_has_to_travel(tmp_path):
    request = launching(tmp_path, run={"code_sha256": None}).request(0, 1, shares_machine=True)
    assert request.secrets == {} and request.command[:4] == ["python", "-P", "-m", "diloco_orchestrator.replica"]


def test_a_run_whose_code_never_travelled_cannot_go_on_elsewhere(tmp_path):
    with pytest.raises(ConfigError, match="its code was never sent"):
        launching(tmp_path, run={"code_sha256": None}).request(0, 1, shares_machine=False)


def test_secrets_that_no_record_holds_are_asked_for_again(tmp_path):
    with pytest.raises(ConfigError, match="need the secrets WANDB"):
        launching(tmp_path, run={"secret_names": ("WANDB",)}).request(0, 1, shares_machine=True)


def test_a_replica_leaves_before_its_provider_ends_it():
    clock = ManualClock()
    notice, patient = LeavingNotice(clock, 60.0), LeavingNotice(clock)
    clock.advance(59.0)
    assert not notice()
    clock.advance(1.0)
    assert notice() and not patient()


def test_a_preempted_state_is_no_error():
    scene = Scene(retry={"max_errors": 0})
    coordinator = scene.coordinator()
    coordinator.step()
    scene.ends(0, 1, ReplicaState.PREEMPTED, "lost")
    scene.steps(coordinator, 5.0)
    assert (0, 2) in scene.executor.launched


def test_replicas_are_launched_though_the_intent_of_another_could_not_be_written():
    scene = Scene(replicas=3)
    coordinator = scene.coordinator()
    create = scene.engine.create
    scene.engine.create = lambda key, data: _denied(key) if key == keys.intent(1, 1) else create(key, data)
    with pytest.raises(StoreDenied, match="replicas/1"):
        coordinator.step()
    assert scene.executor.launched == [(0, 1), (2, 1)]
    scene.engine.create = create
    scene.steps(coordinator, 2)
    assert scene.executor.launched == [(0, 1), (2, 1), (1, 1)]


def _denied(key: str) -> bool:
    raise StoreDenied(f"cannot create {key}: AccessDenied.")


def test_an_attempt_that_could_not_reach_the_bucket_is_given_up_with_the_error_that_it_printed():
    scene = Scene(replicas=2, quorum=1)
    words = "StoreDenied: cannot read run.json in s3://b/run: SignatureDoesNotMatch."
    line = f'DILOCO_EXIT {{"code": 78, "error": "{words}"}}'
    scene.executor.logs = lambda handle, follow=False, tail=None: iter(["installing", line])
    coordinator = scene.coordinator()
    coordinator.step()
    scene.executor.states[0, 1] = ReplicaStatus(ReplicaState.FAILED, "permanent", 78, "ERROR", "exit code 78")
    scene.steps(coordinator, 120.0)
    assert scene.executor.launched == [(0, 1), (1, 1)]
    view = coordinator._fleet.views[0].state
    assert isinstance(view, GivenUp) and view.reason == f"cannot take part: {words}"


def raised(error: BaseException | None) -> str:
    """The fault that an exit record with the traceback of this error names."""
    text = "".join(traceback.format_exception(error)) if error is not None else None
    return fault_in(Exit(**STAMP(), replica_id=0, attempt=1, code=1, reason="error", round=0, error=text))


def caught(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as found:
        call()
    return found.value


def chained(cause: Exception) -> Any:
    try:
        raise cause
    except Exception as error:
        raise RuntimeError("no batch") from error


def test_the_fault_of_an_end_is_the_type_of_its_error_and_the_line_that_raised_it():
    here = "test_launching.py"
    line = chained.__code__.co_firstlineno
    assert raised(caught(lambda: chained(KeyError("a")))) == f"RuntimeError at {here}:{line + 4}"
    first, second = [raised(caught(lambda text=text: int(text))) for text in ("x\n  File ", "y")]
    assert first == second and first.startswith(f"ValueError at {here}:")
    syntax = caught(lambda: compile("f(", "/tmp/of/user.py", "exec"))
    assert raised(syntax) == "SyntaxError at user.py:1"
    assert raised(None) == ""


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(), TimeoutError(), BrokenPipeError(), httpx.ReadTimeout("slow"), StoreUnavailable("")],
)
def test_an_error_of_something_outside_the_process_is_no_fault(error):
    assert raised(caught(lambda: chained(error))) == ""


def test_the_reason_of_an_end_closes_with_its_error():
    def reason(reason: str, error: str | None) -> str:
        return reason_of(Exit(**STAMP(), replica_id=0, attempt=1, code=1, reason=reason, round=0, error=error))

    trace = 'Traceback (most recent call last):\n  File "x"\n    f()\n'
    assert reason("RuntimeError", f"{trace}RuntimeError: out of memory\n") == "RuntimeError: out of memory"
    assert reason("rank 0 of 2: ValueError", f"{trace}ValueError: a\n") == "rank 0 of 2: ValueError: a"
    assert reason("permanent", f"{trace}diloco_orchestrator.errors.ModelMismatch: names differ") == (
        "permanent: ModelMismatch: names differ"
    )
    assert reason("KeyboardInterrupt", f"{trace}KeyboardInterrupt\n") == "KeyboardInterrupt"
    assert reason("preempted", None) == "preempted"
    assert len(reason("ValueError", f"{trace}ValueError: {'x' * 1000}")) == 400
