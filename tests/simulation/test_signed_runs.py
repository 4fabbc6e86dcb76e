"""Signed runs on virtual time: what somebody without a key forges changes no byte of the log."""

import dataclasses
import re

import pytest
from simulation_joins import join_executor
from simulation_plan import Plan, calm
from simulation_signed import KEY, SignedSimulation, signed_plan_of, simulate_signed
from virtual_time import VirtualClock

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.join.invitations import create_invitation
from diloco_orchestrator.join.machine import JoinSettings
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import as_attempt, of_run
from diloco_orchestrator.signing.identity import Identity
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY
from diloco_orchestrator.signing.signed_store import signed_store_in
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import LASTING
from diloco_orchestrator.store.retrying import RetryPolicy
from executors.contract import ServerlessExecutor


@pytest.mark.parametrize("seed", [1, 3])
def test_forgeries_change_no_byte_of_a_signed_runs_log(seed):
    assert simulate_signed(seed).bucket.forged


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(1, 7))
def test_forgeries_change_no_byte_of_many_signed_runs(tens):
    assert sum(simulate_signed(seed).bucket.forged for seed in range(10 * tens, 10 * tens + 10))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["gather", "scatter_reduce"])
def test_a_strangers_replica_contributes_and_writes_nothing_that_others_rest_on(path):
    """Its key signs no commit, result, start, snapshot, average or segment: the run would fail if it tried."""
    settings = {"quorum": "all", "sync_every": 4, "fragments": 1, "fragment_sync_delay": 0, "late": "carry"}
    settings |= {"snapshot_every": 2, "retention": {}, "aggregate": "mean", "path": path}
    replicas = 3 if path == "gather" else 5
    plan = Plan(seed=3, replicas=replicas, rounds=4, paces=(1.0, 1.1, 1.3, 1.2, 1.0)[:replicas], settings=settings)
    found = []
    for invited in ([], [0]):
        simulation = SignedSimulation(dataclasses.replace(plan, settings={**settings, "invited": invited}))
        simulation.run()
        log = RunLog(simulation.bucket)
        commits = [log.commit(round_).commit for round_ in range(1, len(simulation.bucket.commits) + 1)]
        found.append([(each.base_digest, [a.replica_id for a in each.answers if a.averaged]) for each in commits])
        assert not any(str(each.by).startswith("replica 0,") for each in commits) or not invited
    assert found[0] == found[1]
    assert [of for _, of in found[1]][:4] == 4 * [list(range(replicas))]


class WithALink(SignedSimulation):
    """A run whose replicas machines run: those of the launcher's user, and at `INVITED_S` one that has a link to it.

    Its machines have no keys but those that an offer holds, sealed for them.
    """

    USER = Identity(bytes([5] * 32))

    def executor(self, clock: VirtualClock) -> ServerlessExecutor:
        return join_executor(self, clock, self.USER.public.text())

    def network(self, clock: VirtualClock, retry: RetryPolicy = LASTING) -> Store:
        name = clock.world.current.name
        stored = super().network(clock, retry)
        if name.startswith("machine"):
            return of_run(signed_store_in(stored).beneath, {})
        who = re.fullmatch(r"replica (\d+)\.(\d+)", name)
        return stored if who is None else as_attempt(stored, self.given[int(who[1]), int(who[2])][ENV_ATTEMPT_KEY])

    def _start_machines(self) -> None:
        super()._start_machines()
        for replica_id in range(self.plan.replicas):
            self.machines.join(JoinSettings(replica=replica_id, user=self.USER))
        self.time.at(INVITED_S, self._invite)

    def _invite(self) -> None:
        (replica_id,) = self.config.invited
        user, _ = create_invitation(RunLog(self.bucket), replica_id, 3600.0, Stamp("user", lambda: self.time.now))
        given = {"replica": replica_id, "run_sha256": self.run_sha256, "signed_by": KEY.signed_by.key}
        self.machines.join(JoinSettings(**given, user=user))


INVITED_S = 25.0


@pytest.mark.parametrize("invited", [2, 3])
def test_a_stranger_takes_part_under_an_id_beyond_those_that_the_run_begins_with(invited: int):
    """From the invitation to its contributions, which are averaged, while the run goes on."""
    settings = {"max_replicas": 4, "invited": [invited], "aggregate": "mean", "sync_every": 4}
    plan = calm(replicas=2, rounds=12, paces=(1.0, 1.1, 1.2, 1.0), settings=settings)
    simulation = WithALink(plan)
    simulation.run()
    commits = [Commit.from_bytes(data, key) for key, data in sorted(simulation.bucket.commits.items())]
    averaged = [[answer.replica_id for answer in commit.answers if answer.averaged] for commit in commits]
    assert averaged[0] == [0, 1] and averaged.count([0, 1, invited]) > 5
    assert {str(commit.by)[:10] for commit in commits} <= {"replica 0,", "replica 1,"}
    assert simulation.exit_codes == {(0, 1): 0, (1, 1): 0, (invited, 2): 0}, "offered anew, for the invitation"
    assert verify_run(simulation.bucket).agrees


@pytest.mark.parametrize("harm", ["", "is missing", "bytes, not"])
def test_verify_agrees_with_the_segments_of_a_signed_run_as_long_as_each_record_has_its_own_object(harm: str):
    """Objects of their own end with a signature, and lines of a segment do not."""
    settings = {"quorum": "all", "sync_every": 4, "fragments": 1, "fragment_sync_delay": 0, "late": "carry"}
    settings |= {"snapshot_every": 4, "retention": {}, "aggregate": "mean"}
    simulation = SignedSimulation(Plan(seed=4, replicas=2, rounds=12, paces=(1.0, 1.1), settings=settings))
    simulation.run()
    stored = simulation.bucket.stored
    assert [info.key for info in stored.list(keys.LOG)]
    named = next(info.key for info in stored.list(f"{keys.commit(2)}/"))
    if harm:
        body = stored.get(named)
        MemoryStore.delete(stored, named)
    if harm == "bytes, not":
        MemoryStore.put(stored, named, body[: len(body) // 2])
    found = verify_run(simulation.bucket).disagreement
    assert (found is None) if not harm else (found is not None and found.key == keys.commit(2) and harm in found.words)


def test_a_signed_log_has_the_records_of_an_unsigned_one():
    """So that signatures can be left out of everything that reads a log."""
    plan = dataclasses.replace(signed_plan_of(3), forgeries=())
    simulation = SignedSimulation(plan)
    simulation.run()
    commits = simulation.bucket.commits
    log = RunLog(simulation.bucket)
    assert [log.commit(round_).written.to_bytes() for round_ in range(1, len(commits) + 1)] == [
        commits[key] for key in sorted(commits)
    ]
    assert keys.commit(1) not in {info.key for info in simulation.bucket.stored.list("")}
