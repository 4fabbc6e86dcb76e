"""`Rounds` and `RunRounds`: what a training loop may ask of the rounds it takes part in, and what they promise it.

`Participant` keeps the promises of both over a bucket. A loop without a session needs `Rounds` only, which
`MockManager` keeps in memory. All calls come from one thread, the training thread, unless a method says otherwise.
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
from diloco_orchestrator.snapshots.saved_state import Buffers


@dataclass(frozen=True)
class ContributionFields:
    """The training loop's part of a manifest. `in_loop` and `scores` are as published: higher is better."""

    steps: int = 0  # inner steps since the replica's last contribution
    tokens: int = 0  # of this round
    in_loop: Metric | None = None
    scores: tuple[Score, ...] = ()
    local_scores: tuple[Score, ...] = ()  # of the local parameters, on the shares of `scores`
    vault: tuple[VaultScore, ...] = ()  # of the base, if an alarm of the guard waits for them
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    consumed: Consumed | None = None  # items of these steps, compared with the held-out set
    progress: Progress | None = None
    state: Buffers | None = None  # bytes to save beside the payload; None: none
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the model, that differ from the first ones


@dataclass(frozen=True)
class ClosedRound:
    """The result of a round that this replica waited for."""

    applied: bool
    skipped: bool  # whether the base is newer than the round's commit, because payloads were deleted by retention
    average: Mapping[str, torch.Tensor]  # pseudo-gradient by parameter; empty if not kept, not applied or skipped
    healed: bool = False  # whether this replica trained on a wrong base, and has rebuilt it
    contribution: Contribution | None = None  # this replica's, if it contributed; perhaps another attempt's
    received: Sequence[Contribution] = ()  # all manifests of the round that this replica has read, its own too


class Rounds(Protocol):
    """One round after another: publish, then close. A round is *in flight* from `publish` in the background, or from
    `close_beside_training`, until `close` has returned or raised."""

    @property
    def open(self) -> OpenRound:
        """The open round. Costs nothing. Stays the same while the round is in flight: only `close` moves on."""
        ...

    @property
    def base(self) -> Base:
        """The base that the open round starts from. Costs nothing. Not to be read while a round is in flight: closing
        steps it in place."""
        ...

    def publish(self, form: Callable[[], Vector], fields: ContributionFields, *, in_background: bool = False) -> None:
        """Contribute to the open round; at most once per round.

        `form` is called once, and returns the pseudo-gradient of the open round's fragment, flat, in name order. In the
        background it is called, and its vector read, at any time until `close` returns, so both must not depend on what
        training changes meanwhile. If another attempt of this replica has contributed before, its contribution counts.
        Whoever dies halfway leaves bytes that no manifest names, and nobody reads.
        """
        ...

    def close_beside_training(self, then: Callable[[], None], *, keep_average: bool = False) -> None:
        """Begin to close the open round in the background, unless that has begun; then call `then` there.

        Safe to repeat: only the first call's arguments count. For a round that this replica has contributed to.
        `keep_average`: as in `close`, for which it counts then. Raises the background's error, if that has ended with
        one.
        """
        ...

    def close(self, *, keep_average: bool = False) -> ClosedRound:
        """End the open round, or wait for its end; afterwards `base` is the next base, and `open` the next round.

        `keep_average`: return the average, which takes the memory of another fragment. Raises the round's errors
        (`RoundCloser.close`); a round that was in flight is none any more then, and what was published stays.
        """
        ...


class RunRounds(Rounds, Protocol):
    """`Rounds` and more needs of a run: rounds that end without this replica, restarts, scores, snapshots, the end.

    Nothing added here but `publish_scores`, `announce`, `write_snapshot_if_due` and `finish_leg` writes to the bucket,
    and each is safe to repeat: what exists already stays.
    """

    @property
    def history(self) -> ContributionHistory:
        """This replica's own contributions, of whichever attempt. Not to be asked while a round is in flight."""
        ...

    @property
    def buffers(self) -> ReplicaBuffers:
        """The persistent buffers of the attached model. Not to be changed while a round is in flight."""
        ...

    @property
    def own(self) -> Contribution | None:
        """This replica's contribution to the open round, perhaps of another attempt; None before `publish` has created
        or found one here."""
        ...

    @property
    def elastic(self) -> bool:
        """Whether a round may end without this replica, and counts part of its steps. One answer for the whole run."""
        ...

    def publish_scores(self, fields: ContributionFields) -> None:
        """Contribute scores to the final evaluation round, which takes no pseudo-gradient. Otherwise as `publish`."""
        ...

    def await_published(self) -> None:
        """Block until what is published in the background is in the bucket; returns at once if nothing is. Raises the
        errors of publishing."""
        ...

    def committed(self, *, if_due: bool = False) -> bool:
        """Whether the open round was committed without waiting for this replica. One GET request.

        `if_due`: without a request and False where a commit is unlikely (`RoundTiming.poll_due`), so that it can be
        asked between any two inner steps.
        """
        ...

    def is_behind(self, steps: int) -> bool:
        """Whether this replica, after `steps` inner steps, had better contribute them now (`RoundTiming.is_behind`)."""
        ...

    def announce(self) -> None:
        """Publish that this replica is back, so that the next round waits for it. Nothing if it does anyway."""
        ...

    def reopen(self, round_: int) -> None:
        """Make a closed round of this leg the open one, with its base, to continue from there as a restarted attempt.
        No round is in flight. Raises what a rebuild raises; then nothing has moved."""
        ...

    def write_snapshot_if_due(self) -> bool:
        """Begin to write the snapshot of the base in the background, if it is due and this replica's turn.

        Returns whether a rebuild before it gave another base, which is `base` then. Errors of writing it are raised by
        the next `close`. A snapshot that is missing or incomplete costs others a longer rebuild, and nothing else.
        """
        ...

    def finish_leg(self) -> bool:
        """After the stop: write the last snapshot and the leg's result, where others do not. Returns as
        `write_snapshot_if_due`."""
        ...

    def give_up(self) -> None:
        """Let a round in flight end where it would wait, because nobody takes its base. Safe to repeat, and without a
        round in flight."""
        ...
