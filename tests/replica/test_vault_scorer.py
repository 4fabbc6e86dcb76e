"""A replica scores the vault set in the round after an alarm, on two bases, and at no other time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from protocol_fleet import Fleet, tiny_model
from sessions import constant_steps, context_of

from diloco_orchestrator.errors import ConfigError, ModelMismatch
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.protocol.verdict import VerdictKind
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.memory import MemoryStore

HELD, VAULT = list(range(10)), list(range(100, 110))
LR, SINKS_AFTER = 1 / 64, 25


class Dies(RuntimeError):
    """The process is gone."""


def first_of(model: torch.nn.Module) -> float:
    return next(model.parameters()).detach().reshape(-1)[0].item()


class Workload:
    """One replica; the first parameter rises by one step in each round. The held-out score sinks after round 25, the
    vault's too if `real`. `dies_at`: the round in which the first attempt ends.
    """

    def __init__(self, real: bool, dies_at: int = 0, **settings: Any) -> None:
        self.fleet = Fleet(replicas=1, rounds=45, sync_every=1, outer={"lr": 1.0, "momentum": 0.0}, **settings)
        self.real, self.dies_at = real, dies_at
        self.zero = first_of(tiny_model())
        self.before_scoring: Callable[[int], None] = lambda step: None
        self.before_training: Callable[[], None] = lambda: None
        self.vault_rounds: list[int] = []  # the outer steps in each model that the vault set was scored on

    def heldout(self, model: torch.nn.Module, items: list[int]) -> list[float]:
        step = round((self.zero - first_of(model)) / LR)
        self.before_scoring(step)
        sinks, varies = max(step - SINKS_AFTER, 0), 0
        if items[0] >= 100:
            self.vault_rounds.append(step)
            sinks, varies = sinks * self.real, 1  # from item to item, so that a change has a standard error
        return [0.5 + 0.01 * (7 * (step + varies * item) % 5) + 0.001 * (item % 3) - 0.1 * sinks for item in items]

    def attempt(self) -> None:
        context = context_of(self.fleet, 0)

        def gradient(batch: int) -> float:
            self.before_training()
            if self.dies_at and context.session is not None and context.session.round == self.dies_at:
                self.dies_at = 0
                raise Dies
            return 1.0

        constant_steps(
            context,
            tiny_model(),
            gradient,
            lr=LR,
            heldout=self.heldout,
            heldout_items=HELD,
            vault_items=VAULT,
            in_loop="reward",
        )

    def train(self) -> "Workload":
        try:
            self.attempt()
        except Dies:
            self.attempt()
        return self

    def confirming(self) -> list[int]:
        """The rounds whose alarm waits for the next one."""
        return [c.round for c in self.fleet.commits() if c.verdict and c.verdict.kind is VerdictKind.CONFIRM]

    def manifest(self, round_: int) -> Contribution:
        found = ContributionReader(self.fleet.store).of(round_, 0)
        assert found is not None
        return found


def test_a_fall_is_confirmed_in_the_round_after_the_alarm_on_the_base_and_on_the_best_one():
    work = Workload(real=True).train()
    last = work.fleet.commits()[-1]
    (alarm,) = work.confirming()
    assert last.round == alarm + 1 and last.halted_by_guard and "the vault set confirms it" in last.reason
    now, best = work.vault_rounds
    assert now == alarm and best <= SINKS_AFTER
    (score,) = work.manifest(alarm + 1).vault
    assert score.change == pytest.approx(-0.1 * (alarm - SINKS_AFTER) * 10, abs=0.3) and score.count == 10
    assert [r for r in range(1, last.round) if work.manifest(r).vault] == []
    assert verify_run(work.fleet.store).agrees


def test_a_fall_of_the_held_out_items_alone_is_dismissed_and_the_run_completes():
    work = Workload(real=False).train()
    assert work.fleet.commits()[-1].stop == "completed" and work.confirming()
    assert work.confirming() == [r - 1 for r in range(1, 47) if work.manifest(r).vault]
    assert verify_run(work.fleet.store).agrees


def test_a_replica_that_dies_while_the_alarm_waits_changes_nothing():
    straight = Workload(real=True).train()
    (alarm,) = straight.confirming()
    killed = Workload(real=True, dies_at=alarm + 1).train()
    assert killed.dies_at == 0 and len(killed.vault_rounds) == 4  # both attempts have scored it
    assert [c.verdict for c in killed.fleet.commits()] == [c.verdict for c in straight.fleet.commits()]
    assert killed.fleet.commits()[-1].base_digest == straight.fleet.commits()[-1].base_digest


class Hiding(MemoryStore):
    """Has no payload of round 2 while it `hides`."""

    hides = False

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return super().get(f"{key}.gone" if self.hides and key.startswith(keys.payloads(2)) else key, start, end)


def test_a_best_base_whose_payloads_are_gone_cannot_be_scored_and_the_alarm_halts_two_rounds_later():
    straight = Workload(real=True).train()
    (alarm,) = straight.confirming()
    bucket = Hiding()
    work = Workload(real=True, store=bucket, snapshot_every=100)
    work.before_scoring = lambda step: setattr(bucket, "hides", step >= alarm)
    work.before_training = lambda: setattr(bucket, "hides", False)
    work.train()
    last = work.fleet.commits()[-1]
    assert last.round == alarm + 2 and "in 2 rounds, so that nothing refutes it" in last.reason
    assert work.vault_rounds == []


def attach(replicas: int = 1, **given: Any) -> None:
    model = tiny_model()
    context = context_of(Fleet(replicas=replicas), 0)
    context.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def score(model: torch.nn.Module, items: Any) -> list[float]:
    return [0.0] * len(items)


@pytest.mark.parametrize(
    ("vault", "words"),
    [
        ([8, 9, 3], r"item 2 of vault_items is also heldout_items 3: the vault set confirms an alarm only with items"),
        ([8, 9, 8], r"item 2 of vault_items is also vault_items 0"),
        ([8], r"1 vault items cannot be dealt over 1 replicas: give at least 2 for each"),
        ([], r"0 vault items cannot be dealt"),
    ],
)
def test_a_vault_set_that_could_not_confirm_anything_is_refused(vault, words):
    with pytest.raises(ConfigError, match=words):
        attach(heldout=score, heldout_items=[1, 2, 5, 3], vault_items=vault)


def test_a_vault_set_without_a_scoring_function_is_refused():
    with pytest.raises(ConfigError, match="vault_items were given without a heldout function"):
        attach(vault_items=[1, 2])


def test_a_replica_with_another_vault_set_is_refused():
    fleet = Fleet(replicas=2)
    for replica_id, vault in enumerate(([8, 9, 10, 11], [8, 9, 10, 12])):
        model = tiny_model()
        given = {"heldout": score, "heldout_items": [1, 2], "vault_items": vault}
        arguments = (model, torch.optim.SGD(model.parameters(), lr=0.1))
        if replica_id:
            with pytest.raises(ModelMismatch, match=r"2 held-out items .* and 4 vault items"):
                context_of(fleet, replica_id).attach(*arguments, **given)
        else:
            context_of(fleet, replica_id).attach(*arguments, **given)


def test_a_guard_that_never_asks_says_so(caplog):
    model = tiny_model()
    context = context_of(Fleet(replicas=1, guard="off"), 0)
    given = {"heldout": score, "heldout_items": [1], "vault_items": [8, 9]}
    context.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    assert "vault_items are never scored: the guard rule off does not ask for them" in caplog.text
