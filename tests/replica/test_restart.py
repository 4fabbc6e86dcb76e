"""What a replica goes on with: after an abstention, in a model that cannot hold the base, after a restart."""

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from protocol_fleet import BY_HAND, Fleet, play, report, tiny_model
from sessions import Counted, constant_steps, context_of

from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.replica.training.schedule_counts import catch_up
from diloco_orchestrator.replica.training.small_state import SmallState
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.snapshots.rebuild import rebuild
from diloco_orchestrator.supervision.next_leg import begin_next_leg

NAN = float("nan")
STAMP = Stamp("test", lambda: 0.0)


def payload(fleet: Fleet, round_: int, replica_id: int = 0) -> torch.Tensor:
    """The pseudo-gradient that a replica published."""
    reader = ContributionReader(fleet.store)
    manifest = reader.of(round_, replica_id)
    assert manifest is not None and manifest.payload is not None
    return Encoded(reader.shard(manifest, 0), manifest.payload.codec, manifest.payload.numel).values()


def applied(fleet: Fleet) -> list[bool]:
    return [commit.applied for commit in fleet.commits()]


# -- after an abstention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"fragments": 2}, {"fragment_update_alpha": 0.5}, {"fragments": 2, "fragment_sync_delay": 1}],
    ids=["whole", "fragments", "half kept", "fragments and overlap"],
)
def test_one_bad_batch_costs_one_round_and_the_model_is_the_base_again(settings: dict[str, Any]):
    """Fragments that did not move in that round are poisoned too."""
    fleet = Fleet(replicas=1, rounds=4, sync_every=4, **settings)
    model = tiny_model()
    constant_steps(context_of(fleet, 0), model, lambda batch: NAN if batch == 1 else 1.0)
    assert (
        applied(fleet).count(False) == 2 and fleet.commits()[-1].outer_step == 4
    )  # the other one is the final evaluation round
    assert fleet.commits()[-1].stop == "completed"
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_after_an_abstention_training_goes_on_from_the_base():
    """Whatever was trained before the bad batch is gone: the next pseudo-gradient holds its own two steps alone."""
    fleet = Fleet(replicas=1, rounds=2, sync_every=2, outer={"lr": 1.0, "momentum": 0.0})
    constant_steps(context_of(fleet, 0), tiny_model(), lambda batch: NAN if batch == 1 else 1.0, lr=0.25)
    assert payload(fleet, 2).tolist() == pytest.approx([0.5] * 12)


def test_moments_that_are_not_finite_start_anew_after_an_abstention():
    """Momentum SGD keeps NaN for ever; with quorum "all" the state saved in the round before is loaded instead."""
    for settings in ({"quorum": 1}, {"quorum": "all"}):
        fleet = Fleet(replicas=1, rounds=3, sync_every=2, **settings)
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        with context_of(fleet, 0).attach(model, optimizer) as session:
            for batch in session.batches(Counted()):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, NAN if batch == 3 else 1.0)
                optimizer.step()
        assert applied(fleet) == [True, False, True, True, False]


def test_learning_rates_go_on_after_an_abstention_though_the_state_of_the_round_before_is_loaded():
    fleet, rates = Fleet(replicas=1, rounds=3, sync_every=2), []
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with context_of(fleet, 0).attach(model, optimizer) as session:
        for batch in session.batches(Counted()):
            rates.append(optimizer.param_groups[0]["lr"])
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, NAN if batch == 3 else 1.0)
            optimizer.step()
            schedule.step()
    assert applied(fleet)[:3] == [True, False, True] and rates == [0.5**step for step in range(8)]


# -- in a leg that begins from an earlier base ------------------------------------------------------------------------


class Position:
    """A stateful object that is no schedule."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def rates_of_a_leg(fleet: Fleet) -> tuple[list[tuple[int, float]], list[int], int]:
    """Trains until the leg's end: (`step_count`, learning rate) of each step, the batches, and the other object."""
    model, position = tiny_model(), Position()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates, batches = [], []
    with context_of(fleet, 0).attach(model, optimizer, stateful={"schedule": schedule, "own": position}) as session:
        for batch in session.batches(Counted()):
            batches.append(batch)
            rates.append((session.step_count, optimizer.param_groups[0]["lr"]))
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01)
            optimizer.step()
            schedule.step()
            position.value += 1
    return rates, batches, position.value


@pytest.mark.parametrize(("from_round", "steps"), [(1, range(2, 6)), (0, range(4)), (None, range(6, 10))])
def test_a_leg_from_an_earlier_base_has_that_bases_learning_rates_and_goes_on_with_the_data(from_round, steps):
    fleet = Fleet(replicas=1, rounds=3, sync_every=2, quorum=1)
    rates_of_a_leg(fleet)
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=from_round, by="test", why="", stamp=STAMP)
    rates, batches, position = rates_of_a_leg(fleet)
    assert rates == [(step, 0.5**step) for step in steps]
    assert batches == [6, 7, 8, 9] and position == 10


