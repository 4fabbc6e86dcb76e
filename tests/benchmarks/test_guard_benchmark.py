"""The guard's benchmark at a tiny size: twins equal the product's folds, every cell has a row, pictures are SVG."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[str, list[dict]]:
    results = tmp_path_factory.mktemp("guard") / "results.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks/guard.py"), "--quick", "--runs", "4", "--processes", "1"]
    ended = subprocess.run([*command, "--results", str(results)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, [json.loads(line) for line in results.read_text().splitlines()]


def test_every_cell_is_measured_for_every_rule_and_twins_were_checked(done):
    output, lines = done
    checked = [line["runs"] for line in lines if line.get("group") == "check"]
    assert checked and checked[0] >= 150
    cells = {
        json.dumps({k: line[k] for k in ("group", "case", "phi", "sd", "fault")}) for line in lines if "rule" in line
    }
    ours = [line for line in lines if line.get("rule") == "SequentialGuard"]
    assert len(ours) == len(cells) > 500
    assert f"{sum(line['runs'] for line in ours):,} simulated runs" in output


def test_the_tables_name_every_family_and_fault(done):
    output, lines = done
    for case in {line["case"] for line in lines if line.get("group") in ("healthy", "fleet")}:
        assert f"| {case} |" in output


def test_the_pictures_are_svg():
    for picture in (ROOT / "docs/inside/kill-switch").glob("*.svg"):
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    assert len([*(ROOT / "docs/inside/kill-switch").glob("*.svg")]) == 6


def test_real_runs_are_trained_and_judged(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/guard_runs.py"), "--only", "2", "--only", "40"]
    command += ["--slow-down", "20", "--processes", "1", "--results", str(tmp_path / "results.jsonl")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (
        "0 of 1 runs halted, in 5 rounds" in ended.stdout and "| any letter is rewarded, from round 3 |" in ended.stdout
    )


def test_their_texts_are_the_same_bytes_on_every_interpreter(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import guard_texts

    texts = [guard_texts.text(kind) for kind in guard_texts.KINDS]
    digests = [hashlib.sha256(b"".join((*each.training, *each.heldout))).hexdigest()[:16] for each in texts]
    assert digests == ["518e99753e134be7", "6f4ae63372fad57c"]
    assert not {*texts[0].training} & {*texts[0].heldout}


def test_published_runs_are_judged(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/guard_public.py"), "--runs", "2"]
    ended = subprocess.run(
        [*command, "--results", str(tmp_path / "results.jsonl")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n| instructions, ") == 3 and ended.stdout.count("\n| RL, round ") == 4
