"""How long a round waits for those who are slower."""

import pytest

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Origin
from diloco_orchestrator.protocol.straggler import RoundTimes, StragglerDeadline


@pytest.mark.parametrize(
    ("times_s", "deadline_s", "grace_s"),
    [
        ([10.0] * 9, 15.0, 5.0),  # all alike: half the median
        ([10, 10, 14, 6, 10, 15, 5, 10, 10], 15.0, 5.0),  # MAD 0
        ([10, 13, 7, 10, 13, 7, 10], 22.0, 12.0),  # MAD 3
        ([0.1] * 4, 2.1, 2.0),  # very short rounds leave 2 s
        ([3600.0] * 4, 4200.0, 60.0),  # very long ones 600 s, and a quorum that came late at most 60 s
        ([100, 200, 300], 600.0, 60.0),
    ],
)
def test_the_deadline_follows_the_times_of_the_last_rounds(times_s, deadline_s, grace_s):
    deadline = StragglerDeadline.of(times_s)
    assert deadline is not None
    assert (deadline.deadline_s, deadline.grace_s) == pytest.approx((deadline_s, grace_s))


def test_without_times_there_is_no_deadline():
    assert StragglerDeadline.of([]) is None and RoundTimes(10, own=0).deadline is None


def contribution(round_: int, replica_id: int, train_s: float, steps: int = 10, kind: str = "delta") -> Contribution:
    """One that carries work of the round before as well."""
    origins = (*((Origin(round=round_ - 1, steps=7),) if round_ > 1 else ()), Origin(round=round_, steps=steps))
    return Contribution.model_construct(
        round=round_, replica_id=replica_id, kind=kind, origins=origins, train_s=train_s
    )


def medians(times: RoundTimes) -> float:
    deadline = times.deadline
    assert deadline is not None
    return deadline.median_s


def test_the_time_of_a_partial_round_is_scaled_up_to_a_whole_one():
    times = RoundTimes(round_steps=10, own=0)
    times = times.with_manifests([contribution(3, 0, 6.0, steps=4)])
    assert medians(times) == pytest.approx(15.0)
    times = RoundTimes(round_steps=10, own=0)
    times = times.with_manifests([contribution(3, 0, 6.0, steps=12)])  # never down
    assert medians(times) == pytest.approx(6.0)


def test_a_contribution_counts_once_and_only_work_of_its_own_round_counts():
    times = RoundTimes(round_steps=10, own=0)
    for _ in range(3):
        times = times.with_manifests([contribution(3, 0, 10.0)])
    times = times.with_manifests([contribution(3, 1, 20.0), contribution(3, 2, 30.0)])
    times = times.with_manifests([contribution(3, 3, 99.0, kind="abstention"), contribution(3, 4, 99.0, steps=0)])
    assert medians(times) == 20.0


FIFTY_EIGHT_DAYS_S = 5e6


@pytest.mark.parametrize(
    ("reported_s", "seen_s", "deadline_s"),
    [
        (10.0, 10.0, 15.0),  # alike
        (30.0, 30.0, 60.0),  # three times as slow: counts as it is
        (200.0, 200.0, 485.0),  # twenty times as slow, and this replica has waited for it: median 105, slack 4 * 95
        (200.0, None, 185.0),  # the same after a restart, from a commit: it counts as 80 until it is seen again
        (FIFTY_EIGHT_DAYS_S, 10.0, 185.0),  # a report that cannot be true
        (FIFTY_EIGHT_DAYS_S, None, 185.0),
        (0.0, 10.0, 25.0),  # nobody is cut for one that reports no time: median 5, slack 4 * 5
        (1e-9, 10.0, 25.0),
    ],
)
def test_of_two_replicas_what_the_other_reports_moves_the_deadline_no_further_than_what_was_waited(
    reported_s, seen_s, deadline_s
):
    times = RoundTimes(round_steps=10, own=0)
    for round_ in range(1, 10):
        times = times.with_manifests([contribution(round_, 0, 10.0), contribution(round_, 1, reported_s)], seen_s)
    deadline = times.deadline
    assert deadline is not None and deadline.deadline_s == pytest.approx(deadline_s)
    assert deadline.deadline_s > 10.0  # the honest one is in time, whatever is reported


