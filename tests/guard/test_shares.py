"""Dealing the held-out set."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_orchestrator.guard import content_hash, deal, shares_of

ITEMS = st.lists(st.text(), unique=True, max_size=40)


@given(ITEMS, st.integers(1, 7), st.randoms())
def test_shares_partition_the_items_whatever_their_order(items, n, rng):
    shuffled = rng.sample(items, len(items))
    shares = shares_of(items, n)
    assert [sorted(share) for share in shares] == [sorted(share) for share in shares_of(shuffled, n)]
    assert sorted(item for share in shares for item in share) == sorted(items)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 8), st.sets(st.integers(0, 7), min_size=1))
def test_every_share_is_dealt_once_to_somebody_present(n, roster):
    roster = {i for i in roster if i < n} or {0}
    dealt = deal(n, sorted(roster))
    assert set(dealt) == roster
    assert sorted(share for shares in dealt.values() for share in shares) == list(range(n))
    assert all(replica_id in dealt[replica_id] for replica_id in roster)


def test_where_nobody_scores_nothing_is_dealt():
    assert deal(3, []) == {}


def test_content_decides_the_hash():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert content_hash(composed) == content_hash(decomposed)
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash(torch.arange(4)) == content_hash(torch.arange(4).numpy())
    different = ["1", 1, b"1", [1], torch.tensor([1]), torch.tensor([1.0]), torch.tensor([[1]]), None]
    assert len({content_hash(item) for item in different}) == len(different)


def test_an_item_without_content_is_refused():
    with pytest.raises(TypeError, match="held-out item of type object"):
        content_hash(object())
    with pytest.raises(TypeError, match=r"array of objects.*item\.tolist"):
        content_hash(np.array(["a", "bc"], dtype=object))
