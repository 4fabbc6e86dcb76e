"""What norm is too large for a round, by the norms of the rounds before it."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.protocol.records import Answer, Commit, UsualNorms
from diloco_orchestrator.protocol.weights import Limit, folded, limit_of, norms_after


def config(**settings: Any) -> RunConfig:
    return make_config({"entrypoint": "m:f", "replicas": 4, **settings})


def after(*rounds: Sequence[float], fragment: int = 0, before: UsualNorms | None = None) -> UsualNorms | None:
    """The state after rounds of these norms."""
    for norms in rounds:
        before = folded(before, fragment, norms)
    return before


def factor_after(*rounds: Sequence[float], **settings: Any) -> float:
    """How many times the median is allowed to four contributions after these rounds."""
    return float(limit_of([1.0] * 4, 0, after(*rounds), config(**settings)).factor)


def test_the_state_is_the_mean_distance_to_the_median_and_the_level_of_each_fragment():
    known = after((1.0, 1.5), (1.0, 1.25, 0.5))
    assert known == UsualNorms(rounds=2, spread=0.375, levels=((0, 1.0),))
    assert after((8.0, 8.0), fragment=3, before=known) == UsualNorms(rounds=3, spread=0.25, levels=((0, 1.0), (3, 8.0)))
    assert after((1.0, 1.5), (2.0, 2.0), (4.0, 4.0)).levels == ((0, 1.9375),)


def test_sixteen_rounds_count_however_many_there_were():
    before = after(*[(1.0, 2.0)] * 40)
    assert before is not None and before.spread == 1.0
    one_more = after((1.0, 1.0), before=before)
    assert one_more is not None and one_more.spread == 1.0 - 1 / 16


def test_norms_of_who_is_not_averaged_are_none_of_the_state():
    said = [{"replica_id": i, "norm": norm, "averaged": i < 2} for i, norm in enumerate((1.0, 1.5, 100.0))]
    answers = tuple(Answer.model_construct(**each) for each in said)  # type: ignore[arg-type]
    commit = Commit.model_construct(norms=None, fragment=0, answers=answers)
    assert norms_after(commit, config(replicas=2)) == after((1.0, 1.5))
    assert norms_after(commit, config(replicas=4)) is None  # a round of two says nothing where there are more


def test_the_limit_widens_with_the_spread_of_past_rounds_and_is_no_less_than_twice_the_median():
    assert factor_after() == 2.0
    assert factor_after(*[(1.0, 1.05, 1.0, 0.97)] * 40) == 2.0
    assert factor_after(*[(1.0, 1.25, 0.8, 1.1)] * 40) == pytest.approx(3.0)
    assert factor_after(*[(1.0, 1e30, 1e-30, 1e30)] * 40) == 16.0


def test_where_nothing_says_who_is_wrong_a_norm_may_be_twice_as_many_spreads_above_the_usual_one():
    known = after(*[(1.0, 1.25)] * 40)
    assert [limit_of([1.0] * n, 0, known, config()).factor for n in (2, 3, 4)] == [5, 5, 3]


@pytest.mark.parametrize(("settings", "factor"), [({"clip_factor": 1.5}, 1.5), ({"aggregate": "agreeing_mean"}, 1.25)])
def test_a_limit_that_is_named_or_beside_directions_is_the_same_in_every_round(settings, factor):
    widened = after(*[(1.0, 1.5, 0.6, 1.4)] * 20)
    assert limit_of((1.0, 1.0), 0, widened, config(**settings)) == Limit(Fraction(1), Fraction(factor))


@pytest.mark.parametrize("replicas", [3, 4, 8])
@pytest.mark.parametrize("sent", [0.0, 1e-30, 0.5, 1.9, 3.0, 1e30])
def test_attackers_that_are_fewer_than_half_widen_no_limit_by_norms_of_their_own(replicas, sent):
    """A quarter of the norms of each round, one of three, is an attacker's."""
    attackers = max(1, replicas // 4)
    honest = [1.0, 1.1, 0.97, 1.0, 1.02, 0.95, 1.05][: replicas - attackers]
    known = after(*[[norm for norm in [*honest, *[sent] * attackers] if norm]] * 40)
    assert known.spread <= max(honest) / min(honest) - 1.0 + 1e-9
    assert known.levels[0][1] <= max(honest)


def test_with_two_or_three_contributions_the_rounds_before_say_what_is_usual():
    """A norm of 2.3 times the other one is clipped neither if both had it before, nor if both have grown."""
    known = after(*[(1.0, 1.08), (0.92, 1.0)] * 10)
    for norms in ((0.45, 1.04), (0.44, 0.45, 1.04)):
        limit = limit_of(norms, 0, known, config())
        assert limit.usual > 0.9 and 1.04 < limit.factor * limit.usual < 2.5
    assert limit_of((0.45, 0.45, 0.45, 1.04), 0, known, config()).usual == Fraction(0.45)
    assert limit_of((0.45, 1.04), 1, known, config()).usual == Fraction(0.45)  # of another fragment
    assert limit_of((5.0, 6.0), 0, known, config()).usual == 5


def test_who_is_alone_in_a_round_says_nothing_about_what_is_usual():
    known = after((1.0, 1.1))
    assert after((1e6,), (), before=known) == known and after((1e6,)) is None


def test_norms_of_a_forged_commit_have_a_limit():
    known = after((5e-324, 1e308), (1e308, 5e-324))
    assert known.spread == 7.0 and limit_of((5e-324, 1e308), 0, known, config()).factor == 16
