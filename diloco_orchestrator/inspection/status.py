"""The status of a run: its state, and one row for each round, replica and attempt, as plain data.

Reads incrementally through `run_log`, so that a live display costs few requests. Printing is left to `cli`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco_orchestrator.allreduce.dealing import bytes_down_of_round, scatters
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.guard.robust import scale_of
from diloco_orchestrator.guard.round_fold import outlook as guard_outlook
from diloco_orchestrator.inspection.costs import CostReader, EndForecast, LegCost, Spent, end_forecast, leg_cost
from diloco_orchestrator.inspection.places import PlaceRow, PlaceSpeeds, newest_decision, place_rows
from diloco_orchestrator.protocol.attempt_records import BY_HAND, Heartbeat, reason_of
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.legs import DefaultBases
from diloco_orchestrator.protocol.records import Begin, Commit, Out, Result, RoundMetrics, Run
from diloco_orchestrator.protocol.round_metrics import never_observed, not_finite_words, sign_of
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.protocol.start_records import HeldoutSet, Start
from diloco_orchestrator.protocol.verdict import Statistic, Verdict
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.default_base import check_not_lost, default_base, url_of_snapshot
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.local_files import why_no_room


@dataclass(frozen=True)
class RoundRow:
    """One committed round as a row of the status: its metrics, contributors and bytes, from its commit alone."""

    round: int
    outer_step: int  # outer steps in the base after it
    applied: bool
    stop: str
    by: str
    reason: str
    contributors: list[int]
    without: list[int]  # replicas that should have contributed, and that an applied round did not average
    late_steps: int  # inner steps of earlier rounds that its contributions carry
    dropped_steps: int  # inner steps of earlier rounds that its contributions list as dropped
    loss: float | None  # mean of what was passed to `observe(loss=...)`, over all responses
    reward: float | None
    heldout: float | None  # score of the base before the round, with the metric's own sign: a loss falls
    proxy_real_gap: float | None  # training gain minus held-out gain, as the guard judges it
    tokens: int  # of the contributors
    bytes_up: int  # payload written by all replicas together, averaged or not
    bytes_down: int  # read by all replicas together, if nobody read anything twice: payloads and reduced shards
    train_s: float  # of the slowest response, from the round's opening to its manifest
    warning: str  # of the guard, and of metrics that are not finite or were never observed
    statistics: tuple[Statistic, ...] = ()  # of the guard after the round, each with the threshold above which it fires
    # Why replicas' contributions are clipped, quarantined or none at all, by replica id.
    judgements: Mapping[int, str] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)  # mean over replicas of `observe(extra=...)`, by name

    def remark(self) -> str:
        """Unusual facts of the round: not applied, replicas missing, late steps, a warning; empty if there are none."""
        if self.stop != "none" or not self.applied:
            return self.reason
        found = [f"without {', '.join(map(str, self.without))}"] if self.without else []
        found += [f"replica {replica_id} {why}" for replica_id, why in sorted(self.judgements.items())]
        found += [f"{self.late_steps} late inner steps came in"] if self.late_steps else []
        found += [f"{self.dropped_steps} late inner steps dropped"] if self.dropped_steps else []
        return "; ".join([*found, *([self.warning] if self.warning else [])])


@dataclass(frozen=True)
class ReplicaRow:
    """One replica's newest attempt as a row of the status, from its heartbeat and exit records."""

    replica_id: int
    attempt: int
    state: str  # "launching", its phase, "ended: <reason>", or "by hand" for a loop that sends no heartbeat
    round: int
    inner_step: int
    loss: float | None
    exit_code: int | None
    error: str | None
    why: str = ""  # why the attempt was launched: how the one before it ended
    false_end: str = ""  # how result.json contradicts the commits of the leg, as a sentence; empty if it does not
    moved_at: float = 0.0  # newest stamp of its records: seconds since 1970, on its writers' clocks
    waits_for: str = ""  # why it has not started, in its provider's words, if "launching"
    ranks: int = 1  # its processes, which train one model
    ended_after: int = 0  # the last round whose commit it had followed when it ended, often later than `round`

    def words(self, *, stopped: bool = False) -> str:
        """The replica's state as text, and before it trains the reason why it does not yet.

        `stopped`: the run has, so that an attempt without an exit record is no longer what its records say.
        """
        if stopped and not self.state.startswith(("ended: ", BY_HAND)):
            return "never started" if self.state == "launching" else f"no exit record, last seen {self.state}"
        waits_for = self.waits_for or _FIRST_MINUTE.get(self.state, "")
        return f"{self.state}: {waits_for}" if waits_for else self.state


