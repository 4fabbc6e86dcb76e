"""Our inner and outer loop: torchft's regression cases, the sign, the equivalences, which parameters take part."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_fleet import together
from stored_snapshots import complete_snapshots
from sync_cases import CASES, PLAIN, history_by_hand, scalars_through_our_loop
from tiny_workloads import batch_of, inner_step, mlp

from diloco_orchestrator import (
    ConfigError,
    LocalProcessExecutor,
    ModelMismatch,
    ObjectStoreManager,
    OuterConfig,
    RoundError,
    make_diloco_outer_loop,
    open_store,
)
from diloco_orchestrator.allreduce.owners import ALONE
from diloco_orchestrator.config.schedule import SyncSchedule
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.snapshots.stored_state import StoredState
from diloco_orchestrator.testing import MockManager
from replica.rounds.interface import ClosedRound
from replica.rounds.tip import OpenRound
from replica.training.diloco_loop import DiLoCoLoop
from replica.training.fp32_shadow import Fp32View, views_of
from replica.training.handover import Handover, ThroughBuffer, buffer_size, handover_of, views_in
from replica.training.tensor_tree import pack, stored_tree


@pytest.mark.parametrize(("delay", "alpha"), CASES)
def test_torchfts_regression_cases_in_memory(delay: int, alpha: float):
    managers = MockManager.group(2, start_step=2)
    histories = together([lambda m=m: scalars_through_our_loop(m, 5, delay, alpha) for m in managers])  # type: ignore[misc]
    assert histories == [history_by_hand(5, delay, alpha)] * 2
    assert [m.current_step() for m in managers] == [7, 7]


@pytest.mark.parametrize(("delay", "alpha"), CASES)
def test_torchfts_regression_cases_through_a_bucket(delay: int, alpha: float, tmp_path: Path):
    def replica(replica_id: int) -> list[tuple[float, float]]:
        manager = ObjectStoreManager.join(str(tmp_path), replica_id, 2, rounds=7, outer=PLAIN)
        return scalars_through_our_loop(manager, 7, delay, alpha)

    histories = together([lambda i=i: replica(i) for i in range(2)])  # type: ignore[misc]
    assert histories == [history_by_hand(7, delay, alpha)] * 2


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


@pytest.mark.slow
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
        ({"sync_every": 3, "fragments": 2}, "sync_every=3 is not divisible by fragments=2"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 4, "fragment_sync_delay": 4}, r"fragment_sync_delay=4 must be below .* = 4"),
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


def test_a_complex_parameter_is_refused():
    model = torch.nn.Linear(4, 1, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"'bias' is complex64.*its imaginary part would be lost"):
        make_diloco_outer_loop(model, torch.optim.SGD(model.parameters(), lr=1.0), MockManager(), 1)


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(mlp().parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="the optimizer holds no parameter of the model"):
        make_diloco_outer_loop(mlp(), optimizer, MockManager(), 1)


def test_a_parameter_that_is_replaced_in_the_loop_ends_it():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco_outer_loop(model, optimizer, MockManager(), 2):
        inner_step(model, optimizer, batch_of(0))
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().clone())
        with pytest.raises(ConfigError, match=r"'0\.weight' was replaced after the model was attached"):
            inner_step(model, optimizer, batch_of(1))


def test_an_outer_optimizer_other_than_the_runs_is_refused(tmp_path: Path):
    model = mlp()
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1, outer=OuterConfig(lr=0.5))
    with pytest.raises(ConfigError, match="is not the run's"):
        make_diloco_outer_loop(model, torch.optim.SGD(model.parameters(), lr=1.0), manager, 1, OuterConfig(lr=0.7))


# -- rounds that end otherwise ----------------------------------------------------------------------------------------


class Script:
    """Rounds of one fragment after another that end as scripted; an applied one moves the base by -8."""

    def __init__(self, *ends: ClosedRound, fragments: int = 1) -> None:
        self.final_evaluation = False
        self.base, self.outer_step, self.fragments = Base(dict.fromkeys("ab", torch.zeros(1)), {}), 0, fragments
        self.ends = list(ends)
        self.published: list[tuple[float, bool]] = []
        self.began_to_close = 0

    @property
    def open(self) -> OpenRound:
        index = self.outer_step % self.fragments
        return OpenRound(self.outer_step + 1, index, (), self.outer_step, final_evaluation=self.final_evaluation)

    def publish(self, form, fields, *, in_background=False) -> None:  # type: ignore[no-untyped-def]
        self.published.append((form().read(0, 1).item(), in_background))

    def close_beside_training(self, then) -> None:  # type: ignore[no-untyped-def]
        self.began_to_close += 1

    def close(self) -> ClosedRound:
        end = self.ends.pop(0)
        if end.applied:
            self.base = Base({name: tensor - 8.0 for name, tensor in self.base.parameters.items()}, {})
            self.outer_step += 1
        return end


APPLIED = ClosedRound(applied=True, skipped=False, average={})
EMPTY = ClosedRound(applied=False, skipped=False, average={})
SKIPPED = ClosedRound(applied=True, skipped=True, average={})


def scripted(script: Script, **schedule: object) -> tuple[DiLoCoLoop, torch.nn.Parameter, torch.nn.Parameter]:
    """A loop over two parameters, in one fragment or in two."""
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    names = [["a", "b"]] if script.fragments == 1 else [["a"], ["b"]]
    settings = SyncSchedule(**{"sync_every": 4 * script.fragments, "fragments": script.fragments, **schedule})  # type: ignore[arg-type]
    return DiLoCoLoop(views_of({"a": a, "b": b}, names, mixes=True), script, settings), a, b


def inner(loop: DiLoCoLoop, steps: int, *parameters: torch.nn.Parameter) -> None:
    """Steps of +1."""
    for _ in range(steps):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(1.0)
        loop.after_inner_step()


def test_a_loop_begins_with_the_base():
    _, a, b = scripted(Script())
    assert (a.item(), b.item()) == (0.0, 0.0)


def test_a_share_of_the_local_values_is_kept_after_a_whole_round_that_is_applied():
    loop, a, b = scripted(script := Script(APPLIED), alpha=0.25)
    inner(loop, 4, a, b)
    assert script.published == [(-4.0, False)]
    assert a.item() == -8.0 + 0.25 * (4.0 + 8.0) and loop.inner_step == 0


@pytest.mark.parametrize("end", [APPLIED, EMPTY])
def test_a_round_that_is_cut_short_is_published_as_it_is_and_nothing_local_is_kept(end):
    loop, a, b = scripted(script := Script(end), alpha=0.25)
    inner(loop, 3, a, b)
    assert loop.synchronise() is end
    assert script.published == [(-3.0, False)] and (loop.inner_step, loop.published) == (0, False)
    assert a.item() == b.item() == script.base.parameters["a"].item()


def test_after_a_round_that_is_not_applied_the_fragment_is_the_base_again():
    loop, a, b = scripted(script := Script(EMPTY), alpha=0.25)
    inner(loop, 4, a, b)
    assert script.published == [(-4.0, False)] and (a.item(), b.item()) == (0.0, 0.0)


def test_nothing_is_published_of_a_round_in_which_nothing_was_trained():
    loop, *_ = scripted(script := Script(APPLIED))
    loop.synchronise()
    assert script.published == []


def test_nothing_is_published_to_a_final_evaluation_round_though_other_fragments_were_trained():
    loop, _, b = scripted(script := Script(APPLIED, EMPTY, fragments=2))
    inner(loop, 4, b)
    script.final_evaluation = True
    loop.synchronise()
    assert script.published == [(0.0, False)] and b.item() == script.base.parameters["b"].item()


def test_one_fragment_moves_per_round_and_the_other_goes_on():
    loop, a, b = scripted(script := Script(APPLIED, APPLIED, fragments=2))
    inner(loop, 4, a, b)
    assert (a.item(), b.item()) == (-8.0, 4.0)
    inner(loop, 4, a, b)
    assert (a.item(), b.item()) == (-4.0, -16.0)
    assert script.published == [(-4.0, False), (-8.0 - 8.0, False)]


def test_after_rounds_that_were_skipped_every_fragment_is_the_base():
    loop, a, b = scripted(Script(SKIPPED, fragments=2), alpha=0.5)
    inner(loop, 4, a, b)
    assert (a.item(), b.item()) == (-8.0, -8.0) and loop.inner_step == 0


def test_with_a_delay_training_goes_on_while_the_pseudo_gradient_is_in_transit():
    loop, a, b = scripted(script := Script(APPLIED), delay=2, alpha=0.5)
    inner(loop, 2, a, b)
    assert script.published == [(-2.0, True)] and loop.published
    inner(loop, 1, a, b)
    loop.publish_part()  # a preemption notice now changes nothing
    inner(loop, 1, a, b)
    assert len(script.published) == 1 and a.item() == -8.0 + 0.5 * (4.0 + 8.0)


@pytest.mark.parametrize(("delay", "begun"), [(0, 0), (1, 1), (2, 2)])
def test_between_publishing_and_synchronising_every_step_asks_for_the_round(delay, begun):
    loop, a, b = scripted(script := Script(APPLIED), delay=delay)
    inner(loop, 4, a, b)
    assert script.began_to_close == begun and script.outer_step == 1


def saved(**values: float) -> Any:
    """Local values of an earlier attempt, by parameter."""
    file = pack({name: torch.tensor([value]) for name, value in values.items()})
    return stored_tree(StoredState.of(ALONE, file), "here")


@pytest.mark.parametrize(("delay", "left"), [(0, 0), (1, 1)])
def test_a_loop_continues_behind_what_an_earlier_attempt_published(delay, left):
    loop, a, b = scripted(script := Script(APPLIED), delay=delay, alpha=0.5)
    loop.load_local(saved(a=4.0, b=4.0), from_base=())
    loop.continue_after_publishing()
    inner(loop, left, a, b)
    assert script.published == [] and script.outer_step == 1 and a.item() == -8.0 + 0.5 * (4.0 + left + 8.0)


def test_saved_local_values_are_loaded_but_in_fragments_that_moved_since():
    loop, a, b = scripted(Script(fragments=2))
    loop.load_local(saved(a=4.0, b=5.0), from_base={0})
    assert (a.item(), b.item()) == (0.0, 5.0)


def test_the_base_is_shown_where_fragments_differ_from_it():
    loop, a, b = scripted(Script(fragments=2))
    inner(loop, 2, a, b)
    with loop.showing_base():
        assert (a.item(), b.item()) == (0.0, 0.0)
    assert (a.item(), b.item()) == (2.0, 2.0)


# -- fp32 views --------------------------------------------------------------------------------------------------------


def test_a_share_of_the_local_values_is_kept_in_the_models_dtype():
    real = torch.nn.Parameter(torch.tensor([3.0, 5.0], dtype=torch.bfloat16))
    view = Fp32View({"w": real}, mixes=True)
    base = Base({"w": torch.tensor([1.0, 1.0])}, {})
    view.install(base, keep=0.25)
    assert real.tolist() == [1.5, 2.0] and real.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="made without `mixes`"):
        Fp32View({"w": real}).install(base, keep=0.25)


def test_a_pseudo_gradient_sees_what_training_did_to_parameters_that_are_not_fp32():
    real = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    view = Fp32View({"w": real})
    base = Base({"w": torch.tensor([1.0009765625, 1.0])}, {})  # 1 + 2**-10, which bf16 cannot hold
    view.install(base)
    with torch.no_grad():
        real.sub_(0.5)
    assert view.pseudo_gradient(base).read(0, 2).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("mixes", [False, True])
def test_a_pseudo_gradient_is_the_same_read_whole_or_in_parts(mixes):
    """Across parameters, of which one is not contiguous and one not fp32, and across the shards of the base."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 3)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    base = Base(values, {}, shard_numel=7)
    local = {"a": torch.zeros(4, 3).t(), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(2, 3)}
    view = Fp32View({name: torch.nn.Parameter(tensor) for name, tensor in local.items()}, mixes)
    view.install(base)
    with torch.no_grad():
        for parameter in view._parameters.values():
            parameter.sub_(0.5)
    pseudo_gradient = view.pseudo_gradient(base)
    whole = pseudo_gradient.read(0, 23)
    expected = {name: values[name] - (values[name] - 0.5) for name in "ac"}
    changed = (values["b"].bfloat16() - 0.5).float() - values["b"].bfloat16().float()
    expected["b"] = values["b"] - (values["b"] + changed)
    assert torch.equal(whole, torch.cat([expected[name].reshape(-1) for name in "abc"]))
    parts = [pseudo_gradient.read(start, min(start + 4, 23)) for start in range(0, 23, 4)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_base_is_shown_for_a_while_and_local_values_come_back():
    real = torch.nn.Parameter(torch.ones(2))
    view = Fp32View({"w": real})
    with view.holding(Base({"w": torch.zeros(2)}, {})):
        assert real.tolist() == [0.0, 0.0]
    assert real.tolist() == [1.0, 1.0]


# -- without torchft ---------------------------------------------------------------------------------------------------

WITHOUT_TORCHFT = """
import sys
sys.modules["torchft"] = None  # importing it fails from here on
import tiny_workloads
from diloco_orchestrator import LocalProcessExecutor, ObjectStoreManager, launch, make_diloco_outer_loop
import torch
model = tiny_workloads.mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
manager = ObjectStoreManager.join(sys.argv[1] + "/by-hand", 0, 1, rounds=2)
with make_diloco_outer_loop(model, optimizer, manager, 2):
    for step in range(4):
        tiny_workloads.inner_step(model, optimizer, tiny_workloads.batch_of(step))
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.replica.context import ReplicaContext
from diloco_orchestrator.replica.attempt.attempt import claim_attempt
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.store.memory import MemoryStore
store, stamp = MemoryStore(), Stamp("test", lambda: 0.0)
config = make_config({"entrypoint": "m:f", "replicas": 1, "rounds": 2, "sync_every": 2, "fragments": 2})
create_run(store, Run(**stamp(), run_id="run-1", config=config, package_version="0"), "test", stamp)
context = ReplicaContext(claim_attempt(store, 0, None, ManualClock(), stamp))
tiny_workloads.train(context)
print(manager.current_step(), context.session.stopped)
"""


@pytest.mark.slow
def test_training_needs_no_torchft(tmp_path: Path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_TORCHFT, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["2", "True"]


pytestmark = pytest.mark.usefixtures("one_thread")


# -- values in transit -------------------------------------------------------------------------------------------------


class LateCopies:
    """A `SideStream` on the CPU: copies are made when they are waited for, unless `done` was called before."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, pairs) -> Callable[[], None]:  # type: ignore[no-untyped-def]
        self.pairs = [(target, source.clone()) for target, source in pairs]
        return self.done

    def done(self) -> None:
        for target, source in self.pairs:
            target.copy_(source)
        self.pairs = []


MIXED = {"a": (3, 4), "b": (5,), "c": (2, 3)}  # b in bf16, c not contiguous


def a_fragment() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    found = {name: torch.randn(shape, generator=generator) for name, shape in MIXED.items()}
    found["b"], found["c"] = found["b"].to(torch.bfloat16), torch.randn(3, 2, generator=generator).t()
    return {name: torch.nn.Parameter(tensor) for name, tensor in found.items()}


def handovers(fragment: dict[str, torch.nn.Parameter]) -> list[Handover]:
    buffer = torch.empty(buffer_size(fragment), dtype=torch.uint8)
    return [Handover(), ThroughBuffer(buffer, LateCopies().copy)]


@pytest.mark.parametrize("kind", [0, 1], ids=["plain copies", "through a buffer"])
@pytest.mark.parametrize("mixes", [False, True])
def test_a_pseudo_gradient_that_is_formed_later_is_of_the_values_handed_over(mixes, kind):
    fragment, base = a_fragment(), Base({name: torch.ones(shape) for name, shape in MIXED.items()}, {})
    view = Fp32View(fragment, mixes, handovers(fragment)[kind])
    expected = Fp32View(a_fragment(), mixes).pseudo_gradient(base).read(0, 23)
    form = view.handed_over(base)
    with torch.no_grad():
        for parameter in fragment.values():
            parameter.add_(1.0)  # training goes on
    assert torch.equal(form().read(0, 23), expected)


@pytest.mark.parametrize("kind", [0, 1], ids=["plain copies", "through a buffer"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_base_that_was_staged_is_installed_as_any_other(keep, kind):
    fragment = a_fragment()
    base = Base({name: torch.full(shape, 1.001) for name, shape in MIXED.items()}, {})
    view = Fp32View(fragment, mixes=keep > 0, handover=handovers(fragment)[kind])
    view.stage(base)
    view.install(base, keep)
    Fp32View(other := a_fragment(), mixes=keep > 0).install(base, keep)
    assert all(torch.equal(fragment[name], other[name]) for name in MIXED)


def test_staged_values_are_used_once():
    fragment = a_fragment()
    view = Fp32View(fragment, handover=handovers(fragment)[1])
    bases = [Base({name: torch.full(shape, value) for name, shape in MIXED.items()}, {}) for value in (1.0, 2.0)]
    view.stage(bases[0])
    for base in bases:
        view.install(base)
    assert all(bool((parameter == 2.0).all()) for parameter in fragment.values())


def test_a_buffer_holds_tensors_of_any_dtype_side_by_side():
    tensors = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2, 2), "c": torch.zeros(0)}
    buffer = torch.zeros(buffer_size(tensors), dtype=torch.uint8)
    views = views_in(buffer, tensors)
    views["a"].fill_(1.0), views["b"].fill_(2.0)
    assert views["a"].tolist() == [1.0] * 3 and views["b"].tolist() == [[2.0] * 2] * 2
    assert {n: (v.shape, v.dtype) for n, v in views.items()} == {n: (t.shape, t.dtype) for n, t in tensors.items()}


def test_parameters_on_the_cpu_are_copied_plainly():
    assert type(handover_of([a_fragment()])) is Handover


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mixes", [False, True])
def test_on_a_gpu_values_go_through_pinned_memory(mixes):
    fragment = {name: torch.nn.Parameter(p.detach().cuda()) for name, p in a_fragment().items()}
    base = Base({name: torch.full(shape, 1.001) for name, shape in MIXED.items()}, {})
    view = Fp32View(fragment, mixes, handover_of([fragment]))
    expected = Fp32View({n: torch.nn.Parameter(p.detach().cpu()) for n, p in fragment.items()}, mixes)
    first = expected.pseudo_gradient(base).read(0, 23)
    form = view.handed_over(base)
    with torch.no_grad():
        for parameter in fragment.values():
            parameter.add_(1.0)
    assert torch.equal(form().read(0, 23), first)
    view.stage(base)
    view.install(base)
    assert all(torch.equal(p.cpu(), base.parameters[name].to(p.dtype)) for name, p in fragment.items())
