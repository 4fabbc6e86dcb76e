"""Contributions of strangers are scored by the other replicas before they are averaged, over a bucket in memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from protocol_fleet import FAST, Fleet, HurriedClock, answer, close, report, together
from sessions import constant_steps, context_of

from diloco_orchestrator.clock import ManualClock, SystemClock
from diloco_orchestrator.guard.round_fold import fields_of, fold_of_commit
from diloco_orchestrator.guard.shares import deal
from diloco_orchestrator.guard.strangers import StrangersWork
from diloco_orchestrator.inspection.status import NewRows
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import Checked
from diloco_orchestrator.protocol.records import Commit, Contribution, Metric, Quarantine, Score
from diloco_orchestrator.protocol.round_metrics import EXTRA_PREFIX
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild
from replica.rounds.participant import Participant

GOOD, HARMFUL = 1.0, -1.0  # pseudo-gradients: towards the optimum of all held-out items, and away from it
LAUNCHED, STRANGERS = (0, 1, 2), (3, 4)


def scores(replica_id: int) -> Callable[[Base], Sequence[float]]:
    """Scores of the ten items of a replica's share: minus the distance of all parameters from about -9."""

    def measure(base: Base) -> list[float]:
        values = base.parameters["bias"]
        return [-(float((values + 9.0 + 0.1 * replica_id + 0.05 * item).abs().sum()) ** 1.1) for item in range(10)]

    return measure


def fleet_of(hurried: bool = False, **settings: Any) -> tuple[Fleet, list[Participant]]:
    timing = {**FAST, "poll_s": 0.2 if hurried else 0.01}
    given = {"replicas": 5, "invited": list(STRANGERS), "quorum": None, "timing": timing, **settings}
    clock = HurriedClock() if hurried else SystemClock()
    fleet = Fleet(scored=True, scores_strangers=True, clock=clock, aggregate="mean", **given)
    participants = fleet.join_all()
    for i in LAUNCHED:
        participants[i].score_strangers_by(scores(i))
    return fleet, participants


def played(participants: Sequence[Participant], values: Sequence[float]) -> Commit:
    """The round's commit, after these have contributed these pseudo-gradients."""
    for each, value in zip(participants, values, strict=True):
        answer(each, value, report(share=each._attempt.replica_id, score=1.0))
    return together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]


def left_out(commit: Commit) -> dict[int, str]:
    averaged = {each.replica_id for each in commit.answers if each.averaged}
    found = {each.replica_id: each.reason for each in commit.quarantined}
    assert commit.applied and averaged == {each.replica_id for each in commit.answers} - found.keys()
    return found


def assert_right(fleet: Fleet, participants: Sequence[Participant]) -> None:
    """All hold the base that the bucket gives, and `verify` agrees."""
    log = RunLog(fleet.store)
    assert {each.digest for each in participants} == {rebuild(log, log.begins()[0]).digest}
    assert verify_run(fleet.store).disagreement is None


@pytest.mark.parametrize("quorum", [None, "all"])
@pytest.mark.parametrize("path", ["gather", "scatter_reduce"])
def test_who_lowers_the_held_out_scores_is_left_out_from_its_first_contribution_on(quorum, path):
    fleet, participants = fleet_of(quorum=quorum, path=path)
    commits = [played(participants, [GOOD, GOOD, GOOD, GOOD, HARMFUL]) for _ in range(2)]
    for commit in commits:
        assert list(left_out(commit)) == [4] and "lowers held-out scores by 3.00 sigmas" in left_out(commit)[4]
        assert "replica 4 is left out: its work lowers" in commit.reason
    row = next(NewRows(RunLog(fleet.store)).read())
    assert row.judgements[4].startswith("left out: its work lowers") and row.without == [4]
    assert_right(fleet, participants)


def test_who_was_harmful_is_averaged_again_once_its_work_has_made_up_for_it():
    fleet, participants = fleet_of(rounds=8)
    out = [4 in left_out(played(participants, [GOOD, GOOD, GOOD, GOOD, last])) for last in [HARMFUL] + [GOOD] * 3]
    assert out[0] and not out[-1]
    assert_right(fleet, participants)


