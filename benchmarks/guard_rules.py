"""The guard's rules over many simulated runs at once: twins of the product's folds, on arrays (rounds, runs).

`check_twins` shows that they equal the product's own folds, run by run and round by round. Constants come from the
product.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from guard_trajectories import Array
from numpy.typing import NDArray

from diloco_orchestrator.guard import (
    Evidence,
    HeldOutGuard,
    SequentialGuard,
)
from diloco_orchestrator.guard.channels import early, falls, hacking_gap, noise, outliers, step_down
from diloco_orchestrator.guard.channels.metrics import MetricChannels
from diloco_orchestrator.guard.sequential_v3 import SteadyNoise
from diloco_orchestrator.protocol.verdict import Verdict

Rounds = NDArray[np.int64]  # the round of a halt by run, 0 if there was none
_KEPT = noise.KEPT
CHANNELS = ("", "step down", "fall", "gap", "early collapse", "new low")


def heldout_guard(heldout: Array, in_loop: Array, patience: int = 3, gap: float = 0.10) -> Rounds:
    """Where `HeldOutGuard` with its other settings at their defaults fires."""
    guard = HeldOutGuard(decline_patience=patience, max_proxy_real_gap=gap)
    alpha, eps, warm_up = guard.ema_alpha, guard.rise_eps, guard.min_steps
    held, trained = heldout[0], in_loop[0]
    first_held, first_trained = held, trained
    streak, fired = np.zeros(heldout.shape[1], int), np.zeros(heldout.shape[1], int)
    for t in range(1, len(heldout)):
        held_before, trained_before = held, trained
        held = alpha * held + (1 - alpha) * heldout[t]
        trained = alpha * trained + (1 - alpha) * in_loop[t]
        declining, rising = held - held_before < -eps, trained - trained_before > eps
        streak = np.where(declining, streak + rising, 0)
        if t + 1 >= warm_up:
            fires = (streak >= patience) | ((trained - first_trained) - (held - first_held) > gap)
            fired = np.where((fired == 0) & fires, t + 1, fired)
    return fired


def patience(heldout: Array, rounds: int) -> Rounds:
    """Where a callback stops that waits so many rounds for a score above the best one."""
    best, since, fired = heldout[0], np.zeros(heldout.shape[1], int), np.zeros(heldout.shape[1], int)
    for t in range(1, len(heldout)):
        since = np.where(heldout[t] > best, 0, since + 1)
        best = np.maximum(best, heldout[t])
        fired = np.where((fired == 0) & (since >= rounds), t + 1, fired)
    return fired


@dataclass
class Halts:
    rounds: Rounds
    channels: NDArray[np.int64]

    def at(self, round_: int, where: NDArray[np.bool_], channel: int) -> None:
        new = (self.rounds == 0) & where
        self.rounds = np.where(new, round_, self.rounds)
        self.channels = np.where(new, channel, self.channels)


class _Groups:
    """Twin of the groups of `guard.channels.early`: the last rounds before each end, and all rounds since each."""

    def __init__(self, values: Array, feet: dict[int, NDArray[np.bool_]]) -> None:
        """`feet`: where the first value is left out of the group before each end."""
        runs, ends = values.shape[1], range(1, len(values) + 1)
        windows = [slice(max(0, end - early.BEFORE), end) for end in ends]
        moved = np.vstack([np.diff(values, axis=0) != 0, np.zeros((1, runs), int)])
        self.low = np.array([values[w].min(axis=0) for w in windows])
        self.range = np.array([np.ptp(values[w], axis=0) for w in windows])
        self.steps = np.array([moved[w][:-1].sum(axis=0) for w in windows])
        for end, foot in feet.items():
            self.low[end - 1] = np.where(foot, values[1:end].min(axis=0), self.low[end - 1])
            self.range[end - 1] = np.where(foot, np.ptp(values[1:end], axis=0), self.range[end - 1])
            self.steps[end - 1] = np.where(foot, moved[1 : end - 1].sum(axis=0), self.steps[end - 1])
        self.high_since = np.maximum.accumulate(values[::-1], axis=0)[::-1]
        self.range_since = self.high_since - np.minimum.accumulate(values[::-1], axis=0)[::-1]
        self.rise_since = np.maximum.accumulate((self.high_since - values)[::-1], axis=0)[::-1]
        self.steps_since = np.cumsum(moved[::-1], axis=0)[::-1]

    def distance(self, end: int, since: int) -> Array:
        found: Array = self.low[end - 1] - self.high_since[since]
        return found

    def width(self, end: int, since: int) -> Array:
        before = self.range[end - 1]
        found: Array = np.where(before > 0, np.maximum(before, self.rise_since[since]), self.range_since[since])
        return found


def collapsed(held: Array, trained: Array, rule: early.EarlyCollapse) -> NDArray[np.bool_]:
    """Twin of `guard.channels.early.EarlyCollapse`: where it halts after the last of these rounds."""
    c, (rounds, runs) = early, held.shape
    foot = dict[int, NDArray[np.bool_]]()
    for end in range(3, min(early.BEFORE, rounds) + 1) if rule.LEAVES_OUT_FOOT else ():
        climbed = held[1:end]
        foot[end] = (np.diff(climbed, axis=0) >= 0).all(axis=0) & (climbed[0] - held[0] > climbed[-1] - climbed[0])
    one, other, found = _Groups(held, foot), _Groups(-trained, foot), np.zeros(runs, bool)
    for between in range(c.BETWEEN + 1):
        for end in range(1, rounds - between - c.GAINED[0] + 1):
            since, lasted = end + between, rounds - end - between
            distance = one.distance(end, since)
            if not (distance > 0).any():
                continue
            steps, width = one.steps[end - 1], one.width(end, since)
            varies = (steps + one.steps_since[since] >= c.STEPS) | ((steps >= 2) & (lasted >= c.CONSTANT))
            gain, usual = other.distance(end, since), other.width(end, since)
            gained = gain > usual
            enough = gained & (distance > c.OF_THE_GAIN * gain) & (distance > c.GAINED[1] * width)
            if lasted >= c.OTHERWISE[0]:
                enough |= ~gained & (distance > usual) & (distance > c.OTHERWISE[1] * width)
            found |= varies & enough & (distance > 0) & (width > 0)
    return found


class NewLow:
    """Twin of `guard.channels.early.NewLow`. `held`: (rounds, runs), of the whole run."""

    def __init__(self, held: Array) -> None:
        self.held = held
        moved = np.abs(np.diff(held, axis=0, prepend=held[:1]))
        self.changes = np.cumsum(moved > 0, axis=0)
        self.step = np.minimum.accumulate(np.where(moved > 0, moved, np.inf), axis=0)
        self.low, self.high = np.minimum.accumulate(held, axis=0), np.maximum.accumulate(held, axis=0)

    def halts(self, t: int, gained: Array) -> NDArray[np.bool_]:
        """Where it halts after round index t."""
        c, first = early, t + 1 - early.SINCE
        if first < c.BEFORE:
            return np.zeros(self.held.shape[1], bool)
        before, since = max(c.BEFORE, first - c.LOW_BETWEEN) - 1, self.held[first : t + 1]
        highest, rise = since.max(axis=0), np.zeros(self.held.shape[1])
        for earlier, later in zip(since[: c.SINCE // 2], since[c.SINCE // 2 :], strict=True):
            rise = rise + (later - earlier)
        lowest, joined = self.low[first - 1], np.ones(self.held.shape[1], bool)
        for between in range(first - 1, before, -1):  # rounds that join the ten lie below every score before
            joined = joined & (self.held[between] < self.low[between - 1])
            lowest = np.where(joined, self.low[between - 1], lowest)
        distance, width = lowest - highest, np.maximum(highest - since.min(axis=0), self.step[t])
        # All rounds until the scores since; those that are below every score before are no higher than the others.
        lost = self.high[first - 1] - highest
        says = (2 * self.changes[before] >= before) & (rise <= width) & (lost > c.OF_THE_GAIN * gained)
        found: NDArray[np.bool_] = (distance > 0) & says & (distance > c.NEEDS * width)
        return found


class _Noise:
    """Twin of `guard.channels.noise.Noise`."""

    def __init__(self, runs: int, rule: noise.Noise, known: float | None = None) -> None:
        self.known, self.rule = known, rule
        self.last: list[Array] = []
        self.count = 0
        zero = np.zeros(runs)
        self.changed, self.values = [zero, zero], zero.astype(int)  # the last two that changed; values that did
        self.step, self.bends, self.bend = np.full(runs, np.inf), zero.astype(int), zero
        self.first, self.largest = zero, np.zeros((noise._dropped(noise._MEMORY), runs))
        weight, prior = noise._PRIOR
        self.windows = [np.full(runs, weight * prior), np.full(runs, weight)]
        self.present = zero

    def add(self, value: Array) -> None:
        change = np.abs(value - self.last[-1]) if self.last else np.zeros_like(value)
        self.step = np.where(change > 0, np.minimum(change, self.step), self.step)
        moved = (change > 0) | (not self.last)
        self._learn_size(
            np.abs((value - self.changed[1]) - (self.changed[1] - self.changed[0])), moved & (self.values >= 2)
        )
        self.changed = [np.where(moved, self.changed[1], self.changed[0]), np.where(moved, value, self.changed[1])]
        self.values = self.values + moved
        self.last, self.count = [*self.last, value][-noise.KEPT :], self.count + 1
        if self.count >= noise.FIRST_LINE:
            self._learn_correlation(np.array(self.last[-noise.LINE :]))
        number, times = self.rule.BURST
        self.present = self.bend
        if self.count >= number + 2 and not isinstance(self.rule, SteadyNoise):
            bends = np.abs(np.diff(np.array(self.last[-number - 2 :]), 2, axis=0))
            now = np.median(bends, axis=0) / noise._MEDIAN / times
            self.present = np.maximum(self.bend, np.minimum(now, noise._CLIP * self.bend))

    def _learn_size(self, bend: Array, where: NDArray[np.bool_]) -> None:
        settled = (self.bends >= noise._SETTLED) & (self.bend > 0)
        bend = np.minimum(bend, np.where(settled, noise._CLIP * self.bend, np.inf))
        self.bends = self.bends + where
        later = where & (self.bends > noise._MEMORY)
        early, number = where & ~later, np.maximum(self.bends, 1)
        dropped = np.where(self.bends >= noise._TRIMMED, (self.bends + 5) // 10, 0)
        self.first = np.where(early, self.first + bend, self.first)
        self.largest = np.where(early, np.sort(np.vstack([self.largest, bend[None]]), axis=0)[1:], self.largest)
        ranks = len(self.largest) - np.arange(len(self.largest))[:, None]
        left = np.maximum(self.first - np.where(ranks <= dropped, self.largest, 0.0).sum(axis=0), 0.0)
        trimmed = left / np.maximum(number - dropped, 1) * (1 + noise._TRIM * dropped / number)
        rest = self.bend + (bend - self.bend) / noise._MEMORY
        self.bend = np.where(later, rest, np.where(early, trimmed, self.bend))

    def _learn_correlation(self, values: Array) -> None:
        count, columns = len(values), np.array(noise._polynomials(len(values)))
        parts = columns @ values
        left = values - columns[:2].T @ parts[:2]
        lost, shift, factor = np.full(left.shape[1], noise._LOST), 0.0, 1.0
        if count >= noise._CUBIC_FROM:
            cubic = left - columns[2:].T @ parts[2:]
            rest = (cubic * cubic).sum(axis=0)
            spread = rest / (count - 4)
            rise = parts[1] * (columns[1, -1] - columns[1, 0])
            curved = ((left * left).sum(axis=0) - rest > 2 * noise._CURVED * spread) & (
                rise > noise._CLIMBS * np.sqrt(spread)
            )
            left = np.where(curved, cubic, left)
            lost = np.where(curved, noise._LOST_CUBIC, noise._LOST)
            factor, shift = (
                np.where(curved, one, other) for one, other in zip(noise._OF_CUBIC, (1.0, 0.0), strict=True)
            )
        middle = [(count - 1) // 2, count // 2]
        limit = noise._OUTLIER * np.partition(np.abs(left), middle, axis=0)[middle].sum(axis=0) / 2
        left = np.clip(left, -limit, limit)
        square = (left * left).sum(axis=0)
        known = (square > 0) & (square <= (count - 2) * (noise._BENT * self.bend / noise._MEAN_ABS) ** 2)
        rho = factor * ((left[:-1] * left[1:]).sum(axis=0) / np.where(known, square, 1.0) + lost / count) + shift
        past = [noise._PAST * each for each in self.windows]
        self.windows = [past[0] + np.where(known, rho, 0.0), past[1] + known]

    def sigma(self, bend: Array | float = 0.0) -> Array:
        if self.known is not None:
            return np.full(self.bend.shape, self.known)
        factor, shift = noise._STRETCH
        rho = np.clip(factor * (self.windows[0] / self.windows[1]) + shift, 0.0, noise._RHO_MAX)
        scale = np.sqrt((1 + rho) / (2 * (3 - rho))) / (1 - rho) * (1 + noise._YOUNG / self.count)
        found = np.maximum(bend, self.present) / noise._MEAN_ABS * scale
        return np.maximum(found, np.where(np.isfinite(self.step), self.step, 0.0) / 2)


class _Level:
    """Twin of `guard.channels.falls.BestLevel`."""

    def __init__(self, runs: int) -> None:
        self.mean = [np.full(runs, -np.inf) for _ in (*falls.BLOCKS, falls.CLIMB)]
        self.bend = [np.zeros(runs) for _ in self.mean]

    def _bound(self, index: int, mean: Array, bend: Array, noise: _Noise) -> Array:
        errors = np.sqrt(max(noise.count.bit_length() - 1, 1))
        part = 1 / np.sqrt(falls.BLOCKS[index]) if index < len(falls.BLOCKS) else falls.CLIMB_ERROR
        found: Array = mean - errors * part * noise.sigma(bend)
        return found

    def learn(self, noise: _Noise) -> None:
        for index, size in enumerate(falls.BLOCKS):
            if noise.count < max(size, falls.FIRST_JUDGED - 2) or (index == 0 and noise.count > falls.SHORT_UNTIL):
                continue
            block = np.array(noise.last[-size:])
            mean = (block.sum(axis=0) - block.max(axis=0) - block.min(axis=0)) / (size - 2)
            self._compare(index, mean, noise)
        if noise.count >= falls.CLIMB:
            self._compare(len(falls.BLOCKS), _end_of_climb(np.array(noise.last[-falls.CLIMB :]), noise.sigma()), noise)

    def _compare(self, index: int, mean: Array, noise: _Noise) -> None:
        better = self._bound(index, mean, noise.present, noise) > self._bound(
            index, self.mean[index], self.bend[index], noise
        )
        self.mean[index] = np.where(better, mean, self.mean[index])
        self.bend[index] = np.where(better, noise.present, self.bend[index])

    def level(self, noise: _Noise) -> Array:
        stored = zip(self.mean, self.bend, strict=True)
        found: Array = np.max([self._bound(i, *each, noise) for i, each in enumerate(stored)], axis=0)
        return found


def _end_of_climb(scores: Array, sigma: Array) -> Array:
    """Twin of `guard.channels.falls._end_of_climb`; minus infinity where scores do not climb."""
    half = len(scores) // 2
    before, now = (np.sort(part, axis=0)[1:-1].mean(axis=0) for part in (scores[:half], scores[half:]))
    rise, last = now - before, (scores[-1] + scores[-2] - scores[-3] - scores[-4]) / 2
    climbs = (rise > falls.STEEP * sigma) & (last >= falls.STILL * rise / 2)
    found: Array = np.where(climbs, np.minimum(now + rise * (half - 1) / (2 * half), scores.max(axis=0)), -np.inf)
    return found


class _Falls:
    """Twin of `guard.channels.falls.Falls`."""

    def __init__(self, runs: int, threshold: float, rule: falls.Falls) -> None:
        self.rule = rule
        self.sums = [np.zeros(runs) for _ in rule.CUSUMS]
        self.limits = [threshold / falls._DEFAULT * limit for _, _, limit in rule.CUSUMS]
        self.recovers = np.zeros(runs, bool)

    def allowed(self, noise: _Noise) -> Array:
        few: Array = self.rule.STEPS * np.where(noise.bends >= falls.CHANGES - 1, noise.step, 0.0)
        return few

    def judge(
        self, value: Array, noise: _Noise, best: _Level, weight: Array | float, lost: Array | float
    ) -> NDArray[np.bool_]:
        level, sigma, scores = best.level(noise), noise.sigma(), [*noise.last, value][-falls._WITHIN - 3 :]
        known = (sigma > 0) & np.isfinite(level)
        unit, level = np.where(known, sigma, 1.0), np.where(known, level, 0.0)
        below = (level - self.allowed(noise) - value - lost) / unit
        rise = (_mean(scores, 2) - _mean(scores[:-2], 2)) / unit
        now, fours = _mean(scores, 4), range(min(falls._WITHIN, len(scores) - 3))
        lowest = np.min([_mean(scores[: len(scores) - ago], 4) for ago in fours], axis=0)
        recovers = (rise > falls._RISES) | (
            now - lowest > falls._SHARE * np.maximum(level - now, 0.0) + falls._HEALS * unit
        )
        usual = unit * np.where(noise.bend > 0, noise.bend / np.where(noise.bend > 0, noise.present, 1.0), 1.0)
        recovers &= value > -falls._LOST * usual
        self.recovers = known & recovers
        halts = np.zeros(value.shape, bool)
        for index, (slack, most, _) in enumerate(self.rule.CUSUMS):
            limit = self.limits[index]
            total = np.maximum(0.0, self.sums[index] + weight * (np.clip(below, -most, most) - slack))
            total = np.where(recovers, np.minimum(total, falls._CUT * limit), total)
            if index == 1:
                total = np.where(rise > -falls._SINKS, np.minimum(total, limit), total)
            self.sums[index] = np.where(known, total, self.sums[index])
            halts |= known & (self.sums[index] > limit)
        return halts


def _changed(scores: list[Array]) -> tuple[Array, NDArray[np.int64]]:
    """The values of each run that differ from the one before, the newest last, and their number: (rounds, runs)."""
    values = np.array(scores)
    new = np.vstack([np.ones((1, values.shape[1]), bool), values[1:] != values[:-1]])
    order = np.argsort(new, axis=0, kind="stable")
    return np.take_along_axis(values, order, axis=0), new.sum(axis=0)


class _StepDown:
    """Twin of `guard.channels.step_down.StepDown`."""

    def __init__(self) -> None:
        self.rounds, self.last = 0, list[Array]()

    def share(self, score: Array, coarse: Array, lost: Array | float) -> Array:
        """The largest share of the evidence that halts."""
        self.rounds += 1
        longest = step_down.LATER if self.rounds > step_down.EARLY else max(step_down.LIMITS)
        self.last = [*self.last, score][-step_down.BEFORE[1] - longest :]
        found, (changed, numbers) = np.zeros(coarse.shape), _changed(self.last)
        for number in np.unique(numbers):
            runs = np.flatnonzero(numbers == number)
            of_lost = lost if isinstance(lost, float) else lost[runs]
            found[runs] = _nearest_step(changed[len(changed) - number :, runs], coarse[runs], of_lost, longest)
        return found


def _nearest_step(scores: Array, coarse: Array, lost: Array | float, longest: int) -> Array:
    found = np.zeros(coarse.shape)
    for since, limit in step_down.LIMITS.items():
        for before in step_down.BEFORE:
            if since > longest or before + since > len(scores):
                continue
            values = np.vstack([scores[-before - since : -since], scores[-since:] + lost])
            found = np.maximum(found, _step(values, before, since, coarse, limit) / limit)
    return found


@cache
def _regressors(before: int, since: int) -> Array:
    """The rows of every basis of `guard.channels.step_down`, by autocorrelation, for scores without their mean."""
    count, rows = before + since, list[Array]()
    for rho in step_down.RHOS:
        basis = step_down._basis(before, since, rho)
        white = np.eye(count) - rho * np.eye(count, k=-1)
        white[0, 0] = np.sqrt(1 - rho * rho)
        rows.append(np.array([basis.level, basis.step, basis.climb, *basis.stopped]) @ white)
    return np.array(rows)


def _step(values: Array, before: int, since: int, coarse: Array, limit: float) -> Array:
    """The log-likelihood ratio of a step down to none; 0 where none goes down, or where it has healed.

    What only matters above `limit` is left out below it.
    """
    count, left = len(values), values - values.mean(axis=0)
    square, ends = np.einsum("tr,tr->r", left, left), left[0] ** 2 + left[-1] ** 2
    pairs = np.einsum("tr,tr->r", left[1:], left[:-1])
    level, step, size = np.full(coarse.shape, np.inf), np.full(coarse.shape, np.inf), np.zeros(coarse.shape)
    regressors = _regressors(before, since)
    every = (regressors.reshape(-1, count) @ left).reshape(*regressors.shape[:2], -1)
    for parts, (rho, constant) in zip(every, step_down._noises(), strict=True):
        basis, factor = step_down._basis(before, since, rho), np.exp(constant / count)
        total = (1 + rho * rho) * square - rho * rho * ends - 2 * rho * pairs
        least = step_down._EXACT * total + count * step_down.COARSE * (coarse * (1 - rho)) ** 2
        rest, climb = total - parts[0] ** 2, np.maximum(parts[2], 0.0)
        stopped = np.maximum(parts[3:].max(axis=0), 0.0)
        level = np.minimum(level, factor * (np.maximum(rest - stopped**2, 0) + least))
        of_step = factor * (np.maximum(rest - parts[1] ** 2 - climb**2, 0) + least)
        size = np.where(of_step < step, (basis.step_of_climb * climb - parts[1]) / basis.length, size)
        step = np.minimum(step, of_step)
    known = (size > 0) & (square > 0)
    found: Array = np.maximum(count / 2 * np.log(np.where(known, level, 1.0) / np.where(known, step, 1.0)), 0.0)
    near = np.flatnonzero(found > limit)
    if len(near):
        found[near] = np.where(_stands(values[:, near], before, since), found[near], 0.0)
    return found


def _stands(values: Array, before: int, since: int) -> NDArray[np.bool_]:
    """Where a step down has not healed, and the noise before it was not larger."""
    rounds, few, part = step_down.HEALED
    lowest = np.min([values[before + end - few : before + end].mean(axis=0) for end in range(few, since + 1)], axis=0)
    healed = values[before:][-rounds:].mean(axis=0) - lowest > part * (values[:before].max(axis=0) - lowest)
    if since < step_down.FROM:
        return ~healed
    bends = [np.abs(np.diff(part, 2, axis=0)).mean(axis=0) for part in (values[:before], values[before:])]
    found: NDArray[np.bool_] = ~healed & (bends[0] <= step_down.NOISIER * bends[1])
    return found


class _Shares:
    """Twin of `guard.channels.outliers.FallingShares`. `gains`: (rounds, shares, runs), NaN where one is missing."""

    def __init__(self, gains: Array, rule: outliers.FallingShares) -> None:
        self.gains, self.rule = gains, rule
        self.usual, self.drift = np.full(gains.shape[1:], np.nan), np.zeros(gains.shape[1:])
        self.away, self.spread = np.zeros(gains.shape[1:]), np.zeros(gains.shape[2])

    def judge(self, t: int) -> tuple[Array, Array]:
        """By how much shares that fall lower the mean, and what is to be added to it for those left out."""
        there = ~np.isnan(self.gains[t])
        number = there.sum(axis=0)
        distance = self.gains[t] - np.nansum(self.gains[t], axis=0) / number
        known = np.where(np.isnan(self.usual), distance, self.usual)
        above, new, few = distance - known, outliers._NEW, number // outliers._LIARS
        middle = (np.median if there.all() else np.nanmedian)(np.abs(above), axis=0)  # the first is faster
        above = np.where(there, above, 0.0)
        self.spread = self.spread + max(1 / (t + 1), new) * (middle - self.spread)
        self.drift = np.where(there, (1 - new) * self.drift + new * above, self.drift)
        away = self.away + max(1 / (t + 1), new) * (np.abs(above) - self.away)
        self.away = np.where(there, away, self.away)
        unit = np.where((self.spread > 0) & self.rule.LEAVES_OUT, self.spread, np.inf)
        far = np.maximum(self.drift / outliers._RISEN, (self.away - np.abs(self.drift)) / outliers._WILD) / unit
        out = there & (_rank(np.where(there, -far, np.inf)) < few) & (far > 1)
        lowest = there & (_rank(np.where(there, self.drift, np.inf)) < few)
        fallen = lowest & (self.drift < -outliers._DRIFTED * self.spread) & ~out
        learnt = known + max(1 / (t + 1), 1 / outliers._MEMORY) * above
        self.usual = np.where(there & ~fallen & ~out, learnt, self.usual)
        lost: Array = np.where(fallen, np.maximum(0.0, -above), 0.0).sum(axis=0) / (number - fallen.sum(axis=0))
        moved: Array = -np.where(out, above, 0.0).sum(axis=0) / (number - out.sum(axis=0))
        return lost, moved


def _rank(values: Array) -> NDArray[np.int64]:
    order = np.argsort(values, axis=0, kind="stable")
    return np.argsort(order, axis=0, kind="stable")


class _Gap:
    """Twin of `guard.channels.hacking_gap.HackingGap`. Rows of `best` and `reference`: held-out, training."""

    def __init__(self, runs: int, rule: hacking_gap.HackingGap) -> None:
        self.total, self.best, self.reference = np.zeros(runs), np.full((2, runs), -np.inf), np.full((2, runs), -np.inf)
        self.rule = rule
        self.last: list[Array] = []  # of both metrics
        self.before: list[Array] = []  # the same, of as many rounds as the noise

    def judge(
        self,
        held: Array,
        trained: Array,
        score: Array,
        noise: _Noise,
        few: Array,
        bend: Array,
        guard: SequentialGuard,
    ) -> NDArray[np.bool_]:
        c, sigma = hacking_gap, noise.sigma()
        step, lost = np.where(np.isfinite(noise.step), noise.step, 0.0), self.best[0] - held
        fell, counts = lost > few, np.ones(held.shape, bool)
        if self.rule.STILL is not None and self.last:
            repeated = (held == self.last[-1][0]) & (trained == self.last[-1][1])
            apart = self._moved_apart(held, trained, score, few, bend, repeated & fell & (trained > self.reference[1]))
            sigma = np.where(apart, step / 2, sigma)
            counts = ~repeated | apart | (fell & (lost > c.SURELY * bend))
        known = counts & (sigma > 0)
        unit = np.where(known, sigma, 1.0)
        gap = (trained - self.reference[1]) - (held - self.reference[0])
        allowed = np.maximum((guard.gap_sigmas or 0.0) * unit, c._OF_THE_GAIN * self.best[0])
        allowed = np.maximum(allowed, c._OF_THE_SCORE * np.abs(score - held + self.reference[0]))
        total = np.maximum(0.0, self.total + np.clip((gap - allowed) / unit, -c._MOST, c._MOST) - c._SLACK)
        self.total = np.where(known, total, self.total)
        newest = np.array([*(each[0] for each in self.last), held][-c.BLOCK :])
        found: NDArray[np.bool_] = (
            known & (self.total > guard.threshold) & ~(newest.sum(axis=0) / len(newest) >= self.best[0])
        )
        return found

    def _moved_apart(
        self, held: Array, trained: Array, score: Array, few: Array, bend: Array, of: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Twin of `guard.channels.hacking_gap._moved_apart`, for the runs in `of`."""
        found = np.zeros(of.shape, bool)
        for run in np.flatnonzero(of & self._stands_still(held, trained)):
            both = [*(each[:, run] for each in self.before), np.array([held[run], trained[run]])]
            scores, apart = [float(h) for h, _ in both], [float(t - h) for h, t in both]
            measures = float(few[run]), float(bend[run]), float(score[run])
            found[run] = hacking_gap._moved_apart(scores, apart, *measures, self.rule.STILL or 0)
        return found

    def _stands_still(self, held: Array, trained: Array) -> NDArray[np.bool_]:
        if self.rule.STILL is None:
            return np.zeros(held.shape, bool)
        newest = np.array([*self.last, np.array([held, trained])][-self.rule.STILL :])
        still: NDArray[np.bool_] = (newest == newest[-1]).all(axis=(0, 1))
        return still

    def learn(self, held: Array, trained: Array, noise: _Noise) -> None:
        self.last = [*self.last, np.array([held, trained])][-hacking_gap.BLOCK :]
        self.before = [*self.before, np.array([held, trained])][-_KEPT:]
        if len(self.last) < hacking_gap.BLOCK:
            return
        block = np.array(self.last).sum(axis=0) / hacking_gap.BLOCK
        self.best = np.where(block[0] > self.best[0], block, self.best)
        least = hacking_gap._IMPROVED * noise.sigma() * np.sqrt(2 / hacking_gap.BLOCK)
        improved = self.best[0] - self.reference[0] > least
        self.reference = np.where(improved, self.best, self.reference)
        self.total = np.where(improved, 0.0, self.total)


