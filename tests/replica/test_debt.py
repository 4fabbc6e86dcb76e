"""What a codec of very few bits loses is owed: in the next payload once, or listed (I12). Every payload is checked."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from protocol_fleet import BY_HAND, Fleet, report, saved, together

from diloco_orchestrator.allreduce.object_store import ObjectStoreAllReduce
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.codecs.table import CODECS, Encoded, encode
from diloco_orchestrator.config import RetentionConfig
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Halt, Score
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision import retention
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds.participant import Participant

STAMP = Stamp("test", lambda: 0.0)
NUMEL = {"bias": 3, "weight": 9}
FEEDBACK = CODECS["2bit"].feedback


class Author:
    """A replica whose pseudo-gradients are drawn, and what its payloads must hold by plain arithmetic.

    `names`: the parameters of each fragment.
    """

    def __init__(self, fleet: Fleet, replica_id: int, clock: ManualClock, names: Sequence[Sequence[str]] = ()) -> None:
        self.fleet, self.clock, self.replica_id = fleet, clock, replica_id
        self.names = names or [("bias", "weight")]
        self.drawn = torch.Generator().manual_seed(replica_id)
        self.lost = {fragment: torch.zeros(self._numel(fragment)) for fragment in range(len(self.names))}
        self.carried: dict[int, tuple[torch.Tensor, float]] = {}  # by fragment: a payload's values and their weight
        self.participant = self._join()

    def _join(self) -> Participant:
        return self.fleet.join(self.replica_id, clock=self.clock, fragments=self.names)

    def _numel(self, fragment: int) -> int:
        return sum(NUMEL[name] for name in self.names[fragment])

    def restart(self) -> None:
        self.participant = self._join()

    def answer(self, *, saves: bool = False, local: Score | None = None) -> Contribution:
        """Contribute, and check the payload's bytes."""
        fragment, round_ = self.participant.open.fragment, self.participant.open.round
        fresh = torch.randn(self._numel(fragment), generator=self.drawn)
        fields = replace(report(), state=saved(b"state") if saves else None)
        if local is not None:
            fields = replace(report(share=self.replica_id, score=0.5), local_scores=(local,))
        said = self.participant._contributor.contribute_delta(FlatTensors([fresh]), fields)
        assert said.payload is not None and said.residual is not None
        data = self.fleet.store.get(keys.payload(round_, self.replica_id, said.attempt, 0))
        added, weight = self.carried.pop(fragment, (torch.zeros(len(fresh)), 0.0))
        wanted = fresh + self.lost[fragment] * FEEDBACK + added * weight
        fine = [(0, 3)] if "bias" in self.names[fragment] else []
        assert data == encode(wanted, "2bit", fine)
        decoded = Encoded(data, "2bit", len(fresh)).values()
        self.lost[fragment] = wanted - decoded
        self.payload = decoded
        assert said.residual.share == pytest.approx(float(self.lost[fragment].norm() / wanted.norm()), rel=0.02)
        return said


def fleet_of(replicas: int = 3, **settings: object) -> tuple[Fleet, list[Author], ManualClock]:
    clock = ManualClock()
    fleet = Fleet(replicas=replicas, rounds=50, **{"quorum": None, "timing": BY_HAND, "codec": "2bit", **settings})
    return fleet, [Author(fleet, replica_id, clock) for replica_id in range(replicas)], clock


def round_of(authors: Sequence[Author], clock: ManualClock, *, saves: bool = False) -> list[Contribution]:
    """One round of 2 s in which only these answer."""
    clock.advance(2.0)
    said = [author.answer(saves=saves) for author in authors]
    for author in authors:
        author.participant.close()
    return said


def test_what_encoding_lost_is_in_the_next_payload_once():
    _, authors, clock = fleet_of()
    for _ in range(4):
        for said in round_of(authors, clock):
            assert said.residual is not None and said.residual.share > 0.01 and said.residual.missing == ()
            assert said.residual.saved is None


def test_a_late_contribution_is_encoded_again_with_what_its_encoding_lost():
    fleet, (zero, one, two), clock = fleet_of()
    round_of([zero, one, two], clock)
    round_of([zero, one], clock)
    two.answer()
    two.participant.close()
    two.carried[0] = (two.payload, carry_weight(1))
    said = two.answer()
    assert [origin.round for origin in said.origins] == [2, 3]
    round_of([zero, one], clock)
    assert [answer.replica_id for answer in fleet.commits()[1].answers] == [0, 1]


