"""Weights as whole numbers that follow from a commit, and what a commit means whose weights do not."""

from typing import Any

import pytest

from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.protocol import weights
from diloco_orchestrator.protocol.records import Answer, Clipped, Commit, Origin
from diloco_orchestrator.run_log.entries import CommitEntry


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
        ({"steps": "equal_time"}, {"r7": 7}, 900, 900),  # by tokens, unless said otherwise
        ({"ranks_per_replica": [2, 1, 1]}, {"r7": 7}, 900, 900),
        ({"ranks_per_replica": "2, 1, 1"}, {"r7": 7}, 900, 900),
        ({"ranks_per_replica": [2, 2, 2]}, {"r7": 7}, 900, 7),
        ({"ranks_per_replica": [2, 1, 1], "weights": "uniform"}, {"r7": 7}, 900, 7),
        ({"steps": "equal_time"}, {"r7": 7}, 0, 7),
        ({"steps": "equal_time"}, {"r6": 3, "r7": 7}, 0, 10),
        ({"steps": "equal_time", "weights": "uniform"}, {"r7": 7}, 900, 7),
    ],
)
def test_weights_are_whole_numbers_that_follow_from_steps_and_tokens(settings, steps, tokens, weight):
    assert weights.weight_of(7, origins(**steps), tokens, config(**settings)) == weight


def answers(*norms: float, steps: int = 30, tokens: int = 0) -> list[Answer]:
    """Whole contributions to round 7 with these norms."""
    return [
        Answer(
            replica_id=i,
            attempt=1,
            kind="delta",
            averaged=True,
            weight=0,
            norm=norm,
            tokens=tokens,
            origins=origins(r7=steps),
            manifest_sha256="0" * 64,
        )
        for i, norm in enumerate(norms)
    ]


def test_in_a_healthy_round_weights_are_those_of_the_policy():
    """Norms within the factor, and above it where the work is more: a whole round beside partial ones."""
    assert weights.shares_of(7, answers(1.0, 2.0, 0.1, 1.0), config()) == weights.Shares(dict.fromkeys(range(4), 30))
    partial = [*answers(0.2, 0.3, steps=5), answers(0.0, 0.0, 1.5)[2]]
    assert weights.shares_of(7, partial, config()) == weights.Shares({0: 5, 1: 5, 2: 30})
    assert weights.shares_of(7, [], config()) == weights.Shares({})


@pytest.mark.parametrize("norm", [2.01, 10.0, 1e30])
def test_a_contribution_far_above_the_median_norm_counts_as_one_of_the_median_norm(norm):
    shares = weights.shares_of(7, answers(1.0, 1.1, norm, 0.9), config())
    assert [each.replica_id for each in shares.clipped] == [2]
    assert shares.clipped[0].reason == f"its norm {norm:.4g} is {norm:.3g} times the median of the round"
    assert shares.weights[0] == shares.weights[1] == shares.weights[3] == 30 * 2**20
    pull = shares.weights[2] * norm / shares.weights[0]
    assert pull <= 1.0 and (pull > 0.99 or norm == 1e30)  # whole numbers: what is 1e30 times too large counts nothing
    assert weights.shares_of(7, answers(1.0, 1.1, norm, 0.9), config(clip="off")).clipped == ()


def test_where_directions_are_judged_the_limit_is_narrower_unless_it_is_named():
    said = answers(1.0, 1.0, 1.3, 1.0)
    assert weights.shares_of(7, said, config()).clipped == ()
    assert [
        each.replica_id for each in weights.shares_of(7, said, config(aggregate="agreeing_mean", replicas=4)).clipped
    ] == [2]
    named = config(aggregate="agreeing_mean", replicas=4, clip_factor=1.5)
    assert weights.shares_of(7, said, named).clipped == ()


@pytest.mark.parametrize(
    ("norms", "clipped"),
    [
        ((1.0, 50.0), [1]),  # of two the smaller is the median
        ((50.0, 1.0, 50.0, 1.0), [0, 2]),
        ((1.0, 0.0, 50.0), [1, 2]),  # one of zero norm is no measure of the others, and counts nothing
        ((0.0, 0.0, 50.0), []),  # most say that nothing moved
        ((0.0, 50.0), []),
        ((0.0, 0.0), []),
        ((5.0,), []),
        ((1e-45, 1.0, 1.0), []),
    ],
)
def test_the_median_is_the_lower_one_of_those_that_are_not_zero(norms, clipped):
    assert [each.replica_id for each in weights.shares_of(7, answers(*norms), config()).clipped] == clipped


def with_payloads(said: list[Answer], *names: str) -> list[Answer]:
    """The answers with payloads of equal bytes where names are equal."""
    return [each.model_copy(update={"payload": f"b3:{name * 64}"}) for each, name in zip(said, names, strict=True)]


