"""Falls, noise and sentences of the default rule: what heals or is sparse does not halt, and verdicts say what is."""

import math
import random
import re

import pytest

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import Evidence, RoundReports, SequentialGuard, Verdict, fold
from diloco_orchestrator.guard.channels.falls import BestLevel
from diloco_orchestrator.guard.channels.hacking_gap import HackingGap
from diloco_orchestrator.guard.channels.noise import Noise
from diloco_orchestrator.guard.sequential_v2 import SequentialV2
from diloco_orchestrator.guard.sequential_v3 import SequentialV3
from diloco_orchestrator.guard.sequential_v4 import SequentialV4
from diloco_orchestrator.protocol.records import Score
from diloco_orchestrator.protocol.start_records import HeldoutSet


def folded(held: list[float], trained: list[float] | None = None, **fields: float) -> tuple[int, Verdict]:
    """The round of the halt and its verdict; (0, the last verdict) without one."""
    guard, state = SequentialGuard(**fields), None  # type: ignore[arg-type]
    for t, score in enumerate(held):
        state, verdict = guard.fold(
            state, Evidence(round=t + 1, heldout=score, in_loop=trained[t] if trained else None)
        )
        if verdict.fire:
            return t + 1, verdict
    return 0, verdict


def noisy(levels: list[float], sd: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(level, sd) for level in levels]


@pytest.mark.parametrize("tau", [1.5, 4.0])
@pytest.mark.parametrize("height", [0.05, 0.3])
def test_a_bump_that_heals_does_not_halt_and_one_that_stays_does(tau, height):
    """Loss, noise of .005: the bump is 10 and 60 standard deviations high."""
    for seed in range(4):
        heals = [-2.0 - height * math.exp(-(t - 50) / tau) * (t >= 50) for t in range(110)]
        assert not folded(noisy(heals, 0.005, seed))[0]
        stays = [-2.0 - height * (t >= 50) for t in range(110)]
        assert 50 < folded(noisy(stays, 0.005, seed))[0] <= 60


@pytest.mark.parametrize("size", [10.0, 1e18])
def test_a_model_that_exploded_halts_though_its_loss_halves_every_three_rounds(size):
    """A loss that recovers by a share of what is missing in each round, and is worse than the first one for ever."""
    for seed in range(3):
        levels = [-0.7 + 0.015 * min(t, 23) - size * 0.8 ** max(t - 23, 0) * (t >= 23) for t in range(46)]
        assert 23 < folded(noisy(levels, 0.002, seed))[0] <= 30


def test_a_level_of_a_burst_of_noise_is_none_to_fall_from():
    """Noise that grows from 1 to 5 is known ten rounds later, and a level reached then is stored with it."""
    noise, best = Noise(), BestLevel()
    for model in range(50):
        noise.add((-1.0) ** model * (5.0 if model >= 40 else 1.0) + 0.001 * model)
        best.learn(model, noise.last, noise)
    assert 1.5 * noise.bend < noise.present() <= 5 * noise.bend
    best.best[1] = None
    best.learn(50, noise.last, noise)
    assert best.best[1][1] == noise.present()


def test_a_few_answers_of_fixed_items_are_no_fall():
    """Of 64 items, 40 are right and later 37 or 20; one changes now and then."""
    level = [40 + (t % 3 == 0) for t in range(60)]
    assert not folded([(each - 3 * (t >= 30)) / 64 for t, each in enumerate(level)])[0]
    assert 30 < folded([(each - 20 * (t >= 30)) / 64 for t, each in enumerate(level)])[0] <= 38


def test_a_plateau_after_a_fast_climb_is_not_halted():
    """By chance, the best of its rounds is above its level as far as on a plateau from the first round on."""
    for seed in (7, 8, 10):
        assert not folded(noisy([10.0 * (t >= 12) for t in range(250)], 1.0, seed))[0]


