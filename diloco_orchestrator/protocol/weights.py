"""The weight of a contribution in the average: whole numbers that everybody derives alike from the commit itself.

Steps, tokens, norm and payload digest of a contribution are in the commit as its manifest declares them; whoever
verifies the payload checks norm and digests. What norm is too large follows from those of the rounds before, whose
state is in the commit too (`Commit.norms`). A commit whose weights do not follow is *void*: it averages
nobody, for everybody. The average is `allreduce.aggregate`'s.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median_high, median_low

from diloco_orchestrator.config import COORDINATE_WISE, RunConfig
from diloco_orchestrator.protocol.records import Answer, Clipped, Commit, Contribution, Origin, UsualNorms

_FINE = 2**20  # all weights of a round are multiplied by it if one is clipped: weights are whole numbers
_MOST_TOKENS = 4  # times the median of tokens per step, of which more are not believed


@dataclass(frozen=True)
class Shares:
    """The weights of a round's contributions, by replica id, and which of them weigh less than the policy says."""

    weights: Mapping[int, int]
    clipped: tuple[Clipped, ...] = ()


def weight_of(round_: int, origins: Sequence[Origin], tokens: int, config: RunConfig) -> int:
    """The weight by the run's policy of a contribution to `round_` whose payload holds the work of `origins`.

    With `weights="uniform"` `sync_every`, less the steps that the payload lacks of a whole round. With
    `weights="tokens"` the tokens of the round's own steps, scaled up by the carried steps. A contribution that names
    no step of its own weighs as much as a whole round, by tokens 1. Where each coordinate is aggregated by
    itself, every contribution weighs 1.
    """
    if config.aggregate in COORDINATE_WISE:
        return 1
    own = sum(origin.steps for origin in origins if origin.round == round_)
    if config.weights == "uniform":
        return _by_steps(round_, origins, config)
    return max(1, tokens * sum(origin.steps for origin in origins) // own) if own else 1


def shares_of(
    round_: int, averaged: Sequence[Answer], config: RunConfig, before: UsualNorms | None = None, fragment: int = 0
) -> Shares:
    """The weights of the contributions that a commit averages: one replica is one share.

    By tokens, a contribution with more than four times the median of tokens per step weighs as if it had that median.
    With `clip="median_norm"` one whose norm is above the limit weighs so much less that it moves the average as one of
    the usual norm does (`limit_of`); one of more steps than the median is allowed as much more. Only
    the heaviest of equal payloads, at most half of all, weighs anything; zeros, less than half of all, weigh nothing.
    Medians are those of all contributions that are not zero, of an even number the lower one. Arithmetic is exact, so
    that every reader gets the same integers. `before`: norms of the rounds before; `fragment`: that the round is of.
    """
    weights = {a.replica_id: weight_of(round_, a.origins, a.tokens, config) for a in averaged}
    steps = {a.replica_id: _by_steps(round_, a.origins, config) for a in averaged}
    why: dict[int, list[str]] = {a.replica_id: [] for a in averaged}
    if config.weights == "tokens" and averaged:
        usual = _median(Fraction(weights[i], steps[i]) for i in weights)
        for i, rate in [(i, weights[i] / (usual * steps[i])) for i in weights]:
            if rate > _MOST_TOKENS:
                why[i].append(f"it declares {_times(rate)} the median of tokens per step")
                weights[i] = max(1, int(usual * steps[i]))
    norms = {a.replica_id: Fraction(a.norm) for a in averaged if a.norm}
    if config.clip != "off" and norms:
        limit = limit_of([answer.norm for answer in averaged if answer.norm], fragment, before, config)
        middle, usual_norm = _median(Fraction(steps[i]) for i in norms), limit.usual
        allowed = limit.factor * usual_norm
        if far := [i for i in norms if norms[i] > allowed * max(Fraction(1), steps[i] / middle)]:
            weights = {i: weight * _FINE for i, weight in weights.items()}
        of = "the median of the round" if usual_norm == _median(norms.values()) else "the usual norm of rounds before"
        for i in far:
            why[i].append(f"its norm {float(norms[i]):.4g} is {_times(norms[i] / usual_norm)} {of}")
            weights[i] = int(weights[i] * usual_norm / norms[i])
        for group in _equal_payloads(averaged):
            heaviest = max(group, key=weights.__getitem__)  # the bytes are equal, so it does not matter whose are read
            for i in [i for i in group if i != heaviest]:
                why[i].append(f"its payload equals that of replica {heaviest}, and counts once")
                weights[i] = 0
        zeros = weights.keys() - norms.keys()
        for i in zeros if len(zeros) < len(weights) / 2 else ():
            why[i].append("its payload is all zeros, which says nothing beside the others")
            weights[i] = 0
    clipped = (Clipped(replica_id=i, reason="; ".join(why[i])) for i in sorted(why) if why[i])
    return Shares(weights, tuple(clipped))


def is_said(answer: Answer, manifest: Contribution) -> bool:
    """Whether an answer has origins, tokens, norm and payload, which its weight follows from, as its manifest says."""
    norm, payload = (manifest.payload.norm, manifest.payload.digest) if manifest.payload else (0.0, "")
    said = manifest.origins, manifest.tokens, norm, payload
    return said == (answer.origins, answer.tokens, answer.norm, answer.payload)


def weighed(answers: Sequence[Answer], shares: Shares) -> tuple[Answer, ...]:
    """The answers of a commit with the weights of those that it averages."""
    return tuple(
        answer.model_copy(update={"weight": shares.weights[answer.replica_id]}) if answer.averaged else answer
        for answer in answers
    )


def shares_in(commit: Commit, config: RunConfig) -> Shares:
    """The weights that follow from the answers of a commit, and from the norms of the rounds before."""
    averaged = [answer for answer in commit.answers if answer.averaged]
    return shares_of(commit.round, averaged, config, commit.norms, commit.fragment)


def why_void(commit: Commit, config: RunConfig) -> str:
    """Reason why a commit averages nobody though it names somebody; empty if weights follow from the run's policy."""
    derived = shares_in(commit, config).weights
    for answer in commit.answers:
        if answer.averaged and answer.weight != derived[answer.replica_id]:
            return (
                f"replica {answer.replica_id} has weight {answer.weight}; {derived[answer.replica_id]} follows from "
                "its steps, tokens, norm and payload"
            )
    return ""


def as_read(commit: Commit, config: RunConfig) -> Commit:
    """A commit as every reader takes it: itself, or if it is void, a commit that averages nobody and keeps the base.

    What stops the run, the roster and the guard's state count all the same.
    """
    why = why_void(commit, config)
    if not why:
        return commit
    return commit.model_copy(
        update={
            "answers": tuple(answer.model_copy(update={"averaged": False}) for answer in commit.answers),
            "outer_step": commit.outer_step - commit.applied,
            "applied": False,
            "clipped": (),
            "empty_rounds": commit.empty_rounds + 1,
            "figures": commit.figures and commit.figures.model_copy(update={"tokens": 0}),
            "reason": f"void, so that nobody is averaged: {why}",
        }
    )


def _by_steps(round_: int, origins: Sequence[Origin], config: RunConfig) -> int:
    """`sync_every`, less the steps that a payload lacks of a whole round; carried work makes it no more than that."""
    own = sum(origin.steps for origin in origins if origin.round == round_)
    steps = sum(origin.steps for origin in origins)
    return config.sync_every - (max(0, config.round_steps - steps) if own else 0)


def _equal_payloads(averaged: Sequence[Answer]) -> list[list[int]]:
    """The replicas whose payloads have equal bytes, group by group, in replica_id order; zeros apart.

    Where more than half of all are equal, nothing shows that one was copied, and there is no group.
    """
    same: dict[str, list[int]] = {}
    for answer in averaged:
        if answer.payload and answer.norm:
            same.setdefault(answer.payload, []).append(answer.replica_id)
    return [group for group in same.values() if 1 < len(group) <= len(averaged) / 2]


def _times(ratio: Fraction) -> str:
    """A ratio for people. Norms in a forged commit may have one that no float holds."""
    return f"{float(min(ratio, Fraction(10**99))):.3g} times"


def _median(values: Iterable[Fraction]) -> Fraction:
    """The median, of an even number of values the lower one in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


# -- what norm is too large --------------------------------------------------------------------------------------------

# By how far apart norms were in the rounds before. Each commit holds the state of these rounds (`Commit.norms`), which
# follows from the commit before. So weights follow from a commit alone, and a reader needs one more to check the state.
# Only floating-point operations that IEEE 754 rounds correctly are used: every machine derives the same numbers.
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
