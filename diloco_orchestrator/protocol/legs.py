"""Pure functions of a run's legs (a leg: the rounds from a start or resume to the next stop) and the bases they make.

A leg may resume from an earlier base. The rounds in between stay in the commit log, but no later base descends from
them. `supervision` begins and ends legs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Begin, Commit
from diloco_orchestrator.protocol.rounds import Position

SAFE_SNAPSHOTS = 2  # complete snapshots at or after a round that retention needs before it deletes the round's payloads


def leg_position(begin: Begin, start_sha256: str) -> Position:
    """The position in the commit log at which a leg (start or resume to stop) begins: right after the commit before it.

    Its base is the one that the leg starts from. `start_sha256`: digest of start.json, needed for the run's first leg.
    """
    if begin.leg == 1:
        return Position.at_start(start_sha256)
    return Position(begin.after_round, begin.from_outer_step, empty_rounds=0, stop="none", sha256=begin.previous)


def why_no_begin(begin: Begin, leg: int, run_sha256: str) -> str:
    """Reason why a leg's begin record is invalid by itself; empty if it may be valid. Leg: start or resume to stop."""
    if begin.leg != leg:
        return f"it says leg {begin.leg}"
    if leg > 1:
        return ""
    if begin.after_round or begin.from_round or begin.from_outer_step:
        return f"it begins after round {begin.after_round}, though the first leg begins before every round"
    return "" if begin.previous == run_sha256 else f"previous is {begin.previous[:12]}, and run.json {run_sha256[:12]}"


def leg_of_base(begins: Sequence[Begin], round_: int) -> Begin | None:
    """The record that began the leg (start or resume to stop) in which the base after `round_` was made.

    None if the newest base does not descend from that base.
    """
    for begin in reversed(begins):
        if round_ > begin.after_round or begin.leg == 1:
            return begin
        if round_ > begin.from_round:
            return None
    return None


def rounds_led_to(begin: Begin, begins: Sequence[Begin], legs: int) -> Iterator[int]:
    """The rounds that led to the base which a leg (start or resume to stop) begins with, newest first.

    Those of the last `legs` legs before it: each moves at least one fragment, so that as many legs as a model has
    fragments hold every fragment's newest. `begins`: the records of all starts and resumes.
    """
    for _ in range(legs):
        before = leg_of_base(begins[: begin.leg - 1], begin.from_round)
        if before is None:
            return
        yield from range(begin.from_round, before.after_round, -1)
        begin = before


def bases(commits: Iterable[Commit], begins: Sequence[Begin]) -> list[int]:
    """The rounds whose bases the newest base descends from, oldest first; 0 is the first base."""
    return [0] + [c.round for c in commits if c.applied and leg_of_base(begins, c.round) is not None]


class BaseScores:
    """Held-out scores of bases, each from the commit of the round after it, and the bases at which the run stopped."""

    def __init__(self) -> None:
        self.leg_ends: dict[int, int] = {}  # the round of a leg's last base, by leg, of legs that have stopped
        self.last: Commit | None = None
        self._base, self._leg = 0, 1
        self._scores: dict[int, tuple[float, int]] = {}  # score and the round of its commit, by the round of the base

    def add(self, commit: Commit, begin: Begin) -> None:
        """Add the held-out score in `commit`, the next commit. `begin`: the record of the start or resume before it."""
        if commit.leg != self._leg:
            self._leg, self._base = commit.leg, begin.from_round
        value = commit.verdict.value if commit.verdict else None
        if value is not None and (self._base not in self._scores or value > self._scores[self._base][0]):
            self._scores[self._base] = value, commit.round
        self._base = commit.round if commit.applied else self._base
        if commit.stop != "none":
            self.leg_ends[commit.leg] = self._base
        self.last = commit

    def best(self, among: Iterable[int]) -> int:
        """The round in `among` whose base has the best held-out score, the earliest of equals; 0 if none is scored."""
        scored = [(self._scores[base][0], base) for base in among if base in self._scores]
        return max(scored, key=lambda pair: (pair[0], -pair[1]), default=(0.0, 0))[1]

    def score(self, base: int) -> float | None:
        """The held-out score of the base after a round; None if no commit holds one."""
        return self._scores[base][0] if base in self._scores else None

    def scored_in(self, base: int) -> int | None:
        """The round whose commit holds the score of the base after a round; None if no commit holds one."""
        return self._scores[base][1] if base in self._scores else None

    def forget(self, but: Sequence[int]) -> None:
        """Drop the scores of the bases up to the last round in `but`, except those of the rounds in `but`."""
        last = max(but, default=0)
        self._scores = {base: found for base, found in self._scores.items() if base > last or base in but}


@dataclass(frozen=True)
class DefaultBase:
    """Base that commands use when the user names no round, and the newest one. Held-out scores: higher is better."""

    round: int  # whose base is the default
    score: float | None  # held-out score of that base; None if none was measured
    newest: int
    newest_score: float | None
    after_verdict: bool  # whether the guard halted the newest leg, so that the best base is the default, not the newest


class DefaultBases:
    """Finds the base from which a resume starts unless the user names a round: the newest, or after a halt by the guard
    the best. Reads the run's commits, oldest first.
    """

    def __init__(self) -> None:
        self.scores = BaseScores()
        self._applied: list[int] = []  # rounds

    def add(self, commit: Commit, begin: Begin) -> None:
        """Add the next commit, which belongs to the leg (start or resume to stop) of `begin`."""
        self.scores.add(commit, begin)
        if commit.applied:
            self._applied.append(commit.round)

    def bases(self, begins: Sequence[Begin]) -> list[int]:
        """The rounds whose bases the newest base descends from, oldest first; 0 is the first base."""
        return [0] + [round_ for round_ in self._applied if leg_of_base(begins, round_) is not None]

    def default(self, begins: Sequence[Begin], among: Iterable[int] | None = None) -> DefaultBase:
        """The default base after the added commits. `begins`: records of all starts and resumes.

        `among`: rounds whose bases may be chosen after a halt by the guard; None: all that the newest descends from.
        """
        known, last = self.bases(begins), self.scores.last
        halted = last is not None and last.leg == begins[-1].leg and last.halted_by_guard
        chosen = self.scores.best(known if among is None else among) if halted else known[-1]
        return DefaultBase(chosen, self.scores.score(chosen), known[-1], self.scores.score(known[-1]), halted)


def check_base(round_: int, among: Sequence[int], url: str) -> None:
    """Raise `ConfigError`, naming the base that the run had after `round_`, unless `round_` is in `among`.

    `among`: the rounds that `bases` returns. `url`: the run's address.
    """
    if round_ not in among:
        nearest = max((known for known in among if known <= round_), default=among[0])
        raise ConfigError(
            f"round {round_} of {url} left no base. The run has bases of rounds {among[0]} to {among[-1]}, but none of "
            f"rounds that were not applied or that a resume skipped. The nearest is {nearest}."
        )
