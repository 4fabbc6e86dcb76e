"""Reads a run from its bucket alone: where it stands, what each round did, how its replicas are.

Reads incrementally, so that a live display costs few requests. Writes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid
from diloco_orchestrator.inspection.costs import Bill, Spent, spent
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import (
    Begin,
    Cancel,
    Claim,
    Commit,
    Contribution,
    Exit,
    Handle,
    Heartbeat,
    Intent,
    Metric,
    Record,
    Result,
    Run,
)
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.run_log.run_log import (
    CommitLog,
    read_begin,
    read_optional,
    read_run,
    read_start,
    start_position,
)
from diloco_orchestrator.store.base import Store

_SILENT_S = 600.0  # between records of one machine, without a heartbeat: it is not there any more

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class RoundRow:
    """One committed round for people and plots."""

    round: int
    outer_step: int
    applied: bool
    stop: str
    by: str
    reason: str
    contributors: list[int]
    without: list[int]  # replicas that an applied round did not average
    late_steps: int  # inner steps of earlier rounds that its contributions carry
    dropped_steps: int  # inner steps of earlier rounds that its authors gave up
    loss: float | None  # mean of what `observe(loss=...)` told, over the contributors
    reward: float | None
    heldout: float | None  # of the base before the round, in the direction of the metric: a loss falls
    proxy_real_gap: float | None
    tokens: int
    bytes_up: int  # payload written by all replicas together, averaged or not
    bytes_down: int  # payload read by all replicas together
    train_s: float  # slowest contributor, from the round's opening to its answer
    warning: str


@dataclass(frozen=True)
class ReplicaRow:
    """One replica's newest attempt, as its own records tell."""

    replica_id: int
    attempt: int
    state: str  # "launching", its phase, or "ended: <reason>"
    round: int
    inner_step: int
    loss: float | None
    exit_code: int | None
    error: str | None


