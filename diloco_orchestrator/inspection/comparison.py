"""`Comparison`: several runs beside each other, as plain data, each read from its own bucket."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.inspection.report import RunFacts, facts_of, leaves
from diloco_orchestrator.inspection.status import RoundRow, RunReader, RunStatus
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Verdict
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots


@dataclass(frozen=True)
class Point:
    """One value of a metric in one round, and what the run had used by then."""

    round: int
    tokens: int  # of averaged work
    usd: float | None  # of machines; a leg's cost is spread evenly over its hours. None if a leg's price is not known
    value: float


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison, as read from its bucket. Scores have the metric's own sign: a loss falls."""

    name: str  # the last part of its address; the whole address where several end alike
    url: str
    run_id: str
    state: str  # as of `RunStatus`
    reason: str
    metric: str  # what is scored on held-out items, "loss" or "reward"; empty without held-out items
    heldout_digest: str  # of the held-out items; scores over other items are not comparable
    final: float | None  # the last held-out score; None if there is none; so below
    best: float | None
    best_round: int | None  # after which the model has the best score, as `pull --round` names it
    outer_steps: int  # taken
    tokens: int
    hours: float  # of all legs together
    bytes: int  # payload written and read by all replicas
    usd: float | None  # of machines whose price is known; None if none is
    unpriced: int  # attempts whose price is not known
    verdict: str  # of the guard, after the last round
    bases: Sequence[str | None]  # digests: of the first base, and of that after round 1 and so on
    settings: Mapping[str, str]  # all of the newest leg by dotted name, and what ran: code, version, machines
    heldout: Sequence[Point]  # score of the base that a round began with
    training: Mapping[str, Sequence[Point]]  # mean over the replicas by metric, "loss" or "reward"


@dataclass(frozen=True)
class Comparison:
    """Several runs to compare, in the order in which they were named, and why others could not be read."""

    runs: Sequence[ComparedRun]
    missing: Mapping[str, str]  # why a run could not be read, by URL

    def differing(self) -> dict[str, list[str]]:
        """The settings that are not the same in all runs, by name, with each run's value; "-" where a run has none."""
        names = sorted({name for run in self.runs for name in run.settings})
        found = {name: [run.settings.get(name, "-") for run in self.runs] for name in names}
        return {name: values for name, values in found.items() if len(set(values)) > 1}

    def metrics(self) -> list[str]:
        """The held-out metrics of the compared runs ("loss", "reward"), in alphabetical order."""
        return sorted({run.metric for run in self.runs if run.heldout})

    def warnings(self) -> list[str]:
        """Sentences about compared runs whose held-out scores cannot be compared, because items or metrics differ."""
        found = []
        for metric in self.metrics():
            items = {run.heldout_digest for run in self.runs if run.metric == metric}
            if len(items) > 1:
                found.append(
                    f"These runs score {len(items)} different sets of held-out items: a {metric} of one set says "
                    "nothing about one of another."
                )
        if len(self.metrics()) > 1:
            found.append("Some runs score a loss and some a reward: each metric has curves of its own.")
        return found

    def bits(self) -> list[str]:
        """A sentence about each run but the first: whether its bases (models) are those of the first, bit for bit."""
        return [_bits(self.runs[0], run) for run in self.runs[1:]]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "differing": self.differing(), "warnings": self.warnings(), "bits": self.bits()}


def compare(urls: Sequence[str], open_: Callable[[str], RunReader]) -> Comparison:
    """Read the runs at `urls` to compare them. A run that cannot be read (`DilocoError`) is listed with the reason.

    `open_`: makes the reader of a run from its URL.
    """
    runs, missing = list[ComparedRun](), dict[str, str]()
    for url in dict.fromkeys(urls):
        try:
            runs.append(_read(open_(url)))
        except DilocoError as error:
            missing[url] = f"{type(error).__name__}: {error}"
    names = [run.name for run in runs]
    alike = [replace(run, name=run.name if names.count(run.name) == 1 else run.url) for run in runs]
    return Comparison(alike, missing)


