"""One replica's part in the rounds of a run: answer, decide, reduce and step, commit, follow.

The rules are `protocol.rounds`, the look at the others is `answers`; this file acts and records. It knows no training
loop and no torchft.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from diloco_orchestrator.allreduce.payload import FlatTensors, NotFinite, PayloadGone, publish
from diloco_orchestrator.errors import (
    BaseDiverged,
    ModelMismatch,
    PayloadCorrupt,
    Preempted,
    QuorumLost,
)
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.records import (
    Commit,
    Contribution,
    Origin,
    Payload,
    Shard,
    sha256_hex,
)
from diloco_orchestrator.protocol.straggler import RoundTimes, StragglerDeadline
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.replica.rounds.carry import CarriedWork
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields, weight_of
from diloco_orchestrator.replica.rounds.contribution_history import ContributionHistory
from diloco_orchestrator.replica.rounds.first_base import agree_on_first_base
from diloco_orchestrator.replica.rounds.inbox import ExpectedContribution, RoundInbox
from diloco_orchestrator.replica.rounds.snapshot_writer import SnapshotWriter
from diloco_orchestrator.run_log.append import append_commit
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import (
    CommitEntry,
    check_link,
)
from diloco_orchestrator.snapshots.layout import (
    ModelFiles,
    check_same_model,
    describe,
)
from diloco_orchestrator.snapshots.rebuild import Tip, rebuild

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_LOOK_FROM = 0.9  # of the deadline: others opened the round a little earlier
_PACE_ROUNDS_READ = 3  # by a restarted attempt: enough to know how long a round takes
_LOOK_FOR_SUCCESSOR_S = 10.0  # each look is a LIST


@dataclass(frozen=True)
class _Step:
    """The outcome of averaging: computed before the commit by its writer, after it by everyone else."""

    base: Base
    digest: str
    gradients: Mapping[str, torch.Tensor]  # the applied average; empty if nothing was applied


class Participant:
    """Takes part in rounds: `start`, then per round one `answer_…` and one `finish`, one call at a time.

    A round that was committed meanwhile is answered all the same, with what there is: nothing trained is lost.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.gradients: Mapping[str, torch.Tensor] = {}  # the average that the last round applied, by name
        self._config = attempt.config
        self._store = attempt.store
        self._log = attempt.log
        self._reader = ContributionReader(attempt.store)
        self._policy = rounds.Policy.of(attempt.config)
        self._answers = RoundInbox(attempt.store)
        self._pace = RoundTimes(attempt.config.round_steps)
        self.own = ContributionHistory(attempt)
        self._answered: Contribution | None = None  # our manifest of the open round, if we know it
        self._quorum_since: float | None = None
        self._late: dict[int, Contribution] = {}  # manifests that came to the last closed round after its commit
        self._written: tuple[str, _Step] | None = None  # our own commit's sha256, and what it did

    def start(
        self, parameters: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]], files: ModelFiles
    ) -> None:
        """Settle the first base with the others and rebuild the newest one.

        `parameters`: this replica's trainable ones, any float dtype. `fragments`: their names, in name order.
        Raises `ModelMismatch` if they differ from the run's in names, shapes or dtypes.
        """
        self._fragments = [tuple(names) for names in fragments]
        self._snapshots = SnapshotWriter(self.attempt, files)
        start = (self._log.start() or agree_on_first_base(self.attempt, parameters, fragments, files)).record
        check_same_model(describe(parameters), start.parameters)
        if start.fragments != tuple(self._fragments):
            raise ModelMismatch(
                f"this replica synchronises {len(fragments)} fragments of the model, the run in {self._store.url} "
                f"{len(start.fragments)}, or the same number split otherwise. All replicas must agree."
            )
        self._owed = CarriedWork(self._store, len(fragments), self._config.late)
        self._rebuild()
        self._recover()
        if not self.position.round and Base.fresh(parameters, self._config.outer).digest() != self.digest:
            log.warning("this replica's first values differ from the run's first base; it takes those of snapshot 0")
        self.attempt.pulse.round = self.round

    def _rebuild(self, until: int | None = None) -> None:
        self._tip: Tip = rebuild(self._log, self.attempt.begin, until)
        self._opened_at = self._waiting_since = self._looked_for_successor = self.attempt.clock.now()

    def _recover(self) -> None:
        """Learn from the closed rounds of this leg what is owed and how long a round takes."""
        first = self.attempt.begin.after_round + 1
        closed = range(self.round - 1, first - 1, -1)
        self._owed.recover(closed, self.existing_contribution, self._commit_of, self._base_before)
        for round_ in closed[:_PACE_ROUNDS_READ]:
            self._pace.record(self._reader.in_round(round_))
        if self.attempt.begin.leg > 1 and not closed:
            self._tell_what_lapsed()

    def _tell_what_lapsed(self) -> None:
        """Work that an earlier leg still owed does not come into this one."""
        newest = self.own.newest(self.round)
        if newest is None or newest.kind != "delta" or newest.leg == self.attempt.begin.leg:
            return
        answers = self._commit_of(newest.round).answers
        if not any(a.averaged and a.replica_id == self.attempt.replica_id for a in answers):
            steps = sum(origin.steps for origin in newest.origins)
            log.warning("%d inner steps of round %d are dropped: their leg has ended", steps, newest.round)

    def _commit_of(self, round_: int) -> Commit:
        entry = self._log.commit(round_)
        assert entry is not None, f"round {round_} is closed"
        return entry.commit

    def _base_before(self, round_: int) -> str:
        """Digest of the base that a round of this leg started from."""
        if round_ > self.attempt.begin.after_round + 1:
            return self._commit_of(round_ - 1).base_digest
        return self._log.first_digest(self.attempt.begin)

    # -- where we stand ------------------------------------------------------------------------------------------

    @property
    def base(self) -> Base:
        return self._tip.base

    @property
    def digest(self) -> str:
        """Of the base."""
        return self._tip.digest

    @property
    def position(self) -> rounds.Position:
        return self._tip.position

    @property
    def last(self) -> CommitEntry | None:
        """The last commit of this leg that was followed."""
        return self._tip.last

    @property
    def round(self) -> int:
        """The open round."""
        return self._tip.position.round + 1

    @property
    def roster(self) -> tuple[int, ...]:
        return self.last.commit.roster if self.last else tuple(range(self._config.replicas))

    @property
    def elastic(self) -> bool:
        """Whether a round may end without this replica."""
        return not self._policy.strict and self._policy.replicas > 1

    @property
    def stopped(self) -> bool:
        return self.position.stop != "none"

    @property
    def closing(self) -> bool:
        """Whether the open round only carries scores, because every outer step is taken."""
        return rounds.is_closing(self.position, self.attempt.outer_steps)

    @property
    def fragment(self) -> int:
        """The fragment that the open round moves."""
        return self.position.outer_step % len(self._fragments)

    @property
    def fragment_names(self) -> tuple[str, ...]:
        return self._fragments[self.fragment]

    # -- answering -----------------------------------------------------------------------------------------------

    def existing_contribution(self, round_: int | None = None) -> Contribution | None:
        """This replica's manifest of a round (by default the open one), whichever attempt wrote it."""
        return self.own.of(self.round if round_ is None else round_, self.round)

    def rewind(self, round_: int) -> None:
        """Stand again where a closed round of this leg was open: this replica goes on from its answer to it."""
        self._rebuild(until=round_ - 1)
        self._recover()

    def contribute_delta(self, pseudo_gradient: FlatTensors, report: ContributionFields) -> Contribution:
        """Publish a pseudo-gradient, or an abstention if it is not finite. Returns the manifest that stands.

        `pseudo_gradient`: the open round's fragment, base - local, flat in name order, float32. What this replica
        owes of that fragment is added to it in place.
        """
        attempt = self.attempt
        carried, dropped = self._owed.add_to(pseudo_gradient, self.fragment, self.round)
        saving = self._start_saving(report.state)  # beside the payload, not after it
        try:
            payload = publish(
                self._store,
                lambda shard: keys.payload(self.round, attempt.replica_id, attempt.number, shard),
                pseudo_gradient,
                self._config.codec,
                self._shard_numel,
                keep=self._answers.keep,
            )
        except NotFinite as error:
            return self._answer("abstention", report, reason=f"pseudo-gradient not finite: {error}")
        own = Origin(round=self.round, steps=report.steps)
        state = None if saving is None else saving.result()
        return self._answer("delta", report, payload=payload, state=state, origins=(*carried, own), dropped=dropped)

    def _start_saving(self, state: bytes | None) -> Future[Shard] | None:
        if state is None:
            return None
        key = keys.state(self.attempt.replica_id, self.round, self.attempt.number)

        def save() -> Shard:
            self._store.create(key, state)
            return Shard(sha256=sha256_hex(state), size=len(state))

        return self.attempt.background.start(save)

    def contribute_scores(self, report: ContributionFields) -> Contribution:
        """Answer the closing round."""
        return self._answer("scores", report)

    def announce(self) -> None:
        """Tell the others, by an abstention in the round that closed last, to wait for this replica again.

        Does nothing where a manifest of this replica stands there, or where rounds wait for everybody anyway.
        """
        last = self.last.commit if self.last else None
        if last is None or not self.elastic or self.stopped or self.attempt.replica_id in self.roster:
            return
        said = self._manifest("abstention", ContributionFields(), reason="back, after this round")
        closed = {"round": last.round, "fragment": last.fragment, "base_digest": self._base_before(last.round)}
        self._store.create(
            keys.contribution(last.round, self.attempt.replica_id), said.model_copy(update=closed).to_bytes()
        )

    def _answer(self, kind: str, report: ContributionFields, **said: Any) -> Contribution:
        """Create the manifest; returns the one that stands."""
        manifest = self._manifest(kind, report, **said)
        if not self._store.create(keys.contribution(self.round, self.attempt.replica_id), manifest.to_bytes()):
            standing = self.existing_contribution()
            assert standing is not None
            if standing.write_id != manifest.write_id:
                log.warning(
                    "round %d: attempt %d of this replica answered first; attempt %d drops its own %d inner steps",
                    *(self.round, standing.attempt, self.attempt.number, report.steps),
                )
            manifest = standing
        self._answered = manifest
        return manifest

    def _manifest(
        self,
        kind: str,
        report: ContributionFields,
        payload: Payload | None = None,
        state: Shard | None = None,
        reason: str = "",
        origins: tuple[Origin, ...] = (),
        dropped: tuple[Origin, ...] = (),
    ) -> Contribution:
        attempt = self.attempt
        return Contribution(
            **attempt.stamp(),
            round=self.round,
            leg=attempt.begin.leg,
            replica_id=attempt.replica_id,
            attempt=attempt.number,
            kind=kind,  # type: ignore[arg-type]
            reason=reason,
            base_digest=self.digest,
            fragment=self.fragment,
            payload=payload,
            state=state,
            weight=weight_of(kind, report, origins, self._config),
            origins=origins,
            dropped=dropped,
            metric=report.metric,
            in_loop=report.in_loop,
            scores=report.scores,
            heldout_items=report.heldout_items,
            metrics=dict(report.metrics),
            progress=report.progress,
            train_s=attempt.clock.now() - self._opened_at,
        )

    @property
    def _shard_numel(self) -> int:
        return self._config.shard_mib * 2**20 // 4

    # -- finishing a round ---------------------------------------------------------------------------------------

    def finish(self) -> CommitEntry:
        """Write the open round's commit or wait for it, then take the base that it names.

        Raises `QuorumLost`, `Superseded`, `Preempted`, `BaseDiverged`, or `PayloadCorrupt` if what the commit names
        cannot be read.
        """
        clock, pause, said = self.attempt.clock, _FIRST_PAUSE_S, ""
        self._waiting_since = clock.now()  # time spent training is nobody's delay
        self.attempt.pulse.phase = "waiting"
        if self.elastic:
            self._pace.record(self._latecomers())
        while (entry := self._log.commit(self.round)) is None:
            self.look()
            decision = rounds.decide(self._view(), clock.now(), self._policy)
            if decision.action is rounds.Action.COMMIT:
                self._commit(decision)
                continue
            if decision.action is rounds.Action.GIVE_UP:
                raise QuorumLost(f"round {self.round}: {decision.reason}. Look at their logs.", decision.missing)
            if decision.summary != said:
                log.info("round %d: %s", self.round, decision.reason)
                said = decision.summary
            self._check_leaving()
            if self._answers.confirm(self.attempt.replica_id):  # while there is time for it
                clock.sleep(pause)
                pause = min(1.5 * pause, self._config.timing.poll_s)
        return self._follow(entry)

    def look(self) -> None:
        """Read and verify the open round's answers that are new."""
        self._answers.look(self._expected())

    def closed(self) -> bool:
        """Whether the open round has been committed without waiting for this replica. One small request."""
        return self._log.commit(self.round) is not None

    def may_be_closed(self) -> bool:
        """Whether it is worth a look: nobody commits without one who is on the roster before the deadline."""
        pace = self._pace_of_round()
        if not self.elastic or self.closing:
            return False
        if pace is None or self.attempt.replica_id not in self.roster:
            return True
        return self.attempt.clock.now() - self._opened_at > _LOOK_FROM * pace.deadline_s

    def is_behind(self, steps: int) -> bool:
        """Whether this replica, after `steps` of the round, cannot be done by the deadline while the others are done.

        It then answers with what it has: a part that counts is worth more than a whole that comes late every time.
        """
        pace, elapsed = self._pace_of_round(), self.attempt.clock.now() - self._opened_at
        if not self.elastic or pace is None or not 0 < steps < self._config.round_steps:
            return False
        step_s = elapsed / steps
        return step_s * self._config.round_steps > pace.deadline_s and elapsed + step_s > pace.median_s

    def _pace_of_round(self) -> StragglerDeadline | None:
        """None in the first round of a leg, which waits for everybody to start."""
        return None if self.round == self.attempt.begin.after_round + 1 else self._pace.deadline()

    def _view(self) -> rounds.View:
        answers = [seen.answer for seen in self._answers.seen()]
        if self._quorum_since is None and sum(map(rounds.contributes, answers)) >= self._policy.quorum:
            self._quorum_since = self.attempt.clock.now()
        return rounds.View(
            round=self.round,
            answers=answers,
            roster=self.roster,
            opened_at=self._opened_at,
            waiting_since=self._waiting_since,
            quorum_since=self._quorum_since,
            deadline=self._pace_of_round(),
        )

    def _latecomers(self) -> list[Contribution]:
        """Manifests in the last closed round that its commit does not average: their authors are alive."""
        last = self.last.commit if self.last else None
        averaged = {a.replica_id for a in last.answers if a.averaged} if last else set()
        if last is None or len(averaged) == self._config.replicas:
            return []
        self._late |= {m.replica_id: m for m in self._reader.in_round(last.round, {*averaged, *self._late})}
        return [self._late[replica_id] for replica_id in sorted(self._late)]

    def _expected(self) -> ExpectedContribution:
        return ExpectedContribution(
            round=self.round,
            leg=self.attempt.begin.leg,
            replicas=self._config.replicas,
            base_digest=self.digest,
            fragment=self.fragment,
            numel=sum(self.base.parameters[name].numel() for name in self.fragment_names),
            codec=self._config.codec,
            shard_numel=self._shard_numel,
        )

    def _check_leaving(self) -> None:
        attempt, now = self.attempt, self.attempt.clock.now()
        if attempt.should_leave():
            raise Preempted(f"replica {attempt.replica_id} was asked to leave; what it finished is published.")
        if now - self._looked_for_successor >= _LOOK_FOR_SUCCESSOR_S:
            self._looked_for_successor = now
            attempt.check_superseded()

    # -- committing and following --------------------------------------------------------------------------------

    def _commit(self, decision: rounds.Decision) -> None:
        """Reduce, step and fold the guard; then try to be the one who ends the round."""
        attempt, last = self.attempt, self.last.commit if self.last else None
        if not self._answers.confirm(attempt.replica_id):
            return  # our own payload arrived damaged: look again without it
        guard = last.guard if last else attempt.begin.guard
        named = self._answers.manifests(decision.named)
        valid = self._answers.manifests(
            s.answer.replica_id for s in self._answers.seen() if s.answer.kind != "wrong_base"
        )
        folded = fold_round(guard, self._config.guard, self.round, valid, named)
        conclusion = rounds.conclude(
            decision,
            self.position,
            outer_steps=attempt.outer_steps,
            fired=folded.verdict.reason if folded and folded.verdict.fire else "",
            halt=self._halt_reason(),
        )
        step = self._step([(m, m.weight) for m in named]) if conclusion.applied else self._still()
        commit = Commit(
            **attempt.stamp(),
            round=self.round,
            leg=attempt.begin.leg,
            fragment=self.fragment,
            outer_step=conclusion.outer_step,
            answers=rounds.named_answers(self._view().answers, decision.named if conclusion.applied else ()),
            begin_sha256=attempt.leg.sha256,
            base_digest=step.digest,
            roster=self._next_roster(),
            guard=folded.state if folded else guard,
            verdict=folded.verdict if folded else None,
            applied=conclusion.applied,
            empty_rounds=conclusion.empty_rounds,
            stop=conclusion.stop,
            by=f"replica {attempt.replica_id}, attempt {attempt.number}",
            reason=conclusion.reason,
            previous=self.position.sha256,
        )
        if append_commit(self._store, commit):
            self._written = sha256_hex(commit.to_bytes()), step

    def _next_roster(self) -> tuple[int, ...]:
        latecomers = [manifest.replica_id for manifest in self._latecomers()] if self.elastic else []
        return rounds.next_roster(self._policy, [s.answer.replica_id for s in self._answers.seen()], latecomers)

    def _step(self, named: Sequence[tuple[Contribution, float]]) -> _Step:
        gradients = outer_step.average(self.base, self.fragment_names, named, self._answers.shard)
        base = outer_step.step(self.base, gradients, self._config.outer)
        return _Step(base, base.digest(), gradients)

    def _still(self) -> _Step:
        return _Step(self.base, self.digest, {})

    def _halt_reason(self) -> str:
        halt = self._log.halt(self.attempt.begin.leg)
        return halt.reason if halt else ""

    def _follow(self, entry: CommitEntry) -> CommitEntry:
        """Take the base that the commit names."""
        commit, started_from = entry.commit, self.digest
        check_link(entry, self.position)
        self._pace.record(seen.manifest for seen in self._answers.seen() if seen.manifest)
        if self._written and self._written[0] == entry.sha256:
            step = self._written[1]
        elif commit.applied:
            named = self._answers.named_by(self.round, [a for a in commit.answers if a.averaged])
            self._pace.record(manifest for manifest, _ in named)  # a commit that came first left no time to see them
            try:
                step = self._step(named)
            except PayloadGone:
                return self._jump(entry)
        else:
            step = self._still()
        if step.digest == commit.base_digest:
            base_round = commit.round if commit.applied else self._tip.base_round
            self._tip = Tip(step.base, base_round, step.digest, entry.position, entry)
            self._settle(commit, started_from)
        else:
            self._rebuild_after(commit, step.digest)
        self._conclude_round(commit, step)
        return entry

    def _jump(self, entry: CommitEntry) -> CommitEntry:
        """A payload that the commit names was collected: the log goes on from a newer snapshot, and so do we."""
        commit = entry.commit
        self._rebuild()
        if self.position.round < commit.round:
            raise PayloadCorrupt(
                f"a payload of round {commit.round} in {self._store.url} is gone, and no later snapshot is complete: "
                "it was deleted by hand. Resume the run from an earlier snapshot."
            )
        log.info("round %d: its payloads are collected; went on to round %d", commit.round, self.position.round)
        self._recover()
        self._conclude_round(commit, self._still())
        return entry

    def _settle(self, commit: Commit, started_from: str) -> None:
        """What becomes of our own answer: it counted, or it is owed."""
        answered = self._answered or self.existing_contribution(commit.round)
        if answered is not None:
            self._owed.note(answered, commit, started_from)

    def _rebuild_after(self, commit: Commit, ours: str) -> None:
        """Our arithmetic gave other bits than the commit names: once more from the bucket, then leave."""
        log.error(
            "round %d: base %s here, %s in the commit; rebuilding", commit.round, ours[:12], commit.base_digest[:12]
        )
        try:
            self._rebuild()
            self._recover()
        except BaseDiverged as error:
            raise BaseDiverged(
                f"replica {self.attempt.replica_id} computed base {ours[:12]} after round {commit.round} and again "
                f"another than the commit's from the bucket: {error} The run goes on without this machine."
            ) from None

    def _conclude_round(self, commit: Commit, step: _Step) -> None:
        self.gradients = step.gradients
        if not commit.applied and commit.stop != "completed":
            log.warning("round %d: not applied: %s", commit.round, commit.reason)
        log.info("round %d: committed by %s: %s", commit.round, commit.by, commit.reason)
        if self.stopped:
            self._owed.lapse("the run has stopped")
        self._written = self._quorum_since = self._answered = None
        self._late = {}
        self._opened_at = self.attempt.clock.now()
        self._answers.clear()
        self.attempt.pulse.round = self.round

    # -- snapshots and the end -----------------------------------------------------------------------------------

    def snapshot_if_due(self) -> None:
        """Write the last round's snapshot if it is due and ours to write."""
        if self.last is not None:
            self._snapshots.write_if_due(self.last.commit, self._tip)

    def conclude_leg(self) -> None:
        """After the stop: see to it that the last good base has a snapshot and the leg a result."""
        assert self.last is not None
        self._snapshots.write_last(self.last.commit, self._tip)
        result = rounds.result_of(self.last.commit, self.last.sha256, self.attempt.stamp())
        self._store.create(keys.result(result.leg), result.to_bytes())
