"""How long a synchronisation takes: ours through a folder and through S3, beside gloo, torchft and the bare transfer.

    make bench-sync
    make bench-sync SOURCES="--source OLD_CHECKOUT --source ."
    make bench-sync OPTIONS="--fleets 4x25 --stores folder --ways fp32 int4:scatter_reduce"

Every arm is N processes of one thread each with the same model, and its time is the slowest replica's, from the last
inner step to the next base. Arms take turns: a repetition measures each once, and ratios are medians of the ratios
within a repetition. The peers move bytes through sockets of this machine: `gloo` is one all-reduce of a flat vector,
`torchft` is its DiLoCo with its own manager, lighthouse and process group. `transfer` is the limit of a store here:
bare obstore puts one replica's bytes, then gets everybody else's. The folder is in memory (`--folder` for another one);
the S3 server is tests/support/fast_s3.py, in a process of its own on the same cores, without TLS.
"""

import argparse
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from fast_s3 import FastS3, running_fast_s3
from measuring import (
    Fleet,
    Results,
    Sample,
    Source,
    fleets,
    markdown,
    middle,
    parser_of,
    pick,
    ratio,
    run,
    scratch_folder,
    spread,
)
from svg_chart import Bar, Group, bars

CPU = ("cpu_s", "system_s")  # of a replica on average: all of it, and its part in the kernel
GOAL_OF_GLOO = 3.0  # folder, fp32, N=4
GOAL_OF_TRANSFER = {"folder": 1.15, "s3": 1.3}  # fp32
GOAL_CPU_S = {"fp32": 1.5, "int4": 0.5}  # a replica, 25 million parameters, N=4
PEERS = ("gloo", "torchft", "transfer")
StartFleet = Callable[..., Fleet]


def fleet_size(text: str) -> tuple[int, int]:
    """`4x25` -> 4 replicas, 25,000,000 parameters."""
    replicas, _, millions = text.partition("x")
    return int(replicas), round(float(millions) * 1e6)


def way(text: str) -> tuple[str, str]:
    """`int4:scatter_reduce` -> codec and path; the path is a gather by default."""
    codec, _, path = text.partition(":")
    return codec, path or "gather"


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    for replicas, parameters in given.fleets:
        for store in given.stores:
            with scratch_folder(given.folder) as folder, running_fast_s3() as server, fleets() as start:
                place = Place(store, Path(folder), server)
                arms = _arms(start, place, sources, given, replicas, parameters)
                for repetition in range(-1, given.repetitions):  # the first one warms up
                    for name, arm in arms.items():
                        sample = one_sync(arm, name, repetition)
                        place.forget_payloads()
                        if repetition >= 0:
                            results.add(
                                arm=name,
                                store=store,
                                replicas=replicas,
                                parameters=parameters,
                                repetition=repetition,
                                **sample,
                            )


class Place:
    """Where runs lie: a folder, or a bucket of the S3 server."""

    def __init__(self, store: str, folder: Path, server: FastS3) -> None:
        self._store, self._folder, self._server = store, folder, server

    def url(self, run: str) -> str:
        return f"s3://bench/{run}" if self._store == "s3" else str(self._folder / run)

    def environ(self) -> dict[str, str]:
        return self._server.environ() if self._store == "s3" else {}

    def forget_payloads(self) -> None:
        """Delete what closed rounds have moved: nobody reads it again, and memory is finite."""
        self._server.forget("/payload/")
        for payload in self._folder.glob("*/rounds/*/payload"):
            shutil.rmtree(payload)


def _arms(
    start: StartFleet,
    place: Place,
    sources: Sequence[Source],
    given: argparse.Namespace,
    replicas: int,
    parameters: int,
) -> dict[str, Fleet]:
    """Every arm with its processes, joined."""
    common = {"replicas": replicas, "parameters": parameters}
    here, arms = sources[0], {}
    for index, source in enumerate(sources):
        for codec, path in given.ways:
            how = {**common, "codec": codec, "path": path, "url": place.url(f"run-{index}-{codec}-{path}")}
            own = [{**how, "rank": rank} for rank in range(replicas)]
            name = ", ".join([source.name] * (len(sources) > 1) + [codec] + [path] * (path != "gather"))
            arms[name] = start("ours", own, [source.environ(**place.environ())] * replicas)
    if "gloo" in given.peers:
        port = free_port()
        own = [{**common, "rank": rank, "port": port} for rank in range(replicas)]
        arms["gloo"] = start("gloo", own, [here.environ()] * replicas)
    if "torchft" in given.peers:
        address = start("lighthouse", [{"replicas": replicas}], [here.environ()]).call("address")[0]["address"]
        own = [{**common, "rank": rank, "lighthouse": address} for rank in range(replicas)]
        arms["torchft"] = start("torchft", own, [here.environ()] * replicas)
    if "transfer" in given.peers:
        own = [{**common, "rank": rank, "url": place.url("raw")} for rank in range(replicas)]
        arms["transfer"] = start("raw", own, [here.environ(**place.environ())] * replicas)
    return arms


