"""Every benchmark at a tiny size: it runs, its table has the rows that it promises, and no figure is checked."""

import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.store.memory import MemoryStore

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(name: str, results: Path, *options: str) -> str:
    """The output of a benchmark of one repetition."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--repetitions", "1", "--results", str(results)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run([*command, *options], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(output: str) -> list[dict[str, str]]:
    """The rows of the Markdown table in the output, by column; equal columns are numbered."""
    lines = [line for line in output.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns = [f"{name}{cells[0][:i].count(name) or ''}" for i, name in enumerate(cells[0])]
    assert all(len(row) == len(columns) for row in cells)
    return [dict(zip(columns, row, strict=True)) for row in cells[2:]]


def samples_in(results: Path) -> list[dict[str, object]]:
    """The samples of the one session, without its first line."""
    first, *samples = [json.loads(line) for line in results.read_text().splitlines()]
    assert first["sources"] and first["machine"] and "settings" in first
    return samples


def is_number(text: str) -> bool:
    return math.isfinite(float(text))


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch):
    """Imports a file of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


# -- one by one -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sync_has_a_row_for_every_arm(tmp_path: Path):
    rows = rows_of(run("sync", tmp_path / "r", "--fleets", "2x0.01", "--stores", "folder"))
    ours = ["fp32", "int4", "int4, scatter_reduce"]
    assert [row["arm"] for row in rows] == [*ours, "gloo", "torchft", "transfer"]
    assert all(is_number(row[name]) for row in rows for name in ("s, median", "x gloo", "x torchft", "x transfer"))
    assert [row["x gloo"] for row in rows if row["arm"] == "gloo"] == ["1.00"]
    assert {sample["store"] for sample in samples_in(tmp_path / "r")} == {"folder"}


@pytest.mark.slow
def test_link_shows_what_passed_each_link_beside_the_limit(tmp_path: Path):
    rows = rows_of(run("link", tmp_path / "r", "--million", "0.01", "--rtt", "1", "--ways", "fp32"))
    assert [(row["codec"], row["arm"]) for row in rows] == [
        ("fp32", "gloo, without delay"), ("fp32", "this version"), ("fp32", "transfer"),
    ]  # fmt: skip
    assert all(is_number(row["x limit"]) for row in rows[1:])
    ours, transfer = (each for each in samples_in(tmp_path / "r") if "up_mb" in each)
    assert ours["up_mb"] > transfer["up_mb"] > 0.038  # 4 bytes a parameter, and headers


@pytest.mark.slow
def test_overlap_shows_blocking_and_utilisation_beside_their_limits(tmp_path: Path):
    schedule = ("--step", "0.01", "--delay", "0.05", "--before", "2", "--fragments", "2")
    (row,) = rows_of(run("overlap", tmp_path / "r", "--million", "0.01", "--rtt", "1", *schedule))
    assert (row["arm"], row["limit"], row["limit1"]) == ("this version", "0.05", "0.95")
    (sample,) = samples_in(tmp_path / "r")
    assert (sample["delay"], sample["round_steps"]) == (5, 7) and 0 < float(str(sample["utilisation"])) < 1
    assert float(str(sample["transfer_s"])) >= 0 and is_number(row["largest blocking of an inner step, s"])


@pytest.mark.slow
def test_latency_compares_two_checkouts_and_prints_the_table_again(tmp_path: Path):
    options = ("--replicas", "2", "--rtts", "0", "5", "--source", str(ROOT), "--source", str(ROOT))
    output = run("latency", tmp_path / "r", *options)
    rows = rows_of(output)
    assert [(row["arm"], row["ms"], row["round trips"] == "-") for row in rows] == [
        ("before", "0", True), ("before", "5", False), ("after", "0", True), ("after", "5", False),
    ]  # fmt: skip
    assert all(float(row["requests a replica"]) > 3 for row in rows)
    lines = (tmp_path / "r").read_text()
    assert run("latency", tmp_path / "r", "--table") == output
    assert (tmp_path / "r").read_text() == lines


