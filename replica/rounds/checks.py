"""`Checks`: what replicas report of each other's payload shards and averages, and of strangers' contributions.

In a round by scatter-reduce each shard of a contribution is read by two replicas other than its author, its *dealers*;
a contribution counts once both have found all of its shards good. `allreduce.dealing` assigns the shards,
`protocol.void_commits` applies the same rule to commits. A stranger's contribution is averaged only if most other
replicas have scored it (`guard.strangers`).
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, islice

from diloco_orchestrator.clock import in_parallel
from diloco_orchestrator.errors import ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.guard.strangers import StrangersWork
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import (
    MOST_AVERAGES,
    Checked,
    CheckNamed,
    ReadShards,
    WorkScore,
    barred_after,
    longest,
    why_too_much,
)
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import LONGEST_REASON
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution
from diloco_orchestrator.protocol.signatures import LONGEST_LINE
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.false_averages import FalseAverages
from diloco_orchestrator.replica.rounds.payload_shards import PayloadShard, all_shards
from diloco_orchestrator.replica.rounds.received import ExpectedContribution, ReceivedResponses
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.replica.rounds.work_scores import WorkScores
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.reader import read_record

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # from when the round could end until nobody waits for what replicas have not reported
_SCORING_TIMES = 3.0  # of what scoring took here, for which others' scores are waited for
_MOST_RECORDS = 64  # of one replica in a round that count, beside one for each replica of the run
_TRIES = 8  # records that are written until one is there as it was written

Shard = tuple[str, int]  # sha256 of a manifest, index of a payload shard


class Checks:
    """Findings about payload shards and averages in the open round, by this replica and others. Not thread-safe."""

    def __init__(self, attempt: Attempt, tip: HeldTip, work: WorkScores) -> None:
        self._work = work
        self.averages = FalseAverages(attempt, tip)
        self._attempt = attempt
        self._tip = tip
        self.clear()

    def settle(self, commit: Commit) -> None:
        """Note which reports the commit of the round that has ended names, then forget all of that round."""
        named = (self.by_sha256.get(each.sha256) for each in commit.checks or ())
        self.averages.settle(each for each in named if each is not None)
        self.clear()

    def clear(self) -> None:
        """Forget the findings of the round that has ended."""
        self.by_sha256: dict[str, Checked] = {}
        self._keys: dict[str, CheckNamed | None] = {}  # of records seen; None: it does not count
        self._heard: dict[Shard, dict[int, bool]] = defaultdict(dict)  # by replica: whether it found the shard good
        self._reported_by: dict[tuple[int, int], int] = defaultdict(
            int
        )  # shards that an attempt has reported, good or bad
        self._reported = set[Shard]()  # by this replica
        self._own: dict[Shard, bool] = {}  # own shards that were read back
        self._scorers: dict[tuple[int, str], set[int]] = defaultdict(set)  # by author and payload: who has scored it
        self._work.clear()
        self._unreported: tuple[WorkScore, ...] = ()  # scores of strangers' contributions
        self._ready_since: float | None = None
        self.averages.clear()

    def dealt(self, manifests: Iterable[Contribution]) -> list[PayloadShard]:
        """The payload shards of `manifests` that this replica reads: all, or in scatter-reduce those assigned to it."""
        dealing, me = self._tip.dealing, self._attempt.replica_id
        return [
            shard
            for shard in all_shards(manifests)
            if dealing is None or me in dealing.readers(shard.manifest.replica_id, shard.index)
        ]

    def named(self) -> tuple[CheckNamed, ...] | None:
        """The check records that a commit of the open round names, in replica order.

        In them replicas report which payload shards they found false, and how they scored contributions. None in a
        round in which nobody checks or scores: every replica averages all payloads by itself.
        """
        if self._tip.dealing is None and not self._work.is_due:
            return None
        found = (each for each in self._keys.values() if each is not None)
        return tuple(sorted(found, key=lambda each: (each.replica_id, each.number)))

    def barred(self, roster: Collection[int]) -> tuple[int, ...] | None:
        """Replicas that may average no shard for others after the open round, for the commit; None if there are none.

        They published or reported false averages. `roster`: the replicas that the round waits for.
        """
        named = [self.by_sha256[each.sha256] for each in self.named() or ()]
        return barred_after(self._tip.barred, roster, named) or None

    def of_strangers(self) -> StrangersWork | None:
        """The reports on strangers' contributions that the commit names; None in a run that scores none of them."""
        if not self._tip.strangers_rules:
            return None
        named = [self.by_sha256[each.sha256] for each in self.named() or ()]
        return StrangersWork(self._attempt.config.invited, named, self._tip.strangers_rules)

    # -- reports: writing this replica's, reading those of others ------------------------------------------------

    def exchange(self, received: ReceivedResponses) -> None:
        """Report what this replica has found since its last record, then read new records of others.

        One PUT if there is something to report; one LIST, and one GET for each new record. Where others accuse replicas
        of a false average, its shard is averaged from the payloads, and the result reported. Contributions of strangers
        that were received since are scored first. Strangers take part in scatter-reduce only.
        """
        if self._tip.dealing is None and (not self._work.is_due or self._attempt.is_invited):
            return
        self._report(received)
        new = []
        for info in self._attempt.store.list(keys.checks(self._round)):
            parsed = keys.checked.parse(info.key)
            fits = info.size <= longest(*self._most) + LONGEST_LINE
            if parsed and fits and info.key not in self._keys and self._may_count(*parsed[1:]):
                new.append((info.key, *parsed[1:]))
        read = in_parallel(self._attempt.background, [partial(self._read, *each) for each in new])
        for (key, *_), found in zip(new, read, strict=True):
            self._note(key, found)
        self.averages.try_accusations()
        if self.averages.to_report():
            self._report(received)

    def _may_count(self, replica_id: int, number: int) -> bool:
        """Whether the check record of this number, by this replica, is read, and so named in this replica's commit.

        A commit that is longer than one may be is void: eighty thousand records of one replica would make it so. An
        honest one has something new about a contribution or an accusation. Strangers' records are about payloads and
        averages, which a round by gather does not ask about.
        """
        config = self._attempt.config
        if self._tip.dealing is None and replica_id in config.invited:
            return False
        return replica_id < config.most_replicas and number <= _MOST_RECORDS + config.most_replicas

    def _report(self, received: ReceivedResponses) -> None:
        attempt, found, reported = self._attempt, list[ReadShards](), set[Shard]()
        for sha256, manifest in sorted(received.by_digest().items(), key=lambda each: each[1].replica_id):
            if manifest.replica_id == attempt.replica_id or self._tip.dealing is None:
                continue
            told = {each.index: received.why_not(each) for each in all_shards([manifest])}
            read = {
                index: why for index, why in told.items() if why is not None and (sha256, index) not in self._reported
            }
            good = tuple(index for index, why in read.items() if not why)
            bad = tuple(index for index, why in read.items() if why)
            if read:
                found.append(ReadShards(manifest_sha256=sha256, good=good, bad=bad))
                reported |= {(sha256, index) for index in read}
        averages = self.averages.to_report()[:MOST_AVERAGES]
        self._unreported += self._score(received) if self._work.is_due else ()
        if not (found or averages or self._unreported):
            return
        dealt = self._work.dealt
        numbers = (n for n in count(1) if keys.checked(self._round, attempt.replica_id, n) not in self._keys)
        for number in islice(numbers, _TRIES):
            record = Checked(
                **attempt.stamp(),
                round=self._round,
                leg=attempt.begin.leg,
                replica_id=attempt.replica_id,
                attempt=attempt.number,
                number=number,
                claim_sha256=attempt.claim_sha256,
                read=tuple(found),
                averages=averages or None,
                scored=self._unreported or None,
                dealt=dealt or None,
            )
            created = attempt.writer.create(record)
            # Read back: a commit names the bytes that others read. Where it is no record of this process's, an earlier
            # attempt or a stranger has taken the number.
            self._read_and_note(keys.checked(self._round, attempt.replica_id, number), attempt.replica_id, number)
            if created is not None and created.sha256 in self.by_sha256:
                self._reported |= reported
                self.averages.reported(averages)
                self._unreported = self._work.dealt = ()
                return
        log.warning("round %d: %d check records of this replica do not count", self._round, _TRIES)

    def _score(self, received: ReceivedResponses) -> tuple[WorkScore, ...]:
        """This replica's scores of the strangers' contributions that it has received and not scored yet."""
        good = [answer.replica_id for answer in received.answers() if answer.kind == "delta"]
        manifests = {each.replica_id: each for each in received.manifests(good)}
        return self._work.of(manifests, received.shard)

    def _read_and_note(self, key: str, replica_id: int, number: int) -> None:
        """Read the record of findings at `key`, and note what it says."""
        self._note(key, self._read(key, replica_id, number))

    def _read(self, key: str, replica_id: int, number: int) -> tuple[Checked, str] | None:
        """The record of findings at `key` and its digest; None, with a warning, if it does not count.

        An invalid one does not, one by another attempt than it names, and one that says more than an honest one can.
        Nor does one that was listed and is missing: in a signed run its author has not signed it.
        """
        try:
            data = read_record(self._attempt.store, key)
            if len(data) > longest(*self._most):
                raise RecordInvalid(f"{key} has {len(data)} bytes, more than an honest one.")
            record = Checked.from_bytes(data, key)
            who = record.round, record.leg, record.replica_id, record.number
            if who != (self._round, self._attempt.begin.leg, replica_id, number):
                raise RecordInvalid(f"{key} holds the record of another round, leg or replica.")
            if why := self._attempt.authors.why_not(record):
                raise RecordInvalid(f"{key} is nobody's: {why}.")
            if why := why_too_much(record, *self._most):
                raise RecordInvalid(f"{key}: {why}.")
        except (RecordInvalid, ObjectMissing) as error:
            log.warning("round %d: a check record of replica %d does not count: %s", self._round, replica_id, error)
            return None
        return record, sha256_hex(data)

    @property
    def _most(self) -> tuple[int, int]:
        """Number of contributions that the open round can have, and of shards of each payload."""
        return self._attempt.config.most_replicas, len(self._tip.base.layout.shards(self._tip.open.fragment))

    def _note(self, key: str, found: tuple[Checked, str] | None) -> None:
        """Note what a record says. One about more shards than its attempt has still to report does not count.

        An honest attempt reports each shard once.
        """
        self._keys[key] = None
        if found is None:
            return
        record, sha256 = found
        contributions, shards = self._most
        said = sum(len(each.good) + len(each.bad) for each in record.read)
        if (left := contributions * shards - self._reported_by[record.replica_id, record.attempt]) < said:
            log.warning("%s does not count: it is about %d payload shards, and %d are left", key, said, left)
            return
        self._reported_by[record.replica_id, record.attempt] += said
        self._keys[key] = CheckNamed(replica_id=record.replica_id, number=record.number, sha256=sha256)
        self.by_sha256[sha256] = record
        self.averages.hear(record)
        for score in record.scored or ():
            self._scorers[score.replica_id, score.payload].add(record.replica_id)
        for read in record.read:
            for indices, good in ((read.good, True), (read.bad, False)):
                for index in indices:  # of two reports of one replica the bad one counts
                    heard = self._heard[read.manifest_sha256, index]
                    heard[record.replica_id] = good and heard.get(record.replica_id, True)

    # -- what counts ---------------------------------------------------------------------------------------------

    def counted(
        self,
        answers: Sequence[Answer],
        received: ReceivedResponses,
        expected: ExpectedContribution,
        *,
        ready: bool,
        pause_s: float,
    ) -> tuple[Answer, ...]:
        """The responses that a commit may list now: a contribution whose shards are not all verified yet is left out.

        Shards about which replicas disagree are read here at once, and those that they have not reported some seconds
        after the round could end; both are then reported. Damaged contributions become "unverifiable".

        Args:
            answers: all responses received, judged by their base digests.
            ready: whether the round could end but for missing reports.
            pause_s: the longest pause of a replica that waits, which may have begun just before.
        """
        if self._work.is_due and not self._attempt.is_invited:
            answers = self._with_scores(answers, ready, pause_s)
        if self._tip.dealing is None:
            return tuple(answers)
        manifests, late = received.by_digest(), self._is_late(ready, _PATIENCE_S)
        contributions = [each for each in answers if each.kind == "delta"]
        others = [each for each in contributions if each.replica_id != self._attempt.replica_id]
        shards = [
            shard
            for each in others
            for shard in all_shards([manifests[each.manifest_sha256]])
            if (status := self._status(each, shard, received)) == "disputed" or (late and status == "open")
        ]
        if shards:
            log.info(
                "round %d: reading %d payload shards that others disagree on, or have not reported",
                self._round,
                len(shards),
            )
            received.verify(shards, expected)
            self._report(received)
        statuses = {each.replica_id: self._of(each, manifests, received, late) for each in contributions}
        alone = self._may_commit_unverified(answers, statuses, late)
        found = []
        for each in answers:
            status = statuses.get(each.replica_id, "good")
            if status == "bad":
                why = "a payload shard is not as its manifest says"
                found.append(each.model_copy(update={"kind": "unverifiable", "reason": why[:LONGEST_REASON]}))
            elif status == "good" or (alone and each.replica_id == self._attempt.replica_id):
                found.append(each)
        return tuple(found)

    def _is_late(self, ready: bool, patience_s: float) -> bool:
        """Whether the round could have ended `patience_s` seconds ago but for reports. `ready`: it could end now."""
        now = self._attempt.clock.now()
        if self._ready_since is None and ready:
            self._ready_since = now
        return self._ready_since is not None and now >= self._ready_since + patience_s

    def _with_scores(self, answers: Sequence[Answer], ready: bool, pause_s: float) -> list[Answer]:
        """`answers` without strangers' contributions of which scores are expected still.

        Scores are expected of who has contributed and is no stranger, until some seconds and `pause_s` after the round
        could end.
        Where there is no such replica, strangers' contributions become "unverifiable".
        """
        invited = self._attempt.config.invited
        own = {each.replica_id for each in answers if each.kind == "delta" and each.replica_id not in invited}
        late = self._is_late(ready, pause_s + max(_PATIENCE_S, _SCORING_TIMES * self._work.longest_s))
        found = []
        for each in answers:
            if each.kind != "delta" or each.replica_id not in invited:
                found.append(each)
            elif not own:
                why = "no contribution but strangers' is there, and these are not averaged alone"
                found.append(each.model_copy(update={"kind": "unverifiable", "reason": why}))
            elif late or own <= self._scorers[each.replica_id, each.payload]:
                found.append(each)
        return found

    @property
    def waits_for_reports(self) -> bool:
        """Whether the round could end but for reports about payload shards, so that others may have ended it."""
        return self._ready_since is not None

    def _may_commit_unverified(self, answers: Sequence[Answer], statuses: Mapping[int, str], late: bool) -> bool:
        """Whether this replica may commit its own unverified contribution, because no other replica responded."""
        quorum, others = self._attempt.config.contributions_needed, set(statuses) - {self._attempt.replica_id}
        return late and quorum == 1 and not any(statuses[each] == "good" for each in others)

    def _of(
        self, answer: Answer, manifests: Mapping[str, Contribution], received: ReceivedResponses, late: bool
    ) -> str:
        """Status of a contribution: "bad" or "open" if one of its shards is, else "good". Open: not verified yet."""
        shards = all_shards([manifests[answer.manifest_sha256]])
        if answer.replica_id != self._attempt.replica_id:
            found = {self._status(answer, shard, received) for shard in shards}
        else:
            found = {self._status_of_own(answer, shard, late) for shard in shards}
        return next((each for each in ("bad", "open", "disputed") if each in found), "good")

    def _status(self, answer: Answer, shard: PayloadShard, received: ReceivedResponses) -> str:
        """The status of another replica's payload shard: good, bad, disputed or open (not verified yet).

        This replica's own reported finding decides, else two reports of others.
        """
        why = received.why_not(shard)
        if why or (why == "" and (answer.manifest_sha256, shard.index) in self._reported):
            return "bad" if why else "good"
        said = self._said(answer, shard)
        if not all(said.values()):
            return "disputed"
        return "good" if len(said) >= self._needed(shard) else "open"

    def _status_of_own(self, answer: Answer, shard: PayloadShard, late: bool) -> str:
        """The status of this replica's own payload shard by what others report: good, bad or open (not verified yet).

        If their reports differ, the shard is read back. A late report is not waited for, but there must be one.
        """
        said = self._said(answer, shard)
        if not all(said.values()):
            name = answer.manifest_sha256, shard.index
            if name not in self._own:
                self._own[name] = self._reads_back(shard)
            if not self._own[name]:
                return "bad"
        elif len(said) < self._needed(shard) and not late:
            return "open"
        return "good" if any(said.values()) else "open"

    def _reads_back(self, shard: PayloadShard) -> bool:
        try:
            ContributionReader(self._attempt.store).shard(shard.manifest, shard.index)
        except PayloadCorrupt as error:
            log.warning("round %d: own payload is damaged: %s", self._round, error)
            return False
        return True

    def _said(self, answer: Answer, shard: PayloadShard) -> Mapping[int, bool]:
        """Reports that count about a payload shard, by replica id: whether the shard is good.

        What strangers say of each other's work does not count: one person may run several.
        """
        heard = self._heard.get((answer.manifest_sha256, shard.index), {})
        invited = self._attempt.config.invited
        without = {answer.replica_id, *self._tip.barred, *(invited if answer.replica_id in invited else ())}
        return {replica_id: good for replica_id, good in heard.items() if replica_id not in without}

    def _needed(self, shard: PayloadShard) -> int:
        dealing = self._tip.dealing
        assert dealing is not None
        return len(dealing.readers(shard.manifest.replica_id, shard.index))

    @property
    def _round(self) -> int:
        return self._tip.position.round + 1
