"""The rules of claims as tables of cases: which base a round starts from, who rebuilds, who leaves."""

from typing import Any

import pytest

from diloco_orchestrator.protocol import claims
from diloco_orchestrator.protocol.claims import BaseClaim
from diloco_orchestrator.protocol.records import Answer, Commit

KINDS = {"d": "delta", "a": "abstention", "s": "scores"}


def said(words: str, **rebuilt_after: int) -> list[BaseClaim]:
    """`"A A Ba"`: replicas 0 and 1 claim A, replica 2 abstains and claims B. `r2=6`: it rebuilt after round 6."""
    found = []
    for replica_id, word in enumerate(words.split()):
        kind = KINDS[word[1:] or "d"]
        found.append(BaseClaim(replica_id, word[0], kind, rebuilt_after.get(f"r{replica_id}", 0)))
    return found


@pytest.mark.parametrize(
    ("words", "own", "rebuilt", "shared"),
    [
        ("A A A", "A", False, "A"),
        ("A A B", "A", False, "A"),
        ("A A B", "B", False, "A"),  # a decision needs no base of one's own
        ("A A B", "C", True, "A"),
        ("A B", "A", False, "A"),  # only a tie is broken by it
        ("A B", "B", False, "B"),
        ("A A B B", "B", False, "B"),
        ("A A B B", "C", False, "A"),  # a tie that it is not in goes to the lowest replica id
        ("B A A B", "C", True, "B"),
        ("A B", "C", False, "A"),
        ("A B", "C", True, "C"),  # everybody claims another base than the rebuilt one: nobody is named
        ("A", "C", True, "C"),  # alone, and healed after it had published
        ("A", "C", False, "A"),
        ("A Ba Ba", "B", False, "A"),  # abstentions do not vote …
        ("Aa Ba Ba", "A", False, "B"),  # … unless there is nothing else
        ("As Bs Bs", "A", False, "B"),
        ("", "A", True, None),
    ],
)
def test_the_claim_that_most_share_is_the_one_that_a_commit_names(words, own, rebuilt, shared):
    assert claims.shared_claim(said(words), own, own_is_rebuilt=rebuilt) == shared


@pytest.mark.parametrize(
    ("words", "own", "tied"),
    [
        ("A B", "A", True),  # own: the base of replica 0
        ("A B", "B", False),  # a rebuild corrected it: replica 1 is right
        ("A A B B", "A", True),
        ("A A B", "A", False),
        ("A B B", "A", False),
        ("A B C", "A", True),
        ("A Ba", "A", False),  # abstentions do not vote …
        ("Aa B C", "A", False),  # … and who abstains decides by its own base
        ("A", "A", False),
    ],
)
def test_a_tie_is_open_for_those_whose_contributions_are_in_it(words, own, tied):
    assert claims.is_tied(said(words), 0, own) is tied


@pytest.mark.parametrize(
    ("words", "own", "asked", "against"),
    [
        ("A A A", "A", "", ""),
        ("A A B", "A", "", ""),  # nobody in the strictly largest group rebuilds
        ("A A B", "B", "", "A"),
        ("A B", "A", "", "B"),  # in a tie everybody does
        ("A B", "B", "", "A"),
        ("A A B B C", "A", "", "BC"),
        ("A A B", "B", "A", ""),  # once per claim
        ("A B C", "A", "B", "C"),
        ("A A A", "B", "", "A"),  # nobody claims its own base
        ("Aa Ba Ba", "A", "", "B"),  # an abstention tells of its base as well
        ("", "A", "", ""),
    ],
)
def test_who_is_not_in_the_strictly_largest_group_rebuilds_once_per_claim(words, own, asked, against):
    assert claims.contradictions(said(words), own, set(asked)) == frozenset(against)


def answers(*kinds: str) -> tuple[Answer, ...]:
    return tuple(
        Answer.model_validate(
            {"replica_id": i, "attempt": 1, "kind": kind, "averaged": False, "weight": 1, "manifest_sha256": "0" * 64}
        )
        for i, kind in enumerate(kinds)
    )


def test_a_manifest_outside_the_claim_is_answered_wrong_base_and_so_is_its_abstention():
    given = answers("delta", "delta", "abstention", "unverifiable", "abstention", "unverifiable")
    judged = claims.judged(given, said("A B Ba B Aa"), "A")
    assert [answer.kind for answer in judged] == [
        "delta",
        "wrong_base",
        "wrong_base",
        "unverifiable",
        "abstention",
        "unverifiable",  # its manifest could not be read, so that it claims nothing
    ]


def commit(*kinds: str, base_digest: str | None = "A", round_: int = 7) -> Commit:
    fields: dict[str, Any] = {"round": round_, "base_digest": base_digest, "answers": answers(*kinds)}
    return Commit.model_construct(**fields)


@pytest.mark.parametrize(
    ("words", "kinds", "fields", "outvoted"),
    [
        # Replica 2 claims B. It had rebuilt after round 5 or later: its memory is as good as the bucket.
        ("A A B", "delta delta wrong_base", {"r2": 5}, True),
        ("A A B", "delta delta wrong_base", {"r2": 4}, False),
        # As many claim B: only if those who claim A have all rebuilt as well.
        ("A A B B", "delta delta wrong_base wrong_base", {"r2": 6}, False),
        ("A A B B", "delta delta wrong_base wrong_base", {"r2": 6, "r0": 6}, False),
        ("A A B B", "delta delta wrong_base wrong_base", {"r2": 6, "r0": 6, "r1": 5}, True),
        # Who claims C may have the same bits as replica 2 after a rebuild.
        ("A C B", "delta wrong_base wrong_base", {"r0": 6, "r2": 6}, False),
        ("A A B C", "delta delta wrong_base wrong_base", {"r2": 6}, True),
        # Too few claim A for the quorum of two, so that nobody is named.
        ("A Aa B", "delta abstention wrong_base", {"r2": 6}, True),
        # An abstention gives no reason to leave, nor does a manifest that the commit does not answer.
        ("A A Ba", "delta delta wrong_base", {"r2": 6}, False),
        ("A A B", "delta delta", {"r2": 6}, False),
    ],
)
def test_who_had_rebuilt_and_meets_a_stronger_claim_is_outvoted(words, kinds, fields, outvoted):
    everybody = said(words, **fields)
    assert claims.is_outvoted(everybody[2], commit(*kinds.split()), everybody, quorum=2) is outvoted


def test_the_same_claim_as_the_commits_or_a_commit_without_one_outvotes_nobody():
    everybody = said("A A B", r0=6, r2=6)
    named = commit("delta", "delta", "wrong_base")
    assert not claims.is_outvoted(everybody[0], named, everybody, quorum=2)
    without = commit("delta", "delta", "wrong_base", base_digest=None)
    assert not claims.is_outvoted(everybody[2], without, everybody, quorum=2)


def test_wrong_bases_are_counted_per_replica():
    rounds = [commit("wrong_base", "delta"), commit("wrong_base", "wrong_base"), commit("delta", "delta")]
    assert [claims.wrong_bases(rounds, replica_id) for replica_id in range(3)] == [2, 1, 0]