@pytest.mark.slow
def test_memory_is_shown_for_each_number_of_replicas(tmp_path: Path):
    rows = rows_of(run("memory", tmp_path / "r", "--million", "0.5", "--replicas", "1", "2"))
    assert [row["N"] for row in rows] == ["1", "2"]
    assert all(is_number(row["held, c"]) and is_number(row["peak, c"]) for row in rows)


@pytest.mark.slow
def test_history_compares_a_long_run_with_a_short_one(tmp_path: Path):
    operations = ("--operations", "diloco status")
    rows = rows_of(run("history", tmp_path / "r", "--rounds", "3", "6", "--replicas", "2", *operations))
    assert [(row["operation"], row["rounds"]) for row in rows] == [("diloco status", "3"), ("diloco status", "6")]
    assert all(int(row["requests"]) >= int(row["of them GET"]) > 0 for row in rows)


def test_the_long_run_is_one_that_verifies(benchmark_module):
    store = MemoryStore("memory://long")
    benchmark_module("long_run").LongRun(store, 2, 5).write()
    found = verify_run(store)
    assert not found.disagreement and not found.unchecked
    assert (found.checked["rounds"], found.checked["manifests"]) == (6, 12)


@pytest.mark.slow
def test_startup_divides_the_time_into_phases(tmp_path: Path):
    rows = rows_of(run("startup", tmp_path / "r", "--replicas", "1", "--cores", "64"))
    named = {row["phase"]: row["this version"] for row in rows}
    sample = samples_in(tmp_path / "r")[0]
    phases = [float(str(sample[name])) for name in named if name in sample]
    assert len(phases) >= 5
    assert math.isclose(sum(phases), float(str(sample["wall_s"])), rel_tol=1e-6)
    assert all(row["torch and AdamW"] for row in rows if row["phase"].startswith("CPU s of a process"))


