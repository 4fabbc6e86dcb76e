"""What the work on shards costs beside other processes: forming a payload, outer step, copy of the base, its digest.

    PYTHONPATH=tests/support .venv/bin/python benchmarks/busy.py --source BEFORE --source .

One process of a checkout at a time, with as many torch threads as the machine has cores and its shards in memory, does
each pass once: `wall` is its time, `CPU` that of all its threads. Beside it run busy loops, one process each.
Checkouts and numbers of loops take turns; ratios are medians of the ratios within a repetition. `x fair` is the time
over what fair shares explain: the quiet time of the same checkout times (loops + threads) / cores, at least 1.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from measuring import Results, Sample, Source, fleets, markdown, middle, parser_of, pick, ratio, run
from svg_chart import Bar, Group, bars

PASSES = ("form", "step", "install", "digest")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that compute for ever, until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    cores, parameters = os.cpu_count() or 1, round(given.million * 1e6)
    with fleets() as start:
        fleet = {
            source.name: start("shards", [{"parameters": parameters}], [source.environ(OMP_NUM_THREADS=f"{cores}")])
            for source in sources
        }
        for repetition in range(-1, given.repetitions):  # the first one warms up
            for loops in given.loops if repetition >= 0 else [0]:
                for source in sources:
                    with busy_loops(loops):
                        (reply,) = fleet[source.name].call("pass")
                    if repetition >= 0:
                        reply |= {"load": os.getloadavg()[0], "cores": cores}
                        results.add(arm=source.name, loops=loops, repetition=repetition, **reply)


def table(samples: Sequence[Sample]) -> str:
    rows, first = [], samples[0]["arm"]
    least, cores = min(sample["loops"] for sample in samples), samples[0]["cores"]
    for loops in dict.fromkeys(sample["loops"] for sample in samples):
        for arm in dict.fromkeys(sample["arm"] for sample in samples):
            own, quiet = pick(samples, arm=arm, loops=loops), pick(samples, arm=arm, loops=least)
            fair = max(1.0, (loops + cores) / cores)
            cells = [f"{middle(own, f'{name}_s'):.2f}" for name in PASSES]
            against = ratio(own, pick(samples, arm=first, loops=loops), "wall_s")
            cells += [f"{middle(own, name):.2f}" for name in ("wall_s", "cpu_s")]
            cells += [f"{ratio(own, quiet, 'wall_s') / fair:.2f}", f"{against:.3f}", f"{middle(own, 'load'):.0f}"]
            rows.append([f"{loops}", arm, *cells])
    return markdown(["loops", "arm", *PASSES, "wall, s", "CPU, s", "x fair", f"x {first}", "load"], rows)


def picture(samples: Sequence[Sample]) -> str:
    groups = []
    for loops in dict.fromkeys(sample["loops"] for sample in samples):
        drawn = []
        for arm in dict.fromkeys(sample["arm"] for sample in samples):
            walls = [sample["wall_s"] for sample in pick(samples, arm=arm, loops=loops)]
            drawn.append(Bar(arm, [middle(pick(samples, arm=arm, loops=loops), "wall_s")], min(walls), max(walls)))
        groups.append(Group(f"{loops} busy loops", drawn))
    return bars("Work on the shards of a round, seconds", groups, "s")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--million", type=float, default=32, help="parameters; default 32")
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 4, 10], help="busy loops; default 0 4 10")
    run("busy", parser, measure, table, picture)


if __name__ == "__main__":
    main()
