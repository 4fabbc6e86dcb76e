"""How many held-out items a sensitivity takes, and the refusal of a set that is too small for it."""

import math

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.metric_channels import CUSUMS

# By simulation, the reference of a run of some hundred rounds lies this far below the level that was reached.
_REFERENCE_SIGMAS = 0.35


def items_needed(
    drop: float, *, item_sd: float, rounds: int = 15, autocorrelation: float = 0.5, threshold: float = 10.0
) -> int:
    """Held-out items with which `SequentialGuard` halts about `rounds` rounds after the score fell by `drop` for good.

    Each round adds (drop / sigma - slack - reference) sigmas to the statistic, which halts at `threshold`; sigma of a
    score of n items is `item_sd` * sqrt((1 + a) / (1 - a) / n).

    Args:
        drop: in the metric's unit.
        item_sd: standard deviation of one item's score between rounds, at most 0.5 for scores in [0, 1].
        rounds: of delay; fewer rounds take more items.
        autocorrelation: of the score's noise from round to round, AR(1).
        threshold: `GuardConfig.threshold`.

    Raises `ValueError` for a number out of range.
    """
    if not (drop > 0 and item_sd > 0 and rounds >= 1 and 0 <= autocorrelation < 1 and threshold > 0):
        raise ValueError(
            f"drop={drop!r}, item_sd={item_sd!r}, rounds={rounds!r}, autocorrelation={autocorrelation!r}, "
            f"threshold={threshold!r}: all must be > 0, rounds >= 1 and autocorrelation in [0, 1)."
        )
    slowest = min(slack + share * threshold / rounds for slack, share in CUSUMS)
    sigmas = slowest + _REFERENCE_SIGMAS
    long_run = item_sd * item_sd * (1 + autocorrelation) / (1 - autocorrelation)
    return math.ceil(long_run * (sigmas / drop) ** 2)


def check_set_size(items: int, drop: float, *, item_sd: float, rounds: int = 15) -> None:
    """Raise `ConfigError`, with the number of items it takes, if `items` are too few to notice `drop`."""
    needed = items_needed(drop, item_sd=item_sd, rounds=rounds)
    if items < needed:
        raise ConfigError(
            f"the held-out set of {items} items is too small for the sensitivity asked: to notice a drop of {drop:g} "
            f"within {rounds} rounds takes {needed} items (one item's score varies by {item_sd:g}). Add items, or ask "
            "for a larger drop or more rounds."
        )