def test_strangers_who_are_more_than_the_launched_replicas_do_not_decide_which_base_is_right():
    """Three that named another base ended the launched replicas with `BaseDiverged`."""
    fleet, participants = fleet_of(invited=[2, 3, 4], quorum=2)
    for each in participants:
        answer(each, GOOD, report(share=each._attempt.replica_id, score=1.0))
    for i in (2, 3, 4):
        key = keys.contribution(1, i)
        said = Contribution.from_bytes(fleet.store.get(key), key)
        fleet.store.put(key, said.model_copy(update={"base_digest": "b3:" + "0" * 64}).to_bytes())
    commit = together([lambda each=each: close(each) for each in participants[:2]])[0].commit  # type: ignore[misc]
    assert [each.kind for each in commit.answers] == ["delta"] * 2 + ["wrong_base"] * 3 and commit.applied
    log = RunLog(fleet.store)
    assert {each.digest for each in participants[:2]} == {rebuild(log, log.begins()[0]).digest}
    assert verify_run(fleet.store).disagreement is None


@pytest.mark.parametrize("value", [1.5, HARMFUL])
def test_one_scorer_that_lies_moves_nothing(value):
    """Replica 2 says of everything the opposite of what it measures."""
    fleet, participants = fleet_of()
    true = scores(2)
    participants[2].score_strangers_by(lambda base: [-100.0 * each for each in true(base)])
    assert list(left_out(played(participants, [GOOD, GOOD, GOOD, GOOD, value]))) == [4] * (value == HARMFUL)
    assert_right(fleet, participants)


def test_what_half_of_the_others_have_scored_is_not_averaged():
    """It waits for the others' scores for some seconds, and the round goes on."""
    fleet, participants = fleet_of(hurried=True)
    for i in (1, 2):
        participants[i]._closer.work.measure = None
    out = left_out(played(participants, [GOOD] * 5))
    assert list(out) == [3, 4] and out[3].startswith("1 of 3 replicas have scored its work")
    assert_right(fleet, participants)


def test_who_polls_seldom_has_its_scores_counted():
    """Two replicas pause for ten seconds when the last contribution comes in, and the third polls at once."""
    clock, timing = ManualClock(), {**FAST, "poll_s": 10.0}
    given = {"replicas": 5, "invited": list(STRANGERS), "quorum": None, "timing": timing, "aggregate": "mean"}
    fleet = Fleet(scored=True, scores_strangers=True, clock=clock, **given)
    participants = fleet.join_all()
    for i in LAUNCHED:
        participants[i].score_strangers_by(scores(i))
    for each in participants:
        answer(each, GOOD, report(share=each._attempt.replica_id, score=1.0))
    closers = [each._closer for each in participants]
    counted = []
    for seconds, polls in ((0.0, (0,)), (10.0, (0, 1, 2)), (0.5, (0,))):
        clock.advance(seconds)
        for i in polls:
            closers[i]._observe(waited=False)
        counted.append({each.replica_id for each in closers[0]._decide()[2]})
    assert counted == [set(LAUNCHED), set(LAUNCHED), {*LAUNCHED, *STRANGERS}]


def test_an_error_about_a_strangers_work_ends_nobody_and_is_harm():
    """As of a function that samples, where probabilities are not finite: it ended every launched replica."""
    _, participants = fleet_of()

    def sampling(i: int, base: Base) -> Sequence[float]:
        if min(values := scores(i)(base)) < -99:
            raise ValueError("probability tensor contains either inf, nan or element < 0")
        return values

    for i in LAUNCHED:
        measure = partial(sampling, i)
        participants[i].score_strangers_by(measure, lambda base, _, measure=measure: (measure(base), [0.0] * 10))
    for each, value in zip(participants, [GOOD, GOOD, GOOD, GOOD, -1e4], strict=True):
        answer(each, value, report(share=each._attempt.replica_id, score=1.0))
    for i in LAUNCHED:
        participants[i]._closer._observe(waited=False)  # scores and reports
    assert list(left_out(close(participants[0]).commit)) == [4]


@pytest.mark.parametrize(("path", "author"), [("gather", 4), ("gather", 1), ("scatter_reduce", 4)])
def test_no_replica_fills_a_commit_with_check_records(path, author):
    """Some eighty thousand empty ones, 107 bytes each in it, would make a commit longer than one may be, and void."""
    fleet, participants = fleet_of(path=path)
    attempt = participants[author]._attempt
    about = {"replica_id": author, "attempt": 1, "claim_sha256": attempt.claim_sha256}
    for number in range(20, 100):
        record = Checked(**attempt.stamp(), round=1, leg=1, number=number, read=(), **about)
        assert attempt.writer.create(record) is not None
    commit = played(participants, [GOOD] * 5)
    most = 0 if path == "gather" and author in STRANGERS else 64 + 5
    numbers = [each.number for each in commit.checks or () if each.replica_id == author and each.number >= 20]
    assert numbers == list(range(20, most + 1)) and commit.applied
    assert_right(fleet, participants)


