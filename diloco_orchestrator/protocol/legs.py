"""Pure functions of a run's legs: where a leg starts, which bases the newest one descends from, which scored best.

After a stop a leg may start from an earlier base. The rounds in between stay in the commit log, but no later base
descends from them. Legs are created and ended by `supervision`.
"""

from collections.abc import Sequence

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Begin, Commit
from diloco_orchestrator.protocol.rounds import Position

SAFE_SNAPSHOTS = 2  # complete snapshots at or after a round that retention needs before it deletes the round's payloads


def leg_position(begin: Begin, start_sha256: str) -> Position:
    """The position in the commit log at which a leg begins: after the last commit before the leg, with the leg's base.

    `start_sha256`: digest of start.json, needed for leg 1.
    """
    if begin.leg == 1:
        return Position.at_start(start_sha256)
    return Position(begin.after_round, begin.from_outer_step, empty_rounds=0, stop="none", sha256=begin.previous)


def leg_of_base(begins: Sequence[Begin], round_: int) -> Begin | None:
    """The leg that made the base after `round_`; None if that base is not an ancestor of the newest one."""
    for begin in reversed(begins):
        if round_ > begin.after_round or begin.leg == 1:
            return begin
        if round_ > begin.from_round:
            return None
    return None


def bases(commits: Sequence[Commit], begins: Sequence[Begin]) -> list[int]:
    """The rounds whose bases the newest base descends from, oldest first; 0 is the first base."""
    return [0] + [c.round for c in commits if c.applied and leg_of_base(begins, c.round) is not None]


def best_base(commits: Sequence[Commit], begins: Sequence[Begin], among: Sequence[int]) -> int:
    """The round in `among` whose base has the best held-out score, the earliest of equals; 0 if none has a score.

    The commit of round r holds the score of the base before that round.
    """
    scored: list[tuple[float, int]] = []
    base, leg = 0, 1
    for commit in commits:
        if commit.leg != leg:
            leg, base = commit.leg, begins[commit.leg - 1].from_round
        if commit.verdict is not None and commit.verdict.value is not None and base in among:
            scored.append((commit.verdict.value, base))
        base = commit.round if commit.applied else base
    return max(scored, key=lambda pair: (pair[0], -pair[1]), default=(0.0, 0))[1]


def check_base(round_: int, among: Sequence[int], url: str) -> None:
    """Raise `ConfigError` with the nearest round in `among` unless `round_` is in `among`. `url`: the run's."""
    if round_ not in among:
        nearest = min(among, key=lambda known: (abs(known - round_), known))
        raise ConfigError(
            f"round {round_} of {url} left no base. The run has bases of rounds {among[0]} to {among[-1]}, but none of "
            f"rounds that were not applied or that a resume skipped. The nearest is {nearest}."
        )
