"""A replica's training state beside the base: saved with its contributions (`Checkpoint`), and restored from them.

The state is the inner optimizer, the user's large stateful objects, and local parameters that differ from the base.
Buffers are published with every contribution (`rounds.replica_buffers`). Cursor, random generators, counters and small
stateful objects are in every manifest instead (`Progress`, `small_state`). `tensor_tree` encodes. `resume_point`
decides once, before the first batch, and changes nothing; `session` applies it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_orchestrator.codecs.table import get_codec
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol.records import Contribution, Progress
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.diloco_loop import DiLoCoLoop
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.small_state import SmallState
from diloco_orchestrator.replica.training.tensor_tree import state_file, stored_tree, whole_tree
from diloco_orchestrator.snapshots.state_file import StateFile
from diloco_orchestrator.snapshots.stored_state import StoredTensor

log = logging.getLogger(__name__)

_MIB = 2**20


@dataclass(frozen=True)
class SavedState:
    """A training state read from the bucket, and the contribution it was saved with. Loading it frees its tensors."""

    contribution: Contribution
    optimizer: Mapping[str, Any]  # with a `StoredTensor` for each tensor
    stateful: Mapping[str, Any]  # the large ones only; in states of earlier versions, all
    local: Mapping[str, StoredTensor]  # the model's parameters as training left them; empty if they were the base


class Checkpoint:
    """Saves and loads the training state of one replica. `stateful`: the user's objects, by name."""

    def __init__(
        self,
        attempt: Attempt,
        rounds: Participant,
        loop: DiLoCoLoop,
        optimizer: InnerOptimizers,
        stateful: Mapping[str, Any],
    ) -> None:
        self._attempt = attempt
        self._rounds = rounds
        self._loop = loop
        self._optimizer = optimizer
        self._stateful = stateful
        self.small = SmallState(optimizer, stateful, new=True)

    def check(self) -> None:
        """After the first step: raise `ConfigError` for a state that cannot be saved, before a round is trained."""
        saves = self._attempt.config.saves_state != "none"
        self.small.check(large=saves)
        if saves:
            self._optimizer.check_state()

    def encode_if_due(self) -> StateFile | None:
        """The training state as a file to be written before training goes on, or with a delay, at any time.

        None if none is saved with the open round's contribution (`replica_state`). Before the last planned outer step
        one is saved wherever some are, as a snapshot is, so that more rounds go on with it; with a codec that loses
        much before the last one of each fragment, since the residual of its contribution is saved with it.
        """
        config, opened = self._attempt.config, self._rounds.open
        step = opened.outer_step + 1
        ends = config.fragments if get_codec(config.codec).feedback else 1
        beside_snapshot = step % config.snapshot_every == 0 or step > self._attempt.outer_steps - ends
        due = config.saves_state == "round" or (config.saves_state == "snapshot" and beside_snapshot)
        if opened.final_evaluation or not due:
            return None
        tree = {
            "optimizer": self._optimizer.state_dict(),
            "stateful": self.small.large(),
            "local": self._loop.local_values() if self._loop.keeps_local_values else {},
        }
        file = state_file(tree, self._attempt.owners, min(self._attempt.object_limit, config.shard_mib * _MIB))
        if self._loop.schedule.delay:
            file.freeze()
        return file

    def read_newest(self) -> SavedState | None:
        """The state saved with this replica's latest pseudo-gradient; None if none was saved with it.

        A state that cannot be read is logged and counts as none. An older state is never used: optimizer moments must
        match the base that they were computed on.
        """
        history = self._rounds.history
        contribution = history.newest_delta()
        if contribution is None or contribution.state is None:
            return None
        try:
            tree = stored_tree(history.read_state(contribution), f"the state of round {contribution.round}")
        except (PayloadCorrupt, RecordInvalid) as error:
            log.error("the inner optimizer begins anew: %s", error)
            return None
        return SavedState(contribution, tree["optimizer"], whole_tree(tree["stateful"]), tree["local"])

    def resume(self, progress: Progress | None, saved: SavedState | None, rates: str | None = None) -> None:
        """Restore the training state of an earlier attempt of this replica.

        The optimizer and large objects come from `saved`, a saved state, the rest from `progress`, of the newest
        manifest; but learning rates and their schedules from `rates`, unless it is None (`ResumePoint.rates`). Buffers
        are those that this replica published last. A stateful object that is in neither starts anew, with a warning.
        """
        self._rounds.buffers.resume()
        found: set[str] = set()
        if saved is not None:
            self.load(saved)
            found |= set(saved.stateful)
        if progress is not None:
            found |= self.small.load(progress.stateful, "this replica's newest manifest", rates)
            for name in sorted(set(self._stateful) - found):
                log.warning("stateful %r begins anew: this replica's newest manifest lacks it", name)

    def go_back(self, saved: SavedState) -> None:
        """Load the optimizer and large objects of an earlier state, but keep the learning rates of schedules."""
        hyperparameters = self.small.hyperparameters()
        self.load(saved)
        self.small.set_hyperparameters(hyperparameters)

    def load(self, saved: SavedState) -> None:
        """Load the optimizer and large objects of a saved state, learning rates included."""
        self._optimizer.load_state_dict(saved.optimizer)
        for name, each in self._stateful.items():
            if name in saved.stateful:
                each.load_state_dict(saved.stateful[name])
        log.info(
            "the state that attempt %d saved in round %d is loaded",
            saved.contribution.attempt,
            saved.contribution.round,
        )

    def reset(self) -> None:
        """Drop the inner optimizer's state, so that it starts anew."""
        self._optimizer.clear()
        log.warning("the inner optimizer's state, computed on a wrong base, is dropped and starts anew")

    def reset_not_finite(self) -> None:
        """Drop the inner optimizer's state of every parameter for which it is not finite."""
        cleared = self._optimizer.clear_not_finite()
        log.warning("the inner optimizer's state of %d parameters was not finite and starts anew", cleared)


