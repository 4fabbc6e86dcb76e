"""Optimizers as people write them: with state in dtypes of their own, and around other optimizers."""

from typing import Any

import torch

Closure = Any


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675) with its momentum in bf16, whatever the parameters are."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                momentum = state["momentum"].float()
                p.sub_(group["lr"] * momentum.lerp(p.grad.float(), 0.1).sign().to(p.dtype))
                state["momentum"].copy_(momentum.lerp(p.grad.float(), 0.01))


class Mixed(torch.optim.Optimizer):
    """Momentum in fp64, with counts in int8 and a mask in bool, one of them nested."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float64)
                    state["signs"] = {"count": torch.zeros_like(p, dtype=torch.int8)}
                    state["was_up"] = torch.zeros_like(p, dtype=torch.bool)
                state["momentum"].mul_(0.9).add_(p.grad.double(), alpha=1 / 3)
                up = state["momentum"] > 0
                state["signs"]["count"] += (up != state["was_up"]).to(torch.int8)
                state["was_up"].copy_(up)
                p.sub_((group["lr"] * state["momentum"] / (1 + state["signs"]["count"])).to(p.dtype))


class Lookahead(torch.optim.Optimizer):
    """Lookahead (arXiv 1907.08610) around another optimizer, whose state is not in this one's `state_dict`."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 3) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.every = inner, every
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["slow"], state["count"] = p.detach().clone(), 0
                state["count"] += 1
                if state["count"] % self.every == 0:
                    p.copy_(state["slow"].lerp_(p, 0.5))


class Elsewhere(torch.optim.Optimizer):
    """Momentum that the optimizer keeps in an attribute of its own, where no `state_dict` finds it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.momenta: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                momentum = self.momenta.setdefault(p, torch.zeros_like(p))
                p.sub_(group["lr"] * momentum.mul_(0.9).add_(p.grad))


class Shifting(torch.optim.AdamW):
    """AdamW that loses a bit of its state when it is loaded."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for values in self.state.values():
            values["exp_avg"].mul_(1 + 2**-20)
