"""Pictures for docs/inside/kill-switch-figures.md: single runs, the round in which each rule halts, rates as bars."""

from collections.abc import Mapping, Sequence
from html import escape

import guard_rules
import numpy as np
from guard_trajectories import Array, faulty, gao, healthy
from measuring import Sample, pick
from svg_chart import COLOURS, Bar, Group, bars

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 58, 34
_RULE_COLOURS = {"HeldOutGuard": "#9ca3af", "patience 6": "#8a6d1a", "SequentialGuard": "#b91c1c"}
_PHI, _SD, _ROUNDS = 0.5, 0.02, 220


def pictures(seed: int) -> dict[str, str]:
    """By file name: a healthy run, a hack, a Gao curve and a divergence."""
    rng = np.random.default_rng([seed, 7])
    cases = {
        "healthy": (
            "A healthy run: both metrics rise and saturate",
            healthy(rng, "co-rising, saturating", 1, _PHI, _SD),
        ),
        "hack": ("A hack of .005 a round after round 100", faulty(rng, "medium hack", 1, _PHI, _SD)),
        "gao": ("A Gao curve: the gold score peaks in round 150", gao(rng, 1, _PHI, _SD)[0]),
        "divergence": ("A divergence of .05 a round after round 100", faulty(rng, "divergence", 1, _PHI, _SD)),
    }
    return {name: trace(title, *(series[:, 0] for series in pair)) for name, (title, pair) in cases.items()}


def stops(heldout: Array, in_loop: Array) -> dict[str, int]:
    """The round in which the product's own rules halt this run; 0 if they do not."""
    return {
        "HeldOutGuard": guard_rules.updated(heldout, in_loop, 3),
        "patience 6": guard_rules.updated(heldout, in_loop, 6),
        "SequentialGuard": guard_rules.folded(heldout, in_loop)[0],
    }


def trace(title: str, heldout: Array, in_loop: Array, rounds: int | None = None) -> str:
    """One run as two curves, with a vertical line where each rule halts."""
    halts = stops(heldout, in_loop)
    rounds = rounds or max(_ROUNDS, max(halts.values()) + 20)
    heldout, in_loop = heldout[:rounds], in_loop[:rounds]
    low, high = float(min(heldout.min(), in_loop.min())), float(max(heldout.max(), in_loop.max()))

    def x_of(round_: float) -> float:
        return _LEFT + (round_ - 1) / (rounds - 1) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="8" y="18" font-size="14" font-weight="600">{escape(title)}</text>']
    for index, (name, series) in enumerate((("held-out score", heldout), ("training metric", in_loop))):
        points = " ".join(f"{x_of(t + 1):.1f},{y_of(float(v)):.1f}" for t, v in enumerate(series))
        parts.append(f'<polyline fill="none" stroke="{COLOURS[index]}" stroke-width="1.2" points="{points}"/>')
        parts.append(f'<text x="{8 + 120 * index}" y="36" fill="{COLOURS[index]}">{name}</text>')
    for index, (rule, round_) in enumerate(halts.items()):
        words = f"{rule}: round {round_}" if round_ else f"{rule}: no halt"
        parts.append(f'<text x="{250 + 155 * index}" y="36" fill="{_RULE_COLOURS[rule]}">{words}</text>')
        if round_:
            parts.append(
                f'<line x1="{x_of(round_):.1f}" x2="{x_of(round_):.1f}" y1="{_TOP - 8}" y2="{_HEIGHT - _BOTTOM}" '
                f'stroke="{_RULE_COLOURS[rule]}" stroke-width="2" stroke-dasharray="5 3"/>'
            )
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(f'<text x="{_LEFT - 6}" y="{y_of(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for round_ in range(0, rounds + 1, 50):
        at = max(round_, 1)
        parts.append(f'<text x="{x_of(at):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{at}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def overview(samples: Sequence[Sample]) -> str:
    """False halts of each rule in its worst healthy family, by noise."""
    groups = []
    noises = sorted({(s["phi"], s["sd"]) for s in pick(samples, group="healthy")})
    for phi, sd in noises:
        rates: Mapping[str, float] = {
            rule: max(1000 * s["halts"] / s["lived"] for s in pick(samples, group="healthy", phi=phi, sd=sd, rule=name))
            for rule, name in zip(_RULE_COLOURS, ("patience 3", "patience 6", "SequentialGuard"), strict=True)
        }
        name = f"{'white noise' if not phi else f'AR(1) {phi:g}'}, sd {sd:g}"
        groups.append(Group(name, [Bar(rule, [value], limit=1.0) for rule, value in rates.items()]))
    return bars("False halts per 1000 healthy rounds, worst family", groups, "", limit="the bar: 1")