@dataclass(frozen=True)
class ResumePoint:
    """The round at which an attempt continues its replica's training, and the training state to restore."""

    round: int  # the round to train or to wait for; one before the open round in one case below
    progress: Progress | None  # cursor, random generators and counters; None: the replica has published nothing yet
    state: SavedState | None  # inner optimizer and stateful objects; None: they start new
    local: Mapping[str, StoredTensor] = field(default_factory=dict)  # local parameters by name; empty: the base's
    from_base: frozenset[int] = frozenset()  # synchronised since `local` was saved: loaded from the base
    already_contributed: bool = False  # an earlier attempt has contributed to `round`
    # Learning rates and schedules, as `SmallState` encodes them, where those of `progress` belong to a round that the
    # base does not descend from; empty: the training function's own. None: those of `progress`.
    rates: str | None = None


def resume_point(attempt: Attempt, rounds: Participant, checkpoint: Checkpoint, *, overlaps: bool) -> ResumePoint:
    """The point from which this attempt continues its replica's training, from the bucket.

    `overlaps`: whether a sync delay or update alpha is set. If an earlier attempt has contributed to the open round and
    saved local parameters, this attempt continues training directly after that contribution; without local parameters
    it only waits for the round's end.

    With a delay or alpha the base alone does not determine local parameters after a synchronisation. So a contribution
    to the round *before* the open one, in the same leg (start or resume to stop), is continued from too: that round is
    opened again and closed by its commit, as in the attempt that made the contribution.

    Otherwise, with fragments, local parameters are those of the last contribution, except the fragment synchronised
    since.

    Local parameters of a contribution that is not this replica's newest response are not used: after an abstention, a
    response from a wrong base, or scores, local parameters are the base's.

    In a leg that began from an earlier base the data goes on behind the rounds that were given up, so that no batch is
    repeated; learning rates and schedules are those of the base.
    """
    open_round, leg, history = rounds.open.round, attempt.begin, rounds.history
    existing = history.of_open_round()
    newest = history.newest()
    state = checkpoint.read_newest()
    if existing is None and history.of_open_round() is not None:
        # An earlier attempt that is still alive contributed between these reads: they belong to two points.
        return resume_point(attempt, rounds, checkpoint, overlaps=overlaps)
    if existing is not None and existing.attempt > attempt.number:
        attempt.check_superseded()
    rates = None
    if newest is not None and newest.leg != leg.leg and newest.round > leg.from_round:
        of_base = history.newest_of_line()
        rates = of_base.progress.stateful if of_base and of_base.progress else ""
    point = ResumePoint(
        open_round, newest.progress if newest else None, state, already_contributed=existing is not None, rates=rates
    )
    unsaved = history.newest_delta()
    if unsaved is not None and unsaved.state is None and not rounds.open.final_evaluation:
        log.warning(
            "the inner optimizer begins anew: no state was saved with this replica's newest contribution, to round "
            '%d. replica_state="round" saves one every time.',
            unsaved.round,
        )
    if newest is not None and state is None and attempt.config.fragments > 1:
        log.warning(
            "what was trained in fragments since each of them moved last is dropped: no state was saved with the "
            'newest contribution. replica_state="round" saves one every time.'
        )
    if state is None or not state.local:
        return point
    last = state.contribution
    if existing is not None and existing != last:
        return point
    just_before = overlaps and last.leg == leg.leg and last.round == open_round - 1
    if last.round == open_round or just_before:
        return replace(point, round=last.round, local=state.local, already_contributed=True)
    if existing is None and last.round in (open_round - 1, leg.from_round):
        return replace(point, local=state.local, from_base=frozenset({last.fragment}))
    return point
