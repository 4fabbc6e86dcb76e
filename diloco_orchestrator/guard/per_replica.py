"""The per-replica guard: quarantines contributions of replicas whose local training has gone wrong.

Pure: equal manifests give equal results on every replica. It judges what replicas report of themselves, so it finds
faults (a corrupt data shard, a broken machine, a hack in one environment), not liars; `guard.fold` bounds those.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any

from diloco_orchestrator.guard.robust import weighted_mean
from diloco_orchestrator.protocol.records import Quarantine, Score

WARM_UP = 12  # rounds in which a replica's usual gain is learnt; only numbers that are not finite are judged in them
_FEWEST = 4  # judged replicas; among fewer, nothing shows which one is wrong
_SLACK = 1.25  # sigmas of a fall that count for nothing
_LARGEST = 4.0  # sigmas of one round that count, so that one round alone does not decide
_SUDDEN = 25.0  # sigmas of one round that decide alone
_LEARN = 0.01  # weight of a new round in the usual gain: a fall must not become usual before it is noticed
_SPREAD = 0.04  # weight of a new round in the spread
_TRUSTED = 2.0  # sigmas of a round that may move the usual gain
_TRUSTED_EARLY = 10.0  # the same while it is learnt
_RECENT = 8  # rounds whose spread says whether the noise has shrunk since the rounds before
_SHRUNK = 1.5  # times the median spread of those, at most, counts as spread: the median of so few may be too low
_FEWEST_KNOWN = 2.0  # rounds as exact as the present one that the usual gain counts as learnt from, at least
_NEW = 2.0  # spreads of the levels seen so far, with sigma added, from which on another one is new
_RIDGE = 0.25  # of the noise's variance: levels that differ by less say little of what differences depend on
_SIGMA = 1.4826  # standard deviation of normal numbers over their median absolute deviation
_MEAN_ABS = 1.2533  # standard deviation of normal numbers over their mean distance from the mean
# `_SIGMA` for few numbers, whose median is one: Croux and Rousseeuw, "Time-efficient algorithms" (1992), b_n.
_FEW = {4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


@dataclass(frozen=True)
class LocalGain:
    """The gain of one replica's local training, over the same held-out items.

    It is the mean score of the replica's local parameters minus that of the base; NaN if a local score is not finite.
    """

    replica_id: int
    gain: float


def local_gain(replica_id: int, base: Sequence[Score], local: Sequence[Score]) -> LocalGain | None:
    """The mean score of local parameters minus the base's, over held-out shares with a finite score of the base.

    None if no such share was scored on the local parameters; NaN if a local score is not finite.
    """
    before = {score.share: score for score in base if math.isfinite(score.mean)}
    both = [score for score in local if score.share in before]
    if not both:
        return None
    if not all(math.isfinite(score.mean) for score in both):
        return LocalGain(replica_id, math.nan)
    return LocalGain(replica_id, weighted_mean([(s.count, s.mean - before[s.share].mean) for s in both]))


def threshold(replicas: int) -> float:
    """The threshold of a replica's statistic in a fleet of `replicas`, in sigmas added up over rounds.

    A CUSUM with slack k crosses h by chance at a rate proportional to exp(-2 k h), so ln(N) / 2k more, .28 for each
    doubling, keeps the rate of the whole fleet that of one replica. `math.log` is not used, because its last bits
    differ between machines.
    """
    return 9.0 + 0.28 * (replicas - 1).bit_length()


def is_first_form(state: object) -> bool:
    """Whether the guard's state `state` is of its first form, in which the noise was the same in all rounds.

    Such states keep their form and their bytes, since commits of runs that began with it are derived again.
    """
    return isinstance(state, Mapping) and "recent" not in state


def fold_local(
    state: Mapping[str, Any] | None, gains: Sequence[LocalGain]
) -> tuple[dict[str, Any], tuple[Quarantine, ...]]:
    """The per-replica guard's state after one more round, and the contributions to leave out with reasons, in replica
    order.

    A replica's gain is compared with the other replicas' in the round, and with its usual difference from them at such
    gains, so that replicas with harder data or larger steps are not suspected. Its statistic sums up the sigmas by
    which it falls short. It is quarantined from the round in which the statistic passes the threshold until it has
    fallen to half of it; at most a quarter of the judged replicas at once. `state`: JSON, of the round before; None at
    the start, or empty at the start of a run whose states have the first form.
    """
    run = _Run({"recent": []} if state is None else state)
    finite = [each for each in gains if math.isfinite(each.gain)]
    why = {g.replica_id: "its local parameters have no finite held-out score" for g in gains if g not in finite}
    order = sorted(why)
    if len(finite) >= _FEWEST:
        fallen = run.add(finite)
        suspects = sorted((i for i in fallen if str(i) in run.out), key=lambda i: (-run.sums[str(i)], -fallen[i], i))
        for i in suspects:
            why[i] = (
                f"its local training gains {fallen[i]:.3g} sigmas less held-out score than it used to beside the "
                f"others; {run.sums[str(i)]:.1f} added up over rounds, {threshold(len(finite)):.1f} allowed"
            )
        order += suspects
    chosen = sorted(order[: len(gains) // 4])
    return run.to_json(), tuple(Quarantine(replica_id=i, reason=why[i]) for i in chosen)


@dataclass
class _Usual:
    """The usual difference of one replica's gain from the others', learnt from its rounds so far.

    The difference is a line over the round's level, the median gain of the fleet, by least squares with weights that
    fade: where data or learning rates differ, gains differ by a factor, and so by less and less as all of them shrink.
    """

    count: int = 0  # rounds learnt
    difference: float = 0.0  # mean of it
    level: float = 0.0  # mean of it
    variance: float = 0.0  # of the level
    covariance: float = 0.0  # of level and difference
    distance: float = 0.0  # mean distance of the difference from the line
    known: float = 0.0  # rounds learnt, those of larger noise as so many fewer; not kept in a state of the first form

    def at(self, level: float, sigma: float) -> float:
        """The usual difference of the replica's gain in a round where the fleet's median gain is `level`.

        `sigma`: the fleet's noise, below which levels are not distinguished.
        """
        apart = self.variance + _RIDGE * sigma * sigma
        return self.difference + (self.covariance / apart * (level - self.level) if apart else 0.0)

    def is_new(self, level: float, sigma: float) -> bool:
        """Whether no round before had a median gain like `level`, as for 15 rounds after a new learning rate."""
        return abs(level - self.level) > _NEW * (math.sqrt(self.variance) + sigma)

    def sigma(self, fleet: float, shrunk: float) -> float:
        """Standard deviation of the replica's difference: `fleet`, that of all replicas, or its own if it is larger.

        `shrunk`: the fleet's recent spread over its long-run one, by which the replica's own is multiplied.
        """
        return max(fleet, _MEAN_ABS * shrunk * self.distance if self.count >= WARM_UP else 0.0)

    def learn(self, level: float, usual: float, off: float, suspect: bool) -> None:
        """Add a round to the replica's usual difference. `level`: the fleet's median gain.

        `usual`: the difference expected at this level; `off`: how much the observed one was above it. `suspect`:
        whether the replica falls short at present, so that `off` says nothing of its noise.
        """
        weight = max(1 / ((self.count if suspect else self.known) + 1), _LEARN)
        apart, moved = level - self.level, usual + off - self.difference
        self.variance = (1 - weight) * (self.variance + weight * apart * apart)
        self.covariance = (1 - weight) * (self.covariance + weight * apart * moved)
        if not suspect:
            self.distance += max(1 / (self.count + 1), _SPREAD) * (abs(off) - self.distance)
        self.level, self.difference = self.level + weight * apart, self.difference + weight * moved
        self.count += 1
        self.known += 1


class _Run:
    """The state of the per-replica guard while a round is added. Replica ids are text."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        first_form = is_first_form(state)
        self.usual = {
            name: _Usual(*each, *(each[:1] if first_form else ())) for name, each in state.get("usual", {}).items()
        }
        self.sums: dict[str, float] = dict(state.get("sums", {}))
        self.out: set[str] = set(state.get("out", ()))
        self._spread: float | None = state.get("spread")  # median absolute deviation of one replica from its usual gain
        self._rounds: int = state.get("rounds", 0)
        self._recent: list[float] | None = state.get("recent")  # of each of the last rounds; None in the first form
        self._least: float | None = state.get("least")  # smallest spread so far

    def to_json(self) -> dict[str, Any]:
        first_form = self._recent is None
        return {
            "usual": {n: list(astuple(each))[: -1 if first_form else None] for n, each in self.usual.items()},
            "sums": {name: value for name, value in self.sums.items() if value},
            "out": sorted(self.out),
            "spread": self._spread,
            "rounds": self._rounds,
            **({} if first_form else {"recent": self._recent, "least": self._least}),
        }

    def add(self, gains: Sequence[LocalGain]) -> dict[int, float]:
        """Add the finite gains of a round. Returns by how many sigmas each replica fell short of its usual gain."""
        shrunk, limit = self._shrunk(), threshold(len(gains))
        fleet = _SIGMA * shrunk * (self._spread or 0.0)
        names = [str(each.replica_id) for each in gains]
        level = median([each.gain for each in gains])
        known = [self.usual.setdefault(name, _Usual()) for name in names]
        expected = [usual.at(level, fleet) for usual in known]
        middle = median([each.gain - usually for each, usually in zip(gains, expected, strict=True)])
        fallen, deviations = {}, []
        for name, each, usual, usually in zip(names, gains, known, expected, strict=True):
            off, sigma = each.gain - middle - usually, usual.sigma(fleet, shrunk)
            fallen[each.replica_id] = -off / sigma if sigma else 0.0
            if usual.count:
                deviations.append(abs(off))
            new = usual.count >= WARM_UP and usual.is_new(level, fleet)
            if usual.count >= WARM_UP and not new:
                self._judge(name, fallen[each.replica_id], limit)
            if name not in self.out:
                trusted = math.inf if new else _TRUSTED if usual.count >= WARM_UP else _TRUSTED_EARLY
                most = trusted * sigma if sigma else math.inf
                usual.learn(level, usually, max(min(off, most), -most), suspect=self.sums.get(name, 0.0) > 0)
        if len(deviations) >= _FEWEST:
            self._widen(deviations)
        return fallen

    def _judge(self, name: str, fallen: float, limit: float) -> None:
        added = fallen - _SLACK if fallen > _SUDDEN else min(fallen - _SLACK, _LARGEST)
        total = self.sums[name] = min(max(self.sums.get(name, 0.0) + added, 0.0), limit + _LARGEST)
        if total > limit:
            self.out.add(name)
        elif 2 * total <= limit:
            self.out.discard(name)

    def _shrunk(self) -> float:
        """The spread of recent rounds over the running one, at most 1."""
        if not self._recent or len(self._recent) < _RECENT or not self._spread:
            return 1.0
        return min(_SHRUNK * median(self._recent) / self._spread, 1.0)

    def _widen(self, deviations: Sequence[float]) -> None:
        """Add `deviations`, distances of this round's gains from the replicas' usual gains, to their running mean.

        Their median counts, which is biased for few numbers; that is corrected. Rounds of larger noise than the
        smallest so far count as fewer in the usual gains.
        """
        count = len(deviations)
        deviation = _FEW.get(count, count / (count - 0.8)) * median(deviations)
        self._rounds += 1
        weight = max(1 / self._rounds, _SPREAD)
        self._spread = deviation if self._spread is None else (1 - weight) * self._spread + weight * deviation
        if self._recent is None:
            return
        self._recent = [*self._recent, deviation][-_RECENT:]
        spread = self._shrunk() * self._spread
        if self._least is not None and 0 < spread < self._least:
            part = spread / self._least
            for usual in self.usual.values():
                usual.known = max(part * part * usual.known, min(_FEWEST_KNOWN, usual.known))
        if len(self._recent) == _RECENT:
            self._least = spread if self._least is None else min(spread, self._least)
