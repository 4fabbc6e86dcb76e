"""`RoundCloser`: ends the open round: observe responses, decide, commit, apply the commit.

`protocol.rounds.decide` decides and `protocol.rounds.conclude` derives the consequences; this file carries them out.
`contribute` makes this replica's own contribution.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from diloco_orchestrator.allreduce.dealing import average_codec_of
from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.errors import Preempted, QuorumLost
from diloco_orchestrator.guard.round_fold import fold_round, is_rebuildable
from diloco_orchestrator.protocol import pace, rounds, weights
from diloco_orchestrator.protocol.claims import BaseClaim, is_tied, judged, shared_claim, that_count, wrong_bases
from diloco_orchestrator.protocol.record_format import By
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution, Halt
from diloco_orchestrator.protocol.round_metrics import not_finite_words, round_metrics_of
from diloco_orchestrator.protocol.weights import norms_after
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.averages import averages_of
from diloco_orchestrator.replica.rounds.awaited import AwaitedReplicas
from diloco_orchestrator.replica.rounds.base_claims import BaseClaims
from diloco_orchestrator.replica.rounds.base_repair import BaseRepair
from diloco_orchestrator.replica.rounds.checks import Checks
from diloco_orchestrator.replica.rounds.contribute import Contributor
from diloco_orchestrator.replica.rounds.counted_work import CountedWork
from diloco_orchestrator.replica.rounds.interface import ClosedRound
from diloco_orchestrator.replica.rounds.judged import once_judged
from diloco_orchestrator.replica.rounds.received import ExpectedContribution, ReceivedResponses
from diloco_orchestrator.replica.rounds.reupload import WANTS_EVERY_S, ReuploadRequests
from diloco_orchestrator.replica.rounds.timing import RoundTiming
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.replica.rounds.work_scores import WorkScores
from diloco_orchestrator.run_log.append import append_commit
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots

log = logging.getLogger(__name__)


class RoundCloser:
    """Ends each round: reads responses, commits or awaits the commit, applies it to the base. Not thread-safe."""

    def __init__(
        self,
        attempt: Attempt,
        tip: HeldTip,
        claims: BaseClaims,
        requests: ReuploadRequests,
        timing: RoundTiming,
        contributor: Contributor,
    ) -> None:
        self._attempt = attempt
        self._tip = tip
        self._claims = claims
        self._requests = requests
        self._timing = timing
        self._contributor = contributor
        self.work = WorkScores(attempt, tip)
        self._checks = Checks(attempt, tip, self.work)
        self._repair = BaseRepair(attempt, tip, claims, self._checks.averages, contributor)
        self._counted = CountedWork(attempt)
        self._received = ReceivedResponses(
            attempt.store,
            attempt.background,
            requests.payloads,
            attempt.authors,
            self._checks.dealt,
            self._counted,
            attempt.owners,
        )
        self._halt: Halt | None = None  # the request to halt the leg, as of when a decision was near
        self._halt_asked = False  # in the last poll
        self._receive_s = 0.0  # what that took for responses
        self._averaged: list[Contribution] = []  # what the open round's commit averages
        self._in_step = False  # whether the open round could not end before this replica looked for its end
        self._given_up = False
        self._claims_polled_at = attempt.clock.now()
        self._waiting_since = self._commit_asked_at = self._claims_polled_at
        self._awaited = AwaitedReplicas(attempt, tip, self._received, timing)

    def close(self, *, keep_average: bool = False) -> ClosedRound:
        """Commit the open round or wait for its commit, then apply it to the base.

        `keep_average`: return the averaged pseudo-gradient, at the cost of a fragment's size in memory.

        Raises `QuorumLost` without a quorum for `round_timeout_s`, unless a missing replica is being launched,
        `Superseded` if a later attempt of this replica is alive, `Preempted` after a preemption notice, `BaseDiverged`
        if this machine computes other bits, and `PayloadCorrupt` if a payload that the commit averages cannot be read.
        """
        attempt, pauses, last_summary, waited = self._attempt, self._timing.pauses(), "", False
        self._timing.start_waiting()
        self._awaited.start_waiting()
        self._waiting_since = self._commit_asked_at = attempt.clock.now()
        while (entry := self._timing.without_outages(self._observe, waited)) is None:
            if self._heal_if_unsure():
                continue
            decision, shared, answers = self._decide()
            if attempt.replica_id not in attempt.committing and decision.action is rounds.Action.COMMIT:
                if attempt.committing <= set(out := self._awaited.out()):
                    who = f"replicas {sorted(out)} are out, and no other one may commit"
                    raise QuorumLost(f"round {self._round}: {who}. Look at their logs.", sorted(out))
                decision = replace(decision, action=rounds.Action.WAIT)  # for the commit of a replica that may
            if decision.action is rounds.Action.COMMIT and waited:
                if (entry := self._commit_of_others()) is not None:
                    return self._apply(entry, keep_average)
                if not self._received.confirm_own(attempt.replica_id, self._round):
                    self._contributor.created = None  # it is read from the bucket now, as the others read it
                    continue
            if decision.action is not rounds.Action.WAIT and not self._halt_asked:
                self._read_halt()
            if decision.action is rounds.Action.COMMIT:
                return self._apply(self._commit(decision, shared, answers), keep_average)
            # No replica is launched into a leg with a request to halt, so none is waited for.
            if decision.action is rounds.Action.GIVE_UP and (self._halt or not self._timing.waits_on(decision.missing)):
                raise QuorumLost(f"round {self._round}: {decision.reason}. Look at their logs.", decision.missing)
            if decision.summary != last_summary:
                log.info("round %d: %s", self._round, decision.reason)
                last_summary = decision.summary
            if attempt.should_leave() or self._given_up:
                raise Preempted(f"replica {attempt.replica_id} was asked to leave; what it finished is published.")
            self._sleep(max(next(pauses), self._timing.until_expected_s(self._awaited.missing(()))))
            waited = True
        return self._apply(entry, keep_average)

    def _sleep(self, seconds: float) -> None:
        """Wait `seconds`; return early, within a second, once this process has to leave or `give_up` was called."""
        clock, until = self._attempt.clock, self._attempt.clock.now() + seconds
        while (left_s := until - clock.now()) > 0 and not (self._attempt.should_leave() or self._given_up):
            clock.sleep(min(left_s, 1.0))

    def give_up(self) -> None:
        """Make `close`, which another thread is in, raise `Preempted` instead of waiting any longer."""
        self._given_up = True

    def committed(self) -> bool:
        """Whether the open round has a commit. One GET request."""
        return self._attempt.log.commit(self._round) is not None

    @property
    def _round(self) -> int:
        return self._tip.position.round + 1

    # -- observe and decide --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Fetch and verify new responses to the open round. At most three round trips to the store."""
        expected = self._expected()
        self._received.receive(self._received.unread(expected), expected)

    def _observe(self, waited: bool) -> CommitEntry | None:
        """The open round's commit if it exists. If not, fetch everything that a decision depends on and return None.

        Independent requests are sent together: one round trip, and two more for new responses. `waited`: this replica
        has waited in this round already; then claims of its attempts are polled too, and a later live one raises
        `Superseded`. The commit is asked for where there may be one: others may end the round without everybody, or it
        has not been asked for in a while.
        """
        attempt, expected = self._attempt, self._expected()
        start = attempt.background.start
        calls = [self._awaited.read_late, self._put_wanted]
        calls += [self._check_claims, self._awaited.read_out] if waited else []
        beside = [start(call) for call in calls]
        asked = start(self._read_commit) if self._may_be_committed() else None
        unread = self._received.unread(expected)
        entry = asked.result() if asked is not None else None
        self._in_step |= not waited and asked is None
        all_responded, self._halt_asked = not self._awaited.missing(unread), False
        if all_responded and not waited:
            beside.append(start(self._read_halt))
        if not all_responded and attempt.replica_id in unread and self._contributor.created is not None:
            self._received.take_own(self._contributor.created, attempt.replica_id, expected)
            unread = {replica_id: key for replica_id, key in unread.items() if replica_id != attempt.replica_id}
        if entry is None:
            began = attempt.clock.now()
            self._received.receive(unread, expected)
            self._receive_s = attempt.clock.now() - began
            self._checks.exchange(self._received)
            self._repair.if_disproved()
        for each in beside:
            each.result()
        return entry

    def _commit_of_others(self) -> CommitEntry | None:
        """The open round's commit, if another replica has created it, after a pause as long as receiving took here.

        Called by the replica that responded last and so decides first: reading costs a twelfth of creating in vain.
        """
        self._sleep(min(self._receive_s, self._timing.usual_s / 100))
        return self._read_commit()

    def _read_commit(self) -> CommitEntry | None:
        self._commit_asked_at = self._attempt.clock.now()
        return self._attempt.log.commit(self._round)

    def _may_be_committed(self) -> bool:
        """Whether the open round may have a commit though this replica has not seen all responses."""
        own = self._contributor.own
        if (
            self._attempt.replica_id not in self._attempt.committing
            or own is None
            or own.attempt != self._attempt.number
        ):
            return True  # another attempt of this replica has responded, whenever that was
        if self._checks.waits_for_reports:
            return True
        return (
            self._timing.may_be_committed()
            or self._attempt.clock.now() - self._commit_asked_at >= self._timing.seldom_s
        )

    def _put_wanted(self) -> None:
        """Upload payload shards again that others have requested, after a long wait, or in this replica's turn."""
        roster = self._tip.open.roster or (self._attempt.replica_id,)
        in_turn = roster[self._round % len(roster)] == self._attempt.replica_id
        if in_turn or self._attempt.clock.now() - self._waiting_since >= max(WANTS_EVERY_S, self._timing.usual_s / 10):
            self._requests.put_wanted_if_due(self._tip.value.base_round)

    def _read_halt(self) -> None:
        self._halt_asked = True
        self._halt = self._attempt.log.halt(self._attempt.begin.leg)

    def _decide(self) -> tuple[rounds.Decision, str | None, tuple[Answer, ...]]:
        """(the next action: wait, commit or give up; base digest that a commit would name; responses that it would
        list).

        The digest is that of most manifests received so far, None without any.
        """
        claims = self._received.claims()
        counted = that_count(claims, self._attempt.config.invited)
        shared = shared_claim(counted, self._claims.digest, own_is_rebuilt=self._claims.is_rebuilt)
        if self._checks.averages.proved and sum(claim.digest == self._claims.digest for claim in counted) > 1:
            shared = self._claims.digest  # most may have trained from a false base; two that rebuilt theirs agree
        answers = judged(self._received.answers(), claims, shared)
        view = self._timing.view(answers, self._awaited.out(), self._awaited.vacated())
        ready = rounds.is_ready(view, self._attempt.clock.now(), self._timing.policy)
        pause_s = self._timing.longest_pause_s
        answers = self._checks.counted(answers, self._received, self._expected(), ready=ready, pause_s=pause_s)
        view = replace(view, answers=answers, tie_breakers=self._tie_breakers(counted))
        decision = rounds.decide(view, self._attempt.clock.now(), self._timing.policy)
        return decision, shared, answers

    def _tie_breakers(self, claims: Sequence[BaseClaim]) -> set[int]:
        """Launched replicas that could break a tie of two bases; empty without a tie, or once the leg shall halt."""
        if not is_tied(claims, self._attempt.replica_id, self._claims.digest):
            return set()
        if not self._halt_asked:
            self._read_halt()
        config = self._attempt.config
        return {*config.launched, *self._tip.open.roster}.difference(config.invited) if self._halt is None else set()

    def _heal_if_unsure(self) -> bool:
        """Once the round can end, rebuild a doubtful base. Returns whether it tried, also if the payloads for it are
        gone.

        A base is doubtful if most manifests name another digest, or if a snapshot of it is due and nobody else names
        it.
        """
        claims = self._received.claims()
        alone, claims = self._claims.confirms_alone(claims), that_count(claims, self._attempt.config.invited)
        if not alone and not self._claims.contradicted(claims):
            return False
        view = self._timing.view(self._received.answers(), self._awaited.out(), self._awaited.vacated())
        if not rounds.is_ready(view, self._attempt.clock.now(), self._timing.policy):
            return False
        self._repair.before_decision(claims, alone=alone)
        return True

    def _expected(self) -> ExpectedContribution:
        opened = self._tip.open
        return ExpectedContribution(
            round=opened.round,
            leg=self._attempt.begin.leg,
            fragment=opened.fragment,
            numel=self._tip.base.numel(opened.names),
            shard_numel=self._tip.base.shard_numel,
            config=self._attempt.config,
            final_evaluation=opened.final_evaluation,
        )

    def _check_claims(self) -> None:
        now = self._attempt.clock.now()
        waits_long = now - self._waiting_since >= self._timing.seldom_s
        pause_s = self._timing.seldom_s if waits_long else pace.seldom_read_s(self._timing.usual_s)
        if now - self._claims_polled_at >= pause_s:
            self._claims_polled_at = now
            self._attempt.check_superseded()

    # -- commit --------------------------------------------------------------------------------------------------

    def _commit(self, decision: rounds.Decision, shared: str | None, answers: Sequence[Answer]) -> CommitEntry:
        """Create the commit of the open round as decided; returns the round's commit, which may be another replica's.

        A commit fixes the inputs of the outer step, which nobody has computed yet: no machine's arithmetic becomes
        another's base, and a replica whose commit is not the first has lost no work.
        """
        attempt, opened, position = self._attempt, self._tip.open, self._tip.position
        last, named = self._tip.last, self._received.manifests(decision.named)
        if [manifest.replica_id for manifest in named] == [attempt.replica_id]:
            self._requests.check_own(named[0])
        scored = self._received.manifests(a.replica_id for a in answers if a.kind != "wrong_base")
        folded = fold_round(
            opened.guard,
            attempt.config.guard,
            opened.round,
            self._tip.heldout,
            opened.roster,
            scored,
            named,
            is_rebuildable(attempt.config, opened.outer_step),
            self._checks.of_strangers(),
            self._tip.unheard,
        )
        fired = folded.verdict.reason if folded and folded.verdict.fire else ""
        halt = self._halt.reason if self._halt else ""
        conclusion = rounds.conclude(decision, position, outer_steps=attempt.outer_steps, fired=fired, halt=halt)
        quarantined, discounted = (folded.quarantined, folded.discounted) if folded else ((), ())
        averaged = rounds.averaged(decision.named if conclusion.applied else (), quarantined)
        answers = rounds.mark_averaged(answers, averaged)
        listed = self._received.manifests(answer.replica_id for answer in answers)
        norms = norms_after(last, attempt.config) if last else None
        contributions = [each for each in answers if each.averaged]
        shares = weights.shares_of(opened.round, contributions, attempt.config, norms, opened.fragment)
        commit = Commit(
            **attempt.stamp(),
            round=opened.round,
            leg=attempt.begin.leg,
            fragment=opened.fragment,
            outer_step=conclusion.outer_step,
            answers=weights.weighed(answers, shares),
            begin_sha256=attempt.leg.sha256,
            base_digest=shared,
            roster=self._awaited.next_roster(),
            guard=folded.state if folded else opened.guard,
            verdict=folded.verdict if folded else None,
            quarantined=quarantined,
            norms=norms,
            clipped=shares.clipped,
            discounted=discounted,
            checks=self._checks.named(),
            barred=self._checks.barred(opened.roster),
            average_codec=average_codec_of(attempt.config.codec) if self._tip.dealing is not None else None,
            figures=(figures := round_metrics_of(listed, averaged)),
            applied=conclusion.applied,
            empty_rounds=conclusion.empty_rounds,
            stop=conclusion.stop,
            by=By((attempt.replica_id, attempt.number)),
            reason=rounds.reason_with(conclusion.reason, quarantined, shares.clipped, figures.disagreeing, discounted),
            previous=position.sha256,
        )
        return append_commit(attempt.log, commit)

    # -- apply ---------------------------------------------------------------------------------------------------

    def _apply(self, entry: CommitEntry, keep_average: bool) -> ClosedRound:
        """Apply a commit: rebuild the base if the commit names another digest, take the outer step, and open the next
        round.

        Skips to a newer snapshot if one is far ahead or if payloads are gone. A void commit averages nobody and stops
        nothing. Raises as `close` does.
        """
        run_log = self._attempt.log
        entry = self._checked(entry)
        ahead = [] if self._in_step else run_log.snapshots_ahead(entry.commit.round, self._attempt.begin)
        if ahead and ConfirmedSnapshots(run_log).newest(1, ahead):
            self._repair.skip_to_newer_snapshot(entry.commit)
            return self._open_next_round(entry.commit, average={})
        self._timing.record(self._received.manifests())
        try:
            if entry.commit.base_digest is not None:
                self._repair.heal({entry.commit.base_digest})
                self._repair.search_if_contradicted({entry.commit.base_digest})
            if wrong_bases([entry.commit], self._attempt.replica_id) and not self._checks.averages.proved:
                self.poll()  # if the commit existed first, not all claims were received
                claims, quorum = self._received.claims(), self._timing.policy.quorum
                self._claims.leave_if_arithmetic_differs(entry.commit, claims, quorum)
            average = self._take_outer_step(entry, keep_average)
        except PayloadGone:
            self._repair.skip_to_newer_snapshot(entry.commit)
            return self._open_next_round(entry.commit, average={})
        self._contributor.settle(entry.commit)
        return self._open_next_round(entry.commit, average)

    def _checked(self, entry: CommitEntry) -> CommitEntry:
        """`entry`, void if it contradicts the log or the manifests that it names. Raises as `once_judged`."""
        received, checks, last = self._received.by_digest(), self._checks.by_sha256, self._tip.value.last
        return once_judged(self._attempt, lambda: self._attempt.log.checked(entry, last, received, checks))

    def _take_outer_step(self, entry: CommitEntry, keep_average: bool) -> Mapping[str, torch.Tensor]:
        if not entry.commit.applied:
            self._tip.skip(entry)
            return {}
        commit, expected, read = entry.commit, self._expected(), self._received.shard
        dealing, readable = self._tip.dealing_of_averages(commit), self._requests.until_readable
        contributions = readable(
            lambda: self._received.averaged_by(commit, expected, payloads=dealing is None), until=commit.round - 1
        )
        # If the commit existed before this replica received the contributions, their times are not recorded yet.
        self._averaged = [manifest for manifest, _ in contributions]
        self._timing.record(self._averaged)
        if dealing is None:
            self._claims.note()
            return self._tip.step(entry, contributions, read, keep_average=keep_average)
        base, fragment, false = self._tip.base, expected.fragment, self._checks.averages
        longest_s = self._timing.longest_pause_s
        what = dealing, contributions, commit.average_codec, base, fragment, read, longest_s, false.distrusted
        made = readable(lambda: averages_of(self._attempt, *what), until=commit.round - 1)
        self._claims.note()
        average = self._tip.step(entry, contributions, read, keep_average=keep_average, averages=made.shards)
        self._tip.borrowed |= made.borrowed
        false.note(commit.round, made.false)
        self._repair.if_disproved()
        return average

    def trained_in_vain(self) -> bool:
        """Whether this replica trained from a base that held a false average; the base is rebuilt then.

        Asked before it contributes: reads what others report in the open round, in one LIST request without any report.
        """
        if self._tip.dealing is not None:
            self._checks.exchange(self._received)
        return self._repair.if_disproved()

    def _open_next_round(self, commit: Commit, average: Mapping[str, torch.Tensor]) -> ClosedRound:
        if not commit.applied and commit.stop != "completed":
            log.warning("round %d: not applied: %s", commit.round, commit.reason)
        for words in not_finite_words(commit.figures) if commit.figures else ():
            log.warning("round %d: %s", commit.round, words)
        log.info("round %d: committed by %s: %s", commit.round, commit.by, commit.reason)
        read = {each.replica_id: each for each in (*self._averaged, *self._received.manifests())}
        closed = ClosedRound(
            applied=commit.applied,
            skipped=self._tip.position.round > commit.round,
            healed=self._repair.changed,
            average=average,
            contribution=self._contributor.own,
            received=[read[replica_id] for replica_id in sorted(read)],
        )
        self._averaged = []
        self._counted.note(commit)
        self._awaited.open_round()
        self._repair.changed = self._in_step = False
        self._contributor.open_round()
        self._timing.open_round()
        self._received.clear()
        self._checks.settle(commit)
        if self._checks.averages.to_report():
            self._checks.exchange(self._received)  # before training, so that others know before they contribute
        return closed
