"""Whose scores and training metrics do not count as they are said is in the fold's result, the commit and `verify`."""

from typing import Any

import pytest
from hostile_replicas import ATTACKS, Classifier, HostileFleet

from diloco_orchestrator.cli.report_page import page
from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.inspection.report import Report
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import LONGEST_REASON
from diloco_orchestrator.protocol.records import Contribution, Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet

ITEMS = 10


def manifest(replica_id: int, mean: float, share: int | None = None, count: int = ITEMS, **fields: Any) -> Contribution:
    """A manifest with this mean score of its own share, or of another one."""
    score = Score(share=replica_id if share is None else share, sum=None if mean != mean else mean * count, count=count)
    said = {"scores": (score,), "in_loop": Metric(sum=-2.0 + 0.01 * replica_id, count=1), **fields}
    stamp = {"write_id": f"w{replica_id}", "at": 0.0, "round": 1, "leg": 1, "replica_id": replica_id, "attempt": 1}
    base = {"base_digest": "b3:" + "0" * 64, "snapshot_round": 0, "rebuilt_after": 0}
    return Contribution(kind="delta", **stamp, **base, **said)


def folded(state: Any, round_: int, manifests: list[Contribution], replicas: int = 7, **guard: Any) -> Any:
    heldout = HeldoutSet(metric="loss", shares=(ITEMS,) * replicas, digest="0" * 64)
    return fold_round(state, GuardConfig(**guard), round_, heldout, range(replicas), manifests, manifests)


def after_ten_rounds(replicas: int = 7, apart: float = 0.01, **guard: Any) -> Any:
    """A state that knows how far the changes of shares are usually apart: about as much as `apart`."""
    state = None
    for round_ in range(1, 11):
        said = [manifest(i, -2.0 + apart * ((i * round_) % 5)) for i in range(replicas)]
        result = folded(state, round_, said, replicas, **guard)
        assert result.discounted == (), round_
        state = result.state
    return state


def named(result: Any) -> list[tuple[int, str]]:
    return [(each.replica_id, each.reason) for each in result.discounted]


def honest(*replica_ids: int) -> list[Contribution]:
    return [manifest(i, -2.0 + 0.01 * (i % 5)) for i in replica_ids]


FAR_SCORE = "its score of share 6 is far beyond the others' and is clipped"
FAR_METRIC = "its training metric is far beyond the others' and is clipped"


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (manifest(6, -2.0, count=7), "its score of share 6 is over 7 items, of 10, and does not count"),
        (manifest(6, -2.0, share=1), "it scores shares that it was not dealt (1)"),
        (manifest(6, float("nan")), "its score of share 6 is not finite"),
        (manifest(6, -1000.0, in_loop=None), FAR_SCORE),
        (manifest(6, -2.0, in_loop=Metric(sum=1000.0, count=1)), FAR_METRIC),
        (manifest(6, -2.0, in_loop=Metric(sum=None, count=3)), "its training metric is not finite"),
    ],
)
def test_the_manifest_that_does_not_count_in_full_is_named(last, reason):
    assert named(folded(after_ten_rounds(), 11, [*honest(0, 1, 2, 3, 4, 5), last])) == [(6, reason)]


def test_among_five_and_before_values_were_apart_nobody_is_named_for_being_far_away():
    far = manifest(4, -1000.0, in_loop=Metric(sum=1000.0, count=1))
    assert named(folded(after_ten_rounds(5), 11, [*honest(0, 1, 2, 3), far], 5)) == []
    far = manifest(6, -1000.0, in_loop=Metric(sum=1000.0, count=1))
    assert named(folded(None, 1, [*honest(0, 1, 2, 3, 4, 5), far])) == []
    still = [manifest(i, -2.0, in_loop=None) for i in range(6)]
    assert named(folded(after_ten_rounds(apart=0.0), 11, [*still, manifest(6, -1.9, in_loop=None)])) == []


def test_beside_a_metric_that_is_not_finite_and_a_missing_share_the_right_one_is_named():
    broken = manifest(0, -2.0, in_loop=Metric(sum=None, count=3), scores=())
    far = manifest(6, -1000.0, in_loop=Metric(sum=1000.0, count=1))
    found = named(folded(after_ten_rounds(8), 11, [broken, *honest(1, 2, 3, 4, 5), far, *honest(7)], 8))
    assert found == [(0, "its training metric is not finite"), (6, f"{FAR_SCORE}; {FAR_METRIC}")]


def test_of_two_scores_of_a_share_the_first_one_is_judged():
    scores = (Score(share=6, sum=-20.0, count=ITEMS), Score(share=6, sum=-20.0, count=7))
    last = manifest(6, -2.0, scores=scores)
    assert named(folded(after_ten_rounds(), 11, [*honest(0, 1, 2, 3, 4, 5), last])) == []


def test_the_per_replica_guard_keeps_the_names():
    last = manifest(6, float("nan"))
    found = folded(after_ten_rounds(per_replica=True), 11, [*honest(0, 1, 2, 3, 4, 5), last], per_replica=True)
    assert named(found) == [(6, "its score of share 6 is not finite")]


def test_many_foreign_shares_are_cut_short():
    scores = tuple(Score(share=share, sum=1.0, count=ITEMS) for share in (7, 0, 1, 2, 3, 4, 9))
    result = folded(None, 1, [*honest(0, 1, 2, 3), manifest(4, -2.0, scores=scores)])
    assert named(result) == [(4, "it scores shares that it was not dealt (0, 1, 2, 3, …)")]


def test_a_reason_is_cut():
    scores = tuple(Score(share=10**99 + i, sum=1.0, count=ITEMS) for i in range(4))
    result = folded(None, 1, [*honest(0, 1, 2, 3), manifest(4, -2.0, scores=scores)])
    assert len(result.discounted[0].reason) == LONGEST_REASON


@pytest.mark.usefixtures("one_thread")
def test_the_commit_every_reader_and_verify_have_the_reason():
    fleet = HostileFleet(4, 2, 0, 1, ATTACKS["lying scores, high"])
    commit = fleet.play()[0]
    (said,) = commit.discounted
    assert said.replica_id == 3 and f"scores of replica 3: {said.reason}" in commit.reason
    assert next(answer for answer in commit.answers if answer.replica_id == 3).averaged
    status = RunReader(fleet.store).status()
    assert status.rounds[0].judgements == {3: f"scores: {said.reason}"}
    assert "it scores shares that it was not dealt (0, 1, 2)" in page(
        Report.read(RunReader(fleet.store), NoBackground())
    )
    assert verify_run(fleet.store).disagreement is None
    fleet.store.put(keys.commit(1), commit.model_copy(update={"discounted": ()}).to_bytes())
    found = verify_run(fleet.store).disagreement
    assert found is not None and "discounted" in str(found)


@pytest.mark.usefixtures("one_thread")
def test_a_commit_that_hides_who_was_discounted_is_void_for_replicas():
    fleet = HostileFleet(4, 2, 0, 1, ATTACKS["lying scores, high"])
    first, *later = fleet.play()
    for commit in later:
        fleet.store.delete(keys.commit(commit.round))
    fleet.store.put(keys.commit(1), first.model_copy(update={"discounted": ()}).to_bytes())
    assert fleet.join(0, model=Classifier(0)).digest == fleet.start().base_digest