def _mean(values: list[Array], count: int) -> Array:
    """The mean of the last `count` values."""
    total = np.zeros_like(values[-1])
    for value in values[-count:]:
        total = total + value
    return total / count


def sequential(
    heldout: Array,
    in_loop: Array | None,
    weight: Array | None = None,
    gains: Array | None = None,
    guard: SequentialGuard | None = None,
    known: float | None = None,
) -> tuple[Rounds, NDArray[np.int64]]:
    """Where `SequentialGuard` halts, and by which of `CHANNELS`.

    `weight`: share of the items in each score. `known`: sigma of the held-out score, in place of the measured one.
    """
    guard = guard or SequentialGuard()
    rule: MetricChannels = guard.channels()
    rounds, runs = heldout.shape
    halts, first = Halts(np.zeros(runs, int), np.zeros(runs, int)), None if in_loop is None else in_loop[0]
    own, apart = _Noise(runs, rule.noise, known), _Noise(runs, rule.gap_noise)
    best, gap, sums = _Level(runs), _Gap(runs, rule.gap), _Falls(runs, guard.threshold, rule.falls)
    scores, losts = heldout - heldout[0], [0.0] * rounds if gains is None else list[Any]()
    if gains is not None:
        shares = _Shares(gains, rule.shares)
        for t in range(rounds):
            lost, moved = shares.judge(t)
            scores[t], losts = scores[t] + moved, [*losts, lost]
    lows, steps = NewLow(scores), _StepDown()
    for t in range(rounds):
        held, lost = scores[t], losts[t]
        trained = None if in_loop is None else in_loop[t] - first
        if t >= falls.FIRST_JUDGED:
            halts.at(t + 1, sums.judge(held, own, best, 1.0 if weight is None else weight[t], lost), 2)
        if trained is not None and guard.gap_sigmas is not None and t >= hacking_gap.FIRST_JUDGED:
            wrong = gap.judge(held, trained, heldout[0] + held, apart, sums.allowed(own), own.bend, guard)
            halts.at(t + 1, wrong & (t + 1 >= guard.min_steps), 3)
        if trained is not None and t < early.ROUNDS:
            halts.at(t + 1, collapsed(scores[: t + 1], in_loop[: t + 1] - first, rule.early), 4)  # type: ignore[index]
        halts.at(t + 1, lows.halts(t, np.zeros(runs) if trained is None else trained), 5)
        own.add(held)
        coarse = np.where(np.isfinite(own.step), own.step, 0.0)
        share = np.where(sums.recovers, 0.0, steps.share(held, coarse, lost))
        halts.at(t + 1, share > guard.threshold / step_down._DEFAULT, 1)
        best.learn(own)
        if trained is not None and guard.gap_sigmas is not None:
            apart.add(trained - held)
            gap.learn(held, trained, own)
        if halts.rounds.all():
            break
    return halts.rounds, halts.channels


