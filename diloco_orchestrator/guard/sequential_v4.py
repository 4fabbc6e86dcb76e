"""`SequentialV4`: the rule "sequential-v4", by which runs that began before "sequential-v5" go on to be judged.

Frozen: its states and verdicts keep their bytes (golden digests), since commits of those runs are derived again by it.
It differs from `SequentialGuard` in this: a Hacking Gap is measured by the noise of the rounds in which the metrics
moved, also where neither moves any more, and rounds that repeat both count; and texts of alarms show losses with the
opposite sign.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from diloco_orchestrator.guard.channels.hacking_gap import HackingGap
from diloco_orchestrator.guard.channels.metrics import MetricChannels
from diloco_orchestrator.guard.sequential import SequentialGuard


@dataclass
class GapOfMovingMetrics(HackingGap):
    """`HackingGap` by the noise of metrics that move, also where neither has changed for long."""

    STILL: ClassVar[int | None] = None


@dataclass
class V4Channels(MetricChannels):
    """The statistics of the guard rule "sequential-v4" about held-out score and training metric."""

    AS_REPORTED: ClassVar[bool] = False

    gap: HackingGap = field(default_factory=GapOfMovingMetrics)


class SequentialV4(SequentialGuard):
    """The guard rule "sequential-v4", by which runs are judged that began with it."""

    name: ClassVar[str] = "sequential-v4"
    channels: ClassVar[type[MetricChannels]] = V4Channels
