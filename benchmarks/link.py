"""A synchronisation over a home link: 110 Mb/s up, 500 Mb/s down and 50 ms for each replica, against what that allows.

    make bench-link
    make bench-link OPTIONS="--replicas 4 --up 100 --down 100 --ways fp32 int4 int4:scatter_reduce topk128"

Every replica has a link of its own to the S3 server (tests/support/fast_s3.py): a proxy in user space that lets bytes
pass at the link's rate and half a round trip late (tests/support/shaped_proxy.py). The limit is the time of the bytes
one after the other, up and down, plus seven round trips; `transfer` is bare obstore through the same links, which shows
that the proxy keeps its rates. TLS, slow start and loss are left out. `gloo` is one all-reduce of fp32 over links of
the same bandwidths between network namespaces, without any delay, which favours it; it needs root. What the server
counts is compared with what `diloco plan` foretells.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from fast_s3 import running_fast_s3
from measuring import (
    Results,
    Sample,
    Source,
    fleets,
    markdown,
    middle,
    parser_of,
    run,
    spread,
)
from namespaces import INTERFACE, linked, why_none
from replica_programs import numel_of
from shaped_proxy import ShapedLink, links_before
from svg_chart import Bar, Group, bars
from sync import free_port, one_sync, way

from diloco_orchestrator.config import make_config
from diloco_orchestrator.inspection.costs import forecast

GOAL = 1.25  # x the limit
ROUND_TRIPS = 7


@dataclass(frozen=True)
class Rates:
    """What one replica's link lets through, in bytes and seconds."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float

    def limit_s(self, up: float, down: float) -> float:
        """Seconds of a synchronisation at least: bytes of a replica up, then down, and the round trips."""
        return up / self.up_bytes_per_s + down / self.down_bytes_per_s + ROUND_TRIPS * self.rtt_s

    def shape(self, links: Sequence[ShapedLink]) -> None:
        """Make links as slow as this. They begin without bounds, because joining a run is not measured."""
        for link in links:
            link.up.bytes_per_s, link.down.bytes_per_s = self.up_bytes_per_s, self.down_bytes_per_s
            link.rtt_s = self.rtt_s


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    replicas, parameters = given.replicas, round(given.million * 1e6)
    numel = numel_of(parameters)
    rates = Rates(given.up * 1e6 / 8, given.down * 1e6 / 8, given.rtt / 1000)
    link = {
        "link": f"{given.up:g}/{given.down:g} Mb/s, {given.rtt:g} ms",
        "replicas": replicas,
        "parameters": parameters,
    }
    if not given.no_gloo:
        _gloo(given, sources[0], link, results)
    for codec, path in given.ways:
        planned = _planned(codec, path, replicas, numel)
        limit_s = rates.limit_s(*planned)
        with running_fast_s3() as server, links_before(server.url, replicas) as links, fleets() as start:
            environ = [server.environ(each.url) for each in links]
            common = {"replicas": replicas, "parameters": parameters, "codec": codec, "path": path}
            arms = {}
            for index, source in enumerate(sources):
                own = [{**common, "rank": rank, "url": f"s3://bench/run-{index}"} for rank in range(replicas)]
                arms[source.name] = start("ours", own, [source.environ(**each) for each in environ])
            if codec == "fp32" and not given.no_gloo:  # the bare transfer moves fp32
                own = [{**common, "rank": rank, "url": "s3://bench/raw"} for rank in range(replicas)]
                arms["transfer"] = start("raw", own, [sources[0].environ(**each) for each in environ])
            rates.shape(links)
            for repetition in range(-1, given.repetitions):  # the first one warms up
                for name, arm in arms.items():
                    server.moved()
                    sample, moved = one_sync(arm, name, repetition), server.moved()
                    server.forget("/payload/")
                    if repetition >= 0:
                        results.add(
                            **link,
                            **sample,
                            arm=name,
                            codec=codec if path == "gather" else f"{codec}, {path}",
                            repetition=repetition,
                            limit_s=limit_s,
                            of_limit=sample["wall_s"] / limit_s,
                            up_mb=moved["up"] / replicas / 1e6,
                            down_mb=moved["down"] / replicas / 1e6,
                            planned_mb=sum(planned) / 1e6,
                        )


def _planned(codec: str, path: str, replicas: int, numel: int) -> tuple[float, float]:
    """Bytes of payloads and averages that a replica writes and reads in a round, as `diloco plan` foretells them."""
    config = make_config({"entrypoint": "m:f", "replicas": replicas, "codec": codec, "path": path})
    found = forecast(config, 60.0, numel)
    assert found.bytes_up is not None and found.bytes_down is not None
    return found.bytes_up / replicas, found.bytes_down / replicas