def test_a_replica_without_a_contribution_to_that_base_has_the_learning_rates_of_its_last_one_before():
    fleet = Fleet(replicas=1, rounds=4, sync_every=2, quorum=1, snapshot_every=2)
    rates_of_a_leg(fleet)
    fleet.store.delete(keys.contribution(2, 0))
    begin_next_leg(RunLog(fleet.store), rounds=1, from_round=2, by="test", why="", stamp=STAMP)
    assert rates_of_a_leg(fleet)[0] == [(4, 0.5**2), (5, 0.5**3)]


# -- schedules of replicas that missed rounds -------------------------------------------------------------------------


def rates_until(
    fleet: Fleet, replica_id: int, batches: int, make: Any, every: int = 1, bad: int | None = None, times: int = 1
) -> list[tuple[int, float]]:
    """(`step_count`, learning rate) of each step of an attempt, which is killed after so many batches.

    `make`: makes the schedule for an optimizer; it is stepped `times` times after `every` optimizer steps. `bad`: the
    batch with a gradient that is not finite.
    """
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule, rates = make(optimizer), []
    with suppress(Death), context_of(fleet, replica_id).attach(model, optimizer, stateful={"of": schedule}) as session:
        for batch in session.batches(Counted()):
            if len(rates) == batches:
                raise Death
            rates.append((session.step_count, optimizer.param_groups[0]["lr"]))
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, NAN if batch == bad else 0.01)
            optimizer.step()
            for _ in range(times if (batch + 1) % every == 0 else 0):
                schedule.step()
    return rates


SCHEDULES = {
    "closed": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "recursive": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "chained": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler([SCHEDULES["recursive"](optimizer)]),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [SCHEDULES["recursive"](optimizer), SCHEDULES["recursive"](optimizer)], [1000]
    ),
    "accelerate": lambda optimizer: pytest.importorskip(
        "accelerate.scheduler", reason="the extra [trl] is not installed"
    ).AcceleratedScheduler(SCHEDULES["closed"](optimizer), optimizer, step_with_optimizer=False),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_the_schedule_of_a_replica_that_is_new_or_was_away_goes_on_at_the_runs_step(make):
    """By its own count it would be behind the others' for the rest of the run, with far higher learning rates."""
    fleet = Fleet(replicas=2, rounds=8, sync_every=2, quorum=1, timing=BY_HAND)
    assert rates_until(fleet, 0, 6, make) == [(step, 0.5**step) for step in range(6)]
    assert rates_until(fleet, 1, 4, make) == [(step, 0.5**step) for step in range(6, 10)]
    assert rates_until(fleet, 0, 4, make) == [(step, 0.5**step) for step in range(10, 14)]


def test_a_schedule_goes_on_at_the_runs_step_where_a_round_ends_beside_training():
    settings = {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "timing": BY_HAND}
    fleet = Fleet(replicas=2, rounds=12, quorum=1, **settings)
    rates_until(fleet, 0, 8, SCHEDULES["closed"])
    for replica_id in (1, 0):
        rates = rates_until(fleet, replica_id, 8, SCHEDULES["closed"])
        assert rates[0][0] >= 6 and rates == [(step, 0.5**step) for step, _ in rates]


def test_a_schedule_that_does_not_count_inner_steps_is_left_alone():
    fleet = Fleet(replicas=2, rounds=8, sync_every=2, quorum=1, timing=BY_HAND)
    rates_until(fleet, 0, 6, SCHEDULES["closed"], every=2)
    assert rates_until(fleet, 1, 4, SCHEDULES["closed"], every=2) == [(6, 1.0), (7, 1.0), (8, 0.5), (9, 0.5)]


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("bad", [0, 2], ids=["the first round", "a later one"])
def test_a_schedule_goes_back_with_a_round_that_was_not_applied(bad: int, make: Any):
    """It was ahead of the run for good: a decay to zero ended before the run, and nobody could catch up by it."""
    fleet = Fleet(replicas=1, rounds=4, sync_every=2, quorum=1)
    rates = rates_until(fleet, 0, 100, make, bad=bad)
    assert applied(fleet).count(False) == 2  # with the final evaluation
    assert [step for step, _ in rates] == [*range(bad + 2), *range(bad, 8)]
    assert rates == [(step, 0.5**step) for step, _ in rates]


