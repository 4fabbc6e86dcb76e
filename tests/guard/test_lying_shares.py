"""`FallingShares` and lying replicas: a quarter of the shares neither halts a healthy run nor hides a fall for long."""

import json
import math
import random
from collections.abc import Callable

import pytest

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import fold
from diloco_orchestrator.guard.channels.outliers import FallingShares
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.protocol.records import Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet

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
    """24,000 rounds of liars that report too little by far: about 11 halts for .45 in 1000
    (docs/inside/kill-switch-figures.md); 24 or more have a chance of 1e-3. Without `FallingShares` all 80 runs halt."""
    halts = [halted(f"down {i}", lambda mean, since: mean - 1000, 0.0, 360) for i in range(80)]
    assert sum(at > 0 for at in halts) < 24


def test_liars_that_report_too_little_do_not_halt_runs_of_a_hundred_rounds():
    """1000 rounds of lies, .45 halts expected: 5 or more have a chance of 2e-4. Without it there are ten."""
    halts = [halted(f"quick {i}", lambda mean, since: mean - 1000, 0.0, 160) for i in range(10)]
    assert sum(at > 0 for at in halts) < 5


@pytest.mark.parametrize(("rate", "within"), [(0.02, 13), (0.005, 34)])
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


def after(rounds: list[list[float]]) -> tuple[list[int], float, float]:
    """The shares that are named after rounds of gains by share, what the mean lost by them, and what is added to it
    for those left out; NaN: not scored."""
    shares, found = FallingShares(), ([], 0.0, 0.0)
    for gains in rounds:
        shares = FallingShares.restore(json.loads(json.dumps(shares.state())))
        found = shares.judge({str(share): gain for share, gain in enumerate(gains) if not math.isnan(gain)})
    return found


def noisy(levels: list[float], rounds: int, seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.gauss(level, 0.1) for level in levels] for _ in range(rounds)]


def test_a_fall_of_all_shares_counts_and_one_of_two_of_eight_does_not():
    levels = [0.1 * i for i in range(8)]  # shares differ for good, which is no fall
    calm, everyone = noisy(levels, 40, 1), noisy([level - 1 for level in levels], 20, 2)
    two = noisy([level - (i in (3, 6)) for i, level in enumerate(levels)], 20, 3)
    assert after([*calm, *everyone])[1] < 0.05
    named, lost, moved = after([*calm, *two])
    assert moved == 0.0
    assert named == [3, 6] and lost == pytest.approx(0.25, abs=0.1)  # 2 of 8, over the 6 that are left


def test_an_honest_share_is_not_named_and_one_that_falls_by_twenty_standard_deviations_is():
    """Fleets of 8 whose shares vary by one to three hundredths, over 150 rounds of AR(1) .5 noise."""
    for seed in range(6):
        rng = random.Random(f"named {seed}")
        noises, shares = [Noise(rng, rng.uniform(0.01, 0.03)) for _ in range(8)], FallingShares()
        for round_ in range(150):
            gains = {str(i): noise.next() for i, noise in enumerate(noises)}
            assert shares.judge(gains)[0] == [], round_
        for _ in range(20):
            named = shares.judge({str(i): noise.next() - 0.6 * (i == 5) for i, noise in enumerate(noises)})[0]
        assert named == [5]


def test_a_share_that_only_gains_less_than_the_others_is_not_named():
    slower = [[0.1 * t] * 3 + [0.1 * t - 0.05 * max(0, t - 40)] for t in range(60)]
    rows = [
        [g + noise for g, noise in zip(row, noisy([0.0] * 4, 1, t)[0], strict=True)] for t, row in enumerate(slower)
    ]
    assert not any(after(rows[:rounds])[0] for rounds in range(40, 61))


def test_shares_that_rise_or_vary_most_are_left_out_of_the_mean():
    levels = [0.1 * i for i in range(8)]
    calm = noisy(levels, 40, 1)
    up = noisy([level + (i in (3, 6)) for i, level in enumerate(levels)], 20, 2)
    assert after([*calm, *up])[2] == pytest.approx(-0.25, abs=0.1)  # they raised the mean by two eighths
    assert abs(after([*calm, *noisy(levels, 20, 3)])[2]) < 0.05
    swings = [[g + (-1) ** t * (i in (3, 6)) for i, g in enumerate(row)] for t, row in enumerate(noisy(levels, 20, 4))]
    assert after([*calm, *swings])[2] == pytest.approx(0.25, abs=0.1)  # in the last round both are down


def test_with_fewer_than_four_shares_nothing_says_who_is_wrong():
    assert after([*noisy([0.0] * 3, 20, 4), *noisy([0.0, 0.0, -9.0], 20, 5)]) == ([], 0.0, 0.0)


def test_shares_that_are_missing_keep_what_is_known_of_them():
    missing = [[*gains[:7], math.nan] for gains in noisy([0.0] * 8, 20, 6)]
    down = noisy([0.0] * 7 + [-1.0], 20, 7)
    assert after([*noisy([0.0] * 8, 20, 8), *missing, *down])[0] == [7]
