"""`Rounds` and `RunRounds`: the interface between a training loop and the rounds that it takes part in.

`Participant` implements both over a bucket, `MockManager` implements `Rounds` in memory. `Rounds` suffices for a loop
without a session. All calls come from the training thread unless a method says otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import Consumed, Contribution, Metric, Progress, Score, VaultScore
from diloco_orchestrator.replica.rounds.contribution_history import ContributionHistory
from diloco_orchestrator.replica.rounds.replica_buffers import ReplicaBuffers
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


class RunRounds(Rounds, Protocol):
    """`Rounds` plus what a supervised run needs: commits without this replica, restarts, scores, snapshots, the end.

    Only `publish_scores`, `announce`, `write_snapshot_if_due` and `finish_leg`, of the methods added here, write to the
    bucket. Each may be repeated: existing objects stay as they are. A leg is the run from a start or resume to the next
    stop.
    """

    @property
    def history(self) -> ContributionHistory:
        """The manifests of this replica, by any attempt. It must not be used while a round is in flight."""
        ...

    @property
    def buffers(self) -> ReplicaBuffers:
        """The persistent buffers of the attached model. They must not be changed while a round is in flight."""
        ...

    @property
    def own(self) -> Contribution | None:
        """This replica's contribution to the open round, by any attempt; None before `publish` made or found it."""
        ...

    @property
    def elastic(self) -> bool:
        """Whether rounds may end without this replica and average fewer inner steps of it. Fixed for the whole run."""
        ...

    def score_strangers_by(
        self,
        measure: Callable[[Base], Sequence[float]],
        dealt: Callable[[Base, Contribution], tuple[Sequence[float], Sequence[float]]] | None = None,
    ) -> None:
        """Have `close` score strangers' contributions, in the thread that calls it, before they are averaged.

        Scores are higher for better models, and both functions must leave the model as it was.

        Args:
            measure: scores of a base on the held-out items that the open round deals to this replica.
            dealt: scores of a base on training items that the open round deals to a contribution's author, and on as
                many that it deals to others, the same ones at each call; None: it deals none, or they cannot be scored.
        """
        ...

    def publish_scores(self, fields: ContributionFields) -> None:
        """Contribute scores to the final evaluation round, which takes no pseudo-gradient; at most once."""
        ...

    def await_published(self) -> None:
        """Block until the contribution published in the background is in the bucket. Raises errors of publishing."""
        ...

    def committed(self, *, if_due: bool = False) -> bool:
        """Whether the open round was committed without waiting for this replica. One GET request.

        `if_due`: make no request and return False where a commit is unlikely (`RoundTiming.poll_due`), so that the
        method can be called between any two inner steps.
        """
        ...

    def is_behind(self, steps: int, steps_s: float) -> bool:
        """Whether to contribute the round's `steps` inner steps now, which took `steps_s` seconds.

        `RoundTiming.is_behind` has the rule.
        """
        ...

    def announce(self) -> None:
        """Publish that this replica is back, so that the next round waits for it, unless it would anyway."""
        ...

    def reopen(self, round_: int) -> None:
        """Go back to a closed round since the last resume and its base, to train it again as a restarted attempt would.

        No round may be in flight. Raises the errors of rebuilding a base; then nothing has changed.
        """
        ...

    def write_snapshot_if_due(self) -> bool:
        """Begin to write the snapshot of the base in the background, if it is due and this replica's turn.

        Returns whether the base was rebuilt first and had other bits; `base` is then the rebuilt one. Write errors are
        raised by the next `close`. A missing or incomplete snapshot only makes later rebuilds longer.
        """
        ...

    def finish_leg(self) -> bool:
        """After the stop: write the last snapshot and `result.json` unless others do.

        Returns whether the base was rebuilt first and had other bits; `base` is then the rebuilt one.
        """
        ...

    def give_up(self) -> None:
        """Make a round in flight end with an error where it would wait for others, because its result is not needed.

        Safe to repeat, and to call without a round in flight.
        """
        ...
