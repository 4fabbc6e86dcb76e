"""`Fp32View`: one fragment's parameters as fp32 numbers on the CPU, where the base and all averages are computed.

Parameters in another dtype or on a GPU get fp32 copies (shadows), so that the base keeps fp32 precision and an outer
step has the same bits on every machine. Knows nothing of rounds.
"""

from collections.abc import Mapping, Sequence

import torch

from diloco_orchestrator.outer.base import Base


class Fp32View:
    """The parameters of one fragment as float32 on the CPU, in name order.

    A parameter that is contiguous fp32 on the CPU is used itself, any other through a shadow: an fp32 CPU copy that is
    updated when the fragment is synchronised.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters: dict[str, torch.Tensor] = dict(parameters)
        self._fp32 = {name: p if _is_plain(p) else _shadow(p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def pseudo_gradient(self, base: Base) -> list[torch.Tensor]:
        """`base - local`: what training changed, with the sign of a gradient. New float32 CPU tensors in name order."""
        self._update_shadows()
        return base.minus(self._fp32)

    @torch.no_grad()
    def install(self, base: Base, keep: float = 0.0) -> None:
        """Set the parameters to `(1 - keep) * base + keep * local`. `keep`: in [0, 1]."""
        if keep:
            self._update_shadows()
            local = {name: tensor.clone() for name, tensor in self._fp32.items()}
        base.copy_into(self._fp32)
        if keep:
            for name, tensor in self._fp32.items():
                # lerp, as torchft mixes. Its bits may differ on CPUs with fused multiply-add; only this replica's own
                # training depends on them, never the base.
                tensor.lerp_(local[name], keep)
        for name, shadow in self._shadows():
            self._parameters[name].copy_(shadow)

    @torch.no_grad()
    def show(self, base: Base) -> None:
        """Set the model's parameters to the base, to be undone by `restore`; shadows are not changed."""
        base.copy_into(self._parameters)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the model's parameters, in their own dtype."""
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def restore(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the model's parameters to values that `values()` returned; shadows are not changed."""
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def _update_shadows(self) -> None:
        """Update the shadows with the changes that training made to the parameters."""
        for name, shadow in self._shadows():
            parameter = self._parameters[name]
            if parameter.dtype == torch.float32:
                shadow.copy_(parameter)
            else:
                # Add only the change: the shadow keeps digits that the model's dtype cannot hold.
                shadow.add_(parameter.to("cpu", torch.float32) - shadow.to(parameter.dtype).to(torch.float32))

    def _shadows(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in self._fp32.items() if tensor is not self._parameters[name]]


def views_of(parameters: Mapping[str, torch.nn.Parameter], fragments: Sequence[Sequence[str]]) -> list[Fp32View]:
    """One view per fragment. `fragments`: the parameter names of each."""
    return [Fp32View({name: parameters[name] for name in names}) for names in fragments]


def _is_plain(parameter: torch.Tensor) -> bool:
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()


def _shadow(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True).contiguous()
