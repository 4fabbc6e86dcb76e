"""Several sessions on virtual time: who is waited for, who scores what, who asks how often, which fragment moves."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from protocol_fleet import Fleet, tiny_model
from sessions import Counted, constant_steps, context_of
from stored_snapshots import complete_snapshots
from virtual_time import Process, VirtualClock, VirtualTime

from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.errors import Superseded
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.memory import MemoryStore

NAN = float("nan")
STEPS, STEP_S = 10, 2.0
TIMING = {"poll_s": 0.5, "round_timeout_s": 1800.0, "startup_timeout_s": 100.0}


def fleet_of(replicas: int, rounds: int, **settings: Any) -> Fleet:
    return Fleet(replicas, rounds, **{"sync_every": STEPS, "quorum": None, "timing": TIMING, **settings})


def train_together(fleet: Fleet, gradients: dict[int, Callable[[int], float]], **attach: Any) -> None:
    """Every replica that has a gradient trains, a step taking 2 s; the others never come up."""
    time = VirtualTime()

    def replica(replica_id: int, clock: VirtualClock) -> None:
        model, context = tiny_model(), context_of(fleet, replica_id, clock)
        constant_steps(context, model, gradients[replica_id], take_s=lambda: clock.sleep(STEP_S), **attach)

    for replica_id in gradients:
        time.spawn(f"replica {replica_id}", lambda clock, i=replica_id: replica(i, clock))  # type: ignore[misc]
    time.run()


def score(model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
    return [1.0] * len(items)


def shares_scored(fleet: Fleet, round_: int) -> list[int]:
    manifests = ContributionReader(fleet.store).in_round(round_, fleet.replicas)
    return sorted(score.share for manifest in manifests for score in manifest.scores)


def test_shares_of_the_absent_are_scored_by_the_others_though_the_base_has_not_moved():
    """Replica 2 never comes up and the first round moves nothing: the next one scores the same base, all of it."""
    fleet = fleet_of(3, rounds=2, quorum=2)
    gradients = {0: lambda batch: 1.0, 1: lambda batch: NAN if batch == 3 else 1.0}
    train_together(fleet, gradients, heldout=score, heldout_items=list(range(6)))
    first, second = fleet.commits()[:2]
    assert (first.applied, first.roster, second.applied) == (False, (0, 1), True)
    assert (shares_scored(fleet, 1), shares_scored(fleet, 2)) == ([0, 1], [0, 1, 2])


def test_fragments_move_in_turn_and_a_round_that_moved_nothing_is_made_up_for():
    fleet = Fleet(1, rounds=4, sync_every=4, fragments=2)
    context = context_of(fleet, 0)
    constant_steps(context, tiny_model(), lambda batch: NAN if batch == 3 else 1.0)
    commits = fleet.commits()
    assert [(c.fragment, c.applied) for c in commits[:5]] == [(0, True), (1, False), (1, True), (0, True), (1, True)]


def test_snapshots_are_written_while_the_run_goes_on():
    fleet = Fleet(1, rounds=3, sync_every=2, snapshot_every=1)
    seen: list[list[int]] = []

    def note(batch: int) -> float:
        seen.append(complete_snapshots(fleet.store))
        return 1.0

    constant_steps(context_of(fleet, 0), tiny_model(), note)
    assert seen[::2] == [[0], [0, 1], [0, 1, 2]]


class Listening(MemoryStore):
    """Notes which reads of commits came while their round had no contribution of replica 0 yet."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[int] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        for round_ in range(1, 10):
            if key == keys.commit(round_) and keys.contribution(round_, 0) not in self._objects:
                self.early.append(round_)
        return super().get(key, start, end)


def test_a_replica_that_is_waited_for_asks_for_no_commit_while_it_trains_in_time():
    """Each question is a request; nobody commits without it before the straggler deadline."""
    bucket = Listening()
    fleet = fleet_of(2, rounds=4, store=bucket)
    train_together(fleet, {0: lambda batch: 1.0, 1: lambda batch: 1.0})
    assert [c.applied for c in fleet.commits()] == [True] * 4 + [False]
    assert bucket.early.count(1) >= STEPS  # in a leg's first round nobody knows how long a round takes
    early = {round_: bucket.early.count(round_) for round_ in (2, 3, 4)}
    assert max(early.values()) <= 2 * 2  # both replicas look once whether the next commit is there, before they train


