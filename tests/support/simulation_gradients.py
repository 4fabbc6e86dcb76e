"""What replicas of a simulated run train: a model, and gradients that follow from replica and batch alone."""

import torch
from lora_models import LoraLinear

LEARNING_RATE = 1 / 64
RANK = 2  # of an adapter


class Model(torch.nn.Module):
    """One input, `width` outputs, and perhaps a buffer that counts steps. `adapted`: a frozen layer with an adapter."""

    def __init__(self, width: int, buffer: bool, adapted: bool = False) -> None:
        super().__init__()
        if adapted:
            self.layer = LoraLinear(torch.nn.Linear(1, width, bias=False), RANK)
        else:
            self.bias, self.weight = torch.nn.Parameter(torch.zeros(width)), torch.nn.Parameter(torch.zeros(width, 1))
        if buffer:
            self.register_buffer("steps", torch.zeros(()))
        with torch.no_grad():
            for number, (_, parameter) in enumerate(sorted(self.named_parameters())):
                parameter.fill_(2.0 - number)

    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def count_step(self) -> None:
        for buffer in self.buffers():
            buffer += 1


def gradient(replica_id: int, batch: int) -> float:
    """Of a parameter's first element: a whole number, so that sums of steps are nearly exact."""
    return float(1 + (7 * batch + 3 * replica_id) % 5)


def pattern(replica_id: int, parameter: torch.Tensor) -> torch.Tensor:
    """What the gradient of each element is multiplied by: 1.0 first, so that replicas differ in direction."""
    numbers = torch.arange(parameter.numel()).view(parameter.shape)
    return 1.0 - (numbers * (replica_id + 1) % 4).to(torch.float32) / 2
