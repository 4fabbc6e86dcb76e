"""torchft's own classes in a run of ours: `DiLoCo` and `LocalSGD` over a bucket, and our loop against them."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_fleet import together
from sync_cases import (
    CASES,
    OUTER,
    PLAIN,
    History,
    Manager,
    elementwise_step,
    history_by_hand,
    largest_difference,
    nesterov_of,
    network,
    same_bits,
    scalars_through_our_loop,
    scalars_through_torchft,
    sgd_of,
    training_through_local_sgd,
    training_through_our_loop,
    training_through_torchft,
)
from tiny_workloads import batch_of, inner_step
from torchft.local_sgd import DiLoCo, LocalSGD

from diloco_orchestrator import ConfigError, LocalProcessExecutor, Nesterov, ObjectStoreManager, OuterConfig, open_store
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild
from diloco_orchestrator.testing import MockManager

AVERAGING = OuterConfig(lr=1.0, momentum=0.0)
# fragment_sync_delay, fragment_update_alpha: the slow ones are parts of (1, 0.3), and the same for more steps
SCHEDULES = [
    (0, 0.0),
    (1, 0.3),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 0.0), (0, 0.3), (2, 0.7)]),
]

ManagersOf = Callable[[str, int, OuterConfig], list[Manager]]


@pytest.fixture(params=["mock", "bucket"])
def managers_of(request: pytest.FixtureRequest, tmp_path: Path) -> ManagersOf:
    """Managers of two replicas of a run."""

    def managers(name: str, rounds: int, outer: OuterConfig) -> list[Manager]:
        if request.param == "mock":
            return [*MockManager.group(2, outer=outer)]
        folder = str(tmp_path / name)
        return [ObjectStoreManager.join(folder, i, 2, rounds=rounds, outer=outer) for i in range(2)]

    return managers


def both(replica: Callable[..., Any], managers: list[Manager], *args: Any, **options: Any) -> list[Any]:
    """Two replicas at once, each with its manager and its id."""
    return together([partial(replica, manager, i, *args, **options) for i, manager in enumerate(managers)])


# -- our loop against torchft's class ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "alpha"), CASES)
def test_regression_cases_are_equal_bit_for_bit_in_our_loop_and_in_torchfts_class(delay, alpha, managers_of):
    def ours(manager: Manager, _: int) -> Any:
        return scalars_through_our_loop(manager, 7, delay, alpha)

    def torchfts(manager: Manager, _: int) -> Any:
        return scalars_through_torchft(manager, 7, delay, alpha)

    assert both(ours, managers_of("ours", 7, PLAIN)) == both(torchfts, managers_of("torchft", 7, PLAIN))


@pytest.mark.parametrize(("delay", "alpha"), CASES)
def test_torchfts_class_gives_its_regression_figures_over_a_bucket(delay, alpha, tmp_path):
    managers = [ObjectStoreManager.join(str(tmp_path), i, 2, rounds=7, outer=PLAIN) for i in range(2)]
    histories = together([partial(scalars_through_torchft, manager, 7, delay, alpha) for manager in managers])
    assert histories == [history_by_hand(7, delay, alpha)] * 2


@pytest.mark.parametrize(("delay", "alpha"), SCHEDULES)
def test_a_training_is_equal_bit_for_bit_with_our_outer_optimizer_in_torchfts_class(delay, alpha, managers_of):
    schedule = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    ours = both(training_through_our_loop, managers_of("ours", 6, OUTER), 6, **schedule)
    torchfts = both(training_through_torchft, managers_of("torchft", 6, OUTER), 6, **schedule)
    assert all(same_bits(one, other) for one, other in zip(ours, torchfts, strict=True))
    assert not same_bits(ours[0], ours[1])  # they trained on different data


@pytest.mark.parametrize(("delay", "alpha"), SCHEDULES)
def test_with_torchs_sgd_as_outer_optimizer_only_the_last_bits_differ(delay, alpha, managers_of):
    """torch.optim.SGD multiplies and adds at once (`add(alpha=…)`), which CPUs with fused multiply-add round once, and
    we twice. With ATEN_CPU_CAPABILITY=default, where torch does not fuse, both are equal bit for bit."""
    schedule = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    ours = both(training_through_our_loop, managers_of("ours", 6, OUTER), 6, **schedule)
    torchfts = both(training_through_torchft, managers_of("torchft", 6, OUTER), 6, outer_of=sgd_of, **schedule)
    assert max(largest_difference(one, other) for one, other in zip(ours, torchfts, strict=True)) < 1e-6


# -- torchft's classes in a run of ours -------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_classes_run_in_processes_of_their_own_over_a_bucket(tmp_path):
    """2 processes each; the log holds what torchft's DiLoCo ended with, and LocalSGD's parameters are the mean."""
    executor = LocalProcessExecutor(tmp_path / "executor")
    for name in ("diloco", "local_sgd"):
        args = {"folder": str(tmp_path / name), "rounds": 4, "name": name}
        handles = executor.launch_replicas(2, "torchft_workloads:train", args)
        one, two = (result.value for result in executor.collect(handles))
        assert one["synchronised"] == two["synchronised"] and one["trained"] != two["trained"]
        commits = RunReader(open_store(str(tmp_path / name))).commits()
        assert [(c.outer_step, c.applied) for c in commits] == [(1, True), (2, True), (3, True), (4, True)]
        assert one["digest"] == two["digest"]
        last = RunLog(open_store(str(tmp_path / name)))
        assert rebuild(last, last.newest_begin().record).digest == one["digest"]
        assert one["base"] == one["synchronised"]


def test_local_sgd_averages_parameters(managers_of):
    """The mean is taken of base - local, so it is that of local but for the last bits."""
    histories = both(training_through_local_sgd, managers_of("run", 3, AVERAGING), 3)
    trained = both(trained_between, [histories[0], histories[1]])
    base = [parameter.detach() for parameter in network().parameters()]
    for sync, (one, two) in enumerate(zip(*trained, strict=True)):
        after = [history[3 * sync + 2] for history in histories]
        assert same_bits(after[:1], after[1:])
        assert same_bits(after[:1], [[b - ((b - x) + (b - y)) / 2 for b, x, y in zip(base, one, two, strict=True)]])
        assert largest_difference(after[:1], [[(x + y) / 2 for x, y in zip(one, two, strict=True)]]) < 1e-6
        base = after[0]


def trained_between(history: History, replica_id: int) -> History:
    """What a replica's parameters were just before each synchronisation: its third step from the values before it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained = []
    for step in range(len(history)):
        elementwise_step(model, optimizer, 1000 * replica_id + step)
        if step % 3 == 2:
            trained.append([parameter.detach().clone() for parameter in model.parameters()])
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), history[step], strict=True):
                parameter.copy_(value)
    return trained


