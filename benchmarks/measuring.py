"""What every benchmark shares: fleets of processes that import a checkout, samples as JSON lines, tables, docs.

Nothing here knows what is measured. Programs of the processes are `replica_programs`; drawings are `svg_chart`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs"
_PACKAGES = ("diloco_orchestrator", "executors", "replica")
PERFORMANCE = ROOT / "docs" / "inside" / "performance.md"
PICTURES = ROOT / "docs" / "inside" / "performance"
PROGRAMS = Path(__file__).with_name("replica_programs.py")
_LAST_LINES = 20  # of a process that died
_QUIET = 1.0  # load average at the start up to which a machine counts as quiet

Sample = dict[str, Any]


# -- checkouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A checkout of the project to measure."""

    path: Path
    name: str  # in tables: "before" and "after" for two, "this version" for one

    def environ(self, **changes: str) -> dict[str, str]:
        """The environment of a process that imports from it; the libraries of numbers get one thread."""
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.path), **changes}

    def commit(self) -> str:
        """The git commit that last changed its packages, with a + if they differ from that."""
        git = ["git", "-C", str(self.path)]
        last = _output([*git, "log", "-1", "--format=%h", "--", *_PACKAGES])
        changed = _output([*git, "status", "--porcelain", "--", *_PACKAGES])
        return f"{last}{'+' if changed else ''}" if last else "no git"


def _output(command: Sequence[str]) -> str:
    """What a command prints; nothing if it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def sources_of(paths: Sequence[Path] | None) -> list[Source]:
    """The checkouts of `--source`, by default this one. Ends the program if one is not imported from where it lies."""
    found = list(paths or [ROOT])
    if len(found) > 2:
        raise SystemExit("--source is given more than twice: one checkout, or one before and one after a change.")
    names = ("before", "after") if len(found) == 2 else ("this version",)
    for path in found:
        _check_is_imported(path)
    return [Source(path, name) for path, name in zip(found, names, strict=True)]


def _check_is_imported(path: Path) -> None:
    """End the program if Python does not import our packages from the checkout at `path`."""
    command = [sys.executable, "-P", "-c", "import diloco_orchestrator; print(diloco_orchestrator.__file__)"]
    environ = {**os.environ, "PYTHONPATH": str(path)}
    found = subprocess.run(command, cwd=tempfile.gettempdir(), env=environ, capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_relative_to(path):
        raise SystemExit(f"--source {path} holds no diloco_orchestrator: {found.stdout.strip()} was imported.")


# -- processes --------------------------------------------------------------------------------------------------------


class Fleet:
    """Processes of one program, called all at once: every call is a line of JSON to each, and one back from each.

    `program`: a name in `replica_programs`; `arguments`, `environ`, `prefixes` of the command: one for each process. A
    process that dies is a `RuntimeError` with the last lines of its output.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[Mapping[str, Any]],
        environ: Sequence[Mapping[str, str]],
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        self.program = program
        self._logs = [tempfile.TemporaryFile("w+") for _ in arguments]  # noqa: SIM115 - closed by `close`
        self._processes = [
            subprocess.Popen(
                [*prefix, sys.executable, "-P", str(PROGRAMS), program, json.dumps(given)],
                **_pipes(log),
                env=dict(own),
            )
            for given, own, log, prefix in zip(
                arguments, environ, self._logs, prefixes or [()] * len(arguments), strict=True
            )
        ]
        self._replies()  # each has joined

    def call(self, command: str, **given: Any) -> list[dict[str, Any]]:
        """The replies of all processes, in their order."""
        line = json.dumps({"command": command, **given}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self._replies()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process, log in zip(self._processes, self._logs, strict=True):
            process.wait()
            for pipe in (process.stdin, process.stdout, log):
                if pipe is not None:
                    pipe.close()

    def _replies(self) -> list[dict[str, Any]]:
        return [self._reply(index) for index in range(len(self._processes))]

    def _reply(self, index: int) -> dict[str, Any]:
        process, log = self._processes[index], self._logs[index]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            log.seek(0)
            last = "".join(log.readlines()[-_LAST_LINES:])
            self.close()
            raise RuntimeError(f"process {index} of {self.program!r} died (exit code {process.returncode}):\n{last}")
        found: dict[str, Any] = json.loads(line)
        return found


def _pipes(log: Any) -> dict[str, Any]:
    return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True, "bufsize": 1}


@contextmanager
def fleets() -> Iterator[Callable[..., Fleet]]:
    """A way to start fleets, all of which are ended with the block."""
    started: list[Fleet] = []

    def start(*given: Any) -> Fleet:
        started.append(Fleet(*given))
        return started[-1]

    try:
        yield start
    finally:
        for fleet in started:
            fleet.close()


def scratch_folder(given: Path | None) -> "tempfile.TemporaryDirectory[str]":
    """A folder that goes with the benchmark; in memory where the system has such a file system."""
    shared_memory = Path("/dev/shm")
    where = given or (shared_memory if shared_memory.is_dir() else None)
    return tempfile.TemporaryDirectory(prefix="diloco-bench-", dir=where)


# -- samples ----------------------------------------------------------------------------------------------------------


