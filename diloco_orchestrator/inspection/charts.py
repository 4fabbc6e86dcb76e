"""Curves over rounds, tokens or dollars as SVG, for pages and for files beside a model card. Pure: numbers to text."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, cycle
from math import ceil, floor, isfinite

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 34  # room for texts of 20 units, as a page on a phone has them
_NAMES, _ROW = 124, 23  # of a timeline: room for the name of a row, such as "replica 100", and from row to row
_MOST_TICKS = 6
_COLOURS = ("#2563a8", "#c2410c", "#3f7d3a", "#7a4fa0", "#8a6d1a", "#0f766e", "#be185d", "#475569")


@dataclass(frozen=True)
class Line:
    """A named curve of a chart: (x, value) for each round that has a value; x is the round unless an axis is given."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart: its name with the unit, and the smallest distance of two marks on it."""

    name: str  # with its unit
    least: float = 1.0  # the smallest distance of two marks

    def words(self, x: float) -> str:
        """The text for a value on this axis: a round in full, anything else in at most seven characters."""
        return f"{x:.0f}" if self is ROUNDS else short(x)

    def ticks(self, first: float, last: float) -> list[float]:
        """At most six values within [first, last] to mark on this axis."""
        marks = round_ticks(ceil(first / self.least), floor(last / self.least))
        return [mark * self.least for mark in marks]


ROUNDS, TOKENS, DOLLARS = Axis("round"), Axis("tokens"), Axis("dollars", 1e-4)


def chart(lines: Sequence[Line], limit: float | None = None, axis: Axis = ROUNDS, points: int = 3000) -> str:
    """An HTML figure with a legend and an SVG of the curves, and a dashed line at `limit`; empty if there is no point.

    Its attribute `data-curves` has the same as JSON, for the page's script. `points`: at most so many of all curves are
    drawn; of a longer curve the lowest and the highest of each stretch. Values that are not finite are left out.
    """
    lines = _drawable(lines, points)
    if not lines:
        return ""
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(line.name)}</span>'
        for line, colour in zip(lines, cycle(_COLOURS), strict=False)
    )
    what = escape(", ".join(line.name for line in lines))
    drawing = (
        f'<svg aria-label="{what} by {axis.name}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"{_drawn(_drawable(lines, _IN_SVG), limit, axis)}</svg>"
    )
    told = {
        "what": f"{', '.join(line.name for line in lines)} by {axis.name}",
        "axis": axis.name,
        "whole": axis.least >= 1,  # whether marks are at whole numbers
        "limit": limit,
        "lines": [
            {"name": line.name, "colour": colour, "x": [_brief(x) for x, _ in line.points],
             "y": [_brief(y) for _, y in line.points]}
            for line, colour in zip(lines, cycle(_COLOURS), strict=False)
        ],
    }  # fmt: skip
    data = escape(json.dumps(told, separators=(",", ":"), allow_nan=False))
    return f'<figure data-curves="{data}"><div class="legend">{legend}</div>{drawing}</figure>'


def _brief(value: float) -> float:
    brief = float(f"{value:.6g}")
    return int(brief) if brief.is_integer() and abs(brief) < 1e15 else brief


def _drawable(lines: Sequence[Line], most: int) -> list[Line]:
    """The curves with finite points only, `most` in all; curves without any are left out."""
    finite = [Line(line.name, [(x, y) for x, y in line.points if isfinite(x) and isfinite(y)]) for line in lines]
    kept = [line for line in finite if line.points]
    each = max(4, most // max(1, len(kept)))
    return [Line(line.name, _thinned(line.points, each)) for line in kept]


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """At most `most` of the points, in their order: of each of equal stretches the lowest and the highest."""
    if len(points) <= most:
        return points
    stretches = most // 2
    kept: list[int] = []
    for number in range(stretches):
        stretch = range(len(points) * number // stretches, len(points) * (number + 1) // stretches)
        ends = (min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1]))
        kept += sorted(set(ends))
    return [points[i] for i in kept]


_IN_SVG, _WITH_DOTS = 1200, 150  # points that an SVG has at the most, and up to which each has a dot with its value


@dataclass(frozen=True)
class Bar:
    """A stretch of time, drawn as a bar in a row of a timeline."""

    row: str
    name: str
    begin_s: float  # seconds since the beginning of the timeline
    end_s: float
    kind: str  # its class in the page's style: "ended", "failed" or "running"


