"""`CountedWork`: refuses contributions with work that a commit has averaged before, so that no step counts twice (I4).

An honest replica adds to a contribution only work that no commit has averaged (`replica.rounds.debt`); a manifest may
say otherwise.
"""

from itertools import pairwise

from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt


class CountedWork:
    """Which work of which replica the commits since a round of this leg (start or resume to stop) have averaged.

    Earlier commits are read once a manifest names a round before that one. Not thread-safe.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._first = self._next = 0  # the commits that are known: of the rounds from the first to before the next
        self._averaged: dict[int, int] = {}  # by replica id: bit r says that its work of round r is averaged

    def note(self, commit: Commit) -> None:
        """Add the commit that this replica has just applied or skipped, as it reads it."""
        self._begin_at(commit.round)
        self._add(commit)
        self._next += 1

    def why_not(self, manifest: Contribution) -> str:
        """Reason why the origins of a manifest of the open round keep it from being averaged; empty if they do not.

        Equal logs give equal results in all replicas.
        """
        rounds, begun = [origin.round for origin in manifest.origins], self._attempt.begin.after_round
        if any(one >= other for one, other in pairwise((begun, *rounds, manifest.round + 1))):
            return (
                f"it says work of rounds {rounds[:20]}, and may hold that of {begun + 1} to {manifest.round} in order"
            )
        self._begin_at(manifest.round)
        if rounds:
            self._read_back(rounds[0])
        averaged = self._averaged.get(manifest.replica_id, 0)
        again = next((round_ for round_ in rounds if averaged >> round_ & 1), None)
        return "" if again is None else f"it says work of round {again}, which a commit has averaged already"

    def _begin_at(self, round_: int) -> None:
        """Forget all commits unless those before `round_` are known: this replica has gone on from a snapshot."""
        if self._next != round_:
            self._averaged.clear()
            self._first = self._next = round_

    def _read_back(self, first: int) -> None:
        """Read the commits from round `first` on that are not known."""
        if first >= self._first:
            return
        log, begin = self._attempt.log, self._attempt.begin
        before = log.as_read(first - 1) if first - 1 > begin.after_round else None
        for entry in log.settled(before.position if before else log.leg_position(begin)):
            if entry.commit.round >= self._first:
                break
            self._add(entry.commit)
        self._first = first

    def _add(self, commit: Commit) -> None:
        for answer in commit.answers:
            for origin in answer.origins if answer.averaged else ():
                if origin.round <= commit.round:  # a forged commit may name any number
                    self._averaged[answer.replica_id] = self._averaged.get(answer.replica_id, 0) | 1 << origin.round
