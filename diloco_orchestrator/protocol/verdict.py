"""`Verdict`: the guard's judgement of a round, as commits and results hold it.

The rules that reach it are in `guard`; whether it stops the run is decided in `protocol.rounds`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether the run must stop, why, and the numbers that were judged. Higher numbers are better."""

    fire: bool  # never False again once it is True
    reason: str  # why it fired, or why the round was not folded; empty for a clean fold
    proxy_real_gap: float  # gain of the training metric minus gain of the held-out score since the start
    folds: int  # so far, of rounds with finite numbers
    folded: bool = False  # whether this round was folded
    value: float | None = None  # held-out score of the base before the round, comparable between rounds
    in_loop: float | None = None  # the training metric that `value` was paired with
    warning: str = ""