def test_a_schedule_that_ends_with_the_run_outlasts_a_round_that_was_not_applied():
    """Stepped further, a OneCycleLR ends every attempt with an error, at the run's last steps."""
    fleet = Fleet(replicas=1, rounds=3, sync_every=2, quorum=1)
    rates_until(fleet, 0, 100, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=6), bad=2)
    assert fleet.commits()[-1].stop == "completed"


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
def test_a_restarted_attempt_has_the_learning_rates_of_a_round_that_is_trained_again(steps: int):
    """Killed before, within and after the repetition of round 2, whose steps are 2 and 3."""
    fleet = Fleet(replicas=1, rounds=4, sync_every=2, quorum=1)
    rates_until(fleet, 0, steps, SCHEDULES["recursive"], bad=2)
    assert applied(fleet)[:2] == [True, False]
    rates = rates_until(fleet, 0, 100, SCHEDULES["recursive"])
    assert rates[0][0] == {4: 2, 5: 2, 6: 4, 7: 4}[steps]
    assert rates == [(step, 0.5**step) for step in range(rates[0][0], 8)]


def test_a_schedule_that_does_not_count_inner_steps_does_not_go_back():
    fleet = Fleet(replicas=1, rounds=3, sync_every=2, quorum=1)
    rates = rates_until(fleet, 0, 100, SCHEDULES["closed"], bad=2, times=2)
    assert [rate for _, rate in rates] == [0.25**step for step in range(8)]


def test_what_no_schedule_set_that_goes_back_stays_as_the_loop_has_set_it():
    """Another optimizer's rate was ten times too high for the rest of the run, a weight decay as at its beginning."""
    fleet = Fleet(replicas=1, rounds=4, sync_every=2, quorum=1)
    model, seen = tiny_model(), []
    parts = list(model.parameters())
    one, two = torch.optim.SGD(parts[:1], lr=1.0, weight_decay=0.5), torch.optim.SGD(parts[1:], lr=1.0)
    steps = torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5**step)
    epochs = torch.optim.lr_scheduler.StepLR(two, 1, gamma=0.1)  # stepped once, in the round that is not applied
    with context_of(fleet, 0).attach(model, [one, two], stateful={"steps": steps, "epochs": epochs}) as session:
        session.on_round(lambda view: one.param_groups[0].update({} if view.round > 1 else {"weight_decay": 0.0}))
        for batch in session.batches(Counted()):
            seen.append((session.step_count, one.param_groups[0]["lr"]))
            for parameter in parts:
                parameter.grad = torch.full_like(parameter, NAN if batch == 2 else 0.01)
            one.step(), two.step(), steps.step()
            if batch == 2:
                epochs.step()
    assert [step for step, _ in seen] == [0, 1, 2, 3, *range(2, 8)]
    assert seen == [(step, 0.5**step) for step, _ in seen]
    assert two.param_groups[0]["lr"] == 0.1 and one.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(("author", "moves"), [(0, False), (1, True)])
def test_only_a_launched_replica_says_how_far_a_schedule_is(author: int, moves: bool):
    """Replica 0 is a stranger, whose record may say anything."""
    fleet = Fleet(replicas=3, rounds=9, sync_every=2, invited=[0], aggregate="mean")
    participants = [fleet.join(replica_id) for replica_id in (1, 2, 0)]
    optimizer = torch.optim.SGD(tiny_model().parameters(), lr=1.0)
    theirs, ours = (SCHEDULES["closed"](optimizer) for _ in range(2))
    optimizer.step(), theirs.step(), theirs.step()
    said, theirs_said = report(), SmallState(optimizer, {"of": theirs}).encode()
    assert said.progress is not None
    further = replace(said, progress=said.progress.model_copy(update={"stateful": theirs_said}))
    play(participants, [1.0] * 3, [further if each == author else said for each in (1, 2, 0)])
    assert catch_up({"of": ours}, 2, participants[0].history.of_base, 2) is moves
    assert ours.last_epoch == (2 if moves else 0)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def test_a_bf16_model_that_is_not_trained_contributes_exactly_nothing():
    """The base holds digits that the model cannot; leaving them out would undo the outer steps before."""
    fleet = Fleet(replicas=1, rounds=3, sync_every=2, outer={"lr": 0.01, "momentum": 0.0})
    model = tiny_model(dtype=torch.bfloat16)
    constant_steps(context_of(fleet, 0), model, lambda batch: 1.0 if batch < 2 else 0.0, lr=0.02)
    base = fleet.join(0, model=model).base
    assert any(not torch.equal(p, p.to(torch.bfloat16).float()) for p in base.parameters.values())
    assert payload(fleet, 1).count_nonzero() == 12
    assert payload(fleet, 2).count_nonzero() == payload(fleet, 3).count_nonzero() == 0


# -- random numbers and data ------------------------------------------------------------------------------------------


