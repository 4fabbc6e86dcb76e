"""Computes what a run costs: machine hours so far, and requests and traffic of one round in advance.

Requests and traffic have Amazon S3's prices in us-east-1; most other stores charge less. Prices of machines come from
executors. Wall-clock times of records are compared here, because machines are paid by the hour and seconds do not
matter. `supervision` enforces cost limits.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from diloco_orchestrator.allreduce.dealing import (
    average_codec_of,
    bytes_down_of_round,
    dealers_of,
    draw_chance,
    path_of,
    reduced_size,
    shard_numel_of,
)
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.codecs.table import get_codec
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol import pace
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.records import Begin, Commit
from diloco_orchestrator.run_log.attempts import AttemptRecords

_HOUR_S = 3600.0
_USD_PER_REQUEST = {"PUT": 0.005 / 1000, "LIST": 0.005 / 1000, "GET": 0.0004 / 1000}
_USD_PER_GB_OUT = 0.09  # to the internet; free within a region
_FORECAST_ROUNDS = 9  # the last ones, from which the rest is predicted
_SILENT_S = 600.0  # an attempt without a heartbeat for this long is counted as ended

# By how much replicas' rounds are assumed to differ: standard deviation as a share of the round. In the runs of `make
# requests-live` they do: 25 inner steps, each up to a fifth shorter or longer.
_DIFFERENCE = 0.2 / 3**0.5 / 25**0.5
_MEASURED = 0.4  # of that: the median deviation that replicas measure in their first rounds, later 0.67
_DRAWS = 100
_OBJECTS_OF_SNAPSHOT = 6  # and of the log's segments, as `make requests-live` counts them


@dataclass(frozen=True)
class AttemptCost:
    """Price and times of one attempt's machine. Times are seconds since 1970 on that machine's clock."""

    hourly_usd: float | None  # None if the price is not known
    began: float
    ended: float | None  # None while it runs

    def usd(self, at: float) -> float | None:
        """US dollars for the attempt's machine until its end, or until `at` while it runs; None if unknown."""
        if self.hourly_usd is None:
            return None
        return self.hourly_usd * max(0.0, (at if self.ended is None else self.ended) - self.began) / _HOUR_S


@dataclass(frozen=True)
class LegCost:
    """The cost so far of a leg, the run from a start or resume to the next stop."""

    hours: float  # since it began
    usd: float | None  # of machines whose price is known; None if none is
    unpriced: int  # attempts whose price is not known
    rate_usd: float = 0.0  # an hour, of the machines that run now and whose price is known

    def words(self) -> str:
        """The cost of a leg (start or resume to stop) as text; empty if no price is known."""
        if self.usd is None:
            return ""
        unknown = f", {self.unpriced} attempts of unknown price not counted" if self.unpriced else ""
        rate = f", ${self.rate_usd:.2f} an hour now" if self.rate_usd else ""
        return f"${self.usd:.2f} for machines in {self.hours:.1f} h{rate}{unknown}"

    def after(self, earlier: Sequence["LegCost"]) -> "LegCost":
        """The cost of this leg (start or resume to stop) and of `earlier` ones, which have ended, together."""
        legs = [*earlier, self]
        known = [each.usd for each in legs if each.usd is not None]
        hours, unpriced = sum(each.hours for each in legs), sum(each.unpriced for each in legs)
        return replace(self, hours=hours, usd=sum(known) if known else None, unpriced=unpriced)


def leg_cost(attempts: Sequence[AttemptCost], began: float, now: float) -> LegCost:
    """The cost of all attempts of a leg (start or resume to stop).

    `began`: when the leg began. `now`: the newest time known, at which running attempts are counted. Both are seconds
    since 1970.
    """
    priced = [usd for each in attempts if (usd := each.usd(now)) is not None]
    rate = sum(each.hourly_usd or 0.0 for each in attempts if each.ended is None)
    hours = max(0.0, now - began) / _HOUR_S
    return LegCost(hours, sum(priced) if priced else None, len(attempts) - len(priced), rate)


class Spent:
    """US dollars that the machines of a run had cost by a given time.

    The cost of a leg (start or resume to stop) is spread evenly over its hours.
    """

    def __init__(self, began: Mapping[int, float], legs: Mapping[int, LegCost]) -> None:
        """`began`: when each leg (start or resume to stop) began, in seconds since 1970. `legs`: the cost of each. By
        number.
        """
        self._began = began
        self._legs = legs

    def by(self, leg: int, at: float) -> float | None:
        """US dollars for the run's machines until `at` (seconds since 1970), a time in `leg`; None if unknown."""
        known = [self._legs[number].usd for number in sorted(self._legs) if number <= leg]
        if None in known:
            return None
        before, own = sum(usd or 0.0 for usd in known[:-1]), known[-1] or 0.0
        hours = self._legs[leg].hours
        return before + own * (min(1.0, max(0.0, (at - self._began[leg]) / _HOUR_S / hours)) if hours else 0.0)


