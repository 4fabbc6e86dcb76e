"""The coordinator: observes a run's replicas, decides with `supervision`, acts, records.

Can die at any moment: replicas go on without it, and nothing it knows is in memory only. Training needs it for one
thing, relaunching.
"""

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_orchestrator import supervision
from diloco_orchestrator.clock import Clock
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.records import Cancel as CancelRecord
from diloco_orchestrator.protocol.records import Commit, Halt, Handle, Intent, Result, Stamp
from diloco_orchestrator.status import RunReader
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.commit_log import CommitLog, read_begin, read_start, start_position
from diloco_orchestrator.supervision import Condition
from executors.base import (
    EXIT_DONE,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ServerlessExecutor,
)

log = logging.getLogger(__name__)

ENV_STORAGE_OPTIONS = "DILOCO_STORAGE_OPTIONS"
_LEG = 1


@dataclass
class _Attempt:
    """The newest attempt of a replica, as this coordinator has seen it."""

    number: int = 0
    handle: ReplicaHandle | None = None
    condition: Condition = Condition.NONE
    ended_at: float = 0.0
    reason: str = ""
    errors: int = 0
    preemptions: int = 0
    cancelled: bool = False


class Coordinator:
    """Supervises one run. Call `step` again and again until it returns True."""

    def __init__(
        self,
        store: Store,
        executor: ServerlessExecutor,
        clock: Clock,
        stamp: Stamp,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.reader = RunReader(store)
        self._store = store
        self._executor = executor
        self._clock = clock
        self._stamp = stamp
        self._secrets = {ENV_STORAGE_OPTIONS: json.dumps(dict(storage_options))} if storage_options else {}
        self._attempts = {replica_id: _Attempt() for replica_id in range(self._config.replicas)}
        self._stopped_at: float | None = None
        self._me = f"coordinator on {platform.node()}"

    @property
    def _config(self) -> Any:
        return self.reader.run.config

    def step(self) -> bool:
        """Observe, decide, act once. True when the leg has stopped and nothing of it runs any more."""
        self._observe()
        view = supervision.FleetView(
            [self._view(replica_id) for replica_id in sorted(self._attempts)], self._stopped_at
        )
        for action in supervision.decide(view, self._clock.now(), self._config.retry):
            self._perform(action)
        return self._over()

    def alive(self) -> list[int]:
        """Replicas that are not known to have ended."""
        return [i for i, attempt in self._attempts.items() if attempt.condition is Condition.ALIVE]

    # -- observing -----------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        commits = self.reader.commits()
        if self._stopped_at is None and (self.reader.result() or (commits and commits[-1].stop != "none")):
            self._stopped_at = self._clock.now()
        watched = [a for a in self._attempts.values() if a.handle is not None and a.condition is Condition.ALIVE]
        statuses = self._executor.poll_many([a.handle for a in watched if a.handle is not None])
        for attempt, status in zip(watched, statuses, strict=True):
            if status.state.ended:
                self._note_end(attempt, status.state, status.exit_code, status.message or status.reason)

    def _note_end(self, attempt: _Attempt, state: ReplicaState, code: int | None, words: str) -> None:
        """Join the vendor's word with the attempt's own exit record, which knows more."""
        assert attempt.handle is not None
        record = self.reader.exit_record(attempt.handle.replica_id, attempt.number)
        code = record.code if record else code
        attempt.ended_at = self._clock.now()
        attempt.reason = f"{record.reason} (exit code {record.code})" if record else words
        attempt.condition = _condition(state, code)
        attempt.errors += attempt.condition is Condition.ERROR
        attempt.preemptions += attempt.condition is Condition.PREEMPTED
        log.info("replica %d, attempt %d ended: %s", attempt.handle.replica_id, attempt.number, attempt.reason)

    def _view(self, replica_id: int) -> supervision.ReplicaView:
        attempt = self._attempts[replica_id]
        return supervision.ReplicaView(
            replica_id=replica_id,
            attempt=attempt.number,
            condition=attempt.condition,
            ended_at=attempt.ended_at,
            errors=attempt.errors,
            preemptions=attempt.preemptions,
            reason=attempt.reason,
        )

    # -- acting --------------------------------------------------------------------------------------------------

    def _perform(self, action: supervision.Action) -> None:
        match action:
            case supervision.Launch(replica_id, number, why):
                self._launch(replica_id, number, why)
            case supervision.Cancel(replica_id, _, why):
                self._cancel(replica_id, why)
            case supervision.Fail(why):
                self.stop("failed", why)

    def _launch(self, replica_id: int, number: int, why: str) -> None:
        """Intent, launch, handle: dying in between leaves what the next coordinator can find."""
        intent = Intent(**self._stamp(), replica_id=replica_id, attempt=number, executor=self._executor.name, why=why)
        self._store.create(keys.intent(replica_id, number), intent.to_bytes())
        if number > 1:
            log.info("replica %d: launching attempt %d (%s)", replica_id, number, why)
        handle = self._executor.launch(self._request(replica_id, number))
        record = Handle(**self._stamp(), replica_id=replica_id, attempt=number, handle=handle.to_json())
        self._store.create(keys.handle(replica_id, number), record.to_bytes())
        attempt = self._attempts[replica_id]
        attempt.number, attempt.handle, attempt.condition = number, handle, Condition.ALIVE
        attempt.cancelled = False

    def _request(self, replica_id: int, number: int) -> LaunchRequest:
        where = ["--store", self._store.url, "--replica-id", str(replica_id), "--attempt", str(number)]
        return LaunchRequest(
            run_id=self.reader.run.run_id,
            replica_id=replica_id,
            attempt=number,
            command=["python", "-P", "-m", "replica", *where],
            env={"REPLICA_RANK": str(replica_id), "REPLICA_WORLD_SIZE": str(self._config.replicas)},
            secrets=self._secrets,
        )

    def _cancel(self, replica_id: int, why: str) -> None:
        attempt = self._attempts[replica_id]
        if attempt.handle is None or attempt.cancelled or attempt.condition is not Condition.ALIVE:
            return
        attempt.cancelled = True
        record = CancelRecord(**self._stamp(), replica_id=replica_id, attempt=attempt.number, reason=why)
        self._store.create(keys.cancel(replica_id, attempt.number), record.to_bytes())
        self._executor.cancel(attempt.handle)

    def cancel_all(self, why: str) -> None:
        """Ask every replica that is still there to leave."""
        for replica_id in self._attempts:
            self._cancel(replica_id, why)

    def halt(self, by: str, reason: str) -> None:
        """Ask for a stop after the open round. Asking again changes nothing."""
        halt = Halt(**self._stamp(), leg=_LEG, by=by, reason=reason)
        self._store.create(keys.halt(_LEG), halt.to_bytes())

    def stop(self, stop: rounds.Stop, why: str) -> None:
        """End the leg from here: the open round is committed, naming nobody; base and guard stay as they are.

        Replicas that wait see the commit; the others are asked to leave.
        """
        while not self._stopped():
            start = read_start(self._store)
            if start is None:
                self._write_result(stop, why)  # no replica ever brought a model: there is no log to end
                break
            commits = self.reader.commits()
            last = commits[-1] if commits else None
            commit = self._stop_commit(last, start, stop, why)
            CommitLog(self._store).append(commit)  # losing means that a replica ended the round: look again
        log.warning("the run is stopped (%s): %s", stop, why)
        self._stopped_at = self._clock.now()
        self.cancel_all(why)

    def _stopped(self) -> bool:
        commits = self.reader.commits()
        return bool(commits and commits[-1].stop != "none") or self.reader.result() is not None

    def _stop_commit(self, last: Commit | None, start: Any, stop: rounds.Stop, why: str) -> Commit:
        position = self.reader.position() or start_position(start[1])
        return Commit(
            **self._stamp(),
            round=position.round + 1,
            leg=_LEG,
            fragment=0,
            outer_step=position.outer_step,
            answers=(),
            begin_sha256=read_begin(self._store, _LEG)[1],
            base_digest=last.base_digest if last else start[0].base_digest,
            roster=last.roster if last else tuple(range(self._config.replicas)),
            guard=last.guard if last else None,
            applied=False,
            empty_rounds=position.empty_rounds + 1,
            stop=stop,
            by=self._me,
            reason=why,
            previous=position.sha256,
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if self._stopped_at is None or self.alive():
            return False
        commits = self.reader.commits()
        if self.reader.result() is None and commits:
            self._store.create(keys.result(_LEG), rounds.result_of(commits[-1], self._stamp()).to_bytes())
        if commits:
            self._ensure_last_snapshot(commits)
        return True

    def _ensure_last_snapshot(self, commits: list[Commit]) -> None:
        """Every leg ends with a snapshot of its last good base, even if no replica lived to write it."""
        base_round = max((commit.round for commit in commits if commit.applied), default=0)
        if base_round in self.reader.snapshots():
            return
        from diloco_orchestrator.snapshots.rebuild import snapshot_newest_base  # torch, which is slow to import

        snapshot_newest_base(self._store, self._config, self._stamp)

    def _write_result(self, stop: rounds.Stop, why: str) -> None:
        assert stop != "none"
        result = Result(**self._stamp(), leg=_LEG, status=stop, round=0, outer_steps=0, reason=why)
        self._store.create(keys.result(_LEG), result.to_bytes())


def _condition(state: ReplicaState, code: int | None) -> Condition:
    if code == EXIT_DONE:
        return Condition.DONE
    if code == EXIT_PERMANENT:
        return Condition.PERMANENT
    if code == EXIT_PREEMPTED or state is ReplicaState.PREEMPTED:
        return Condition.PREEMPTED
    return Condition.DONE if state is ReplicaState.SUCCEEDED else Condition.ERROR