@pytest.mark.parametrize("frozen", [None, "with it", "without it"])
def test_a_process_that_dies_is_continued_by_its_next_attempt_with_base_and_momenta(frozen, tmp_path):
    """torchft's class in a new process: base and outer momenta come from the bucket, so the bits are the same.

    `frozen`: whether a layer is, and whether the outer optimizer holds its parameters too.
    """

    def train(folder: str, begin: int, end: int) -> None:
        model = network()
        model[0].requires_grad_(frozen is None)
        held = [p for p in model.parameters() if p.requires_grad or frozen == "with it"]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        manager = ObjectStoreManager.join(folder, 0, 1, rounds=6, outer=OUTER, snapshot_every=3)
        manager.attach(model)
        with DiLoCo(manager, [model], optimizer, Nesterov(held, OUTER), 2):
            for step in range(begin, end):
                inner_step(model, optimizer, batch_of(step))

    def digests(folder: str) -> list[str]:
        return [commit.base_digest for commit in RunReader(open_store(folder)).commits()]

    at_once, in_parts = str(tmp_path / "one"), str(tmp_path / "two")
    train(at_once, 0, 12)
    train(in_parts, 0, 5)  # two rounds, and a step that is never published
    train(in_parts, 4, 12)
    assert digests(at_once) == digests(in_parts) and len(digests(in_parts)) == 6


def test_frozen_and_tied_parameters_stay_as_they_are_and_are_not_published(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[2].weight = model[1].weight
    frozen = model[0].weight.clone()
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=2, outer=AVERAGING)
    manager.attach(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with LocalSGD(manager, model, optimizer, 1):
        for step in range(2):
            optimizer.zero_grad()
            model(batch_of(step)[0]).square().mean().backward()
            optimizer.step()
    assert torch.equal(model[0].weight, frozen) and model[2].weight is model[1].weight
    assert sorted(manager.participant.base.parameters) == ["1.bias", "1.weight", "2.bias"]
    assert torch.equal(manager.participant.base.parameters["1.weight"], model[1].weight)


@pytest.mark.parametrize("name", ["diloco", "local_sgd"])
def test_a_round_that_is_not_applied_leaves_the_base_and_its_work_is_carried(name, tmp_path):
    """One replica's numbers are not finite in the first round. The other's steps of that round count in the second."""

    def replica(replica_id: int) -> torch.nn.Module:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        manager = ObjectStoreManager.join(str(tmp_path), replica_id, 2, rounds=2, outer=AVERAGING)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        manager.attach(model)
        loop: Any = LocalSGD(manager, model, optimizer, 1)
        if name == "diloco":
            loop = DiLoCo(manager, [model], optimizer, torch.optim.SGD(model.parameters(), lr=1.0), 1)
        with loop:
            for step in (1, 2):
                model.weight.grad = torch.full((1, 1), float("nan") if (replica_id, step) == (1, 1) else 0.25)
                optimizer.step()
        return model

    one, two = together([partial(replica, i) for i in range(2)])
    commits = RunReader(open_store(str(tmp_path))).commits()
    assert [(c.applied, [a.kind for a in c.answers]) for c in commits] == [
        (False, ["delta", "abstention"]),
        (True, ["delta", "delta"]),
    ]
    assert [o.round for a in commits[1].answers for o in a.origins] == [1, 2, 2]
    # Replica 0 moves by .25 and carries .8 of another .25, replica 1 by .25.
    assert one.weight.item() == two.weight.item() == pytest.approx(1 - (0.25 + 0.8 * 0.25 + 0.25) / 2)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_torchfts_class_before_attach_is_refused(tmp_path):
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"call manager\.attach\(model\)"):
        DiLoCo(manager, [model], optimizer, nesterov_of(model), 2)
    with LocalSGD(manager, model, optimizer, 1), pytest.raises(ConfigError, match=r"call manager\.attach\(model\)"):
        inner_step(model, optimizer, batch_of(0))
    with pytest.raises(ConfigError, match=r"call manager\.attach\(model\)"):
        _ = manager.participant