_FIRST_MINUTE = {
    "launching": "no heartbeat yet; machine, packages and torch come first",
    "starting": "importing torch and your code, building the model",
    BY_HAND: "started by its user, a loop that sends no heartbeat",
}


@dataclass(frozen=True)
class AttemptRow:
    """One launched process as a row of the status. Times are seconds since 1970 on its machine's clock."""

    replica_id: int
    attempt: int
    why: str  # why it was launched
    host: str
    began_at: float | None
    ended: str  # reason and exit code; empty while it runs, or if it wrote no exit record
    ended_at: float | None


@dataclass(frozen=True)
class DefaultModel:
    """The model that commands use if the user names no round, and the newest one. Scores with the metric's own sign."""

    round: int
    heldout: float | None  # held-out score; None if none was measured
    newest_round: int
    newest_heldout: float | None
    after_verdict: bool  # the guard halted the run: this is the best model by held-out score, not the newest
    best_round: int | None = None  # the model with the best held-out score of all; None if none was measured
    best_heldout: float | None = None

    def words(self) -> str:
        """The default model and the newest one, with their scores, as text; and the best one, where it is another."""
        if not self.after_verdict:
            newest = f"round {self.round}, the newest{_scored(self.heldout)}"
            if self.best_round in (None, self.round):
                return newest
            return f"{newest}; the best by held-out score is round {self.best_round}{_scored(self.best_heldout)}"
        best = f"round {self.round}, the best by held-out score{_scored(self.heldout)}"
        if self.round == self.newest_round:
            return f"{best}, and the newest"
        return f"{best}; the newest is round {self.newest_round}{_scored(self.newest_heldout)}"


def _scored(heldout: float | None) -> str:
    return "" if heldout is None else f" ({heldout:.4g})"


