"""The quality benchmark: the product learns what a plain loop learns, and the benchmark goes on after a cut."""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from diloco_orchestrator.demo.text import Corpus

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def repetitive(length: int = 20_000) -> Corpus:
    """Texts that take no reading of the standard library."""
    words = [bytes([97 + i % 26]) * (1 + i % 5) + b" " for i in range(length // 4)]
    parts = [b"".join(words[i::9]) for i in range(9)]
    return Corpus(tuple(parts[:8]), tuple(parts[8:]))


# -- equal to a plain loop --------------------------------------------------------------------------------------------


def test_the_product_learns_what_a_plain_loop_learns(module, monkeypatch: pytest.MonkeyPatch, one_thread):
    runs = module("quality_runs")
    monkeypatch.setattr(runs, "corpus", repetitive)
    size = runs.Size(steps=12, batch=4, context=16, items=8, width=16, warm_up=4, pretraining=4)
    ours = runs.play(runs.Arm("run", 2, 4), size, 0)
    theirs = runs.play(runs.Arm("loop", 2, 4, program="reference"), size, 0)
    assert [at for at, _ in ours["curve"]] == [at for at, _ in theirs["curve"]] == [0, 1, 2, 3]
    for (_, mine), (_, other) in zip(ours["curve"], theirs["curve"], strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    assert ours["heldout"] < ours["curve"][0][1] - 0.1 and (ours["averaged"], ours["carried"]) == (6, 0)
    assert ours["duration"] == pytest.approx(12, abs=1)  # nor does anybody wait in the final evaluation round


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_every_seed_learns_what_a_plain_loop_learns(module, seed: int):
    runs = module("quality_runs")
    size = runs.Size(steps=240, pretraining=500)
    for replicas, sync_every, rate in ((1, 30, 0.2), (2, 30, 0.4), (4, 30, 0.4), (4, 10, 0.2), (4, 120, 0.8)):
        settings = {"outer": {"lr": rate}}
        ours = runs.play(runs.Arm("run", replicas, sync_every, settings), size, seed)
        theirs = runs.play(runs.Arm("loop", replicas, sync_every, settings, program="reference"), size, seed)
        assert ours["heldout"] == pytest.approx(theirs["heldout"], abs=1e-4), (replicas, sync_every)


@pytest.mark.slow
def test_trouble_is_what_its_arm_says(module, monkeypatch: pytest.MonkeyPatch):
    runs, quality = module("quality_runs"), module("quality")
    monkeypatch.setattr(runs, "corpus", repetitive)
    size = runs.Size(steps=240, batch=4, context=16, items=8, width=16, pretraining=0)
    usual = runs.play(quality.USUAL, size, 1)
    slow, *_, carried, dropped, killed = (runs.play(arm, size, 1) for arm in quality.TROUBLE)
    assert (usual["averaged"], usual["steps"], usual["duration"]) == (32, 4 * 240, pytest.approx(240, abs=1))
    assert slow["averaged"] == 32 and slow["steps"] < 4 * 240  # parts of rounds
    assert carried["stalls"] == dropped["stalls"] > 0 and carried["carried"] > 0 and dropped["carried"] == 0
    assert carried["steps"] > dropped["steps"]
    assert killed["kills"] == 2 and killed["averaged"] < 32
    again = runs.play(quality.TROUBLE[-1], size, 1)
    assert {**again, "cpu_s": 0} == {**killed, "cpu_s": 0}


# -- the benchmark ----------------------------------------------------------------------------------------------------


def sample(arm: str, seed: int, heldout: float, **more: object) -> dict[str, object]:
    curve = [[0, 5.0], [8, heldout + 0.1], [16, heldout]]
    return {"arm": arm, "seed": seed, "heldout": heldout, "curve": curve, "cpu_s": 60.0, "commit": "c", **more}


def test_differences_are_paired_and_orders_are_judged_by_their_interval(module):
    quality = module("quality")
    names = {"data-parallel": 2.0, "N=1, H=30": 1.99, "N=2, H=30": 2.05, "N=4, H=30": 2.04, "N=4, H=10": 2.0}
    samples = [sample(name, seed, value + 0.1 * seed) for name, value in names.items() for seed in range(3)]
    assert quality.interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    middle, half = quality.paired(samples, quality.USUAL, quality.ALONE)
    assert middle == pytest.approx(0.04) and half == pytest.approx(0.0, abs=1e-9)
    found = quality.orders(samples)
    assert "N=1, H=30 to N=2, H=30 +0.0600 ± 0.0000;" in found
    assert "N=2, H=30 to N=4, H=30 -0.0100 ± 0.0000 (the opposite)" in found
    assert "| N=4, H=30 | 2.1400 ± 0.2484 | +0.0400 ± 0.0000 | – | – | – | – | 3 |" in quality.table(samples)
    assert "| N=4, H=120 | 2.5000 | – | – |" in quality.table([*samples, sample("N=4, H=120", 7, 2.5)])
    for drawn in (quality.picture(samples), quality.curves(samples, quality.Size())):
        assert ElementTree.fromstring(drawn).tag.endswith("svg") and "N=4, H=30" in drawn


def options(*only: str) -> argparse.Namespace:
    return argparse.Namespace(seeds=2, only=only)


def test_every_arm_takes_the_best_rates_of_its_trials(module):
    quality = module("quality")
    given, size, known = options("H=120", "data-parallel"), quality.Size(), {}
    untuned = quality.tune(given, size, known)
    assert untuned.task(quality.USUAL, 0) == (quality.USUAL, size, 0)

    def try_all(tasks, score) -> None:
        known.update({key: {"heldout": score(*task)} for key, task in tasks.items()})

    try_all(quality.inner_trials(given, size), lambda arm, size, _: abs(size.learning_rate - 6e-3) + len(arm.name))
    try_all(quality.outer_trials(given, quality.tune(given, size, known)), lambda arm, size, _: abs(arm.outer_lr - 0.8))
    assert len(known) == 4 + 4 + 4  # data-parallel, N=4, and the outer rates of H=120
    tuning = quality.tune(given, size, known)
    tasks = list(quality.wanted(given, tuning).values())
    assert [(arm.name, seed) for arm, _, seed in tasks] == [
        (name, seed) for seed in (0, 1) for name in ("data-parallel", "N=4, H=120")
    ]
    assert {own.learning_rate for _, own, _ in tasks} == {6e-3}
    assert [arm.settings for arm, _, _ in tasks[:2]] == [{}, {"outer": {"lr": 0.8}}]
    assert "| N=4, H=120 | 0.7000 | 0.6000 | 0.4000 | **0.0000** |" in quality.tuning_table(tuning)


@pytest.mark.slow
def test_a_benchmark_that_was_cut_off_goes_on(module, tmp_path: Path):
    def run(*options: str) -> str:
        results = ["--results", str(tmp_path / "r"), "--steps", "120", "--processes", "1", "--seeds", "2"]
        results += ["--pretraining", "20"]
        command = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), *results, *options]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--only", "data-parallel").count(" s, seed ") == 4 + 2  # trials, and two seeds
    output = run("--only", "data-parallel", "N=4, H=120")
    assert output.count(" s, seed ") == 4 + 4 + 2 and "| N=4, H=120 |" in output and "| data-parallel |" in output
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    missing = 2 * len(module("quality").ARMS) - 4
    assert sum("arm" in line for line in lines) == 6 + 10
    assert f"4 runs, {missing} missing, 2 seeds, 120 steps" in output
    assert "| N=4, H=120 |" in run("--table")


def test_the_pictures_are_svg():
    for picture in (ROOT / "docs/inside/quality").glob("*.svg"):
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