def test_of_equal_payloads_the_heaviest_counts():
    said = with_payloads(answers(1.0, 1.0, 1.0, 1.0, 50.0, 1.0), *"abcade")
    shares = weights.shares_of(7, said, config())
    assert shares.weights == {0: 30 * 2**20, 1: 30 * 2**20, 2: 30 * 2**20, 3: 0, 4: 629145, 5: 30 * 2**20}
    assert {each.replica_id: each.reason for each in shares.clipped} == {
        3: "its payload equals that of replica 0, and counts once",
        4: "its norm 50 is 50 times the median of the round",
    }


@pytest.mark.parametrize("settings", [{}, {"aggregate": "median", "replicas": 5}, {"weights": "tokens"}])
def test_who_copies_takes_nothing_of_the_share_of_the_one_that_is_copied(settings):
    """The copier declares fewer steps and tokens than the other, whose share is that of every honest replica."""
    copied = answers(1.0, steps=1, tokens=1)[0]
    said = with_payloads([copied, *answers(*[1.0] * 5, tokens=900)[1:]], *"aabcd")
    shares = weights.shares_of(7, said, config(**settings)).weights
    assert min(shares[0], shares[1]) == 0 and {shares[0] + shares[1], *(shares[i] for i in (2, 3, 4))} == {shares[2]}


@pytest.mark.parametrize("names", ["aa", "aab", "aaaab", "aaaaaa"])
def test_where_most_payloads_are_equal_nothing_shows_who_copied(names):
    said = with_payloads(answers(*[1.0] * len(names)), *names)
    assert weights.shares_of(7, said, config()) == weights.Shares(dict.fromkeys(range(len(names)), 30))


def test_a_payload_of_zeros_beside_others_weighs_nothing():
    shares = weights.shares_of(7, with_payloads(answers(1.0, 0.0, 1.0, 0.0, 1.0), *"aztzc"), config())
    assert shares.weights == {0: 30, 1: 0, 2: 30, 3: 0, 4: 30}
    why = "its payload is all zeros, which says nothing beside the others"
    assert [(each.replica_id, each.reason) for each in shares.clipped] == [(1, why), (3, why)]
    said = answers(1.0, 0.0, 1.0)
    assert weights.shares_of(7, said, config(clip="off")) == weights.Shares(dict.fromkeys(range(3), 30))


def test_who_declares_more_steps_than_a_round_has_is_allowed_no_larger_norm():
    far = answers(1.0, 1.0, 20.0)[2].model_copy(update={"origins": origins(r6=10**9, r7=10**9)})
    assert [c.replica_id for c in weights.shares_of(7, [*answers(1.0, 1.0), far], config()).clipped] == [2]


def test_tokens_that_nobody_else_has_are_not_believed():
    """By tokens per step: a whole round beside partial ones may have many times their tokens."""
    by_tokens = config(weights="tokens")
    said = [*answers(1.0, 1.0, tokens=900), answers(1.0, 1.0, 1.0, tokens=2**53)[2]]
    shares = weights.shares_of(7, said, by_tokens)
    assert shares.weights == {0: 900, 1: 900, 2: 900}
    assert shares.clipped[0].reason == "it declares 1e+13 times the median of tokens per step"
    partial = [*answers(1.0, 1.0, steps=3, tokens=90), answers(1.0, 1.0, 1.0, tokens=900)[2]]
    assert weights.shares_of(7, partial, by_tokens) == weights.Shares({0: 90, 1: 90, 2: 900})


def test_an_aggregate_that_counts_everybody_once_is_given_no_other_weights():
    partial = [*answers(1.0, steps=5), *answers(1.0, 1.0, 9.0)[1:]]
    shares = weights.shares_of(7, partial, config(replicas=4, aggregate="median"))
    assert shares.weights == {0: 2**20, 1: 2**20, 2: 2**20 // 9}


def test_a_forged_commit_with_norms_beyond_floats_is_judged():
    forged = [
        each.model_copy(update={"norm": n}) for each, n in zip(answers(1, 1, 1), (5e-324, 5e-324, 1e308), strict=True)
    ]
    assert weights.shares_of(7, forged, config()).clipped[0].reason.endswith("is 1e+99 times the median of the round")


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
    assert weights.why_void(good, config()) == "" and CommitEntry.of(good, "", config()).commit is good


def test_a_void_commit_averages_nobody_for_everybody():
    clipped = (Clipped(replica_id=2, reason="its norm 9 is 9 times the median of the round"),)
    read = CommitEntry.of(commit(30, 30, 30).model_copy(update={"clipped": clipped}), "", config()).commit
    assert "replica 1 has weight 30; 20 follows from its steps, tokens, norm and payload" in read.reason
    assert (read.applied, read.outer_step, read.empty_rounds) == (False, 4, 1)
    assert not any(answer.averaged for answer in read.answers) and read.clipped == ()
    assert (read.roster, read.stop, read.previous) == ((0, 1, 2), "none", "0" * 64)


def test_weights_of_who_is_not_averaged_make_nothing_void():
    assert weights.why_void(commit(1, 2, 3, averaged=False), config()) == ""
