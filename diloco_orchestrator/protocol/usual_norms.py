"""The limit of norms in a round, by how far apart norms were in the rounds before: `limit_of`, `norms_after`.

Each commit holds the state of the rounds before it (`Commit.norms`), which follows from the commit before. So the
weights of a commit follow from that commit alone, and a reader needs one more to check the state. Only floating-point
operations that IEEE 754 rounds correctly are used, so that every machine derives the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median_high, median_low

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.records import Commit, UsualNorms

_SPREADS = 8.0  # that a norm may be above the median; benchmarks/clips.py tries these numbers on healthy fleets
_SPREADS_OF_FEW = 16.0  # the same with fewer than `_FEW` contributions, of which nothing says who is wrong
_FEW = 4
_WIDEST = 16.0  # times the median that are allowed at most, however far apart norms are
_FARTHEST = 8.0  # times the median, as which a norm that is farther away enters the spread
_RECENT = 16  # rounds of which the spread is the mean
_RECENT_LEVEL = 4  # rounds of a fragment of which its level is the mean


@dataclass(frozen=True)
class Limit:
    """The limit of a contribution's norm in a round."""

    usual: Fraction  # norm as which one that is too large counts
    factor: Fraction  # times `usual` that are allowed


def limit_of(norms: Sequence[float], fragment: int, before: UsualNorms | None, config: RunConfig) -> Limit:
    """The limit for contributions to `fragment` of these norms, above zero. `before`: of the rounds before."""
    usual, factor = median_low(norms), config.clips_above
    if before is not None and config.clips_by_history:
        few = len(norms) < _FEW
        widened = 1.0 + (_SPREADS_OF_FEW if few else _SPREADS) * before.spread
        factor = min(max(factor, widened), _WIDEST)
        if few:
            usual = max(usual, dict(before.levels).get(fragment, 0.0))
    return Limit(Fraction(usual), Fraction(factor))


def norms_after(commit: Commit, config: RunConfig) -> UsualNorms | None:
    """The state after a commit, as everybody reads it."""
    norms = [answer.norm for answer in commit.answers if answer.averaged and answer.norm]
    # A round of two says nothing about who is wrong, and one replica can make it one of itself and another: it commits
    # as soon as a quorum of two is there. Only where a run has no third one such rounds count.
    fewest = 3 if config.replicas > 2 else 2
    return folded(commit.norms, commit.fragment, norms, fewest) if config.clips_by_history else None


def folded(before: UsualNorms | None, fragment: int, norms: Sequence[float], fewest: int = 2) -> UsualNorms | None:
    """The state after a round of `fragment` with these norms, above zero. Fewer than `fewest`, 2 or more, add nothing.

    What counts of a round is its median norm, and the median of all distances to it, of two in the middle the larger.
    So while most are honest, no other norm than an honest one's widens the limit.
    """
    if len(norms) < fewest:
        return before
    before = before or UsualNorms(rounds=0, spread=0.0, levels=())
    median, rounds, levels = median_low(norms), before.rounds + 1, dict(before.levels)
    distance = median_high(max(norm / median, median / norm) for norm in norms)
    level = levels.get(fragment, median)
    levels[fragment] = level + (median - level) / _RECENT_LEVEL
    spread = before.spread + (min(distance, _FARTHEST) - 1.0 - before.spread) / min(rounds, _RECENT)
    return UsualNorms(rounds=rounds, spread=spread, levels=tuple(sorted(levels.items())))