def test_each_replica_draws_random_numbers_of_its_own_and_the_same_ones_every_time():
    def drawn_by(replica_id: int, seed: int) -> list[float]:
        fleet = Fleet(replicas=2, rounds=2, sync_every=2, quorum=1, seed=seed, timing=BY_HAND)
        draws: list[float] = []
        constant_steps(
            context_of(fleet, replica_id), tiny_model(), lambda batch: draws.append(float(torch.rand(1))) or 1.0
        )
        return draws

    assert len(drawn_by(0, seed=1)) == 4
    assert drawn_by(0, seed=1) == drawn_by(0, seed=1) != drawn_by(1, seed=1)
    assert drawn_by(0, seed=1) != drawn_by(0, seed=3)


# -- restarts ---------------------------------------------------------------------------------------------------------


class Death(BaseException):
    """The process is killed."""


def train_until(fleet: Fleet, batches: int | None, seen: list[int], **attach: Any) -> torch.nn.Module:
    """AdamW, one attempt; killed in the batch after `batches`."""
    torch.manual_seed(0)
    random.seed(0)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with context_of(fleet, 0).attach(model, optimizer, **attach) as session:
        for taken, batch in enumerate(session.batches(Counted())):
            seen.append(batch)
            if taken == batches:
                raise Death
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + batch)
            optimizer.step()
    return model


def killed_and_restarted(batches: int, **settings: Any) -> Fleet:
    fleet = Fleet(replicas=1, rounds=4, sync_every=4, snapshot_every=2, **settings)
    with pytest.raises(Death):
        train_until(fleet, batches, [])
    train_until(fleet, None, [])
    return fleet


def digests(fleet: Fleet) -> list[str]:
    return [commit.base_digest for commit in fleet.commits()]


def test_moments_older_than_the_newest_contribution_are_never_put_on_a_newer_base():
    """States are saved with rounds 2 and 4; killed in round 4, the optimizer begins anew, as without any state."""
    old_state = killed_and_restarted(14, replica_state="snapshot")
    no_state = killed_and_restarted(14, replica_state="none")
    assert digests(old_state) == digests(no_state)
    assert digests(killed_and_restarted(14, replica_state="round")) != digests(no_state)


@pytest.mark.parametrize(
    ("killed_at", "settings", "anew"),
    [
        (14, {"replica_state": "snapshot"}, [3]),
        (14, {"replica_state": "round"}, []),
        (10, {"replica_state": "snapshot"}, []),  # the newest contribution is that of round 2, before a snapshot
        (2, {"replica_state": "snapshot"}, []),  # nothing was published yet
    ],
)
def test_a_replica_whose_optimizer_begins_anew_logs_it(killed_at, settings, anew, caplog):
    killed_and_restarted(killed_at, **settings)
    said = [line for line in caplog.messages if line.startswith("the inner optimizer begins anew: ")]
    assert len(said) == len(anew) and all(
        f"to round {round_}. " in line for round_, line in zip(anew, said, strict=True)
    )


def test_a_state_is_saved_with_the_contribution_that_a_snapshot_follows():
    fleet = killed_and_restarted(14, replica_state="snapshot")
    with_state = [m.round for r in range(1, 5) if (m := ContributionReader(fleet.store).of(r, 0)) and m.state]
    assert with_state == [2, 4]


def test_a_restarted_attempt_counts_its_steps_and_tokens_on():
    fleet = Fleet(replicas=1, rounds=2, sync_every=3)
    with pytest.raises(Death):
        train_until(fleet, 4, [])
    again: list[int] = []
    train_until(fleet, None, again)
    assert again == [3, 4, 5]
    progress = [m.progress for r in (1, 2) if (m := ContributionReader(fleet.store).of(r, 0))]
    assert [p.inner_steps for p in progress if p] == [3, 6]


def test_every_manifest_tells_the_steps_and_tokens_of_its_own_round():
    fleet = Fleet(replicas=1, rounds=3, sync_every=3)
    constant_steps(context_of(fleet, 0), tiny_model(), lambda batch: 1.0)
    said = [m for r in (1, 2, 3) if (m := ContributionReader(fleet.store).of(r, 0))]
    assert [[o.steps for o in m.origins] for m in said] == [[3], [3], [3]]
    assert [m.metrics["tokens"].sum for m in said] == [3.0] * 3 and [m.metrics["loss"].count for m in said] == [3] * 3
    assert [m.in_loop.count for m in said if m.in_loop] == [1] * 3  # the first eighth of three, rounded up


def test_a_model_leaves_a_run_with_the_last_base():
    fleet = Fleet(replicas=1, rounds=2, sync_every=2, fragments=2)
    model = tiny_model()
    constant_steps(context_of(fleet, 0), model, lambda batch: 1.0)
    log = RunLog(fleet.store)
    base = rebuild(log, log.newest_begin().record).base
    moved_last = fleet.start().fragments[1]
    for name in moved_last:
        assert torch.equal(trainable(model)[name], base.parameters[name])
