"""The Monarch actor of `monarch_replica`: holds a copy of the model and computes gradients."""

from typing import Any

import torch
from monarch.actor import Actor, current_rank, endpoint

from composer.model import make_model
from composer.monarch_replica import gradients_here


class GradientActor(Actor):
    """One process of the mesh."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.model = make_model(seed)

    @endpoint
    def gradients(self, parameters: list[torch.Tensor], parts: list[Any]) -> tuple[list[torch.Tensor], float]:
        """Gradients and loss of this actor's part, at these parameters."""
        with torch.no_grad():
            for own, given in zip(self.model.parameters(), parameters, strict=True):
                own.copy_(given)
        return gradients_here(self.model, parts[current_rank().rank])
