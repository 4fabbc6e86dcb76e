"""Judgement of a range's re-run: equal, within the bound, different, or not to be judged. Pure functions.

On a machine of the replica's hardware class every bit must be equal. On another one sums are rounded in another order,
and distances are compared with a bound.
"""

from diloco_orchestrator.inspection.audit.findings import Outcome
from diloco_orchestrator.replica.process.rerun_result import RerunResult

# What must be equal on every machine, because no rounding is in it; `replica.process.range_comparison` names them.
_EXACT = frozenset(("base", "steps", "dropped work", "tokens", "cursor", "counters", "items"))
_PLACE = frozenset(("cursor", "counters", "random state"))  # where training ended, beside what it computed
_SHARE = 0.25  # of one inner step's share of the pseudo-gradient
_NOISES = 4.0  # a distance so many times that of two re-runs from each other is no noise


def bound_of(round_steps: int) -> float:
    """The largest relative distance of a payload, or of a tensor of the state, that counts as rounding.

    A pseudo-gradient is the sum of H steps. To leave out one of them changes it by 1/H of its norm where all steps
    point the same way, and by more where they do not; the bound is a quarter of that. Rounding alone stays far below
    (docs/audit.md has measured distances).
    """
    return _SHARE / round_steps


def judged(
    found: RerunResult,
    bound: float,
    again: RerunResult | None = None,
    *,
    partial: bool = False,
    after_cut: bool = False,
) -> tuple[Outcome, str]:
    """The outcome of a range, and why in words.

    Args:
        found: the re-run.
        bound: see `bound_of`.
        again: a second re-run, made where the first one differs on a machine of the same hardware class.
        partial: whether the range has fewer steps than a round: its author was cut or left between two batches.
        after_cut: whether that is so of the contribution that the range follows.
    """
    if found.lost:
        return Outcome.DIFFERS, found.lost
    if found.not_auditable:
        return Outcome.NOT_AUDITABLE, found.not_auditable
    differing = set(found.differing)
    if partial and found.micro_batches:
        differing -= _PLACE  # the cut fell between two batches of one step, of which the record has no number
    if not differing:
        return Outcome.EQUAL, ""
    if after_cut and found.micro_batches:
        return Outcome.NOT_AUDITABLE, (
            "the round before was cut, perhaps between two batches of one step: gradients in memory are in no record"
        )
    words = f"{', '.join(each for each in found.differing if each in differing)} differ"
    if differing & _EXACT:
        return Outcome.DIFFERS, words
    distance = max(found.distance or 0.0, found.state_distance or 0.0)
    if found.other_class:
        return _by_distance(distance, bound, differing, f"another hardware class ({'; '.join(found.other_class)})")
    if again is None or again.payload == found.payload:
        return Outcome.DIFFERS, words
    noise = again.noise or 0.0
    why = f"training is not deterministic here (two re-runs are {noise:.2g} apart)"
    outcome, why = _by_distance(distance, bound, differing, why)
    if outcome is Outcome.DIFFERS and distance <= _NOISES * noise:
        return Outcome.NOT_AUDITABLE, f"{why}, which is more than the bound tolerates"
    return outcome, why


def _by_distance(distance: float, bound: float, differing: set[str], why: str) -> tuple[Outcome, str]:
    if "payload" not in differing and "state" not in differing:
        return Outcome.WITHIN_BOUND, why
    if distance <= bound:
        return Outcome.WITHIN_BOUND, why
    return Outcome.DIFFERS, f"{why}; a distance of {distance:.2g} is above {bound:.2g}"
