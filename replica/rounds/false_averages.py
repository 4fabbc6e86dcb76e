"""`FalseAverages`: averages of shards published in scatter-reduce that differ from those of the payloads.

Whoever averages a shard from the payloads knows who has published another one; `checks` reports it, and others average
that shard as well before they believe it. `protocol.check_records` decides who may go on averaging for others.
"""

import logging
from collections.abc import Iterable, Mapping

from diloco_orchestrator.allreduce.scatter_reduce import false_averages, published_by
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import AverageCheck, Checked, PublishedAverage
from diloco_orchestrator.protocol.digests import BulkDigest
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.averages import digest_of_average
from diloco_orchestrator.replica.rounds.tip import HeldTip

log = logging.getLogger(__name__)


class FalseAverages:
    """The false averages by others that this attempt knows of, in the rounds of its leg (start or resume to stop).

    Not thread-safe.
    """

    def __init__(self, attempt: Attempt, tip: HeldTip) -> None:
        self.distrusted: set[int] = set()  # replicas that published one: this attempt uses no average of theirs
        self._attempt = attempt
        self._tip = tip
        self._found: dict[PublishedAverage, bool] = {}  # whether it is false, as this replica averaged it
        self._settled = set[PublishedAverage]()  # reported in a record that a commit names, by this replica
        self._proved_before = 0  # the last round before which owner and checker of a shard were found to agree on one
        self._rebuild_due = False
        self._searched_in = 0
        self.clear()

    def clear(self) -> None:
        """Forget what others and this replica reported in the round that has ended."""
        self._accused = set[PublishedAverage]()  # by others, in the open round
        self._reported_now = set[PublishedAverage]()
        self._to_try: list[PublishedAverage] = []

    @property
    def proved(self) -> bool:
        """Whether a false average that both owner and checker of a shard published was found since the last commit."""
        return self._proved_before == self._round

    def take_rebuild(self) -> bool:
        """Whether a false average may be in the base, which must be rebuilt. True once for each found."""
        due, self._rebuild_due = self._rebuild_due, False
        return due

    # -- what others say -----------------------------------------------------------------------------------------

    def hear(self, record: Checked) -> None:
        """Note the accusations in another replica's report. One of each report is tried, to bound the cost."""
        if record.replica_id == self._attempt.replica_id or record.replica_id in self._tip.barred:
            return
        accused = [each.average for each in record.averages or () if each.false]
        self._accused.update(accused)
        self._to_try += [each for each in accused if each not in self._found][:1]

    def try_accusations(self) -> None:
        """Average the accused shards from payloads that still exist, and note whether the accusations are right."""
        for average in sorted(self._to_try, key=_order):
            if average not in self._found and (is_false := self._is_false(average)) is not None:
                self._note(average, is_false)
        self._to_try.clear()

    def _is_false(self, average: PublishedAverage) -> bool | None:
        """Whether replicas published an average that the payloads do not give; None if these cannot be read."""
        lengths = self._lengths(average.round)
        if average.shard >= len(lengths):
            return False
        said = self._published(average.round)
        if any(said.get(each, {}).get(average.shard) != average.digest for each in average.replicas):
            return False
        right = self._right(average.round, average.shard)
        return None if right is None else right != average.digest

    # -- what this replica finds ---------------------------------------------------------------------------------

    def note(self, round_: int, false: Mapping[tuple[int, BulkDigest], tuple[int, ...]]) -> None:
        """Note who published false averages in a round. `false`: (shard, digest) -> ids of replicas, ascending."""
        for (shard, digest), replicas in sorted(false.items()):
            self._note(PublishedAverage(round=round_, shard=shard, replicas=replicas, digest=digest), True)

    def search(self) -> None:
        """Compare all averages published since the snapshot from which the base was rebuilt with those of the payloads.

        At most once a round. For a base that was rebuilt from payloads and that others contradict. Reads what a rebuild
        reads.
        """
        if self._searched_in == self._round:
            return
        self._searched_in = self._round
        for round_ in range(max(self._tip.value.snapshot_round, self._attempt.begin.after_round) + 1, self._round):
            said = self._published(round_)
            for shard in range(len(self._lengths(round_)) if said else 0):
                if (right := self._right(round_, shard)) is None:
                    break
                of_shard = {replica_id: each[shard] for replica_id, each in said.items() if shard in each}
                found = false_averages(of_shard, right, self._attempt.replica_id)
                self.note(round_, {(shard, digest): replicas for digest, replicas in found.items()})

    def _note(self, average: PublishedAverage, is_false: bool) -> None:
        if average in self._found:
            return
        self._found[average] = is_false
        who = " and ".join(map(str, average.replicas))
        if not is_false:
            log.warning("round %d: replica %s is accused falsely of an average", average.round, who)
            return
        self.distrusted.update(average.replicas)
        log.error(
            "round %d: replica %s published an average of shard %d that the payloads do not give",
            average.round,
            who,
            average.shard,
        )
        if len(average.replicas) > 1:  # owner and checker: others may have used it
            self._proved_before, self._rebuild_due = self._round, True

    # -- what this replica reports -------------------------------------------------------------------------------

    def to_report(self) -> tuple[AverageCheck, ...]:
        """The findings to report in the open round: averages found false, and the result for each average that another
        replica reported as false.

        The former are reported in every round until a commit names the report: a void one names none.
        """
        due = [
            AverageCheck(average=average, false=is_false)
            for average, is_false in self._found.items()
            if average not in self._reported_now
            and (average in self._accused or (is_false and average not in self._settled))
        ]
        return tuple(sorted(due, key=lambda each: _order(each.average)))

    def reported(self, checks: Iterable[AverageCheck]) -> None:
        """Note that the findings `checks` are in a published record of this replica."""
        self._reported_now |= {each.average for each in checks}

    def settle(self, named: Iterable[Checked]) -> None:
        """Note the findings in records of this replica that a commit names: they need no other report."""
        mine = (each for each in named if each.replica_id == self._attempt.replica_id)
        self._settled |= {check.average for each in mine for check in each.averages or ()}

    # -- reading -------------------------------------------------------------------------------------------------

    def _lengths(self, round_: int) -> list[int]:
        """Elements of each shard that a closed round since the last start or resume averaged; none if it averaged
        nobody.
        """
        if round_ not in self._tip.closed_rounds or not (commit := self._tip.commit_of(round_)).applied:
            return []
        numel = self._tip.base.numel(self._tip.fragments[commit.fragment])
        return [stop - start for start, stop in shard_ranges(numel, self._tip.base.shard_numel)]

    def _published(self, round_: int) -> dict[int, dict[int, BulkDigest]]:
        """Digests of the averages that each replica has published in a round: by replica id, then by shard."""
        found = {}
        for info in self._attempt.store.list(keys.reduced_shards(round_)):
            if (parsed := keys.reduced.parse(info.key)) is not None:
                said = published_by(self._attempt.store, round_, parsed[1])
                found[parsed[1]] = {shard: each.digest for shard, each in said.items()}
        return found

    def _right(self, round_: int, shard: int) -> BulkDigest | None:
        """Digest of the average of a shard computed from the payloads; None, with a warning, if they cannot be read."""
        try:
            return digest_of_average(self._attempt, self._tip.commit_of(round_), shard, self._lengths(round_))
        except (PayloadCorrupt, RecordInvalid, ObjectMissing) as error:
            log.warning("an average of round %d cannot be compared with the payloads: %s", round_, error)
            return None

    @property
    def _round(self) -> int:
        return self._tip.position.round + 1


def _order(average: PublishedAverage) -> tuple[int, int, tuple[int, ...], str]:
    return average.round, average.shard, average.replicas, average.digest