def one_sync(arm: Fleet, name: str, repetition: int) -> Sample:
    """Seconds of the slowest replica, and CPU seconds of a replica on average."""
    if arm.program == "raw":
        puts, gets = arm.call("put", repetition=repetition), arm.call("get", repetition=repetition)
        wall_s = max(reply["wall_s"] for reply in puts) + max(reply["wall_s"] for reply in gets)
        return {"wall_s": wall_s, **{name: sum(reply[name] for reply in puts + gets) / len(puts) for name in CPU}}
    arm.call("prepare")
    replies = arm.call("sync")
    check_agreement(name, replies)
    used = {name: sum(reply[name] for reply in replies) / len(replies) for name in CPU}
    return {"wall_s": max(reply["wall_s"] for reply in replies), **used}


def check_agreement(name: str, replies: Sequence[Sample]) -> None:
    """End the program if replicas do not hold the same value after a synchronisation: then none took place."""
    if len({reply["value"] for reply in replies}) != 1:
        raise SystemExit(f"{name}: the replicas differ after a synchronisation: {replies}.")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# -- what comes out ---------------------------------------------------------------------------------------------------


def _groups(samples: Sequence[Sample]) -> list[tuple[str, int, int, list[Sample]]]:
    """(store, replicas, parameters, samples) in the order in which they were taken."""
    found: dict[tuple[str, int, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample["store"], sample["replicas"], sample["parameters"]), []).append(sample)
    return [(*key, found[key]) for key in sorted(found)]


def _arm_names(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(sample["arm"] for sample in samples))


def table(samples: Sequence[Sample]) -> str:
    columns = ("store", "N", "million", "arm", "s, median", "min", "max", "x gloo", "x torchft", "x transfer")
    rows = []
    for store, replicas, parameters, taken in _groups(samples):
        for arm in _arm_names(taken):
            own = pick(taken, arm=arm)
            ratios = [_ratio(own, pick(taken, arm=peer)) for peer in PEERS]
            where = "sockets" if arm in ("gloo", "torchft") else store
            cells = [where, f"{replicas}", f"{parameters / 1e6:g}", arm, *spread(own, "wall_s", 3), *ratios]
            rows.append([*cells, *(f"{middle(own, name):.3f}" for name in CPU)])
    goals = (
        f"Goals at N=4: fp32 through a folder at most {GOAL_OF_GLOO:g} x gloo, below 1 x torchft and at most "
        f"{GOAL_OF_TRANSFER['folder']:g} x transfer, through S3 {GOAL_OF_TRANSFER['s3']:g} x, with "
        f"{GOAL_CPU_S['fp32']:g} s of CPU a replica of 25 million parameters; int4 by scatter-reduce through a folder "
        f"1 x gloo and .5 x torchft, with {GOAL_CPU_S['int4']:g} s."
    )
    return f"{markdown([*columns, 'CPU s a replica', 'of it in the kernel'], rows)}\n\n{goals}"


def _ratio(own: Sequence[Sample], peer: Sequence[Sample]) -> str:
    return f"{ratio(own, peer, 'wall_s'):.2f}" if peer else "-"


def picture(samples: Sequence[Sample]) -> str:
    groups = []
    for store, replicas, parameters, taken in _groups(samples):
        gloo = pick(taken, arm="gloo")
        limit = GOAL_OF_GLOO * middle(gloo, "wall_s") if gloo else None
        drawn = []
        for arm in _arm_names(taken):
            own = pick(taken, arm=arm)
            walls = [sample["wall_s"] for sample in own]
            goal = limit if arm not in PEERS else None
            drawn.append(Bar(arm, [middle(own, "wall_s")], min(walls), max(walls), goal, muted=arm in PEERS))
        groups.append(Group(f"{store}, N={replicas}, {parameters / 1e6:g} million parameters", drawn))
    return bars("One synchronisation, seconds", groups, "s", limit=f"{GOAL_OF_GLOO:g} x gloo")


def main() -> None:
    parser = parser_of(__doc__)
    default = ["2x25", "4x25", "8x10"]
    parser.add_argument(
        "--fleets", type=fleet_size, nargs="+", default=[fleet_size(text) for text in default],
        help=f"replicas x millions of parameters; default {' '.join(default)}",
    )  # fmt: skip
    parser.add_argument("--stores", nargs="+", choices=["folder", "s3"], default=["folder", "s3"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--ways", type=way, nargs="+", default=[("fp32", "gather"), ("int4", "gather"), ("int4", "scatter_reduce")],
        help="codecs, each perhaps with :path; default fp32 int4 int4:scatter_reduce",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where runs are written; default /dev/shm")
    run("sync", parser, measure, table, picture)


if __name__ == "__main__":
    main()