def test_who_loses_the_race_for_its_manifest_goes_on_from_the_winners_place_in_the_data():
    """Attempt 2 was started because attempt 1 looked dead; attempt 1 takes two batches a step, and is always first."""
    fleet = fleet_of(1, rounds=2, quorum="all")
    time, seen = VirtualTime(), []

    def first(clock: VirtualClock) -> None:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context_of(fleet, 0, clock).attach(model, optimizer) as session:
            for batch in session.batches(Counted()):
                if batch % 2:
                    clock.sleep(STEP_S)
                    optimizer.step()

    def second(clock: VirtualClock) -> None:
        constant_steps(
            context_of(fleet, 0, clock),
            tiny_model(),
            lambda batch: seen.append(batch) or 1.0,  # type: ignore[func-returns-value]
            take_s=lambda: clock.sleep(STEP_S),
        )

    time.spawn("attempt 1", first)
    time.spawn("attempt 2", second, at=5.0)
    time.run()
    assert [answer.attempt for commit in fleet.commits()[:2] for answer in commit.answers] == [1, 1]
    assert seen == [*range(10), *range(20, 30)]


def test_an_attempt_that_is_cut_in_a_round_to_which_it_has_nothing_to_add_goes_on_behind_the_one_that_has():
    """Attempt 2 stands still for 50 s in its first step, while attempt 1 contributes to two rounds."""
    fleet, time = fleet_of(2, rounds=4), VirtualTime()
    seen: list[list[int]] = []

    def attempt(replica_id: int, clock: VirtualClock) -> None:
        batches: list[int] = []
        seen.append(batches)
        with suppress(Superseded):
            constant_steps(
                context_of(fleet, replica_id, clock),
                tiny_model(),
                lambda batch: batches.append(batch) or 1.0,  # type: ignore[func-returns-value]
                take_s=lambda: clock.sleep(STEP_S + 0.1 * replica_id),  # so that replica 1 never waits
            )

    for replica_id in (1, 0):
        time.spawn(f"replica {replica_id}", lambda clock, i=replica_id: attempt(i, clock))  # type: ignore[misc]
    late = time.spawn("replica 1, attempt 2", lambda clock: attempt(1, clock), at=5.0)
    time.at(6.0, lambda: time.stop(late, 50.0))
    time.run()
    assert [[answer.attempt for answer in commit.answers] for commit in fleet.commits()[:2]] == [[1, 1], [1, 1]]
    assert seen[2][:2] == [0, 20]


