"""Run folders that version 0.1.0 wrote are read, and resumed, as 0.1.0 did it.

`tests/fixtures/make_old_runs.py` made them and recorded what 0.1.0 printed. A newer version may print more fields; each
old field must have its old value. Only what users call is called here: the `diloco` command and exported names.
"""

import hashlib
import io
import json
import shutil
import sys
import tarfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import pytest
from real_runs import digests

from diloco_orchestrator import LocalProcessExecutor, RunReader, attach, open_store
from diloco_orchestrator.cli.main import main

FIXTURES = Path(__file__).parent.parent / "fixtures" / "old_runs"
NAMES = ("completed", "collapsed_then_resumed", "halted", "fragments", "retention")


@dataclass(frozen=True)
class OldRun:
    """One unpacked run, and what version 0.1.0 printed about it with the folder's path written as RUN."""

    folder: Path
    told: dict[str, Any]

    def diloco(self, command: str, *args: str) -> Any:
        """The JSON that `diloco COMMAND FOLDER ARGS --json` prints; it must exit with 0."""
        code, output, errors = diloco(command, str(self.folder), *args, "--json")
        assert code == 0, errors
        return json.loads(output.replace(str(self.folder), "RUN"))


def diloco(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command. In this process, because importing torch takes longer than most
    commands do; `tests/cli` runs it in processes of its own."""
    output, errors, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["diloco", *args]
    try:
        with redirect_stdout(output), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = argv
    assert isinstance(ended.value.code, int)
    return ended.value.code, output.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old_runs")
    with tarfile.open(FIXTURES / "runs.tar.xz", "r:xz") as packed:
        packed.extractall(folder, filter="data")
    return folder


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest, unpacked: Path) -> OldRun:
    return old_run(request.param, unpacked)


def old_run(name: str, unpacked: Path) -> OldRun:
    return OldRun(unpacked / name, json.loads((FIXTURES / f"{name}.json").read_text()))


def differences(new: Any, old: Any, where: str = "") -> list[str]:
    """Where `new` lacks a field of `old` or has another value there. Fields that only `new` has are fine."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name, value in old.items():
            at = f"{where}.{name}"
            found += differences(new[name], value, at) if name in new else [f"{at} is gone"]
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            words for i, pair in enumerate(zip(new, old, strict=True)) for words in differences(*pair, f"{where}[{i}]")
        ]
    return [] if new == old else [f"{where}: {old!r} became {new!r}"]


def test_differences_are_found_at_any_depth_and_new_fields_are_none():
    old = {"rows": [{"loss": 1.0}, {"loss": None}], "state": "halted"}
    assert differences({**old, "more": 1}, old) == []
    assert differences({**old, "rows": [{"loss": 1.0, "new": 2}, {"loss": 3}]}, old) == [".rows[1].loss: None became 3"]
    assert differences({"rows": [{"loss": 1.0}, {}]}, old) == [".rows[1].loss is gone", ".state is gone"]
    assert differences({**old, "rows": []}, old) == [f".rows: {old['rows']!r} became []"]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_status_prints_the_old_fields(run):
    assert differences(run.diloco("status"), run.told["status"]) == []


def test_the_readers_rows_have_the_old_values(run):
    rows = [asdict(row) for row in RunReader(open_store(str(run.folder))).rows()]
    assert differences(rows, run.told["status"]["rounds"]) == []


def test_the_log_has_the_old_digests(run):
    assert digests(run.folder) == run.told["base_digests"]


def test_verify_agrees_and_checks_as_much_as_it_did(run):
    new, old = run.diloco("verify"), run.told["verify"]
    assert new["agrees"] is True
    assert len(new["unchecked"]) == len(old["unchecked"])  # sentences, which may be worded anew
    assert differences(new, {**old, "unchecked": new["unchecked"]}) == []


@pytest.mark.parametrize("which", ["newest", "rebuilt"])
def test_pull_gives_the_old_bytes(run, which, tmp_path):
    old = run.told["pull"][which]
    options = [] if which == "newest" else ["--round", str(old["round"])]
    if which == "rebuilt":
        assert old["round"] not in run.told["status"]["snapshots"]
    assert run.diloco("pull", str(tmp_path / "model"), *options)["round"] == old["round"]
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "model").iterdir()}
    assert files == old["files"]


def test_snapshots_are_listed_with_their_scores(run):
    assert differences(run.diloco("snapshots"), run.told["snapshots"]) == []


def test_logs_of_every_attempt_are_printed(run):
    for attempt, lines in run.told["logs"].items():
        replica_id, number = attempt.split()
        assert run.diloco("logs", "--replica", replica_id, "--attempt", number) == lines


def test_the_report_has_every_round_and_attempt(run, tmp_path):
    run.diloco("report", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    status = run.told["status"]
    assert status["run_id"] in page and str(run.folder) in page
    for row in status["rounds"]:
        assert escape(row["reason"]) in page
    for replica in status["replicas"]:
        assert escape(replica["state"].removeprefix("ended: ")) in page


def test_gc_would_remove_what_it_would_have_removed(run):
    new = run.diloco("gc", "--payloads", "needed", "--keep-snapshots", "2", "--dry-run")
    old = run.told["gc"]
    assert (new["objects"], new["bytes"], new["removed"]) == (old["objects"], old["bytes"], False)
    assert new["snapshots"].keys() == old["snapshots"].keys()  # each with a sentence, which may be worded anew


def test_a_round_whose_payloads_were_removed_is_refused_and_the_nearest_named(unpacked, tmp_path):
    run = old_run("retention", unpacked)
    assert 4 not in run.told["verify"]["bases"] and 6 in run.told["status"]["snapshots"]
    code, _, errors = diloco("pull", str(run.folder), str(tmp_path / "model"), "--round", "4")
    assert code == 2 and "round 4" in errors and "nearest is 6" in errors
    assert not (tmp_path / "model").exists()


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_that_0_1_0_halted_is_resumed_to_the_bits_that_0_1_0_resumed_it_to(unpacked, tmp_path):
    """Optimizer and random states of 0.1.0 are loaded: the workload's batches and momenta come from them."""
    halted = old_run("halted", unpacked)
    folder = tmp_path / "bucket"
    shutil.copytree(halted.folder, folder)
    run = attach(str(folder), executor=LocalProcessExecutor(tmp_path / "executor", grace_s=1.0)).resume()
    assert run.wait().status == "completed"
    expected = halted.told["base_digests_once_resumed"]
    assert len(expected) > len(halted.told["base_digests"])
    assert digests(folder) == expected
