"""Weights as whole numbers that follow from a commit, and what a commit means whose weights do not."""

from typing import Any

import pytest

from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.protocol import weights
from diloco_orchestrator.protocol.records import Answer, Commit, Origin


def config(**settings: Any) -> RunConfig:
    return make_config({"entrypoint": "m:f", "replicas": 3, "sync_every": 30, **settings})


def origins(**steps: int) -> tuple[Origin, ...]:
    """`r6=30`: 30 steps of round 6."""
    return tuple(Origin(round=int(name[1:]), steps=count) for name, count in steps.items())


@pytest.mark.parametrize(
    ("settings", "steps", "tokens", "weight"),
    [
        ({}, {"r7": 30}, 0, 30),
        ({}, {"r7": 20}, 0, 20),
        ({}, {"r6": 10, "r7": 20}, 0, 30),  # what it carries fills the round up …
        ({}, {"r6": 30, "r7": 30}, 10**9, 30),  # … and makes it no more than a whole one
        ({}, {}, 0, 30),
        ({"fragments": 3}, {"r7": 10}, 0, 30),
        ({"fragments": 3}, {"r7": 4}, 0, 24),
        ({"weights": "tokens"}, {"r7": 30}, 900, 900),
        ({"weights": "tokens"}, {"r6": 15, "r7": 30}, 900, 1350),
        ({"weights": "tokens"}, {"r6": 10, "r7": 30}, 100, 133),
        ({"weights": "tokens"}, {"r7": 30}, 0, 1),
        ({"weights": "tokens"}, {}, 900, 1),
    ],
)
def test_weights_are_whole_numbers_that_follow_from_steps_and_tokens(settings, steps, tokens, weight):
    assert weights.weight_of(7, origins(**steps), tokens, config(**settings)) == weight


def commit(*given: int, averaged: bool = True) -> Commit:
    """A commit of round 7 that averages contributions of 30, 20, 30 steps with these weights."""
    answers = [
        Answer(
            replica_id=i,
            attempt=1,
            kind="delta",
            averaged=averaged,
            weight=weight,
            origins=origins(r7=30 if i != 1 else 20),
            manifest_sha256="0" * 64,
        )
        for i, weight in enumerate(given)
    ]
    return Commit(
        write_id="w",
        at=0.0,
        round=7,
        leg=1,
        fragment=0,
        outer_step=5,
        answers=tuple(answers),
        begin_sha256="0" * 64,
        base_digest="b3:" + "0" * 64,
        roster=(0, 1, 2),
        applied=averaged,
        empty_rounds=0,
        stop="none",
        by="replica 0, attempt 1",
        reason="3 of 3 contributions",
        previous="0" * 64,
    )


def test_a_commit_whose_weights_follow_is_read_as_it_is():
    good = commit(30, 20, 30)
    assert weights.why_void(good, config()) == "" and weights.as_read(good, config()) is good


def test_a_void_commit_averages_nobody_for_everybody():
    read = weights.as_read(commit(30, 30, 30), config())
    assert "replica 1 has weight 30; 20 follows from its steps and tokens" in read.reason
    assert (read.applied, read.outer_step, read.empty_rounds) == (False, 4, 1)
    assert not any(answer.averaged for answer in read.answers)
    assert (read.roster, read.stop, read.previous) == ((0, 1, 2), "none", "0" * 64)


def test_weights_of_who_is_not_averaged_make_nothing_void():
    assert weights.why_void(commit(1, 2, 3, averaged=False), config()) == ""
