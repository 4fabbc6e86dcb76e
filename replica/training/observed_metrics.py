"""`ObservedMetrics`: steps, tokens and observed values of the open round, summed up for its contribution."""

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.records import Metric, Progress
from diloco_orchestrator.protocol.round_metrics import EXTRA_PREFIX, checked_extra, never_observed
from diloco_orchestrator.replica.rounds.interface import ContributionFields
from diloco_orchestrator.replica.training.heldout_scorer import SIGN

log = logging.getLogger(__name__)

_NO_START = 5.0  # times the hard stop: no drift of a first round


def number_in(value: Any) -> float:
    """The number in a scalar of Python, NumPy or torch, whose tensors with a gradient warn in `float`."""
    return float(value.item() if hasattr(value, "item") else value)


class ObservedMetrics:
    """Steps, tokens and metrics that a replica has observed. `metric`: the training metric, "loss" or "reward"."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.total_inner_steps = 0  # of the replica, over all its attempts
        self.total_tokens = 0
        self.inner_steps = 0  # since the replica's last contribution
        self.tokens = 0  # of the open round
        self._values: dict[str, list[float]] = {}

    def resume(self, progress: Progress) -> None:
        """Set the totals of steps and tokens to those in `progress`, from a manifest of this replica.

        What was counted and observed in the open round is dropped, with the steps that it was counted in.
        """
        self.total_inner_steps, self.total_tokens = progress.inner_steps, progress.tokens
        self.take()

    def take(self) -> ContributionFields:
        """The counts and sums for the open round's contribution; values observed later count for the next one."""
        taken = ContributionFields(
            steps=self.inner_steps, tokens=self.tokens, in_loop=self.in_loop(), metrics=self.metrics()
        )
        self.inner_steps = self.tokens = 0
        self._values = {}
        return taken

    def taken_raw(self) -> tuple[dict[str, list[float]], int]:
        """(values by name, in step order; tokens) that one rank observed since the last call, for rank 0."""
        taken = self._values, self.tokens
        self._values, self.tokens = {}, 0
        return taken

    def add_of_ranks(self, others: Sequence[tuple[Mapping[str, Sequence[float]], int]]) -> None:
        """Add what the other ranks of this replica observed, before `take`: (values by name in step order, tokens).

        A value counts as the mean over the ranks that observed one in that step; tokens are summed.
        """
        for name in sorted({name for values, _ in others for name in values}):
            every = [self._values.get(name, []), *(values.get(name, []) for values, _ in others)]
            steps = max(map(len, every))
            columns = [[each[step] for each in every if step < len(each)] for step in range(steps)]
            self._values[name] = [math.fsum(column) / len(column) for column in columns]
        tokens = sum(count for _, count in others)
        self.tokens += tokens
        self.total_tokens += tokens

    def count_step(self) -> None:
        """Count one inner step."""
        self.total_inner_steps += 1
        self.inner_steps += 1

    def add_extra(self, extra: Mapping[str, float]) -> None:
        """Add the user's own metrics of one inner step. Raises `ConfigError` for a bad name or a non-finite value."""
        known = {name.removeprefix(EXTRA_PREFIX) for name in self._values if name.startswith(EXTRA_PREFIX)}
        self.add(checked_extra(extra, len(known - extra.keys())), 0)

    def add(self, values: Mapping[str, float | None], tokens: int) -> None:
        """Add an inner step's values; None: not measured. Raises `ConfigError` unless `tokens` is an integer >= 0."""
        try:
            tokens = operator.index(tokens)
        except TypeError:
            raise ConfigError(
                f"observe(tokens={tokens!r}): a count of tokens is one whole number, such as batch.numel()."
            ) from None
        if tokens < 0:
            raise ConfigError(f"observe(tokens={tokens}): a count cannot be negative.")
        for name, value in values.items():
            if value is not None:
                self._values.setdefault(name, []).append(number_in(value))
        self.tokens += tokens
        self.total_tokens += tokens

    def warn_of_sequence_sums(self, budget: float) -> None:
        """Warn if the KL divergence that the first steps observed is too large for a mean over tokens.

        It is then a sum over sequences. `budget`: the limit `kl_hard_stop` in nats per token.
        """
        values = self._values.get("kl_to_init", [])
        if values and (mean := math.fsum(values) / len(values)) > _NO_START * budget:
            log.warning(
                "observe(kl_to_init=%.3g) is %.0f times kl_hard_stop=%g in the first round, where the model is next to "
                "its start: kl_to_init must be a mean over tokens, in nats per token, not a sum over sequences",
                mean,
                mean / budget,
                budget,
            )

    def warn_of_never_observed(self) -> None:
        """Warn if steps were taken and metrics observed, but never the training metric."""
        observed = [name.removeprefix(EXTRA_PREFIX) for name in self._values]
        if self.inner_steps and observed and self.metric not in self._values:
            log.warning("%s", never_observed(self.metric, observed))

    def in_loop(self) -> Metric | None:
        """The training metric for the manifest, from the first eighth of the round; higher is better. None if
        unobserved.

        The guard compares it with the score of the base that the round started from, and the first steps are near that
        base. A mean over more of a round would be of other models: from scratch it is .7 nats off in the first rounds
        and .2 later, which would count as a gap that grows.
        """
        values = self._values.get(self.metric, [])
        early = values[: -(-len(values) // 8)]
        return _summed([SIGN[self.metric] * value for value in early]) if early else None

    def metrics(self) -> dict[str, Metric]:
        """Sum and count of every value observed in the round, by name, unnegated; with "tokens" if any were counted."""
        found = {name: _summed(values) for name, values in sorted(self._values.items())}
        return {**found, "tokens": Metric(sum=float(self.tokens), count=1)} if self.tokens else found


def _summed(values: list[float]) -> Metric:
    finite = all(map(math.isfinite, values))
    return Metric(sum=math.fsum(values) if finite else None, count=len(values))
