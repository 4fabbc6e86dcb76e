"""The inner optimizer's state after a restart: its dtypes and bits; and optimizers whose state would be lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_optimizers import Elsewhere, Lion, Lookahead, Mixed
from protocol_fleet import Fleet
from sessions import context_of
from tiny_workloads import batch_of, inner_step, mlp

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.tensor_tree import pack, unpack


class Killed(BaseException):
    """The process is gone."""


class Fp32Momentum(torch.optim.Optimizer):
    """SGD with its momentum in fp32, whatever the parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                p.sub_((group["lr"] * state["exp_avg"].mul_(0.9).add_(p.grad.float())).to(p.dtype))


def both(parameters: Any) -> list[torch.optim.Optimizer]:
    wrapper = Lookahead(torch.optim.AdamW(parameters, lr=0.01))
    return [wrapper, wrapper.inner]


Made = torch.optim.Optimizer | list[torch.optim.Optimizer]
KINDS: dict[str, tuple[Callable[[Any], Made], torch.dtype]] = {
    "bf16 momentum of an fp32 model": (Lion, torch.float32),
    "fp64, int8 and bool": (Mixed, torch.float32),
    "fp32 moments of a bf16 model": (Fp32Momentum, torch.bfloat16),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.01), torch.float32),
    "AdamW of a bf16 model": (lambda p: torch.optim.AdamW(p, lr=0.01), torch.bfloat16),
    "a wrapper and what it wraps": (both, torch.float32),
}


def attempt(fleet: Fleet, make: Callable[[Any], Made], dtype: torch.dtype, dies_after: int | None = None) -> None:
    torch.manual_seed(0)
    model = mlp().to(dtype)
    optimizer = make(list(model.parameters()))
    steps = 0
    with context_of(fleet, 0).attach(model, optimizer) as replica:
        for seed in replica.batches(range(100)):
            stepped = optimizer[0] if isinstance(optimizer, list) else optimizer
            x, y = batch_of(seed)
            replica.observe(loss=inner_step(model, stepped, (x.to(dtype), y.to(dtype))))
            steps += 1
            if steps == dies_after:
                raise Killed


@pytest.mark.parametrize("kind", KINDS)
def test_killed_three_times_the_run_ends_with_the_undisturbed_bits(kind: str):
    make, dtype = KINDS[kind]
    undisturbed, killed = Fleet(replicas=1, rounds=4, sync_every=3), Fleet(replicas=1, rounds=4, sync_every=3)
    attempt(undisturbed, make, dtype)
    for steps in (4, 2, 4):
        with pytest.raises(Killed):
            attempt(killed, make, dtype, dies_after=steps)
    attempt(killed, make, dtype)
    assert [c.base_digest for c in killed.commits()] == [c.base_digest for c in undisturbed.commits()]


def stepped(make: Callable[[Any], Made], model: torch.nn.Module) -> InnerOptimizers:
    optimizer = make(list(model.parameters()))
    inner_step(model, optimizer, batch_of(0))  # type: ignore[arg-type]
    return InnerOptimizers(optimizer)


@pytest.mark.parametrize("make", [Lion, Mixed, torch.optim.AdamW, torch.optim.Adafactor])
def test_a_loaded_state_has_the_bytes_that_were_saved(make: Callable[[Any], Made]):
    saved = pack(stepped(make, mlp()).state_dict())
    other = InnerOptimizers(make(list(mlp().parameters())))
    other.load_state_dict(unpack([saved], "here"))
    assert pack(other.state_dict()) == saved


def test_an_optimizer_with_a_state_dict_of_its_own_loads_it_alone():
    class InHalf(torch.optim.Adam):
        """Saves moments in another form than it keeps them."""

        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            halves = {n: {k: v.half() if k != "step" else v for k, v in s.items()} for n, s in state["state"].items()}
            return {**state, "state": halves}

    other = InnerOptimizers(InHalf(mlp().parameters()))
    other.load_state_dict(unpack([pack(stepped(InHalf, mlp()).state_dict())], "here"))
    (kept,) = {value["exp_avg"].dtype for value in other.all[0].state.values()}
    assert kept == torch.float32


# -- optimizers around others -----------------------------------------------------------------------------------------


