"""A synchronisation over a home link: 110 Mb/s up, 500 Mb/s down and 50 ms for each replica, against what that allows.

    make bench-link

Every replica has a link of its own to the S3 server (tests/support/fast_s3.py): a proxy in user space that lets bytes
pass at the link's rate and half a round trip late (tests/support/shaped_proxy.py). The limit is the time of the bytes
one after the other, up and down, plus seven round trips; `transfer` is bare obstore through the same links, which shows
that the proxy keeps its rates. TLS, slow start and loss are left out.
"""

import argparse
from collections.abc import Sequence

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
from shaped_proxy import links_before
from svg_chart import Bar, Group, bars
from sync import check_agreement

GOAL = 1.25  # x the limit
ROUND_TRIPS = 7
BYTES_OF = {"fp32": 4, "bf16": 2}


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    replicas, parameters = given.replicas, round(given.million * 1e6)
    up, down, rtt_s = given.up * 1e6 / 8, given.down * 1e6 / 8, given.rtt / 1000
    for codec in given.codecs:
        size = numel_of(parameters) * BYTES_OF[codec]
        limit_s = size / up + (replicas - 1) * size / down + ROUND_TRIPS * rtt_s
        with (
            running_fast_s3() as server,
            links_before(server.url, replicas, up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=0.0) as links,
            fleets() as start,
        ):
            for link in links:  # joining is not measured, so it need not be slow
                link.up.bytes_per_s = link.down.bytes_per_s = None
            arms = {}
            for index, source in enumerate(sources):
                own = [
                    {"replicas": replicas, "parameters": parameters, "codec": codec, "rank": rank,
                     "url": f"s3://bench/run-{index}"}
                    for rank in range(replicas)
                ]  # fmt: skip
                environ = [source.environ(**server.environ(link.url)) for link in links]
                arms[source.name] = start("ours", own, environ)
            if codec == "fp32":
                own = [
                    {"replicas": replicas, "parameters": parameters, "rank": rank, "url": "s3://bench/raw"}
                    for rank in range(replicas)
                ]
                arms["transfer"] = start("raw", own, [sources[0].environ(**server.environ(link.url)) for link in links])
            for link in links:
                link.up.bytes_per_s, link.down.bytes_per_s, link.rtt_s = up, down, rtt_s
            for repetition in range(-1, given.repetitions):
                for name, arm in arms.items():
                    passed = [(link.up.passed, link.down.passed) for link in links]
                    if name == "transfer":
                        puts, gets = arm.call("put", repetition=repetition), arm.call("get", repetition=repetition)
                        wall_s = max(reply["wall_s"] for reply in puts) + max(reply["wall_s"] for reply in gets)
                        cpu_s = sum(reply["cpu_s"] for reply in puts + gets) / replicas
                    else:
                        arm.call("prepare")
                        replies = arm.call("sync")
                        check_agreement(name, replies)
                        wall_s = max(reply["wall_s"] for reply in replies)
                        cpu_s = sum(reply["cpu_s"] for reply in replies) / replicas
                    server.forget("/payload/")
                    if repetition < 0:
                        continue
                    moved = [
                        (link.up.passed - before[0], link.down.passed - before[1])
                        for link, before in zip(links, passed, strict=True)
                    ]
                    results.add(
                        arm=name,
                        codec=codec,
                        replicas=replicas,
                        parameters=parameters,
                        repetition=repetition,
                        wall_s=wall_s,
                        cpu_s=cpu_s,
                        limit_s=limit_s,
                        of_limit=wall_s / limit_s,
                        up_mb=max(each[0] for each in moved) / 1e6,
                        down_mb=max(each[1] for each in moved) / 1e6,
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
        f"{first['link']}, N={first['replicas']}, {first['parameters'] / 1e6:g} million parameters. The limit is bytes over "
        f"bandwidth plus {ROUND_TRIPS} round trips; the goal is {GOAL:g} x that."
    )
    return f"{words}\n\n{markdown(columns, rows)}"


def picture(samples: Sequence[Sample]) -> str:
    drawn = []
    for codec, arm, own in _groups(samples):
        walls = [sample["wall_s"] for sample in own]
        drawn.append(Bar(f"{codec}, {arm}", [middle(own, "wall_s")], min(walls), max(walls), middle(own, "limit_s")))
    first = samples[0]
    group = Group(f"{first['link']}, N={first['replicas']}, {first['parameters'] / 1e6:g} million parameters", drawn)
    return bars(
        "One synchronisation over a home link, seconds", [group], "s", limit="bytes / bandwidth + 7 round trips"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--up", type=float, default=110, help="Mb/s; default 110")
    parser.add_argument("--down", type=float, default=500, help="Mb/s; default 500")
    parser.add_argument("--rtt", type=float, default=50, help="ms; default 50")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--million", type=float, default=25, help="parameters; default 25")
    parser.add_argument("--codecs", nargs="+", choices=list(BYTES_OF), default=["fp32", "bf16"])
    run("link", parser, measure, table, picture)


if __name__ == "__main__":
    main()
