"""The contract on credentials: wrong ones raise a clear error, and no secret is shown."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco_orchestrator.executors.contract import ExecutorDenied, ReplicaFailed, ServerlessExecutor
from diloco_orchestrator.executors.testing.base import ContractBase
from diloco_orchestrator.executors.testing.rig import PATIENCE_S, RUN_ID, SECRET, STAY, Rig, request_of


class CredentialsContract(ContractBase):
    """Tests of the provider's credentials and the user's secrets."""

    def test_wrong_credentials_are_a_clear_error_at_once(self, rig: Rig, executor: ServerlessExecutor) -> None:
        handle = executor.launch(request_of(STAY))
        denied = rig.denied()
        calls: list[Callable[[], Any]] = [
            lambda: denied.launch(request_of(STAY, attempt=2)),
            lambda: denied.poll(handle),
            lambda: denied.find(RUN_ID),
            lambda: denied.cancel(handle),
            lambda: list(denied.logs(handle)),
        ]
        for call in calls:
            with pytest.raises(ExecutorDenied) as caught:
                call()
            assert not any(secret in str(caught.value) for secret in rig.credentials)

    def test_no_secret_is_in_a_plan_a_handle_a_log_or_an_error(self, rig: Rig, executor: ServerlessExecutor) -> None:
        request = request_of("raise SystemExit(3)", secrets={"API_KEY": SECRET})
        handle = executor.launch(request)
        texts = [repr(request), repr(executor.plan(request)), json.dumps(handle.to_json()), repr(executor)]
        with pytest.raises(ReplicaFailed) as caught:
            executor.collect([handle], timeout=PATIENCE_S)
        texts += [str(caught.value), *executor.logs(handle), repr(executor.poll(handle))]
        for secret in (SECRET, *rig.credentials):
            assert not any(secret in text for text in texts)
        assert "API_KEY" in repr(executor.plan(request))  # that it travels is no secret

    def test_a_plan_is_json_and_sends_nothing(self, rig: Rig, executor: ServerlessExecutor) -> None:
        request = request_of("print(1)", env={"A": "b"})
        assert json.loads(json.dumps(executor.plan(request))) == executor.plan(request)
        assert rig.machines(RUN_ID) == 0
