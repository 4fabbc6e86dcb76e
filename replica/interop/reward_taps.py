"""`tap`: wraps a TRL trainer's reward function and records its results, for the guard's training metric.

The trainer's own metrics are means over logging windows and processes; these are all numbers of one inner step.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

RewardFn = Callable[..., Any]  # list[float | None], one per completion; a coroutine for asynchronous functions
_LIST_OF_NUMBERS = list[float | None]


class RewardTap:
    """The rewards that one function returned since the last inner step, one per completion; None: no reward."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.rewards: list[float | None] = []

    def add(self, rewards: Sequence[float | None]) -> None:
        self.rewards += [None if reward is None else float(reward) for reward in rewards]


class ListensToRewards(Protocol):
    """An object that collects the results of wrapped reward functions: a `ReplicaCallback`."""

    @property
    def in_training(self) -> bool:
        """Whether completions generated now belong to training, and not to an evaluation."""
        ...

    def new_tap(self, weight: float) -> RewardTap:
        """A new recorder of one reward function's results, emptied after each inner step.

        `weight`: factor of this function's rewards in the sum over all functions.
        """
        ...


def tap(reward_fn: RewardFn, session_of: ListensToRewards, weight: float = 1.0) -> RewardFn:
    """`reward_fn`, wrapped so that its rewards are also recorded.

    For reward functions that are not in the trainer's `reward_funcs`, which `ReplicaCallback` wraps by itself.
    `weight`: of the function in the sum. Reward models (modules) are returned as they are, with a hook.
    """
    taken = session_of.new_tap(weight)

    def pass_on(rewards: Any) -> None:
        if session_of.in_training:
            taken.add(list(rewards))

    if isinstance(reward_fn, torch.nn.Module):
        reward_fn.register_forward_hook(lambda module, inputs, output: pass_on(output.logits[:, 0].tolist()))
        return reward_fn
    if _is_async(reward_fn):

        @functools.wraps(reward_fn)
        async def tapped_later(*args: Any, **kwargs: Any) -> _LIST_OF_NUMBERS:
            rewards: _LIST_OF_NUMBERS = await reward_fn(*args, **kwargs)
            pass_on(rewards)
            return rewards

        return tapped_later

    @functools.wraps(reward_fn)
    def tapped(*args: Any, **kwargs: Any) -> _LIST_OF_NUMBERS:
        rewards: _LIST_OF_NUMBERS = reward_fn(*args, **kwargs)
        pass_on(rewards)
        return rewards

    return tapped


def take(taps: Sequence[RewardTap]) -> dict[str, float]:
    """Mean and standard deviation of the weighted sums of all recorded rewards. The records are emptied.

    A completion's sum leaves out functions that returned None for it, as TRL's does; completions without any reward do
    not count. The results are not finite if a reward is not, and empty if there was no completion.
    """
    columns = [(each.weight, each.rewards) for each in taps]
    for each in taps:
        each.rewards = []
    rows = max((len(rewards) for _, rewards in columns), default=0)
    sums = []
    for row in range(rows):
        given = [weight * r for weight, rewards in columns if row < len(rewards) and (r := rewards[row]) is not None]
        if given:
            sums.append(math.fsum(given) if all(map(math.isfinite, given)) else math.nan)
    if not sums:
        return {}
    if not all(map(math.isfinite, sums)):
        return {"reward": math.nan}
    mean = math.fsum(sums) / len(sums)
    return {"reward": mean, "reward_std": math.sqrt(math.fsum((each - mean) ** 2 for each in sums) / len(sums))}


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
