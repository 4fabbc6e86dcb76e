"""`replica.step`: the form for loops that take their batches elsewhere; and the state that every manifest holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_fleet import Fleet
from sessions import Counted, constant_steps, context_of
from tiny_workloads import batch_of, inner_step, mlp

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.training.small_state import LIMIT, SmallState, same_but_for_version
from replica.context import ReplicaSession

BATCHES = [batch_of(i) for i in range(40)]


class Seen:
    """What one attempt went through."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.rates: list[float] = []
        self.counts: list[int] = []
        self.model: Any = None


def pushed(fleet: Fleet, steps: int | None = None, replica_id: int = 0, **stateful: Any) -> tuple[Seen, ReplicaSession]:
    """An attempt whose loop is its own: AdamW and a cosine, which computes each rate from the one before."""
    torch.manual_seed(0)
    seen, data = Seen(), Counted()
    seen.model = model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    context = context_of(fleet, replica_id)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=context.total_steps)
    objects = {"schedule": schedule, "data": data, **stateful}
    with context.attach(model, optimizer, stateful=objects) as replica:
        for batch in data:
            seen.counts.append(replica.step_count)
            seen.batches.append(batch)
            seen.rates.append(optimizer.param_groups[0]["lr"])
            loss = inner_step(model, optimizer, BATCHES[batch % 40])
            schedule.step()
            if not replica.step(loss=loss, tokens=8) or len(seen.batches) == steps:
                break
    return seen, replica


def test_a_loop_of_ones_own_ends_with_the_run_and_counts_its_steps():
    fleet = Fleet(replicas=1, rounds=3, sync_every=4)
    seen, replica = pushed(fleet)
    assert replica.stopped and replica.step_count == 12
    assert seen.counts == list(range(12)) == seen.batches
    assert [(c.outer_step, c.stop) for c in fleet.commits()] == [
        (1, "none"),
        (2, "none"),
        (3, "none"),
        (3, "completed"),
    ]
    assert not replica.step()


def test_it_trains_what_a_loop_over_batches_trains():
    def gradient(batch: int) -> float:
        return 0.1 * batch

    by_batches, by_steps = (Fleet(replicas=1, rounds=2, sync_every=3) for _ in range(2))
    torch.manual_seed(0)
    constant_steps(context_of(by_batches, 0), torch.nn.Linear(2, 1), gradient)
    torch.manual_seed(0)
    model, data = torch.nn.Linear(2, 1), Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with context_of(by_steps, 0).attach(model, optimizer, stateful={"data": data}) as replica:
        for batch in data:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, gradient(batch))
            optimizer.step()
            if not replica.step(loss=1.0, tokens=1):
                break
    assert [c.base_digest for c in by_batches.commits()] == [c.base_digest for c in by_steps.commits()]
    assert [c.figures for c in by_batches.commits()] == [c.figures for c in by_steps.commits()]


@pytest.mark.parametrize("steps", [1, 4, 6, 9])
def test_under_the_default_quorum_a_restart_goes_on_with_schedule_rates_and_data(steps: int):
    """No state was saved, because no snapshot was due: the manifests hold what is needed."""
    straight, _ = pushed(Fleet(replicas=1, rounds=3, sync_every=4))
    fleet = Fleet(replicas=1, rounds=3, sync_every=4, quorum=None)
    pushed(fleet, steps)
    assert not list(fleet.store.list("replicas/0/state/"))
    again, replica = pushed(fleet)
    done = steps // 4 * 4  # the open round's steps are trained again
    assert replica.stopped and again.counts == straight.counts[done:]
    assert again.batches == straight.batches[done:] and again.rates == straight.rates[done:]


@pytest.mark.slow
def test_a_replica_that_missed_rounds_counts_the_runs_steps():
    fleet = Fleet(replicas=2, rounds=4, sync_every=2, quorum=1)
    pushed(fleet, 5)  # replica 0 alone: two rounds, one step
    late, replica = pushed(fleet, 1, replica_id=1)
    assert late.counts == [4] and late.batches == [0] and replica.round == 3


def test_what_is_large_is_saved_with_the_optimizer_and_comes_back_from_there():
    class Large(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "table": torch.zeros(LIMIT)}

    fleet = Fleet(replicas=1, rounds=3, sync_every=2, replica_state="round")
    first, second = Large(), Large()
    first.next = 7
    pushed(fleet, 2, large=first)
    pushed(fleet, 1, large=second)
    assert second.next == 7
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    text = SmallState(optimizer, {"large": first, "small": Counted()}).encode()
    assert len(text) < 1000
    assert SmallState(optimizer, {"small": Counted()}).load(text, "here") == {"small"}
    assert list(SmallState(optimizer, {"large": first}).large()) == ["large"]


