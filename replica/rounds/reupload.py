"""`ReuploadRequests`: requests new uploads of payloads that a commit averages and nobody can read, and serves requests.

The store may damage or lose bytes after it has confirmed a write. Every replica that took part in the round has
verified them, and keeps them until the next commit.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.allreduce.recent_payloads import RecentPayloads
from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.clock import Backoff
from diloco_orchestrator.errors import PayloadCorrupt, Preempted
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys, pace
from diloco_orchestrator.protocol.keys import PayloadKey
from diloco_orchestrator.protocol.record_format import By
from diloco_orchestrator.protocol.records import Contribution, ReuploadRequest
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.judged import once_judged
from diloco_orchestrator.replica.rounds.payload_shards import all_shards
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.rebuild import BaseComparison, FirstBase, Tip, rebuild, rebuild_beside
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

T = TypeVar("T")
WANTS_EVERY_S = 2.0  # between two LIST requests for what others ask for
_LONGEST_PAUSE_S = 5.0  # between two polls for a new version of a payload shard
_POLL_CLAIMS_S = 10.0  # between two LIST requests for a later attempt of this replica


class ReuploadRequests:
    """Requests new uploads of payload shards, and serves others' requests from `payloads`, cached for two rounds."""

    def __init__(self, attempt: Attempt) -> None:
        self.payloads = attempt.owners.make(RecentPayloads)
        self._attempt = attempt
        self._polled_at = attempt.clock.now()

    # -- asking --------------------------------------------------------------------------------------------------

    def rebuild(self, until: int | None = None, first: FirstBase | None = None) -> Tip:
        """The base after round `until` (default: the newest), rebuilt; unreadable payloads are requested again.

        `first`: the first base, if it is in memory. Raises `PayloadCorrupt` for a payload that stays unreadable for
        `round_timeout_s`, and as `once_judged` for a commit that cannot be checked.
        """
        bases = [first]  # a rebuild steps the first base in place, so that only the first one may use it
        run_log, begin = self._attempt.log, self._attempt.begin
        owners = self._attempt.owners

        def rebuilt() -> Tip:
            return rebuild(run_log, begin, until, first=bases.pop() if bases else None, owners=owners)

        return self.until_readable(lambda: once_judged(self._attempt, rebuilt), until)

    def rebuild_beside(self, base: Base, until: int) -> BaseComparison:
        """Compare `base` with the base rebuilt after round `until`; uploads of unreadable payloads are requested again.

        Raises `PayloadCorrupt` for a payload that stays unreadable for `round_timeout_s`.
        """
        run_log, begin = self._attempt.log, self._attempt.begin
        owners = self._attempt.owners
        return self.until_readable(lambda: rebuild_beside(run_log, begin, until, base=base, owners=owners), until)

    def until_readable(self, call: Callable[[], T], until: int | None = None) -> T:
        """The result of `call`, repeated while it raises `PayloadCorrupt` for a payload in the bucket.

        Each time a new upload of the payload is requested; `call` is repeated once there is a new version of the
        payload, or a confirmed snapshot of its round or a later one. `until`: the last round whose snapshot `call` can
        use; a later one raises `PayloadGone`. Raises the error of `call` after `round_timeout_s`, `Preempted` after a
        preemption notice, and `Superseded` if a later attempt of this replica is alive.
        """
        clock = self._attempt.clock
        known: dict[str, set[int]] = {}  # versions, by the key of version 1
        deadline = clock.now() + self._attempt.config.timing.round_timeout_s
        while True:
            try:
                return call()
            except PayloadCorrupt as error:
                shard = keys.parse_payload(error.key)
                if shard is None:
                    raise
                log.warning("round %d: replica %d's payload is asked for: %s", shard.round, shard.replica_id, error)
                known[error.key] = self._await(shard, known.get(error.key, {1}), error, until, deadline)

    def _await(
        self, shard: PayloadKey, known: set[int], error: PayloadCorrupt, until: int | None, deadline: float
    ) -> set[int]:
        """Block until a payload shard has versions not in `known`, or a snapshot replaces it. Returns all versions.

        Requests an upload at each poll. Raises `PayloadGone` if that snapshot is later than round `until`, an error
        that names `error` at `deadline` (monotonic seconds), and `Preempted` or `Superseded` if this process is to end.
        """
        clock, claims_polled_at = self._attempt.clock, self._attempt.clock.now()
        poll_s = self._attempt.config.timing.poll_s
        apart_s = pace.apart_s(self._attempt.config, self._attempt.store.requests_allowed)
        for pause_s in Backoff(poll_s, max(poll_s, _LONGEST_PAUSE_S, apart_s)).pauses():
            takes = _takes(self._attempt.store, shard)
            if takes - known:
                return known | takes
            self._ask(shard, max({1} | takes) + 1, str(error))  # again: the store may have lost the request, too
            self.put_wanted(shard.round)
            clock.sleep(pause_s)
            if self._attempt.should_leave():
                raise Preempted(f"replica {self._attempt.replica_id} was asked to leave while it waited: {error}")
            if clock.now() >= claims_polled_at + _POLL_CLAIMS_S:
                claims_polled_at = clock.now()
                self._attempt.check_superseded()
            newest = self._newest_snapshot()
            if newest >= shard.round and (until is None or newest <= until):
                return known
            if newest >= shard.round:
                raise PayloadGone(f"{error} Snapshot {newest} replaces it.", error.key)
            if clock.now() >= deadline:
                raise self._given_up(shard, error) from error
        raise AssertionError("pauses have no end")

    def _ask(self, shard: PayloadKey, take: int, reason: str) -> None:
        if take > keys.MAX_TAKES:
            return  # the store damages every one
        want = ReuploadRequest(
            **self._attempt.stamp(),
            round=shard.round,
            replica_id=shard.replica_id,
            attempt=shard.attempt,
            shard=shard.shard,
            take=take,
            by=By((self._attempt.replica_id, self._attempt.number)),
            reason=reason,
        )
        self._attempt.writer.create(want)

    def _newest_snapshot(self) -> int:
        """The newest round since the last resume with a confirmed snapshot (its base is as others claim); 0 if none."""
        begin, snapshots = self._attempt.begin, ConfirmedSnapshots(self._attempt.log)
        of_leg = (r for r in reversed(snapshots.rounds) if r > begin.after_round and snapshots.take_of(r) is not None)
        return next(of_leg, 0)

    def _given_up(self, shard: PayloadKey, error: PayloadCorrupt) -> PayloadCorrupt:
        waited_s = self._attempt.config.timing.round_timeout_s
        return PayloadCorrupt(
            f"{error} No running replica has put it again within {waited_s:g} s, so the base after round {shard.round} "
            "cannot be computed here. Replicas that hold that base go on; their next snapshot replaces the payload. "
            f"If none holds it, stop the run and resume it with --from-round {self._newest_snapshot()}."
        )

    # -- answering -----------------------------------------------------------------------------------------------

    def put_wanted_if_due(self, base_round: int) -> None:
        """Upload payload shards that others request of round `base_round`, which made the base.

        One LIST request, at most every two seconds.
        """
        now = self._attempt.clock.now()
        if base_round and now >= self._polled_at + WANTS_EVERY_S:
            self._polled_at = now
            self.put_wanted(base_round)

    def put_wanted(self, round_: int) -> None:
        """Upload the requested versions of payload shards of a round whose bytes this replica has, unless they exist.

        Later calls do so again while the request exists, because the store may lose the new version too. Does nothing
        in a replica of a stranger, which may write below its own prefixes only.
        """
        attempt = self._attempt
        if attempt.is_invited:
            return
        listed = [keys.parse_want(info.key) for info in attempt.store.list(keys.wants(round_))]
        if wanted := [shard for shard in listed if shard is not None]:
            attempt.owners.each(_put_again, attempt.store, self.payloads, wanted)

    def check_own(self, manifest: Contribution) -> None:
        """Read this replica's own payload back, and upload a new version of each shard that the store damaged or lost.

        Called before a commit that averages this replica alone: no other replica has verified or could request the
        payload. Raises `PayloadCorrupt` after `keys.MAX_TAKES` versions.
        """
        attempt = self._attempt
        attempt.owners.each(_check_own, attempt.owners, attempt.store, self.payloads, manifest)