def test_what_strangers_say_of_their_train_times_moves_no_deadline():
    """More of them than launched replicas could end rounds after two seconds, or make them wait for months."""
    fleet, participants = fleet_of(replicas=6, invited=[2, 3, 4, 5], quorum=2)
    for each in participants:
        answer(each, GOOD, report(share=each._attempt.replica_id, score=1.0))
    for i in (2, 3, 4, 5):
        key = keys.contribution(1, i)
        said = Contribution.from_bytes(fleet.store.get(key), key)
        fleet.store.put(key, said.model_copy(update={"train_s": 1e9}).to_bytes())
    together([lambda each=each: close(each) for each in participants[:2]])  # type: ignore[misc]
    assert all(0.0 < each._closer._timing.usual_s < 1e3 for each in (participants[0], fleet.join(1)))


def test_a_replica_that_finds_the_commit_first_has_read_what_it_averages():
    """A stranger asks for the commit at once; one that always found it never compared its data with others'."""
    _, participants = fleet_of()
    for each in participants:
        answer(each, GOOD, report(share=each._attempt.replica_id, score=1.0))
    for i in (1, 2):
        participants[i]._closer._observe(waited=False)  # scores and reports
    participants[0].close()
    assert [manifest.replica_id for manifest in participants[3].close().received] == [0, 1, 2, 3, 4]


def test_scores_that_are_not_finite_are_harm():
    _, participants = fleet_of()
    for i in LAUNCHED:
        true = scores(i)
        participants[i].score_strangers_by(lambda base, true=true: [e if e > -99 else float("nan") for e in true(base)])
    assert list(left_out(played(participants, [GOOD, GOOD, GOOD, GOOD, -1e4]))) == [4]


def test_strangers_alone_are_not_averaged():
    """The launched replicas abstain, and a quorum of one would do."""
    fleet, participants = fleet_of(quorum=1)
    for i in LAUNCHED:
        participants[i]._contributor.abstain(report(share=i, score=1.0), "not today")
    for i in STRANGERS:
        answer(participants[i], GOOD)
    commit = together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]
    assert not commit.applied and commit.empty_rounds == 1
    assert {each.kind for each in commit.answers if each.replica_id in STRANGERS} == {"unverifiable"}
    assert_right(fleet, participants)


@pytest.mark.parametrize("lie", ["averages the harmful one", "leaves out the good one", "names no scores"])
def test_a_commit_that_does_not_follow_from_the_scores_is_void(lie):
    fleet, participants = fleet_of()
    for i, value in enumerate([GOOD, GOOD, GOOD, GOOD, HARMFUL]):
        answer(participants[i], value, report(share=i, score=1.0))
    for i in (1, 2):
        participants[i]._closer._observe(waited=False)  # scores and reports
    honest = close(participants[0]).commit
    why = {"averages the harmful one": (), "leaves out the good one": (3, 4), "names no scores": (4,)}[lie]
    quarantined = tuple(Quarantine(replica_id=each, reason=honest.quarantines(4)) for each in why)
    answers = tuple(
        each.model_copy(update={"averaged": each.replica_id not in why, "weight": honest.answers[0].weight})
        for each in honest.answers
    )
    changes: dict[str, Any] = {"quarantined": quarantined, "answers": answers}
    changes |= {"checks": ()} if lie == "names no scores" else {}
    fleet.engine.put(keys.commit(1), honest.model_copy(update=changes).to_bytes())
    for each in participants[1:]:
        each.close()
        last = each._tip.value.last
        assert last is not None and last.void and last.commit.empty_rounds == 1, lie
    assert verify_run(fleet.store).disagreement is not None