@dataclass(frozen=True)
class RunStatus:
    """The state of a run since its last start or resume (its newest leg), and all rounds of the run."""

    url: str
    run_id: str
    leg: int
    state: str  # "starting", "running", "completed", "halted", "failed"
    reason: str
    round: int  # of the last commit
    outer_step: int  # outer steps taken
    outer_steps: int  # outer steps that the leg ends with
    replicas: list[ReplicaRow] = field(default_factory=list)
    rounds: list[RoundRow] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    verdict: Verdict | None = None  # of the last commit
    outlook: str = ""  # what the guard's rule can judge by now: rounds it needs, or the fall that would halt soon
    spent: LegCost | None = None  # of the newest leg
    to_the_end: EndForecast | None = None  # of the newest leg, while it runs
    places: list[PlaceRow] = field(default_factory=list)  # where its machines are and were
    placed: str = ""  # the newest decision about a replica's place; empty where there is one place
    override_guard: str = ""  # why the guard began anew in the newest leg; empty if it went on
    settings: dict[str, Any] = field(default_factory=dict)  # of the newest leg, where they differ from run.json
    model: DefaultModel = DefaultModel(0, None, 0, None, False)
    signed_by: str = ""  # public key of a signed run, as run.json names it
    head: str = ""  # round and sha256 of the last commit, for `verify --expect`; empty before the first
    # Objects that were passed over because they cannot be read, or are of a leg that did not begin: "key: why".
    unreadable: list[str] = field(default_factory=list)
    lost: str = ""  # the log's first record that was deleted, as a sentence; empty if none is known, or the leg is over
    false_end: str = ""  # how result.json contradicts the commits of the leg, as a sentence; empty if it does not
    moved_at: float = 0.0  # newest stamp of the leg's records and heartbeats: seconds since 1970, on writers' clocks
    hung_after_s: float = 180.0  # without a heartbeat until a coordinator replaces a replica
    no_room: str = (
        ""  # why a folder's disk cannot take another round, with what to do; empty if it can or the run is over
    )

    def place_words(self) -> list[str]:
        """Lines about the places (executors) of a run whose supervision chooses among several; else empty."""
        if not self.placed:
            return []
        return [*(row.words() for row in self.places), f"last decision about places: {self.placed}"]

    @property
    def is_by_hand(self) -> bool:
        """Whether all replicas are loops that their users start (`ObjectStoreManager`), without a coordinator."""
        return bool(self.replicas) and all(each.state == BY_HAND for each in self.replicas)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RunReader:
    """Reads one run from its bucket alone. Each call fetches only records that are new or that change.

    `log` reads the run's records, `attempts` those of its processes. The constructor raises `NoSuchRun` if the folder
    holds no run. `log` (argument): a log at hand, whose cached records are not fetched again.
    """

    def __init__(self, store: Store, log: RunLog | None = None) -> None:
        self.log = log or RunLog(store)
        self.attempts = AttemptRecords(self.log.store)
        self._costs = CostReader(self.attempts)
        self._begin_rows()

    def __repr__(self) -> str:
        return f"RunReader({self.store.url!r})"

    def _begin_rows(self) -> None:
        self._new_rows = self.new_rows()
        self._rows: list[RoundRow] = []
        # Scale of the newest held-out scores (`scale_of`), and the first of the rows that have its level.
        self._scale: tuple[float | None, float] = (None, 0.0)
        self._since = 0
        self._committed_at: list[tuple[int, float]] = []  # leg and time of every commit
        self._bases = DefaultBases()
        self._speeds = PlaceSpeeds(self.attempts.place)
        self._rows_in_doubt = self.log.in_doubt

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def run(self) -> Run:
        """The record `run.json`: the frozen configuration of the run."""
        return self.log.run

    def commits(self) -> Sequence[Commit]:
        """All commits so far, oldest first. Raises `RecordInvalid` where the hash chain breaks."""
        return self.log.commits()

    def snapshots(self) -> list[int]:
        """The rounds with a complete snapshot, oldest first; 0 is the first base."""
        return self.log.snapshots()

    def snapshot_url(self, round_: int) -> str:
        """The URL of the folder with a round's snapshot; of several versions, that of the confirmed one."""
        return url_of_snapshot(self.log, round_)

    def rows(self) -> list[RoundRow]:
        """One `RoundRow` per commit, oldest first, all in memory. Raises `RecordInvalid` for a broken hash chain."""
        start = None
        for commit, row in self._new_rows.with_commits():
            start = start or self.log.start()  # a LIST each time while few replicas have begun
            self._rescale(commit, start.record.heldout if start else None)
            self._rows.append(row)
            self._committed_at.append((commit.leg, commit.at))
            self._bases.add(commit, self._begin(commit.leg))
            self._speeds.add(commit)
        if self.log.in_doubt and not self._rows_in_doubt:  # rows that were made before may be of void commits
            self._begin_rows()
            return self.rows()
        return list(self._rows)

    def _rescale(self, commit: Commit, scored: HeldoutSet | None) -> None:
        """Put the rows before `commit` on the scale of its held-out score, if that has other shares but the same level.

        A share that is scored for the first time changes the mean over all items: no round would show so. `scored`: the
        run's held-out items.
        """
        if scored is None or commit.guard is None:
            return
        (level, shift), before = scale_of(commit.guard, scored), self._scale
        if level != before[0]:
            self._since = len(self._rows)
        elif shift != before[1]:
            more = sign_of(scored) * (shift - before[1])
            self._rows[self._since :] = [
                row if row.heldout is None else replace(row, heldout=row.heldout + more)
                for row in self._rows[self._since :]
            ]
        self._scale = level, shift

    def model(self) -> DefaultModel:
        """Model that commands use if the user names no round. Raises `RecordInvalid` where the hash chain breaks, and
        `ObjectMissing` where commits were deleted.
        """
        begins = self.log.begins()
        check_not_lost(self.log, begins)
        self.rows()
        return self._model(begins)

    def _model(self, begins: Sequence[Begin]) -> DefaultModel:
        """The model that commands use if the user names no round, according to the commits read so far."""
        found = default_base(self.log, self._bases, begins)
        score, newest = self._shown(found.round), self._shown(found.newest)
        best = self._bases.scores.best(self._bases.bases(begins))
        of_best = self._shown(best)
        return DefaultModel(
            found.round, score, found.newest, newest, found.after_verdict, None if of_best is None else best, of_best
        )

    def _begin(self, leg: int) -> Begin:
        return self.log.begin_of(leg).record

    def new_rows(self) -> "NewRows":
        """A reader that returns the rows of all commits at first, later of those since its last call; it keeps none."""
        return NewRows(self.log)

    def status(self) -> RunStatus:
        """The state since the last start or resume, its replicas and snapshots, and all rounds of the run."""
        begins = self.log.begins()
        begin = begins[-1]
        snapshots = self.snapshots()  # read first: they show the log whether segments can exist
        result, rows, numbers = self.log.result(begin.leg), self.rows(), self.attempts.all_numbers()
        newest = self.log.newest(begin)
        last = newest.commit if newest else None
        state, reason = _state(last, begin, result, self._is_over_by_hand(last, begin))
        lost = "" if result else self.log.lost(begin)
        beats = self._newest_heartbeats(numbers)
        costs, at = self._costs.of_leg(numbers, beats, begin, last, result.at if result else None)
        spent = leg_cost(list(costs.values()), begin.at, at)
        taken = last.outer_step if last and last.leg == begin.leg else begin.from_outer_step
        outer_steps = begin.from_outer_step + begin.outer_steps
        replicas = self._replicas(beats, begin.leg)
        committed_at = [at for leg, at in self._committed_at if leg == begin.leg]
        return RunStatus(
            url=self.store.url,
            run_id=self.run.run_id,
            leg=begin.leg,
            state=state,
            reason=lost or reason,
            lost=lost,
            false_end="" if result else self.log.false_end(begin),
            round=last.round if last else 0,
            outer_step=taken,
            outer_steps=outer_steps,
            replicas=replicas,
            rounds=rows,
            snapshots=snapshots,
            verdict=last.verdict if last else None,
            outlook=guard_outlook(last.guard, self.run.config.guard) if last else "",
            spent=spent,
            to_the_end=end_forecast(spent, committed_at, outer_steps - taken) if state == "running" else None,
            places=place_rows(costs, at, begin.leg, self._speeds, self.attempts.place),
            placed=newest_decision(self.attempts, numbers, begin.leg),
            override_guard=begin.override_guard,
            settings=dict(begin.settings),
            model=self._model(begins),
            head=str(Head(newest.commit.round, newest.sha256)) if newest else "",
            signed_by="" if self.run.signed_by is None else self.run.signed_by.key,
            unreadable=self._unreadable(),
            moved_at=max([begin.at, *([last.at] if last else []), *(each.moved_at for each in replicas)]),
            hung_after_s=self.run.config.retry.hung_after_s,
            no_room="" if result else why_no_room(Path(self.store.url), rows[-1].bytes_up if rows else 0),
        )

    def has_stopped(self) -> bool:
        """Whether the run has stopped since its last start or resume: by a stop commit, or by a result record."""
        leg = self.log.begins()[-1]
        newest = self.log.newest(leg)
        stopped = newest is not None and newest.commit.leg == leg.leg and newest.commit.stop != "none"
        if stopped or self.log.result(leg.leg) is not None:
            return True
        return self._is_over_by_hand(newest.commit if newest else None, leg)

    def is_by_hand(self) -> bool:
        """Whether users start all replicas themselves (`ObjectStoreManager.join`): there is no coordinator then."""
        numbers = self.attempts.all_numbers()
        intents = [self.attempts.intent(replica_id, attempts[-1]) for replica_id, attempts in numbers.items()]
        return bool(intents) and all(intent is not None and intent.executor == BY_HAND for intent in intents)

    def _is_over_by_hand(self, last: Commit | None, begin: Begin) -> bool:
        """Whether loops that their users start have taken all outer steps of a leg: nobody writes its result then."""
        if last is None or last.leg != begin.leg or last.outer_step < begin.from_outer_step + begin.outer_steps:
            return False
        return not self.log.false_end(begin) and self.is_by_hand()

    def _unreadable(self) -> list[str]:
        """The objects that this reader has ignored so far, each with the reason."""
        found = self.log.passed_over() | self.attempts.unreadable
        return [*(f"{key}: {found[key]}" for key in sorted(found)), *self.log.unsigned()]

    def spent(self, begin: Begin, now: float | None = None) -> LegCost:
        """The machine cost of a leg (start or resume to stop) until `now`, in seconds since 1970.

        None: until the newest time in the leg's records.
        """
        numbers = self.attempts.all_numbers()
        beats = self._newest_heartbeats(numbers)
        newest = self.log.newest(begin)
        costs, at = self._costs.of_leg(numbers, beats, begin, newest.commit if newest else None, now)
        return leg_cost(list(costs.values()), begin.at, at)

    def spent_over_time(self) -> Spent:
        """The machine cost of the run as a function of time, from the costs of its legs."""
        begins = self.log.begins()
        return Spent({begin.leg: begin.at for begin in begins}, {begin.leg: self.spent(begin) for begin in begins})

    def all_attempts(self) -> list[AttemptRow]:
        """One row of facts for every attempt, by replica id, oldest first."""
        numbers = self.attempts.all_numbers()
        return [self._attempt(replica_id, attempt) for replica_id in numbers for attempt in numbers[replica_id]]

    def heldout_of_base(self, round_: int) -> float | None:
        """The held-out score of the base after a round, with the metric's own sign; None if no commit scored it."""
        self.rows()
        return self._shown(round_)

    def bases(self) -> list[int]:
        """The rounds whose bases the newest base descends from, oldest first; 0 is the first base."""
        self.rows()
        return self._bases.bases(self.log.begins())

    def best_scored(self) -> int | None:
        """The round whose base has the best held-out score of all to resume from; None if none is scored."""
        best = self._bases.scores.best(self.bases())
        return None if self._bases.scores.score(best) is None else best

    def _shown(self, base: int) -> float | None:
        """The held-out score of the base after a round, as the row of the round that scored it has it."""
        scored_in = self._bases.scores.scored_in(base)
        return None if scored_in is None else self._rows[scored_in - self._rows[0].round].heldout

    # -- rows ----------------------------------------------------------------------------------------------------

    def _newest_heartbeats(self, numbers: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], Heartbeat | None]:
        """The heartbeat of every replica's newest attempt, by (replica id, attempt)."""
        newest = ((replica_id, attempts[-1]) for replica_id, attempts in numbers.items())
        return {who: self.attempts.heartbeat(*who) for who in newest}

    def _replicas(self, beats: Mapping[tuple[int, int], Heartbeat | None], leg: int) -> list[ReplicaRow]:
        out = self.log.known_out(leg)
        config = self.log.configs.of(leg)
        return [self._replica(*who, beat, out.get(who[0]), config.ranks_of(who[0])) for who, beat in beats.items()]

    def _replica(
        self, replica_id: int, attempt: int, beat: Heartbeat | None, out: Out | None, ranks: int
    ) -> ReplicaRow:
        intent, ended = self.attempts.intent(replica_id, attempt), self.attempts.exit(replica_id, attempt)
        if ended is None and out is not None and out.attempt == attempt:
            state = f"ended: it {out.reason}"  # without a record of its own
        else:
            unseen = BY_HAND if intent is not None and intent.executor == BY_HAND else "launching"
            state = f"ended: {reason_of(ended)}" if ended else beat.phase if beat else unseen
        waiting = self.attempts.waiting(replica_id, attempt) if state == "launching" else None
        return ReplicaRow(
            replica_id=replica_id,
            attempt=attempt,
            state=state,
            round=beat.round if beat else 0,
            inner_step=beat.inner_step if beat else 0,
            loss=beat.loss if beat else None,
            exit_code=ended.code if ended else None,
            error=ended.error if ended else None,
            why=intent.why if intent else "",
            moved_at=max((record.at for record in (beat, intent, ended, waiting) if record is not None), default=0.0),
            waits_for=waiting.reason if waiting else "",
            ranks=ranks,
            ended_after=ended.round if ended else 0,
        )

    def _attempt(self, replica_id: int, attempt: int) -> AttemptRow:
        who = replica_id, attempt
        intent, claim, ended = self.attempts.intent(*who), self.attempts.claim(*who), self.attempts.exit(*who)
        return AttemptRow(
            replica_id=replica_id,
            attempt=attempt,
            why=intent.why if intent else "",
            host=claim.host if claim else "",
            began_at=claim.at if claim else None,
            ended=f"{reason_of(ended)} (exit code {ended.code})" if ended else "",
            ended_at=ended.at if ended else None,
        )


