"""The per-replica guard: whom it leaves out, how soon, how often by mistake, and that a commit says so to everybody."""

import math
import random
from dataclasses import replace

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.guard.per_replica import WARM_UP, LocalGain, fold_local, local_gain, threshold
from diloco_orchestrator.guard.registry import first_state
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution, Quarantine, Score
from diloco_orchestrator.protocol.verdict import VerdictKind
from diloco_orchestrator.run_log.run_log import RunLog

NOISE = 0.01


def left_out(
    replicas: int,
    rounds: int,
    seed: int,
    fall: dict[int, float] | None = None,
    since: int = 10**9,
    ar: float = 0.0,
    harder: float = 0.03,
) -> list[tuple[int, ...]]:
    """Who is left out, round by round. `fall`: sigmas that a replica's gain loses from round `since` on."""
    draw = random.Random(seed)
    level = [draw.gauss(0, harder) for _ in range(replicas)]  # some replicas have harder data
    noise, state, found = [0.0] * replicas, None, []
    for round_ in range(1, rounds + 1):
        noise = [ar * each + math.sqrt(1 - ar * ar) * draw.gauss(0, NOISE) for each in noise]
        lost = [NOISE * (fall or {}).get(i, 0.0) if round_ >= since else 0.0 for i in range(replicas)]
        gains = [LocalGain(i, 0.5 / round_ + level[i] + noise[i] - lost[i]) for i in range(replicas)]
        state, quarantined = fold_local(state, gains)
        found.append(tuple(each.replica_id for each in quarantined))
    return found


@pytest.mark.parametrize("replicas", [4, 8, 16])
def test_one_replica_that_goes_wrong_is_left_out_within_six_rounds_and_nobody_else(replicas):
    for seed in range(5):
        found = left_out(replicas, 60, seed, {2: 6.0}, since=40)
        first = next(i for i, ids in enumerate(found, 1) if ids)
        assert 40 < first <= 46 and set(found) == {(), (2,)}


def test_a_replica_whose_training_explodes_is_left_out_at_once():
    found = left_out(4, 20, 0, {1: 500.0}, since=18)
    assert found[16:] == [(), (1,), (1,), (1,)]


def test_one_bad_round_alone_leaves_nobody_out():
    draw, state = random.Random(2), None
    for round_ in range(30):
        gains = [LocalGain(i, draw.gauss(0, NOISE) - 0.16 * (i == 1 and round_ == 20)) for i in range(4)]
        state, quarantined = fold_local(state, gains)
        assert quarantined == (), round_


def test_a_replica_that_is_well_again_takes_part_again():
    found = left_out(4, 40, 0, {1: 6.0}, since=20)
    assert found[-1] == (1,)
    draw, state, ids = random.Random(1), None, []
    for round_ in range(80):
        lost = 0.06 if 20 <= round_ < 30 else 0.0
        gains = [LocalGain(i, draw.gauss(0, NOISE) - lost * (i == 1)) for i in range(4)]
        state, quarantined = fold_local(state, gains)
        ids.append([each.replica_id for each in quarantined])
    assert ids[29] == [1] and ids[-1] == []


@pytest.mark.parametrize("factor", [0.2, 2.0, 5.0])
@pytest.mark.parametrize("level", [lambda t: 0.5 / t, lambda t: 0.1 if t <= 60 else 0.03], ids=["fades", "drops"])
def test_a_replica_whose_gains_differ_by_a_factor_is_not_left_out_as_all_gains_shrink(factor, level):
    """Larger steps or easier data: what it gains beyond the others shrinks with what they gain."""
    draw, state, shrunk = random.Random(f"factor {factor}"), None, 0
    for t in range(1, 121):
        gains = [LocalGain(i, level(t) * (factor if i == 0 else 1.0) + draw.gauss(0, NOISE)) for i in range(8)]
        state, quarantined = fold_local(state, gains)
        assert quarantined == (), t
    for t in range(121, 131):
        gains = [LocalGain(i, level(t) - 0.2 * (i == 0) + draw.gauss(0, NOISE)) for i in range(8)]
        state, quarantined = fold_local(state, gains)
        shrunk += [each.replica_id for each in quarantined] == [0]
    assert shrunk >= 5  # it is judged still


