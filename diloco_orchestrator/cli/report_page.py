"""One self-contained HTML page about a run: curves, guard, participation, attempts, why it stopped.

Pure: renders a `Report` as one string. No script and no external resource, so that the page can be mailed; readable on
a phone.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from statistics import fmean

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
        _section("Loss", _losses(rows), "training metric of each round, and the held-out score of its base"),
        _section("Replicas", _by_replica(report), "training metric of each round, as each replica observed it"),
        _section(
            "Guard",
            _guard(rows),
            "each statistic as a share of its threshold; one above the line stops the run"
            + (f". By round {status.round} the guard {status.outlook}" if status.outlook else ""),
        ),
        _section("Metrics", _extra(rows), "what the training function observed beside them, mean over the replicas"),
        _section("Bytes", _bytes(trained), "payload of each round, in MB (10^6 bytes), all replicas together"),
        _section("Seconds", _seconds(trained), "slowest contributor, from the round's opening to its answer"),
        _section(
            "Participation", _participation(trained, report.config.most_replicas), "who was averaged in each round"
        ),
        _section(
            "Influence", _influence(report.influence), "each round's outer step taken again without one contribution"
        ),
        _section("Judged", _judged(rows), "contributions that count less than their share, or not at all, and why"),
        _section("Attempts", _attempts(report.attempts), "every process that was launched"),
        _section("Rounds", _rounds(rows), "rounds that are not as most are; in all others everybody was averaged"),
    ]
    title = f"{escape(status.run_id)}: {escape(status.state)}"
    return _PAGE.format(title=title, body="\n".join(section for section in sections if section))


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
        "places": "; ".join(status.place_words()),
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


def _section(name: str, content: str, words: str) -> str:
    if not content:
        return ""
    return f'<section id="{name.lower()}"><h2>{name}</h2><p>{escape(words)}</p>{content}</section>'


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
    return f"{gone}{charts}{_table(head, cells)}" or "<p>No round has an outer step.</p>"


def _attempts(attempts: Sequence[AttemptRow]) -> str:
    cells = [
        (f"{a.replica_id}", f"{a.attempt}", a.host or "-", a.why, a.ended or "running or lost", _lived(a))
        for a in attempts
    ]
    return _table(("replica", "attempt", "host", "why", "ended", "took"), cells)


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
    return _table(("round", "outer step", "applied", "by", "why"), cells)


def _judged(rows: Sequence[RoundRow]) -> str:
    cells = [
        (f"{row.round}", f"{replica_id}", why) for row in rows for replica_id, why in sorted(row.judgements.items())
    ]
    return _table(("round", "replica", "why"), cells)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    """A table cell; one with a sentence gets a width readable on a phone."""
    return f"<td{' class=words' if len(text) > _LONG_CELL else ''}>{escape(text)}</td>"


_LONG_CELL = 10  # characters

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1c1e21; background: #fff; margin: 0 auto; max-width: 720px;
       padding: 16px; }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1.05rem; margin: 1.6em 0 0; }}
p {{ color: #5c6470; margin: 0 0 .4em; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; border-left: 4px solid #8b95a1;
     padding-left: 12px; }}
dl.completed {{ border-color: #3f7d3a; }} dl.halted {{ border-color: #d08700; }} dl.failed {{ border-color: #b91c1c; }}
dt {{ color: #5c6470; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
svg {{ width: 100%; height: auto; }} svg text {{ font-size: 12px; fill: #5c6470; }} .grid {{ stroke: #e6e8eb; }}
.legend span {{ margin-right: 1em; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 12px; height: 12px; margin-right: 5px; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: 2px 10px 2px 0; vertical-align: top; }} th {{ font-weight: 600; }}
.words {{ min-width: 13em; overflow-wrap: anywhere; }}
.strip {{ display: flex; flex-wrap: wrap; }} .strip b {{ width: 9px; height: 14px; margin: 1px; }}
.in {{ background: #2563a8; }} .out {{ background: #e1e4e8; }}
@media (max-width: 520px) {{
svg text {{ font-size: 20px; }} th, td {{ font-size: 14px; }}
dl {{ grid-template-columns: 1fr; }} dt {{ margin-top: .4em; }} }}
@media (prefers-color-scheme: dark) {{
body {{ color: #e4e6ea; background: #16181c; }} .grid {{ stroke: #2c3036; }} .out {{ background: #33383f; }}
p, dt, svg text {{ color: #9aa3ae; fill: #9aa3ae; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
