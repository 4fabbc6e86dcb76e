"""The speedrun example: its windows and their position, its scores, a short run, and the plan for two clouds."""

import math
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "speedrun"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import speedrun

    return speedrun


@pytest.fixture
def scale(module: ModuleType):
    return module.Scale(
        width=8, layers=1, context=4, vocabulary=300, batch=3, matrix_lr=0.1, other_lr=0.1, replicas=2, rounds=1,
        sync_every=1,
    )  # fmt: skip


def test_an_epoch_draws_every_window_once_and_a_position_goes_on(module: ModuleType, scale):
    tokens = torch.arange(60, dtype=torch.int32)
    whole = module.Windows(tokens, scale, seed=5)
    drawn = list(islice(whole, 2 * whole.in_epoch))
    firsts = [int(row[0]) for batch in drawn[: whole.in_epoch] for row in batch]
    assert len(set(firsts)) == len(firsts) == 3 * whole.in_epoch
    assert len({first % 4 for first in firsts}) == 1, "an epoch's windows do not overlap"
    for position in range(2 * whole.in_epoch):
        later = module.Windows(tokens, scale, seed=5)
        later.load_state_dict({"next": position})
        assert torch.equal(next(iter(later)), drawn[position])


def test_scores_are_nats_per_byte_whatever_the_lengths(module: ModuleType, scale):
    tokenizer = module.bpe(["some words and some more words " * 4], 300)
    model = module.build_model(scale)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token is then as likely as another
        items = ["some words", "öäü and more"]
        scores = module.Scorer(tokenizer, 4)(model, items)
    for item, score in zip(items, scores, strict=True):
        coded = tokenizer.encode(item)
        used = min(len(coded.ids), 5)
        size = len(item[coded.offsets[0][1] : coded.offsets[used - 1][1]].encode())
        assert score == pytest.approx((used - 1) * math.log(300) / size)


@pytest.mark.slow
def test_a_short_run_learns_and_two_clouds_are_planned(tmp_path: Path):
    def speedrun(*arguments: str, **environment: str) -> str:
        command = [sys.executable, str(FOLDER / "speedrun.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
        return done.stdout + done.stderr

    said = speedrun(str(tmp_path / "run"), "--rounds", "1", **os.environ)
    first, last = said.split("held-out bits per byte: ")[1].split(" (completed)")[0].split(" -> ")
    assert float(last) < float(first) - 0.3
    keys = {"AWS_ACCESS_KEY_ID": "known", "AWS_SECRET_ACCESS_KEY": "never-printed"}
    plan = speedrun("s3://bucket/a", "--scale", "gpu", "--text", "s3://bucket/text", "--plan", **os.environ, **keys)
    assert "4 replicas by modal:2+hf-jobs:2" in plan and "never-printed" not in plan
