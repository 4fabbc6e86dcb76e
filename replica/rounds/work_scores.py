"""`WorkScores`: this replica's scores of strangers' contributions to the open round, before any of them is averaged.

`guard.strangers` judges the scores of all replicas; `Checks` publishes them.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import PayloadCorrupt, Preempted
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.check_records import DealtScore, WorkScore
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.tip import HeldTip

log = logging.getLogger(__name__)

T = TypeVar("T")
Measure = Callable[[Base], Sequence[float]]  # a base -> its scores on the items dealt to this replica; higher is better
# A base and a contribution -> its scores on training items dealt to the author, and on as many dealt to others.
DealtMeasure = Callable[[Base, Contribution], tuple[Sequence[float], Sequence[float]]]

# A step along one contribution alone, a fifth of it, so that scores change about linearly; Templar's validators take
# .2 as well (`eval_lr_factor`).
_STEP = OuterConfig(lr=0.2, momentum=0.0, nesterov=False)
_WHOLE = OuterConfig(lr=1.0, momentum=0.0, nesterov=False)  # to the model that the author has trained
_FEWEST = 2  # items, so that the change of their scores has a variance
_SAMPLE = 2**16  # elements by which contributions are compared with earlier ones; cosines are off by .004 then
_MOST_SIGMAS = 100.0  # of a difference of which every item is certain


class WorkScores:
    """Scores of strangers' contributions by this replica, each once. Not thread-safe."""

    def __init__(self, attempt: Attempt, tip: HeldTip) -> None:
        self.measure: Measure | None = None  # None: this process has no model to score
        self.measure_dealt: DealtMeasure | None = None  # None: no data is dealt, or no item of it can be scored
        self.dealt: tuple[DealtScore, ...] = ()  # found since the last report
        self._offset: int | None = None  # of the sample, drawn so that nobody can spare its elements
        # By fragment and replica: round, and a sample, of its newest contributions that were read here.
        self._sampled: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        self.longest_s = 0.0  # that the scores of one look took in the open round
        self._attempt = attempt
        self._tip = tip
        self.clear()

    def clear(self) -> None:
        """Forget the scores of the round that has ended."""
        self.longest_s, self.dealt = 0.0, ()
        self._own_gap: tuple[str, float | None] = ("", None)  # payload of this replica's contribution, its gap
        self._scored = set[tuple[int, str]]()  # replica id, digest of its payload
        self._known: dict[tuple[int, str], tuple[list[float], torch.Tensor | None]] = {}  # by base, and payload or ""

    @property
    def is_due(self) -> bool:
        """Whether strangers' contributions to the open round are scored before they are averaged."""
        return self._tip.strangers_rules > 0 and not self._tip.open.final_evaluation

    def of(self, manifests: Mapping[int, Contribution], read: outer_step.ReadShard) -> tuple[WorkScore, ...]:
        """Scores of the strangers' contributions that were not scored yet, in replica order; reads their payloads.

        `manifests`: the contributions to the open round received so far, by replica id. Empty for a stranger, and where
        fewer than two held-out items were dealt to this replica. Raises the errors of the function that scores, but not
        those about a stranger's work, which is then scored as not finite: it would end every launched replica.
        """
        attempt, began = self._attempt, self._attempt.clock.now()
        found = []
        for replica_id in sorted(manifests) if self.measure and not attempt.is_invited else ():
            payload = manifests[replica_id].payload
            if replica_id not in attempt.config.invited or payload is None:
                continue
            if (replica_id, payload.digest) in self._scored:
                continue
            self._scored.add((replica_id, payload.digest))
            try:
                base, own = self._values(None, read), manifests.get(attempt.replica_id)
                beside = self._values(own, read) if own is not None and own.payload is not None else None
                score = partial(self._values, manifests[replica_id], read)
                there = self._unless_it_raises(manifests[replica_id], score, [math.nan] * len(base))
                self._score_dealt(manifests[replica_id], own, read)
            except PayloadCorrupt as error:
                log.warning("round %d: replica %d is not scored: %s", self._tip.open.round, replica_id, error)
                continue
            if len(base) < _FEWEST:
                return ()
            change, squares = summed([new - old for new, old in zip(there, base, strict=True)])
            more = summed([new - old for new, old in zip(there, beside, strict=True)]) if beside else (None, None)
            mine = attempt.replica_id
            found.append(
                WorkScore(
                    replica_id=replica_id,
                    payload=payload.digest,
                    count=len(base),
                    change=change,
                    squares=squares,
                    beside=more[0],
                    beside_squares=more[1],
                    again=self._like(replica_id, replica_id),
                    again_own=self._like(mine, mine),
                    like_own=self._like(replica_id, mine),
                    like_other=self._like_other(),
                )
            )
        if found:
            self._keep_another(manifests, read)
        self.longest_s = max(self.longest_s, attempt.clock.now() - began)
        return tuple(found)

    def _values(self, manifest: Contribution | None, read: outer_step.ReadShard) -> list[float]:
        """Scores of the open round's base after a step along a contribution; None: of that base itself."""
        payload = manifest.payload if manifest else None
        name = self._tip.open.version, payload.digest if payload else ""
        if name not in self._known:
            assert self.measure is not None
            base = self._tip.base if manifest is None else self._stepped(manifest, read, _STEP)
            self._known[name] = list(self.measure(base)), None if manifest is None else self._sample(base)
        values, sample = self._known[name]
        if manifest is not None and sample is not None:
            self._keep(manifest.replica_id, sample)
        return values

    def _unless_it_raises(self, manifest: Contribution, score: Callable[[], T], otherwise: T) -> T:
        """The result of `score`, of a stranger's contribution; `otherwise` where the function that scores raises."""
        try:
            return score()
        except (PayloadCorrupt, Preempted):
            raise
        except Exception as error:  # the training function runs here, on a model that a stranger has chosen
            said = type(error).__name__, error
            log.warning(
                "round %d: replica %d's work cannot be scored: %s: %s", self._tip.open.round, manifest.replica_id, *said
            )
            return otherwise

    def _keep(self, replica_id: int, sample: torch.Tensor) -> None:
        """Keep a sample of a replica's contribution to the open round, and the one before it."""
        kept, round_ = self._kept(replica_id), self._tip.open.round
        if not kept or kept[-1][0] != round_:
            self._sampled[self._tip.open.fragment, replica_id] = [*kept[-1:], (round_, sample)]

    def _kept(self, replica_id: int) -> list[tuple[int, torch.Tensor]]:
        """Round, and a sample, of a replica's newest contributions to the open round's fragment, at most two."""
        return self._sampled.get((self._tip.open.fragment, replica_id), [])

    def _stepped(self, manifest: Contribution, read: outer_step.ReadShard, outer: OuterConfig) -> Base:
        base = self._tip.base.copy()
        outer_step.average_and_step(base, self._tip.open.fragment, [(manifest, 1)], read, outer)
        return base

    def _sample(self, stepped: Base) -> torch.Tensor:
        """A sample of the contribution along which `stepped` is a step away from the open round's base."""
        if self._offset is None:
            self._offset = int(self._attempt.stamp.unforeseen(), 16)
        base = self._tip.base
        names = base.fragments[self._tip.open.fragment]
        stride = max(1, sum(base.parameters[name].numel() for name in names) // _SAMPLE)
        pairs = [(base.parameters[name].flatten(), stepped.parameters[name].flatten()) for name in names]
        return torch.cat([(old - new)[self._offset % stride :: stride].float() for old, new in pairs])

    def _like(self, replica_id: int, other: int) -> float | None:
        """Cosine of a replica's contribution to the open round to another's last one before it to this fragment.

        None without both.
        """
        now = [each for at, each in self._kept(replica_id) if at == self._tip.open.round]
        before = [each for at, each in self._kept(other) if at != self._tip.open.round]
        if not now or not before:
            return None
        first, second = before[-1].double(), now[0].double()
        norms = float(torch.linalg.vector_norm(first) * torch.linalg.vector_norm(second))
        return max(min(float(first @ second) / norms, 1.0), -1.0) if math.isfinite(norms) and norms else None

    def _like_other(self) -> float | None:
        """`_like` of this replica's own contribution and the newest one of another launched replica that was kept."""
        own, open_ = self._attempt.replica_id, self._tip.open
        kept = {i: self._kept(i) for fragment, i in self._sampled if fragment == open_.fragment and i != own}
        rounds = {i: max((at for at, _ in each if at != open_.round), default=0) for i, each in kept.items()}
        launched = [i for i in sorted(rounds) if i not in self._attempt.config.invited and rounds[i]]
        return self._like(own, max(launched, key=lambda i: rounds[i])) if launched else None

    def _keep_another(self, manifests: Mapping[int, Contribution], read: outer_step.ReadShard) -> None:
        """Keep a sample of the contribution of the next launched replica, in the circle of ids, for the next round."""
        own = self._attempt.replica_id
        launched = sorted(manifests.keys() - {own} - set(self._attempt.config.invited))
        there = [each for each in launched if manifests[each].payload is not None]
        if not there or any(at == self._tip.open.round for each in there for at, _ in self._kept(each)):
            return
        other = next((each for each in there if each > own), there[0])
        try:
            self._keep(other, self._sample(self._stepped(manifests[other], read, _STEP)))
        except PayloadCorrupt as error:
            log.warning("round %d: replica %d is not compared: %s", self._tip.open.round, other, error)

    def _score_dealt(self, manifest: Contribution, own: Contribution | None, read: outer_step.ReadShard) -> None:
        """Add to `dealt` the score of a stranger's contribution on the data dealt to it, beside this replica's own."""
        if self.measure_dealt is None or own is None or own.payload is None or manifest.payload is None:
            return
        if self._own_gap[0] != own.payload.digest:
            self._own_gap = own.payload.digest, self._gap(own, read)
        usual = self._own_gap[1]
        gap = None if usual is None else self._unless_it_raises(manifest, lambda: self._gap(manifest, read), None)
        if gap is not None and usual is not None:
            author, payload = manifest.replica_id, manifest.payload.digest
            self.dealt += (DealtScore(replica_id=author, payload=payload, gap=gap, usual=usual),)

    def _gap(self, manifest: Contribution, read: outer_step.ReadShard) -> float | None:
        """The standard errors by which a contribution raises the scores of its author's items more than of others'.

        Returns None where fewer than two scores of either are finite.
        """
        if self.measure_dealt is None or not manifest.own_steps:
            return None
        before = self.measure_dealt(self._tip.base, manifest)
        after = self.measure_dealt(self._stepped(manifest, read, _WHOLE), manifest)
        changes = [[new - old for new, old in zip(*each, strict=True)] for each in zip(after, before, strict=True)]
        sums = [(len(each), *summed(each)) for each in changes]
        means, errors = [], []
        for count, total, squares in sums:
            if count < _FEWEST or total is None or squares is None:
                return None
            means.append(total / count)
            errors.append(squares / (count - 1) / count)
        gap, error = means[0] - means[1], math.sqrt(math.fsum(errors))
        sigmas = gap / error if error else math.copysign(_MOST_SIGMAS, gap) if gap else 0.0
        return max(min(sigmas, _MOST_SIGMAS), -_MOST_SIGMAS)


def summed(changes: Sequence[float]) -> tuple[float | None, float | None]:
    """(sum of `changes`, sum of their squared distances from the mean); None for both if one is not finite."""
    if not all(map(math.isfinite, changes)):
        return None, None
    total = math.fsum(changes)
    mean = total / len(changes)
    squares = math.fsum((each - mean) * (each - mean) for each in changes)
    return (total, squares) if math.isfinite(squares) else (None, None)
