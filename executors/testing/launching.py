"""The contract of `plan` and `launch`: an attempt runs once, whoever launches it and however often."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from diloco_orchestrator.executors.contract import (
    LaunchError,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ServerlessExecutor,
    Unavailable,
)
from diloco_orchestrator.executors.registry import recreate, spec_of
from diloco_orchestrator.executors.testing.base import ContractBase
from diloco_orchestrator.executors.testing.rig import PATIENCE_S, RUN_ID, SECRET, STAY, Rig, ended_state, request_of

_LAUNCHER = """
import json, os, sys, time
from diloco_orchestrator.executors.contract import LaunchRequest
given = json.loads(sys.argv[1])
scope = {}
exec(given["construct"], scope)
print("ready", flush=True)
sys.stdin.readline()
handle = scope["executor"].launch(LaunchRequest(**given["request"]))
print(json.dumps(handle.to_json()), flush=True)
"""
_DIGEST = "sha256:" + "0a" * 32


def _images(node: Any) -> Iterator[str]:
    """Container images in a provider's request."""
    for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if isinstance(value, Mapping | list | tuple):
            yield from _images(value)
        elif name == "image" and isinstance(value, str):
            yield value


class LaunchingContract(ContractBase):
    """Tests of launches, adoptions and failed launches."""

    def test_a_command_runs_with_the_environment_and_the_secrets_of_its_request(
        self, executor: ServerlessExecutor
    ) -> None:
        code = "import os; print(os.environ['PLAIN'], len(os.environ['HIDDEN']))"
        handle = executor.launch(request_of(code, env={"PLAIN": "plain value"}, secrets={"HIDDEN": SECRET}))
        assert ended_state(executor, handle) is ReplicaState.SUCCEEDED
        assert f"plain value {len(SECRET)}" in list(executor.logs(handle))

    def test_a_machine_elsewhere_sees_nothing_of_the_launchers_environment(
        self, executor: ServerlessExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if executor.shares_machine:
            pytest.skip("its replicas share this machine")
        monkeypatch.setenv("LAUNCHERS_OWN", "private")
        handle = executor.launch(request_of("import os; print(os.environ.get('LAUNCHERS_OWN', 'nothing'))"))
        assert ended_state(executor, handle) is ReplicaState.SUCCEEDED
        assert "nothing" in list(executor.logs(handle))

    def test_an_image_that_the_request_pins_goes_by_its_digest(self, executor: ServerlessExecutor) -> None:
        request = request_of(STAY)
        named = list(_images(executor.plan(request)))
        if not named:
            pytest.skip("its requests name no image, or not as `image`")
        pinned = replace(request, images=dict.fromkeys(named, _DIGEST))
        assert [each.partition("@")[2] for each in _images(executor.plan(pinned))] == [_DIGEST] * len(named)
        assert list(_images(executor.plan(request))) == named

    def test_launching_the_same_attempt_again_adopts_it(self, rig: Rig, executor: ServerlessExecutor) -> None:
        first = executor.launch(request_of(STAY))
        again, elsewhere = executor.launch(request_of(STAY)), rig.executor().launch(request_of(STAY))
        assert first.native_id == again.native_id == elsewhere.native_id
        assert rig.machines(RUN_ID) == 1

    def test_an_attempt_that_has_ended_is_adopted_too(self, rig: Rig, executor: ServerlessExecutor) -> None:
        first = executor.launch(request_of("print('once')"))
        ended_state(executor, first)
        again = rig.executor().launch(request_of("print('once')"))
        assert (again.native_id, rig.machines(RUN_ID)) == (first.native_id, 1)

    def test_two_processes_that_launch_the_same_attempt_get_the_same_one(
        self, rig: Rig, executor: ServerlessExecutor
    ) -> None:
        given = {"construct": rig.construct, "request": vars(request_of(STAY))}
        launchers = [
            subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, json.dumps(given)],
                env={**os.environ, **rig.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for launcher in launchers:
            assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
        for launcher in launchers:
            assert launcher.stdin is not None
            launcher.stdin.write("go\n")
            launcher.stdin.flush()
        answers = [launcher.communicate(timeout=PATIENCE_S)[0] for launcher in launchers]
        handles = [ReplicaHandle.from_json(json.loads(answer)) for answer in answers]
        assert handles[0].native_id == handles[1].native_id
        assert executor.launch(request_of(STAY)).native_id == handles[0].native_id
        assert self.may_double or rig.machines(RUN_ID) == 1

    def test_other_attempts_and_other_replicas_are_launched(self, rig: Rig, executor: ServerlessExecutor) -> None:
        requests = [request_of(STAY), request_of(STAY, replica_id=1), request_of(STAY, attempt=2)]
        handles = [executor.launch(request) for request in requests]
        assert len({handle.native_id for handle in handles}) == 3
        found = [(handle.replica_id, handle.attempt) for handle in rig.executor().find(RUN_ID)]
        assert found == [(0, 1), (0, 2), (1, 1)]

    def test_a_partial_failure_names_what_was_launched_and_what_was_not(
        self, rig: Rig, executor: ServerlessExecutor, code: str
    ) -> None:
        rig.refuse(1)
        with pytest.raises(LaunchError) as caught:
            executor.launch_replicas(
                3, "contract_workload:greet", {"name": "you"}, run_id=RUN_ID, code=code
            )  # fmt: skip
        assert [handle.replica_id for handle in caught.value.launched] == [0, 2]
        assert list(caught.value.failed) == [1] and caught.value.failed[1]
        executor.collect(caught.value.launched, timeout=PATIENCE_S)

    def test_an_executor_is_made_again_from_its_record(self, executor: ServerlessExecutor) -> None:
        spec = spec_of(executor)
        if spec is None or "withheld" in spec:
            pytest.skip("it is not registered, or has arguments that no record may hold")
        again = recreate(json.loads(json.dumps(spec)))
        assert again.plan(request_of(STAY)) == executor.plan(request_of(STAY))

    def test_a_launch_while_the_provider_is_down_may_be_repeated(self, rig: Rig, executor: ServerlessExecutor) -> None:
        rig.failing(True)
        with pytest.raises(Unavailable):
            executor.launch(request_of(STAY))
        rig.failing(False)
        assert executor.launch(request_of(STAY)).attempt == 1

    def test_no_capacity_is_told_apart(self, rig: Rig, executor: ServerlessExecutor) -> None:
        rig.no_capacity(True)
        try:
            handle = executor.launch(request_of(STAY))
        except (NoCapacity, Unavailable):  # some providers answer both in one way
            pass
        else:
            ended_state(executor, handle)
            assert executor.poll(handle).reason == "no_capacity"
        rig.no_capacity(False)
        assert executor.launch(request_of(STAY, attempt=2)).attempt == 2
