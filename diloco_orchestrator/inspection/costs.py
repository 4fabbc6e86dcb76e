"""What a run costs: machine hours that were used, requests and traffic of a round to come.

Prices are those of Amazon S3 in us-east-1 and of the executors' own tables; other stores charge differently, most of
them less. Wall-clock times of records are compared here, because machines are paid by the hour: an error of seconds
does not matter. What a leg may cost at most is `supervision.budgets`' business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.codecs import get_codec
from diloco_orchestrator.protocol.records import Begin, Commit, Heartbeat
from diloco_orchestrator.run_log.attempts import AttemptRecords

_HOUR_S = 3600.0
_USD_PER_REQUEST = {"PUT": 0.005 / 1000, "LIST": 0.005 / 1000, "GET": 0.0004 / 1000}
_USD_PER_GB_OUT = 0.09  # to the internet; nothing within a region
_SILENT_S = 600.0  # an attempt without a heartbeat for this long is counted as ended

# How often a replica polls while it waits for the others, in a round of equally fast ones (`make soak-table`).
_POLLS = 1.75
_COORDINATOR_POLL_S = 1.0


@dataclass(frozen=True)
class AttemptCost:
    """The machine of one attempt. Times are seconds since 1970 on its own clock."""

    hourly_usd: float | None  # None: the price is not known
    began: float
    ended: float | None  # None: it runs


@dataclass(frozen=True)
class LegCost:
    """What a leg has cost so far."""

    hours: float  # since it began
    usd: float | None  # of machines whose price is known; None if none is
    unpriced: int  # attempts whose price is not known

    def words(self) -> str:
        """For people; empty where no price is known."""
        if self.usd is None:
            return ""
        unknown = f", {self.unpriced} attempts of unknown price not counted" if self.unpriced else ""
        return f"${self.usd:.2f} for machines in {self.hours:.1f} h{unknown}"


def leg_cost(attempts: Sequence[AttemptCost], began: float, now: float) -> LegCost:
    """The sum over a leg's attempts. `began`: of the leg; `now`: the newest time known of it. Seconds since 1970."""
    priced = [attempt for attempt in attempts if attempt.hourly_usd is not None]
    usd = sum(
        (each.hourly_usd or 0.0) * max(0.0, (now if each.ended is None else each.ended) - each.began) / _HOUR_S
        for each in priced
    )
    return LegCost(max(0.0, now - began) / _HOUR_S, usd if priced else None, len(attempts) - len(priced))


