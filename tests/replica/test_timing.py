"""Whole elastic runs on a virtual clock: who is named in how many rounds, when replicas are slow, die and come back.

Real sessions, participants, guard and torchft loop over one store; only time is not real, and a training step is a
constant gradient.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from protocol_fleet import Fleet
from scripted import CountingStore
from virtual_time import Process, VirtualClock, VirtualTime

from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext, ReplicaSession

STEPS, STEP_S = 10, 1.0


@dataclass
class Timing:
    """How one replica behaves."""

    pace: float = 1.0  # s per inner step, as a multiple
    jitter: float = 0.0  # share of a step's time
    killed_at: float | None = None
    back_after_s: float | None = 30.0  # None: never
    stopped_at: float | None = None  # SIGSTOP, for 45 s
    scoring_s: float = 0.0  # of the base, before the first inner step of a round


@dataclass
class World:
    """A fleet on virtual time. `sessions` holds every attempt's."""

    fleet: Fleet
    time: VirtualTime = field(default_factory=VirtualTime)
    sessions: list[ReplicaSession] = field(default_factory=list)

    def replica(self, replica_id: int, timing: Timing, at: float = 0.0) -> Process:
        return self.time.spawn(f"replica {replica_id}", lambda clock: self._train(replica_id, timing, clock), at)

    def _train(
        self, replica_id: int, timing: Timing, clock: VirtualClock, leave: Callable[[], bool] = lambda: False
    ) -> None:
        stamp = Stamp(f"{replica_id}@{clock.now()}", clock.wall_time)
        chance = random.Random(replica_id)
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(1.0), model.bias.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        attempt = claim_attempt(self.fleet.store, replica_id, None, clock, stamp, leave)

        def score(_: torch.nn.Module, items: Sequence[int]) -> list[float]:
            clock.sleep(timing.scoring_s)
            return [1.0 + 0.01 * item for item in items]

        scored = {"heldout": score, "heldout_items": list(range(8))} if timing.scoring_s else {}
        with ReplicaContext(attempt).attach(model, optimizer, **scored) as session:
            self.sessions.append(session)
            for _ in session.batches(_Endless()):
                clock.sleep(STEP_S * timing.pace * (1 + timing.jitter * chance.uniform(-1, 1)))
                model.weight.grad, model.bias.grad = torch.ones(1, 1), torch.ones(1)
                optimizer.step()
                session.observe(loss=1.0, tokens=1)


