"""Pauses of loops that poll."""

from itertools import islice

import pytest

from diloco_orchestrator.clock import Backoff


@pytest.mark.parametrize(
    ("backoff", "pauses"),
    [
        (Backoff(first_s=0.25, longest_s=1.5), [0.25, 0.5, 1.0, 1.5, 1.5, 1.5]),
        (Backoff(first_s=1.0, longest_s=3.0, factor=1.5), [1.0, 1.5, 2.25, 3.0, 3.0, 3.0]),
        (Backoff(first_s=1.0, longest_s=0.5), [0.5] * 6),
    ],
)
def test_pauses_grow_to_the_longest_and_every_loop_begins_anew(backoff: Backoff, pauses: list[float]):
    for _ in range(2):
        assert list(islice(backoff.pauses(), 6)) == pauses
