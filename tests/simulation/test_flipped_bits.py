"""Bits flipped in any replica's base at any time: that machine heals, nobody else leaves, the log's base comes out."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from simulation import Simulation, simulate_flips
from simulation_plan import calm
from simulation_store import InvariantBroken

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit
from diloco_orchestrator.protocol.claims import wrong_bases
from diloco_orchestrator.protocol.process import EXIT_PERMANENT
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.rebuild import rebuild
from replica.rounds import base_claims, close_round
from replica.rounds.base_claims import BaseClaims
from replica.rounds.tip import HeldTip

pytestmark = pytest.mark.slow

WHEN = (12.1, 15.3, 22.2, 27.8)  # in training, waiting, before and after commits of six rounds


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def flipped(replicas: int, quorum: Any, *flips: tuple[float, int, str], **changes: Any) -> Simulation:
    """A run of six rounds of 4 s each with these flips, and `InvariantBroken` if the rules of claims do not hold."""
    settings = {"quorum": quorum, "snapshot_every": 2}
    plan = calm(replicas=replicas, rounds=6, paces=(1.0,) * replicas, settings=settings, flips=tuple(flips), **changes)
    simulation = Simulation(plan)
    commits = simulation.run()
    assert commits[-1].stop == "completed" and len(simulation.last_digests) == replicas
    return simulation


FLEETS = [
    pytest.param(
        replicas, quorum, marks=() if (replicas, quorum) in ((1, None), (2, 1), (3, None)) else pytest.mark.slow
    )
    for replicas in (1, 2, 3, 4)
    for quorum in (None, "all", 1)
]


@pytest.mark.parametrize("tensors", ["parameters", pytest.param("momenta", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("replicas", "quorum"), FLEETS)
def test_a_flipped_bit_costs_its_machine_a_round_and_nobody_else_anything(replicas, quorum, tensors):
    """Replica 0 writes most commits and snapshots; alone, it has no second opinion but its own replay."""
    hit = [simulation.flipped for when in WHEN for simulation in [flipped(replicas, quorum, (when, 0, tensors))]]
    assert sum(map(len, hit)) >= len(WHEN) - 2  # some runs are over then, or have not begun


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_flip_at_a_replica_that_writes_no_commit_and_several_flips_in_a_row(replicas):
    for when in WHEN[:3]:
        assert flipped(replicas, None, (when, replicas - 1, "parameters")).flipped
        assert len(flipped(replicas, None, (when, 0, "parameters"), (when + 9.0, 1, "momenta")).flipped) == 2


def test_bits_flip_anywhere_at_any_time():
    """Thousands of seeds are `make simulate FLIPS=1 SEEDS=…`."""
    assert sum(len(simulate_flips(seed).flipped) for seed in range(30)) >= 20


@pytest.mark.parametrize("where", [None, "rebuild"])
@pytest.mark.parametrize("when", [12.1, 17.6, 18.5])
def test_a_leg_that_the_coordinator_ends_has_the_right_last_snapshot(when, where):
    """A bit flips in a replica, then all are killed and the user halts the run: the coordinator writes the stop commit,
    and the snapshot of the last base, in the rebuild of which another bit may flip."""
    settings = {"quorum": None, "snapshot_every": 10}
    flips = ((when, 0, "parameters"), *(((1.0, -1, where),) if where else ()))
    kills = tuple((19.9, replica_id) for replica_id in range(3))
    plan = calm(rounds=6, settings=settings, flips=flips, kills=kills, halt_at=20.0)
    simulation = Simulation(plan)
    last = simulation.run()[-1]
    assert last.stop == "halted" and last.by_coordinator and not simulation.coming
    log = RunLog(simulation.bucket)
    made_in = max(log.snapshots())
    # No commit claims the last base of a leg, so its snapshot is confirmed by the next leg alone.
    right = rebuild(log, log.newest_begin().record, below=made_in).digest
    assert ConfirmedSnapshots(log).said_digests(made_in) == {right}


# -- machines with other arithmetic ------------------------------------------------------------------------------------


def differing(replicas: int, quorum: Any, *other: int) -> tuple[Simulation, list[Commit]]:
    plan = calm(
        replicas=replicas,
        rounds=6,
        paces=(1.0,) * replicas,
        settings={"quorum": quorum, "snapshot_every": 2},
        other_arithmetic=other,
    )
    simulation = Simulation(plan)
    return simulation, simulation.run()


@pytest.mark.parametrize("quorum", [None, 1])
@pytest.mark.parametrize(("replicas", "other"), [(3, 0), (3, 2), (4, 0), (4, 3)])
def test_a_machine_with_other_arithmetic_leaves_and_the_others_go_on(replicas, other, quorum):
    simulation, commits = differing(replicas, quorum, other)
    assert commits[-1].stop == "completed" and set(simulation.last_digests) == set(range(replicas)) - {other}
    assert simulation.exit_codes[other, 1] == EXIT_PERMANENT
    key = keys.exit_record(other, 1)
    words = str(Exit.from_bytes(simulation.bucket.get(key), key).error)
    assert "BaseDiverged" in words and f"is claimed by replicas {other}" in words
    assert wrong_bases(commits, other) <= 3


@pytest.mark.parametrize("quorum", [None, "all", pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("replicas", "other"), [(2, (0,)), (2, (1,)), (4, (0, 1)), (4, (1, 3)), (4, (2, 3))])
def test_two_equal_halves_end_in_one_group_or_in_a_typed_stop_but_never_in_two_models(replicas, other, quorum):
    simulation, commits = differing(replicas, quorum, *other)
    finished = set(simulation.last_digests)
    assert not finished or finished <= set(other) or not finished & set(other)
    assert commits[-1].stop in ("completed", "failed")


# -- a rule left out must be caught -----------------------------------------------------------------------------------


def caught(replicas: int, quorum: Any, who: int = 0, tensors: Sequence[str] = ("parameters", "momenta")) -> bool:
    for when in WHEN:
        for each in tensors:
            try:
                flipped(replicas, quorum, (when, who, each))
            except (InvariantBroken, AssertionError):
                return True
    return False


def test_without_claims_that_are_hashed_when_they_are_published_it_is_caught(monkeypatch):
    """The digest noted after the step: the flip is averaged, and its author ends with another base."""

    claims: dict[HeldTip, BaseClaims] = {}

    def noted(self: BaseClaims) -> str:
        claims[self._tip] = self
        self._digest = self._digest if self._digest is not None else self._tip.value.digest
        return self._digest

    step = HeldTip.step

    def note(self: HeldTip, *args: Any, **options: Any) -> Any:
        average = step(self, *args, **options)
        noted(claims[self])
        return average

    monkeypatch.setattr(BaseClaims, "hash", noted)
    monkeypatch.setattr(HeldTip, "step", note)
    assert caught(3, None)


def test_without_healing_it_is_caught(monkeypatch):
    monkeypatch.setattr(BaseClaims, "heal", lambda self, claims: False)
    monkeypatch.setattr(BaseClaims, "contradicted", lambda self, claims: frozenset())
    assert caught(3, None)


def test_without_groups_it_is_caught(monkeypatch):
    """The decider's own digest is law: the flip of the machine that decides is everybody's, whichever one that is."""
    monkeypatch.setattr(close_round, "shared_claim", lambda claims, own, own_is_rebuilt: own)
    monkeypatch.setattr(BaseClaims, "contradicted", lambda self, claims: frozenset())
    assert any(caught(3, None, who) for who in range(3))


def test_if_wrong_work_is_carried_it_is_caught(monkeypatch):
    monkeypatch.setattr(BaseClaims, "is_right", lambda self, manifest: True)
    assert caught(3, None)


def test_if_who_is_outvoted_once_leaves_it_is_caught(monkeypatch):
    """A transient fault must remove nobody."""
    monkeypatch.setattr(base_claims, "is_outvoted", lambda *args: True)
    monkeypatch.setattr(base_claims, "MAX_WRONG_BASES", 1)
    assert caught(3, None)


@pytest.mark.slow
def test_with_all_rules_nothing_is_caught():
    assert not caught(3, None)
