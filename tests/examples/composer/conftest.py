"""Makes the package `composer` and the helpers of this folder importable, here and in processes that tests start."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parent)]


@pytest.fixture
def examples() -> Path:
    return EXAMPLES


@pytest.fixture(autouse=True)
def threads(one_thread: None) -> None:
    """One thread in every test of this folder."""
