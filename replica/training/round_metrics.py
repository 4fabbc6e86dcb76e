"""`RoundMetrics`: what the training loop counted and observed in the open round, summed up for its contribution."""

import math
from collections.abc import Mapping

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Metric, Progress
from diloco_orchestrator.replica.training.heldout_scorer import SIGN


class RoundMetrics:
    """Inner steps, tokens and observed values. `metric`: "loss" or "reward", which one the guard compares."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.total_inner_steps = 0  # of the replica, over all its attempts
        self.total_tokens = 0
        self.inner_steps = 0  # that no contribution has named yet
        self.tokens = 0  # of the round
        self._values: dict[str, list[float]] = {}

    def resume(self, progress: Progress) -> None:
        """Continue the totals from a manifest of this replica."""
        self.total_inner_steps, self.total_tokens = progress.inner_steps, progress.tokens
        self.inner_steps = 0

    def begin_round(self) -> None:
        """Forget the round: a contribution holds it. What is observed from now on belongs to the next one."""
        self.inner_steps = self.tokens = 0
        self._values = {}

    def count_step(self) -> None:
        """One inner step was taken."""
        self.total_inner_steps += 1
        self.inner_steps += 1

    def add(self, values: Mapping[str, float | None], tokens: int) -> None:
        """Add the values of one inner step; None means not measured. Raises `ConfigError` for a negative count."""
        if tokens < 0:
            raise ConfigError(f"observe(tokens={tokens}): a count cannot be negative.")
        for name, value in values.items():
            if value is not None:
                self._values.setdefault(name, []).append(float(value))
        self.tokens += tokens
        self.total_tokens += tokens

    def in_loop(self) -> Metric | None:
        """The training metric as published, higher is better; None if nothing was observed.

        It is of the round's second half, because the guard pairs it with the score of the model at the round's end.
        The mean of a whole first round lies far above that loss, and the gap between the two would stay for ever.
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