def shrinking(replicas: int, seed: int, rounds: int, fault: float = 0.0, first_form: bool = False) -> list[list[int]]:
    """Who is left out, where gains and their noise shrink a hundredfold within 30 rounds; replica 0 loses `fault` of
    the standard deviations of round 26's noise from that round on."""
    draw, state, found = random.Random(f"shrinking {seed}"), {} if first_form else None, []
    for t in range(1, rounds + 1):
        size = math.exp(-t / 6) + 0.01
        lost = fault * 0.1 * (math.exp(-26 / 6) + 0.01) if t >= 26 else 0.0
        gains = [LocalGain(i, size * (0.8 + draw.gauss(0, 0.1)) - lost * (i == 0)) for i in range(replicas)]
        state, quarantined = fold_local(state, gains)
        found.append([each.replica_id for each in quarantined])
    return found


@pytest.mark.parametrize("replicas", [4, 8])
def test_a_replica_that_goes_wrong_after_gains_have_shrunk_is_left_out(replicas):
    for seed in range(4):
        found = shrinking(replicas, seed, 60, fault=10.0)
        first = next(t for t, ids in enumerate(found, 1) if ids)
        assert 26 < first <= 32 and all(ids == [0] for ids in found[first - 1 :])
        assert shrinking(replicas, seed, 60) == [[]] * 60


def test_runs_that_began_when_the_noise_was_the_same_in_all_rounds_go_on_so():
    """Then the noise of the first rounds hid such a fault for dozens of rounds."""
    assert shrinking(4, 0, 40, fault=20.0, first_form=True) == [[]] * 40
    state, _ = fold_local({}, [LocalGain(i, 0.1 * i) for i in range(4)])
    assert sorted(state) == ["out", "rounds", "spread", "sums", "usual"] and len(state["usual"]["0"]) == 6
    assert first_state({"rule": "sequential-v9", "local": state}, "sequential") == {
        "rule": "sequential-v9",
        "local": {},
    }
    assert first_state({"local": state}, "heldout") == {"local": {}}
    now, _ = fold_local(None, [LocalGain(i, 0.1 * i) for i in range(4)])
    assert first_state({"rule": "off-v1", "local": now}, "off") is None


def test_no_more_than_a_quarter_is_left_out_and_the_worst_first():
    found = left_out(8, 40, 3, {0: 8.0, 1: 9.0, 2: 40.0}, since=20)
    assert max(map(len, found)) == 2 and all(2 in ids for ids in found if ids)


def test_local_scores_that_are_not_finite_leave_a_contribution_out_from_the_first_round_on():
    gains = [LocalGain(0, 0.1), LocalGain(1, math.nan), LocalGain(2, 0.1), LocalGain(3, 0.1)]
    _, quarantined = fold_local(None, gains)
    assert quarantined == (Quarantine(replica_id=1, reason="its local parameters have no finite held-out score"),)


def test_among_fewer_than_four_nobody_is_left_out():
    gains = [LocalGain(0, 0.1), LocalGain(1, math.nan), LocalGain(2, 0.1)]
    assert fold_local(None, gains)[1] == ()
    assert set(left_out(3, 40, 0, {1: 500.0}, since=20)) == {()}


def test_the_threshold_grows_with_the_fleet_so_that_its_error_rate_does_not():
    assert threshold(4) < threshold(8) < threshold(64)


def test_a_gain_is_taken_over_the_shares_that_both_models_were_scored_on():
    base = [Score(share=0, sum=1.0, count=10), Score(share=1, sum=None, count=10)]
    local = [Score(share=0, sum=3.0, count=10), Score(share=1, sum=5.0, count=10)]
    assert local_gain(7, base, local) == LocalGain(7, pytest.approx(0.2))
    assert local_gain(7, base, local[1:]) is None
    broken = local_gain(7, base, [Score(share=0, sum=None, count=10)])
    assert broken is not None and math.isnan(broken.gain)


@pytest.mark.slow
@pytest.mark.parametrize("ar", [0.0, 0.5])
@pytest.mark.parametrize("replicas", [4, 8, 16])
def test_a_healthy_fleet_loses_less_than_one_contribution_by_mistake_in_a_thousand_rounds(replicas, ar):
    """36,000 rounds. Were the rate 1 in 1000, fewer than 24 would be seen with probability .0025 (Poisson, mean 36)."""
    wrong = 0
    for seed in range(120):
        found = left_out(replicas, 300, seed, ar=ar)
        wrong += sum(len(set(now) - set(before)) for before, now in zip([(), *found], found, strict=False))
    assert wrong < 24


# -- in the commit ----------------------------------------------------------------------------------------------------