class Results:
    """Samples of one benchmark, in `runs/bench-NAME.jsonl`; one call of the script is a session of its own there."""

    def __init__(self, name: str, path: Path | None = None) -> None:
        self.name = name
        self.path = path or RUNS / f"bench-{name}.jsonl"
        self.session = time.strftime("%Y-%m-%d %H:%M:%S")
        self.samples: list[Sample] = []

    def begin(self, sources: Sequence[Source], settings: Mapping[str, Any]) -> None:
        """The session's first line: what is measured, where and when."""
        self._write(
            {
                "session": self.session,
                "machine": machine(),
                "load": round(os.getloadavg()[0], 1),
                "sources": {source.name: source.commit() for source in sources},
                "settings": {name: str(value) for name, value in settings.items()},
                "command": command(),
            }
        )

    def add(self, **sample: Any) -> None:
        self.samples.append(sample)
        self._write({"session": self.session, **sample})

    def _write(self, line: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def newest(self) -> tuple[dict[str, Any], list[Sample]]:
        """The last session in the file: its first line, and its samples."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        found = [line for line in lines if line["session"] == lines[-1]["session"]]
        return found[0], found[1:]


def machine() -> str:
    """The processor and its cores, as far as the system says."""
    names = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    name = names[0].partition(": ")[2] if names else platform.processor()
    return f"{os.cpu_count()} cores of {name}, Python {platform.python_version()}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def command() -> str:
    """This call, as it can be repeated."""
    words = [word.replace(f"{ROOT}/", "") for word in sys.argv]
    return " ".join(words)


def pick(samples: Sequence[Sample], **wanted: Any) -> list[Sample]:
    """The samples with these fields, in the order in which they were taken."""
    return [sample for sample in samples if all(sample.get(name) == value for name, value in wanted.items())]


def middle(samples: Sequence[Sample], field: str) -> float:
    return float(median(sample[field] for sample in samples))


def ratio(samples: Sequence[Sample], others: Sequence[Sample], field: str) -> float:
    """The median of the ratios of samples that were taken in the same repetition."""
    of_other = {sample["repetition"]: sample[field] for sample in others}
    return float(median(s[field] / of_other[s["repetition"]] for s in samples if s["repetition"] in of_other))


def spread(samples: Sequence[Sample], field: str, digits: int = 2) -> list[str]:
    """Median, least and greatest."""
    values = [float(sample[field]) for sample in samples]
    return [f"{value:.{digits}f}" for value in (median(values), min(values), max(values))]


# -- tables and docs --------------------------------------------------------------------------------------------------


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def heading(session: Mapping[str, Any]) -> str:
    """When, where and of what the figures are; it goes above a table."""
    commits = "".join(f"; {name} {commit}" for name, commit in session["sources"].items())
    busy = f" Others used the machine (load {session['load']} at the start): what needs CPU looks slower than it is."
    return (
        f"Taken {session['session'][:16]} on {session['machine']}{commits}.{busy if session['load'] > _QUIET else ''}"
        f"\n\n```\nPYTHONPATH=tests/support .venv/bin/python {session['command']}\n```"
    )


def publish(
    name: str,
    text: str,
    picture: str | None,
    document: Path = PERFORMANCE,
    pictures: Path = PICTURES,
    by: str | None = None,
) -> None:
    """Replace the block `name` in the document, and its picture if it has one. `by`: the benchmark, if not `name`."""
    begin, end = f"<!-- {name}: written by benchmarks/{by or name}.py -->", f"<!-- end of {name} -->"
    before = document.read_text()
    if begin not in before or end not in before:
        raise SystemExit(f"{document} has no lines {begin!r} and {end!r}: there is no place for this table.")
    head, tail = before.partition(begin)[0], before.partition(end)[2]
    if picture is not None:
        text = f"{text}\n\n![{name}]({pictures.name}/{name}.svg)"
        pictures.mkdir(exist_ok=True)
        (pictures / f"{name}.svg").write_text(picture)
    document.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


# -- the command line -------------------------------------------------------------------------------------------------


def parser_of(doc: str | None, repetitions: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source",
        type=lambda text: Path(text).resolve(),
        action="append",
        help="a checkout to measure, by default this one; given twice, one before and one after a change",
    )
    parser.add_argument("--repetitions", type=int, default=repetitions, help=f"default {repetitions}")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-NAME.jsonl")
    parser.add_argument("--table", action="store_true", help="measure nothing: print the newest session's table")
    parser.add_argument("--docs", action="store_true", help="write table and picture into docs/inside/performance.md")
    return parser


def run(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Sequence[Source], Results], None],
    table: Callable[[Sequence[Sample]], str],
    picture: Callable[[Sequence[Sample]], str],
) -> None:
    """The main function of a benchmark: measure, print the table, publish it if `--docs` is given."""
    given = parser.parse_args()
    results = Results(name, given.results)
    if not given.table:
        sources = sources_of(given.source)
        results.begin(sources, vars(given))
        measure(given, sources, results)
    session, samples = results.newest()
    text = f"{heading(session)}\n\n{table(samples)}"
    print(text)
    if given.docs:
        publish(name, text, picture(samples))
