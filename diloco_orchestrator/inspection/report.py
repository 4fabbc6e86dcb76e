"""`Report`: all data on the page about a run, read from its bucket. `cli.report_page` renders it."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Self

from pydantic import BaseModel

from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ObjectMissing, RecordInvalid
from diloco_orchestrator.inspection.status import AttemptRow, RunReader, RunStatus
from diloco_orchestrator.protocol.attempt_records import Claim
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.segments import Manifests


@dataclass(frozen=True)
class InfluenceRow:
    """One contribution's effect on the base in one round, compared with the same round without it."""

    round: int
    replica_id: int
    shift: float | None  # ‖base without it - base‖ / ‖outer step‖; None if the step is zero
    cosine: float | None  # of its pseudo-gradient with the average of the others; None if it is alone, or one is zero
    heldout_change: float | None = None  # score of the base without it less that of the base; None: not scored


@dataclass(frozen=True)
class Influence:
    """The influence of each contribution in all applied rounds with stored payloads, by round and replica id."""

    rows: list[InfluenceRow] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # applied rounds whose payloads were deleted

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_csv(self) -> str:
        """The influences as CSV: a header and one line each, numbers in six digits; missing values are empty."""
        text = io.StringIO()
        written = csv.writer(text, lineterminator="\n")
        names = [each.name for each in fields(InfluenceRow)]
        written.writerow(names)
        for row in self.rows:
            values = (getattr(row, name) for name in names)
            written.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
        return text.getvalue()

    def gone_words(self) -> str:
        """A sentence naming the rounds left out because their payloads were deleted; empty if there are none."""
        if not self.gone:
            return ""
        first, last = self.gone[0], self.gone[-1]
        span = f"{first} to {last}" if last - first + 1 == len(self.gone) > 1 else ", ".join(map(str, self.gone))
        return f"Without {'round' if len(self.gone) == 1 else 'rounds'} {span}: payloads were deleted by retention."


Points = Sequence[tuple[int, float]]  # (round, value)


@dataclass(frozen=True)
class RunFacts:
    """Code, machines and duration of a run, for its report. Times are seconds since 1970 on the writers' clocks."""

    entrypoint: str
    settings: Mapping[str, str]  # by dotted name, where they are not the default
    source: str  # the git commit that the launcher ran; empty where it was in no repository
    code_sha256: str  # of the code archive; empty where replicas share the launcher's machine
    version: str  # of this package
    began_at: float
    seconds: float  # of all legs together, from their begins to their last records
    tokens_per_s: float | None  # of averaged work, over these seconds; None if no tokens were observed
    usd: float | None  # of machines whose price is known, all legs together; None if no price is known
    unpriced: int  # attempts whose price is not known
    machines: Mapping[str, int]  # how many replicas' newest attempts ran on hardware of this name


@dataclass(frozen=True)
class RoundTimes:
    """Seconds and dollars of the rounds, from their commits alone."""

    answered: Mapping[int, Points]  # by replica id: seconds from a round's opening to its manifest, on its clock
    between: Points  # seconds from the commit before to this one, on their writers' clocks; not of a leg's first round
    usd: Points  # dollars for machines until the commit; empty where a price is not known


@dataclass(frozen=True)
class Report:
    """The contents of the page about a run, read at one moment."""

    status: RunStatus
    config: RunConfig
    facts: RunFacts
    attempts: Sequence[AttemptRow]
    losses: Mapping[int, Points]  # the training metric that each replica observed, by replica id
    times: RoundTimes
    influence: Influence | None = None  # None: not asked for

    @classmethod
    def read(cls, reader: RunReader, background: Background, influence: Influence | None = None) -> Self:
        """Read all data of the report, several manifests at a time. Raises as `RunReader.status` does."""
        status, attempts = reader.status(), reader.all_attempts()
        losses = losses_by_replica(reader.log, background)
        config, facts = reader.run.config, facts_of(reader, status)
        return cls(status, config, facts, attempts, losses, times_of(reader), influence)


