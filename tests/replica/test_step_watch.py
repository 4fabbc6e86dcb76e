"""A loop whose attached optimizer never steps is told so soon; legitimate ways to step seldom are not."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from in_one_process import SmallRun
from tiny_workloads import batch_of, mlp

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ConfigError, Preempted
from replica.context import ReplicaContext
from replica.process.run_attempt import LeavingNotice
from replica.training.inner_optimizers import MOST_BATCHES, MOST_DROPPED

Each = Callable[[int, torch.nn.Module, torch.optim.Optimizer], object]


class Loop:
    """One replica whose loop calls `each(number, model, optimizer)` for every batch. `error`: what ended it."""

    def __init__(self, each: Each) -> None:
        self.batches, self.error = 0, ""
        ctx = SmallRun(1, rounds=1, sync_every=2, guard="off").context()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            with ctx.attach(model, optimizer) as session:
                for _ in session.batches([0]):
                    self.batches += 1
                    each(self.batches, model, optimizer)
        except ConfigError as error:
            self.error = str(error)


def backward(model: torch.nn.Module) -> None:
    model(batch_of(0)[0]).square().mean().backward()


def test_a_loop_that_drops_its_gradients_without_a_step_is_told_after_64_of_them():
    loop = Loop(lambda _, model, optimizer: (optimizer.zero_grad(), backward(model)))
    assert loop.batches == MOST_DROPPED + 1
    assert f"took {loop.batches} batches, and dropped their gradients" in loop.error
    assert "no optimizer.step() of the attached optimizer (SGD) came" in loop.error


def test_a_loop_that_computes_no_gradient_at_all_is_told_too():
    loop = Loop(lambda *_: None)
    assert "no optimizer.step() of the attached optimizer" in loop.error and loop.batches == MOST_BATCHES


def test_steps_of_another_optimizer_are_none_of_the_attached():
    def each(_: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        other.zero_grad(), backward(model), other.step()

    loop = Loop(each)
    assert "Give attach the optimizer that the loop steps" in loop.error and loop.batches == MOST_DROPPED + 1


@pytest.mark.parametrize(("size", "to_none"), [(1, True), (8, True), (8, False), (512, True)])
def test_gradient_accumulation_is_no_reason_to_end(size: int, to_none: bool):
    def each(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model)
        if number % size == 0:
            optimizer.step(), optimizer.zero_grad(set_to_none=to_none)

    loop = Loop(each)
    assert loop.error == "" and loop.batches == 2 * size


def test_first_batches_that_a_grad_scaler_skips_are_no_reason_to_end():
    def each(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model)
        if number > 40:  # the scale has come down
            optimizer.step()
        optimizer.zero_grad()

    loop = Loop(each)
    assert loop.error == "" and loop.batches == 42


def test_a_loop_that_goes_on_with_another_optimizer_is_told():
    def each(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        used = optimizer if number == 1 else torch.optim.SGD(model.parameters(), lr=0.01)
        used.zero_grad(), backward(model), used.step()

    loop = Loop(each)
    assert f"took {MOST_BATCHES} batches since its last step, and no optimizer.step() of the attached" in loop.error
    assert loop.batches == MOST_BATCHES


def test_after_the_first_step_dropped_gradients_are_no_reason_to_end():
    def each(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(), backward(model)
        if number == 1 or number > 2 * MOST_DROPPED:
            optimizer.step()

    assert Loop(each).error == ""


def test_calls_of_step_without_an_optimizer_step_are_counted_alike():
    ctx = SmallRun(1, sync_every=2, guard="off").context()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ctx.attach(model, optimizer) as session, pytest.raises(ConfigError, match=r"no optimizer\.step"):
        while True:
            optimizer.zero_grad(), backward(model)
            session.step(loss=1.0)


# -- a loop that never comes back to us -------------------------------------------------------------------------------


@pytest.fixture
def notice() -> Iterator[LeavingNotice]:
    before = signal.getsignal(signal.SIGTERM)
    given = LeavingNotice(ManualClock())
    given.install()
    yield given
    signal.signal(signal.SIGTERM, before)


def is_interrupted(notice: LeavingNotice, does: Callable[[Any, torch.optim.Optimizer], object]) -> bool:
    """Whether SIGTERM raises `Preempted` in a loop that has done this."""
    ctx: ReplicaContext = SmallRun(1, sync_every=9, guard="off").context()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    unheard = notice.interrupting(lambda: ctx.session is not None and ctx.session.is_unheard)
    with unheard, ctx.attach(model, optimizer) as session:
        does(session, optimizer)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Preempted:
            return True
    assert notice()
    return False


def test_sigterm_ends_a_loop_that_neither_steps_nor_asks(notice: LeavingNotice):
    assert is_interrupted(notice, lambda session, optimizer: session.observe(loss=1.0))


@pytest.mark.parametrize(
    "does",
    [
        lambda session, optimizer: next(session.batches([1])),
        lambda session, optimizer: session.step(loss=1.0),
        lambda session, optimizer: optimizer.step(),
    ],
)
def test_sigterm_leaves_a_loop_that_asks_or_has_work_to_end_by_itself(notice: LeavingNotice, does: Any):
    assert not is_interrupted(notice, does)
