"""Answers of a place (executor) to the launches of one coordinator: refusals, starts, and machines that trained.

Times are seconds on the coordinator's own clock.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

START_S = 300.0  # from a launch until the replica trains, at a place where none has started yet
_REST_S = (60.0, 600.0)  # the first and the longest rest of a place that has no machine
_UNSEEN = 0.05  # of its mean time without machines: the longest rest of a place that has had machines again
_LONG_REST_S = 3600.0  # the longest one of a place whose machines cost time, or money, and never train


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of a place (executor) to one coordinator's launches so far: refusals, and machines that trained."""

    rests_until: float = -math.inf  # nothing is opened there before
    times: int = 0  # refusals in a row, those that came while it rested not counted
    refused_since: float | None = None  # the first refusal since an attempt last trained there; None: it refuses nobody
    refused_at: float = -math.inf  # the newest one
    trained_at: float = -math.inf  # when a replica was last seen to train there
    refusal: str = ""  # the provider's words
    wastes: bool = False  # the newest refusal was that of a machine that cost time and never trained
    start_s: float = START_S  # from a launch there until the replica trains, on average
    starts: int = 0  # how many that is the average of
    trained_s: float = 0.0  # of all replicas together
    ends: int = 0  # of attempts that had trained there
    without_s: float = 0.0  # how long it has refused altogether before it had machines again
    returns: int = 0  # how often it had machines again

    def refused(self, words: str, launched_at: float, now: float) -> Self:
        """These answers and a refusal: an attempt launched at `launched_at` got no machine, or one that never trained.

        `words`: the provider's.
        """
        since = now if self.refused_since is None else self.refused_since
        found = replace(self, refused_since=since, refused_at=now, refusal=words)
        if launched_at < self.refused_at:  # it was asked for before the refusal that is known
            return found
        first_s, longest_s = _REST_S
        if wastes := now - launched_at > first_s:
            first_s, longest_s = now - launched_at, _LONG_REST_S
        elif self.returns:
            mean_s = (self.without_s + max(0.0, now - max(since, self.trained_at))) / (self.returns + 1)
            longest_s = min(longest_s, max(first_s, _UNSEEN * mean_s))
        rests_until = now + min(math.ldexp(first_s, min(self.times, 32)), longest_s)  # 2 ** 1024 is no float
        return replace(found, times=self.times + 1, rests_until=rests_until, wastes=wastes)

    def given(self, launched_at: float, start_s: float) -> Self:
        """These answers and a machine: an attempt launched at `launched_at` trains, `start_s` after it got one."""
        mean_s = (self.start_s * self.starts + start_s) / (self.starts + 1)
        found = replace(self, start_s=mean_s, starts=self.starts + 1)
        if self.refused_since is not None and self.trained_at < launched_at:  # nobody trained there any more
            without_s = self.without_s + max(0.0, launched_at - max(self.refused_since, self.trained_at))
            found = replace(found, without_s=without_s, returns=self.returns + 1)
        if launched_at >= self.refused_at:
            found = replace(found, times=0, refused_since=None, refusal="", wastes=False)
        return found
