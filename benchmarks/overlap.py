"""What a synchronisation in flight costs training: fragments with a delay through a home link, beside paced steps.

    make bench-overlap
    make bench-overlap SOURCES="--source OLD_CHECKOUT --source ."
    python benchmarks/overlap.py --busy --codec topk64 --up .76 --down 3.5 --delay 12 --before 30    # utilisation

Every replica has a link of its own to the S3 server (tests/support/shaped_proxy.py), at which a fragment moves in about
.7 of the delay. An inner step is a sleep of fixed length, as of a CPU whose GPU computes, and then the optimizer's
step, in which the loop publishes and synchronises. Reported are, of the slower replica in each round, the largest time
by which one inner step took longer than its sleep, and the share of the sleeps in the wall clock. Checkouts take turns,
round by round. With `--busy` a step uses CPU time instead, on a core for each replica: what remains of a core beside
other work is measured before each round, by the same steps without us, and in each round the CPU time that a replica
takes for everything but its steps, which other work on the machine hardly changes. A round synchronises one fragment,
so a cycle has as many rounds as there are fragments.
"""

import argparse
from collections.abc import Sequence

from fast_s3 import running_fast_s3
from link import Rates, home_link_parser
from measuring import Results, Sample, Source, fleets, markdown, middle, pick, run, spread
from replica_programs import numel_of
from shaped_proxy import links_before
from svg_chart import Bar, Group, bars

from diloco_orchestrator.codecs.table import CODECS, get_codec

GOAL_BLOCKED_S = 0.05
GOAL_UTILISATION = 0.95


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    replicas, parameters = given.replicas, round(given.million * 1e6)
    rates = Rates(given.up * 1e6 / 8, given.down * 1e6 / 8, given.rtt / 1000)
    delay = round(given.delay / given.step)
    common = {
        "replicas": replicas,
        "parameters": parameters,
        "step_s": given.step,
        "round_steps": delay + given.before,
        "fragments": given.fragments,
        "delay": delay,
        "codec": given.codec,
        "busy": given.busy,
    }
    size = get_codec(given.codec).encoded_size(numel_of(parameters) // given.fragments)
    limit_s = rates.limit_s(size, (replicas - 1) * size)
    with running_fast_s3() as server, links_before(server.url, replicas) as links, fleets() as start:
        environ = [server.environ(link.url) for link in links]
        arms = {}
        for index, source in enumerate(sources):
            own = [{**common, "rank": rank, "url": f"s3://bench/run-{index}"} for rank in range(replicas)]
            arms[source.name] = start("paced", own, [source.environ(**each) for each in environ])
        rates.shape(links)
        for repetition in range(-1, given.repetitions):  # the first one warms up
            for name, arm in arms.items():
                alone = [each["utilisation"] for each in arm.call("alone")] if given.busy else [1.0]
                found = arm.call("round")
                steps = {each["step"] for each in found}
                if len(steps) != 1:
                    raise SystemExit(f"{name}: replicas ended the round at outer steps {sorted(steps)}.")
                server.forget("/payload/")
                said = [each["transfer_s"] for each in found if each["transfer_s"] is not None]
                if repetition >= 0:
                    results.add(
                        **{**common, "arm": name, "repetition": repetition},
                        blocked_s=max(each["blocked_s"] for each in found),
                        utilisation=min(each["utilisation"] for each in found),
                        alone=min(alone),
                        wall_s=max(each["wall_s"] for each in found),
                        beside_s=max(each["beside_s"] for each in found),
                        transfer_s=max(said, default=None),
                        link_s=limit_s,
                        delay_s=given.delay,
                        link=f"{given.up:g}/{given.down:g} Mb/s, {given.rtt:g} ms",
                    )


def _arms(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    return {name: pick(samples, arm=name) for name in dict.fromkeys(sample["arm"] for sample in samples)}


def table(samples: Sequence[Sample]) -> str:
    rows = []
    for name, own in _arms(samples).items():
        said = [sample for sample in own if sample["transfer_s"] is not None]
        transfer = ["-", "-"]
        if said:
            seconds = middle(said, "transfer_s")
            transfer = [f"{seconds:.1f}", f"{seconds / own[0]['delay_s']:.2f}"]
        blocked = [*spread(own, "blocked_s", 3), f"{GOAL_BLOCKED_S:g}"]
        utilisation = [*spread(own, "utilisation", 4), f"{GOAL_UTILISATION:g}", f"{middle(own, 'alone'):.4f}"]
        beside = f"{middle(own, 'beside_s'):.2f}"
        rows.append([name, *transfer, *blocked, *utilisation, beside])
    columns = ("arm", "transfer, s", "of the delay", "largest blocking of an inner step, s", "min", "max", "limit")
    first = samples[0]
    step = f"{first['step_s']:g} s{' of CPU' if first['busy'] else ''}"
    words = (
        f"{first['link']}, N={first['replicas']}, {first['parameters'] / 1e6:g} million parameters in "
        f"{first['codec']}, {first['fragments']} fragments, {first['round_steps']} inner steps of {step} a round, a "
        f"delay of {first['delay']} of them ({first['delay_s']:g} s). The bytes of a fragment and the round trips take "
        f"{first['link_s']:.1f} s on this link. Utilisation is inner-step time over wall clock. The limits hold while "
        "a transfer takes at most .7 of the delay."
    )
    columns = (*columns, "utilisation", "min", "max", "limit", "without us", "CPU beside the steps, s")
    return f"{words}\n\n{markdown(columns, rows)}"


def picture(samples: Sequence[Sample]) -> str:
    drawn = []
    for name, own in _arms(samples).items():
        blocked = [sample["blocked_s"] for sample in own]
        drawn.append(Bar(name, [middle(own, "blocked_s")], min(blocked), max(blocked), GOAL_BLOCKED_S))
    first = samples[0]
    group = Group(
        f"{first['link']}, N={first['replicas']}, {first['fragments']} fragments, a delay of {first['delay_s']:g} s",
        drawn,
    )
    return bars("Largest blocking of an inner step, seconds", [group], "s", limit=f"{GOAL_BLOCKED_S:g} s")


def main() -> None:
    parser = home_link_parser(__doc__)
    parser.add_argument("--million", type=float, default=25, help="parameters; default 25")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--step", type=float, default=0.1, help="seconds of an inner step; default 0.1")
    parser.add_argument("--delay", type=float, default=4.0, help="seconds a transfer may take; default 4")
    parser.add_argument("--codec", choices=CODECS, default="fp32")
    parser.add_argument("--busy", action="store_true", help="inner steps use a core each instead of sleeping")
    parser.add_argument("--before", type=int, default=20, help="inner steps of a round before it is published")
    run("overlap", parser, measure, table, picture)


if __name__ == "__main__":
    main()
