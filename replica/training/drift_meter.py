"""`DriftMeter`: measures a run's KL drift by a `KLProbe`, from the model at the run's start.

Every process computes the reference itself, from the first base that start.json pins: of the model in hand before the
first outer step, later of snapshot 0. So neither a restart nor a resume resets the drift, and nobody who writes to the
bucket chooses what the drift is measured from.
"""

import logging
import math

from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import Metric
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.tip import OpenRound
from diloco_orchestrator.replica.training.heldout_scorer import ShownBase
from diloco_orchestrator.replica.training.kl_probe import KLProbe
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot

log = logging.getLogger(__name__)


class DriftMeter:
    """Measures the KL drift of bases from the run's start. `kl`: of the last base, in nats per token; None: not
    measured.

    Rounds 1, 1 + `every`, 1 + 2 `every`… are measured, by the probe's setting. The run's start has drift 0 by
    definition.
    """

    def __init__(self, probe: KLProbe) -> None:
        self.kl: Metric | None = None
        self._probe = probe
        self._measured = (-1, -1)  # round, and version of the base
        self._has_reference = False  # of this run; a probe may have been used in another one

    def is_of(self, opened: OpenRound) -> bool:
        """Whether `kl` is the drift of the base that the open round starts from."""
        return self._measured == (opened.round, opened.version)

    def measure(self, shown: ShownBase) -> None:
        """Measure the KL divergence of the base in `shown` from the first base, in the rounds that the setting names.

        The first call that measures computes the reference, if need be from snapshot 0. Raises the store's errors, and
        `RecordInvalid` if snapshot 0 was changed.
        """
        opened = shown.open
        if opened.outer_step == 0:
            self._refer_to(shown)
            self.kl = Metric(sum=0.0, count=1)
        elif (opened.round - 1) % self._probe.every:
            self.kl = None
        else:
            if not self._has_reference:
                log.info("the reference for kl_to_init is computed from snapshot 0")
                with shown.holding(_first_base(shown.attempt)):
                    self._refer_to(shown)
            drift = self._probe.measure(shown.model)
            self.kl = Metric(sum=drift if math.isfinite(drift) else None, count=1)
        self._measured = (opened.round, opened.version)

    def _refer_to(self, shown: ShownBase) -> None:
        """Make the model in `shown`, which has the first base, the reference of all later measurements."""
        if not self._has_reference:
            self._probe.load(self._probe.reference_of(shown.model))
            self._has_reference = True


def _first_base(attempt: Attempt) -> Base:
    """The run's first base, from snapshot 0."""
    start = attempt.log.start()
    assert start is not None
    return first_snapshot(attempt.log).base(start.record)
