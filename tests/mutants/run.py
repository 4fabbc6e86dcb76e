"""`make mutants`: plants one fault after another in a copy of the tree and runs the tests that should notice it.

A mutant is killed when one of its tests fails, survives when all of them pass, and is unresolved when they could not
be run (the mutant does not import, or no test is selected). The exit code is 1 if a mutant survives, 2 if one is
unresolved. Results are kept in `.mutants.json` next to the code, so an interrupted call goes on where it was; a result
counts as long as neither the code nor the mutant's tests have changed.

The table is one file for each room of the code, `tests/mutants/<room>.toml`: under a header with the file's path a row
for each fault, `name = [claim, tests, text before, text after]`. The claim is what the fault breaks; the tests, one or
several, are the narrowest set that must notice it: a mutant takes seconds. The text before must occur exactly once in
its file, so a mutant that the code has outgrown is reported instead of passing unnoticed. A row with
"equivalent: …" among its tests names a replacement that changes no behaviour, and why; it is not planted or counted.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).resolve().parent
RESULTS = ROOT / ".mutants.json"
CODE = ("diloco_orchestrator", "replica", "executors")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "old_runs")
TEST_S, SELECTION_S = 120, 900  # a mutant may hang a test, and the process that ran it; unharmed they take seconds
KILLED, SURVIVED, UNRESOLVED = "killed", "SURVIVED", "unresolved"


EQUIVALENT = "equivalent: "


@dataclass(frozen=True)
class Mutant:
    """One fault. `equivalent`: why no behaviour differs, for a mutant that nothing can notice."""

    name: str
    file: str
    before: str
    after: str
    claim: str  # what it breaks
    tests: tuple[str, ...]
    equivalent: str = ""


def read_table(folder: Path = TABLE) -> list[Mutant]:
    """All rows of the rooms' files; `SystemExit` with the file's name where one cannot be read."""
    mutants = []
    for room in sorted(folder.glob("*.toml")):
        try:
            for file, rows in tomllib.loads(room.read_text()).items():
                mutants += [_mutant(name, file, row) for name, row in rows.items()]
        except ValueError as error:
            sys.exit(f"{room.name}: {error}")
    return mutants


def _mutant(name: str, file: str, row: list[str]) -> Mutant:
    if len(row) < 4 or not all(isinstance(each, str) for each in row):
        raise ValueError(f"{name!r} must be [claim, tests, text before, text after], all of them strings")
    claim, *tests, before, after = row
    equivalent = [each.removeprefix(EQUIVALENT) for each in tests if each.startswith(EQUIVALENT)]
    tests = [each for each in tests if not each.startswith(EQUIVALENT)]
    return Mutant(name, file, before, after, claim, tuple(tests), *equivalent)


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    state: str
    by: str  # the first test that failed, or why there is no answer
    seconds: float


class Bench:
    """A copy of the tree in which one mutant at a time is planted and tested."""

    def __init__(self, clean: Path, tree: Path) -> None:
        self._tree = tree
        shutil.copytree(clean, tree, symlinks=True)

    def try_out(self, mutant: Mutant) -> Outcome:
        with self._planted(mutant):
            return self.run(mutant.tests)

    @contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        file = self._tree / mutant.file
        clean = file.read_text()
        file.write_text(clean.replace(mutant.before, mutant.after))
        try:
            yield
        finally:
            file.write_text(clean)

    def run(self, tests: Sequence[str]) -> Outcome:
        """The selected tests in this tree, up to the first one that fails."""
        began = time.monotonic()
        for selection in tests:
            outcome = self._pytest(selection.split(), began)
            if outcome.state != SURVIVED:
                return outcome
        return Outcome(SURVIVED, "", time.monotonic() - began)

    def _pytest(self, selection: Sequence[str], began: float) -> Outcome:
        environ = {
            **os.environ,
            "PYTHONPATH": str(self._tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DILOCO_TESTS_PATIENCE_S": str(TEST_S),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe would stay open as long as anything that a test left
        process = subprocess.Popen(
            [*command, "-m", "not slow", *selection],
            cwd=self._tree,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(SELECTION_S)
        except subprocess.TimeoutExpired:
            log.write("\nthe process did not end.")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what hangs, and replicas that a failed test left
            process.wait()
        log.seek(0)
        output, seconds = log.read(), time.monotonic() - began
        log.close()
        failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if process.returncode == 0:
            return Outcome(SURVIVED, "", seconds)
        if process.returncode in (1, -signal.SIGKILL) and failed:
            return Outcome(KILLED, failed[0].split(" ", 1)[1].partition(" - ")[0], seconds)
        return Outcome(UNRESOLVED, " ".join(output.split())[-200:] or f"exit code {process.returncode}", seconds)


class Results:
    """The outcomes so far, by what they depend on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.exists() else {}
        self._code = _digest(*(ROOT / folder for folder in CODE), ROOT / "tests/support", ROOT / "tests/conftest.py")

    def of(self, mutant: Mutant) -> Outcome | None:
        return self._of(self._key(mutant))

    def keep(self, mutant: Mutant, outcome: Outcome) -> None:
        self._keep(self._key(mutant), outcome)

    def of_unharmed(self, selection: str) -> Outcome | None:
        """What a selection of tests did where nothing was planted."""
        return self._of(self._unharmed_key(selection))

    def keep_unharmed(self, selection: str, outcome: Outcome) -> None:
        self._keep(self._unharmed_key(selection), outcome)

    def _of(self, key: str) -> Outcome | None:
        found = self._known.get(key)
        return None if found is None else Outcome(**found)  # type: ignore[arg-type]

    def _keep(self, key: str, outcome: Outcome) -> None:
        with self._lock:
            self._known[key] = asdict(outcome)
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(self._known, indent=1))
            draft.replace(self._path)

    def _key(self, mutant: Mutant) -> str:
        said = (mutant.file, mutant.before, mutant.after, mutant.tests)
        return _key(mutant.name, said, self._code, *map(_tests_digest, mutant.tests))

    def _unharmed_key(self, selection: str) -> str:
        return _key(selection, (), self._code, _tests_digest(selection))