BAD, SINCE = 2, WARM_UP + 2


def bad_round(fleet: Fleet, participants: list, round_: int, rogue_gain: float) -> None:
    """A round in which everybody gains a little more than nothing, and replica `BAD` gains `rogue_gain`."""
    reports = []
    for i in range(4):
        noise = 0.001 * math.sin(7.0 * round_ + 3.0 * i)
        gain = rogue_gain if i == BAD else 0.01 + noise
        local = (Score(share=i, sum=10 * (0.5 + gain), count=10),)
        reports.append(replace(report(share=i, score=0.5), local_scores=local))
    play(participants, [1.0, 1.0, 100.0, 1.0] if rogue_gain < 0 else [1.0] * 4, reports)


@pytest.fixture(scope="module")
def quarantined() -> Fleet:
    """A run in which the contribution of replica `BAD` to round `SINCE` is left out."""
    fleet = Fleet(replicas=4, rounds=SINCE + 1, quorum=None, scored=True, guard={"per_replica": True, "min_steps": 50})
    participants = fleet.join_all()
    for round_ in range(1, SINCE + 2):
        bad_round(fleet, participants, round_, -5.0 if round_ == SINCE else 0.01 + 0.001 * math.sin(5.0 * round_))
    return fleet


def test_the_commit_leaves_the_contribution_out_with_its_reason(quarantined):
    commit = quarantined.commits()[SINCE - 1]
    assert [a.replica_id for a in commit.answers if a.averaged] == [0, 1, 3] and commit.applied
    (left,) = commit.quarantined
    assert left.replica_id == BAD and "sigmas less held-out score than it used to" in left.reason
    verdict = commit.verdict
    assert verdict is not None and not verdict.fire and verdict.kind is VerdictKind.QUARANTINE
    assert verdict.replica == BAD and verdict.reason.startswith(
        f"replica {BAD} is left out of round {SINCE}: its local"
    )


def test_what_was_left_out_is_never_carried_into_a_later_average(quarantined):
    key = keys.contribution(SINCE + 1, BAD)
    after = Contribution.from_bytes(quarantined.store.get(key), key)
    assert [origin.round for origin in after.origins] == [SINCE + 1]
    assert [origin.round for origin in after.dropped] == [SINCE]
    again = quarantined.join(BAD, attempt=2)
    assert again.digest == quarantined.join(0, attempt=2).digest


def test_verify_judges_a_run_that_began_with_the_first_form_by_that():
    """The commits of an earlier version have no spread of recent rounds, and are derived again without it."""
    fleet = Fleet(replicas=4, rounds=2, quorum=None, scored=True, guard={"per_replica": True})
    bad_round(fleet, fleet.join_all(), 1, 0.01)
    assert verify_run(fleet.store).agrees
    said = [Contribution.from_bytes(fleet.store.get(key), key) for key in (keys.contribution(1, i) for i in range(4))]
    gains = [local_gain(each.replica_id, each.scores, each.local_scores) for each in said]
    (commit,) = fleet.commits()
    assert commit.guard is not None and "recent" in commit.guard["local"]
    first_form = {**commit.guard, "local": fold_local({}, [each for each in gains if each])[0]}
    fleet.engine.put(keys.commit(1), commit.model_copy(update={"guard": first_form}).to_bytes())
    assert verify_run(fleet.store).agrees


def test_verify_derives_who_is_left_out(quarantined):
    assert verify_run(quarantined.store).agrees
    commit = quarantined.commits()[SINCE - 1]
    data = quarantined.store.get(keys.commit(SINCE))
    try:
        quarantined.engine.put(keys.commit(SINCE), commit.model_copy(update={"quarantined": ()}).to_bytes())
        found = verify_run(quarantined.store).disagreement
        assert (
            found is not None
            and found.key == keys.commit(SINCE)
            and found.words.startswith("is void: its who is averaged")
        )
    finally:
        quarantined.engine.put(keys.commit(SINCE), data)


def test_a_run_without_the_per_replica_guard_leaves_nobody_out_and_keeps_no_state_of_it():
    fleet = Fleet(replicas=4, rounds=5, scored=True)
    participants = fleet.join_all()
    bad_round(fleet, participants, 1, -5.0)
    commit = fleet.commits()[0]
    assert commit.quarantined == () and commit.guard is not None and "local" not in commit.guard
    assert RunLog(fleet.store).run.config.guard.per_replica is False