def test_a_report_with_nothing_to_compare_it_with_counts_as_what_was_waited_or_for_nothing():
    times = RoundTimes(round_steps=10, own=0)
    times = times.with_manifests([contribution(1, 1, FIFTY_EIGHT_DAYS_S)])
    assert times.deadline is None
    times = times.with_manifests([contribution(2, 1, FIFTY_EIGHT_DAYS_S)], seen_s=40.0)
    assert medians(times) == 40.0
    times = times.with_manifests(
        [contribution(2, 1, FIFTY_EIGHT_DAYS_S)]
    )  # once more, as of its commit: it was waited for all the same
    assert medians(times) == 40.0


def test_two_that_lie_do_not_vouch_for_each_other_where_two_do_not():
    times = RoundTimes(round_steps=10, own=0)
    times = times.with_manifests([contribution(1, i, FIFTY_EIGHT_DAYS_S if i > 1 else 10.0) for i in range(4)])
    assert medians(times) == 45.0  # 10, 10, and twice eight times that


def test_what_is_usual_is_the_lower_median_of_the_others_and_at_least_the_own_time():
    times = RoundTimes(round_steps=10, own=0)
    times = times.with_manifests([contribution(1, 0, 10.0), contribution(1, 1, 40.0)])
    times = times.with_manifests([contribution(round_, 2, FIFTY_EIGHT_DAYS_S) for round_ in (1, 2, 3)])
    assert medians(times) == 8 * 10.0
    slow = RoundTimes(round_steps=10, own=0)
    slow = slow.with_manifests(
        [contribution(1, i, time_s) for i, time_s in enumerate((100.0, 10.0, 10.0, FIFTY_EIGHT_DAYS_S))]
    )
    slow = slow.with_manifests([contribution(2, 3, FIFTY_EIGHT_DAYS_S), contribution(3, 3, FIFTY_EIGHT_DAYS_S)])
    assert medians(slow) == (100.0 + 8 * 100.0) / 2


@pytest.mark.parametrize("train_s", ["-1.0", "NaN", "Infinity", "1e999"])
def test_a_manifest_with_a_time_that_is_none_cannot_be_read(train_s: str):
    written = Contribution(
        **Stamp("token", lambda: 0.0)(),
        round=1,
        leg=1,
        replica_id=0,
        attempt=1,
        kind="abstention",
        base_digest="",
        snapshot_round=0,
        rebuilt_after=0,
        train_s=7.25,
    )
    forged = written.to_bytes().replace(b"7.25", train_s.encode())
    with pytest.raises(RecordInvalid):
        Contribution.from_bytes(forged, "rounds/00000001/contributions/0.json")


def test_only_the_last_nine_rounds_count():
    times = RoundTimes(round_steps=10, own=0)
    times = times.with_manifests([contribution(2, 0, 500.0), contribution(2, 1, 500.0)])
    times = times.with_manifests([contribution(10, 0, 10.0)])
    assert medians(times) == 500.0
    times = times.with_manifests([contribution(11, 0, 10.0)])
    assert medians(times) == 10.0


def test_in_equal_time_a_partial_round_counts_as_long_as_it_took_and_the_fastest_sets_the_time():
    times = RoundTimes(round_steps=10, own=0, equal_time=True)
    assert times.fastest_s is None
    for round_, fast_s in enumerate((50.0, 10.0, 12.0), start=1):  # the first one compiles its model
        times = times.with_manifests([contribution(round_, 0, fast_s), contribution(round_, 1, 12.0, steps=3)])
    assert times.fastest_s == 12.0
    assert medians(times) == 12.0
    times = times.with_manifests([contribution(round_, 2, 1e-6) for round_ in (1, 2, 3)])
    assert times.fastest_s == 12.0 / 8  # nobody shortens a round further by a report


def test_in_equal_time_a_machine_much_slower_than_most_goes_by_their_time_and_not_by_an_eighth_of_its_own():
    times = RoundTimes(round_steps=20, own=2, equal_time=True)
    assert times.with_manifests([contribution(1, 2, 6.0, steps=2)]).fastest_s == 60.0
    own = contribution(1, 2, 6.0, steps=2)
    assert (
        times.with_manifests([contribution(1, 0, 4.0, steps=20), contribution(1, 1, 4.0, steps=20), own]).fastest_s
        == 4.0
    )