@dataclass(frozen=True)
class AttemptRow:
    """One launched process. Times are of its own machine's clock, for people."""

    replica_id: int
    attempt: int
    why: str  # it was launched
    host: str
    began_at: float | None
    ended: str  # empty while it runs, or if it died without a word
    ended_at: float | None


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands."""

    url: str
    run_id: str
    leg: int
    state: str  # "starting", "running", "completed", "halted", "failed"
    reason: str
    round: int  # the last commit
    outer_step: int
    outer_steps: int  # to take
    replicas: list[ReplicaRow] = field(default_factory=list)
    rounds: list[RoundRow] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    verdict: dict[str, Any] | None = None
    spent: Spent | None = None  # of the newest leg

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RunReader:
    """Follows one run. Each `status()` reads only what is new."""

    def __init__(self, store: Store) -> None:
        self.store = self._store = store
        self._log = CommitLog(store)
        self.run: Run = read_run(store)[0]
        self._commits: list[Commit] = []
        self._rows: list[RoundRow] = []
        self._position: Position | None = None
        self._bills: dict[tuple[int, int], tuple[int, Bill]] = {}  # by (replica, attempt): leg and bill

    def commits(self) -> list[Commit]:
        """All commits so far, the chain checked."""
        if self._position is None:
            start = read_start(self._store)
            if start is None:
                return []
            self._position = start_position(start[1])
        for entry in self._log.after(self._position):
            self._commits.append(entry.commit)
            self._position = entry.position
        return self._commits

    def position(self) -> Position | None:
        """Where the log stands after the last call of `commits`; None before any replica brought a model."""
        return self._position

    def rows(self) -> list[RoundRow]:
        """One row per commit."""
        for commit in self.commits()[len(self._rows) :]:
            self._rows.append(self._row(commit))
        return list(self._rows)

    def result(self, leg: int) -> Result | None:
        """How a leg ended, or None while it goes on."""
        return self._optional(Result, keys.result(leg))

    def status(self) -> RunStatus:
        """Where the newest leg stands, and all rounds of the run."""
        begin, _ = read_begin(self._store)
        rows, result, numbers = self.rows(), self.result(begin.leg), self._all_numbers()
        last = self._commits[-1] if self._commits else None
        state, reason = _state(last, begin, result)
        pulses = self._pulses(numbers)
        return RunStatus(
            url=self._store.url,
            run_id=self.run.run_id,
            leg=begin.leg,
            state=state,
            reason=reason,
            round=last.round if last else 0,
            outer_step=last.outer_step if last and last.leg == begin.leg else begin.from_outer_step,
            outer_steps=begin.from_outer_step + begin.outer_steps,
            replicas=[self._replica(*who, pulse) for who, pulse in pulses.items()],
            rounds=rows,
            snapshots=self.snapshots(),
            verdict=last.verdict if last else None,
            spent=self._spent(numbers, pulses, begin, result.at if result else None),
        )

    def spent(self, begin: Begin, now: float | None = None) -> Spent:
        """What a leg has used up. `now`: wall-clock seconds; by default the newest time in its records."""
        numbers = self._all_numbers()
        pulses = self._pulses(numbers)
        return self._spent(numbers, pulses, begin, now)

    def _spent(
        self,
        numbers: Mapping[int, Sequence[int]],
        pulses: Mapping[tuple[int, int], Heartbeat | None],
        begin: Begin,
        now: float | None,
    ) -> Spent:
        """`pulses`: of the newest attempts. One that was silent for long is dead, whatever its provider told."""
        bills: dict[tuple[int, int], Bill] = {}
        for replica_id, attempts in numbers.items():
            for attempt in attempts:
                bill = self._bill(replica_id, attempt, begin.leg, attempt < attempts[-1])
                if bill is not None:
                    bills[replica_id, attempt] = bill
        beats = {who: pulse.at for who, pulse in pulses.items() if pulse is not None and who in bills}
        seen = [begin.at, *(commit.at for commit in self._commits[-1:]), *beats.values()]
        at = max([*seen, *(bill.ended or bill.began for bill in bills.values())]) if now is None else now
        for who, beat in beats.items():
            if bills[who].ended is None and at - beat > _SILENT_S:
                bills[who] = replace(bills[who], ended=beat)
        return spent(list(bills.values()), begin.at, at)

    def _bill(self, replica_id: int, attempt: int, leg: int, replaced: bool) -> Bill | None:
        """None for an attempt of another leg, or one that was not launched (yet)."""
        who = replica_id, attempt
        known = self._bills.get(who)
        if known is None:
            intent, handle = self.intent(*who), self.handle(*who)
            if intent is None or handle is None:
                return None
            claim = self.claim(*who)
            if claim is None:
                return None  # it waits for a machine, which costs nothing
            known = self._bills[who] = (intent.leg, Bill(handle.hourly_usd, claim.at, None))
        if known[0] == leg and known[1].ended is None:
            ended = self.exit_record(*who)
            following = self.intent(replica_id, attempt + 1) if ended is None and replaced else None
            end = ended.at if ended else following.at if following else None  # one that was killed wrote nothing
            if ended is None and following is not None:
                beat = self.heartbeat(*who)  # nobody may have been there to replace it at once
                end = beat.at if beat is not None and following.at - beat.at > _SILENT_S else end
            known = self._bills[who] = (leg, replace(known[1], ended=end))
        return known[1] if known[0] == leg else None

    def replicas(self) -> list[ReplicaRow]:
        """The newest attempt of every replica."""
        return [self._replica(*who, pulse) for who, pulse in self._pulses(self._all_numbers()).items()]

    def _pulses(self, numbers: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], Heartbeat | None]:
        """Of every replica's newest attempt."""
        newest = ((replica_id, attempts[-1]) for replica_id, attempts in numbers.items())
        return {who: self.heartbeat(*who) for who in newest}

    def _all_numbers(self) -> dict[int, list[int]]:
        """Attempts by replica, oldest first, from one listing."""
        found: dict[int, set[int]] = {}
        for info in self._store.list(keys.REPLICAS):
            key = keys.parse_attempt(info.key)
            if key is not None:
                found.setdefault(key.replica_id, set()).add(key.attempt)
        return {replica_id: sorted(found[replica_id]) for replica_id in sorted(found)}

    def _replica(self, replica_id: int, attempt: int, pulse: Heartbeat | None) -> ReplicaRow:
        ended = self.exit_record(replica_id, attempt)
        state = f"ended: {ended.reason}" if ended else pulse.phase if pulse else "launching"
        return ReplicaRow(
            replica_id=replica_id,
            attempt=attempt,
            state=state,
            round=pulse.round if pulse else 0,
            inner_step=pulse.inner_step if pulse else 0,
            loss=pulse.loss if pulse else None,
            exit_code=ended.code if ended else None,
            error=ended.error if ended else None,
        )

    # -- one attempt's records -----------------------------------------------------------------------------------

    def attempts(self, replica_id: int) -> list[int]:
        """Numbers of a replica's attempts, oldest first."""
        parsed = (keys.parse_attempt(info.key) for info in self._store.list(keys.attempts(replica_id)))
        return sorted({key.attempt for key in parsed if key is not None})

    def all_attempts(self) -> list[AttemptRow]:
        """Every attempt of every replica."""
        pairs = ((i, n) for i in range(self.run.config.replicas) for n in self.attempts(i))
        return [self._attempt(replica_id, attempt) for replica_id, attempt in pairs]

    def _attempt(self, replica_id: int, attempt: int) -> AttemptRow:
        intent, claim = self.intent(replica_id, attempt), self.claim(replica_id, attempt)
        ended = self.exit_record(replica_id, attempt)
        return AttemptRow(
            replica_id=replica_id,
            attempt=attempt,
            why=intent.why if intent else "",
            host=claim.host if claim else "",
            began_at=claim.at if claim else None,
            ended=f"{ended.reason} (exit code {ended.code})" if ended else "",
            ended_at=ended.at if ended else None,
        )

    def intent(self, replica_id: int, attempt: int) -> Intent | None:
        return self._optional(Intent, keys.intent(replica_id, attempt))

    def handle(self, replica_id: int, attempt: int) -> Handle | None:
        return self._optional(Handle, keys.handle(replica_id, attempt))

    def claim(self, replica_id: int, attempt: int) -> Claim | None:
        return self._optional(Claim, keys.claim(replica_id, attempt))

    def heartbeat(self, replica_id: int, attempt: int) -> Heartbeat | None:
        return self._optional(Heartbeat, keys.heartbeat(replica_id, attempt))

    def cancel_record(self, replica_id: int, attempt: int) -> Cancel | None:
        return self._optional(Cancel, keys.cancel(replica_id, attempt))

    def manifest(self, round_: int, replica_id: int) -> Contribution | None:
        """What a replica answered in a round."""
        return self._optional(Contribution, keys.contribution(round_, replica_id))

    def exit_record(self, replica_id: int, attempt: int) -> Exit | None:
        return self._optional(Exit, keys.exit_record(replica_id, attempt))

    def _optional(self, kind: type[R], key: str) -> R | None:
        data = read_optional(self._store, key)
        return None if data is None else kind.from_bytes(data, key)

    # -- snapshots and rounds ------------------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        """Rounds with a complete snapshot, oldest first."""
        found = (keys.parse_snapshot_record(info.key) for info in self._store.list(keys.SNAPSHOTS))
        return sorted(round_ for round_ in found if round_ is not None)

    def heldout_of_base(self, round_: int) -> float | None:
        """The held-out score of the base after a round, as the next commit tells it; None if none did."""
        base, leg = 0, 1
        for commit, row in zip(self.commits(), self.rows(), strict=True):
            if commit.leg != leg:
                leg, base = commit.leg, read_begin(self._store, commit.leg)[0].from_round
            if base == round_ and row.heldout is not None:
                return row.heldout
            base = commit.round if commit.applied else base
        return None

    def _row(self, commit: Commit) -> RoundRow:
        manifests = self._manifests(commit)
        contributors = [answer.replica_id for answer in commit.answers if answer.averaged]
        averaged = [m for m in manifests if m.replica_id in contributors]
        sizes = [sum(shard.size for shard in m.payload.shards) for m in manifests if m.payload]
        verdict = commit.verdict or {}
        value = verdict.get("value")
        sign = -1.0 if manifests and manifests[0].metric == "loss" else 1.0
        return RoundRow(
            round=commit.round,
            outer_step=commit.outer_step,
            applied=commit.applied,
            stop=commit.stop,
            by=commit.by,
            reason=commit.reason,
            contributors=contributors,
            without=sorted(set(range(self.run.config.replicas)) - set(contributors)) if commit.applied else [],
            late_steps=sum(o.steps for m in averaged for o in m.origins if o.round != commit.round),
            dropped_steps=sum(o.steps for m in manifests for o in m.dropped),
            loss=_mean([m.metrics.get("loss") for m in manifests]),
            reward=_mean([m.metrics.get("reward") for m in manifests]),
            heldout=sign * value if isinstance(value, float) else None,
            proxy_real_gap=verdict.get("proxy_real_gap"),  # type: ignore[arg-type]
            tokens=sum(int(m.metrics["tokens"].sum or 0) for m in averaged if "tokens" in m.metrics),
            bytes_up=sum(sizes),
            bytes_down=sum(sizes) * (self.run.config.replicas - 1),
            train_s=max((m.train_s for m in manifests), default=0.0),
            warning=str(verdict.get("warning", "")),
        )

    def _manifests(self, commit: Commit) -> list[Contribution]:
        found = []
        for answer in commit.answers:
            key = keys.contribution(commit.round, answer.replica_id)
            try:
                found.append(Contribution.from_bytes(self._store.get(key), key))
            except (ObjectMissing, RecordInvalid):
                continue  # an answer that counted for nothing, or was collected since
        return found


def _state(last: Commit | None, begin: Begin, result: Result | None) -> tuple[str, str]:
    if result is not None:
        return result.status, result.reason
    if last is None or last.leg != begin.leg:
        return "starting", "no round is committed yet" if begin.leg == 1 else f"leg {begin.leg}: {begin.why}"
    return ("running" if last.stop == "none" else last.stop), last.reason


def _mean(metrics: Sequence[Metric | None]) -> float | None:
    present = [metric for metric in metrics if metric is not None and metric.count]
    if not present or any(metric.sum is None for metric in present):
        return None
    return sum(metric.sum or 0.0 for metric in present) / sum(metric.count for metric in present)
