"""Speeds, costs and decisions about the places at which a run trains: which executor runs which replica, and why.

A place is where an attempt's intent record says that it was launched: one of several executors that supervision chooses
from, or the run's only executor.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from diloco_orchestrator.inspection.costs import AttemptCost
from diloco_orchestrator.protocol.attempt_records import VACATED, Cancel, Intent
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.protocol.replica_names import replicas
from diloco_orchestrator.run_log.attempts import AttemptRecords

_MEASURED = 27  # contributions of a place, the newest, whose median speed counts

PlaceOf = Callable[[int, int], str]  # the place of an attempt by replica and number; "" if its intent cannot be read


class PlaceSpeeds:
    """Tokens per second of one replica at each place (executor), and tokens averaged from there, from the commits."""

    def __init__(self, place_of: PlaceOf) -> None:
        self._place_of = place_of
        self._speeds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_MEASURED))
        self.tokens: dict[tuple[int, str], int] = defaultdict(int)  # by leg and place

    def add(self, commit: Commit) -> None:
        """Count the contributions that a commit averages. Those without tokens or training time do not count."""
        for answer in commit.answers:
            if answer.averaged and answer.tokens and answer.train_s:
                place = self._place_of(answer.replica_id, answer.attempt)
                self._speeds[place].append(answer.tokens / answer.train_s)
                self.tokens[commit.leg, place] += answer.tokens

    def measured(self) -> dict[str, float]:
        """Median tokens per second over the newest 27 contributions from each place (executor), by the place's name."""
        return {place: median(found) for place, found in sorted(self._speeds.items())}


@dataclass(frozen=True)
class PlaceRow:
    """One place (executor) of a run as a row of the status: its attempts, tokens, speed and cost."""

    place: str
    replicas: tuple[int, ...]  # whose newest attempt is there and has not ended
    hourly_usd: float | None  # of one machine, as of the newest launch there; None if it is not known
    usd: float | None  # of all machines there since the run's start or last resume; None if a price is not known
    tokens: int  # averaged from there since then
    tokens_per_s: float | None  # of one replica; None before a contribution from there was averaged

    @property
    def usd_per_million(self) -> float | None:
        """US dollars for a million tokens of one replica at this place; None without a price or a speed."""
        if self.hourly_usd is None or not self.tokens_per_s:
            return None
        return 1e6 * self.hourly_usd / 3600 / self.tokens_per_s

    def words(self) -> str:
        """The place (executor) with its speed and cost as one line of text."""
        who = replicas(self.replicas) if self.replicas else "nobody"
        price = "" if self.hourly_usd is None else f", ${self.hourly_usd:.2f} an hour each"
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s each"
        cost = "" if self.usd_per_million is None else f", ${self.usd_per_million:.3g} per million tokens"
        spent = "" if self.usd is None else f"; ${self.usd:.2f} so far"
        return f"place {self.place}: {who}{price}{speed}{cost}{spent}"


def place_rows(
    costs: Mapping[tuple[int, int], AttemptCost], at: float, leg: int, speeds: PlaceSpeeds, place_of: PlaceOf
) -> list[PlaceRow]:
    """The rows of all places (executors) where attempts of a leg (start or resume to stop) ran as processes, by name.

    `costs`: price and times of these attempts by (replica id, number). `at`: seconds since 1970, to which attempts that
    run are counted.
    """
    there: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for who in sorted(costs):
        there[place_of(*who)].append(who)
    measured, rows = speeds.measured(), []
    for place, attempts in sorted(there.items()):
        usd = [costs[who].usd(at) for who in attempts]
        newest = max(attempts, key=lambda who: costs[who].began)
        rows.append(
            PlaceRow(
                place,
                tuple(who[0] for who in attempts if costs[who].ended is None),
                costs[newest].hourly_usd,
                None if None in usd else sum(each for each in usd if each is not None),
                speeds.tokens[leg, place],
                measured.get(place),
            )
        )
    return rows


def newest_decision(attempts: AttemptRecords, numbers: Mapping[int, Sequence[int]], leg: int) -> str:
    """The newest decision since the last start or resume at which place (executor) a replica trains, as text; or empty.

    `numbers`: the numbers of all attempts by replica id, oldest first. Reads the cancel record of each newest attempt.
    """
    intents = [attempts.intent(replica_id, found[-1]) for replica_id, found in numbers.items() if found]
    chosen = [each for each in intents if each is not None and each.leg == leg and each.placed is not None]
    if not chosen:
        return ""
    decisions = [(each.at, each.replica_id, _opened(each)) for each in chosen]
    cancels = [attempts.cancel(each.replica_id, each.attempt) for each in chosen]
    decisions += [(each.at, each.replica_id, _left(each)) for each in cancels if each is not None and each.vacates]
    return max(decisions)[2]


def _opened(intent: Intent) -> str:
    return f"replica {intent.replica_id} was launched at {intent.executor}: {intent.placed}"


def _left(cancel: Cancel) -> str:
    return f"replica {cancel.replica_id} leaves: {cancel.reason.removeprefix(VACATED).lstrip(': ')}"