def timeline(bars: Sequence[Bar]) -> str:
    """An SVG with one row of bars for each name of a row, over minutes or hours; empty if there is no bar."""
    if not bars:
        return ""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    last = max(bar.end_s for bar in bars) or 1.0
    name, unit = ("hours", 3600.0) if last > 7200 else ("minutes", 60.0) if last > 120 else ("seconds", 1.0)
    x_of = _scale(0.0, last / unit, _NAMES, _WIDTH - _RIGHT)
    foot, parts = _ROW * len(rows) + 4, list[str]()
    for bar in bars:
        left, right = x_of(bar.begin_s / unit), x_of(bar.end_s / unit)
        parts.append(
            f'<rect class="bar {bar.kind}" x="{left:.1f}" y="{_ROW * rows.index(bar.row) + 3}" height="17" rx="2" '
            f'width="{max(2.0, right - left - 1):.1f}"><title>{escape(bar.name)}</title></rect>'
        )
    parts += [
        f'<text x="{_NAMES - 6}" y="{_ROW * number + 17}" text-anchor="end">{escape(row)}</text>'
        for number, row in enumerate(rows)
    ]
    parts += [
        f'<text x="{x_of(x):.1f}" y="{foot + 17}" text-anchor="middle">{x:g}</text>'
        for x in Axis(name, 0.1).ticks(0.0, last / unit)
    ]
    parts.append(f'<text x="{_NAMES - 6}" y="{foot + 17}" text-anchor="end">{name}</text>')
    return (
        f'<figure><svg aria-label="attempts by {name}" viewBox="0 0 {_WIDTH} {foot + 24}" role="img">'
        f"{''.join(parts)}</svg></figure>"
    )


def svg_file(lines: Sequence[Line]) -> str:
    """A stand-alone SVG file of curves, with their names in the picture; empty if there is no point."""
    lines = _drawable(lines, _IN_SVG)
    if not lines:
        return ""
    names = "".join(
        f'<text x="{_LEFT + 150 * index}" y="14" fill="{colour}">{escape(line.name)}</text>'
        for index, (line, colour) in enumerate(zip(lines, cycle(_COLOURS), strict=False))
    )
    style = ".grid { stroke: #e6e8eb } text { font: 12px sans-serif }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + 20}" width="{_WIDTH}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{names}'
        f'<g transform="translate(0 20)" fill="#5c6470">{_drawn(lines)}</g></svg>\n'
    )


def _drawn(lines: Sequence[Line], limit: float | None = None, axis: Axis = ROUNDS) -> str:
    points = [point for line in lines for point in line.points]
    values = [value for _, value in points] + ([limit] if limit is not None else [])
    x_of = _scale(min(x for x, _ in points), max(x for x, _ in points), _LEFT, _WIDTH - _RIGHT)
    y_of = _scale(min(values), max(values), _HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(axis, x_of, y_of, points, values)]
    for line, colour in zip(lines, cycle(_COLOURS), strict=False):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += (
            []
            if len(points) > _WITH_DOTS
            else [
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5" fill="{colour}">'
                f"<title>{escape(line.name)}, {axis.name} {axis.words(x)}: {y:.4g}</title></circle>"
                for x, y in line.points
            ]
        )
    if limit is not None:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_of(limit):.1f}" y2="{y_of(limit):.1f}" '
            'stroke="#b91c1c" stroke-dasharray="6 4"/>'
        )
    return "".join(parts)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _axes(
    axis: Axis,
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
    points: Sequence[tuple[float, float]],
    values: Sequence[float],
) -> str:
    low, high = min(values), max(values)
    ticks = [low + (high - low) * i / 4 for i in range(5)] if high > low else [low]
    grid = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_of(v):.1f}" y2="{y_of(v):.1f}" class="grid"/>'
        f'<text x="{_LEFT - 6}" y="{y_of(v) + 4:.1f}" text-anchor="end">{short(v)}</text>'
        for v in ticks
    )
    foot = _HEIGHT - _BOTTOM
    marks = "".join(
        f'<line x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{foot}" y2="{foot + 4}" class="grid"/>'
        f'<text x="{x_of(x):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{axis.words(x)}</text>'
        for x in axis.ticks(min(x for x, _ in points), max(x for x, _ in points))
    )
    name = f'<text x="{_LEFT - 6}" y="{_HEIGHT - 10}" text-anchor="end">{axis.name}</text>'
    return grid + marks + name


def round_ticks(first: int, last: int) -> list[int]:
    """At most six numbers of [first, last] to mark on a chart's axis: multiples of 1, 2 or 5 times a power of ten."""
    step = next(step for step in _steps() if last // step - (first - 1) // step <= _MOST_TICKS)
    return list(range(-(-first // step) * step, last + 1, step))


def _steps() -> Iterator[int]:
    for power in count():
        for digit in (1, 2, 5):
            yield digit * 10**power


def short(value: float) -> str:
    """A number in at most seven characters, as 0.0123, 12.3, 4.56k or 7e-08."""
    if value == 0 or 1e-3 <= abs(value) < 999.5:
        return f"{value:.3g}" if not 0 < abs(value) < 1e-2 else f"{value:.2g}"
    for limit, suffix in ((1e6, "k"), (1e9, "M"), (1e12, "G")):
        if 999.5 <= abs(value) < limit * 0.9995:
            return f"{value / (limit / 1e3):.3g}{suffix}"
    return f"{value:.0e}"