def test_a_commit_that_applies_a_round_of_harmful_strangers_alone_is_void():
    """Everything else in it follows from the records that it names."""
    fleet, participants = fleet_of(quorum=2)
    for i, value in ((0, GOOD), (3, HARMFUL), (4, HARMFUL)):
        answer(participants[i], value, report(share=i, score=1.0))
    for i in (1, 2):
        participants[i]._contributor.abstain(report(share=i, score=1.0), "not today")
        participants[i]._closer._observe(waited=False)  # scores and reports
    honest = close(participants[0]).commit
    answers = tuple(each for each in honest.answers if each.replica_id in STRANGERS)
    key = "its manifest"
    read = {i: Contribution.from_bytes(fleet.store.get(keys.contribution(1, i)), key) for i in STRANGERS}
    named = [ContributionReader(fleet.store).checked(honest, each) for each in honest.checks or ()]
    forged = honest.model_copy(update={"answers": answers})
    folded = fold_of_commit(
        forged, None, read, fleet.heldout, range(5), fleet.config, 0, StrangersWork(STRANGERS, named, 2)
    )
    forged = forged.model_copy(update=fields_of(folded, None))
    assert [each.replica_id for each in forged.quarantined] == list(STRANGERS)
    fleet.engine.put(keys.commit(1), forged.to_bytes())
    participants[1].close()
    last = participants[1]._tip.value.last
    assert last is not None and last.void == "it applies a round of which it averages nobody"


@pytest.mark.parametrize("strangers", [(3, 4), (2, 3, 4)])
def test_the_guard_counts_what_launched_replicas_report_alone(strangers):
    """Of strangers who report a collapse, and metrics that halt at once; also where they are more than the launched."""
    limits = {"min_steps": 1, "max_extra": {"length": 5.0}}
    states = []
    for lies in (False, True):
        fleet, participants = fleet_of(invited=list(strangers), quorum=2, guard=limits)
        for round_ in (1, 2):
            for each in participants:
                replica_id = each._attempt.replica_id
                lied = lies and replica_id in strangers
                score, in_loop = (-1e6 * round_, 1e6) if lied else (1.0, 1.0)
                dealt = deal(5, each.open.scorers).get(replica_id, [replica_id] * lied)
                scores = tuple(Score(share=share, sum=10 * score, count=10) for share in dealt)
                metrics = {name: Metric(sum=9.0 * lied, count=1) for name in ("kl_to_init", EXTRA_PREFIX + "length")}
                answer(each, GOOD, replace(report(in_loop=in_loop), scores=scores, metrics=metrics))
            commit = together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]
        assert commit.verdict is not None and commit.verdict.value == 1.0 and commit.stop == "none"
        states.append((commit.guard, commit.verdict))
        assert_right(fleet, participants)
    assert states[0] == states[1]


def test_a_stranger_without_scores_changes_no_verdict_of_the_final_evaluation():
    """The last base was compared with no training metric then, and an alarm about it waited for a further round."""
    verdicts = []
    for abstains in (False, True):
        fleet, participants = fleet_of(rounds=1)
        for score in (1.0, -1e6):
            for each in participants:
                dealt = deal(5, each.open.scorers).get(each._attempt.replica_id, [])
                scores = tuple(Score(share=share, sum=10 * score, count=10) for share in dealt)
                in_loop = None if each.open.final_evaluation else Metric(sum=30.0, count=30)
                said = answer(each, GOOD, replace(report(), scores=scores, in_loop=in_loop))
            if abstains and said.kind == "scores":
                absent = said.model_copy(update={"kind": "abstention", "reason": "not today"})
                fleet.engine.put(keys.contribution(said.round, said.replica_id), absent.to_bytes())
            commit = together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]
        assert commit.stop == "completed"
        verdicts.append(commit.verdict)
        assert_right(fleet, participants)
    assert verdicts[0] == verdicts[1] and verdicts[0] is not None and verdicts[0].in_loop == 1.0


def test_a_stranger_that_was_left_out_drops_that_work():
    _, participants = fleet_of()
    commit = played(participants, [GOOD, GOOD, GOOD, GOOD, HARMFUL])
    said = answer(participants[4], GOOD)
    assert commit.quarantines(4) and [each.round for each in said.dropped] == [1] and len(said.origins) == 1


