"""A synchronisation over a home link: 110 Mb/s up, 500 Mb/s down and 50 ms for each replica, against what that allows.

    make bench-link

Every replica has a link of its own to the S3 server (tests/support/fast_s3.py): a proxy in user space that lets bytes
pass at the link's rate and half a round trip late (tests/support/shaped_proxy.py). The limit is the time of the bytes
one after the other, up and down, plus seven round trips; `transfer` is bare obstore through the same links, which shows
that the proxy keeps its rates. TLS, slow start and loss are left out.
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
from replica_programs import numel_of
from shaped_proxy import ShapedLink, links_before
from svg_chart import Bar, Group, bars
from sync import one_sync

from diloco_orchestrator.codecs.table import CODECS, get_codec

GOAL = 1.25  # x the limit
ROUND_TRIPS = 7


@dataclass(frozen=True)
class Rates:
    """What one replica's link lets through, in bytes and seconds."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float

    def limit_s(self, size: int, replicas: int) -> float:
        """Seconds of a synchronisation at least: one's own payload up, the others' down, and the round trips."""
        moving_s = size / self.up_bytes_per_s + (replicas - 1) * size / self.down_bytes_per_s
        return moving_s + ROUND_TRIPS * self.rtt_s

    def shape(self, links: Sequence[ShapedLink]) -> None:
        """Make links as slow as this. They begin without bounds, because joining a run is not measured."""
        for link in links:
            link.up.bytes_per_s, link.down.bytes_per_s = self.up_bytes_per_s, self.down_bytes_per_s
            link.rtt_s = self.rtt_s


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    replicas, parameters = given.replicas, round(given.million * 1e6)
    rates = Rates(given.up * 1e6 / 8, given.down * 1e6 / 8, given.rtt / 1000)
    for codec in given.codecs:
        limit_s = rates.limit_s(get_codec(codec).encoded_size(numel_of(parameters)), replicas)
        with running_fast_s3() as server, links_before(server.url, replicas) as links, fleets() as start:
            environ = [server.environ(link.url) for link in links]
            common = {"replicas": replicas, "parameters": parameters, "codec": codec}
            arms = {}
            for index, source in enumerate(sources):
                own = [{**common, "rank": rank, "url": f"s3://bench/run-{index}"} for rank in range(replicas)]
                arms[source.name] = start("ours", own, [source.environ(**each) for each in environ])
            if codec == "fp32":  # the bare transfer moves fp32
                own = [{**common, "rank": rank, "url": "s3://bench/raw"} for rank in range(replicas)]
                arms["transfer"] = start("raw", own, [sources[0].environ(**each) for each in environ])
            rates.shape(links)
            for repetition in range(-1, given.repetitions):  # the first one warms up
                for name, arm in arms.items():
                    before = [(link.up.passed, link.down.passed) for link in links]
                    sample = one_sync(arm, name, repetition)
                    moved = [
                        (link.up.passed - up, link.down.passed - down)
                        for link, (up, down) in zip(links, before, strict=True)
                    ]
                    server.forget("/payload/")
                    if repetition >= 0:
                        results.add(
                            arm=name,
                            codec=codec,
                            replicas=replicas,
                            parameters=parameters,
                            repetition=repetition,
                            **sample,
                            limit_s=limit_s,
                            of_limit=sample["wall_s"] / limit_s,
                            up_mb=max(up for up, _ in moved) / 1e6,
                            down_mb=max(down for _, down in moved) / 1e6,
                            link=f"{given.up:g}/{given.down:g} Mb/s, {given.rtt:g} ms",
                        )


def _groups(samples: Sequence[Sample]) -> list[tuple[str, str, list[Sample]]]:
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample["codec"], sample["arm"]), []).append(sample)
    return [(*key, own) for key, own in found.items()]


def table(samples: Sequence[Sample]) -> str:
    columns = ("codec", "arm", "s, median", "min", "max", "limit, s", "x limit", "MB up", "MB down", "CPU s a replica")
    rows = []
    for codec, arm, own in _groups(samples):
        figures = [f"{middle(own, 'limit_s'):.2f}", f"{middle(own, 'of_limit'):.2f}"]
        moved = [f"{middle(own, 'up_mb'):.1f}", f"{middle(own, 'down_mb'):.1f}", f"{middle(own, 'cpu_s'):.2f}"]
        rows.append([codec, arm, *spread(own, "wall_s"), *figures, *moved])
    first = samples[0]
    words = (
        f"{first['link']}, N={first['replicas']}, {first['parameters'] / 1e6:g} million parameters. The limit is bytes "
        f"over bandwidth plus {ROUND_TRIPS} round trips; the goal is {GOAL:g} x that."
    )
    return f"{words}\n\n{markdown(columns, rows)}"


def picture(samples: Sequence[Sample]) -> str:
    drawn = []
    for codec, arm, own in _groups(samples):
        walls = [sample["wall_s"] for sample in own]
        limit, muted = middle(own, "limit_s"), arm == "transfer"
        label = f"{codec}, {arm}"
        drawn.append(Bar(label, [middle(own, "wall_s")], min(walls), max(walls), limit, muted=muted))
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
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    run("link", parser, measure, table, picture)


if __name__ == "__main__":
    main()
