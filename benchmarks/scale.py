"""What a round of 4 to 1,024 replicas costs: the product's own code over a model of a store.

    make bench-scale
    make bench-scale OPTIONS="--replicas 4 64 1024 --billions 1 70 --codecs int4 --up 1000 --down 1000"

Dealing, shards, bytes, pauses, forecast, `decide`, `shares_of`, `fold_round`, `why_unread` and the records are the real
ones: their CPU seconds and sizes are measured here, on as many replicas. Modelled is what only a large fleet has: the
latency of each request (lognormal), the requests a second that one prefix of a store takes, the bandwidth of each
replica, requests that fail and are sent again, replicas that die, and the seconds of arithmetic. A replica's phases
follow one another; what all replicas send in a phase takes at least its number over the store's rate. Behind the table
stands, for a grid of links, how much slower the path that `"auto"` takes is than the other one: by `agreed_link`, which
measures over the same latencies and bandwidths.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import numpy as np
from measuring import machine, markdown, publish, sources_of
from numpy.typing import NDArray
from virtual_time import VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.allreduce.dealing import (
    ASSUMED,
    Link,
    at_once_for,
    average_codec_of,
    bytes_down_of_round,
    dealers_of,
    dealing_of,
    draw_chance,
    path_of,
    reduced_size,
    shard_numel_of,
)
from diloco_orchestrator.allreduce.link import agreed_link
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.clock import MOST_PARALLEL
from diloco_orchestrator.codecs.table import get_codec
from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.inspection.costs import forecast
from diloco_orchestrator.protocol import keys, pace, rounds, weights
from diloco_orchestrator.protocol.check_records import Checked, ReadShards
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.record_format import By, Stamp
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution, Metric, Origin, Payload, Score, Shard
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.straggler import StragglerDeadline
from diloco_orchestrator.protocol.void_commits import why_unread
from diloco_orchestrator.store.memory import MemoryStore

Seconds = NDArray[np.float64]
STAMP = Stamp("0123456789abcdef", lambda: 1_700_000_000.0)
DEVIATION = 0.023  # of train times, measured on real runs: docs/inside/requests.md
_AT_ONCE_UP = 4  # payload shards that are written at the same time
_CPU_SHARDS = 256  # of a manifest on which CPU seconds are measured, at most; more are scaled
_LARGEST_CHECKED = 128  # replicas of the round whose commit is checked, at most; more are scaled


@dataclass(frozen=True)
class Place:
    """A store, and the machines of a fleet."""

    latency_s: float = 0.03  # median of a request
    sigma: float = 0.5  # of the logarithm of a latency
    up: float = 125e6  # bytes a second of a replica
    down: float = 125e6
    gets_per_s: float = 5500.0  # of the run's prefix, as S3 documents them
    puts_per_s: float = 3500.0
    failing: float = 1e-4  # share of requests that are sent again
    again_s: float = 1.0  # later
    dying: float = 0.0  # chance that a replica is missing in a round
    arithmetic: float = 10e9  # bytes of fp32 a second that a replica decodes, adds, steps or hashes

    def requests_s(self, count: float, at_once: int, rng: np.random.Generator) -> float:
        """Seconds of `count` requests of one replica, `at_once` of them at the same time."""
        whole = math.ceil(count)
        if whole <= 0:
            return 0.0
        drawn = min(whole, 4096)
        took = self.latency_s * np.exp(self.sigma * rng.standard_normal(drawn))
        took += (rng.random(drawn) < self.failing) * self.again_s
        lanes = np.zeros(at_once)
        np.add.at(lanes, np.arange(drawn) % at_once, took)
        return float(lanes.max()) * whole / drawn


@dataclass
class Round:
    """One round: seconds by phase, and what moves."""

    phases: dict[str, float] = field(default_factory=dict)
    requests: dict[str, float] = field(default_factory=dict)  # of all replicas
    reads: dict[str, float] = field(default_factory=dict)  # GETs of a replica, by what they read, without polls
    payload_down: float = 0.0  # bytes of a replica
    records_down: float = 0.0
    up: float = 0.0

    @property
    def sync_s(self) -> float:
        return sum(self.phases.values())

    @property
    def slowest_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])


# -- the product's own code, measured -----------------------------------------------------------------------------


def manifest_of(replica_id: int, payload: Payload, shares: int) -> Contribution:
    return Contribution(
        **STAMP(),
        round=9,
        leg=1,
        replica_id=replica_id,
        attempt=1,
        claim_sha256="a" * 64,
        kind="delta",
        base_digest=payload.shards[0].digest,
        snapshot_round=0,
        rebuilt_after=0,
        payload=payload,
        tokens=100_000,
        origins=(Origin(round=9, steps=30),),
        in_loop=Metric(sum=-45.0, count=30),
        scores=(Score(share=replica_id % shares, sum=-8.0 - replica_id % 7 / 100, count=8),),
        train_s=1200.0,
    )


def payload_of(codec: str, numel: int, shard_numel: int, most: int) -> Payload:
    """A payload of which at most `most` shards are described."""
    cut = shard_ranges(numel, shard_numel)[:most]
    shards = tuple(
        Shard(digest=bulk_digest(f"{index}".encode()), size=get_codec(codec).encoded_size(stop - start))
        for index, (start, stop) in enumerate(cut)
    )
    length = sum(stop - start for start, stop in cut)
    return Payload(codec=codec, numel=length, shard_numel=shard_numel, shards=shards, norms=(1.234,) * len(cut))


def cpu_s(call: Callable[[], object], repetitions: int = 3) -> float:
    found = []
    for _ in range(repetitions):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return min(found)


@dataclass(frozen=True)
class Records:
    """Sizes in bytes, and CPU seconds, of what a replica of a fleet reads, decides and writes in one round."""

    manifest: float
    manifest_s: float
    checked: float
    checked_s: float
    commit: float
    commit_s: float  # to parse it and, by scatter-reduce, to check that others have read what it averages
    decide_s: float  # `decide`, weights, the guard's fold, the commit as bytes


def records_of(config: RunConfig, shards: int, dealt: int) -> Records:
    """Measure the records and rules of a round. `shards`: of a payload; `dealt`: of each to a replica; 0: a gather."""
    return _records(config.replicas, shards, dealt)


@cache
def _records(n: int, shards: int, dealt: int) -> Records:
    config = make_config({"entrypoint": "m:f", "replicas": n})
    there = min(shards, _CPU_SHARDS)
    payload, small = payload_of("int4", shards * 4096, 4096, there), payload_of("int4", 4096, 4096, 1)
    data, least = manifest_of(0, payload, n).to_bytes(), manifest_of(0, small, n).to_bytes()
    parse_s = cpu_s(lambda: (sha256_hex(data), Contribution.from_bytes(data, "")))
    least_s = cpu_s(lambda: (sha256_hex(least), Contribution.from_bytes(least, "")))
    more = (shards - 1) / max(1, there - 1)
    manifests = [manifest_of(i, small, n) for i in range(n)]
    answers = tuple(
        Answer(
            replica_id=m.replica_id,
            attempt=1,
            kind="delta",
            averaged=True,
            weight=30,
            norm=1.234 + m.replica_id / 1e4,
            payload=small.digest,
            tokens=m.tokens,
            origins=m.origins,
            train_s=m.train_s,
            manifest_sha256=sha256_hex(f"{m.replica_id}".encode()),
        )
        for m in manifests
    )
    heldout = HeldoutSet(metric="loss", shares=(8,) * n, digest="d" * 64)
    state: dict[str, object] | None = None
    for round_ in (7, 8):
        folded = fold_round(state, config.guard, round_, heldout, range(n), manifests, manifests)  # type: ignore[arg-type]
        state = folded.state if folded else None
    view = rounds.View(answers, range(n), 0.0, 1200.0, 1200.0, StragglerDeadline.of([1200.0] * 9))
    commit = Commit(
        **STAMP(),
        round=9,
        leg=1,
        fragment=0,
        outer_step=9,
        answers=answers,
        begin_sha256="b" * 64,
        base_digest=payload.shards[0].digest,
        roster=tuple(range(n)),
        guard=state,  # type: ignore[arg-type]
        applied=True,
        empty_rounds=0,
        stop="none",
        by=By((0, 1)),
        reason=f"{n} of {n} contributions",
        previous="c" * 64,
    )

    def decide() -> None:
        assert rounds.decide(view, 1201.0, rounds.Policy.of(config)).action is rounds.Action.COMMIT
        weights.shares_of(9, answers, config)
        fold_round(state, config.guard, 9, heldout, range(n), manifests, manifests)  # type: ignore[arg-type]
        commit.to_bytes()

    as_bytes = commit.to_bytes()
    commit_s = cpu_s(lambda: Commit.from_bytes(as_bytes, ""), 1)
    checked = checked_s = 0.0
    if dealt:
        few = min(n, _LARGEST_CHECKED)
        words = [
            Checked(
                **STAMP(),
                round=9,
                leg=1,
                replica_id=i,
                attempt=1,
                number=1,
                claim_sha256="a" * 64,
                read=tuple(
                    ReadShards(manifest_sha256=a.manifest_sha256, good=tuple(range(dealt)))
                    for a in answers[: n if i == 0 else few]
                    if a.replica_id != i
                ),
            )
            for i in range(few)
        ]
        first = words[0].to_bytes()
        checked, checked_s = float(len(first)), cpu_s(lambda: Checked.from_bytes(first, ""))
        of_few = commit.model_copy(update={"answers": answers[:few], "by": By((few, 1))})
        described = {"payload": payload_of("int4", dealt * 4096, 4096, dealt)}
        read = {m.replica_id: m.model_copy(update=described) for m in manifests[:few]}
        assert why_unread(of_few, read, words) == ""
        commit_s += cpu_s(lambda: why_unread(of_few, read, words), 1) * (n / few) ** 2
    return Records(
        manifest=len(least) + more * (len(data) - len(least)),
        manifest_s=least_s + more * max(0.0, parse_s - least_s),
        checked=checked,
        checked_s=checked_s,
        commit=len(as_bytes) + 110.0 * n * bool(dealt),  # with the check records that it names
        commit_s=commit_s,
        decide_s=cpu_s(decide),
    )


# -- one round ---------------------------------------------------------------------------------------------------------


def played(config: RunConfig, numel: int, path: str, place: Place, compute_s: float, link: Link = ASSUMED) -> Round:
    """One round of a fleet, phase by phase. `link`: by which a run with path="auto" cuts its shards."""
    rng, n, scatter = np.random.default_rng(0), config.replicas, path == "scatter_reduce"
    lengths = [b - a for a, b in shard_ranges(numel, shard_numel_of(config, path, [numel], lambda: link))]
    codec, average = get_codec(config.codec), average_codec_of(config.codec)
    shards, size = len(lengths), float(sum(map(codec.encoded_size, lengths)))
    averages = sum(reduced_size(each, average) for each in lengths)
    done, one = Round(), rng
    dead = rng.random(n) < place.dying
    dead[0] = False
    dealing = dealing_of(9, config, range(n)) if scatter else None
    dealt = busiest = 0.0
    told = n
    if dealing is not None:
        readers = {
            len(dealing.readers(author, index)) for author in range(min(n, 4)) for index in range(min(shards, 16))
        }
        assert readers == {2}
        dealt = 2.0 * shards / n * (n / (n - 1))  # shards of each other replica's payload that a replica reads
        told = dealers_of(shards, n)
        busiest = max(dealt, 2.0 * (shards // n) + min(shards % n, 2))  # where they cannot be dealt evenly
    records = records_of(config, shards, max(1, round(dealt)) if scatter else 0)

    def each(call: Callable[[], float]) -> Seconds:
        return np.array([call() for _ in range(min(n, 64))])  # of larger fleets the slowest of 64 stands for all

    def bounded(seconds: float, count: float, per_s: float) -> float:
        return max(seconds, count / per_s)

    trained = compute_s * (1 + DEVIATION * rng.standard_normal(n))
    times = np.sort(trained[~dead])
    # Publish: payload shards, then the manifest.
    sent = each(lambda: max(size / place.up, place.requests_s(shards, _AT_ONCE_UP, one)) + place.requests_s(1, 1, one))
    encode_s = 2 * 4 * numel / place.arithmetic
    done.phases["publish"] = bounded(float(sent.max()), n * (shards + 1), place.puts_per_s) + encode_s
    # Receive: the slowest replica reads all that is dealt to it after its own contribution.
    payload_reads = (n - 1) * (dealt if scatter else float(shards))
    slowest_reads = (n - 1) * (busiest if scatter else float(shards))
    read_s = (slowest_reads / shards * size + n * records.manifest) / place.down
    receive = each(lambda: max(read_s, place.requests_s(n + slowest_reads, MOST_PARALLEL, one)))
    done.reads = {"payload shards": payload_reads, "manifests": n}
    verify_s = slowest_reads / shards * 4 * numel / place.arithmetic + n * records.manifest_s
    done.phases["receive"] = bounded(float(receive.max()), n * (n + payload_reads), place.gets_per_s) + verify_s
    if scatter:
        tell = each(lambda: max(told * records.checked / place.down, place.requests_s(told + 2, MOST_PARALLEL, one)))
        done.phases["check"] = bounded(float(tell.max()), n * told, place.gets_per_s) + told * records.checked_s
    # Decide: the real rule, over who has answered; where some died, it waits for the straggler deadline.
    done.phases["decide"] = records.decide_s + waits(config, times, dead, compute_s) + place.requests_s(2, 1, one)
    pause_s = pace.longest_wait_s(config, compute_s)
    done.phases["commit"] = (
        min(pause_s, 2.0) + place.requests_s(1, 1, one) + records.commit_s + records.commit / place.down
    )
    # Average and step.
    made = (busiest + 1.0) / shards if scatter else 1.0
    arithmetic = made * n * 4 * numel / place.arithmetic + 3 * 4 * numel / place.arithmetic
    done.phases["average"] = arithmetic
    if scatter:
        own = busiest
        drawn, chance = n - 1 - 2 * dealt / shards, draw_chance(shards, n)
        rest = shards - own - 1
        written = each(lambda: place.requests_s(own / 2 + 1, 1, one) + averages / n / place.up)
        drew = each(lambda: max(drawn * size / shards / place.down, place.requests_s(drawn, MOST_PARALLEL, one)))
        at_once = at_once_for(max(lengths))
        took = each(
            lambda: (
                place.requests_s(told, MOST_PARALLEL, one)
                + max(rest * averages / shards / place.down, place.requests_s(rest, at_once, one))
            )
        )
        of_others = {"of a drawn shard": drawn * chance, "averages": rest}
        done.reads |= {"check records": told, "records of averages": told, **of_others}
        done.phases["reduce"] = bounded(
            float((written + drew + took).max()), n * (drawn * chance + told + rest), place.gets_per_s
        )
    planned = forecast(config, compute_s, numel)
    done.requests = dict(planned.requests)
    done.payload_down = (bytes_down_of_round(n * size, lengths, average, n) if scatter else n * (n - 1) * size) / n
    done.records_down = n * records.manifest + records.commit + (told * records.checked if scatter else 0.0)
    done.up = size + (averages / n if scatter else 0.0)
    return done


def waits(config: RunConfig, times: Seconds, dead: NDArray[np.bool_], compute_s: float) -> float:
    """Seconds after the last contribution until `decide` commits, by trying later and later times."""
    policy, deadline = rounds.Policy.of(config), StragglerDeadline.of([compute_s] * 9)
    there = [i for i in range(config.replicas) if not dead[i]]
    answers = [
        Answer(replica_id=i, attempt=1, kind="delta", averaged=False, weight=30, manifest_sha256="a" * 64)
        for i in there
    ]
    last = float(times.max())
    view = rounds.View(answers, range(config.replicas), 0.0, last, last, deadline)
    later = 0.0
    while rounds.decide(view, last + later, policy).action is rounds.Action.WAIT:
        later = max(1.0, later * 1.25)
    return later


# -- what comes out ----------------------------------------------------------------------------------------------------


def config_of(n: int, codec: str, path: str) -> RunConfig:
    return make_config({"entrypoint": "m:f", "replicas": n, "codec": codec, "path": path})


def table(given: argparse.Namespace) -> str:
    place, rows = place_of(given), []
    link = measured(place)
    for billions, codec, n in product(given.billions, given.codecs, given.replicas):
        numel, config = round(billions * 1e9), config_of(n, codec, "auto")
        chosen = path_of(config, [numel], lambda: link)
        one = played(config, numel, chosen, place, given.compute, link)
        others = by_names(n, codec, numel, place, given.compute)
        requests_usd = forecast(config_of(n, codec, chosen), given.compute, numel).requests_usd
        phases = ", ".join(f"{name} {s:.1f}" for name, s in one.phases.items() if s >= 0.05 * one.sync_s)
        rows.append(
            [
                f"{billions:g} B",
                codec,
                f"{n}",
                chosen.replace("_", "-"),
                f"{one.sync_s:.1f}",
                f"{min(one.sync_s, *others):.1f}",
                phases,
                f"{one.up / 1e9:.2f}",
                f"{one.payload_down / 1e9:.2f}",
                f"{one.records_down / 1e6:.1f}",
                f"{sum(one.requests.values()) / n:,.0f}",
                f"{requests_usd:.3f}",
                f"{given.compute / (given.compute + one.sync_s):.1%}",
            ]
        )
    columns = (
        *("parameters", "codec", "N", "auto takes", "sync, s", "better path, s", "phases of 5 % and more, s"),
        *("GB up", "GB down", "MB of records down", "requests a replica", "requests, $", "utilisation"),
    )
    words = (
        f"Rounds of {given.compute:g} s, replicas with {given.up:g}/{given.down:g} Mb/s and {given.arithmetic:g} GB/s "
        f"of arithmetic, {1000 * place.latency_s:g} ms a request in the median, {place.gets_per_s:g} GETs and "
        f"{place.puts_per_s:g} PUTs a second for the run, {100 * given.dying:g} % of replicas missing in a round."
    )
    return f"{words}\n\n{markdown(columns, rows)}\n\n{reads_table(given, place, link)}"


def reads_table(given: argparse.Namespace, place: Place, link: Link) -> str:
    """What a replica reads in a round by scatter-reduce, by kind, of the first size and codec that were asked for."""
    numel, codec, rows = round(given.billions[0] * 1e9), given.codecs[0], []
    for n in (n for n in given.replicas if n > 2):
        config = config_of(n, codec, "scatter_reduce")
        one = played(config, numel, "scatter_reduce", place, given.compute, link)
        all_s = n * sum(one.reads.values()) / place.gets_per_s
        rows.append([f"{n}", *(f"{count:,.0f}" for count in one.reads.values()), f"{all_s:,.1f}"])
    columns = ("N", *one.reads, f"s for those of all replicas, at {place.gets_per_s:g} a second")
    heading = f"GETs of a replica in a round by scatter-reduce, {given.billions[0]:g} B in {codec}, without polls:"
    return f"{heading}\n\n{markdown(columns, rows)}"


class FarStore(MemoryStore):
    """A store at a `Place`: requests of random latency, whose bytes pass one link one after the other."""

    def __init__(self, place: Place, clock: VirtualClock, seed: Sequence[int]) -> None:
        super().__init__()
        self._place, self._clock, self._rng = place, clock, np.random.default_rng(seed)
        self._free = {place.up: 0.0, place.down: 0.0}

    def _pass(self, size: int, rate: float) -> None:
        latency_s = self._place.latency_s * math.exp(self._place.sigma * self._rng.standard_normal())
        began = self._clock.now()
        self._free[rate] = max(began, self._free[rate]) + size / rate
        self._clock.sleep(max(latency_s, self._free[rate] - began))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            data = super().get(key, start, end)
        except ObjectMissing:
            self._pass(0, self._place.down)
            raise
        self._pass(len(data), self._place.down)
        return data

    def put(self, key: str, data: bytes) -> None:
        self._pass(len(data), self._place.up)
        super().put(key, data)


def measured(place: Place, *seed: int) -> Link:
    """The link that a replica at a place measures, on virtual time."""
    world, found = VirtualTime(), list[Link]()

    def measure(clock: VirtualClock) -> None:
        store = FarStore(place, clock, seed)
        stamp, background = Stamp("0123456789abcdef", clock.wall_time), VirtualBackground(clock)
        found.append(agreed_link(store, clock, background, stamp, 0, lambda it: store.create(keys.LINK, it.to_bytes())))

    world.spawn("replica", measure)
    world.run()
    return found[0]


def by_names(n: int, codec: str, numel: int, place: Place, compute_s: float) -> list[float]:
    """Seconds of a round by each path, as of a run that names it."""
    paths = ("gather", "scatter_reduce") if n > 2 else ("gather",)
    return [played(config_of(n, codec, path), numel, path, place, compute_s).sync_s for path in paths]


def regret(given: argparse.Namespace) -> str:
    """How much slower than the other path the one is that "auto" takes, over a grid of fleets and links."""
    worst, over, count, links = [], 0, 0, dict[tuple[int, int, int], Link]()
    for n, millions, codec, mb, ms in product(
        (4, 8, 16, 64), (1, 25, 1000, 7000), ("fp32", "int8", "int4"), (100, 500, 1000, 10_000), (5, 30, 100)
    ):
        place = replace(place_of(given), latency_s=ms / 1000, up=mb / 8 * 1e6, down=mb / 8 * 1e6)
        numel = round(millions * 1e6)
        if (n, mb, ms) not in links:
            links[n, mb, ms] = measured(place, n, mb, ms)
        link, config = links[n, mb, ms], config_of(n, codec, "auto")
        chosen = path_of(config, [numel], lambda link=link: link)  # type: ignore[misc]
        took_s = played(config, numel, chosen, place, given.compute, link).sync_s
        slower = took_s / min(took_s, *by_names(n, codec, numel, place, given.compute)) - 1
        count, over = count + 1, over + (slower > 0.1)
        worst.append((slower, f"N={n}, {millions} million, {codec}, {mb} Mb/s, {ms} ms: {chosen}"))
    worst.sort(reverse=True)
    lines = "; ".join(f"{slower:+.0%} ({what})" for slower, what in worst[:4])
    return (
        f"Over {count} fleets and links the path that `auto` takes is more than 10 % slower than the other one in "
        f"{over}. The worst: {lines}."
    )


def place_of(given: argparse.Namespace) -> Place:
    return Place(
        latency_s=given.latency / 1000,
        up=given.up * 1e6 / 8,
        down=given.down * 1e6 / 8,
        dying=given.dying,
        arithmetic=given.arithmetic * 1e9,
        gets_per_s=5500.0 * given.prefixes,
        puts_per_s=3500.0 * given.prefixes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--billions", type=float, nargs="+", default=[1, 7, 70])
    parser.add_argument("--codecs", nargs="+", default=["int4"])
    parser.add_argument("--compute", type=float, default=1200, help="seconds of inner steps a round")
    parser.add_argument("--up", type=float, default=1000, help="Mb/s of a replica")
    parser.add_argument("--down", type=float, default=1000)
    parser.add_argument("--latency", type=float, default=30, help="ms of a request, in the median")
    parser.add_argument("--arithmetic", type=float, default=10, help="GB of fp32 a second")
    parser.add_argument("--dying", type=float, default=0.0, help="chance that a replica is missing in a round")
    parser.add_argument("--prefixes", type=float, default=1, help="into which the store has split the run's keys")
    parser.add_argument("--no-grid", action="store_true", help="leave out the comparison of paths over a grid")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/performance.md")
    given = parser.parse_args()
    command = " ".join(["benchmarks/scale.py", *sys.argv[1:]])
    heading = (
        f"CPU seconds and sizes of records taken {time.strftime('%Y-%m-%d')} on {machine()}; this version "
        f"{sources_of(None)[0].commit()}.\n\n```\nPYTHONPATH=tests/support .venv/bin/python {command}\n```"
    )
    text = table(given) + ("" if given.no_grid else "\n\n" + regret(given))
    print(text)
    if given.docs:
        publish("scale", f"{heading}\n\n{text}", None)


if __name__ == "__main__":
    main()
