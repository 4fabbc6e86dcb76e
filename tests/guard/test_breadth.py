"""`Breadth` and lying replicas: a quarter of the shares neither halts a healthy run nor hides a fall for long."""

import json
import math
import random
from collections.abc import Callable

import pytest

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import fold
from diloco_orchestrator.guard.channels.breadth import Breadth
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.protocol.records import HeldoutSet, Metric, Score

EIGHT = HeldoutSet(metric="reward", shares=(60,) * 8, digest="0" * 64)
SD = 0.02  # of all shares together
LIE_FROM = 60


class Noise:
    """AR(1) noise of autocorrelation .5."""

    def __init__(self, rng: random.Random, sd: float) -> None:
        self.rng, self.sd, self.last = rng, sd, rng.gauss(0, sd)

    def next(self) -> float:
        self.last = 0.5 * self.last + math.sqrt(0.75) * self.rng.gauss(0, self.sd)
        return self.last


def halted(seed: str, lie: Callable[[float, int], float] | None, rate: float, rounds: int) -> int:
    """The round in which a run of eight replicas halts, 0 if it does not. From round `LIE_FROM` on two of them send
    `lie(mean of the honest, rounds since)`, and the model's score falls by `rate` a round."""
    rng, state, config = random.Random(seed), None, GuardConfig()
    shares, training = [Noise(rng, SD * math.sqrt(8)) for _ in range(8)], Noise(rng, SD)
    for round_ in range(1, rounds + 1):
        since = max(round_ - LIE_FROM, 0)
        means = [0.5 - rate * since + share.next() for share in shares]
        if lie is not None and since:
            means[:2] = [lie(sum(means[2:]) / 6, since)] * 2
        scores = [Score(share=i, sum=60 * mean, count=60) for i, mean in enumerate(means)]
        metric = Metric(sum=0.5 + rate * since + training.next(), count=1)
        result = fold(state, config, EIGHT, RoundReports(round_, scores, {0: metric}))
        state = result.state
        if result.verdict.fire:
            return round_
    return 0


@pytest.mark.slow
def test_a_quarter_of_liars_does_not_halt_healthy_runs_more_often_than_honest_noise():
    """24,000 rounds of liars that report too little by far: about 11 halts for .45 in 1000 (docs/kill-switch.md); 24 or
    more have a chance of 1e-3. Without `Breadth` it is 9 in 1000, and all 80 runs halt."""
    halts = [halted(f"down {i}", lambda mean, since: mean - 1000, 0.0, 360) for i in range(80)]
    assert sum(at > 0 for at in halts) < 24


def test_liars_that_report_too_little_do_not_halt_runs_of_a_hundred_rounds():
    """1000 rounds of lies, .45 halts expected: 5 or more have a chance of 2e-4. Without `Breadth` there are ten."""
    halts = [halted(f"quick {i}", lambda mean, since: mean - 1000, 0.0, 160) for i in range(10)]
    assert sum(at > 0 for at in halts) < 5


@pytest.mark.parametrize(("rate", "within"), [(0.02, 12), (0.005, 34)])
def test_liars_that_hide_a_fall_delay_the_halt_by_less_than_a_factor_of_two(rate, within):
    """Label: 9.8 and 28.7 rounds, against 6.5 and 15.5 of honest replicas; the mean of 8 varies by 10 %, so that a
    fifth more has a chance under 3e-2."""
    delays = []
    for i in range(8):
        at = halted(f"hide {rate} {i}", lambda mean, since: mean + 1000, rate, 160)
        delays += [at - LIE_FROM] if at > LIE_FROM else []
        assert at
    assert len(delays) >= 6 and sum(delays) / len(delays) < within


# -- its arithmetic ---------------------------------------------------------------------------------------------------


def after(rounds: list[list[float]], calm: int) -> Breadth:
    """After rounds of gains by share, of which the first `calm` ones say nothing."""
    breadth = Breadth(parts=[{}])
    for index, gains in enumerate(rounds):
        breadth = Breadth.restore(json.loads(json.dumps(breadth.state())))
        breadth.begin_round({str(share): gain for share, gain in enumerate(gains) if not math.isnan(gain)})
        breadth.add(0, zero=index < calm)
        breadth.learn(calm=index < calm)
    return breadth


def test_a_fall_of_all_shares_is_broad_and_one_of_a_single_share_is_not():
    calm = [[0.1 * i for i in range(8)]] * 4  # shares differ for good, which is no fall
    everyone = after([*calm, *[[0.1 * i - 1 for i in range(8)]] * 5], 4)
    single = after([*calm, *[[0.1 * i - 8 * (i == 6) for i in range(8)]] * 5], 4)
    assert everyone.is_broad(0, 10.5, 0.5, 10.0)
    assert not single.is_broad(0, 10.5, 0.5, 10.0) and 6 in single.most(0)


def test_two_shares_that_rise_make_the_others_look_few_but_do_not_hide_a_large_fall():
    breadth = after([[0.0] * 8] * 4 + [[0.0] * 2 + [-30.0] * 6] * 5, 4)
    assert breadth.is_broad(0, 23.0, 0.5, 10.0)
    few_fell = after([[0.0] * 8] * 4 + [[0.0] * 6 + [-30.0] * 2] * 5, 4)
    assert not few_fell.is_broad(0, 23.0, 0.5, 10.0)


def test_parts_begin_anew_where_the_statistic_is_zero_and_missing_shares_add_nothing():
    one_down, calm = [0.0] * 7 + [-8.0], [0.0] * 8
    assert after([calm, one_down, one_down, calm], 4).is_broad(0, 10.5, 0.5, 10.0)
    missing = [0.0] * 7 + [math.nan]
    assert after([calm, *[missing] * 5], 1).is_broad(0, 10.5, 0.5, 10.0)


def test_with_fewer_than_four_shares_nothing_says_who_is_wrong():
    assert after([[0.0] * 3] + [[0.0, 0.0, -9.0]] * 5, 1).is_broad(0, 10.5, 0.5, 10.0)
