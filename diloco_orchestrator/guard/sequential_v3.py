"""`SequentialV3`: the rule "sequential-v3", by which runs that began before "sequential-v4" go on to be judged.

Frozen: its states and verdicts keep their bytes (golden digests), since commits of those runs are derived again by it.
It differs from `SequentialV4` in this: bursts of noise only count as the noise of some 32 rounds does; steps of few
items are falls; early collapse compares the first base too; no share is left out of the mean.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from diloco_orchestrator.guard.channels.early import EarlyCollapse
from diloco_orchestrator.guard.channels.falls import Falls
from diloco_orchestrator.guard.channels.metrics import MetricChannels
from diloco_orchestrator.guard.channels.noise import Noise
from diloco_orchestrator.guard.channels.outliers import NAMED, FallingShares
from diloco_orchestrator.guard.sequential import SequentialGuard
from diloco_orchestrator.guard.sequential_v4 import V4Channels


@dataclass
class SteadyNoise(Noise):
    """`Noise` of the size that its second differences have over some 32 rounds."""

    def present(self) -> float:
        return self.bend


@dataclass
class AnyFalls(Falls):
    """`Falls` that counts a fall of any size, also one of the score's smallest changes."""

    CUSUMS: ClassVar = ((0.35, 1.5, 6.0), (0.5, 2.0, 6.1))
    STEPS: ClassVar = 0.0


@dataclass
class CollapseFromFirst(EarlyCollapse):
    """`EarlyCollapse`, the detector of a fall in a run's first rounds, that compares the first base too."""

    LEAVES_OUT_FOOT: ClassVar[bool] = False


@dataclass
class AllShares(FallingShares):
    """`FallingShares` that leaves no share out of the mean, and names those that gain less than the others, too.

    Stored state: 2 numbers per share, and 2.
    """

    LEAVES_OUT: ClassVar[bool] = False

    def state(self) -> Any:
        return super().state()[:-4]

    def _is_worse(self, share: str) -> bool:
        return self.drift[share] < -NAMED * self.spread


@dataclass
class V3Channels(V4Channels):
    """The statistics of the guard rule "sequential-v3" about held-out score and training metric."""

    noise: Noise = field(default_factory=SteadyNoise)
    gap_noise: Noise = field(default_factory=SteadyNoise)
    falls: Falls = field(default_factory=AnyFalls)
    early: EarlyCollapse = field(default_factory=CollapseFromFirst)
    shares: FallingShares = field(default_factory=AllShares)


class SequentialV3(SequentialGuard):
    """The guard rule "sequential-v3", by which runs are judged that began with it."""

    name: ClassVar[str] = "sequential-v3"
    channels: ClassVar[type[MetricChannels]] = V3Channels