class Facade(torch.optim.Optimizer):
    """What accelerate and Lightning give a loop: everything is that of the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def test_a_facade_is_attached_as_the_optimizer_behind_it():
    inner = torch.optim.AdamW(mlp().parameters())
    assert InnerOptimizers(Facade(Facade(inner))).all == [inner]
    assert InnerOptimizers([Facade(inner)]).all == [inner]
    assert InnerOptimizers(Lion(mlp().parameters())).names == "Lion"


def test_a_wrapper_that_saves_nothing_of_what_it_wraps_is_refused():
    wrapper = Lookahead(torch.optim.AdamW(mlp().parameters()))
    words = (
        r"Lookahead holds another one, inner \(AdamW\).* lose the state of AdamW. Attach both, .*optimizer.inner\]\)"
    )
    with pytest.raises(ConfigError, match=words):
        InnerOptimizers(wrapper)
    assert InnerOptimizers([wrapper, wrapper.inner]).names == "Lookahead, AdamW"


def test_a_state_that_is_empty_after_the_first_step_is_said_once(caplog: pytest.LogCaptureFixture):
    attempt(Fleet(replicas=1, rounds=2, sync_every=2), Elsewhere, torch.float32)
    (said,) = [r.getMessage() for r in caplog.records if "no state after its first step" in r.getMessage()]
    assert "Elsewhere" in said and "give it a state_dict" in said
    caplog.clear()
    attempt(Fleet(replicas=1, rounds=2, sync_every=2), lambda p: torch.optim.SGD(p, lr=0.01), torch.float32)
    attempt(Fleet(replicas=1, rounds=2, sync_every=2, replica_state="none"), Elsewhere, torch.float32)
    assert "no state" not in caplog.text


def test_a_state_that_cannot_be_saved_is_refused_at_the_first_step():
    class Sparse(Lion):
        def step(self, closure: Any = None) -> None:
            super().step()
            for state in self.state.values():
                state["sparse"] = torch.ones(2).to_sparse()

    Lion(mlp().parameters())  # torch runs the hooks in `super().step()` too, from now on
    with pytest.raises(ConfigError, match=r"state of the optimizer Sparse.*'sparse'\] is a Tensor of layout .*sparse"):
        attempt(Fleet(replicas=1), Sparse, torch.float32, dies_after=1)


def test_a_step_that_calls_that_of_its_parent_class_is_one_inner_step():
    """torch runs an optimizer's hooks once for each class whose `step` is called, if that class was instantiated."""

    class Mine(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.AdamW(mlp().parameters())
    begun, done, model = [], [], mlp()
    optimizer = Mine(model.parameters())
    InnerOptimizers(optimizer).watch(lambda: begun.append(1), lambda: done.append(1))
    for seed in range(3):
        inner_step(model, optimizer, batch_of(seed))
        with pytest.raises(ZeroDivisionError):  # a step that raises is none, and those after it are counted
            optimizer.step(lambda: 1 / 0)
    assert (len(begun), len(done)) == (6, 3)


# -- other arguments that are refused at once -------------------------------------------------------------------------


def attached(**options: Any) -> Any:
    model = mlp()
    return context_of(Fleet(replicas=1), 0).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("stateful", "words"),
    [
        ([torch.optim.lr_scheduler.LRScheduler], 'stateful is a list.*attach\\(stateful={"schedule": schedule}\\)'),
        ({"count": 3}, r"stateful\['count'\] is a int without state_dict and load_state_dict"),
        ({"half": type("Half", (), {"state_dict": dict})()}, r"'half'\] is a Half without load_state_dict"),
        ({1: torch.nn.Linear(1, 1)}, r"stateful\[1\] is named by no text"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_attach(stateful: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        attached(stateful=stateful)


def test_tokens_are_one_whole_number():
    with attached() as replica:
        replica.observe(tokens=torch.tensor(5))
        replica.observe(tokens=torch.ones(2).numel())
        assert replica._training.metrics.tokens == 7 and type(replica._training.metrics.tokens) is int
        for wrong in (2.5, torch.tensor([1, 2]), torch.tensor(1.0), "3"):
            with pytest.raises(ConfigError, match=r"observe\(tokens=.*one whole number, such as batch.numel"):
                replica.observe(tokens=wrong)  # type: ignore[arg-type]


def test_complex_parameters_are_refused_with_the_real_form():
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"'bias' is complex64: .*imaginary part would be lost.*view_as_real"):
        context_of(Fleet(replicas=1), 0).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
