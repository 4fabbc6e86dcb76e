"""What reading a long run costs: requests, seconds and memory of `status`, `verify`, `report` and a coordinator.

    make bench-history
    make bench-history SOURCES="--source OLD_CHECKOUT --source ."

The runs are written by `long_run.py` of the checkout that reads them, or by this one if it has none: all records of a
completed run, payloads without bytes. They lie in an S3 server on loopback (tests/support/fast_s3.py), which counts
requests. Each operation is a process of its own; its memory is the high-water mark of that process. The first length is
the short run that the others are compared with: what does not grow with the run costs the same in both.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fast_s3 import FastS3, running_fast_s3
from measuring import Results, Sample, Source, markdown, middle, parser_of, pick, run, scratch_folder, spread
from svg_chart import Bar, Group, bars

GOAL_REQUESTS = {"diloco status": 200}  # for 10,000 rounds of 8 replicas
_BUCKET = "history"
_MAKER = Path(__file__).with_name("long_run.py")

# In 0.1.0 the command was a module; later it is the module `main` of a package.
_COMMAND = """
import importlib.util, runpy
name = "diloco_orchestrator.cli"
is_package = importlib.util.find_spec(name).submodule_search_locations is not None
runpy.run_module(name + ".main" * is_package, run_name="__main__")
"""
_COORDINATOR = """
import sys
from diloco_orchestrator import LocalProcessExecutor, attach
attach(sys.argv[1], executor=LocalProcessExecutor(sys.argv[2])).wait()
"""
# Name: program and arguments; {url} is the run's, {folder} an empty one.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "diloco status": (_COMMAND, "status", "{url}", "--json"),
    "diloco verify": (_COMMAND, "verify", "{url}", "--json"),
    "diloco report": (_COMMAND, "report", "{url}", "{folder}/page.html"),
    "coordinator: attach, wait": (_COORDINATOR, "{url}", "{folder}/executor"),
}


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    with scratch_folder(given.folder) as folder:
        for index, source in enumerate(sources):
            for rounds in given.rounds:
                write_run(source, Path(folder) / _BUCKET / f"{index}-{rounds}", rounds, given.replicas)
        with running_fast_s3(Path(folder)) as server:
            for repetition in range(given.repetitions):
                for rounds in given.rounds:
                    for index, source in enumerate(sources):
                        for name in given.operations:
                            sample = read_once(source, server, f"s3://{_BUCKET}/{index}-{rounds}", OPERATIONS[name])
                            results.add(
                                operation=name,
                                arm=source.name,
                                rounds=rounds,
                                replicas=given.replicas,
                                repetition=repetition,
                                **sample,
                            )


def write_run(source: Source, folder: Path, rounds: int, replicas: int) -> None:
    """A run of so many rounds in `folder`, as the checkout writes it; by this checkout's maker if it has none."""
    own = source.path / "benchmarks" / _MAKER.name
    maker = own if own.exists() else _MAKER
    command = [sys.executable, "-P", str(maker), str(folder), "--rounds", str(rounds), "--replicas", str(replicas)]
    subprocess.run(command, env=source.environ(), check=True)


def read_once(source: Source, server: FastS3, url: str, operation: Sequence[str]) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        program, *args = operation
        command = [sys.executable, "-P", "-c", program, *(arg.format(url=url, folder=folder) for arg in args)]
        server.requests()
        began = time.perf_counter()
        with Path(folder, "errors").open("w") as errors:
            process = subprocess.Popen(
                command, cwd=folder, env=source.environ(**server.environ()), stdout=subprocess.DEVNULL, stderr=errors
            )
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began
        if process.returncode != 0:
            raise RuntimeError(f"{command[4:]} failed:\n{Path(folder, 'errors').read_text()[-2000:]}")
    asked = server.requests()
    return {
        "wall_s": wall_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
        "requests": sum(asked.values()),
        "kinds": dict(asked),
    }


def _rows(samples: Sequence[Sample]) -> list[tuple[str, str, int]]:
    found = {(sample["operation"], sample["arm"], sample["rounds"]): None for sample in samples}
    order = list(OPERATIONS)
    return sorted(found, key=lambda row: (order.index(row[0]), row[1] != "before", row[2]))


def table(samples: Sequence[Sample]) -> str:
    columns = (
        *("operation", "arm", "rounds", "requests", "of them GET", "LIST", "limit", "s, median", "min", "max"),
        *("CPU s", "peak MiB", "more than the short run"),
    )
    short = min(sample["rounds"] for sample in samples)
    rows = []
    for operation, arm, length in _rows(samples):
        own = pick(samples, operation=operation, arm=arm, rounds=length)
        less = pick(samples, operation=operation, arm=arm, rounds=short)
        kinds, goal = own[-1]["kinds"], GOAL_REQUESTS.get(operation)
        cells = [f"{middle(own, 'requests'):.0f}", f"{kinds.get('GET', 0)}", f"{kinds.get('LIST', 0)}"]
        cells += [f"{goal}" if goal else "-", *spread(own, "wall_s"), f"{middle(own, 'cpu_s'):.2f}"]
        more = f"{middle(own, 'peak_mib') - middle(less, 'peak_mib'):.0f}" if length != short else "-"
        rows.append([operation, arm, f"{length}", *cells, f"{middle(own, 'peak_mib'):.0f}", more])
    goal_words = f"N={samples[0]['replicas']}. The limit of `status` is for 10,000 rounds and 8 replicas."
    return f"{markdown(columns, rows)}\n\n{goal_words}"


def picture(samples: Sequence[Sample]) -> str:
    longest = max(sample["rounds"] for sample in samples)
    arms, drawn = list(dict.fromkeys(sample["arm"] for sample in samples)), []
    for operation, arm, length in _rows(samples):
        if length == longest:
            own = pick(samples, operation=operation, arm=arm, rounds=longest)
            requests, goal = middle(own, "requests"), GOAL_REQUESTS.get(operation)
            label = f"{operation}, {arm}" if len(arms) > 1 else operation
            words = f"{requests:.0f}, {middle(own, 'wall_s'):.1f} s"
            drawn.append(Bar(label, [requests], limit=goal, text=words))
    title = f"Requests for reading {longest} rounds of {samples[0]['replicas']} replicas"
    return bars(title, [Group("", drawn)], "", limit="200 requests")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[100, 10_000], help="default 100 10000")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--operations", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--folder", type=Path, help="where runs are written before they are served; default /dev/shm")
    run("history", parser, measure, table, picture)


if __name__ == "__main__":
    main()
