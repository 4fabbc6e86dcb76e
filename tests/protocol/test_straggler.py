"""How long a round waits for those who are slower."""

import pytest

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
    assert StragglerDeadline.of([]) is None and RoundTimes(10).deadline() is None


def contribution(round_: int, replica_id: int, train_s: float, steps: int = 10, kind: str = "delta") -> Contribution:
    """One that carries work of the round before as well."""
    origins = (Origin(round=round_ - 1, steps=7), Origin(round=round_, steps=steps))
    return Contribution.model_construct(
        round=round_, replica_id=replica_id, kind=kind, origins=origins, train_s=train_s
    )


def medians(times: RoundTimes) -> float:
    deadline = times.deadline()
    assert deadline is not None
    return deadline.median_s


def test_the_time_of_a_partial_round_is_scaled_up_to_a_whole_one():
    times = RoundTimes(round_steps=10)
    times.record([contribution(3, 0, 6.0, steps=4)])
    assert medians(times) == pytest.approx(15.0)
    times.record([contribution(3, 0, 6.0, steps=12)])  # never down
    assert medians(times) == pytest.approx(6.0)


def test_a_contribution_counts_once_and_only_work_of_its_own_round_counts():
    times = RoundTimes(round_steps=10)
    for _ in range(3):
        times.record([contribution(3, 0, 10.0)])
    times.record([contribution(3, 1, 20.0), contribution(3, 2, 30.0)])
    times.record([contribution(3, 3, 99.0, kind="abstention"), contribution(3, 4, 99.0, steps=0)])
    assert medians(times) == 20.0


def test_only_the_last_nine_rounds_count():
    times = RoundTimes(round_steps=10)
    times.record([contribution(2, 0, 500.0), contribution(2, 1, 500.0)])
    times.record([contribution(10, 0, 10.0)])
    assert medians(times) == 500.0
    times.record([contribution(11, 0, 10.0)])
    assert medians(times) == 10.0
