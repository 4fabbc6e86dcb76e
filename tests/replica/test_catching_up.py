"""What it costs a replica to come in, or to come back, far behind: no more than the newest snapshot."""

import pytest
from long_history import LongRun
from protocol_fleet import answer

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Origin
from diloco_orchestrator.run_log.contributions import ManifestListing

IDLE = 2  # the id of a replica that has never taken part in a run of two others


def requests_of_a_first_join(rounds: int) -> int:
    run = LongRun(rounds, idle=1)
    participant = run.fleet.join(IDLE)
    participant.history.newest()
    participant.history.newest_delta()
    assert participant.open.round == rounds + 1
    return run.store.requests


def test_a_first_join_costs_the_same_after_any_number_of_rounds():
    assert requests_of_a_first_join(705) == requests_of_a_first_join(105) < 60


def test_a_first_join_knows_how_long_rounds_take_without_reading_a_manifest():
    run = LongRun(25, idle=1)
    participant = run.fleet.join(IDLE)
    deadline = participant._timing.deadline()
    assert deadline is not None and deadline.median_s == 1.0
    read = {parsed for key in run.store.gets if (parsed := keys.contribution.parse(key)) is not None}
    own = {(round_, IDLE) for round_ in range(1, 27)}  # which are not there
    # Those after the newest snapshot, which the claims of round 21 confirm.
    assert {round_ for round_, _ in read - own} == {*range(21, 26)}


@pytest.mark.parametrize("missed", [40, 640])
def test_a_living_replica_far_behind_goes_on_from_the_newest_snapshot(missed: int):
    run = LongRun(105, idle=1)
    late = run.fleet.join(IDLE)
    run.add(missed)
    newest = run.rounds // 10 * 10
    run.write_snapshot(newest)
    answer(late, 1.0)
    run.store.forget()
    assert not late.close().skipped and late.open.round == 107  # it had seen this round open
    assert late.close().skipped and late.open.round == run.rounds + 1 and late.digest == run.digest
    assert run.store.requests < 70 + missed // 50  # its own work is looked for in a listing of the rounds it missed
    assert not any(keys.commit(round_) in run.store.gets for round_ in range(109, 115))


def test_the_work_of_a_replica_that_jumped_is_carried():
    run = LongRun(105, idle=1)
    late = run.fleet.join(IDLE)
    run.add(40)
    run.write_snapshot(140)
    answer(late, 1.0)
    late.close()
    late.close()
    made = answer(late, 1.0)
    assert [origin.round for origin in made.origins] == [106, 146]


def test_a_replica_few_rounds_behind_follows_every_round():
    run = LongRun(105, idle=1)
    late = run.fleet.join(IDLE)
    run.add(9)
    run.write_snapshot(110)
    for round_ in range(106, 115):
        assert late.open.round == round_ and not late.close().skipped


def test_without_a_snapshots_ahead_every_round_is_followed():
    run = LongRun(105, idle=1)
    late = run.fleet.join(IDLE)
    run.add(40)
    for round_ in range(106, 146):
        assert late.open.round == round_ and not late.close().skipped


def test_a_restarted_replica_finds_its_last_manifest_many_rounds_back():
    run = LongRun(105, idle=1)
    first = run.fleet.join(IDLE)
    made = answer(first, 1.0)
    run.add(400)
    run.write_snapshot(500)
    again = run.fleet.join(IDLE)
    run.store.forget()
    assert again.history.newest() == made
    assert again.history.newest_delta() == made
    assert run.store.requests < 20
    assert answer(again, 1.0).origins == (*made.origins, Origin(round=506, steps=30))


def test_a_manifest_that_cannot_be_read_counts_for_nothing_far_back_too():
    run = LongRun(105, idle=1)
    answer(run.fleet.join(IDLE), 1.0)
    run.add(20)
    run.store.put(keys.contribution(106, IDLE), b"{}")
    again = run.fleet.join(IDLE)
    assert again.history.newest() is None


def test_every_listing_goes_twice_as_far_back_and_none_is_repeated():
    run = LongRun(230)
    listing = ManifestListing(run.store, 200)
    for round_ in range(200, 0, -1):
        assert listing.authors(round_) == {0, 1}
    assert listing.authors(200) == {0, 1} and listing.authors(0) == set()
    assert run.store.lists == 3 and not run.store.gets  # 50, 100 and the other 50 rounds
    with pytest.raises(AssertionError, match="after 200"):
        listing.authors(201)


def test_a_first_attempt_that_starts_after_the_second_finds_what_that_one_published():
    """A provider that called it dead was wrong."""
    run = LongRun(105, idle=1)
    made = answer(run.fleet.join(IDLE, attempt=2), 1.0)
    run.add(20)
    first = run.fleet.join(IDLE, attempt=1)
    assert first.history.newest() == made
