"""The HTML page about a run: curves, guard, participation, attempts, why it stopped. Pure: renders a `Report`."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from statistics import fmean

from diloco_orchestrator.cli.html_page import document, section, table
from diloco_orchestrator.inspection.charts import Bar, Line, chart, timeline
from diloco_orchestrator.inspection.costs import duration
from diloco_orchestrator.inspection.report import Influence, InfluenceRow, Points, Report, RoundTimes, RunFacts, leaves
from diloco_orchestrator.inspection.status import AttemptRow, RoundRow, RunStatus
from diloco_orchestrator.inspection.terminal import megabytes
from diloco_orchestrator.protocol.head import Head

_MOST_BYTES = 2_000_000  # so that a page can be mailed


def page(report: Report) -> str:
    """The HTML page about a run, of at most 2 MB: a larger one gets fewer points in curves and rows in tables."""
    for detail in (3000, 1000, 300, 100):
        html = _page(report, detail)
        if len(html.encode()) <= _MOST_BYTES:
            break
    return html


def _page(report: Report, detail: int) -> str:
    """The HTML page with at most `detail` points in a drawing, boxes of participation, and rows in a table."""
    status, rows = report.status, report.status.rounds
    trained = [row for row in rows if row.stop != "completed"]  # the final evaluation round only carries scores
    by_now = f". By round {status.round} the guard {status.outlook}" if status.outlook else ""
    began, times = report.facts.began_at, report.times
    ranks = dict.fromkeys(range(report.config.most_replicas), 1) | {
        each.replica_id: each.ranks for each in status.replicas
    }
    parts = [
        ("Loss", _losses(rows, detail), "training metric of each round, and the held-out score of its base"),
        ("Replicas", _by_replica(report, detail), "training metric of each round, as each replica observed it"),
        (
            "Guard",
            _guard(rows, detail),
            f"each statistic as a share of its threshold; one above the line stops the run{by_now}",
        ),
        ("Metrics", _extra(rows, detail), "what the training function observed beside them, mean over the replicas"),
        ("Bytes", _bytes(trained, detail), "payload of each round, in MB (10^6 bytes), all replicas together"),
        (
            "Seconds",
            _seconds(times, detail),
            "from a round's opening to each manifest; from commit to commit",
        ),
        ("Dollars", _dollars(times, detail), "for machines; a leg's cost is spread evenly over its hours"),
        ("Participation", _participation(trained, ranks, detail), "who was averaged in each round"),
        ("Influence", _influence(report.influence, detail), "each outer step taken again without one contribution"),
        ("Judged", _judged(rows, detail), "contributions that count less than their share, or not at all, and why"),
        ("Attempts", _attempts(report.attempts, began, detail), "every process that was launched"),
        ("Rounds", _rounds(rows, detail), "rounds that are not as most are; in all others everybody was averaged"),
        ("Numbers", _numbers(rows, detail), "every round, in the units of the curves"),
        ("Configuration", _configuration(report), "every setting of the run; those in bold are not the default"),
    ]
    return document(f"{status.run_id}: {status.state}", [_summary(report), *(section(*part) for part in parts)])


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
        "payload moved": megabytes(moved),
        "snapshots": ", ".join(map(str, status.snapshots)) or "none",
        "verdict": _verdict(status),
        "address": status.url,
        "head": Head.parse(status.head).short if status.head else "",
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in found.items() if text)
    return f'<dl class="{escape(status.state)}">{items}</dl>'


def _verdict(status: RunStatus) -> str:
    """Guard's verdict after the last round as text, without its reason where that is the run's; empty without one."""
    if (verdict := status.verdict) is None:
        return ""
    why = f": {verdict.reason}" if verdict.reason and verdict.reason not in status.reason else ""
    return f"{verdict.kind.value} after {verdict.folds} judged rounds{why}"


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


# -- curves -----------------------------------------------------------------------------------------------------------


def _losses(rows: Sequence[RoundRow], detail: int) -> str:
    return chart(
        [
            _line("training", rows, lambda row: row.loss if row.loss is not None else row.reward),
            _line("held-out before", rows, lambda row: row.heldout),
        ],
        points=detail,
    )


def _by_replica(report: Report, detail: int) -> str:
    """Drawing with a curve of the training metric per replica; empty for a single replica, whose curve is the run's."""
    if report.config.most_replicas == 1:
        return ""
    return chart(_replica_lines(report.losses), points=detail)