class Noisy(torch.nn.Module):
    """A model with a buffer that counts forward passes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, item: int) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return torch.nn.functional.dropout(self.weight + item, training=self.training).sum() + 0.0 * torch.rand(())


def heldout(model: torch.nn.Module, items: Sequence[int]) -> list[float]:
    return [float(model(item)) for item in items]


def trained(invited: list[int], gradients: Sequence[float]) -> tuple[list[Commit], list[float], list[list[int]]]:
    """Whole sessions of one round. Returns its commits, what each model counted, and the shares that each scored."""
    fleet = Fleet(replicas=3, rounds=1, sync_every=2, invited=invited, aggregate="mean", guard="off")
    models = [Noisy() for _ in gradients]

    def part(i: int) -> None:
        def gradient(batch: int) -> float:
            models[i](1)
            return gradients[i] + 0.01 * (7 * i + batch)

        given = {"heldout": heldout, "heldout_items": list(range(30)), "in_loop": "reward"}
        constant_steps(context_of(fleet, i, SystemClock()), models[i], gradient, lr=0.1, **given)

    together([lambda i=i: part(i) for i in range(len(gradients))])  # type: ignore[misc]
    assert verify_run(fleet.store).disagreement is None
    said = [Contribution.from_bytes(fleet.store.get(keys.contribution(1, i)), "its own") for i in range(3)]
    return fleet.commits(), [float(each.passes) for each in models], [[e.share for e in each.scores] for each in said]


def test_sessions_score_strangers_and_train_as_without():
    """Bases and buffers are those of a run without strangers, where all of them are averaged."""
    commits, passes, scored = trained([2], [-1.0, -1.0, -1.0])
    without, usual, by_all = trained([], [-1.0, -1.0, -1.0])
    assert scored == [[0, 2], [1], []] and by_all == [[0], [1], [2]]
    assert commits[0].checks and not commits[0].quarantined and without[0].checks is None
    assert commits[1].base_digest == without[1].base_digest and passes == usual
    harmed, *_ = trained([2], [-1.0, -1.0, 2.0])
    assert [each.replica_id for each in harmed[0].quarantined] == [2]


class Remembering(torch.nn.Module):
    """A model that scores a training item by the parameter of its number, and a held-out one by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64))

    def score(self, item: str) -> float:
        number = int(item)
        return float(self.weight[number] if number < len(self.weight) else self.weight.mean() * number)


@pytest.mark.parametrize("trains_on", ["its share", "other items"])
def test_sessions_tell_who_did_not_train_on_the_data_dealt_to_it(trains_on):
    """The harm that its work does to held-out items is nobody's: each raises as many parameters by as much."""
    fleet = Fleet(replicas=4, rounds=5, sync_every=2, invited=[3], deal="open", aggregate="mean", guard="off")
    batches = [[str(4 * i + j) for j in range(4)] for i in range(16)]
    given = {"heldout": lambda model, items: [model.score(each) for each in items], "in_loop": "reward"}
    given |= {"heldout_items": [str(100 + i) for i in range(32)], "items_of": list}

    def part(i: int) -> None:
        model = Remembering()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context_of(fleet, i, SystemClock()).attach(model, optimizer, **given) as session:
            for step, batch in enumerate(session.batches(batches)):
                gradient = torch.zeros(64)
                for number in map(int, batch):
                    gradient[(number + (32 if i == 3 and trains_on != "its share" else 0)) % 64] = -1.0 - 0.01 * number
                model.weight.grad = gradient
                optimizer.step()
                session.observe(reward=float(step))

    together([lambda i=i: part(i) for i in range(4)])  # type: ignore[misc]
    out = [[each.replica_id for each in commit.quarantined] for commit in fleet.commits()]
    assert out == ([[]] * 6 if trains_on == "its share" else [[], [], [3], [3], [3], []])
    if trains_on != "its share":
        assert "does not show the data dealt to it" in fleet.commits()[2].quarantined[0].reason
    assert verify_run(fleet.store).disagreement is None


def test_contributions_are_compared_with_the_last_ones_of_their_authors_and_of_launched_replicas():
    fleet, participants = fleet_of(rounds=3)
    for values in ([1.0, 1.0, 1.0, 1.0, -2.0], [1.0, -1.0, 1.0, 1.0, -3.0]):
        commit = played(participants, values)
    found = {}
    for named in commit.checks or ():
        for each in ContributionReader(fleet.store).checked(commit, named).scored or ():
            likes = each.again, each.again_own, each.like_own, each.like_other
            found[named.replica_id, each.replica_id] = tuple(None if like is None else round(like, 6) for like in likes)
    turned = {1}  # the launched replica that sends the opposite of what all have sent
    own = {i: -1.0 if i in turned else 1.0 for i in LAUNCHED}
    assert found == {(i, s): (1.0, own[i], like, own[i]) for i in LAUNCHED for s, like in ((3, 1.0), (4, -1.0))}
    guard: Any = commit.guard
    assert guard["strangers"]["unlike"] == {"3": [0.0, 1.0], "4": pytest.approx([2.0, 1.0])}
    assert_right(fleet, participants)