# -- the product's own folds -------------------------------------------------------------------------------------------


def folded(
    heldout: Array,
    in_loop: Array | None,
    weight: Array | None = None,
    gains: Array | None = None,
    guard: SequentialGuard | None = None,
) -> tuple[int, Verdict | None]:
    """The round in which the product's `SequentialGuard` halts one run, and its verdict; 0 and None if it does not."""
    guard, state = guard or SequentialGuard(), None
    for t in range(len(heldout)):
        total = 10**9
        items = total if weight is None else round(float(weight[t]) * total)
        there = {} if gains is None else {str(i): float(g) for i, g in enumerate(gains[t]) if not np.isnan(g)}
        evidence = Evidence(
            round=t + 1,
            heldout=float(heldout[t]),
            in_loop=None if in_loop is None else float(in_loop[t]),
            items=items,
            total_items=total,
            gains=there,
        )
        state, verdict = guard.fold(state, evidence)
        if verdict.fire:
            return t + 1, verdict
    return 0, None


def updated(heldout: Array, in_loop: Array, patience: int) -> int:
    """The round in which the product's `HeldOutGuard` fires, 0 if it does not."""
    guard = HeldOutGuard(decline_patience=patience)
    for t in range(len(heldout)):
        if guard.update(t + 1, float(in_loop[t]), float(heldout[t])).fire:
            return t + 1
    return 0


def check_twins(
    heldout: Array,
    in_loop: Array | None,
    weight: Array | None = None,
    gains: Array | None = None,
    guard: SequentialGuard | None = None,
) -> int:
    """The number of runs in which the twin stops in the same round as the product; ends the program otherwise."""
    runs = heldout.shape[1]
    ours = sequential(heldout, in_loop, weight, gains, guard)[0]
    for run in range(runs):
        w = None if weight is None else weight[:, run]
        g = None if gains is None else gains[:, :, run]
        trained = None if in_loop is None else in_loop[:, run]
        real = folded(heldout[:, run], trained, w, g, guard)[0]
        if real != ours[run]:
            raise SystemExit(f"SequentialGuard halts run {run} in round {real}, its twin in {ours[run]}.")
    return runs


def check_heldout(heldout: Array, in_loop: Array) -> None:
    """End the program unless the twin of `HeldOutGuard` stops each run in the same round as the product."""
    for patience in (3, 6):
        fast = heldout_guard(heldout, in_loop, patience)
        for run in range(heldout.shape[1]):
            real = updated(heldout[:, run], in_loop[:, run], patience)
            if real != fast[run]:
                raise SystemExit(f"HeldOutGuard halts run {run} in round {real}, its twin in {fast[run]}.")
