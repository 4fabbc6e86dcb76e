"""DiLoCo through torchft: its regression cases, the sign, the equivalences, and what it touches of us."""

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from protocol_fleet import together
from tiny_workloads import batch_of, inner_step, mlp
from torchft.local_sgd import DiLoCo

from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import ConfigError, ModelMismatch, RoundError
from diloco_orchestrator.run_log.run_log import complete_snapshots
from diloco_orchestrator.store.open_store import open_store
from executors.local_process import LocalProcessExecutor
from replica.interop.torchft import MockManager, ObjectStoreManager
from replica.training.outer_loop import make_diloco_outer_loop

PLAIN = OuterConfig(lr=2.0, momentum=0.0)
CASES = list(product((0, 1), (0.0, 0.5, 1.0)))  # fragment_sync_delay, fragment_update_alpha


class TwoScalars(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))


def history_by_hand(syncs: int, delay: int, alpha: float) -> list[tuple[float, float]]:
    """(a, b) after every inner step: gradient 2, inner lr 1, outer lr 2, a fragment every 3 steps, a first."""
    base, local, history = [1.0, 1.0], [1.0, 1.0], []
    for sync in range(syncs):
        fragment = sync % 2
        for step in (1, 2, 3):
            local = [value - 2 for value in local]
            if step == 3 - delay:
                pseudo_gradient = base[fragment] - local[fragment]  # equal on both replicas, so also their mean
            if step == 3:
                base[fragment] -= 2 * pseudo_gradient
                local[fragment] = (1 - alpha) * base[fragment] + alpha * local[fragment]
            history.append((local[0], local[1]))
    return history


def history_through(manager: MockManager | ObjectStoreManager, syncs: int, delay: int, alpha: float):
    model = TwoScalars()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loop = make_diloco_outer_loop(
        model,
        optimizer,
        manager,
        sync_every=6,
        outer=PLAIN,
        fragments=[["a"], ["b"]],
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    )
    history = []
    with loop:
        for _ in range(3 * syncs):
            for parameter in model.parameters():
                parameter.grad = torch.full((1,), 2.0)
            optimizer.step()
            history.append((model.a.item(), model.b.item()))
    return history


@pytest.mark.parametrize(("delay", "alpha"), CASES)
def test_torchfts_regression_cases_through_the_mock_manager(delay: int, alpha: float):
    managers = MockManager.group(2, start_step=2)
    histories = together([lambda m=m: history_through(m, 5, delay, alpha) for m in managers])  # type: ignore[misc]
    expected = history_by_hand(5, delay, alpha)
    for history in histories:
        assert torch.allclose(torch.tensor(history), torch.tensor(expected), atol=1e-5)
    assert [m.current_step() for m in managers] == [7, 7]


@pytest.mark.parametrize(("delay", "alpha"), CASES)
def test_torchfts_regression_cases_through_a_bucket(delay: int, alpha: float, tmp_path: Path):
    def replica(replica_id: int) -> list[tuple[float, float]]:
        manager = ObjectStoreManager.join(str(tmp_path), replica_id, 2, rounds=7, outer=PLAIN)
        return history_through(manager, 7, delay, alpha)

    histories = together([lambda i=i: replica(i) for i in range(2)])  # type: ignore[misc]
    expected = history_by_hand(7, delay, alpha)
    for history in histories:
        assert torch.allclose(torch.tensor(history), torch.tensor(expected), atol=1e-5)


@pytest.fixture(params=["mock", "bucket"])
def manager_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[OuterConfig, int], object]:
    """A manager for one replica alone."""
    if request.param == "mock":
        return lambda outer, rounds: MockManager()
    return lambda outer, rounds: ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=rounds, outer=outer)


def test_the_pseudo_gradient_is_base_minus_local(manager_of):
    """1 - 0.25 * 2 = 0.5 locally; pseudo-gradient 0.5; 1 - 0.5 * 0.5 = 0.75. The other sign would give 1.25."""
    outer = OuterConfig(lr=0.5, momentum=0.0)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with make_diloco_outer_loop(model, optimizer, manager_of(outer, 1), 1, outer):
        model.weight.grad = torch.full((1, 1), 2.0)
        optimizer.step()
    assert model.weight.item() == 0.75