def test_gpu_overlap_refuses_without_a_gpu(tmp_path: Path):
    command = [sys.executable, str(BENCHMARKS / "gpu_overlap.py"), "--results", str(tmp_path / "r")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "needs a CUDA GPU" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_gpu_overlap_sorts_steps_by_the_schedule(tmp_path: Path, benchmark_module):
    module = benchmark_module("gpu_overlap")
    settings = module.Settings(
        device="cpu", parameters=100, layers=4, batch=2, rounds=3, sync_every=12, fragments=2, delay=2,
        folder=str(tmp_path / "run"),
    )  # fmt: skip
    kinds = [kind for kind, _ in module.step_times(settings)]
    assert kinds == [
        *["no sync in flight"] * 3, "fragment published", "sync in flight", "fragment installed",
    ] * 3  # fmt: skip
    assert len(list((tmp_path / "run" / "rounds").iterdir())) == 4  # the first round warms up
    samples = [{"kind": kind, "wall_s": 0.1, "million": 1, "arm": "this version"} for kind in kinds]
    assert [row["count"] for row in rows_of(module.table(samples))] == ["9", "3", "3", "3"]
    assert ElementTree.fromstring(module.picture(samples)).tag.endswith("svg")


# -- what they share --------------------------------------------------------------------------------------------------


def test_a_process_that_dies_ends_the_benchmark_with_its_last_words(benchmark_module):
    measuring = benchmark_module("measuring")
    with (
        pytest.raises(RuntimeError, match=r"(?s)process 0 of 'raw' died \(exit code 1\).*KeyError: 'url'"),
        measuring.fleets() as start,
    ):
        start("raw", [{}], [dict(os.environ)])


def test_ratios_are_taken_within_a_repetition(benchmark_module):
    measuring = benchmark_module("measuring")
    ours = [{"repetition": i, "wall_s": wall} for i, wall in enumerate((2.0, 30.0, 4.0))]
    theirs = [{"repetition": i, "wall_s": wall} for i, wall in enumerate((1.0, 10.0, 4.0))]
    assert measuring.ratio(ours, theirs, "wall_s") == 2.0


def test_publishing_replaces_one_block_of_the_document(tmp_path: Path, benchmark_module):
    measuring = benchmark_module("measuring")
    begin, end = "<!-- sync: written by benchmarks/sync.py -->", "<!-- end of sync -->"
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    measuring.publish("sync", "| new |", "<svg/>", document, tmp_path / "performance")
    text = document.read_text()
    assert text == f"before\n{begin}\n| new |\n\n![sync](performance/sync.svg)\n{end}\nafter\n"
    assert (tmp_path / "performance" / "sync.svg").read_text() == "<svg/>"
    with pytest.raises(SystemExit, match="no place"):
        measuring.publish("link", "| new |", "<svg/>", document, tmp_path / "performance")


def test_the_document_has_a_place_for_every_benchmark_that_can_write_there():
    # A benchmark has the common options, or a --docs of its own.
    writes = re.compile(r"parser(_of)?\(__doc__|, help=\"write the table into docs/inside/performance\.md")
    texts = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py") if path.stem != "measuring"}
    writing = {name for name, text in texts.items() if writes.search(text)}
    places = re.findall(
        r"<!-- (\w+): written by benchmarks/\1.py -->", (ROOT / "docs/inside/performance.md").read_text()
    )
    assert sorted(places) == sorted(writing)


def test_pictures_are_well_formed_and_stay_inside(benchmark_module):
    svg = benchmark_module("svg_chart")
    bar = svg.Bar("a < b", [1.0, 2.0], low=2.5, high=4.0, limit=5.0)
    drawn = svg.bars("title & more", [svg.Group("g", [bar, svg.Bar("none", [0.0])])], "s", legend=["one", "two"])
    curves = [svg.Curve("N=2", [(0, 0.0), (50, 1.5)]), svg.Curve("goal", [(0, 0), (50, 1.0)], dashed=True)]
    for text in (drawn, svg.lines("t", curves, "ms", "s")):
        root = ElementTree.fromstring(text)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for shape in root.iter():
            for name in ("x", "x1", "x2"):
                assert 0 <= float(shape.attrib.get(name, 0)) <= width
            for name in ("y", "y1", "y2"):
                assert 0 <= float(shape.attrib.get(name, 0)) <= height
    assert "a &lt; b" in drawn and 'stroke-dasharray="4 2"' in drawn


def test_by_scatter_reduce_the_payloads_that_a_replica_reads_do_not_grow_with_the_fleet(benchmark_module):
    scale = benchmark_module("scale")
    found = {
        (path, n): scale.played(scale.config_of(n, "int4", path), 10**9, path, scale.Place(), 1200.0)
        for path, n in itertools.product(("gather", "scatter_reduce"), (8, 32))
    }
    grows = {path: found[path, 32].payload_down / found[path, 8].payload_down for path in ("gather", "scatter_reduce")}
    assert grows["gather"] > 4 and grows["scatter_reduce"] < 1.2
    assert found["scatter_reduce", 32].sync_s < 0.5 * found["gather", 32].sync_s


def test_heldout_split_has_a_row_for_every_length_and_search(tmp_path: Path):
    output = run("heldout_split", tmp_path / "r", "--heldout", "50", "--items", "60")
    compared, split = (rows_of(part) for part in output.split("Splitting:"))
    assert [row["characters an item"] for row in compared] == ["200", "2,000", "8,000"]
    assert all(is_number(row["µs an item"]) and is_number(row["share of it"].removesuffix(" %")) for row in compared)
    assert split[0]["search"] == "equal items only"
    assert all(sample["item_us"] > 0 for sample in samples_in(tmp_path / "r"))  # type: ignore[operator]


def test_sharded_models_are_timed_as_replicas_and_plain_on_the_cpu_too():
    command = [sys.executable, str(BENCHMARKS / "gpu_islands.py"), "--tiny", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")] == ["full", "lora"]
    assert all(is_number(ratio) for ratio in re.findall(r"as a replica / plain: (\S+)", done.stdout))
