"""`Exchange` over real DTensors in real ranks: bit-equal to what torch's own `full_tensor` gathers, both ways."""

from pathlib import Path

import pytest
from drawn_dtensors import exchanged
from in_processes import in_processes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "drawn"), [(4, {"Shard", "_StridedShard", "plain", "Replicate"}), (3, {"Shard"})])
def test_owners_get_every_element_of_any_dtensor_and_ranks_get_them_back(tmp_path: Path, ranks, drawn):
    per_rank = in_processes(exchanged, *((str(tmp_path / "meeting"), rank, ranks, 100) for rank in range(ranks)))
    kinds = {kind for cases in per_rank for case in cases for kind in case.split()}
    assert drawn | {"empty"} <= kinds, "each of these was among the drawn"