def facts_of(reader: RunReader, status: RunStatus) -> RunFacts:
    """Code, machines and duration of a run, from its records and those of its attempts."""
    run = reader.run
    spent = [reader.spent(begin) for begin in reader.log.begins()]
    seconds = sum(leg.hours for leg in spent) * 3600
    tokens = sum(row.tokens for row in status.rounds)
    priced = [leg.usd for leg in spent if leg.usd is not None]
    claims = (reader.attempts.claim(row.replica_id, row.attempt) for row in status.replicas)
    return RunFacts(
        entrypoint=run.config.entrypoint,
        settings=settings_of(run.config),
        source=run.source,
        code_sha256=run.code_sha256 or "",
        version=run.package_version,
        began_at=run.at,
        seconds=seconds,
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        usd=sum(priced) if priced else None,
        unpriced=sum(leg.unpriced for leg in spent),
        machines=Counter(_machine_of(claim) for claim in claims if claim is not None),
    )


def settings_of(config: RunConfig) -> dict[str, str]:
    """The settings that differ from the default, by dotted name, without those that the report shows elsewhere."""
    found = {
        name: str(value) for name, value, default in leaves(config) if value != default and name not in _SHOWN_APART
    }
    if "heldout_items" in found:
        found["heldout_items"] = f"{len(config.heldout_items)} items"
    return found


_SHOWN_APART = ("entrypoint", "replicas", "rounds", "sync_every")


def leaves(node: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value, default) of every setting below `node`, in alphabetical order."""
    for name in sorted(type(node).model_fields):
        value, default = getattr(node, name), type(node).model_fields[name].get_default(call_default_factory=True)
        if isinstance(value, BaseModel) and type(value) is type(default):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, default


def _machine_of(claim: Claim) -> str:
    gpu = claim.hardware.get("gpu", "")
    threads = "1 thread" if claim.threads == 1 else f"{claim.threads} threads"
    cpu = f"{claim.hardware.get('cpu', '') or 'unknown CPU'}, {threads}"
    return f"{gpu} ({cpu})" if gpu else cpu


def times_of(reader: RunReader) -> RoundTimes:
    """Seconds and dollars of all rounds but the final evaluation round, in which nobody trains."""
    spent = reader.spent_over_time()
    answered, between, usd = dict[int, list[tuple[int, float]]](), list[tuple[int, float]](), list[tuple[int, float]]()
    before: Commit | None = None
    for commit in reader.log.each_commit():
        if commit.stop == "completed":
            continue
        for answer in commit.answers:
            if answer.train_s:
                answered.setdefault(answer.replica_id, []).append((commit.round, answer.train_s))
        if before is not None and before.leg == commit.leg:
            between.append((commit.round, max(0.0, commit.at - before.at)))
        if (until := spent.by(commit.leg, commit.at)) is not None:
            usd.append((commit.round, until))
        before = commit
    return RoundTimes(answered, between, usd)


def losses_by_replica(log: RunLog, background: Background) -> dict[int, list[tuple[int, float]]]:
    """The mean loss that each replica observed in each round, or reward if no replica observed a loss.

    They are in the manifests that commits name; where segments, objects with many manifests, exist, those are read. A
    manifest that is missing or has another digest than in the commit gives no point; `verify` reports it.
    """
    found: dict[str, dict[int, list[tuple[int, float]]]] = {"loss": {}, "reward": {}}
    for manifest in _manifests(log, background):
        for metric, curves in found.items():
            seen = manifest.metrics.get(metric)
            if seen is not None and seen.count and seen.sum is not None:
                curves.setdefault(manifest.replica_id, []).append((manifest.round, seen.mean))
    return found["loss"] or found["reward"]


def _manifests(log: RunLog, background: Background) -> Iterator[Contribution]:
    """The readable manifests of all commits, oldest first, in replica_id order."""
    log.segments.refresh()
    segment: Manifests | None = None
    single, calls = ContributionReader(log.store), list[Callable[[], Contribution | None]]()
    for commit in log.each_commit():
        if segment is None or not segment.segment.first <= commit.round <= segment.segment.last:
            segment = log.segments.manifests(commit.round)
        for answer in commit.answers:
            line = None if segment is None else segment.find(answer.manifest_sha256)
            calls.append(partial(_readable, single, commit.round, answer, line))
    yield from filter(None, in_parallel(background, calls))


def _readable(reader: ContributionReader, round_: int, answer: Answer, line: bytes | None) -> Contribution | None:
    """A manifest from `line`, its bytes in an object that joins many, or from its own object; None if unreadable."""
    try:
        if line is not None:
            return Contribution.from_bytes(line, "a segment's line")
        return reader.exact(round_, answer.replica_id, answer.manifest_sha256)
    except (RecordInvalid, ObjectMissing):
        return None
