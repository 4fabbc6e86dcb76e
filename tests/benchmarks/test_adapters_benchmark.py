"""The benchmark of adapters at a tiny size: every form is measured, and exact averaging is full-rank averaging."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diloco_orchestrator.demo.text import Corpus

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> ModuleType:
    """The benchmark with two short settings and a text that takes no reading of the standard library."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("adapters")
    words = [bytes([97 + i % 26]) * (1 + i % 5) + b" " for i in range(4000)]
    parts = [b"".join(words[i::9]) for i in range(9)]
    monkeypatch.setattr(module, "corpus", lambda: Corpus(tuple(parts[:8]), tuple(parts[8:])))
    monkeypatch.setattr(module, "PRETRAINING", 8)
    monkeypatch.setattr(module, "ITEMS", 10)
    monkeypatch.setattr(module, "SETTINGS", [module.Setting("short", 4, 2, 1e-2), module.Setting("one", 2, 1, 1e-2)])
    return module


@pytest.mark.slow
def test_every_form_has_its_row_and_exact_averaging_is_full_rank(
    adapters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--seeds", "2", "--processes", "1", "--results", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "adapters.py"), *arguments])
    threads = torch.get_num_threads()
    adapters.main()
    torch.set_num_threads(threads)
    first, *samples = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert first["command"] == "benchmarks/adapters.py " + " ".join(arguments)
    assert [(each["setting"], each["seed"]) for each in samples] == [("short", 0), ("short", 1), ("one", 0), ("one", 1)]
    for each in samples:
        assert each["exact"] == pytest.approx(each["full-rank averaging"], abs=1e-5)
        assert max(each["distance, exact"]) < 1e-4 < 1e-2 < min(each["distance, mean"])
        assert each["mean, A frozen"] != each["mean"] != each["exact"]
    output = capsys.readouterr().out
    for form in adapters.FORMS:
        assert output.count(f"| {form} |") == 2
    assert "**short**: 2 rounds of 4 steps, inner lr 0.01, 2 seeds." in output
    assert f".venv/bin/python {first['command']}\n" in output