@pytest.mark.parametrize(
    ("outer_of", "words"),
    [
        (lambda model, parts: nesterov_of(model), "holds 4 parameters, its fragment 2"),
        (lambda model, parts: [torch.optim.SGD(p.parameters(), lr=0.7) for p in parts], "the run's is lr=0.7 momentum"),
        (lambda model, parts: [torch.optim.AdamW(p.parameters(), lr=0.7) for p in parts], "'momentum': None"),
        (
            lambda model, parts: [
                torch.optim.SGD(p.parameters(), lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.1) for p in parts
            ],
            "'weight_decay': 0.1",
        ),
    ],
    ids=["shared", "no momentum", "AdamW", "weight decay"],
)
def test_an_outer_optimizer_that_is_not_the_runs_is_refused(outer_of, words, tmp_path):
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1, outer=OUTER)
    model = network()
    parts = [model[0], model[2]]
    manager.attach(model, parts)
    with pytest.raises(ConfigError, match=words):
        DiLoCo(manager, parts, torch.optim.SGD(model.parameters(), lr=0.1), outer_of(model, parts), 2)


def test_local_sgd_needs_an_outer_step_that_averages(tmp_path):
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1, outer=OUTER)
    model = network()
    manager.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = r"Join with outer=OuterConfig\(lr=1.0, momentum=0.0\)"
    with LocalSGD(manager, model, optimizer, 1), pytest.raises(ConfigError, match=words):
        inner_step(model, optimizer, batch_of(0))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_fragments_that_attach_was_not_given_are_refused(parts, tmp_path):
    """torchft would hand over other tensors than the run's fragments hold."""
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1, outer=OUTER)
    model = network()
    manager.attach(model, [model[2], model[0]])
    given = [[model], [model[0], model[2]], [model[2], model[0], model[2]]][parts - 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="Give both the same modules in the same order"):
        DiLoCo(manager, given, optimizer, [nesterov_of(part) for part in given], 6)


def test_fragments_that_leave_out_a_parameter_are_refused(tmp_path):
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1)
    model = network()
    with pytest.raises(ConfigError, match="every trainable parameter exactly once"):
        manager.attach(model, [model[0]])


def test_a_complex_parameter_is_refused(tmp_path):
    manager = ObjectStoreManager.join(str(tmp_path), 0, 1, rounds=1)
    with pytest.raises(ConfigError, match=r"'bias' is complex64.*its imaginary part would be lost"):
        manager.attach(torch.nn.Linear(4, 1, dtype=torch.complex64))


def test_quantization_by_torchft_is_refused():
    manager = MockManager()
    manager.attach(network())
    with pytest.raises(ConfigError, match="set the run's `codec` instead"):
        manager.allreduce(torch.zeros(1), should_quantize=True)


# -- what torchft touches of us ---------------------------------------------------------------------------------------


class Recorder(MockManager):
    """Notes which of its names somebody else's class touches."""

    def __init__(self, outer: OuterConfig) -> None:
        super().__init__(outer=outer)
        self.touched: set[str] = set()

    def __getattribute__(self, name: str) -> object:
        ours = name == "touched" or name.startswith("__")
        if not ours and sys._getframe(1).f_globals["__name__"].startswith("torchft"):
            self.touched.add(name)
        return object.__getattribute__(self, name)


def test_torchft_touches_what_we_implement_and_nothing_else():
    diloco, local_sgd = Recorder(PLAIN), Recorder(AVERAGING)
    scalars_through_torchft(diloco, 4, delay=1, alpha=0.5)
    training_through_local_sgd(local_sgd, 0, 2)
    shared = {"allow_state_dict_read", "allreduce", "disallow_state_dict_read", "should_commit", "start_quorum"}
    assert local_sgd.touched == shared
    assert diloco.touched == shared | {"_use_async_quorum", "current_step", "register_state_dict_fn"}


pytestmark = pytest.mark.usefixtures("one_thread")
