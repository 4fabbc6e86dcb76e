"""States of random generators in manifests: restored exactly, and small."""

import json
import random
from typing import Any

import numpy
import pytest
import torch

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.replica.training import rng


def drawn(generator: torch.Generator) -> tuple[Any, ...]:
    """The next numbers of every generator, normal ones too, of which libraries make two at a time."""
    return (
        torch.randn(5).tolist(),
        torch.randperm(9, generator=generator).tolist(),
        [random.random(), random.gauss(0, 1)],
        numpy.random.randn(3).tolist(),
    )


def draw_many(generator: torch.Generator, numbers: int) -> None:
    torch.rand(numbers)
    torch.rand(numbers, generator=generator)
    numpy.random.rand(numbers)
    [random.random() for _ in range(numbers)]


@pytest.fixture(autouse=True)
def _restored() -> Any:
    before = rng.capture()
    yield
    rng.restore(before)


@pytest.mark.parametrize("before", [0, 1, 5000])
@pytest.mark.parametrize("user_seeds", [False, True])
def test_a_restored_state_draws_the_same_numbers_in_another_process(before: int, user_seeds: bool):
    rng.seed_all(8)
    if user_seeds:  # what we cannot know: every library by itself
        random.seed("a word")
        torch.manual_seed(2**63 + 11)
        numpy.random.seed(7)
    generator = torch.Generator().manual_seed(5)
    draw_many(generator, before)
    drawn(generator)  # the second number of a pair is kept
    saved = json.loads(json.dumps(rng.capture(generator)))
    expected = drawn(generator)
    rng.seed_all(1234)
    other = torch.Generator()
    rng.restore(saved, other)
    assert drawn(other) == expected


def test_the_state_of_apples_gpu_is_kept_and_saved_with_the_others(monkeypatch):
    """No such GPU is here: a generator of the CPU answers in its place, by the functions that torch has for it."""
    gpu = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", gpu.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", gpu.set_state)
    torch.rand(7, generator=gpu)
    saved = json.loads(json.dumps(rng.capture()))
    with rng.kept():
        expected = torch.rand(4, generator=gpu).tolist()
    assert torch.rand(4, generator=gpu).tolist() == expected
    gpu.manual_seed(4)
    rng.restore(saved)
    assert torch.rand(4, generator=gpu).tolist() == expected


def test_a_state_takes_few_bytes_unless_its_generator_draws_much():
    rng.seed_all(8)
    generator = torch.Generator().manual_seed(5)
    draw_many(generator, 100)
    assert len(json.dumps(rng.capture(generator))) < 1000
    torch.rand(100_000)  # dropout
    assert len(json.dumps(rng.capture(generator))) < 4096


def test_a_damaged_state_is_refused_by_name():
    saved = rng.capture()
    with pytest.raises(RecordInvalid, match="torch has another form"):
        rng.restore({**saved, "torch": rng.capture()["random"][:6] + saved["torch"][6:]})
    with pytest.raises(RecordInvalid, match="random cannot be decoded"):
        rng.restore({**saved, "random": "AAAA"})
