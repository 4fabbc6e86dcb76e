"""Which snapshots may be loaded: those whose base somebody else claims, or has rebuilt.

A snapshot is written by one machine, whose memory may be wrong. Until it is confirmed, loaders and retention use an
older one. Writing snapshots is `snapshots.layout`'s, rebuilding bases `snapshots.rebuild`'s.
"""

from collections.abc import Callable, Iterator, Sequence

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog


class ConfirmedSnapshots:
    """The snapshots that were complete when this object was made, with one LIST request."""

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._takes = run_log.snapshot_takes()
        self._claims: dict[int, list[Contribution]] = {}  # by the round whose base they claim

    @property
    def rounds(self) -> list[int]:
        """The rounds with a complete snapshot, confirmed or not, oldest first."""
        return sorted(self._takes)

    def take_of(self, round_: int) -> int | None:
        """The take of a round's snapshot that is confirmed; None if none is.

        Confirmed is the first base; a snapshot that a replica claims which did not write it and whose base descends
        from an older snapshot; and one with the digest of a replay. A record that cannot be read confirms nothing.
        """
        if round_ == 0:
            first = self._log.first_take()
            return first if first in self._takes.get(0, ()) else None
        for take in self._takes.get(round_, ()):
            try:
                if self._is_confirmed(round_, take):
                    return take
            except (RecordInvalid, ObjectMissing):  # retention may have deleted it since
                continue
        return None

    def newest(
        self, count: int, among: Sequence[int], usable: Callable[[int, int], bool] = lambda round_, take: True
    ) -> list[int]:
        """The newest `count` rounds in `among` that have a confirmed snapshot, oldest first; fewer if there are not.

        `usable`: says of a round and its confirmed take whether it counts.
        """
        found: list[int] = []
        for round_ in sorted(among, reverse=True):
            if len(found) == count:
                break
            if (take := self.take_of(round_)) is not None and usable(round_, take):
                found.insert(0, round_)
        return found

    def _is_confirmed(self, round_: int, take: int) -> bool:
        record = self._log.snapshot(round_, take)
        if any(replay.base_digest == record.base_digest for replay in self._log.replays(round_)):
            return True
        return any(
            manifest.base_digest == record.base_digest
            and manifest.replica_id != record.by
            and manifest.snapshot_round < round_
            for manifest in self.claims_of(round_)
        )

    def claims_of(self, round_: int) -> list[Contribution]:
        """The manifests that were formed on the base after a round."""
        if round_ not in self._claims:
            reader, replicas = ContributionReader(self._log.store), self._log.run.config.replicas
            claims = [manifest for later in self._rounds_from(round_) for manifest in reader.in_round(later, replicas)]
            self._claims[round_] = claims
        return self._claims[round_]

    def _rounds_from(self, round_: int) -> Iterator[int]:
        """The rounds that started from the base after `round_`: in its own leg, and in legs that began from it."""
        entry = self._log.commit(round_) if round_ else None
        if entry is None and round_:
            return
        begins = self._log.begins()
        yield from self._until_applied(round_ + 1, entry.commit.leg if entry else 1)
        for begin in begins:
            if begin.leg > 1 and begin.from_round == round_:
                yield from self._until_applied(begin.after_round + 1, begin.leg)

    def _until_applied(self, first: int, leg: int) -> Iterator[int]:
        """The rounds of a leg from `first` up to the first that was applied, or to the open one."""
        round_ = first
        while (entry := self._log.commit(round_)) is not None and entry.commit.leg == leg:
            yield round_
            if entry.commit.applied or entry.commit.stop != "none":
                return
            round_ += 1
        if entry is None:
            yield round_
