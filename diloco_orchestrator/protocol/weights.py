"""How much a contribution weighs in the average: whole numbers that everybody derives alike from the commit itself.

A commit whose weights do not follow is *void*: it averages nobody, for everybody. The mean is `allreduce.mean`'s.
"""

from collections.abc import Sequence

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.records import Answer, Commit, Origin


def weight_of(round_: int, origins: Sequence[Origin], tokens: int, config: RunConfig) -> int:
    """The weight of a contribution to `round_` whose payload holds the work of `origins`.

    With `weights="uniform"` `sync_every`, less the steps that the payload lacks of a whole round. With
    `weights="tokens"` the tokens of the round's own steps, scaled up by the carried steps. A contribution that names
    no step of its own weighs as much as a whole round, by tokens 1.
    """
    own = sum(origin.steps for origin in origins if origin.round == round_)
    steps = sum(origin.steps for origin in origins)
    if config.weights == "uniform":
        return config.sync_every - (max(0, config.round_steps - steps) if own else 0)
    return max(1, tokens * steps // own) if own else 1


def why_void(commit: Commit, config: RunConfig) -> str:
    """Why a commit averages nobody although it names somebody; empty if its weights follow from the run's policy."""
    for answer in commit.answers:
        if answer.averaged and answer.weight != (derived := _weight(commit, answer, config)):
            return (
                f"replica {answer.replica_id} has weight {answer.weight}; {derived} follows from its steps and tokens"
            )
    return ""


def as_read(commit: Commit, config: RunConfig) -> Commit:
    """What a commit means to every reader: itself, or if it is void, a commit that averages nobody and keeps the base.

    What stops the run, the roster and the guard's state count all the same.
    """
    why = why_void(commit, config)
    if not why:
        return commit
    return commit.model_copy(
        update={
            "answers": tuple(answer.model_copy(update={"averaged": False}) for answer in commit.answers),
            "outer_step": commit.outer_step - commit.applied,
            "applied": False,
            "empty_rounds": commit.empty_rounds + 1,
            "figures": commit.figures and commit.figures.model_copy(update={"tokens": 0}),
            "reason": f"void, so that nobody is averaged: {why}",
        }
    )


def _weight(commit: Commit, answer: Answer, config: RunConfig) -> int:
    return weight_of(commit.round, answer.origins, answer.tokens, config)