def duration(seconds: float) -> str:
    """A number of seconds as text in two units: 48 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // next_size} {next_unit}"
    return f"{whole} s"


@dataclass(frozen=True)
class EndForecast:
    """Hours and dollars until the run's planned stop, if its rounds go on as the last ones did."""

    hours: float  # from the last commit to the end
    usd: float | None  # of the whole leg; None if no price is known

    def words(self) -> str:
        """The forecast of hours and dollars to the run's planned stop, as text."""
        cost = "" if self.usd is None else f", ${self.usd:.2f} in all"
        return f"about {duration(self.hours * _HOUR_S)} to the end{cost}"


def end_forecast(spent: LegCost, committed_at: Sequence[float], steps_left: int) -> EndForecast | None:
    """The forecast for a run with `steps_left` outer steps until its planned stop; None before the third commit.

    `committed_at`: times of the commits since the start or resume, oldest first, in seconds since 1970. Uses the median
    interval of the last rounds, so that one long wait does not count, without the first, which includes the start of
    the machines.
    """
    seconds = [after - before for before, after in pairwise(committed_at[1:])][-_FORECAST_ROUNDS:]
    if not seconds:
        return None
    hours = max(0.0, steps_left * median(seconds)) / _HOUR_S
    return EndForecast(hours, None if spent.usd is None else spent.usd + spent.rate_usd * hours)


def egress_usd_per_gb(executor: str, url: str, endpoint: str) -> float:
    """US dollars per GB that a replica on `executor` reads from the bucket at `url`, at the first tier of list prices.

    Assumes that replicas on EKS are in the bucket's region, where S3 costs nothing, and that stores behind an
    `endpoint` of their own charge nothing, as Cloudflare R2 and MinIO.
    """
    scheme = url.removeprefix("fsspec+").partition("://")[0] if "://" in url else "file"
    if scheme in ("s3", "s3a"):
        return 0.0 if endpoint or executor in ("eks", "local") else _USD_PER_GB_OUT
    return {"gs": 0.12, "gcs": 0.12, "az": 0.087, "abfs": 0.087, "abfss": 0.087}.get(scheme, 0.0)


