"""What the training loop observed in the open round, summed up for its manifest."""

import math
from collections.abc import Mapping

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Metric
from diloco_orchestrator.replica.training.heldout_scorer import SIGN


class Observations:
    """Sums and counts of one round; tokens of the whole run. `metric` is "loss" or "reward"."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.total_tokens = 0
        self._values: dict[str, list[float]] = {}
        self.tokens = 0

    def begin_round(self) -> None:
        self._values = {}
        self.tokens = 0

    def add(self, values: Mapping[str, float | None], tokens: int) -> None:
        """One inner step's metrics; None means not measured."""
        if tokens < 0:
            raise ConfigError(f"observe(tokens={tokens}): a count cannot be negative.")
        for name, value in values.items():
            if value is not None:
                self._values.setdefault(name, []).append(float(value))
        self.tokens += tokens
        self.total_tokens += tokens

    def in_loop(self) -> Metric | None:
        """The training metric as published, higher is better; None if nothing was observed.

        Of the round's second half: the guard pairs it with the score of the model at the round's end. The mean of a
        whole first round lies far above that loss, and the gap between the two would stay for ever.
        """
        values = self._values.get(self.metric, [])
        late = values[len(values) // 2 :]
        return _summed([SIGN[self.metric] * value for value in late]) if late else None

    def metrics(self) -> dict[str, Metric]:
        """Everything observed, in its own direction, by name."""
        found = {name: _summed(values) for name, values in sorted(self._values.items())}
        return {**found, "tokens": Metric(sum=float(self.tokens), count=1)} if self.tokens else found


def _summed(values: list[float]) -> Metric:
    finite = all(map(math.isfinite, values))
    return Metric(sum=math.fsum(values) if finite else None, count=len(values))
