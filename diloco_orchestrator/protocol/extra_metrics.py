"""Metrics of the user's own: their names, and their means over a round's manifests.

In a manifest's metrics they have a prefix, so that none can be taken for a metric of ours.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from diloco_orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from diloco_orchestrator.protocol.records import Contribution

PREFIX = "extra."
MOST = 16  # names in a round
_NAME = re.compile(r"[a-z_]{1,32}")


def check_name(name: str) -> str:
    """The name itself. Raises `ConfigError` unless it is 1 to 32 lower-case letters and underscores."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"the extra metric {name!r}: use 1 to 32 lower-case letters a to z and underscores.")
    return name


def checked(extra: Mapping[str, float], known: int = 0) -> dict[str, float]:
    """The metrics of one inner step by their names in manifests. `known`: other names that the round has already.

    Raises `ConfigError` for a bad name, a 17th one, and a number that is not finite.
    """
    if len(extra) + known > MOST:
        raise ConfigError(f"{len(extra) + known} extra metrics in one round: {MOST} are the most. Leave some out.")
    for name, value in extra.items():
        if not math.isfinite(value):
            raise ConfigError(f"the extra metric {check_name(name)!r} is {value}: leave out what was not measured.")
    return {PREFIX + check_name(name): float(value) for name, value in extra.items()}


def means_of(manifests: "Sequence[Contribution]") -> dict[str, float]:
    """The mean over replicas of each one's mean in the round, by name."""
    found: dict[str, list[float]] = {}
    for manifest in manifests:
        for name, metric in manifest.metrics.items():
            if name.startswith(PREFIX):
                found.setdefault(name.removeprefix(PREFIX), []).append(metric.mean)
    means = {name: mean_of(values) for name, values in sorted(found.items())}
    return {name: mean for name, mean in means.items() if mean is not None}


def mean_of(values: Iterable[float]) -> float | None:
    """The mean of those values that are finite, which is finite too; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    try:
        return math.fsum(finite) / len(finite)
    except OverflowError:  # a sum of numbers that replicas made up
        return math.fsum(value / len(finite) for value in finite)