def _key(name: str, *said: object) -> str:
    return f"{name} {hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]}"


@cache  # of the tests as they were when the tree was copied, though somebody may edit them meanwhile
def _tests_digest(selection: str) -> str:
    return _digest(ROOT / selection.split()[0].partition("::")[0])


def _digest(*places: Path) -> str:
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def check(mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with the table: names used twice, texts that the code has outgrown, tests that are gone."""
    wrong = []
    for mutant in mutants:
        if sum(other.name == mutant.name for other in mutants) > 1:
            wrong.append(f"{mutant.name}: two mutants have this name")
        file = ROOT / mutant.file
        times = file.read_text().count(mutant.before) if file.exists() else 0
        if times != 1:
            wrong.append(f"{mutant.name}: its text occurs {times} times in {mutant.file}, must be once")
        for selection in mutant.tests:
            path = selection.split()[0].partition("::")[0]
            if not (ROOT / path).exists():
                wrong.append(f"{mutant.name}: there is no {path}")
    return wrong


def _try_all(mutants: Sequence[Mutant], results: Results, processes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="diloco-mutants-") as scratch, ThreadPoolExecutor(processes) as pool:
        clean, local = Path(scratch, "clean"), threading.local()
        shutil.copytree(ROOT, clean, symlinks=True, ignore=LEFT_OUT)

        def bench() -> Bench:
            if not hasattr(local, "bench"):
                local.bench = Bench(clean, Path(tempfile.mkdtemp(dir=scratch), "tree"))
            return local.bench  # type: ignore[no-any-return]

        def unharmed(selection: str) -> None:
            outcome = results.of_unharmed(selection)
            if outcome is None or outcome.state != SURVIVED:
                outcome = bench().run([selection])
                results.keep_unharmed(selection, outcome)
                print(f"unharmed   {outcome.seconds:6.1f} s  {selection}  {outcome.by}", flush=True)
            if outcome.state != SURVIVED:  # it would kill every mutant
                raise SystemExit(f"{selection} does not pass where nothing is planted: {outcome.by}. Mend that first.")

        def one(mutant: Mutant) -> None:
            outcome = bench().try_out(mutant)
            results.keep(mutant, outcome)
            print(f"{outcome.state:10} {outcome.seconds:6.1f} s  {mutant.name}  {outcome.by}", flush=True)

        selections = sorted({selection for mutant in mutants for selection in mutant.tests})
        for _ in pool.map(unharmed, selections):
            pass
        for _ in pool.map(one, mutants):
            pass


def _chosen(mutants: Sequence[Mutant], only: Sequence[str]) -> list[Mutant]:
    counted = [mutant for mutant in mutants if not mutant.equivalent]
    if not only:
        return counted
    chosen = [mutant for mutant in counted if any(word in mutant.name or word in mutant.file for word in only)]
    if not chosen:
        sys.exit(f"no mutant is named {' or '.join(only)}: see --list.")
    return chosen


def _print_table(mutants: Sequence[Mutant], equivalent: int, results: Results) -> int:
    found = [(mutant, results.of(mutant)) for mutant in mutants]
    for mutant, outcome in found:
        if outcome is not None and outcome.state != KILLED:
            print(f"{outcome.state}: {mutant.name} ({mutant.file}): breaks that {mutant.claim}. {outcome.by}")
    states = [UNRESOLVED if outcome is None else outcome.state for _, outcome in found]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (KILLED, SURVIVED, UNRESOLVED))
    print(f"{len(mutants)} mutants: {counts}; {equivalent} equivalent ones are not counted")
    return 1 if SURVIVED in states else 2 if UNRESOLVED in states else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="mutants whose name or file holds this; repeatable")
    parser.add_argument("--list", action="store_true", help="print the table and plant nothing")
    parser.add_argument("--check", action="store_true", help="only check that every text occurs exactly once")
    parser.add_argument("--again", action="store_true", help="forget earlier results of the chosen mutants")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    table = read_table()
    mutants = _chosen(table, given.only)
    if wrong := check(mutants if given.only else table):
        print("\n".join(wrong))
        return 2
    if given.list:
        for mutant in table:
            print(f"{mutant.file}: {mutant.name}\n    breaks: {mutant.claim}\n    tests: {', '.join(mutant.tests)}")
            if mutant.equivalent:
                print(f"    equivalent: {mutant.equivalent}")
    if given.list or given.check:
        return 0
    results = Results(RESULTS)
    left = [mutant for mutant in mutants if given.again or results.of(mutant) is None]
    if left:
        _try_all(left, results, given.processes)
    return _print_table(mutants, sum(bool(mutant.equivalent) for mutant in table), results)


if __name__ == "__main__":
    sys.exit(main())
