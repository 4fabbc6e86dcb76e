"""Pauses between two polls of the bucket, as functions of the length of a round, each up to a bound.

Requests cost money by the thousand, and nobody needs to know of a round of half an hour to the second. Lengths and
pauses are seconds on the clock of the process that waits.
"""

import math

from diloco_orchestrator.clock import Backoff
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.records import Commit

EXPECTED_S = 10.0  # the longest pause for those who are still expected: the leg may be stopped meanwhile
_SHORTEST_WAIT_S = 0.02
_LONGEST_WAIT_S = 15.0
# Between two listings: what a round of any length loses at its end. A second of a machine at $1 an hour costs as much
# as 55 of them.
_LONGEST_LISTING_S = 3.0
_WINDOW_S = 300.0  # of a store's limit of requests
_POLLS = 0.6  # the share of such a limit that polls may take; the rest is for what rounds write and read


def apart_s(config: RunConfig, allowed: int | None) -> float:
    """The least pause in seconds between two polls of each process, for a store that limits requests; 0 for others.

    `allowed`: requests in five minutes (`Store.requests_allowed`), which replicas, coordinator and one display share.
    In such a pause a waiting replica sends two requests for its round's end, and a coordinator or display one or two
    for each replica and some ten for the rest.
    """
    return 0.0 if allowed is None else _WINDOW_S * (4 * config.most_replicas + 10) / (_POLLS * allowed)


def heartbeat_s(config: RunConfig, round_s: float, apart_s: float = 0.0) -> float:
    """The pause between two heartbeats: two rounds of `round_s` seconds, within the limits of two settings.

    It is a multiple of `timing.heartbeat_s`, and at most `retry.hung_after_s / 2.5` where that is longer. In between, a
    replica's manifests show that it is alive. `apart_s`, here and below: the pause that the store's limit leaves.
    """
    call_s = config.timing.heartbeat_s
    most = math.floor(config.retry.hung_after_s / 2.5 / call_s)
    return call_s * max(1, min(math.ceil(max(round(2 * round_s / call_s), apart_s / call_s)), most))


def heartbeats_read_s(config: RunConfig, round_s: float, apart_s: float = 0.0) -> float:
    """Seconds until a heartbeat whose counter has increased is read again: at most two thirds of `retry.hung_after_s`.

    The last third is left to read again a heartbeat whose counter has not increased. Each GET may find a heartbeat that
    was its attempt's last, so an attempt that hangs is found after this pause and `retry.hung_after_s` at the latest.
    """
    return max(config.timing.heartbeat_s, min(max(3.0 * round_s, apart_s), config.retry.hung_after_s / 1.5))


def heartbeats_read_again_s(config: RunConfig, apart_s: float = 0.0) -> float:
    """Seconds until a heartbeat whose counter has not increased is read again, at most `retry.hung_after_s / 6`."""
    return max(config.timing.heartbeat_s, min(apart_s, config.retry.hung_after_s / 6))


def longest_wait_s(config: RunConfig, round_s: float, apart_s: float = 0.0) -> float:
    """The longest pause in seconds between polls of a replica that waits, or trains while others may end the round.

    A fiftieth of a round of `round_s` seconds, at most `_LONGEST_WAIT_S`; at least `timing.poll_s`.
    """
    return max(config.timing.poll_s, min(round_s / 50, _LONGEST_WAIT_S), apart_s)


def waiting(config: RunConfig, round_s: float, spread_s: float, apart_s: float = 0.0) -> Backoff:
    """The growing pauses between two polls of a replica that waits for others' responses.

    They end at `longest_wait_s`, in long rounds at `_LONGEST_LISTING_S`, and `apart_s` if that is longer: only who
    waits long polls seldom, so that a limit of requests costs a round little. `round_s`: usual length of a round.
    `spread_s`: median deviation of a replica's train times, the first pause unless a five-hundredth of `round_s` is
    longer.
    """
    longest_s = max(min(longest_wait_s(config, round_s), max(config.timing.poll_s, _LONGEST_LISTING_S)), apart_s)
    return Backoff(min(max(_SHORTEST_WAIT_S, spread_s, round_s / 500), longest_s), longest_s, factor=1.5)


def waits_long_s(round_s: float) -> float:
    """Seconds between a waiting replica's polls for rare events, such as a replica given up: 10, in long rounds 60."""
    return max(10.0, min(round_s / 20, 60.0))


def commits_read_s(round_s: float, open_s: float) -> float:
    """Seconds until a coordinator or a display polls again for the commit of the open round.

    `round_s`: usual length of a round. `open_s`: seconds since the commit before was seen. The first poll is once a
    round has passed, or after 600 s if that is earlier; later polls are an eighth of a round apart, at most a minute.
    """
    early_s = round_s - open_s
    return max(1.0, min(early_s, 600.0) if early_s > 0 else min(round_s / 8, 60.0))


def starts_read_s(open_s: float) -> float:
    """Seconds between two polls before the first round has ended, `open_s` seconds after the process or round began.

    The polls are for records that attempts write as they start or end, and, by a training replica, for the round's
    commit.
    """
    return max(1.0, min(open_s / 5, 120.0))


def seldom_read_s(round_s: float) -> float:
    """Seconds between two polls for rare events such as a resume: 20 rounds, at most half an hour."""
    return max(10.0, min(20 * round_s, 1800.0))


def records_read_s(round_s: float) -> float:
    """Seconds between polls for records of an attempt whose provider reports no status: a tenth of a round, 1 to 15."""
    return max(1.0, min(round_s / 10, 15.0))


def round_s_of(commit: Commit) -> float:
    """The longest train time in seconds of a round's averaged responses; 0 if it averaged none."""
    return max((answer.train_s for answer in commit.answers if answer.averaged), default=0.0)