class _Endless:
    """Batches without content."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def run(timings: list[Timing], rounds: int = 40, **settings: object) -> World:
    """Play a run to its end."""
    timing = {"poll_s": 0.5, "round_timeout_s": 1800.0, "startup_timeout_s": 1800.0}
    settings = {"quorum": None, "sync_every": STEPS, "timing": timing, "snapshot_every": 1000} | settings
    world = World(Fleet(replicas=len(timings), rounds=rounds, **settings))
    for replica_id, each in enumerate(timings):
        process = world.replica(replica_id, each)
        if each.stopped_at is not None:
            world.time.at(each.stopped_at, lambda process=process: world.time.stop(process, 45.0))
        if each.killed_at is not None:
            world.time.at(each.killed_at, lambda process=process: world.time.kill(process))
            if each.back_after_s is not None:
                world.replica(replica_id, each, at=each.killed_at + each.back_after_s)
    world.time.run()
    return world


def named(commits: list[Commit], replica_id: int) -> list[int]:
    """Rounds whose average holds a contribution of this replica."""
    return [c.round for c in commits if any(a.averaged and a.replica_id == replica_id for a in c.answers)]


def training_rounds(world: World) -> list[Commit]:
    return [c for c in world.fleet.commits() if c.stop == "none" and c.applied]


def check_every_step_counts_once(world: World) -> None:
    """I4 from the bucket: origins of averaged contributions, plus what is owed at the end, are what was trained."""
    commits = world.fleet.commits()
    counted: dict[tuple[int, int], int] = {}
    for commit in commits:
        for a in commit.answers:
            for origin in a.origins if a.averaged else ():
                at = (a.replica_id, origin.round)
                assert at not in counted, f"the work of replica {at[0]} in round {at[1]} counts twice"
                counted[at] = origin.steps
    reader = ContributionReader(world.fleet.store)
    for commit in commits:
        for manifest in reader.in_round(commit.round, world.fleet.replicas):
            own = [o for o in manifest.origins if o.round == manifest.round]
            if manifest.kind == "delta" and own and (manifest.replica_id, manifest.round) not in counted:
                # Never counted: then no later contribution of its author was averaged, so the run ended first.
                later = [r for r in named(commits, manifest.replica_id) if r > manifest.round]
                assert not later, f"the {own[0].steps} steps of replica {manifest.replica_id} are lost"


def test_scoring_that_takes_most_of_a_round_cuts_nobody_short():
    world = run([Timing(scoring_s=30.0), Timing(scoring_s=31.0)], rounds=6)
    trained = {origin.steps for c in training_rounds(world) for a in c.answers for origin in a.origins}
    assert trained == {STEPS}


SLOW = [
    pytest.param([Timing(), Timing(pace=1.05)], id="2 replicas, one 5 % slower", marks=pytest.mark.slow),
    pytest.param([Timing(), Timing(pace=1.10)], id="2 replicas, one 10 % slower", marks=pytest.mark.slow),
    pytest.param(
        [Timing(), Timing(), Timing(), Timing(pace=1.05)], id="4 replicas, one 5 % slower", marks=pytest.mark.slow
    ),
    pytest.param(
        [Timing(), Timing(), Timing(), Timing(pace=1.10)], id="4 replicas, one 10 % slower", marks=pytest.mark.slow
    ),
    pytest.param([Timing(jitter=0.2) for _ in range(4)], id="jitter", marks=pytest.mark.slow),
    pytest.param([Timing(jitter=0.2), Timing(jitter=0.2, pace=1.1)], id="2 replicas, jitter, one 10 % slower"),
    pytest.param(
        [Timing(jitter=0.1) for _ in range(3)] + [Timing(0.1, 1.1)],
        id="4 replicas, one much faster",
        marks=pytest.mark.slow,
    ),
]


def test_replicas_ask_a_few_hundred_times_in_a_first_round_of_twenty_minutes():
    """Its replicas do not know yet how long a round takes; nobody reads the manifests before both have responded."""
    store = CountingStore()
    run([Timing(pace=3.0), Timing(pace=3.3)], rounds=1, sync_every=400, store=store)
    assert store.calls["GET"] + store.calls["LIST"] < 300


@pytest.mark.parametrize("timings", SLOW)
def test_a_replica_that_is_a_little_slower_is_named_in_every_round(timings):
    world = run(timings)
    rounds = training_rounds(world)
    assert len(rounds) == 40
    for replica_id in range(len(timings)):
        assert len(named(rounds, replica_id)) >= 0.95 * len(rounds)
    check_every_step_counts_once(world)


@pytest.mark.parametrize(
    "pace", [pytest.param(1.6, marks=pytest.mark.slow), 2.5, pytest.param(4.0, marks=pytest.mark.slow)]
)
def test_a_replica_that_is_much_slower_gives_the_part_it_can_and_holds_nobody_up(pace):
    world = run([Timing(), Timing(), Timing(), Timing(pace=pace)], rounds=40)
    rounds = training_rounds(world)
    assert len(rounds) == 40
    for replica_id in range(4):
        assert len(named(rounds, replica_id)) >= 0.95 * len(rounds)
    steps = [o.steps for c in rounds[5:] for a in c.answers if a.replica_id == 3 for o in a.origins]
    assert min(steps) >= int(STEPS / pace) - 1 and max(steps) <= STEPS / pace + 1
    lasted = [later.at - earlier.at for earlier, later in pairwise(rounds[5:])]
    assert max(lasted) < 1.2 * STEPS
    check_every_step_counts_once(world)


def test_a_replica_stopped_for_a_while_takes_part_again_whatever_the_weights():
    world = run([Timing(), Timing(), Timing(stopped_at=52.0)], rounds=20, weights="tokens", fragments=2, sync_every=20)
    rounds = training_rounds(world)
    assert len(rounds) == 20 and len(world.sessions) == 3
    assert [c.round for c in rounds[-6:]] == named(rounds, 2)[-6:]


RESTARTED = [
    pytest.param([Timing(), Timing(killed_at=103.0)], id="2 replicas"),
    pytest.param([Timing(), Timing(pace=1.1, killed_at=103.0)], id="2 replicas, it is slower", marks=pytest.mark.slow),
    pytest.param(
        [Timing(pace=1.1), Timing(killed_at=103.0)], id="2 replicas, the other is slower", marks=pytest.mark.slow
    ),
    pytest.param([Timing(), Timing(), Timing(), Timing(killed_at=103.0)], id="4 replicas", marks=pytest.mark.slow),
    pytest.param(
        [Timing(), Timing(pace=1.05), Timing(), Timing(killed_at=107.5)],
        id="4 replicas, one slower",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        [Timing(jitter=0.1) for _ in range(3)] + [Timing(1.1, 0.1, 109.9)],
        id="4 replicas, jitter, slower",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        [Timing(killed_at=55.0), Timing(killed_at=205.0), Timing(), Timing()],
        id="two of four, in turn",
        marks=pytest.mark.slow,
    ),
    pytest.param([Timing(), Timing(killed_at=100.0, back_after_s=0.0)], id="at once, on the edge of a round"),
]


@pytest.mark.parametrize("timings", RESTARTED)
def test_a_restarted_replica_is_named_again_in_nearly_every_round_it_is_alive_for(timings):
    world = run(timings)
    rounds = training_rounds(world)
    assert len(rounds) == 40
    for replica_id, timing in enumerate(timings):
        alive = [c for c in rounds if not _was_away(c, timing)]
        share = len(set(named(rounds, replica_id)) & {c.round for c in alive}) / len(alive)
        assert share >= 0.95, f"replica {replica_id} is named in {share:.0%} of the rounds it was alive for"
    check_every_step_counts_once(world)


def _was_away(commit: Commit, timing: Timing) -> bool:
    """Whether the round ended while the replica was dead, or was open when it died."""
    if timing.killed_at is None or timing.back_after_s is None:
        return False
    return timing.killed_at <= commit.at <= timing.killed_at + timing.back_after_s


def test_the_dead_are_waited_for_once_and_then_not_any_more():
    world = run([Timing(), Timing(), Timing(), Timing(killed_at=103.0, back_after_s=None)], rounds=20)
    ended = [c.at for c in training_rounds(world)]
    lasted = [later - earlier for earlier, later in pairwise(ended)]
    slow = [round_ for round_, seconds in enumerate(lasted, 2) if seconds > 1.2 * STEPS]
    assert slow == [11]
    assert lasted[slow[0] - 2] < 1.6 * STEPS
    assert "without 3 after 15" in world.fleet.commits()[10].reason


def test_a_cut_replica_publishes_what_it_has_and_is_in_step_again():
    world = run([Timing(), Timing(), Timing(killed_at=103.0, back_after_s=36.3)], rounds=20)
    late = [m for m in _manifests(world, 2) if m.kind == "delta" and m.round not in named(world.fleet.commits(), 2)]
    assert [_origins(m) for m in late] == [[(14, 7)]]  # round 14 went from 135.1 s to 145.1 s
    carrying = [m for m in _manifests(world, 2) if len(m.origins) > 1]
    assert [_origins(m) for m in carrying] == [[(14, 7), (15, 10)]]
    assert [named(world.fleet.commits(), 2)[i] for i in (9, 10)] == [10, 15]


def test_late_work_is_dropped_where_that_is_asked_for():
    timings = [Timing(), Timing(), Timing(killed_at=103.0, back_after_s=36.3)]
    world = run(timings, rounds=20, late="drop")
    told = [m for m in _manifests(world, 2) if m.dropped]
    assert [[(o.round, o.steps) for o in m.dropped] for m in told] == [[(14, 7)]]
    assert all(len(m.origins) == 1 for m in _manifests(world, 2) if m.kind == "delta")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"fragments": 2}, marks=pytest.mark.slow),
        {"fragments": 2, "fragment_sync_delay": 3},
        pytest.param({"fragment_sync_delay": 4}, marks=pytest.mark.slow),
    ],
)
def test_fragments_and_overlap_keep_in_step_through_a_restart(settings):
    timings = [Timing(), Timing(pace=1.1), Timing(killed_at=103.0, back_after_s=36.3)]
    world = run(timings, rounds=30, sync_every=STEPS * settings.get("fragments", 1), **settings)
    rounds = training_rounds(world)
    assert len(rounds) == 30 and world.fleet.commits()[-1].stop == "completed"
    for replica_id in (0, 1):
        assert len(named(rounds, replica_id)) >= 0.95 * len(rounds)
    check_every_step_counts_once(world)


def test_half_of_the_fleet_may_die_for_ever():
    gone = Timing(killed_at=55.0, back_after_s=None)
    timings = [Timing(), Timing(), gone, replace(gone, killed_at=85.0)]
    world = run(timings, rounds=20)
    assert world.fleet.commits()[-1].stop == "completed"
    assert named(training_rounds(world), 2)[-1] <= 6


def test_the_same_run_again_is_the_same_to_the_last_bit():
    timings = [Timing(jitter=0.2), Timing(jitter=0.2, killed_at=51.0), Timing(jitter=0.3)]
    first, second = (run(timings, rounds=10).fleet.commits() for _ in range(2))
    assert [c.to_bytes() for c in first] == [c.to_bytes() for c in second]


def _origins(manifest: Contribution) -> list[tuple[int, int]]:
    return [(origin.round, origin.steps) for origin in manifest.origins]


def _manifests(world: World, replica_id: int) -> list[Contribution]:
    reader = ContributionReader(world.fleet.store)
    found = (reader.of(commit.round, replica_id) for commit in world.fleet.commits())
    return [manifest for manifest in found if manifest is not None]


class CountsByRound(MemoryStore):
    """Counts calls by what they ask for, since the last `calls.clear()`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.calls[f"GET {key.split('/')[0]}"] += 1
        return super().get(key, start, end)

    def create(self, key: str, data: bytes) -> bool:
        self.calls["PUT"] += 1
        return super().create(key, data)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self.calls["LIST"] += 1
        return super().list(prefix, start_after)


@pytest.mark.parametrize(
    "timings",
    [
        pytest.param([Timing(jitter=0.1) for _ in range(4)], id="jitter", marks=pytest.mark.slow),
        pytest.param([Timing(jitter=0.1) for _ in range(3)] + [Timing(1.3, 0.1)], id="one 30 % slower"),
    ],
)
def test_who_waits_at_the_end_of_a_round_asks_seldom_before_the_others_are_expected(timings):
    store, rounds = CountsByRound(), 20
    world = run(timings, rounds=rounds, store=store)
    calls = store.calls
    # Four replicas write payload and manifest and read those of three others; one writes the commit, three read it.
    # Before the last outer step each saves its state.
    assert len(training_rounds(world)) == rounds
    assert (calls["PUT"] - 4) / rounds < 4 + 4 + 3 and calls["GET rounds"] / rounds < 12 + 12 + 3 + 9
    assert calls["LIST"] / rounds < 4 * 5 and calls["GET legs"] / rounds < 3