def test_rates_of_another_number_of_groups_are_left_alone(caplog):
    one = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    two = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=0.25)
    SmallState(two, {}).load(SmallState(one, {}).encode(), "here")
    assert [group["lr"] for group in two.param_groups] == [0.25, 0.25] and "has 2 parameter groups" in caplog.text


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_learning_rate_that_the_training_function_changes_counts_and_its_schedule_goes_on(scheduled: bool, caplog):
    caplog.set_level("INFO")

    def made(lr: float, decay: float = 0.0) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer, {"schedule": schedule} if scheduled else {}

    def state(lr: float, steps: int) -> tuple[torch.optim.Optimizer, str]:
        optimizer, stateful = made(lr)
        small = SmallState(optimizer, stateful, new=True)
        for _ in range(steps if scheduled else 0):
            optimizer.step()
            stateful["schedule"].step()
        return optimizer, small.encode()

    trained, text = state(lr=0.5, steps=4)
    for lr, decay in ((0.5, 0.0), (0.25, 0.01)):
        caplog.clear()
        optimizer, stateful = made(lr, decay)
        SmallState(optimizer, stateful, new=True).load(text, "here")
        (group,) = optimizer.param_groups
        assert group["lr"] == trained.param_groups[0]["lr"] * (lr / 0.5) and group["weight_decay"] == decay
        assert ("0.25 instead of 0.5" in caplog.text) is (lr != 0.5)
        for schedule in stateful.values():
            assert schedule.get_last_lr() == [group["lr"]]
            optimizer.step()
            schedule.step()
            assert group["lr"] == lr / 6
    other, stateful = made(0.25)  # another rank, which has trained, follows rank 0
    SmallState(other, stateful).load(text, "here")
    assert other.param_groups[0]["lr"] == trained.param_groups[0]["lr"]


def warmed(optimizer: torch.optim.Optimizer, warmup: int) -> torch.optim.lr_scheduler.LRScheduler:
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup)
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [rising, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [warmup]
    )


def cycled(optimizer: torch.optim.Optimizer, divided_by: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=40, div_factor=divided_by)


@pytest.mark.parametrize("make", [warmed, cycled])
def test_another_first_value_of_a_schedule_is_no_other_learning_rate(make):
    """As of a warm-up that is a share of all steps, in a leg of more of them: a rate that each step multiplies would
    stay at a share of it for the rest of the run.
    """

    def trained(first: int, steps: int, text: str = "") -> tuple[str, list[float]]:
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1.0)
        schedule = make(optimizer, first)
        small, rates = SmallState(optimizer, {"schedule": schedule}, new=True), []
        small.load(text, "here")
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return small.encode(), rates

    text, _ = trained(4, steps=20)
    assert trained(8, 5, text)[1] == pytest.approx(trained(4, 25)[1][20:], rel=1e-3)


def test_a_schedule_that_is_made_after_attach_goes_on_from_a_changed_learning_rate():
    def rates(lr: float, steps: int, text: str = "") -> tuple[str, list[float]]:
        optimizer, found = torch.optim.SGD([torch.zeros(1)], lr=lr), []
        small = SmallState(optimizer, {}, new=True)
        small.load(text, "here")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return small.encode(), found

    text, _ = rates(0.5, 4)
    assert rates(0.25, 4, text)[1] == rates(0.25, 4)[1]


def test_a_rate_that_never_counted_is_no_measure_of_the_next():
    """Of a run of an earlier version, which did not write what was set, the first change is not seen."""
    text, rates = "", []
    for lr, new in ((0.5, False), (0.125, True), (0.25, True)):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        small = SmallState(optimizer, {"schedule": schedule}, new=new)
        small.load(text, "here")
        optimizer.step(), schedule.step()
        rates, text = [*rates, optimizer.param_groups[0]["lr"]], small.encode()
    assert rates == [0.25, 0.125, 0.03125]


def test_the_share_of_a_schedule_that_goes_by_a_metric_is_kept():
    def made(lr: float) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau, SmallState]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.25)
        return optimizer, schedule, SmallState(optimizer, {"schedule": schedule}, new=True)

    _, schedule, small = made(1.0)
    schedule.step(1.0), schedule.step(1.0)
    optimizer, _, again = made(0.5)
    again.load(small.encode(), "here")
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_small_state_of_a_version_that_did_not_write_what_was_set_is_the_same_to_an_audit():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    earlier, now = SmallState(optimizer, {}).encode(), SmallState(optimizer, {}, new=True).encode()
    assert earlier != now and same_but_for_version(earlier, now)
    assert not same_but_for_version(now, earlier) and not same_but_for_version("", now)
    optimizer.param_groups[0]["lr"] = 0.25
    assert not same_but_for_version(earlier, SmallState(optimizer, {}, new=True).encode())


def test_step_where_it_cannot_be_meant(tmp_path: Path):
    model = mlp()
    session = context_of(Fleet(replicas=1), 0).attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(ConfigError, match=r"write `with ctx.attach\(...\) as replica:`"):
        session.step()
    with session:
        next(iter(session.batches(BATCHES)))
        with pytest.raises(ConfigError, match=r"step was called in a loop over replica\.batches"):
            session.step()
