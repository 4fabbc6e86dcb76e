"""Where a restarted attempt continues: the decision alone, as a table of what the bucket holds."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from diloco_orchestrator.errors import Superseded
from diloco_orchestrator.protocol.records import Contribution, Progress
from replica.attempt.attempt import Attempt
from replica.rounds.participant import Participant
from replica.training.checkpoint import Checkpoint, ResumePoint, SavedState, resume_point

OPEN, LEG, FROM_ROUND = 9, 2, 3  # the open round, its leg, and the round whose base the leg began from
PROGRESS = Progress(cursor={}, rng={}, inner_steps=5, tokens=0)
LOCAL = {"w": torch.ones(1)}


def contribution(round_: int, attempt: int = 1, leg: int = LEG, kind: str = "delta") -> Contribution:
    return Contribution.model_construct(
        round=round_, attempt=attempt, leg=leg, kind=kind, fragment=1, progress=PROGRESS, state=None
    )


def saved(round_: int, leg: int = LEG, local: dict[str, torch.Tensor] = LOCAL) -> SavedState:
    return SavedState(contribution(round_, leg=leg), {}, {}, local)


@dataclass(frozen=True)
class Bucket:
    """What attempt 2 of the replica finds."""

    newest: Contribution | None = None
    existing: Contribution | None = None  # in the open round
    state: SavedState | None = None
    of_line: Contribution | None = None
    fragments: int = 2

    def point(self, overlaps: bool = False) -> ResumePoint:
        history = SimpleNamespace(
            newest=lambda: self.newest,
            newest_delta=lambda: self.newest if self.newest and self.newest.kind == "delta" else None,
            of_open_round=lambda: self.existing,
            newest_of_line=lambda: self.of_line,
        )
        attempt = SimpleNamespace(
            number=2,
            begin=SimpleNamespace(leg=LEG, from_round=FROM_ROUND),
            config=SimpleNamespace(fragments=self.fragments),
            check_superseded=self._superseded,
        )
        rounds = SimpleNamespace(open=SimpleNamespace(round=OPEN, final_evaluation=False), history=history)
        checkpoint = SimpleNamespace(read_newest=lambda: self.state)
        return resume_point(
            cast(Attempt, attempt), cast(Participant, rounds), cast(Checkpoint, checkpoint), overlaps=overlaps
        )

    def _superseded(self) -> Any:
        raise Superseded("attempt 3 took over")


def test_a_replica_that_published_nothing_trains_the_open_round_from_the_base():
    assert Bucket().point() == ResumePoint(OPEN, None, None)


def test_a_contribution_to_the_open_round_is_not_made_again():
    made = contribution(OPEN)
    assert Bucket(newest=made, existing=made).point() == ResumePoint(OPEN, PROGRESS, None, already_contributed=True)


@pytest.mark.parametrize("overlaps", [False, True])
def test_with_local_parameters_training_continues_right_behind_that_contribution(overlaps):
    made, state = contribution(OPEN), saved(OPEN)
    point = Bucket(newest=made, existing=made, state=state).point(overlaps)
    assert point == ResumePoint(OPEN, PROGRESS, state, LOCAL, frozenset(), already_contributed=True)


def test_without_local_parameters_a_state_changes_nothing_but_the_optimizer():
    state = saved(OPEN - 1, local={})
    point = Bucket(newest=state.contribution, state=state).point(overlaps=True)
    assert point == ResumePoint(OPEN, PROGRESS, state)


def test_the_fragment_that_moved_since_is_the_bases_and_the_others_are_local():
    for state in (saved(OPEN - 1), saved(FROM_ROUND, leg=1)):
        point = Bucket(newest=state.contribution, state=state).point()
        assert point == ResumePoint(OPEN, PROGRESS, state, LOCAL, frozenset({1}))


def test_with_a_delay_or_alpha_the_round_before_is_opened_again():
    state = saved(OPEN - 1)
    point = Bucket(newest=state.contribution, state=state).point(overlaps=True)
    assert point == ResumePoint(OPEN - 1, PROGRESS, state, LOCAL, frozenset(), already_contributed=True)


def test_the_round_before_is_not_opened_again_in_another_leg():
    state = saved(OPEN - 1, leg=LEG - 1)
    point = Bucket(newest=state.contribution, state=state).point(overlaps=True)
    assert point == ResumePoint(OPEN, PROGRESS, state, LOCAL, frozenset({1}), rates="")


def test_local_parameters_of_rounds_ago_are_left_aside():
    for overlaps in (False, True):
        state = saved(OPEN - 2)
        point = Bucket(newest=state.contribution, state=state).point(overlaps)
        assert point == ResumePoint(OPEN, PROGRESS, state)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_abstention_in_the_open_round_is_waited_for_and_the_base_after_it_is_taken(overlaps):
    state, abstention = saved(OPEN - 1), contribution(OPEN, kind="abstention")
    point = Bucket(newest=abstention, existing=abstention, state=state).point(overlaps=overlaps)
    assert point == ResumePoint(OPEN, PROGRESS, state, already_contributed=True)


def test_an_attempt_that_finds_a_later_ones_contribution_leaves():
    with pytest.raises(Superseded):
        Bucket(existing=contribution(OPEN, attempt=3)).point()


def test_training_that_is_lost_for_want_of_a_state_is_reported(caplog):
    bucket = Bucket(newest=contribution(OPEN - 1))
    bucket.point()
    assert "since each of them moved last is dropped" in caplog.text
    assert "the inner optimizer begins anew" in caplog.text
    caplog.clear()
    replace(bucket, fragments=1).point()
    assert "is dropped" not in caplog.text and "the inner optimizer begins anew" in caplog.text
    caplog.clear()
    Bucket().point()
    assert not caplog.text
