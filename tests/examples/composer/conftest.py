"""Makes the package `composer` importable, here and in processes that tests start."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def examples() -> Path:
    return EXAMPLES