def test_a_restart_finds_what_was_saved_with_its_newest_contribution():
    _, authors, clock = fleet_of(2)
    round_of(authors, clock, saves=True)
    for author in authors:
        author.restart()
    for said in round_of(authors, clock, saves=True):
        assert said.residual is not None and said.residual.missing == ()


def test_a_restart_without_a_saved_state_lists_the_share_that_it_lost_once(caplog):
    _, (zero, one), clock = fleet_of(2)
    round_of([zero, one], clock, saves=True)
    before, _ = round_of([zero, one], clock)
    zero.restart()
    zero.lost[0].zero_()  # neither that of round 2, which nobody has, nor that of round 1, which is paid
    with caplog.at_level(logging.WARNING):
        said = zero.answer()
    assert said.residual is not None and before.residual is not None
    assert list(said.residual.missing) == [(2, before.residual.share)]
    assert "is missing in the next one: no state was saved with it" in caplog.text
    one.answer()
    together([zero.participant.close, one.participant.close])
    said = zero.answer()
    assert said.residual is not None and said.residual.missing == ()


@pytest.mark.parametrize("late", ["carry", "drop"])
def test_a_debt_lapses_with_the_work_that_it_is_of(late):
    """Late work that is dropped: by the setting, or because its payload is gone."""
    fleet, (zero, one, two), clock = fleet_of(late=late)
    round_of([zero, one, two], clock)
    round_of([zero, one], clock)
    two.answer()
    two.participant.close()
    if late == "carry":
        fleet.store.delete(keys.payload(2, 2, 1, 0))
    two.lost[0].zero_()
    said = two.answer()
    assert [origin.round for origin in said.dropped] == [2] and [origin.round for origin in said.origins] == [3]


def test_the_debt_of_a_contribution_that_is_left_out_lapses_with_it():
    fleet, authors, clock = fleet_of(4, scored=True, guard={"per_replica": True})
    round_of(authors, clock)
    for share, author in enumerate(authors):
        author.answer(local=Score(share=share, sum=None if share == 3 else 6.0, count=10))
    for author in authors:
        author.participant.close()
    assert [left.replica_id for left in fleet.commits()[1].quarantined] == [3]
    authors[3].lost[0].zero_()
    said = authors[3].answer()
    assert [origin.round for origin in said.dropped] == [2]


def test_work_from_another_base_leaves_the_debt_of_before():
    fleet, (zero, one, two), clock = fleet_of()
    round_of([zero, one, two], clock, saves=True)
    before = two.lost[0].clone()
    said = two.answer(saves=True)
    stray = said.model_copy(update={"base_digest": "b3:" + "0" * 64})
    fleet.store.put(keys.contribution(2, 2), stray.to_bytes())
    round_of([zero, one], clock)
    two.restart()
    two.lost[0] = before
    said = two.answer()
    assert [origin.round for origin in said.dropped] == [2]
    assert said.residual is not None and said.residual.missing == ()


def test_an_abstention_leaves_the_debt():
    _, (zero, one), clock = fleet_of(2, quorum=1)
    round_of([zero, one], clock)
    nan = FlatTensors([torch.full((12,), torch.nan)])
    assert zero.participant._contributor.contribute_delta(nan, report()).kind == "abstention"
    one.answer()
    together([zero.participant.close, one.participant.close])
    zero.answer()


def test_each_fragment_owes_its_own_and_finds_it_after_a_restart():
    clock = ManualClock()
    fleet = Fleet(replicas=2, rounds=50, codec="2bit", fragments=2, sync_every=30)
    authors = [Author(fleet, replica_id, clock, [("bias",), ("weight",)]) for replica_id in range(2)]
    for round_ in range(6):
        clock.advance(2.0)
        said = [author.answer(saves=True) for author in authors]
        together([author.participant.close for author in authors])
        assert [manifest.residual is not None and manifest.residual.missing for manifest in said] == [(), ()]
        if round_ == 3:
            for author in authors:
                author.restart()


def test_a_rebuild_of_the_base_keeps_what_each_fragment_owes():
    """Of a bit that flips; nothing was saved, so that what is in memory is all there is."""
    clock = ManualClock()
    fleet = Fleet(replicas=2, rounds=50, codec="2bit", fragments=2, sync_every=30)
    authors = [Author(fleet, replica_id, clock, [("bias",), ("weight",)]) for replica_id in range(2)]
    for _ in range(3):
        clock.advance(2.0)
        said = [author.answer() for author in authors]
        together([author.participant.close for author in authors])
        assert [manifest.residual is not None and manifest.residual.missing for manifest in said] == [(), ()]
        for author in authors:
            author.participant._contributor.recover_carry()


