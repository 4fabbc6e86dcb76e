"""The check of a machine's arithmetic when a replica joins."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diloco_orchestrator.allreduce import aggregate
from diloco_orchestrator.errors import BaseDiverged
from diloco_orchestrator.outer import golden_arithmetic
from diloco_orchestrator.outer.arithmetic import denormals_kept, flushes


def test_a_bit_that_is_wrong_once_while_the_arithmetic_is_checked_removes_nobody(monkeypatch):
    golden = golden_arithmetic.outer_steps_digest
    answers = iter(["b3:" + "0" * 64])
    monkeypatch.setattr(golden_arithmetic, "outer_steps_digest", lambda: next(answers, None) or golden())
    golden_arithmetic.is_golden.cache_clear()
    golden_arithmetic.check_arithmetic()


@pytest.mark.parametrize("digest", ["outer_steps_digest", "edge_cases_digest", "aggregates_digest"])
def test_arithmetic_that_stays_another_is_refused(digest, monkeypatch):
    monkeypatch.setattr(golden_arithmetic, digest, lambda: "b3:" + "0" * 64)
    golden_arithmetic.is_golden.cache_clear()
    with pytest.raises(BaseDiverged, match="other bits than the golden ones"):
        golden_arithmetic.check_arithmetic()
    golden_arithmetic.is_golden.cache_clear()


def test_a_machine_that_sorts_otherwise_is_found(monkeypatch):
    """One value of one coordinate in the wrong place: weighted means cannot show that."""
    network = aggregate._network

    monkeypatch.setattr(aggregate, "_network", lambda count: network(count)[:-1])
    assert golden_arithmetic.aggregates_digest() != golden_arithmetic.GOLDEN_AGGREGATES
    assert golden_arithmetic.outer_steps_digest() == golden_arithmetic.GOLDEN


def test_flush_to_zero_of_the_training_thread_changes_no_bit_in_a_worker_and_is_not_lost():
    """A worker thread that this thread starts has the mode of its starter; the mode of each stays its own."""

    def in_worker() -> tuple[str, bool]:
        with denormals_kept():
            digest = golden_arithmetic.edge_cases_digest()
        return digest, flushes()

    assert torch.set_flush_denormal(True)
    try:
        with ThreadPoolExecutor(1) as pool:
            digest, flushed = pool.submit(in_worker).result()
        assert digest == golden_arithmetic.GOLDEN_EDGES and flushed
        with denormals_kept():
            with ThreadPoolExecutor(1) as pool:  # as shards are formed: by threads that begin within it
                assert not pool.submit(flushes).result()
            assert golden_arithmetic.edge_cases_digest() == golden_arithmetic.GOLDEN_EDGES
        assert flushes()
    finally:
        torch.set_flush_denormal(False)
