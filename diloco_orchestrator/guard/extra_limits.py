"""`fold_extra`: the guard's limits on the user's own metrics, beside whichever rule judges the held-out score.

An exponential moving average of each metric with a limit is compared with it. State: an average and a count by name.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.protocol.verdict import Verdict, VerdictKind


def fold_extra(
    state: Mapping[str, Any] | None, config: GuardConfig, metrics: Mapping[str, float | None], verdict: Verdict
) -> tuple[dict[str, Any], Verdict]:
    """Add one round's metrics; the next state, and the verdict, which fires if an average is above its limit.

    `metrics`: by name; None if not observed in the round. No limit fires before `min_steps` rounds with its metric;
    one that has fired stays fired. A rule's own verdict comes first.
    """
    averages: dict[str, list[Any]] = {**((state or {}).get("averages") or {})}
    fired: str = (state or {}).get("fired", "")
    for name, limit in sorted(config.max_extra.items()):
        value = metrics.get(name)
        if value is not None and math.isfinite(value):
            before, count = averages.get(name, [value, 0])
            averages[name] = [config.ema_alpha * before + (1 - config.ema_alpha) * value, count + 1]
        average, count = averages.get(name, [0.0, 0])
        if not fired and count >= config.min_steps and average > limit:
            fired = f"extra: {name} {average:.4g} (moving average of {count} rounds) is above its limit of {limit:g}"
    after = {"averages": averages, "fired": fired}
    if fired and not verdict.fire:
        verdict = replace(verdict, fire=True, reason=fired, action=VerdictKind.HALT)
    return after, verdict
