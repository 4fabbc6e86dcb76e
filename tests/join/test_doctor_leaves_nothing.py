"""`diloco doctor --executor join` leaves no object in the run's folder, whatever became of its trial attempts."""

import json
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection.doctor import Finding, examine_executor
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.launching.trial_replica import examine_over_there
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import JoinEnd, Lease, Offer, Taken
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.open_store import open_store
from executors.contract import ExecutorError, ReplicaState, Unavailable
from executors.mixed import MixedExecutor
from executors.process_contract import EXIT_LINE

STAMP = Stamp("machine", lambda: 0.0)


class WhileOthersWork(ManualClock):
    """A clock whose every sleep gives the others a turn."""

    turn: Callable[[], None] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.turn()


class Folder:
    """A folder in memory, and what a machine that joined would write there in each of its turns."""

    def __init__(self, url: str = "") -> None:
        self.url = url or f"memory://{uuid4().hex}"
        self.store = open_store(self.url)
        self.clock = WhileOthersWork()
        self.store.put("run.json", b"the run's own")

    def left(self) -> list[str]:
        return [info.key for info in self.store.list("") if info.key != "run.json"]

    def work(self) -> None:
        """Take what is offered, and end it as the process would; what pauses ends once it is cancelled."""
        for name, records in self.attempts().items():
            if keys.JOIN_OFFER not in records or keys.JOIN_END in records:
                continue
            key = keys.join_offer(name)
            entrypoint = Offer.from_bytes(self.store.get(key), key).env["DILOCO_ENTRYPOINT"]
            self.take(name)
            if entrypoint == "platform:python_version":
                self.store.create(keys.join_piece(name, 0), f"{EXIT_LINE}{json.dumps({'value': '3.11'})}\n".encode())
                self.end(name, ReplicaState.SUCCEEDED, 0)
            elif entrypoint == "os:_exit":
                self.end(name, ReplicaState.FAILED, 78)
            elif keys.JOIN_CANCEL in records:
                self.end(name, ReplicaState.CANCELLED, 75)

    def attempts(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for info in self.store.list(keys.JOINS):
            if (parsed := keys.parse_join_record(info.key)) is not None:
                found.setdefault(parsed.name, set()).add(parsed.record)
        return found

    def key(self, name: str, record: str) -> str:
        """Of a record about the offer of an attempt."""
        return keys.join_record(name, sha256_hex(self.store.get(keys.join_offer(name))), record)

    def take(self, name: str) -> None:
        self.store.create(self.key(name, keys.JOIN_TAKEN), Taken(**STAMP(), by="m").to_bytes())
        lease = Lease(**STAMP(), counter=1 + int(self.clock.now()))
        self.store.put(self.key(name, keys.JOIN_LEASE), lease.to_bytes())

    def vanish(self) -> None:
        """Take each attempt and give no further sign of life."""
        for name, records in self.attempts().items():
            if records == {keys.JOIN_OFFER}:
                self.take(name)

    def end(self, name: str, state: ReplicaState, code: int) -> None:
        end = JoinEnd(**STAMP(), state=state, reason="exit", code=code)
        self.store.create(self.key(name, keys.JOIN_END), end.to_bytes())


@pytest.fixture
def folder() -> Folder:
    return Folder()


def examined(folder: Folder, executor: JoinExecutor) -> list[Finding]:
    executor.use_store(folder.url, {})
    return list(examine_executor(executor, folder.clock))


def test_nothing_is_left_where_all_went_well(folder: Folder):
    folder.clock.turn = folder.work
    found = examined(folder, JoinExecutor(clock=folder.clock))
    assert [each.ok for each in found] == [True] * 4 and folder.left() == []


def test_nothing_is_left_where_no_machine_ever_joined(folder: Folder):
    found = examined(folder, JoinExecutor(clock=folder.clock))
    assert [each.ok for each in found] == [True, False] and folder.left() == []


def test_nothing_is_left_of_a_machine_that_vanished(folder: Folder):
    folder.clock.turn = folder.vanish
    found = examined(folder, JoinExecutor(clock=folder.clock))
    assert not found[-1].ok and "gives no sign of life" in found[-1].detail and folder.left() == []


class NotCancelled(JoinExecutor):
    """The provider is away at the first cancel."""

    away = True

    def cancel(self, handle):  # type: ignore[no-untyped-def]
        if self.away:
            self.away = False
            raise Unavailable("the bucket is away.")
        super().cancel(handle)


def test_what_was_found_is_told_and_nothing_left_where_a_later_trial_fails(folder: Folder):
    """The attempt that pauses is ended: elsewhere it would cost money until somebody looks."""
    folder.clock.turn = folder.work
    found = examined(folder, NotCancelled(clock=folder.clock))
    assert [(each.name, each.ok) for each in found[1:]] == [
        ("executor join: answer", True),
        ("executor join: launch", False),
    ]
    assert folder.left() == []


def test_what_may_be_left_is_told(folder: Folder):
    class Keeps(JoinExecutor):
        def forget(self, run_id: str) -> None:
            raise ExecutorError("no permission to delete.")

    folder.clock.turn = folder.work
    found = examined(folder, Keeps(clock=folder.clock))
    assert [each.ok for each in found] == [True] * 4 + [False]
    assert found[-1].name == "executor join: clean-up" and "no permission to delete." in found[-1].detail
    assert "Look for attempts of doctor-" in found[-1].todo


def test_a_process_that_was_to_examine_its_machine_leaves_nothing_either(tmp_path: Path):
    folder = Folder(str(tmp_path))
    folder.clock.turn = folder.vanish
    executor = MixedExecutor([(JoinExecutor(clock=folder.clock), 2)])
    found = list(examine_over_there(executor, folder.url, folder.clock))
    assert not found[-1].ok and "gives no sign of life" in found[-1].detail and folder.left() == []


def test_other_runs_are_not_touched(folder: Folder):
    executor = JoinExecutor(clock=folder.clock)
    executor.use_store(folder.url, {})
    for run_id in ("run-1", "run-1-r0-a1", "run-11"):
        executor.launch_replicas(2, "signal:pause", {}, run_id=run_id)
    executor.forget("run-1")
    assert [len(executor.find(run_id)) for run_id in ("run-1", "run-1-r0-a1", "run-11")] == [0, 2, 2]


def test_the_offer_goes_first_so_that_a_machine_writes_no_output_after_it_was_removed(folder: Folder):
    executor = JoinExecutor(clock=folder.clock)
    executor.use_store(folder.url, {})
    (handle,) = executor.launch_replicas(1, "platform:python_version", {}, run_id="run-1")
    folder.work()
    deleted: list[str] = []
    (store,) = executor._opened.values()
    delete = store.delete
    store.delete = lambda key: deleted.append(key) or delete(key)  # type: ignore[method-assign, func-returns-value]
    executor.forget("run-1")
    assert deleted[:2] == [keys.join_offer(handle.native_id), keys.join_piece(handle.native_id, 0)]
    assert folder.left() == []
