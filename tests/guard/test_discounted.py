"""Whose scores and training metrics do not count as they are said is in the fold's result, the commit and `verify`."""

from typing import Any

import pytest
from hostile_replicas import ATTACKS, Classifier, HostileFleet

from diloco_orchestrator.cli.report_page import page
from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution, HeldoutSet, Metric, Score

ITEMS = 10


def manifest(replica_id: int, mean: float, share: int | None = None, count: int = ITEMS, **fields: Any) -> Contribution:
    """A manifest with this mean score of its own share, or of another one."""
    score = Score(share=replica_id if share is None else share, sum=None if mean != mean else mean * count, count=count)
    said = {"scores": (score,), "in_loop": Metric(sum=-2.0 + 0.01 * replica_id, count=1), **fields}
    stamp = {"write_id": f"w{replica_id}", "at": 0.0, "round": 1, "leg": 1, "replica_id": replica_id, "attempt": 1}
    base = {"base_digest": "b3:" + "0" * 64, "snapshot_round": 0, "rebuilt_after": 0}
    return Contribution(kind="delta", **stamp, **base, **said)


def folded(state: Any, round_: int, manifests: list[Contribution]) -> Any:
    heldout = HeldoutSet(metric="loss", shares=(ITEMS,) * 5, digest="0" * 64)
    return fold_round(state, GuardConfig(), round_, heldout, range(5), manifests, manifests)


def after_ten_rounds() -> Any:
    """A state that knows how far five shares are usually apart: about .01."""
    state = None
    for round_ in range(1, 11):
        result = folded(state, round_, [manifest(i, -2.0 + 0.01 * ((i * round_) % 5)) for i in range(5)])
        assert result.discounted == (), round_
        state = result.state
    return state


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (manifest(4, -2.0, count=7), "its score of share 4 is over 7 items, of 10, and does not count"),
        (manifest(4, -2.0, share=1), "it scores shares that it was not dealt (1)"),
        (manifest(4, float("nan")), "its score of share 4 is not finite"),
        (manifest(4, -1000.0, in_loop=None), "its score of share 4 is far beyond the others' and is clipped"),
        (
            manifest(4, -2.0, in_loop=Metric(sum=1000.0, count=1)),
            "its training metric is far beyond the others' and is clipped",
        ),
        (manifest(4, -2.0, in_loop=Metric(sum=None, count=3)), "its training metric is not finite"),
    ],
)
def test_the_manifest_that_does_not_count_in_full_is_named(last, reason):
    result = folded(after_ten_rounds(), 11, [*(manifest(i, -2.0 + 0.01 * i) for i in range(4)), last])
    assert [(each.replica_id, each.reason) for each in result.discounted] == [(4, reason)]


def test_many_foreign_shares_are_cut_short():
    scores = tuple(Score(share=share, sum=1.0, count=ITEMS) for share in (7, 0, 1, 2, 3, 4, 9))
    result = folded(None, 1, [*(manifest(i, -2.0) for i in range(4)), manifest(4, -2.0, scores=scores)])
    assert result.discounted[0].reason == "it scores shares that it was not dealt (0, 1, 2, 3, …)"


@pytest.mark.usefixtures("one_thread")
def test_the_commit_every_reader_and_verify_have_the_reason():
    fleet = HostileFleet(4, 2, 0, 1, ATTACKS["lying scores, high"])
    commit = fleet.play()[0]
    (said,) = commit.discounted
    assert said.replica_id == 3 and f"replica 3: {said.reason}" in commit.reason
    assert next(answer for answer in commit.answers if answer.replica_id == 3).averaged
    status = RunReader(fleet.store).status()
    assert status.rounds[0].judgements == {3: said.reason}
    assert "it scores shares that it was not dealt (0, 1, 2)" in page(status, fleet.config, [])
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
