"""How soon a machine that joined counts as gone: at once where its replica has written how it ended."""

from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, Lease, Taken
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.open_store import open_store
from executors.contract import LaunchRequest, ReplicaHandle, ReplicaState

STAMP = Stamp("test", lambda: 0.0)


def write(how: Callable[[str, bytes], object], handle: ReplicaHandle, record: Taken | Lease) -> None:
    """Write what a machine says of the offer of a handle."""
    name = keys.JOIN_TAKEN if isinstance(record, Taken) else keys.JOIN_LEASE
    how(keys.join_record(handle.native_id, str(handle.native["offer"]), name), record.to_bytes())


@pytest.mark.parametrize(("has_exit", "gone_after_s"), [(True, 15.0), (False, 135.0)])
def test_a_machine_whose_replica_has_ended_is_replaced_without_waiting_for_its_lease(
    tmp_path: Path, has_exit: bool, gone_after_s: float
):
    """Its `diloco join` was killed between the replica's exit record and the end that it would have recorded."""
    clock, store = ManualClock(), open_store(str(tmp_path))
    executor = JoinExecutor(clock=clock)
    executor.use_store(str(tmp_path), {})
    handle = executor.launch(LaunchRequest("run-1", 1, 2, ["python", "-c", "pass"]))
    write(store.create, handle, Taken(**STAMP(), by="machine"))
    write(store.put, handle, Lease(**STAMP(), counter=7))
    assert executor.poll(handle).state is ReplicaState.RUNNING
    if has_exit:
        ended = Exit(**STAMP(), replica_id=1, attempt=2, code=75, reason="preempted", round=3)
        store.create(keys.exit_record(1, 2), ended.to_bytes())
    elapsed = 0.0
    while executor.poll(handle).state is ReplicaState.RUNNING:
        clock.advance(15.0)  # as a coordinator polls
        elapsed += 15.0
    assert elapsed == gone_after_s and executor.poll(handle).state is ReplicaState.PREEMPTED


def test_a_machine_that_is_still_there_records_the_end_itself(tmp_path: Path):
    """Its lease moves: it is about to say more than the exit record does."""
    clock, store = ManualClock(), open_store(str(tmp_path))
    executor = JoinExecutor(clock=clock)
    executor.use_store(str(tmp_path), {})
    handle = executor.launch(LaunchRequest("run-1", 0, 1, ["python", "-c", "pass"]))
    write(store.create, handle, Taken(**STAMP(), by="machine"))
    ended = Exit(**STAMP(), replica_id=0, attempt=1, code=0, reason="done", round=3)
    store.create(keys.exit_record(0, 1), ended.to_bytes())
    for counter in range(1, 4):
        write(store.put, handle, Lease(**STAMP(), counter=counter))
        assert executor.poll(handle).state is ReplicaState.RUNNING
        clock.advance(15.0)
