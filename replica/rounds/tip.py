"""`HeldTip`: the newest base that this replica has computed, with the round of the last commit in it.

Each commit advances it. `base_claims` checks the digest of the base; `close_round` ends rounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from pydantic import JsonValue

from diloco_orchestrator.allreduce.agreement import summary
from diloco_orchestrator.allreduce.dealing import Dealing, dealing_of, scatters
from diloco_orchestrator.allreduce.mean import EncodedShards
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Commit, Contribution, Disagreeing
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.snapshots.rebuild import Tip


@dataclass(frozen=True)
class OpenRound:
    """The open round as a training loop sees it, with the outer step and the replicas that it waits for."""

    round: int  # its number
    fragment: int  # index of the fragment that it synchronises
    names: tuple[str, ...]  # of that fragment's parameters, in name order
    outer_step: int  # number of outer steps in its base
    roster: tuple[int, ...] = ()  # the replicas that it waits for
    scorers: tuple[int, ...] = ()  # of these, who scores its base on held-out items for the guard
    final_evaluation: bool = False  # whether every outer step is taken, so that it takes only scores
    stopped: bool = False  # whether the leg is over, so that no round is open
    version: int = 0  # of its base: changes with every change of the base
    guard: dict[str, JsonValue] | None = None  # the guard's state before it


class HeldTip:
    """A base in memory and its position in the commit log, both of which advance with each commit.

    `tip`: base and position to begin with. `fragments`: parameter names of each fragment, for a run whose start record,
    with its first base, does not exist yet.
    """

    def __init__(self, attempt: Attempt, tip: Tip, fragments: Sequence[tuple[str, ...]]) -> None:
        start = attempt.log.start()
        self.fragments = start.record.synced_fragments if start else fragments
        self.heldout: HeldoutSet | None = start.record.heldout if start else None  # None: nothing is scored
        self.disagreeing: tuple[Disagreeing, ...] = ()  # whom the last round's step left out; empty if it was none
        self._attempt = attempt
        self._adapters = start.record.adapters if start else ()
        self._scatters = scatters(attempt.config, start.record) if start else False
        self.strangers_rules = start.record.strangers_rules if start else 0
        self.unheard = start.record.unheard(attempt.config.invited) if start else frozenset()  # by the guard
        self.borrowed = False  # whether the base holds averages that others made, since it was rebuilt
        self.value = tip
        self.open = self._opened(version=0)  # the open round

    @property
    def base(self) -> Base:
        return self.value.base

    @property
    def position(self) -> rounds.Position:
        return self.value.position

    @property
    def last(self) -> Commit | None:
        """The last commit since the start or resume that was applied or skipped; None before the first."""
        return self.value.last.commit if self.value.last else None

    def _opened(self, version: int) -> OpenRound:
        """The round that is open after the held base. `version`: number of that base in this process."""
        position, last, begin = self.value.position, self.last, self._attempt.begin
        fragment = position.outer_step % len(self.fragments)
        roster = last.roster if last else tuple(range(self._attempt.config.replicas))
        return OpenRound(
            round=position.round + 1,
            fragment=fragment,
            names=self.fragments[fragment],
            outer_step=position.outer_step,
            roster=roster,
            scorers=tuple(each for each in roster if each not in self.unheard),
            final_evaluation=rounds.is_final_evaluation(position, self._attempt.outer_steps),
            stopped=position.stop != "none",
            version=version,
            guard=last.guard if last else begin.guard,
        )

    @property
    def dealing(self) -> Dealing | None:
        """The assignment of the open round's payload shards to replicas that verify them; None: all read all."""
        return None if self.open.final_evaluation else self._dealt(self.open.roster)

    def dealing_of_averages(self, commit: Commit) -> Dealing | None:
        """The assignment of the open round's averages to the replicas that responded; None if everybody computes all.

        `commit`: the round's. A replica without a response may have died long before the commit.
        """
        return self._dealt([answer.replica_id for answer in commit.answers if answer.attempt])

    def _dealt(self, among: Iterable[int]) -> Dealing | None:
        left = set(among) - set(self.barred)
        return dealing_of(self.position.round + 1, self._attempt.config, left) if self._scatters else None

    @property
    def barred(self) -> tuple[int, ...]:
        """Replicas that average no shard for others in the open round, because most accused them of a false average."""
        return (self.last.barred if self.last else None) or ()

    # -- closed rounds of this leg -------------------------------------------------------------------------------

    @property
    def closed_rounds(self) -> range:
        """Rounds since the start or resume whose commits were applied or skipped, newest first."""
        return range(self.position.round, self._attempt.begin.after_round, -1)

    def commit_of(self, round_: int) -> Commit:
        """The commit of a closed round. Raises `AssertionError` for an open round."""
        entry = self._attempt.log.commit(round_)
        assert entry is not None, f"round {round_} is closed"
        return entry.commit

    def made_before(self, round_: int) -> int:
        """The round whose outer step made the base that `round_`, after the last resume, started from."""
        begin = self._attempt.begin
        earlier = range(round_ - 1, begin.after_round, -1)
        return next((each for each in earlier if self.commit_of(each).applied), begin.from_round)

    # -- moving --------------------------------------------------------------------------------------------------

    def step(
        self,
        entry: CommitEntry,
        contributions: Sequence[tuple[Contribution, int]],
        read_shard: outer_step.ReadShard,
        *,
        keep_average: bool,
        averages: EncodedShards | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Take the outer step of a commit in place. Returns the average by parameter name, empty unless `keep_average`.

        `contributions`: (manifest, weight) each. `read_shard`: (manifest, shard index) -> verified bytes. `averages`:
        of each shard, if they are computed already; then nothing is read. Raises `PayloadCorrupt` for a contribution
        without a usable payload, `PayloadGone` if a payload was deleted; the base may be stepped in part then.
        """
        config = self._attempt.config
        step = partial(
            outer_step.average_and_step,
            aggregate=config.aggregate,
            codec=entry.commit.average_codec,
            keep_average=keep_average,
            adapters=self._adapters,
            averages=averages,
        )
        args = self.base, self.open.fragment, contributions, read_shard, config.outer
        stepped = self._attempt.owners.each(step, *args)
        left_out = sorted((each for of_rank in stepped for each in of_rank.left_out), key=lambda each: each.shard)
        self.hold(Tip(self.base, entry.commit.round, self.value.snapshot_round, entry.position, entry))
        self.disagreeing = summary(left_out, entry.commit.round)
        return stepped[0].average

    def skip(self, entry: CommitEntry) -> None:
        """Advance the position in the commit log past `entry`, whose average is not applied: the base is unchanged."""
        self.value = replace(self.value, position=entry.position, last=entry)
        self.open = self._opened(self.open.version)
        self.disagreeing = ()

    def hold(self, tip: Tip) -> None:
        """Replace the held base and its position in the log; also called after values of that base have changed."""
        self.value = tip
        self.open = self._opened(self.open.version + 1)
        self.disagreeing = ()
