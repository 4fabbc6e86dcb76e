"""The HTML page about a run: curves, guard, participation, attempts, why it stopped. Pure: renders a `Report`."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from statistics import fmean

from diloco_orchestrator.cli.html_page import document, section, table
from diloco_orchestrator.inspection.charts import Line, chart
from diloco_orchestrator.inspection.report import Influence, InfluenceRow, Report, RunFacts
from diloco_orchestrator.inspection.status import AttemptRow, RoundRow
from diloco_orchestrator.protocol.head import Head


def page(report: Report) -> str:
    """The whole HTML page."""
    status, rows = report.status, report.status.rounds
    trained = [row for row in rows if row.stop != "completed"]  # the final evaluation round only carries scores
    sections = [
        _summary(report),
        section("Loss", _losses(rows), "training metric of each round, and the held-out score of its base"),
        section("Replicas", _by_replica(report), "training metric of each round, as each replica observed it"),
        section(
            "Guard",
            _guard(rows),
            "each statistic as a share of its threshold; one above the line stops the run"
            + (f". By round {status.round} the guard {status.outlook}" if status.outlook else ""),
        ),
        section("Metrics", _extra(rows), "what the training function observed beside them, mean over the replicas"),
        section("Bytes", _bytes(trained), "payload of each round, in MB (10^6 bytes), all replicas together"),
        section("Seconds", _seconds(trained), "slowest contributor, from the round's opening to its answer"),
        section(
            "Participation", _participation(trained, report.config.most_replicas), "who was averaged in each round"
        ),
        section(
            "Influence", _influence(report.influence), "each round's outer step taken again without one contribution"
        ),
        section("Judged", _judged(rows), "contributions that count less than their share, or not at all, and why"),
        section("Attempts", _attempts(report.attempts), "every process that was launched"),
        section("Rounds", _rounds(rows), "rounds that are not as most are; in all others everybody was averaged"),
    ]
    return document(f"{status.run_id}: {status.state}", sections)


def _summary(report: Report) -> str:
    status, config, facts = report.status, report.config, report.facts
    scored = [row.heldout for row in status.rounds if row.heldout is not None]
    moved = sum(row.bytes_up + row.bytes_down for row in status.rounds)
    speed = f", {facts.tokens_per_s:,.0f} a second" if facts.tokens_per_s else ""
    found = {
        "state": f"{status.state}: {status.reason}",
        "ran": facts.entrypoint,
        "code": _code(facts),
        "began": f"{datetime.fromtimestamp(facts.began_at, UTC):%Y-%m-%d %H:%M} UTC, took {duration(facts.seconds)}",
        "replicas": f"{config.replicas}" + "".join(f"; {n} on {name}" for name, n in sorted(facts.machines.items())),
        "outer steps": f"{status.outer_step} of {status.outer_steps}, {config.sync_every} inner steps each",
        "leg": str(status.leg) if status.leg > 1 else "",
        "settings": ", ".join(f"{name}={text}" for name, text in facts.settings.items()),
        "held-out": f"{scored[0]:.4f} → {scored[-1]:.4f}" if scored else "not scored",
        "tokens": f"{sum(row.tokens for row in status.rounds):,}{speed}",
        "cost": _cost(facts),
        "payload moved": f"{moved / 1e6:,.1f} MB",
        "snapshots": ", ".join(map(str, status.snapshots)) or "none",
        "address": status.url,
        "head": Head.parse(status.head).short if status.head else "",
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in found.items() if text)
    return f'<dl class="{escape(status.state)}">{items}</dl>'


def _code(facts: RunFacts) -> str:
    """HTML about the code that ran: git commit, archive digest, and the version of this package."""
    commit, changes, _ = facts.source.partition("+changes")
    parts = [f"commit {commit[:12]}{' with uncommitted changes' if changes else ''}"] if facts.source else []
    parts += [f"archive {facts.code_sha256[:12]}"] if facts.code_sha256 else []
    return ", ".join([*parts, f"diloco-orchestrator {facts.version}"])


def _cost(facts: RunFacts) -> str:
    if facts.usd is None:
        return ""
    unknown = f"; {facts.unpriced} attempts of unknown price not counted" if facts.unpriced else ""
    return f"${facts.usd:.2f} for machines{unknown}"


def duration(seconds: float) -> str:
    """Seconds as text in two units: 48 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // next_size} {next_unit}"
    return f"{whole} s"


# -- curves -----------------------------------------------------------------------------------------------------------


def _losses(rows: Sequence[RoundRow]) -> str:
    return chart(
        [
            _line("training", rows, lambda row: row.loss if row.loss is not None else row.reward),
            _line("held-out before", rows, lambda row: row.heldout),
        ]
    )


def _by_replica(report: Report) -> str:
    """A curve per replica; empty for a single replica, whose curve is the run's."""
    if report.config.most_replicas == 1:
        return ""
    return chart(
        [
            Line(f"replica {replica_id}", [(float(round_), value) for round_, value in report.losses[replica_id]])
            for replica_id in sorted(report.losses)
        ]
    )