@pytest.mark.parametrize("from_round", [None, 2])
def test_a_resumed_leg_owes_what_led_to_its_base(from_round):
    """From the last round on, or from an earlier one: then what came after it lapses."""
    fleet, authors, clock = fleet_of(2, snapshot_every=1)
    owed = {}
    for round_ in range(1, 5):
        if round_ == 4:
            fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason="lunch").to_bytes())
        round_of(authors, clock, saves=True)
        owed[round_] = [author.lost[0] for author in authors]
        for author in authors:
            author.participant.write_snapshot_if_due()
    for author in authors:
        author.participant.finish_leg()
    begin_next_leg(RunLog(fleet.store), rounds=20, from_round=from_round, by="test", why="go on", stamp=STAMP)
    for author, lost in zip(authors, owed[from_round or 4], strict=True):
        author.restart()
        author.lost[0] = lost
        said = author.answer()
        assert said.residual is not None and said.residual.missing == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"numel": 13}, "13 elements in fp32 were saved; its fragment has 12"),
        ({"codec": "bf16"}, "12 elements in bf16 were saved"),
        ({"shards": ()}, "0 shards were saved; 12 elements have 1"),
    ],
    ids=["length", "codec", "shards"],
)
def test_a_saved_debt_of_another_layout_is_not_paid_but_listed(change, words, caplog):
    _, (zero, one), clock = fleet_of(2)
    said, _ = round_of([zero, one], clock, saves=True)
    assert said.residual is not None and said.residual.saved is not None
    forged = said.residual.model_copy(update={"saved": said.residual.saved.model_copy(update=change)})
    forged_one = said.model_copy(update={"residual": forged})
    with caplog.at_level(logging.WARNING):
        zero.participant._contributor._debt._newest[0] = forged_one
        zero.participant._contributor._debt._residuals.clear()
        zero.lost[0].zero_()
        again = zero.answer()
    assert words in caplog.text
    assert again.residual is not None and [round_ for round_, _ in again.residual.missing] == [1]


def test_a_saved_debt_whose_bytes_changed_is_not_paid_but_listed():
    fleet, (zero, one), clock = fleet_of(2)
    round_of([zero, one], clock, saves=True)
    fleet.store.put(keys.residual(0, 1, 1, 0), b"damaged")
    zero.restart()
    zero.lost[0].zero_()
    said = zero.answer()
    assert said.residual is not None and [round_ for round_, _ in said.residual.missing] == [1]


def test_retention_keeps_what_a_replica_that_is_away_owes_to_each_fragment():
    clock = ManualClock()
    fleet = Fleet(
        replicas=3, rounds=50, quorum=2, codec="2bit", fragments=2, sync_every=30, snapshot_every=2, timing=BY_HAND
    )
    zero, one, two = (Author(fleet, replica_id, clock, [("bias",), ("weight",)]) for replica_id in range(3))
    for round_ in range(1, 13):
        round_of([zero, one, two] if round_ <= 4 else [zero, one], clock, saves=True)
        for author in (zero, one):
            author.participant.write_snapshot_if_due()
    kept = RetentionConfig(payloads="needed", snapshots=2)
    gone = {info.key for info in retention.plan(RunLog(fleet.store), kept).objects}
    assert [keys.residual(2, round_, 1, 0) in gone for round_ in range(1, 5)] == [True, True, False, False]
    assert [keys.state(2, round_, 1) in gone for round_ in range(1, 5)] == [True, True, True, False]


def test_codecs_that_need_no_feedback_owe_nothing_to_the_next_payload():
    fleet, clock = Fleet(replicas=1, codec="int4"), ManualClock()
    participant = fleet.join(0, clock=clock)
    said = participant._contributor.contribute_delta(FlatTensors([torch.randn(12)]), report())
    assert said.residual is None


def test_an_all_reduce_that_keeps_nothing_between_calls_takes_no_codec_that_needs_feedback(tmp_path):
    with pytest.raises(ConfigError, match=r"'topk64' needs error feedback.*keeps nothing between calls"):
        ObjectStoreAllReduce(str(tmp_path), 0, 2, codec="topk64")