class NewRows:
    """A reader of the rows (`RoundRow`) of a run's commits, oldest first. It keeps none.

    Each call of `read` continues after the one before.
    """

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._position: Position | None = None
        self._roster: dict[int, tuple[int, ...]] = {}  # whom the next round waits for, by leg

    def read(self) -> Iterator[RoundRow]:
        """The rows of the commits not read yet. Raises `RecordInvalid` where the hash chain breaks."""
        for _, row in self.with_commits():
            yield row

    def with_commits(self) -> Iterator[tuple[Commit, RoundRow]]:
        """The commits not read yet, with their rows. Raises `RecordInvalid` where the hash chain breaks."""
        start = self._log.start()
        if start is None:
            return
        for entry in self._log.settled(self._position or Position.at_start(start.sha256)):
            self._position = entry.position
            leg = entry.commit.leg
            # Vacant ids of a run that is scaled are not expected.
            expected = {*range(self._log.configs.of(leg).replicas), *self._roster.get(leg, ())}
            self._roster[leg] = entry.commit.roster
            row = _row(expected, start.record.heldout, entry.commit)
            if entry.commit.checks is not None and scatters(self._log.configs.of(leg), start.record):
                row = replace(row, bytes_down=self._scattered(start.record, entry.commit, row.bytes_up))
            yield entry.commit, row

    def _scattered(self, start: Start, commit: Commit, payload_bytes: int) -> int:
        """Bytes that all replicas of a round by scatter-reduce read together if none of those that responded failed."""
        lengths = [b - a for a, b in shard_ranges(start.fragment_numels[commit.fragment], start.shard_numel)]
        there = max(3, sum(each.attempt > 0 for each in commit.answers))
        return bytes_down_of_round(payload_bytes, lengths, commit.average_codec, there)


