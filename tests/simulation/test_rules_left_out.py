"""Each rule of claims is needed: a schedule that holds with all rules is caught without one of them.

The schedules are those on which a model of the rules broke, played with the real code; more are at the end of
`test_flipped_bits`.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulation import Simulation
from simulation_plan import Plan, calm
from simulation_store import InvariantBroken

from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.run_log import entries
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.rebuild import rebuild
from diloco_orchestrator.supervision import next_leg
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds import close_round
from replica.rounds.base_claims import BaseClaims
from replica.rounds.contribution_history import ContributionHistory
from replica.rounds.reupload import ReuploadRequests

pytestmark = pytest.mark.slow

STAMP = Stamp("test", lambda: 0.0)
IMPATIENT = {
    "timing": {"poll_s": 0.5, "heartbeat_s": 5.0, "round_timeout_s": 60.0, "startup_timeout_s": 120.0},
    "retry": {"max_errors": 1, "hung_after_s": 60.0, "backoff_s": 1.0},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def plan_with(replicas: int, quorum: Any, *flips: tuple[float, int, str], every: int = 2, **changes: Any) -> Plan:
    settings = {"quorum": quorum, "snapshot_every": every, **changes.pop("settings", {})}
    return calm(
        replicas=replicas, rounds=6, paces=(1.0,) * replicas, settings=settings, flips=tuple(sorted(flips)), **changes
    )


def holds(plan: Plan) -> Simulation:
    simulation = Simulation(plan)
    assert simulation.run()[-1].stop == "completed" and len(simulation.last_digests) == plan.replicas
    assert len(simulation.flipped) >= len(plan.flips) - 1  # the run may be over before the last one
    return simulation


def is_caught(plan: Plan, words: str = ".") -> None:
    with pytest.raises((InvariantBroken, AssertionError), match=words):
        holds(plan)


def test_record_a_commit_that_names_nobody_records_the_claim(monkeypatch):
    plan = plan_with(3, "all", (27.8, 2, "parameters"), (44.6, 0, "parameters"))
    holds(plan)
    append: Callable[[RunLog, Commit], CommitEntry] = close_round.append_commit

    def silent(log: RunLog, commit: Commit) -> CommitEntry:
        names_nobody = not any(answer.averaged for answer in commit.answers)
        return append(log, commit.model_copy(update={"base_digest": None}) if names_nobody else commit)

    monkeypatch.setattr(close_round, "append_commit", silent)
    is_caught(plan, "base_digest")


def test_twice_a_rebuilt_base_that_nobody_claims_is_rebuilt_once_more(monkeypatch):
    """A bit flips in the replay with which a lone replica checks its base before a snapshot."""
    plan = plan_with(1, None, (21.3, 0, "rebuild"))
    holds(plan)

    beside, made = ReuploadRequests.rebuild_beside, dict[int, Any]()

    def once(self: ReuploadRequests, base: Any, until: int) -> Any:
        if until not in made:
            made[until] = beside(self, base, until)
        return made[until]

    monkeypatch.setattr(ReuploadRequests, "rebuild_beside", once)
    is_caught(plan, "snapshots/00000004/: its base is")


def test_state_inner_state_comes_from_the_newest_manifest_with_a_right_claim(monkeypatch):
    plan = plan_with(3, "all", (27.8, 2, "parameters"))
    holds(plan)
    newest = ContributionHistory.newest_delta

    def whatever_it_claims(self: ContributionHistory) -> Contribution | None:
        with monkeypatch.context() as patch:
            patch.setattr(BaseClaims, "is_right", lambda self, manifest: True)
            return newest(self)

    monkeypatch.setattr(ContributionHistory, "newest_delta", whatever_it_claims)
    is_caught(plan, "goes on from a state that was trained from a wrong base")


@pytest.mark.parametrize(
    ("replicas", "quorum", "every", "when", "kill"), [(3, None, 1, 19.8, (23.1, 1)), (2, 1, 1, 17.6, (23.0, 0))]
)
def test_snap_a_snapshot_is_loaded_once_somebody_else_claims_its_base(replicas, quorum, every, when, kill, monkeypatch):
    """Its writer's base is wrong after a step, and a replica is restarted before the writer has healed."""
    plan = plan_with(replicas, quorum, (when, 0, "after step"), every=every, kills=(kill,))
    holds(plan)
    monkeypatch.setattr(ConfirmedSnapshots, "takes_of", ConfirmedSnapshots.complete_takes)
    is_caught(plan)