class CostReader:
    """Computes costs from the records of attempts, reading each immutable record once."""

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
    ) -> tuple[dict[tuple[int, int], AttemptCost], float]:
        """(costs of a leg's attempts by replica id and number, time to which they are counted, in seconds since 1970).

        A leg is a run's stretch from start or resume to stop. Attempts without a process are left out, and one without
        a heartbeat for ten minutes has ended.

        Args:
            numbers: the numbers of all attempts by replica id, oldest first.
            beats: the heartbeats of the newest attempts by (replica id, attempt).
            begin: the leg's begin record.
            last: the newest commit.
            now: seconds since 1970; None for the newest time in the leg's records.
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
        return costs, at

    def _of_attempt(self, replica_id: int, attempt: int, leg: int, replaced: bool) -> AttemptCost | None:
        """Price and times of one attempt of `leg` (start or resume to stop).

        None before a process claimed it, and for an attempt of another leg. `replaced`: whether the replica has a later
        one.
        """
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
        """The time when an attempt ended, in seconds since 1970; None while it runs. `replaced`: a later one exists.

        A killed attempt wrote no exit record: it counts until its successor was launched, or until its last heartbeat
        if the successor came much later.
        """
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
    """Requests and traffic of one round, of all replicas and the coordinator together."""

    requests: Mapping[str, float]  # by kind: PUT, GET, LIST
    bytes_up: int | None  # None if the model's size is not known
    bytes_down: int | None
    requests_usd: float
    traffic_usd: float | None  # if every byte leaves the cloud of the bucket
    at_least: bool = False  # whether embeddings, norms and heads add bytes, because they travel in more bits


_BYTES_OF_MOMENTS = 8  # a parameter, of AdamW in fp32: most of a saved state


def forecast(
    config: RunConfig, round_s: float, parameters: int | None = None, allowed: int | None = None
) -> RoundForecast:
    """Predict requests and traffic of a round that takes `round_s` seconds.

    Every replica writes its payload's shards and its manifest, reads those of the others, and polls while it waits for
    the slowest; one of them writes the commit, which the others and the coordinator read. All pauses are those of
    `protocol.pace`. Replicas' times are assumed to differ by 2.3 % (standard deviation); polls for a replica that is
    later add to the forecast.

    `parameters`: number of trainable parameters; without it the result has requests only, as of one shard. Bytes are
    those of matrices: embeddings, norms and heads, which have more bits with some codecs, need the model's layout.
    `allowed`: requests in five minutes that the store allows, to which pauses are fitted; None: as many as come.
    """
    n, codec = config.replicas, get_codec(config.codec)
    lengths, size, scattered = [1], None, False
    if parameters is not None:
        part = -(-parameters // config.fragments)
        path = path_of(config, [part])
        lengths = [stop - start for start, stop in shard_ranges(part, shard_numel_of(config, path, [part]))]
        size, scattered = sum(map(codec.encoded_size, lengths)), path == "scatter_reduce"
    shards = max(1, len(lengths))
    states = {"round": 1.0, "snapshot": 1.0 / config.snapshot_every, "none": 0.0}[config.saves_state]
    pieces = -(-_BYTES_OF_MOMENTS * (parameters or 0) // (config.shard_mib * 2**20))
    saved = states * ((1 if pieces <= 1 else pieces + 1) + shards * (codec.feedback > 0))  # with residuals
    apart_s = pace.apart_s(config, allowed)
    beats, beats_read = pace.heartbeat_s(config, round_s, apart_s), pace.heartbeats_read_s(config, round_s, apart_s)
    seldom = round_s / max(pace.seldom_read_s(round_s), apart_s)
    listings, polls = _while_waiting(config, round_s, apart_s)
    retention = 2.0 if config.retention.payloads == "needed" else 0.0  # payloads and states to delete
    requests = {
        "PUT": n * (shards + 1 + saved + round_s / beats) + 1 + _OBJECTS_OF_SNAPSHOT / config.snapshot_every,
        # Payloads and manifests of the others, and its own by who ends the round; commit and request to halt;
        # heartbeats; records that end attempts.
        "GET": n * (n - 1) * (shards + 1)
        + 1
        + n
        + 1
        + _commit_polls(round_s, apart_s)
        + polls
        + n * round_s / beats_read
        + (n + 1) * seldom,
        # Manifests, and requests for payloads; replicas that are out, and later attempts; the listings of a display.
        "LIST": listings + 1 + 2 * polls + n * seldom + 3 * seldom + 3 / config.snapshot_every + retention,
    }
    of_averages = average_codec_of(config.codec)
    averages = sum(reduced_size(each, of_averages) for each in lengths) if scattered else 0
    down = None if size is None else n * (n - 1) * size
    if size is not None and scattered:
        down = bytes_down_of_round(n * size, lengths, of_averages, n)
        # Each dealer writes its part of the averages, its record of them and two check records. A replica reads these
        # records of all dealers, the shards that it deals and perhaps draws, and the averages that it does not make.
        records, drawn = 3 * dealers_of(shards, n), draw_chance(shards, n) * (n - 1)
        requests["PUT"] += shards + records
        requests["GET"] += n * (2 * shards + drawn + shards + records) - n * (n - 1) * shards
        requests["LIST"] += 3 * n
    return RoundForecast(
        requests=requests,
        bytes_up=None if size is None else n * size + averages,
        bytes_down=down,
        requests_usd=sum(count * _USD_PER_REQUEST[kind] for kind, count in requests.items()),
        traffic_usd=None if size is None else n * (n - 1) * size / 1e9 * _USD_PER_GB_OUT,
        at_least=bool(codec.fine),
    )


def _while_waiting(config: RunConfig, round_s: float, apart_s: float) -> tuple[float, float]:
    """Requests of all replicas that wait for the slowest in a round of `round_s` seconds, mean of `_DRAWS` draws.

    Returns (listings of manifests, the one after a replica's own response included; polls for rare events, for each
    kind of them).
    """
    rng, deviation_s = random.Random(0), _DIFFERENCE * round_s
    pauses = pace.waiting(config, round_s, _MEASURED * deviation_s, apart_s)
    listings = polls = 0.0
    for _ in range(_DRAWS):
        times = [rng.gauss(0.0, deviation_s) for _ in range(config.replicas)]
        last = max(times)
        for now in times:
            polls += (last - now) // max(pace.waits_long_s(round_s), apart_s)
            listings += 1
            for pause_s in pauses.pauses():
                if now >= last:
                    break
                # Others are expected at their usual time, 0.
                now += max(pause_s, min(-now, pace.EXPECTED_S))
                listings += 1
    return listings / _DRAWS, polls / _DRAWS


def _commit_polls(round_s: float, apart_s: float) -> float:
    """GET requests of a coordinator for the commit of a round of `round_s` seconds, including the successful one."""
    open_s = polls = 0.0
    while open_s < round_s:
        open_s += max(pace.commits_read_s(round_s, open_s), apart_s)
        polls += 1
    return polls
