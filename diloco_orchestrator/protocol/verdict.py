"""`Verdict`: what the guard says after a round, as commits and results hold it.

How it is reached is `guard`'s; what follows from it is `protocol.rounds`'.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether the run must stop, why, and the numbers that were judged. Higher numbers are better."""

    fire: bool  # stays True once it is
    reason: str  # why it fired, or why the round was not folded; empty for a clean fold
    proxy_real_gap: float  # gain of the training metric minus gain of the held-out score since the start
    folds: int  # so far, of rounds with finite numbers
    folded: bool = False  # whether this round was
    value: float | None = None  # held-out score of the base before the round, comparable between rounds
    in_loop: float | None = None  # the training metric that `value` was paired with
    warning: str = ""
