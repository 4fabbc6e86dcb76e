"""`Conclusions`: decides for each commit of a log whether it follows from the commits before it, or is void.

A void commit ends its round and averages nobody. The rules are in `protocol.void_commits` and, for verdicts, in
`guard.round_fold`. Checking responses and verdict needs a round's manifests: replicas, and processes that rebuild a
base, check every round; other readers check commits that halt the run, and all commits once the log contradicts itself.
"""

import logging
from collections.abc import Iterator, Mapping

from diloco_orchestrator.allreduce.dealing import average_codec_of, dealing_of, scatters
from diloco_orchestrator.errors import NoSuchRun, ObjectMissing, RecordInvalid, RecordTooNew
from diloco_orchestrator.guard.round_fold import fields_of, fold_of_commit
from diloco_orchestrator.guard.strangers import StrangersWork
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.check_records import Checked, CheckNamed
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.legs import leg_position
from diloco_orchestrator.protocol.records import Answer, Begin, Commit, Contribution, Unfounded
from diloco_orchestrator.protocol.start_records import HeldoutSet, Start
from diloco_orchestrator.protocol.void_commits import (
    Before,
    LegRules,
    first_of_leg,
    read_as_void,
    read_without_weights,
    why_answers_differ,
    why_average_differs,
    why_barred_differ,
    why_not_concluded,
    why_unlinked,
    why_unread,
)
from diloco_orchestrator.protocol.weights import norms_after
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.entries import CommitEntry, Entry, changed
from diloco_orchestrator.run_log.leg_records import LegRecords
from diloco_orchestrator.run_log.reader import read, read_optional

log = logging.getLogger(__name__)


class Unchecked(RecordInvalid):
    """A commit of a signed run cannot be checked, because what it names is not there, and no coordinator has judged it.

    Its cause is the error of what was read. `entry`: the commit.
    """

    def __init__(self, entry: CommitEntry, why: Exception) -> None:
        super().__init__(str(why))
        self.entry = entry