def _put_again(store: Store, payloads: RecentPayloads, wanted: Sequence[PayloadKey]) -> None:
    """Upload the wanted versions of payload shards whose bytes this process has, unless they exist."""
    for shard in wanted:
        if (data := payloads.held(str(shard.first_take))) is None:
            continue
        if shard.take not in _takes(store, shard) and store.create(str(shard), bytes(data)):
            log.info("round %d: put replica %d's payload again: %s", shard.round, shard.replica_id, shard)


def _check_own(owners: Owners, store: Store, payloads: RecentPayloads, manifest: Contribution) -> None:
    """Read back own payload shards that this process holds; upload those again that are damaged or lost."""
    reader = ContributionReader(store)
    for own in all_shards([manifest]):
        while own.is_of(owners):
            try:
                reader.shard(own.manifest, own.index)
                break
            except PayloadCorrupt as error:
                shard = keys.parse_payload(error.key)
                data = payloads.held(error.key)
                take = max({1} | _takes(store, shard)) + 1 if shard else 0
                if shard is None or data is None or take > keys.MAX_TAKES:
                    raise
                log.warning("round %d: own payload is put again: %s", shard.round, error)
                store.create(str(replace(shard, take=take)), bytes(data))


def _takes(store: Store, shard: PayloadKey) -> set[int]:
    """The versions of a payload shard that exist, readable or not. One LIST request."""
    folder = keys.payloads_of(shard.round, shard.replica_id, shard.attempt)
    found = (keys.parse_payload(info.key) for info in store.list(folder))
    return {each.take for each in found if each is not None and each.first_take == shard.first_take}
