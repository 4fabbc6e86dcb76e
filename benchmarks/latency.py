"""How many round trips a round costs: rounds of a model of 24 parameters, at 0, 20 and 50 ms from the store.

    make bench-latency

Each replica reaches the S3 server (tests/support/fast_s3.py) through a proxy that delays what passes
(tests/support/shaped_proxy.py), and all replicas end their inner steps together. The round trips are those of the
slowest replica: what a round takes longer than at 0 ms, over the latency. Latencies take turns within a repetition, so
that all share the machine's noise.
"""

import argparse
from collections.abc import Sequence

from fast_s3 import running_fast_s3
from measuring import Fleet, Results, Sample, Source, fleets, markdown, middle, parser_of, pick, run, spread
from shaped_proxy import links_before
from svg_chart import Curve, lines
from sync import check_agreement

GOAL_ROUND_TRIPS = 7  # from the last inner step to the next base, whatever N


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    for replicas in given.replicas:
        with running_fast_s3() as server, links_before(server.url, replicas) as links, fleets() as start:
            arms: dict[str, Fleet] = {}
            for index, source in enumerate(sources):
                own = [
                    {"replicas": replicas, "parameters": 24, "rank": rank, "url": f"s3://bench/run-{index}"}
                    for rank in range(replicas)
                ]
                environ = [source.environ(**server.environ(link.url)) for link in links]
                arms[source.name] = start("ours", own, environ)
            for repetition in range(-1, given.repetitions):
                for rtt in given.rtts:
                    for link in links:
                        link.rtt_s = rtt / 1000
                    for name, arm in arms.items():
                        arm.call("prepare")
                        server.requests()
                        replies = arm.call("sync")
                        asked = server.requests()
                        check_agreement(name, replies)
                        if repetition >= 0:
                            results.add(
                                arm=name,
                                replicas=replicas,
                                rtt_ms=rtt,
                                repetition=repetition,
                                wall_s=max(reply["wall_s"] for reply in replies),
                                cpu_s=sum(reply["cpu_s"] for reply in replies) / replicas,
                                requests=sum(asked.values()) / replicas,
                                kinds=dict(asked),
                            )


def _arms(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((sample["arm"], sample["replicas"]) for sample in samples))


def round_trips(samples: Sequence[Sample], rtt_ms: float) -> float | None:
    """What rounds take longer at this latency than at none, in round trips; None without a measurement at none."""
    there, here = pick(samples, rtt_ms=rtt_ms), pick(samples, rtt_ms=0)
    if not rtt_ms or not here:
        return None
    return (middle(there, "wall_s") - middle(here, "wall_s")) / (rtt_ms / 1000)


def table(samples: Sequence[Sample]) -> str:
    columns = ("arm", "N", "ms", "s, median", "min", "max", "round trips", "limit, s", "x limit", "requests a replica")
    rows = []
    for arm, replicas in _arms(samples):
        own = pick(samples, arm=arm, replicas=replicas)
        for rtt in sorted({sample["rtt_ms"] for sample in own}):
            there, trips, limit_s = pick(own, rtt_ms=rtt), round_trips(own, rtt), GOAL_ROUND_TRIPS * rtt / 1000
            cells = [f"{trips:.1f}" if trips is not None else "-"]
            cells += [f"{limit_s:.2f}", f"{middle(there, 'wall_s') / limit_s:.2f}"] if limit_s else ["-", "-"]
            requests = f"{middle(there, 'requests'):.1f}"
            rows.append([arm, f"{replicas}", f"{rtt:g}", *spread(there, "wall_s", 3), *cells, requests])
    goal = f"The limit is {GOAL_ROUND_TRIPS} round trips from the last inner step to the next base, whatever N."
    return f"{markdown(columns, rows)}\n\n{goal}"


def picture(samples: Sequence[Sample]) -> str:
    curves = []
    for arm, replicas in _arms(samples):
        own = pick(samples, arm=arm, replicas=replicas)
        rtts = sorted({sample["rtt_ms"] for sample in own})
        curves.append(Curve(f"{arm}, N={replicas}", [(rtt, middle(pick(own, rtt_ms=rtt), "wall_s")) for rtt in rtts]))
    rtts = sorted({sample["rtt_ms"] for sample in samples})
    goal = [(rtt, GOAL_ROUND_TRIPS * rtt / 1000) for rtt in rtts]
    curves.append(Curve(f"{GOAL_ROUND_TRIPS} round trips", goal, dashed=True))
    return lines("A round without bytes", curves, "ms of latency (one round trip)", "s")


def main() -> None:
    parser = parser_of(__doc__, repetitions=9)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rtts", type=float, nargs="+", default=[0, 20, 50], help="ms; default 0 20 50")
    run("latency", parser, measure, table, picture)


if __name__ == "__main__":
    main()