def _gloo(given: argparse.Namespace, source: Source, link: Sample, results: Results) -> None:
    """One all-reduce of fp32 over links between namespaces."""
    if why := why_none():
        print(f"without gloo: {why}")
        return
    with linked(given.replicas, given.up, given.down) as namespaces, fleets() as start:
        common = {**link, "port": free_port(), "address": namespaces[0].address, "interface": INTERFACE}
        own = [{**common, "rank": rank} for rank in range(given.replicas)]
        arm = start("gloo", own, [source.environ()] * given.replicas, [each.prefix for each in namespaces])
        for repetition in range(-1, min(2, given.repetitions)):
            sample = one_sync(arm, "gloo", repetition)
            if repetition >= 0:
                results.add(**link, **sample, arm="gloo, without delay", codec="fp32", repetition=repetition)


def _groups(samples: Sequence[Sample]) -> list[tuple[str, str, list[Sample]]]:
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample["codec"], sample["arm"]), []).append(sample)
    return [(*key, own) for key, own in found.items()]


def table(samples: Sequence[Sample]) -> str:
    columns = ("codec", "arm", "s, median", "min", "max", "than gloo", "limit, s", "x limit")
    rows, gloo = [], [sample for sample in samples if sample["arm"].startswith("gloo")]
    for codec, arm, own in _groups(samples):
        faster = f"{middle(gloo, 'wall_s') / middle(own, 'wall_s'):.1f} x faster" if gloo else "-"
        figures = ["-"] * 6
        if "limit_s" in own[0]:
            counted = middle(own, "up_mb") + middle(own, "down_mb")
            figures = [
                *(f"{middle(own, 'limit_s'):.2f}", f"{middle(own, 'of_limit'):.2f}"),
                *(f"{middle(own, name):.1f}" for name in ("up_mb", "down_mb")),
                f"{counted / middle(own, 'planned_mb'):.3f}",
                f"{4 * own[0]['parameters'] / 1e6 / middle(own, 'up_mb'):.1f}",
            ]
        rows.append([codec, arm, *spread(own, "wall_s"), faster, *figures, f"{middle(own, 'cpu_s'):.2f}"])
    first = samples[0]
    words = (
        f"{first['link']}, N={first['replicas']}, {first['parameters'] / 1e6:g} million parameters. The limit is bytes "
        f"over bandwidth plus {ROUND_TRIPS} round trips; the goal is {GOAL:g} x that."
    )
    counted = ("MB up", "MB down", "of the plan", "x fewer up than fp32", "CPU s a replica")
    return f"{words}\n\n{markdown((*columns, *counted), rows)}"


def picture(samples: Sequence[Sample]) -> str:
    drawn = []
    for codec, arm, own in _groups(samples):
        walls = [sample["wall_s"] for sample in own]
        limit, muted = middle(own, "limit_s") if "limit_s" in own[0] else None, arm not in ("this version", "after")
        drawn.append(Bar(f"{codec}, {arm}", [middle(own, "wall_s")], min(walls), max(walls), limit, muted=muted))
    first = samples[0]
    group = Group(f"{first['link']}, N={first['replicas']}, {first['parameters'] / 1e6:g} million parameters", drawn)
    return bars(
        "One synchronisation over a home link, seconds", [group], "s", limit="bytes / bandwidth + 7 round trips"
    )


def home_link_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of all benchmarks, and the link of a replica at home."""
    parser = parser_of(doc)
    parser.add_argument("--up", type=float, default=110, help="Mb/s; default 110")
    parser.add_argument("--down", type=float, default=500, help="Mb/s; default 500")
    parser.add_argument("--rtt", type=float, default=50, help="ms; default 50")
    parser.add_argument("--replicas", type=int, default=2)
    return parser


def main() -> None:
    parser = home_link_parser(__doc__)
    parser.add_argument("--million", type=float, default=25, help="parameters; default 25")
    ways = "fp32 bf16 int8 int4 int4:scatter_reduce 2bit topk128 topk64"
    parser.add_argument("--ways", type=way, nargs="+", default=[way(each) for each in ways.split()], help=ways)
    parser.add_argument("--no-gloo", action="store_true", help="leave out gloo and the bare transfer")
    run("link", parser, measure, table, picture)


if __name__ == "__main__":
    main()