def _replica_lines(curves: Mapping[int, Points]) -> list[Line]:
    return [Line(f"replica {replica_id}", curves[replica_id]) for replica_id in sorted(curves)]


def _guard(rows: Sequence[RoundRow], detail: int) -> str:
    names = list(dict.fromkeys(each.name for row in rows for each in row.statistics))
    lines = [_line(name, rows, lambda row, name=name: _share_of(row, name)) for name in names]  # type: ignore[misc]
    return chart(lines, limit=1.0, points=detail)


def _share_of(row: RoundRow, name: str) -> float | None:
    return next((each.share for each in row.statistics if each.name == name), None)


def _extra(rows: Sequence[RoundRow], detail: int) -> str:
    """Drawing for each of the first `_MOST_METRICS` metrics that the user defined, and a sentence naming the others."""
    found = sorted({name for row in rows for name in row.extra})
    names, others = found[:_MOST_METRICS], found[_MOST_METRICS:]
    each = max(50, detail // max(1, len(names) // 4))
    lines = (_line(name, rows, lambda row, name=name: row.extra.get(name)) for name in names)  # type: ignore[misc]
    words = f"Not drawn, by name: {', '.join(others)}"[:2000]
    more = f"<p>{escape(words)}</p>" if others else ""
    return "".join(chart([line], points=each) for line in lines) + more


_MOST_METRICS = 40


def _bytes(rows: Sequence[RoundRow], detail: int) -> str:
    up, down = (lambda row: row.bytes_up / 1e6), (lambda row: row.bytes_down / 1e6)
    return chart([_line("up", rows, up), _line("down", rows, down)], points=detail)


def _seconds(times: RoundTimes, detail: int) -> str:
    return chart([*_replica_lines(times.answered), Line("commit to commit", times.between)], points=detail)


def _dollars(times: RoundTimes, detail: int) -> str:
    return chart([Line("dollars", times.usd)], points=detail) if any(usd for _, usd in times.usd) else ""


def _line(name: str, rows: Sequence[RoundRow], value: Callable[[RoundRow], float | None]) -> Line:
    found = ((row.round, value(row)) for row in rows)
    return Line(name, [(float(round_), number) for round_, number in found if number is not None])


# -- tables -----------------------------------------------------------------------------------------------------------


def _participation(rows: Sequence[RoundRow], ranks: Mapping[int, int], detail: int) -> str:
    """A table with a strip per replica: one box per round, filled if the replica was averaged in it.

    Where that is more than `detail` boxes, one box stands for several rounds, half filled for some of them.
    `ranks`: processes of each replica, by id.
    """
    if not rows:
        return ""
    step = -(-len(rows) * len(ranks) // detail)
    lines = []
    for replica_id in sorted(ranks):
        there = [replica_id in row.contributors for row in rows]
        boxes = "".join(
            _box(rows[first].round, rows[min(first + step, len(rows)) - 1].round, there[first : first + step])
            for first in range(0, len(rows), step)
        )
        share = f"{sum(there)}/{len(there)}"
        name = f"replica&nbsp;{replica_id}" + (f" ({ranks[replica_id]} ranks)" if ranks[replica_id] > 1 else "")
        lines.append(f"<tr><th>{name}</th><td>{share}</td><td><div class=strip>{boxes}</div></td></tr>")
    return f"<table>{''.join(lines)}</table>"


def _box(first: int, last: int, there: Sequence[bool]) -> str:
    kind = "in" if all(there) else "part" if any(there) else "out"
    rounds = f"round {first}" if first == last else f"rounds {first} to {last}: {sum(there)} of {len(there)}"
    return f'<b class="{kind}" title="{rounds}"></b>'


_INFLUENCE: Sequence[tuple[str, str, Callable[[InfluenceRow], float | None]]] = (
    ("shift", "how far the base would be from what it is, as a share of the outer step", lambda row: row.shift),
    ("cosine", "of its pseudo-gradient with the average of the others", lambda row: row.cosine),
    ("held-out", "score of the base without it, less that of the base", lambda row: row.heldout_change),
)


def _influence(influence: Influence | None, detail: int) -> str:
    """Drawings with a curve per replica of each measure of influence, and a table of their means."""
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
            charts += f"<p>{name}: {words}</p>{chart(lines, points=detail)}"
            head.append(f"mean {name}")
            for line, cell in zip(lines, cells, strict=True):
                cell.append(f"{fmean(y for _, y in line.points):.4g}" if line.points else "-")
    gone = f"<p>{escape(influence.gone_words())}</p>" if influence.gone else ""
    return f"{gone}{charts}{table(head, cells)}" or "<p>No round has an outer step.</p>"


def _attempts(attempts: Sequence[AttemptRow], began_at: float, detail: int) -> str:
    newest = max((at for a in attempts for at in (a.began_at, a.ended_at) if at is not None), default=began_at)
    bars = [
        Bar(
            f"replica {a.replica_id}",
            f"replica {a.replica_id}, attempt {a.attempt}, {a.host or '-'}: {a.why}; {a.ended or 'running or lost'}",
            max(0.0, a.began_at - began_at),
            max(0.0, (newest if a.ended_at is None else a.ended_at) - began_at),
            "running" if a.ended_at is None else "ended" if "(exit code 0)" in a.ended else "failed",
        )
        for a in attempts
        if a.began_at is not None
    ]
    cells = [
        (f"{a.replica_id}", f"{a.attempt}", a.host or "-", a.why, a.ended or "running or lost", _lived(a))
        for a in attempts
    ]
    return timeline(bars[-detail:]) + _newest(("replica", "attempt", "host", "why", "ended", "took"), cells, detail)


def _lived(attempt: AttemptRow) -> str:
    if attempt.began_at is None or attempt.ended_at is None:
        return "-"
    return duration(attempt.ended_at - attempt.began_at)


def _rounds(rows: Sequence[RoundRow], detail: int) -> str:
    cells = [
        (f"{row.round}", f"{row.outer_step}", "yes" if row.applied else "no", row.by, row.remark())
        for row in rows
        if row.remark()
    ]
    return _newest(("round", "outer step", "applied", "by", "why"), cells, detail)


def _judged(rows: Sequence[RoundRow], detail: int) -> str:
    cells = [
        (f"{row.round}", f"{replica_id}", why) for row in rows for replica_id, why in sorted(row.judgements.items())
    ]
    return _newest(("round", "replica", "why"), cells, detail)


def _newest(head: Sequence[str], cells: Sequence[Sequence[str]], detail: int) -> str:
    more = len(cells) - detail
    words = f"<p>The last {detail}; {more} before them are in diloco status --json.</p>" if more > 0 else ""
    return words + table(head, cells[-detail:])


def _numbers(rows: Sequence[RoundRow], detail: int) -> str:
    """The numbers of the curves as a table, collapsed: for readers who cannot see a drawing, and for copying."""
    head = ("round", "training", "held-out before", "tokens", "MB up", "MB down", "seconds", "averaged")
    cells = [
        (
            f"{row.round}",
            _number(row.loss if row.loss is not None else row.reward),
            _number(row.heldout),
            f"{row.tokens}",
            _number(row.bytes_up / 1e6),
            _number(row.bytes_down / 1e6),
            _number(row.train_s),
            f"{len(row.contributors)}",
        )
        for row in rows
    ]
    return _folded(f"{len(rows)} rounds", _newest(head, cells, detail)) if rows else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _configuration(report: Report) -> str:
    lines = []
    for name, value, default in leaves(report.config):
        text = f"{len(value)} items" if name == "heldout_items" else str(value)
        lines.append(
            f"<dt>{escape(name)}</dt><dd>{escape(text) if value == default else f'<b>{escape(text)}</b>'}</dd>"
        )
    return _folded(f"{len(lines)} settings", f"<dl>{''.join(lines)}</dl>")


def _folded(name: str, content: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{content}</details>"
