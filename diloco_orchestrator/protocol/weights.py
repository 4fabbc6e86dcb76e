"""Integer weights of contributions in the average, which every reader derives alike from the commit.

The commit lists steps, tokens, norm and payload digest of each contribution as its manifest declares them; replicas
check norm and digests against the payload. The norms of earlier rounds, which limit the norm, are in the commit too
(`Commit.norms`). A commit with other weights is *void*: it averages nobody. `allreduce.aggregate` averages.
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
    """The integer weights of a round's contributions in the average, by replica id, and which of them were reduced."""

    weights: Mapping[int, int]
    clipped: tuple[Clipped, ...] = ()


def weight_of(round_: int, origins: Sequence[Origin], tokens: int, config: RunConfig) -> int:
    """The weight by the run's policy of a contribution to `round_` whose payload holds the work of `origins`.

    With `weights="uniform"`: `sync_every`, less the steps that the payload lacks of a whole round. With
    `weights="tokens"`: the tokens of the round's own steps, scaled up by the carried steps; with `steps="equal_time"`
    one for each step where none were counted. A contribution of carried work alone weighs as much as a whole round, by
    tokens 1. With a coordinate-wise aggregate every weight is 1.
    """
    if config.aggregate in COORDINATE_WISE:
        return 1
    own = sum(origin.steps for origin in origins if origin.round == round_)
    if config.weights == "uniform":
        return _by_steps(round_, origins, config)
    if config.steps == "equal_time":
        tokens = tokens or own
    return max(1, tokens * sum(origin.steps for origin in origins) // own) if own else 1


def shares_of(
    round_: int, averaged: Sequence[Answer], config: RunConfig, before: UsualNorms | None = None, fragment: int = 0
) -> Shares:
    """The weights of the contributions in `averaged`, which one commit averages.

    Tokens: more than four times the median of tokens per step count as that median. `clip="median_norm"`: a
    contribution whose norm is above the limit (`limit_of`, scaled up for more steps than the median) gets the weight
    with which it moves the average as far as one of the usual norm. Among equal payloads, at most half of all, only the
    heaviest has a weight; all-zero payloads, less than half of all, have none. Medians are lower medians, without
    all-zero payloads. Exact integer arithmetic. `before`: norms of the rounds before; `fragment`: the round's.
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
    """Whether a response in a commit agrees with its `manifest` in steps, tokens, norm and payload digest."""
    norm, payload = (manifest.payload.norm, manifest.payload.digest) if manifest.payload else (0.0, "")
    said = manifest.origins, manifest.tokens, norm, payload
    return said == (answer.origins, answer.tokens, answer.norm, answer.payload)


def weighed(answers: Sequence[Answer], shares: Shares) -> tuple[Answer, ...]:
    """`answers`, a commit's list of responses, with the weight of each averaged one set from `shares`."""
    return tuple(
        answer.model_copy(update={"weight": shares.weights[answer.replica_id]}) if answer.averaged else answer
        for answer in answers
    )


def shares_in(commit: Commit, config: RunConfig) -> Shares:
    """The weights that follow from a commit's list of responses and the norms that it stores."""
    averaged = [answer for answer in commit.answers if answer.averaged]
    return shares_of(commit.round, averaged, config, commit.norms, commit.fragment)


def why_void(commit: Commit, config: RunConfig) -> str:
    """The first weight in a commit that does not follow from the run's policy; empty if all do, else it is void."""
    derived = shares_in(commit, config).weights
    for answer in commit.answers:
        if answer.averaged and answer.weight != derived[answer.replica_id]:
            return (
                f"replica {answer.replica_id} has weight {answer.weight}; {derived[answer.replica_id]} follows from "
                "its steps, tokens, norm and payload"
            )
    return ""


def averaging_nobody(commit: Commit, why: str) -> Commit:
    """The commit in place of one whose weights make it void, for the reason `why`: it averages nobody, the base stays.

    Its stop, guard state and list of replicas that the next round waits for still count.
    """
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
    """The weight of a payload by its own inner steps: `sync_every`, less those that it lacks of a whole round."""
    own = sum(origin.steps for origin in origins if origin.round == round_)
    steps = sum(origin.steps for origin in origins)
    return config.sync_every - (max(0, config.round_steps - steps) if own else 0)


def _equal_payloads(averaged: Sequence[Answer]) -> list[list[int]]:
    """Groups of replicas whose payloads have equal bytes, in replica_id order; all-zero payloads are left out.

    If more than half of all payloads are equal, none is taken for a copy: there is no group.
    """
    same: dict[str, list[int]] = {}
    for answer in averaged:
        if answer.payload and answer.norm:
            same.setdefault(answer.payload, []).append(answer.replica_id)
    return [group for group in same.values() if 1 < len(group) <= len(averaged) / 2]


def _times(ratio: Fraction) -> str:
    """A ratio of norms as text; bounded, because norms in a forged commit may have a ratio that no float holds."""
    return f"{float(min(ratio, Fraction(10**99))):.3g} times"


def _median(values: Iterable[Fraction]) -> Fraction:
    """The median; of an even number of values the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


# -- what norm is too large --------------------------------------------------------------------------------------------

# By how far apart norms were in the rounds before. Each commit holds the state of these rounds (`Commit.norms`), which
# follows from the commit before. So weights follow from a commit alone, and a reader needs one more to check the state.
# Only floating-point operations that IEEE 754 rounds correctly are used: every machine derives the same numbers.
_SPREADS = 8.0  # that a norm may be above the median; benchmarks/clips.py tries these numbers on healthy fleets
_SPREADS_OF_FEW = 16.0  # the same with fewer than `_FEW` contributions, which do not show which is wrong
_FEW = 4
_WIDEST = 16.0  # times the median that are allowed at most, however far apart norms are
_FARTHEST = 8.0  # times the median, as which a norm that is farther away enters the spread
_RECENT = 16  # rounds of which the spread is the mean
_RECENT_LEVEL = 4  # rounds of a fragment of which its level is the mean


@dataclass(frozen=True)
class Limit:
    """The largest L2 norm of a contribution that keeps its full weight in a round: `usual` times `factor`."""

    usual: Fraction  # the norm as which a contribution above the limit counts
    factor: Fraction  # times `usual` that are allowed


def limit_of(norms: Sequence[float], fragment: int, before: UsualNorms | None, config: RunConfig) -> Limit:
    """The norm limit for contributions to `fragment` with these norms (above zero). `before`: earlier rounds' norms."""
    usual, factor = median_low(norms), config.clips_above
    if before is not None and config.clips_by_history:
        few = len(norms) < _FEW
        widened = 1.0 + (_SPREADS_OF_FEW if few else _SPREADS) * before.spread
        factor = min(max(factor, widened), _WIDEST)
        if few:
            usual = max(usual, dict(before.levels).get(fragment, 0.0))
    return Limit(Fraction(usual), Fraction(factor))


def norms_after(commit: Commit, config: RunConfig) -> UsualNorms | None:
    """The running norm statistics after a commit, as every reader derives them; None if the run does not use them."""
    norms = [answer.norm for answer in commit.answers if answer.averaged and answer.norm]
    # A round of two says nothing about who is wrong, and one replica can make it one of itself and another: it commits
    # as soon as a quorum of two is there. Only where a run has no third one such rounds count.
    fewest = 3 if config.most_replicas > 2 else 2
    return folded(commit.norms, commit.fragment, norms, fewest) if config.clips_by_history else None


def folded(before: UsualNorms | None, fragment: int, norms: Sequence[float], fewest: int = 2) -> UsualNorms | None:
    """The running norm statistics after one more round of `fragment`. `norms`: of its contributions, all above zero.

    A round adds its median norm, and the upper median of the ratios of its norms to that, so that while most replicas
    are honest no forged norm widens the limit. A round of fewer than `fewest` (2 or more) contributions adds nothing.
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
