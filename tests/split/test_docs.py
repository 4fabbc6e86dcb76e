"""The examples of docs/recipes/heldout.md are executed as they are."""

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from in_one_process import SmallRun
from page_blocks import blocks, examples, run

from diloco_orchestrator.cli.main import diloco
from diloco_orchestrator.errors import HeldoutItemInTraining

PAGE = Path(__file__).parents[2] / "docs/recipes/heldout.md"


def test_the_example_splits_trains_and_refuses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, train, probe = examples(PAGE, "python")
    namespace = run(make)
    (command,) = re.findall(r"\$ diloco (.*)", *blocks(PAGE, "console"))
    assert CliRunner().invoke(diloco, command.split(), standalone_mode=False, catch_exceptions=False).exit_code == 0
    sides = {side: Path(f"data/{side}/items.jsonl").read_text().splitlines() for side in ("train", "heldout")}
    held = len(sides["heldout"])
    assert len(sides["train"]) + held == 400 and held % 16 == 0 < held
    run(train)
    small = SmallRun()
    namespace["train"](small.context())
    said = small.manifest(1).consumed
    assert said is not None and said.items == 24
    run(probe)
    measured, table = namespace["probe"], torch.nn.Embedding(16, 16)
    measured.load(measured.reference_of(table))
    assert 0 <= measured.measure(table) < 1e-3
    Path("data/train/items.jsonl").write_text("\n".join([*sides["train"][:9], sides["heldout"][0]]))
    with pytest.raises(HeldoutItemInTraining, match=r"held-out item 'items\.jsonl:\d+'"):
        namespace["train"](SmallRun().context())