def _row(expected: set[int], scored: HeldoutSet | None, commit: Commit) -> RoundRow:
    """The row of the status for a commit. `expected`: ids of the replicas that should contribute to its round."""
    averaged = [answer for answer in commit.answers if answer.averaged]
    contributors = [answer.replica_id for answer in averaged]
    figures = commit.figures or RoundMetrics()
    verdict = commit.verdict
    value = verdict.value if verdict else None
    return RoundRow(
        round=commit.round,
        outer_step=commit.outer_step,
        applied=commit.applied,
        stop=commit.stop,
        by=str(commit.by),
        reason=commit.reason,
        contributors=contributors,
        without=sorted(expected - set(contributors)) if commit.applied else [],
        late_steps=sum(o.steps for answer in averaged for o in answer.origins if o.round != commit.round),
        dropped_steps=figures.dropped_steps,
        loss=figures.loss,
        reward=figures.reward,
        heldout=None
        if value is None or scored is None
        else sign_of(scored) * (value + scale_of(commit.guard or {}, scored)[1]),
        proxy_real_gap=verdict.proxy_real_gap if verdict else None,
        tokens=figures.tokens,
        bytes_up=figures.payload_bytes,
        bytes_down=figures.payload_bytes * (len(expected) - 1),
        train_s=max((answer.train_s for answer in commit.answers), default=0.0),
        warning="; ".join([*([verdict.warning] if verdict and verdict.warning else []), *_of_metrics(scored, commit)]),
        statistics=verdict.statistics if verdict else (),
        judgements=judgements(commit),
        extra=figures.extra,
    )