class Conclusions:
    """Checks whether each commit of a run follows from the log before it. start.json must exist.

    A commit that does not follow is void: it ends its round and averages nobody. A leg is a run's stretch from start or
    resume to stop.
    """

    def __init__(self, records: LegRecords) -> None:
        self._records = records
        self._reader = ContributionReader(records.store)
        self._rules: dict[str, LegRules] = {}  # by the digest of the leg's begin
        self._heldout: HeldoutSet | None = None  # of the start, as of the rules that were made last
        self._last: tuple[str, dict[int, Contribution]] = ("", {})  # the manifests of the commit with this digest
        self._told: set[tuple[str, str]] = set()  # digests of commits, and what the log said of them

    def read(
        self,
        entry: CommitEntry,
        previous: CommitEntry | None,
        *,
        derive_verdict: bool,
        lenient: bool = False,
        received: Mapping[str, Contribution] | None = None,
        checks: Mapping[str, Checked] | None = None,
    ) -> CommitEntry:
        """`entry` as all readers must read it: marked void if its commit does not follow from the log before it.

        Args:
            previous: the commit before, returned by this method; None before the first round.
            derive_verdict: whether to check answers, guard state and verdict against the round's manifests.
            lenient: accept an uncheckable verdict, whose manifests are gone, instead of raising.
            received: manifests at hand, by the sha256 of their bytes; the others are fetched.
            checks: likewise check records.

        Raises `RecordInvalid` or `ObjectMissing` if a manifest or check record that the commit names is not there
        (`Unchecked` in a signed run), and `RecordInvalid` if a record of the log was changed after it was written.
        """
        rules, before = self._before(previous)
        commit = entry.written
        if no_link := entry.unreadable or why_unlinked(commit, before):
            self._check_unchanged(entry, previous, before)
            self._tell(entry, logging.ERROR, f"{keys.commit(commit.round)} is void: {no_link}")
            read = read_as_void(commit, before, rules, no_link)
            return entry.voided(read, no_link, unlinked=not entry.unreadable)
        why = why_not_concluded(commit, before, rules)
        if not why and not commit.by_coordinator and (derive_verdict or commit.stop == "halted"):
            try:
                why = self._why_verdict_differs(entry, before, rules, received or {}, checks or {})
            except (RecordTooNew, RecordInvalid, ObjectMissing) as error:
                why = self._why_unfounded(entry)
                if not why and not lenient:
                    if self._is_signed:
                        raise Unchecked(entry, error) from error
                    raise
                if why:
                    return self._voided(entry, before, rules, why)
                what, _, _ = str(error).partition(". ")  # the advice is for whoever derives the verdict
                self._tell(
                    entry, logging.WARNING, f"the verdict of round {commit.round} is taken as it is written: {what}"
                )
        if not why and entry.void:
            return entry.counted(read_without_weights(entry.commit, before, entry.void))
        if not why:
            return entry
        if previous is not None and previous.unlinked and derive_verdict and self._is_evidence(entry, previous):
            # Its author took the unlinked commit as it is written, so that it is the record before that was changed.
            raise changed(previous.commit.round, previous.written.previous, previous.commit.previous)
        return self._voided(entry, before, rules, why)

    def _voided(self, entry: CommitEntry, before: Before, rules: LegRules, why: str) -> CommitEntry:
        self._tell(entry, logging.ERROR, f"{keys.commit(entry.written.round)} is void: {why}")
        return entry.voided(read_as_void(entry.written, before, rules, why), why)

    def _why_unfounded(self, entry: CommitEntry) -> str:
        """The reason in a coordinator's finding that a commit names what is not there; empty without one.

        Only in a signed run: elsewhere anybody could write one. Costs a GET, so callers have found something missing.
        """
        found = read(self._records.store, Unfounded, keys.unfounded(entry.written.round)) if self._is_signed else None
        return found.record.reason if found is not None and found.record.commit_sha256 == entry.sha256 else ""

    def missing(self, commit: Commit) -> Iterator[tuple[Answer | CheckNamed, str]]:
        """The manifests and check records that a commit names and that are missing, cannot be read, or have another
        digest, with reasons, manifests first. Costs a GET for each named one up to the next that is missing.
        """
        named: tuple[Answer | CheckNamed, ...] = (*commit.answers, *(commit.checks or ()))
        for each in dict.fromkeys(named):
            try:
                if isinstance(each, CheckNamed):
                    self._reader.checked(commit, each)
                elif each.attempt:
                    self._reader.exact(commit.round, each.replica_id, each.manifest_sha256)
            except (RecordInvalid, ObjectMissing) as error:
                yield each, str(error)

    def is_unjudged(self, entry: CommitEntry) -> bool:
        """Whether something that a commit names is not there, and no coordinator has written that down yet."""
        return next(self.missing(entry.written), None) is not None and not self._why_unfounded(entry)

    def _tell(self, entry: CommitEntry, level: int, words: str) -> None:
        """Log `words` about a commit once. Several readers of a log read it, and each again after a contradiction."""
        if (entry.sha256, words) not in self._told:
            self._told.add((entry.sha256, words))
            log.log(level, "%s", words)

    def why_not_concluded(self, entry: CommitEntry, previous: CommitEntry | None) -> str:
        """Reason why the commit `entry` does not follow from `previous`, judged by these two alone; empty if it may."""
        rules, before = self._before(previous)
        return why_unlinked(entry.written, before) or why_not_concluded(entry.written, before, rules)

    def _check_unchanged(self, entry: CommitEntry, previous: CommitEntry | None, before: Before) -> None:
        """Raise `RecordInvalid` if a commit does not name the digest of the one before because either was changed.

        Either counts as changed if the commit before is void (it averages nobody), or if a second GET gives other bytes
        than the first. Otherwise the commit itself is wrong, and is read as void. In a signed run it is void after a
        void one, too: who holds the key of one replica can sign both before the log is there.
        """
        commit, position = entry.written, before.position
        if not entry.unreadable and previous is not None and previous.contradicts and not self._is_signed:
            raise changed(commit.round, commit.previous, position.sha256)
        above = keys.commit(position.round) if position.round else self._records.starts.key_of(position.sha256)
        for key, sha256 in ((above, position.sha256), (keys.commit(commit.round), entry.sha256)):
            data = read_optional(self._records.store, key)
            if data is None or sha256_hex(data) != sha256:
                raise RecordInvalid(
                    f"{key} in {self._records.store.url} has not the digest {sha256[:12]} that it had when it was "
                    "read: it was changed after it was written, or read with an error. Start this process again."
                )

    @property
    def _is_signed(self) -> bool:
        """Whether the run is signed, by rules that let nobody who holds one replica's key stop readers of the log."""
        return self._records.run.signed_rules is not None

    def _is_evidence(self, entry: CommitEntry, previous: CommitEntry) -> bool:
        """Whether `entry` shows that the log was changed, by continuing the unlinked commit `previous`.

        In a signed run only if another replica wrote it: one alone can sign both.
        """
        before, after = previous.written.by.who, entry.written.by.who
        return not self._is_signed or bool(before and after and before[0] != after[0])

    def manifests(self, entry: CommitEntry) -> Mapping[int, Contribution]:
        """The manifests named by the commit whose verdict was checked last, by replica id; empty for another commit."""
        digest, found = self._last
        return found if digest == entry.sha256 else {}

    def _before(self, previous: CommitEntry | None) -> tuple[LegRules, Before]:
        """The rules (settings) for the commit after `previous`, and the run's state before it."""
        if previous is None:
            rules = self._rules_of(self._begin_of(1))
            return rules, first_of_leg(rules, leg_position(rules.begin, self._start().sha256))
        leg, last = previous.commit.leg, previous.commit
        if previous.position.stop != "none":
            following = self._records.begin_after(leg + 1, last.round, previous.sha256)
            if following is not None:
                rules = self._rules_of(following)
                return rules, first_of_leg(rules, leg_position(rules.begin, self._start().sha256))
        rules = self._rules_of(self._begin_of(leg))
        norms = norms_after(last, rules.config)
        return rules, Before(previous.position, last.guard, last.roster, norms, last.barred or ())

    def _begin_of(self, leg: int) -> Entry[Begin]:
        begin = self._records.begin(leg)
        if begin is None:
            raise NoSuchRun(f"{self._records.store.url} has commits of leg {leg} and no {keys.begin(leg)}.")
        return begin

    def _start(self) -> Entry[Start]:
        """The run's start record, which describes its first base. May cost a LIST, so callers cache what they need."""
        start = self._records.start()
        assert start is not None, "a log with commits has a start"
        return start

    def _rules_of(self, begin: Entry[Begin]) -> LegRules:
        if begin.sha256 not in self._rules:
            start = self._start().record
            config, fragments = self._records.configs.of_begin(begin), len(start.synced_fragments)
            self._heldout = start.heldout
            self._rules[begin.sha256] = LegRules(
                begin.record,
                begin.sha256,
                config,
                max(1, fragments),
                scatters(config, start),
                start.strangers_rules,
                start.unheard(config.invited),
            )
        return self._rules[begin.sha256]

    def _why_verdict_differs(
        self,
        entry: CommitEntry,
        before: Before,
        rules: LegRules,
        received: Mapping[str, Contribution],
        checks: Mapping[str, Checked],
    ) -> str:
        commit = entry.written
        found = self._manifests(commit, received)
        self._last = entry.sha256, found
        known = self._heldout, before.roster, rules.config, before.position.outer_step
        why = why_answers_differ(commit, found)
        scored = None
        if rules.strangers_rules:
            named = [self._check(commit, each, checks) for each in dict.fromkeys(commit.checks or ())]
            scored = StrangersWork(rules.config.invited, named, rules.strangers_rules)
        if not why:
            folded = fields_of(fold_of_commit(commit, before.guard, found, *known, scored, rules.unheard), before.guard)
            wrong = [name for name, value in folded.items() if getattr(commit, name) != value]
            why = f"its {wrong[0]} is not what the scores in its manifests give" if wrong else ""
        dealt = rules.scatters and dealing_of(commit.round, rules.config, set(before.roster) - set(before.barred))
        why = why or why_average_differs(commit, average_codec_of(rules.config.codec) if dealt else None)
        if not why and rules.scatters:
            named = [self._check(commit, each, checks) for each in dict.fromkeys(commit.checks or ()) if dealt]
            why = why_unread(commit, found, named, before.barred) if dealt else ""
            why = why or why_barred_differ(commit, before, named)
        return why

    def _check(self, commit: Commit, named: CheckNamed, received: Mapping[str, Checked]) -> Checked:
        """A check record that a commit names. Raises `ObjectMissing` without it, `RecordInvalid` for another one."""
        return received.get(named.sha256) or self._reader.checked(commit, named)

    def _manifests(self, commit: Commit, received: Mapping[str, Contribution]) -> dict[int, Contribution]:
        """The manifests that a commit names, by replica id, without those of another round, leg or replica."""
        found: dict[int, Contribution] = {}
        for answer in commit.answers:
            if answer.attempt == 0:
                continue
            manifest = received.get(answer.manifest_sha256) or self._reader.exact(
                commit.round, answer.replica_id, answer.manifest_sha256
            )
            if (manifest.round, manifest.leg, manifest.replica_id) == (commit.round, commit.leg, answer.replica_id):
                found[answer.replica_id] = manifest
        return found