def test_void_a_commit_whose_weights_do_not_follow_averages_nobody(monkeypatch):
    """A bit was wrong in the commit's writer while it made round 3's commit."""
    append: Callable[[RunLog, Commit], CommitEntry] = close_round.append_commit

    def overweight(log: RunLog, commit: Commit) -> CommitEntry:
        if commit.round == 3:
            heavier = tuple(a.model_copy(update={"weight": a.weight + 64}) for a in commit.answers[:1])
            commit = commit.model_copy(update={"answers": (*heavier, *commit.answers[1:])})
        return append(log, commit)

    monkeypatch.setattr(close_round, "append_commit", overweight)
    plan = plan_with(3, None, settings=IMPATIENT)
    simulation = holds(plan)
    third = RunLog(simulation.bucket).commit(3)
    assert third is not None and third.commit.reason.startswith("void")

    def refused(commit: Commit, why: str) -> Commit:
        raise RecordInvalid("the weights of a commit do not follow: it is refused.")

    monkeypatch.setattr(entries, "averaging_nobody", refused)
    with pytest.raises((AssertionError, RecordInvalid)):
        holds(plan)


def after_commit(round_: int, **plan: Any) -> float:
    """The virtual time in seconds at which a round's commit is there, in a run in which nothing goes wrong."""
    return holds(plan_with(**plan)).bucket.written_at[keys.commit(round_)]


@pytest.mark.parametrize(("who", "author"), [(0, 1), (2, 1), (1, 1)])
def test_want_a_payload_that_went_bad_after_its_commit_is_put_again(who, author, monkeypatch):
    """It goes bad just before a replica restarts that has to rebuild the base from it, perhaps its own author."""
    when = after_commit(2, replicas=3, quorum="all", every=10, settings=IMPATIENT)
    rots, kills = ((when + 0.03, 2, author),), ((when + 0.08, who),)
    plan = plan_with(3, "all", every=10, rots=rots, kills=kills, settings=IMPATIENT)
    simulation = holds(plan)
    assert any(keys.parse_want(info.key) for info in simulation.bucket.list(keys.wants(2)))
    monkeypatch.setattr(ReuploadRequests, "put_wanted", lambda self, round_: None)
    is_caught(plan)


@pytest.fixture
def unreadable() -> RunLog:
    """The log of a failed leg: a payload of round 2 went bad just before all replicas restarted at once."""
    when = after_commit(2, replicas=2, quorum="all", every=10, settings=IMPATIENT)
    rots, kills = ((when + 0.03, 2, 1),), ((when + 0.08, -2),)
    plan = plan_with(2, "all", every=10, rots=rots, kills=kills, settings=IMPATIENT)
    simulation = Simulation(plan)
    simulation.play()
    return RunLog(simulation.bucket)


def test_a_payload_that_is_bad_once_nobody_holds_it_ends_the_run_with_words_and_not_for_ever(unreadable):
    """No snapshot was written since. Whoever reads the exit records finds what to do."""
    result = unreadable.result(1)
    assert result is not None and result.status == "failed"
    records = [info.key for info in unreadable.store.list(keys.REPLICAS) if info.key.endswith("exit.json")]
    words = " ".join(unreadable.store.get(key).decode() for key in records)
    assert "No running replica has put it again within 60 s" in words and "--from-round 0" in words
    assert begin_next_leg(unreadable, rounds=3, from_round=0, by="u", why="w", stamp=STAMP).leg == 2


def test_legs_a_leg_begins_only_from_a_base_that_can_be_rebuilt(unreadable, monkeypatch):
    with pytest.raises(ConfigError, match=r"after round 2 .* cannot be rebuilt.*--from-round 0"):
        begin_next_leg(unreadable, rounds=3, from_round=2, by="u", why="w", stamp=STAMP)
    monkeypatch.setattr(next_leg, "_ensure_snapshot", lambda *args: None)
    begin = begin_next_leg(unreadable, rounds=3, from_round=2, by="u", why="w", stamp=STAMP)
    with pytest.raises(PayloadCorrupt, match="rounds/00000002/payload/1"):
        rebuild(unreadable, begin)