def test_one_replica_with_outer_lr_1_and_no_momentum_is_plain_training(manager_of):
    def train(
        steps: int, loop_of: Callable[[torch.nn.Module, torch.optim.Optimizer], object] | None
    ) -> torch.nn.Module:
        torch.manual_seed(1)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loop = loop_of(model, optimizer) if loop_of else None
        if loop:
            loop.__enter__()  # type: ignore[attr-defined]
        for step in range(steps):
            inner_step(model, optimizer, batch_of(step))
        return model

    outer = OuterConfig(lr=1.0, momentum=0.0)
    manager = manager_of(outer, 5)
    diloco = train(20, lambda model, optimizer: make_diloco_outer_loop(model, optimizer, manager, 4, outer))
    plain = train(20, None)
    for ours, theirs in zip(diloco.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_two_processes_end_with_the_same_bits(tmp_path: Path):
    """2 processes x 4 inner x 2 outer steps."""
    executor = LocalProcessExecutor(tmp_path / "executor")
    args = {"folder": str(tmp_path / "bucket"), "sync_every": 4, "rounds": 2}
    handles = executor.launch_replicas(2, "tiny_workloads:diloco_by_hand", args)
    one, two = (result.value for result in executor.collect(handles))
    assert one == two
    assert one["moved"] and one["syncs"] == 2
    assert one["momenta"] == one["parameters"] == 4
    assert complete_snapshots(open_store(str(tmp_path / "bucket"))) == [0]


# -- which parameters, in which dtype ---------------------------------------------------------------------------------


def train_alone(
    model: torch.nn.Module, folder: Path, steps: int = 4, lr: float = 0.05, **options
) -> ObjectStoreManager:
    """Two outer steps (or more) of one replica over squared outputs."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    manager = ObjectStoreManager.join(str(folder), 0, 1, rounds=steps // 2, outer=options.pop("outer", None))
    with make_diloco_outer_loop(model, optimizer, manager, 2, **options):
        for step in range(steps):
            optimizer.zero_grad()
            x, _ = batch_of(step)
            model(x.to(next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
    return manager


def payload_bytes(folder: Path) -> list[int]:
    return [info.size for info in open_store(str(folder)).list("rounds/") if info.key.endswith(".bin")]


def test_frozen_parameters_stay_and_are_not_sent(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 100), torch.nn.Linear(100, 2))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    manager = train_alone(model, tmp_path)
    assert torch.equal(model[0].weight, frozen)
    assert sorted(manager.participant.base.parameters) == ["1.bias", "1.weight"]
    assert payload_bytes(tmp_path) == [16 + 4 * 202] * 2


def test_tied_parameters_are_sent_once(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    train_alone(model, tmp_path)
    assert payload_bytes(tmp_path) == [16 + 4 * 16] * 2
    assert model[1].weight is model[0].weight


def test_a_bf16_model_keeps_a_base_in_fp32(tmp_path: Path):
    """Outer steps far below bf16's resolution add up in the base."""
    model = torch.nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    manager = train_alone(model, tmp_path, steps=20, lr=0.02, outer=OuterConfig(lr=0.01, momentum=0.0))
    base = manager.participant.base.parameters["weight"]
    assert model.weight.dtype == torch.bfloat16 and base.dtype == torch.float32
    assert torch.equal(model.weight, base.to(torch.bfloat16))
    assert (base - base.to(torch.bfloat16).float()).abs().max() > 0
    assert (base - 1).abs().max() > 1e-4


def test_a_parameter_that_is_not_contiguous_takes_part(tmp_path: Path):
    model = torch.nn.Linear(4, 3)
    model.weight = torch.nn.Parameter(torch.randn(4, 3).t())
    before = model.weight.detach().clone()
    manager = train_alone(model, tmp_path)
    assert torch.equal(model.weight, manager.participant.base.parameters["weight"])
    assert not torch.equal(model.weight, before)


def test_several_fragments_move_in_turn(tmp_path: Path):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with make_diloco_outer_loop(model, optimizer, manager, 2, fragments=2):
        for _ in range(2):
            optimizer.zero_grad()
            model(batch_of(0)[0]).square().mean().backward()
            optimizer.step()
    assert sum(payload_bytes(tmp_path)) == 2 * 16 + 4 * 3 * 20
    base = manager.participant.base.parameters
    assert all(not torch.equal(base[name], before[name]) for name in base)


def test_a_loop_that_goes_on_after_the_last_round_is_told(tmp_path: Path):
    with pytest.raises(RoundError, match=r"the 2 outer steps of the run in .* are taken"):
        train_alone_too_long(tmp_path)
    assert len(payload_bytes(tmp_path)) == 2


def train_alone_too_long(folder: Path) -> None:
    model = mlp()
    manager = ObjectStoreManager.join(str(folder), 0, 1, rounds=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco_outer_loop(model, optimizer, manager, 2):
        for step in range(6):
            inner_step(model, optimizer, batch_of(step))


# -- settings that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 3, "fragments": 2}, "sync_every=3 is not a multiple of the 2 fragments"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 4, "fragment_sync_delay": 4}, r"fragment_sync_delay=4 must be in 0\.\.3"),
        ({"sync_every": 4, "fragment_update_alpha": 1.5}, "must be between 0 and 1"),
        ({"sync_every": 4, "fragments": 5}, r"fragments=5: choose 1\.\.4"),
        ({"sync_every": 4, "fragments": [["0.weight"]]}, "every trainable parameter exactly once"),
        ({"sync_every": 4, "fragments": [["0.wieght"]]}, r"'0.wieght': did you mean '0.weight'\?"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, words):
    model = mlp()
    with pytest.raises(ConfigError, match=words):
        make_diloco_outer_loop(model, torch.optim.SGD(model.parameters(), lr=1.0), MockManager(), **options)


def test_a_model_with_nothing_to_train_is_refused():
    model = mlp().requires_grad_(False)
    with pytest.raises(ModelMismatch, match="nothing to train"):
        make_diloco_outer_loop(model, torch.optim.SGD(model.parameters(), lr=1.0), MockManager(), 1)


def test_an_outer_optimizer_other_than_the_runs_is_refused(tmp_path: Path):
    model = mlp()
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1, outer=OuterConfig(lr=0.5))
    with pytest.raises(ConfigError, match="is not the run's"):
        make_diloco_outer_loop(model, torch.optim.SGD(model.parameters(), lr=1.0), manager, 1, OuterConfig(lr=0.7))


# -- torchft's side of the contract -----------------------------------------------------------------------------------


class Recorder(MockManager):
    """Notes which of its names somebody else's class touches."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[str] = set()

    def __getattribute__(self, name: str) -> object:
        ours = name == "touched" or name.startswith("__")
        if not ours and sys._getframe(1).f_globals["__name__"].startswith("torchft"):
            self.touched.add(name)
        return object.__getattribute__(self, name)


def test_torchft_touches_what_we_implement_and_nothing_else():
    recorder = Recorder()
    history_through(recorder, 4, delay=1, alpha=0.5)
    assert recorder.touched == {
        "_use_async_quorum",
        "allow_state_dict_read",
        "allreduce",
        "current_step",
        "disallow_state_dict_read",
        "register_state_dict_fn",
        "should_commit",
        "start_quorum",
    }


def test_torchft_still_has_what_we_touch():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loop = make_diloco_outer_loop(model, optimizer, MockManager(), 4)
    diloco = loop._diloco
    assert isinstance(diloco, DiLoCo)
    assert (diloco._local_step, diloco._sync_every, diloco._fragment_sync_delay) == (0, 4, 0)
    assert diloco._current_fragment() == 0
    diloco._save_parameters()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