def test_a_state_newer_than_the_cursor_leaves_no_trace_in_the_run(caplog: pytest.LogCaptureFixture):
    """Attempt 2 stands still in round 1 until attempt 1 has contributed to rounds 1 and 2, and then it dies.

    Behind round 1 attempt 2 reads the state of round 2, the newest there is, with the cursor of round 1. What it trains
    from there is the loser of round 2, which has a contribution; behind that round both are those of round 2.
    """

    def played(*, twice: bool) -> tuple[list[Any], list[int]]:
        fleet, time = fleet_of(1, rounds=4, quorum="all", replica_state="round"), VirtualTime()
        seen: list[int] = []

        def attempt(clock: VirtualClock, batches: list[int]) -> None:
            model = tiny_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with context_of(fleet, 0, clock).attach(model, optimizer) as session:
                for batch in session.batches(Counted()):
                    batches.append(batch)
                    clock.sleep(STEP_S)
                    for parameter in model.parameters():
                        parameter.grad = torch.full_like(parameter, 1.0 + batch)
                    optimizer.step()

        first = time.spawn("attempt 1", lambda clock: attempt(clock, []))
        if twice:
            second = time.spawn("attempt 2", lambda clock: attempt(clock, seen), at=5.0)
            time.at(6.0, lambda: time.stop(second, 2 * STEPS * STEP_S))
            time.at(2 * STEPS * STEP_S + 3.0, lambda: time.kill(first))
        time.run()
        commits = [commit for commit in fleet.commits() if commit.applied]
        return [(commit.outer_step, commit.answers[0].payload) for commit in commits], seen

    caplog.set_level("INFO")
    (alone, _), (disturbed, seen) = played(twice=False), played(twice=True)
    loaded = [record.args for record in caplog.records if record.msg.startswith("the state that attempt")]
    assert loaded == [(1, 2), (1, 2)]  # of attempt 1 and round 2: behind round 1, and behind round 2
    assert seen == [*range(10), *range(10, 20), *range(20, 40)]
    assert disturbed == alone


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_payload_holds_every_step_since_its_fragment_moved_last_though_its_author_was_away(fragments: int):
    """Replica 2 stands still for 75 s in mid-round, and the others go on; what it had trained is late, not lost."""
    lr = 1 / 64
    fleet = fleet_of(3, rounds=14, sync_every=STEPS * fragments, fragments=fragments)
    time = VirtualTime()
    processes = {}
    for replica_id in range(3):
        processes[replica_id] = time.spawn(
            f"replica {replica_id}",
            lambda clock, i=replica_id: constant_steps(  # type: ignore[misc]
                context_of(fleet, i, clock), tiny_model(), lambda _: 1.0, lr=lr, take_s=lambda: clock.sleep(STEP_S)
            ),
        )
    time.at(93.0, lambda: time.stop(processes[2], 75.0))
    time.run()
    reader = ContributionReader(fleet.store)
    found = (reader.of(commit.round, 2) for commit in fleet.commits())
    said = [manifest for manifest in found if manifest is not None and manifest.kind == "delta"]
    assert any(len(manifest.origins) > 1 for manifest in said)  # something was late, and carried
    newest: dict[int, tuple[int, float, int]] = {}  # by fragment: inner steps, payload, round
    for manifest in said:
        assert manifest.progress is not None and manifest.payload is not None
        value = float(Encoded(reader.shard(manifest, 0), "fp32", manifest.payload.numel).values()[0])
        steps, late, round_ = newest.get(manifest.fragment, (0, 0.0, 0))
        expected = lr * (manifest.progress.inner_steps - steps)
        if len(manifest.origins) > 1:
            expected += carry_weight(max(1, (manifest.round - round_) // fragments)) * late
        assert value == pytest.approx(expected, rel=1e-4), f"round {manifest.round}"
        newest[manifest.fragment] = (manifest.progress.inner_steps, value, manifest.round)


def test_an_attempt_that_only_announced_itself_hides_no_progress_from_the_next_one():
    """Attempt 2 comes back, is waited for again, and dies before it has contributed anything."""
    fleet, time = fleet_of(3, rounds=12), VirtualTime()
    seen: list[list[int]] = []

    def replica(replica_id: int, clock: VirtualClock) -> None:
        batches: list[int] = []
        if replica_id == 2:
            seen.append(batches)
        constant_steps(
            context_of(fleet, replica_id, clock),
            tiny_model(),
            lambda batch: batches.append(batch) or 1.0,  # type: ignore[func-returns-value]
            take_s=lambda: clock.sleep(STEP_S),
        )

    def start(replica_id: int, at: float) -> Process:
        return time.spawn(f"replica {replica_id}", lambda clock: replica(replica_id, clock), at)

    start(0, 0.0), start(1, 0.0)
    for killed_at, process in ((50.0, start(2, 0.0)), (104.0, start(2, 98.0))):
        time.at(killed_at, lambda process=process: time.kill(process))  # type: ignore[misc]
    start(2, 110.0)
    time.run()
    said = [m for m in (ContributionReader(fleet.store).of(r, 2) for r in range(1, 13)) if m is not None]
    assert any(m.attempt == 2 and m.progress is None for m in said)
    assert len(seen) == 3 and seen[2][0] == 20  # two rounds of attempt 1 are published
