"""Draws samples as small SVG files: horizontal bars with a mark for the limit, and lines. Text only, no library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#2563a8", "#c2410c", "#3f7d3a", "#7a4fa0", "#8a6d1a", "#0f766e")
_WIDTH = 720
_LABELS, _NUMBERS = 230, 110  # space for the words on the left and the numbers on the right
_ROW, _GAP, _TOP = 20, 12, 30
_LIMIT, _MUTED = "#b91c1c", "#9ca3af"


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; with several parts it is stacked."""

    label: str
    parts: Sequence[float]
    low: float | None = None  # least and greatest sample, drawn as a thin line
    high: float | None = None
    limit: float | None = None
    text: str = ""  # at its end; by default the sum
    muted: bool = False  # grey: a peer, not what is measured

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True)
class Group:
    """Bars under one heading, with a scale of their own."""

    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Curve:
    """A named line of (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass
class _Page:
    """Shapes so far, and where the next one goes."""

    parts: list[str] = field(default_factory=list)
    y: float = 0.0

    def text(self, x: float, words: str, anchor: str = "start", extra: str = "") -> None:
        shift = self.y + 14
        self.parts.append(f'<text x="{x:.1f}" y="{shift:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>')

    def svg(self) -> str:
        height = self.y + 10
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
            f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="12">\n'
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def bars(title: str, groups: Sequence[Group], unit: str, legend: Sequence[str] = (), limit: str = "limit") -> str:
    """An SVG of groups of bars. `legend`: names of the stacked parts; `limit`: what the dashed mark means."""
    page = _Page()
    page.text(8, title, extra=' font-size="14" font-weight="600"')
    page.y = _TOP
    marked = any(bar.limit is not None for group in groups for bar in group.bars)
    _legend(page, legend, limit if marked else "")
    for group in groups:
        _group(page, group, unit)
    return page.svg()


def _legend(page: _Page, names: Sequence[str], limit: str) -> None:
    if not names and not limit:
        return
    x = 8.0
    for name, colour in zip(names, COLOURS, strict=False):
        if x + 20 + 7 * len(name) > _WIDTH:
            x, page.y = 8.0, page.y + _ROW
        page.parts.append(f'<rect x="{x:.1f}" y="{page.y + 5:.1f}" width="10" height="10" fill="{colour}"/>')
        page.text(x + 14, name)
        x += 30 + 6.6 * len(name)
    if limit:
        if x + 30 + 7 * len(limit) > _WIDTH:
            x, page.y = 8.0, page.y + _ROW
        y = page.y + 10
        page.parts.append(
            f'<line x1="{x:.1f}" x2="{x + 16:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_LIMIT}" stroke-width="2" '
            'stroke-dasharray="4 2"/>'
        )
        page.text(x + 20, limit)
    page.y += _ROW + _GAP / 2


def _group(page: _Page, group: Group, unit: str) -> None:
    if group.name:
        page.text(8, group.name, extra=' font-weight="600"')
        page.y += _ROW
    longest = max((max(bar.total, bar.high or 0.0, bar.limit or 0.0) for bar in group.bars), default=1.0) or 1.0
    scale = (_WIDTH - _LABELS - _NUMBERS) / longest
    for bar in group.bars:
        _bar(page, bar, scale, unit)
    page.y += _GAP


def _bar(page: _Page, bar: Bar, scale: float, unit: str) -> None:
    page.text(_LABELS - 8, bar.label, "end")
    x, top, bottom = float(_LABELS), page.y + 3, page.y + _ROW - 3
    for part, colour in zip(bar.parts, (_MUTED,) if bar.muted else COLOURS, strict=False):
        width = part * scale
        page.parts.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" fill="{colour}"/>'
        )
        x += width
    if bar.low is not None and bar.high is not None:
        line, centre = f'x1="{_LABELS + bar.low * scale:.1f}" x2="{_LABELS + bar.high * scale:.1f}"', (top + bottom) / 2
        page.parts.append(f'<line {line} y1="{centre:.1f}" y2="{centre:.1f}" stroke="#111827" stroke-width="1.5"/>')
        x = max(x, _LABELS + bar.high * scale)
    if bar.limit is not None:
        at = _LABELS + bar.limit * scale
        page.parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{page.y:.1f}" y2="{page.y + _ROW:.1f}" stroke="{_LIMIT}" '
            'stroke-width="2" stroke-dasharray="4 2"/>'
        )
        x = max(x, at)
    page.text(x + 6, bar.text or f"{bar.total:.3g} {unit}")
    page.y += _ROW


def lines(title: str, curves: Sequence[Curve], x_unit: str, y_unit: str, ticks: int = 0, from_zero: bool = True) -> str:
    """An SVG of curves over a common x axis. `ticks`: marks on it; 0 marks every point. Both axes begin at 0, or where
    the points do.
    """
    page = _Page()
    page.text(8, title, extra=' font-size="14" font-weight="600"')
    page.y = _TOP
    _legend(page, [curve.name for curve in curves if not curve.dashed], next((c.name for c in curves if c.dashed), ""))
    left, right, top, height = 60.0, _WIDTH - 20.0, page.y + 20, 240.0
    points = [point for curve in curves for point in curve.points]
    x_first = 0.0 if from_zero else min((x for x, _ in points), default=0.0)
    x_scale = (right - left) / ((max((x for x, _ in points), default=1.0) - x_first) or 1.0)
    lowest, highest = min((y for _, y in points), default=0.0), max((y for _, y in points), default=1.0)
    tick = _round_up((highest - (0.0 if from_zero else lowest)) / (4 if from_zero else 3) or 1.0)
    y_first = 0.0 if from_zero else tick * math.floor(lowest / tick)
    y_scale = height / (4 * tick)
    for step in range(5):
        value, y = y_first + step * tick, top + height - step / 4 * height
        page.parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        page.parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    marks = sorted({x for x, _ in points})
    if ticks and marks:
        marks = [marks[0] + (marks[-1] - marks[0]) * i / (ticks - 1) for i in range(ticks)]
    for x in marks:
        at = left + (x - x_first) * x_scale
        page.parts.append(f'<text x="{at:.1f}" y="{top + height + 16:.1f}" text-anchor="middle">{x:g}</text>')
    page.parts.append(
        f'<text x="{(left + right) / 2:.1f}" y="{top + height + 34:.1f}" text-anchor="middle">{escape(x_unit)}</text>'
        f'<text x="{left - 6}" y="{top - 8:.1f}" text-anchor="end">{escape(y_unit)}</text>'
    )
    solid = iter(COLOURS)
    for curve in curves:
        colour, dashes = (_LIMIT, ' stroke-dasharray="6 4"') if curve.dashed else (next(solid), "")
        path = " ".join(
            f"{left + (x - x_first) * x_scale:.1f},{top + height - (y - y_first) * y_scale:.1f}"
            for x, y in curve.points
        )
        page.parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dashes} points="{path}"/>')
    page.y = top + height + 40
    return page.svg()


@dataclass(frozen=True)
class Dot:
    """A value, which may be negative, with the interval that it lies in."""

    label: str
    value: float
    half_width: float


@dataclass(frozen=True)
class DotGroup:
    """Dots under one heading."""

    name: str
    dots: Sequence[Dot]


def dots(title: str, groups: Sequence[DotGroup], unit: str) -> str:
    """An SVG of values with intervals on one scale, on which zero is marked."""
    page = _Page()
    page.text(8, title, extra=' font-size="14" font-weight="600"')
    page.y = _TOP
    ends = [dot.value + side * dot.half_width for group in groups for dot in group.dots for side in (-1, 1)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    left = _LABELS + 10.0
    scale = (_WIDTH - _NUMBERS - left - 40) / (high - low or 1.0)
    begin = page.y
    for group in groups:
        page.text(8, group.name, extra=' font-weight="600"')
        page.y += _ROW
        for dot in group.dots:
            _dot(page, dot, left - low * scale, scale, unit)
        page.y += _GAP
    zero = left - low * scale
    page.parts.append(
        f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="{begin:.1f}" y2="{page.y:.1f}" stroke="{_LIMIT}" '
        'stroke-dasharray="4 2"/>'
    )
    return page.svg()


def _dot(page: _Page, dot: Dot, zero: float, scale: float, unit: str) -> None:
    page.text(_LABELS - 8, dot.label, "end")
    centre, x = page.y + _ROW / 2, zero + dot.value * scale
    ends = [zero + (dot.value + side * dot.half_width) * scale for side in (-1, 1)]
    page.parts.append(
        f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{centre:.1f}" y2="{centre:.1f}" stroke="{COLOURS[0]}" '
        f'stroke-width="2"/><circle cx="{x:.1f}" cy="{centre:.1f}" r="4" fill="{COLOURS[0]}"/>'
    )
    page.text(_WIDTH - 8, f"{dot.value:+.3f} {unit}", "end")
    page.y += _ROW


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)
