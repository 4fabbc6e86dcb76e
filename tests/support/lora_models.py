"""A small model with LoRA adapters under PEFT's names, so that tests need no PEFT."""

from typing import Any

import torch


class LoraLinear(torch.nn.Module):
    """A frozen linear layer and an adapter, held as PEFT's `lora.Linear` holds them."""

    def __init__(self, base: torch.nn.Linear, rank: int = 2, alpha: float = 4.0, adapter: str = "default") -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        a, b = (torch.nn.Linear(i, o, bias=False) for i, o in ((base.in_features, rank), (rank, base.out_features)))
        torch.nn.init.zeros_(b.weight)
        self.lora_A, self.lora_B = torch.nn.ModuleDict({adapter: a}), torch.nn.ModuleDict({adapter: b})
        self.scaling = {adapter: alpha / rank}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        for name, scaling in self.scaling.items():
            out = out + scaling * self.lora_B[name](self.lora_A[name](x))
        return out

    def effective(self) -> torch.Tensor:
        """The weight that the layer applies, float64."""
        ((name, scaling),) = self.scaling.items()
        product = self.lora_B[name].weight.double() @ self.lora_A[name].weight.double()
        return (self.base_layer.weight.double() + scaling * product).detach()


def lora_mlp(dtype: torch.dtype = torch.float32, **settings: Any) -> torch.nn.Sequential:
    """Two adapted layers; the first layer's bias is frozen, the last layer is trained whole.

    The same values at every call. Not by torch's global generator: replicas that are threads of one process share it.
    """
    layers = [LoraLinear(torch.nn.Linear(4, 8), **settings), LoraLinear(torch.nn.Linear(8, 6), **settings)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" not in name:
                parameter.uniform_(-0.4, 0.4, generator=generator)
    return model.to(dtype)
