"""Killed anywhere, a run ends with the undisturbed run's bits: optimizer, schedule, dropout, fragments, overlap.

One replica in this process, over a store that dies after a given number of calls, at every number there is.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from protocol_fleet import FAST
from tiny_workloads import batch_of, heldout, inner_step, mlp

from diloco_orchestrator.clock import Clock, ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext, ReplicaSession


class Killed(BaseException):
    """The process is gone."""


class MortalStore(MemoryStore):
    """Whoever uses it dies at its n-th call from now, before or after the call took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.dies_at: int | None = None
        self.after = False

    def _step(self, call: Any) -> Any:
        self.calls += 1
        if self.calls == self.dies_at and not self.after:
            raise Killed
        result = call()
        if self.calls == self.dies_at:
            raise Killed
        return result

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._step(lambda: super(MortalStore, self).get(key, start, end))

    def put(self, key: str, data: bytes) -> None:
        self._step(lambda: super(MortalStore, self).put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return self._step(lambda: super(MortalStore, self).create(key, data))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._step(lambda: super(MortalStore, self).list(prefix, start_after))


class World:
    """A run with one replica that may be started again and again."""

    def __init__(self, **settings: Any) -> None:
        self.store = MortalStore()
        values = {"entrypoint": "m:f", "replicas": 1, "rounds": 4, "quorum": "all", "timing": FAST, "snapshot_every": 2}
        stamp = Stamp("founder", lambda: 0.0)
        run = Run(**stamp(), run_id="run-1", config=make_config(values | settings), package_version="0")
        create_run(self.store, run, "test", stamp)
        self.store.calls = self.attempts = 0
        self.inner_steps = 0
        self.dies_at_step: int | None = None

    def attempt(self, clock: Clock) -> ReplicaSession:
        """A process: AdamW, a schedule, dropout, a shuffled epoch."""
        self.attempts += 1
        stamp = Stamp(f"token{self.attempts}", clock.wall_time)
        torch.manual_seed(0)
        model = torch.nn.Sequential(mlp(), torch.nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        data = torch.utils.data.DataLoader(range(17), batch_size=None, shuffle=True)
        attempt = claim_attempt(self.store, 0, None, clock, stamp)
        attached = ReplicaContext(attempt).attach(
            model, optimizer, heldout=heldout, heldout_items=list(range(4)), stateful={"schedule": schedule}
        )
        with attached as session:
            for item in session.batches(data):
                session.observe(loss=inner_step(model, optimizer, batch_of(int(item))), tokens=8)
                schedule.step()
                self.inner_steps += 1
                if self.inner_steps == self.dies_at_step:
                    raise Killed
        return session

    def run(self) -> list[str]:
        """Attempts until the run has ended; the digests of its bases."""
        for _ in range(20):
            try:
                if self.attempt(ManualClock()).stopped:
                    break
            except Killed:
                continue
        self.calls, self.store.dies_at = self.store.calls, None
        return [commit.base_digest for commit in RunReader(self.store).commits()]


KINDS = [
    pytest.param({"sync_every": 4}, id="one fragment"),
    pytest.param({"sync_every": 6, "fragments": 3}, id="three fragments"),
    pytest.param({"sync_every": 4, "fragment_sync_delay": 2}, id="overlap"),
    pytest.param({"sync_every": 6, "fragments": 2, "fragment_sync_delay": 1}, id="fragments and overlap"),
    pytest.param({"sync_every": 6, "fragments": 2, "fragment_update_alpha": 0.5}, id="fragments, half kept"),
    pytest.param({"sync_every": 4, "codec": "2bit"}, id="two bits"),
    pytest.param({"sync_every": 6, "fragments": 2, "fragment_sync_delay": 1, "codec": "topk64"}, id="sparse fragments"),
]
QUICK = ("fragments and overlap",)
ENDING = ("one fragment", "three fragments", "two bits")  # others: local parameters begin at the base


def with_every(quick: int, thorough: int) -> list[Any]:
    """Kinds of runs, each with the distance of the places where it is killed: few of some kinds, and slow: more of all.

    Distances are odd, so that what alternates between places is seen in both states.
    """
    few = [pytest.param(*kind.values, quick, id=f"{kind.id}, some") for kind in KINDS if kind.id in QUICK]
    return few + [pytest.param(*kind.values, thorough, id=kind.id, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize(("settings", "every"), with_every(3, 1))
def test_killed_after_any_inner_step_the_run_ends_with_the_undisturbed_bits(settings, every):
    undisturbed = World(**settings)
    expected = undisturbed.run()
    assert len(expected) == 5
    for step in range(1, undisturbed.inner_steps + 1, every):
        killed = World(**settings)
        killed.dies_at_step = step
        assert killed.run() == expected, f"killed after inner step {step}"
        assert killed.attempts == 2


@pytest.mark.parametrize(("settings", "every"), with_every(9, 3))
def test_killed_at_any_call_to_the_store_the_run_ends_with_the_undisturbed_bits(settings, every):
    undisturbed = World(**settings)
    expected = undisturbed.run()
    for call in range(1, undisturbed.calls + 1, every):
        killed = World(**settings)
        killed.store.dies_at, killed.store.after = call, call % 2 == 0
        assert killed.run() == expected, f"killed at call {call}"


def test_killed_again_and_again():
    settings = {"sync_every": 6, "fragments": 2, "fragment_sync_delay": 1}
    expected = World(**settings).run()
    killed = World(**settings)
    for step in (2, 3, 4, 5):
        killed.dies_at_step = killed.inner_steps + step
        with pytest.raises(Killed):
            killed.attempt(ManualClock())
    assert killed.run() == expected


def test_without_saved_state_a_killed_run_ends_elsewhere():
    """So the tests above can fail: AdamW begins anew."""
    settings = {"sync_every": 4, "replica_state": "none"}
    killed = World(**settings)
    killed.dies_at_step = 6
    assert killed.run() != World(**settings).run()


def test_state_is_saved_as_often_as_asked_for():
    for mode, rounds in (("round", [1, 2, 3, 4, 5]), ("snapshot", [2, 4, 5]), ("none", [])):
        world = World(sync_every=2, replica_state=mode, rounds=5)
        world.run()
        saved = [info.key for info in world.store.list("replicas/0/state/")]
        assert saved == [keys.state(0, round_, 1) for round_ in rounds]


FRAGMENTS_OF_TWO_BITS = pytest.param({"sync_every": 6, "fragments": 2, "codec": "2bit"}, id="fragments of two bits")


@pytest.mark.parametrize("settings", [*(kind for kind in KINDS if kind.id in ENDING), FRAGMENTS_OF_TWO_BITS])
@pytest.mark.parametrize("legs", [(3, 3), (1, 1, 4)])
def test_more_rounds_after_the_planned_end_have_the_bits_of_a_run_planned_longer(settings, legs, caplog):
    """The state is saved before the last planned outer step too, which is no snapshot's round here; with residuals
    before that of each fragment, also where a leg has fewer rounds than there are fragments.
    """
    settings = {**settings, "replica_state": "snapshot", "snapshot_every": 5}
    expected = World(**settings, rounds=6).run()
    world = World(**settings, rounds=legs[0])
    world.run()
    for leg, rounds in enumerate(legs[1:]):
        stamp = Stamp(f"again{leg}", lambda: 0.0)
        begin_next_leg(RunLog(world.store), rounds=rounds, from_round=None, by="test", why="", stamp=stamp)
        world.run()
    commits = RunReader(world.store).commits()
    # The final evaluation of a leg is another round, of the base that the next one begins with.
    assert [each.base_digest for each in commits if each.stop == "none" or each is commits[-1]] == expected
    assert "begins anew" not in caplog.text and "is missing" not in caplog.text


def test_a_state_that_was_changed_is_told_and_left_aside(caplog):
    world = World(sync_every=4)
    world.dies_at_step = 6
    with pytest.raises(Killed):
        world.attempt(ManualClock())
    key = keys.state(0, 1, 1)
    world.store.put(key, world.store.get(key)[:-1] + b"!")
    assert world.run() and f"the inner optimizer begins anew: {key}" in caplog.text