def _of_metrics(scored: HeldoutSet | None, commit: Commit) -> list[str]:
    """Sentences about invalid metrics that replicas observed in a round."""
    figures, metric = commit.figures or RoundMetrics(), scored.metric if scored else ""
    said = not_finite_words(figures)
    seen = {name for name in ("loss", "reward") if getattr(figures, name) is not None or name in figures.not_finite}
    if commit.applied and seen and metric and metric not in seen:
        said.append(never_observed(metric, [*seen, *figures.extra]))
    return said


def judgements(commit: Commit) -> dict[int, str]:
    """Reasons why replicas' contributions to a commit, or their scores, count less or not at all, by replica id."""
    found = {a.replica_id: f"{a.kind}: {a.reason}" for a in commit.answers if a.reason}
    found |= {each.replica_id: f"clipped: {each.reason}" for each in commit.clipped}
    for said in commit.discounted:
        found[said.replica_id] = "; ".join(filter(None, [found.get(said.replica_id, ""), f"scores: {said.reason}"]))
    for each in commit.figures.disagreeing if commit.figures else ():
        found[each.replica_id] = f"left out of round {each.round}: {each.reason}"
    return found | {each.replica_id: f"left out: {each.reason}" for each in commit.quarantined}


def _state(last: Commit | None, begin: Begin, result: Result | None, over_by_hand: bool) -> tuple[str, str]:
    """State (one of `RunStatus.state`) since the last start or resume, and reason. `last`: the run's newest commit."""
    if result is not None:
        return result.status, result.reason
    if over_by_hand:
        return "completed", "every outer step is taken"
    if last is None or last.leg != begin.leg:
        return "starting", "no round is committed yet" if begin.leg == 1 else f"leg {begin.leg}: {begin.why}"
    return ("running" if last.stop == "none" else last.stop), last.reason