def _guard(rows: Sequence[RoundRow]) -> str:
    names = list(dict.fromkeys(each.name for row in rows for each in row.statistics))
    lines = [_line(name, rows, lambda row, name=name: _share_of(row, name)) for name in names]  # type: ignore[misc]
    return chart(lines, limit=1.0)


def _share_of(row: RoundRow, name: str) -> float | None:
    return next((each.share for each in row.statistics if each.name == name), None)


def _extra(rows: Sequence[RoundRow]) -> str:
    names = sorted({name for row in rows for name in row.extra})
    return "".join(chart([_line(name, rows, lambda row, name=name: row.extra.get(name))]) for name in names)  # type: ignore[misc]


def _bytes(rows: Sequence[RoundRow]) -> str:
    return chart(
        [_line("up", rows, lambda row: row.bytes_up / 1e6), _line("down", rows, lambda row: row.bytes_down / 1e6)]
    )


def _seconds(rows: Sequence[RoundRow]) -> str:
    return chart([_line("seconds", rows, lambda row: row.train_s)])


def _line(name: str, rows: Sequence[RoundRow], value: Callable[[RoundRow], float | None]) -> Line:
    found = ((row.round, value(row)) for row in rows)
    return Line(name, [(float(round_), number) for round_, number in found if number is not None])


# -- tables -----------------------------------------------------------------------------------------------------------


def _participation(rows: Sequence[RoundRow], replicas: int) -> str:
    """A table with a strip per replica: one box per round, filled if the replica was averaged in it."""
    if not rows:
        return ""
    lines = []
    for replica_id in range(replicas):
        there = [replica_id in row.contributors for row in rows]
        boxes = "".join(
            f'<b class="{"in" if present else "out"}" title="round {row.round}"></b>'
            for row, present in zip(rows, there, strict=True)
        )
        share = f"{sum(there)}/{len(there)}"
        lines.append(f"<tr><th>replica {replica_id}</th><td>{share}</td><td><div class=strip>{boxes}</div></td></tr>")
    return f"<table>{''.join(lines)}</table>"


_INFLUENCE: Sequence[tuple[str, str, Callable[[InfluenceRow], float | None]]] = (
    ("shift", "how far the base would be from what it is, as a share of the outer step", lambda row: row.shift),
    ("cosine", "of its pseudo-gradient with the average of the others", lambda row: row.cosine),
    ("held-out", "score of the base without it, less that of the base", lambda row: row.heldout_change),
)


def _influence(influence: Influence | None) -> str:
    """A curve per replica of each measured quantity, and a table of their means."""
    if influence is None:
        return ""
    by_replica: dict[int, list[InfluenceRow]] = {}
    for row in influence.rows:
        by_replica.setdefault(row.replica_id, []).append(row)
    charts, head = "", ["replica", "rounds"]
    cells = [[f"{replica_id}", f"{len(by_replica[replica_id])}"] for replica_id in sorted(by_replica)]
    for name, words, value in _INFLUENCE:
        found = {
            i: [(float(row.round), v) for row in by_replica[i] if (v := value(row)) is not None] for i in by_replica
        }
        if any(found.values()):
            lines = [Line(f"replica {replica_id}", found[replica_id]) for replica_id in sorted(found)]
            charts += f"<p>{name}: {words}</p>{chart(lines)}"
            head.append(f"mean {name}")
            for line, cell in zip(lines, cells, strict=True):
                cell.append(f"{fmean(y for _, y in line.points):.4g}" if line.points else "-")
    gone = f"<p>{escape(influence.gone_words())}</p>" if influence.gone else ""
    return f"{gone}{charts}{table(head, cells)}" or "<p>No round has an outer step.</p>"


def _attempts(attempts: Sequence[AttemptRow]) -> str:
    cells = [
        (f"{a.replica_id}", f"{a.attempt}", a.host or "-", a.why, a.ended or "running or lost", _lived(a))
        for a in attempts
    ]
    return table(("replica", "attempt", "host", "why", "ended", "took"), cells)


def _lived(attempt: AttemptRow) -> str:
    """The lifetime of an attempt on its own machine's clock, as text; "-" if its start or end is unknown."""
    if attempt.began_at is None or attempt.ended_at is None:
        return "-"
    return duration(attempt.ended_at - attempt.began_at)


def _rounds(rows: Sequence[RoundRow]) -> str:
    cells = [
        (f"{row.round}", f"{row.outer_step}", "yes" if row.applied else "no", row.by, row.remark())
        for row in rows
        if row.remark()
    ]
    return table(("round", "outer step", "applied", "by", "why"), cells)


def _judged(rows: Sequence[RoundRow]) -> str:
    cells = [
        (f"{row.round}", f"{replica_id}", why) for row in rows for replica_id, why in sorted(row.judgements.items())
    ]
    return table(("round", "replica", "why"), cells)