def _read(reader: RunReader) -> ComparedRun:
    status, start = reader.status(), reader.log.start()
    facts, set_ = facts_of(reader, status), start.record.heldout if start else None
    scores = [row.heldout for row in status.rounds if row.heldout is not None]
    heldout, training = _curves(reader)
    return ComparedRun(
        name=status.url.rstrip("/").rpartition("/")[2],
        url=status.url,
        run_id=status.run_id,
        state=status.state,
        reason=status.reason,
        metric=set_.metric if set_ else "",
        heldout_digest=set_.digest if set_ else "",
        final=scores[-1] if scores else None,
        best=status.model.best_heldout,
        best_round=status.model.best_round,
        outer_steps=status.outer_step,
        tokens=sum(row.tokens for row in status.rounds),
        hours=facts.seconds / 3600,
        bytes=sum(row.bytes_up + row.bytes_down for row in status.rounds),
        usd=facts.usd,
        unpriced=facts.unpriced,
        verdict=_said(status.verdict, reader.commits()),
        bases=_bases(reader),
        settings=_settings(reader, status, facts, set_),
        heldout=heldout,
        training=training,
    )


def _bits(first: ComparedRun, other: ComparedRun) -> str:
    """Whether the bases of two runs are equal, by their digests, and where they first differ."""
    names = f"{other.name} and {first.name}"
    if not first.bases or not other.bases:
        return f"{names}: one has no first base yet."
    both = enumerate(zip(first.bases, other.bases, strict=False))
    known = [(round_, ours == theirs) for round_, (ours, theirs) in both if None not in (ours, theirs)]
    equal = [round_ for round_, _ in takewhile(lambda each: each[1], known)]
    if not equal:
        return f"{names} begin with different bases."
    if len(equal) < len(known):
        return f"{names} are equal bit for bit up to the base after round {equal[-1]}, and differ from there on."
    if equal[-1] + 1 == len(first.bases) == len(other.bases):
        return f"{names} are equal bit for bit, in the base that each ends with and in all before."
    return f"{names} are equal bit for bit as far as both are known: up to the base after round {equal[-1]}."


def _bases(reader: RunReader) -> list[str | None]:
    """Digests of the bases that each round began with, as its commit names them, None where it names none.

    After them that of the last base, unless the last round has not changed it. It is that of the round's snapshot, a
    claim of its writer that no commit confirms.
    """
    start, commits = reader.log.start(), reader.commits()
    if start is None:
        return []
    known = [start.record.base_digest, *(commit.base_digest for commit in commits[1:])]
    if not commits or not commits[-1].applied:
        return known
    said = ConfirmedSnapshots(reader.log).said_digests(len(commits))
    return [*known, said.pop() if len(said) == 1 else None]


def _said(verdict: Verdict | None, commits: Sequence[Commit]) -> str:
    if verdict is None:
        return "did not judge"
    if verdict.kind.stops:
        return f"{verdict.kind.value}: {verdict.reason}"
    stopped = [str(commit.round) for commit in commits if commit.fired]
    return f"stopped it in round {', '.join(stopped)}; resumed since" if stopped else "did not stop it"


def _settings(reader: RunReader, status: RunStatus, facts: RunFacts, heldout: HeldoutSet | None) -> dict[str, str]:
    """The run's settings since its last start or resume, as text by dotted name, with the training function's
    arguments.
    """
    found: dict[str, str] = {}
    for name, value, _ in leaves(reader.log.configs.of(status.leg)):
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": str(value[key]) for key in value}
        elif name != "heldout_items":
            found[name] = str(value)
    return found | {
        "code": " ".join(filter(None, (facts.source[:12], facts.code_sha256[:12]))) or "-",
        "diloco-orchestrator": facts.version,
        "held-out items": f"{heldout.items}, {heldout.digest[:12]}" if heldout else "-",
        "machines": ", ".join(f"{n} x {name}" for name, n in sorted(facts.machines.items())) or "-",
    }


def _curves(reader: RunReader) -> tuple[list[Point], dict[str, list[Point]]]:
    """The held-out points of a run, and those of its training metrics by name."""
    spent = reader.spent_over_time()
    tokens, usd = 0, spent.by(1, 0.0)
    heldout, training = list[Point](), dict[str, list[Point]]()
    commits = {commit.round: commit for commit in reader.commits()}
    for row in reader.rows():  # all held-out scores on one scale
        commit = commits[row.round]
        if row.heldout is not None:
            heldout.append(Point(row.round, tokens, usd, row.heldout))
        tokens, usd = tokens + row.tokens, spent.by(commit.leg, commit.at)
        for metric, value in _trained(row):
            training.setdefault(metric, []).append(Point(row.round, tokens, usd, value))
    return heldout, training


def _trained(row: RoundRow) -> Iterator[tuple[str, float]]:
    for metric, value in (("loss", row.loss), ("reward", row.reward)):
        if value is not None:
            yield metric, value
