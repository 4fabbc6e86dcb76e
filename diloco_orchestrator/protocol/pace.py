"""Pauses between two polls of the bucket, as functions of the length of a round, each up to a bound.

Requests cost money by the thousand, and nobody needs to know of a round of half an hour to the second. Lengths and
pauses are seconds on the clock of the process that waits.
"""

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.records import Commit

_LONGEST_WAIT_S = 15.0  # what a round of any length may lose at its end: 1 % of half an hour


def heartbeat_s(config: RunConfig, round_s: float) -> float:
    """The pause between two heartbeats: one and a half rounds, within the limits of two settings.

    It is at most a third of `retry.hung_after_s` and at least `timing.heartbeat_s`. In between, a replica's manifests
    show that it is alive.
    """
    return max(config.timing.heartbeat_s, min(1.5 * round_s, config.retry.hung_after_s / 3))


def heartbeats_read_s(config: RunConfig, round_s: float) -> float:
    """Seconds until a heartbeat whose counter has increased is read again: at most half of `retry.hung_after_s`.

    The other half is left to read again a heartbeat whose counter has not increased.
    """
    return max(config.timing.heartbeat_s, min(2.0 * round_s, config.retry.hung_after_s / 2))


def longest_wait_s(config: RunConfig, round_s: float) -> float:
    """The longest pause, in seconds, between two polls of a replica that waits for others' responses.

    A fiftieth of a round of `round_s` seconds, at most `_LONGEST_WAIT_S`; at least `timing.poll_s`.
    """
    return max(config.timing.poll_s, min(round_s / 50, _LONGEST_WAIT_S))


def commits_read_s(round_s: float, open_s: float) -> float:
    """Seconds until a coordinator or a display polls for the open round's commit again.

    `round_s`: usual length of a round. `open_s`: seconds since the commit before was seen. A commit hardly ever exists
    before nine tenths of `round_s`, so the first poll is then, or after 300 s if that is earlier.
    """
    early_s = 0.9 * round_s - open_s
    return max(1.0, min(early_s, 300.0) if early_s > 0 else min(round_s / 10, 45.0))


def starts_read_s(open_s: float) -> float:
    """Seconds between two polls before the first round has ended, `open_s` seconds after the process or round began.

    They are polls for what attempts write as they start or end, and a training replica's for the round's commit.
    """
    return max(1.0, min(open_s / 10, 60.0))


def seldom_read_s(round_s: float) -> float:
    """Seconds between two polls for what hardly ever comes, such as a resume: 20 rounds, at most half an hour."""
    return max(10.0, min(20 * round_s, 1800.0))


def records_read_s(round_s: float) -> float:
    """Seconds between two polls for records of an attempt whose provider reports no status: 1 to 15, a tenth round."""
    return max(1.0, min(round_s / 10, 15.0))


def round_s_of(commit: Commit) -> float:
    """The longest train time in seconds of a round's averaged responses; 0 if it averaged none."""
    return max((answer.train_s for answer in commit.answers if answer.averaged), default=0.0)
