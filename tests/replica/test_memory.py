"""The memory that rounds need beyond the user's model, gradients and inner optimizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = Path(__file__).parent.parent / "support" / "memory_of_a_sync.py"


def measured(folder: Path, millions: int, *how: str) -> dict[str, list[float]]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(MEASURE), str(folder), str(millions), *how]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_125_m_parameters_need_two_and_a_half_times_their_size_and_one_more_during_a_sync(tmp_path: Path):
    """In units of c, the fp32 bytes of the parameters: 2 are the base and its momenta.

    During a sync: .4 are 192 MiB of payload bytes, the rest are shards that are formed or read.
    """
    found = measured(tmp_path, 125)
    assert max(found["held"]) <= 2.5 and max(found["peak"]) <= 3.5, found


@pytest.mark.slow
def test_24_m_parameters_give_back_after_a_sync_what_it_needed(tmp_path: Path):
    """The bounds of the payload cache and of a shard are not in proportion to so small a model: the peak is higher."""
    found = measured(tmp_path, 24)
    assert max(found["held"]) <= 2.5 and max(found["peak"]) <= 5.0, found


@pytest.mark.slow
def test_125_m_parameters_need_no_second_base_while_one_is_rebuilt_and_its_snapshot_written(tmp_path: Path):
    """Beside base and momenta a shard of a rebuild is in memory, then one file, which here is 1 c."""
    found = measured(tmp_path, 125, "snapshots")
    assert max(found["held"]) <= 2.5 and max(found["peak"]) <= 3.5, found
