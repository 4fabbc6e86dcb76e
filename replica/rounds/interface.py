"""`Rounds`: the interface between a training loop and the rounds that it takes part in.

`Participant` implements it over a bucket, and has what a supervised run needs beside it; `MockManager` implements it in
memory. All calls come from the training thread unless a method says otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import Consumed, Contribution, Metric, Progress, Score, VaultScore
from diloco_orchestrator.replica.rounds.tip import OpenRound
from diloco_orchestrator.snapshots.state_file import StateFile


@dataclass(frozen=True)
class ContributionFields:
    """The training loop's part of a contribution's manifest: steps, metrics, scores, states.

    `in_loop` and `scores` are oriented so that higher is better.
    """

    steps: int = 0  # inner steps since the replica's last contribution
    tokens: int = 0  # of this round
    in_loop: Metric | None = None
    scores: tuple[Score, ...] = ()
    local_scores: tuple[Score, ...] = ()  # of the local parameters, on the shares of `scores`
    vault: tuple[VaultScore, ...] = ()  # of the base, if an alarm of the guard waits for them
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    consumed: Consumed | None = None  # items of these steps, compared with the held-out set
    progress: Progress | None = None
    state: StateFile | None = None  # to save beside the payload; None: none
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the model, that differ from the first ones


@dataclass(frozen=True)
class ClosedRound:
    """The outcome of a round that this replica took part in."""

    applied: bool
    skipped: bool  # whether the base is newer than the round's commit, because payloads were deleted by retention
    average: Mapping[str, torch.Tensor]  # pseudo-gradient by parameter; empty if not kept, not applied or skipped
    healed: bool = False  # whether this replica trained on a wrong base, and has rebuilt it
    contribution: Contribution | None = None  # this replica's, if it contributed; perhaps another attempt's
    received: Sequence[Contribution] = ()  # all manifests of the round that this replica has read, its own too


class Rounds(Protocol):
    """One round after another: publish a contribution, then close the round.

    A round is *in flight* from `publish` in the background, or `close_beside_training`, until `close` ends.
    """

    @property
    def open(self) -> OpenRound:
        """The open round. No request. Unchanged while a round is in flight: only `close` moves on."""
        ...

    @property
    def base(self) -> Base:
        """The base that the open round starts from. No request. Not readable in flight: closing steps it in place."""
        ...

    def publish(self, form: Callable[[], Vector], fields: ContributionFields, *, in_background: bool = False) -> None:
        """Contribute to the open round; at most once per round.

        `form` is called once, and returns the pseudo-gradient of the open round's fragment, flat, in name order. In the
        background it is called, and its vector read, at any time until `close` returns, so neither may depend on what
        training changes meanwhile. If another attempt of this replica has contributed already, that contribution
        counts. A process that dies halfway leaves payload bytes that no manifest names and nobody reads.
        """
        ...

    def close_beside_training(self, then: Callable[[], None], *, keep_average: bool = False) -> None:
        """Begin to close the open round in a background thread, unless begun before; `then` is called in it afterwards.

        This replica must have contributed to the round. Repeated calls do nothing: the first call's arguments count.
        `keep_average`: as in `close`. Raises the background thread's error once it has failed.
        """
        ...

    def close(self, *, keep_average: bool = False) -> ClosedRound:
        """End the open round, or wait for its end; afterwards `base` is the next base, and `open` the next round.

        `keep_average`: return the averaged pseudo-gradient, at the cost of a fragment's size in memory. Raises as
        `RoundCloser.close` does; the round is then not in flight any more, and what was published stays.
        """
        ...
