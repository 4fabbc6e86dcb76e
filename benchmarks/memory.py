"""What a replica holds beside its model, gradients and Adam, in units of c, the fp32 bytes of its parameters.

    make bench-memory
    make bench-memory OPTIONS="--snapshots --million 125"

Each repetition is a set of fresh processes: the model, gradients and Adam's state are made, the process joins a run in
a folder and synchronises three times. Anonymous resident memory before joining is subtracted. `held` is after the last
synchronisation, `peak` the greatest during it, by the kernel's high-water mark. With `--snapshots` every one ends in a
snapshot, which counts: a lone replica rebuilds its base before it writes one.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from measuring import Results, Sample, Source, fleets, markdown, middle, parser_of, pick, run, scratch_folder, spread
from replica_programs import numel_of
from svg_chart import Bar, Group, bars
from sync import check_agreement

GOAL_HELD, GOAL_PEAK = 2.5, 3.5  # c
SYNCS = 3


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    parameters = round(given.million * 1e6)
    c_mib = 4 * numel_of(parameters) / 2**20
    for repetition in range(given.repetitions):
        for replicas in given.replicas:
            for source in sources:
                common = {"replicas": replicas, "parameters": parameters, "snapshots": given.snapshots}
                own = [{**common, "rank": rank} for rank in range(replicas)]
                with scratch_folder(given.folder) as folder, fleets() as start:
                    for each in own:
                        each["url"] = f"{folder}/run"
                    fleet = start("memory", own, [source.environ()] * replicas)
                    for _ in range(SYNCS):
                        fleet.call("prepare")
                        replies = fleet.call("sync")
                        check_agreement(source.name, replies)
                        for payload in Path(folder).glob("*/rounds/*/payload"):
                            shutil.rmtree(payload)
                worst = max(replies, key=lambda reply: float(reply["peak_mib"]))
                results.add(
                    arm=source.name,
                    replicas=replicas,
                    parameters=parameters,
                    repetition=repetition,
                    before_c=worst["before_mib"] / c_mib,
                    joined_c=worst["joined_mib"] / c_mib,
                    held_c=worst["held_mib"] / c_mib,
                    peak_c=worst["peak_mib"] / c_mib,
                )


def _arms(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((sample["arm"], sample["replicas"]) for sample in samples))


def _of(samples: Sequence[Sample], arm: tuple[str, int]) -> list[Sample]:
    return pick(samples, arm=arm[0], replicas=arm[1])


def table(samples: Sequence[Sample]) -> str:
    columns = (
        *("arm", "N", "held, c", "min", "max", "x limit", "peak, c", "min", "max", "x limit"),
        "once joined, c",
    )
    rows = []
    for arm in _arms(samples):
        own = _of(samples, arm)
        held = [*spread(own, "held_c"), f"{middle(own, 'held_c') / GOAL_HELD:.2f}"]
        peak = [*spread(own, "peak_c"), f"{middle(own, 'peak_c') / GOAL_PEAK:.2f}"]
        rows.append([arm[0], f"{arm[1]}", *held, *peak, f"{middle(own, 'joined_c'):.2f}"])
    million = samples[0]["parameters"] / 1e6
    words = (
        f"{million:g} million parameters: c is {4 * million:g} MB. Limits: {GOAL_HELD:g} c held, {GOAL_PEAK:g} c peak."
    )
    return f"{words}\n\n{markdown(columns, rows)}"


def picture(samples: Sequence[Sample]) -> str:
    groups = []
    for field, name, goal in (("held_c", "held", GOAL_HELD), ("peak_c", "peak of a synchronisation", GOAL_PEAK)):
        drawn = []
        for arm in _arms(samples):
            values = [sample[field] for sample in _of(samples, arm)]
            label = f"N={arm[1]}" if arm[0] == "this version" else f"{arm[0]}, N={arm[1]}"
            drawn.append(Bar(label, [middle(_of(samples, arm), field)], min(values), max(values), goal))
        groups.append(Group(name, drawn))
    return bars("Memory beside model, gradients and Adam, in model copies (fp32)", groups, "c")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--million", type=float, default=32, help="parameters; default 32")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--snapshots", action="store_true", help="write a snapshot after each synchronisation")
    parser.add_argument("--folder", type=Path, help="where runs are written; default /dev/shm")
    run("memory", parser, measure, table, picture)


if __name__ == "__main__":
    main()