@pytest.mark.parametrize("chance", [0.01, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_sparse_score_is_not_halted(chance):
    """Right answers of 16 items: most rounds have none."""
    rng = random.Random(f"sparse {chance}")
    for _ in range(4):
        assert not folded([sum(rng.random() < chance for _ in range(16)) / 16 for _ in range(200)])[0]


def test_a_fall_after_a_climb_halts_though_it_stays_above_the_first_score():
    for seed in range(4):
        levels = [0.5 - 0.5 * math.exp(-min(t, 30) / 12) - 0.02 * min(max(t - 30, 0), 10) for t in range(90)]
        assert 31 < folded(noisy(levels, 0.02, seed))[0] <= 55


def test_a_gap_that_grows_while_the_newest_block_is_the_best_does_not_halt():
    rising = noisy([0.3 + 0.002 * t for t in range(120)], 0.002, 1)
    assert not folded(rising, [0.3 + 0.02 * t for t in range(120)])[0]
    channel, noise = HackingGap(), Noise()
    for t in range(60):
        channel.learn(t, 0.01 * t, 0.1 * t, noise)
    noise.bend = 0.001
    noise.count = 60
    channel.reference = [0.0, 0.0, 0]
    measures = 90.0, 0.9, noise, [0.3], 0.0, 0.0, 5.0, 10.0
    assert not any(channel.judge(60 + t, 0.6 + 0.01 * t, *measures) for t in range(20))
    assert any(channel.judge(90 + t, 0.3, *measures) for t in range(20))


@pytest.mark.parametrize("seed", range(12))
def test_every_number_of_a_sentence_about_a_fall_follows_from_the_scores(seed):
    """Random walks, climbs and falls; the sentence is compared with the series that it is about."""
    rng = random.Random(f"words {seed}")
    level, slope, held = rng.uniform(-3, 3), rng.uniform(0, 0.05), []
    for t in range(120):
        level += slope if t < 40 else -rng.uniform(0.0, 0.1)
        held.append(rng.gauss(level, 0.05))
    round_, verdict = folded(held)
    assert round_
    words = re.match(
        r"the held-out score is below its best level: (\S+) in the mean of the last 3 rounds, (\S+) sigmas of (\S+) "
        r"below the (\S+) that it has surely reached \(rounds (\d+) to (\d+)\)\. What adds up since round (\d+) is "
        r"(\S+), and halts above (\S+)\. Roll back to round (\d+) and",
        verdict.reason,
    )
    assert words, verdict.reason
    now, sigmas, sigma, reached = (float(words[i]) for i in range(1, 5))
    first, last, since, back = (int(words[i]) for i in (5, 6, 7, 10))
    assert now == pytest.approx(sum(held[round_ - 3 : round_]) / 3, rel=2e-3, abs=2e-3)
    assert sigmas == pytest.approx((reached - now) / sigma, rel=0.1, abs=0.2)
    block = held[first : last + 1]  # the score of round r is of the model after round r - 1
    assert reached < max(block)
    assert held[back] == max(held[:round_]) == held[verdict.rollback_to or 0] and since < round_
    assert float(words[8]) > float(words[9])


@pytest.mark.parametrize(("stays", "words"), [(0.05, "its best level: "), (0.4, "step down: ")])
def test_a_halt_of_a_loss_names_losses_as_they_were_reported(stays: float, words: str):
    """Scores are folded with the opposite sign: a loss of .31 is no score of -.31 to whoever reported it."""
    losses = noisy([0.3 + stays * (t >= 40) for t in range(80)], 0.01, 4)
    heldout = HeldoutSet(metric="loss", shares=(10,), digest="0" * 64)
    state, config, verdict = None, GuardConfig(), None
    for t, loss in enumerate(losses):
        result = fold(state, config, heldout, RoundReports(t + 1, [Score(share=0, sum=-loss * 10, count=10)]))
        state, verdict = result.state, result.verdict
        if verdict.fire:
            break
    assert verdict is not None and verdict.fire and words in verdict.reason
    found = re.search(r"(\S+) in the mean.* (?:above|lie \S+ above) ", verdict.reason)
    assert found, verdict.reason
    rounds = 3 if stays < 0.1 else int(re.search(r"the last (\d+) held-out", verdict.reason)[1])  # type: ignore[index]
    assert float(found[1]) == pytest.approx(sum(losses[: t + 1][-rounds:]) / rounds, rel=1e-3)
    reached = re.search(r"the (\S+) that it has surely reached", verdict.reason)
    assert reached is None or min(losses) < float(reached[1]) < 0.31
    assert "below" not in verdict.reason.split("What adds up")[0]


@pytest.mark.parametrize("rule", [SequentialV2, SequentialV3, SequentialV4])
def test_rules_before_keep_the_words_that_their_commits_have(rule: type[SequentialGuard]):
    """A commit that is derived again has the same bytes, its reason included."""
    guard, state = rule.of(GuardConfig(), HeldoutSet(metric="loss", shares=(10,), digest="0" * 64)), None
    for t, score in enumerate(noisy([-0.3 - 0.05 * (t >= 40) for t in range(80)], 0.01, 4)):
        state, verdict = guard.fold(state, Evidence(round=t + 1, heldout=score))
        if verdict.fire:
            break
    assert verdict.fire and re.search(r"-0\.3\d+ in the mean", verdict.reason)


def test_what_the_rule_can_judge_is_said_before_it_can_and_after():
    state, config, guard = None, GuardConfig(), SequentialGuard()
    assert SequentialGuard.outlook(None, config) == "needs 8 more rounds to know the noise of the held-out score"
    for t, score in enumerate(noisy([0.5] * 60, 0.01, 3), start=1):
        state, _ = guard.fold(state, Evidence(round=t, heldout=score))
        words = SequentialGuard.outlook(state, config)
        if t < 8:
            assert words.startswith(f"needs {8 - t} more round")
    found = re.fullmatch(
        r"would halt within 15 rounds of a held-out score that stays (\S+) worse than its best level, that of rounds "
        r"(\d+) to (\d+) \(noise (\S+)\)",
        words,
    )
    assert found and 0.01 < float(found[1]) < 0.05 and 0.008 < float(found[4]) < 0.03
    assert 0 <= int(found[2]) < int(found[3]) < 60


@pytest.mark.parametrize("sd", [0.01, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_score_that_stays_worse_by_what_the_outlook_says_halts_within_fifteen_rounds(sd):
    """A fall of that size, without noise after it, halts in time; half of it later or never."""
    for seed in range(6):
        guard, state, held = SequentialGuard(), None, noisy([0.5] * 60, sd, seed)
        for t, score in enumerate(held, start=1):
            state, verdict = guard.fold(state, Evidence(round=t, heldout=score))
            assert not verdict.fire
        words = re.match(
            r"would halt within 15 rounds of a held-out score that stays (\S+) worse than its best level, that of "
            r"rounds (\d+) to (\d+)",
            SequentialGuard.outlook(state, GuardConfig()),
        )
        assert words
        block = held[int(words[2]) : int(words[3]) + 1]
        level = (sum(block) - max(block) - min(block)) / (len(block) - 2)
        delays = []
        for part in (1.1, 0.5):
            rounds = folded([*held, *[level - part * float(words[1])] * 40])[0]
            delays.append(rounds - 60 if rounds else 40)
        assert delays[0] <= 17 and delays[1] > delays[0]


@pytest.mark.parametrize("slope", [0.04, 0.1, 0.3])
def test_a_fall_that_is_smaller_than_a_round_of_the_climb_before_it_halts(slope):
    """The mean of the last rounds of a climb lies below all scores after such a fall; the end of the climb does not."""
    for seed in range(3):
        levels = [slope * min(t, 40) - (0.09 if t > 40 else 0.0) for t in range(140)]
        assert 41 < folded(noisy(levels, 0.01, seed))[0] <= 100


@pytest.mark.parametrize("slope", [0.1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.02, 1.0))])
def test_a_climb_that_stops_does_not_halt(slope):
    """Noise of .01; the line through a climb and what follows overshoots the level that was reached."""
    halts = [folded(noisy([slope * min(t, 30) for t in range(100)], 0.01, seed))[0] for seed in range(12)]
    assert sum(at > 0 for at in halts) <= 1
