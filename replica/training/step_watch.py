"""`StepWatch`: notices a training loop whose attached optimizer never steps, before it trains for nothing for days.

Counts batches, or calls of `replica.step`, until the first step of the attempt. Afterwards nothing is watched: a loop
that has stepped once is attached to the right optimizer.
"""

import weakref

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers

# Gradients in a row that were computed and dropped without a step. A GradScaler drops those of its first batches while
# it halves its scale: at most 40 times from its start at 2^16 to the smallest scale that makes a difference.
MOST_DROPPED = 64
# Batches without a step while gradients are kept, or none is seen: twice the largest accumulation in use, of 512
# micro-batches, and loops that keep gradients elsewhere (`main_grad`) look the same.
MOST_BATCHES = 1024


class StepWatch:
    """Watches the optimizers that `attach` got until they step once."""

    def __init__(self, optimizers: InnerOptimizers) -> None:
        self._optimizers = optimizers
        self._batches = 0
        self._dropped = 0
        self._gradient: weakref.ref[torch.Tensor] | None = None  # the one that was there after the last batch
        self._has_stepped = False

    def stepped(self) -> None:
        """Count a step: from now on nothing is watched."""
        self._has_stepped, self._gradient = True, None

    def batch_done(self) -> None:
        """Count a batch. Raises `ConfigError` after too many without a step."""
        if self._has_stepped:
            return
        self._batches += 1
        # Accumulation adds to the same tensor; zero_grad without a step leaves another one, or none.
        newest = next((p.grad for p in self._optimizers.parameters() if p.grad is not None), None)
        kept = self._gradient is not None and self._gradient() is newest
        self._dropped = 0 if kept else self._dropped + (self._gradient is not None)
        self._gradient = None if newest is None else weakref.ref(newest)
        if self._dropped >= MOST_DROPPED or self._batches >= MOST_BATCHES:
            dropped = ", and dropped their gradients" if self._dropped >= MOST_DROPPED else ""
            raise ConfigError(
                f"the training loop took {self._batches} batches{dropped}, and no optimizer.step() of the attached "
                f"optimizer ({self._optimizers.names}) came: nothing would ever be trained together. Give attach the "
                f"optimizer that the loop steps, and step it at least every {MOST_BATCHES - 1} batches."
            )