class CostReader:
    """Reads from the records of attempts what their machines cost. Keeps what cannot change any more."""

    def __init__(self, attempts: AttemptRecords) -> None:
        self._attempts = attempts
        self._known: dict[tuple[int, int], tuple[int, AttemptCost]] = {}  # (replica, attempt) -> leg and cost

    def of_leg(
        self,
        numbers: Mapping[int, Sequence[int]],
        beats: Mapping[tuple[int, int], Heartbeat | None],
        begin: Begin,
        last: Commit | None,
        now: float | None,
    ) -> LegCost:
        """What the leg that `begin` began has cost.

        `numbers`: attempts by replica. `beats`: heartbeats of the newest attempts; one that was silent for long is
        counted as ended, whatever its executor reports. `last`: the newest commit. `now`: seconds since 1970; None for
        the newest time in the leg's records.
        """
        costs: dict[tuple[int, int], AttemptCost] = {}
        for replica_id, attempts in numbers.items():
            for attempt in attempts:
                cost = self._of_attempt(replica_id, attempt, begin.leg, replaced=attempt < attempts[-1])
                if cost is not None:
                    costs[replica_id, attempt] = cost
        beaten = {who: beat.at for who, beat in beats.items() if beat is not None and who in costs}
        seen = [begin.at, *([last.at] if last else []), *beaten.values()]
        at = max([*seen, *(cost.ended or cost.began for cost in costs.values())]) if now is None else now
        for who, beat_at in beaten.items():
            if costs[who].ended is None and at - beat_at > _SILENT_S:
                costs[who] = replace(costs[who], ended=beat_at)
        return leg_cost(list(costs.values()), begin.at, at)

    def _of_attempt(self, replica_id: int, attempt: int, leg: int, replaced: bool) -> AttemptCost | None:
        """None for an attempt of another leg, or one that has not started: a queue costs nothing."""
        who = replica_id, attempt
        known = self._known.get(who)
        if known is None:
            intent, handle = self._attempts.intent(*who), self._attempts.handle(*who)
            claim = self._attempts.claim(*who) if intent and handle else None
            if intent is None or handle is None or claim is None:
                return None
            known = self._known[who] = (intent.leg, AttemptCost(handle.hourly_usd, claim.at, None))
        if known[0] == leg and known[1].ended is None:
            ended = self._end_of(replica_id, attempt, replaced)
            known = self._known[who] = (leg, replace(known[1], ended=ended))
        return known[1] if known[0] == leg else None

    def _end_of(self, replica_id: int, attempt: int, replaced: bool) -> float | None:
        """When an attempt ended, or None if it runs. One that was killed wrote no exit record: the launch of its
        successor ends it, or its last heartbeat where nobody was there to replace it at once."""
        ended = self._attempts.exit(replica_id, attempt)
        if ended is not None:
            return ended.at
        successor = self._attempts.intent(replica_id, attempt + 1) if replaced else None
        if successor is None:
            return None
        beat = self._attempts.heartbeat(replica_id, attempt)
        return beat.at if beat is not None and successor.at - beat.at > _SILENT_S else successor.at


@dataclass(frozen=True)
class RoundForecast:
    """What one round of all replicas and the coordinator asks of the bucket."""

    requests: Mapping[str, float]  # by kind: PUT, GET, LIST
    bytes_up: int | None  # None: the model's size is not known
    bytes_down: int | None
    requests_usd: float
    traffic_usd: float | None  # if every byte leaves the cloud of the bucket

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def forecast(config: RunConfig, round_s: float, parameters: int | None = None) -> RoundForecast:
    """Predict a round that takes `round_s` seconds of a model with so many trainable parameters.

    Every replica writes its payload's shards, its manifest and a commit that may lose, reads everybody's manifest and
    payload (its own too: it confirms it), and looks for the commit: from half of its straggler deadline on every
    `timing.poll_s`. The coordinator looks every second.
    """
    n = config.replicas
    shards = 1
    size = None
    if parameters is not None:
        part = -(-parameters // config.fragments)
        shard_numel = config.shard_mib * 2**20 // 4
        shards = max(1, -(-part // shard_numel))
        codec = get_codec(config.codec)
        size = (part // shard_numel) * codec.encoded_size(shard_numel)
        size += codec.encoded_size(part % shard_numel) if part % shard_numel else 0
    timing = config.timing
    states = {"round": 1.0, "snapshot": 1.0 / config.snapshot_every, "none": 0.0}[config.saves_state]
    beats, polls = n * round_s / timing.heartbeat_s, round_s / _COORDINATOR_POLL_S
    requests = {
        "PUT": n * (shards + 2 + states) + 3 / config.snapshot_every + beats,
        "GET": n * (n * shards + n + 1 + _POLLS + 1 + round_s / (2 * timing.poll_s)) + 2 * polls + 1 + beats,
        "LIST": n * _POLLS + (2.0 if config.retention.payloads == "needed" else 0.0),  # what is there of an old round
    }
    return RoundForecast(
        requests=requests,
        bytes_up=None if size is None else n * size,
        bytes_down=None if size is None else n * n * size,
        requests_usd=sum(count * _USD_PER_REQUEST[kind] for kind, count in requests.items()),
        traffic_usd=None if size is None else n * n * size / 1e9 * _USD_PER_GB_OUT,
    )
