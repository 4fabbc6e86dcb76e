"""The vault set: an alarm that it does not confirm does not halt, one that it confirms halts a round later."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.guard import Evidence, SequentialGuard, Verdict, VerdictKind
from diloco_orchestrator.guard.robust import change_of
from diloco_orchestrator.guard.round_fold import is_rebuildable, vault_base
from diloco_orchestrator.guard.sequential_v1 import SequentialV1
from diloco_orchestrator.guard.vault import VaultChange
from diloco_orchestrator.inspection.explain import explain
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol.records import VaultScore
from diloco_orchestrator.protocol.start_records import VaultSet

PLAIN, VAULT = SequentialGuard(), SequentialGuard(vault_sigmas=2.0)
NAN = float("nan")
SAME, FELL, ROSE = VaultChange(0.001, 0.01), VaultChange(-0.2, 0.01), VaultChange(0.2, 0.01)


class Run:
    """Folds one round after another, the state through JSON. `change`: what the vault set shows when it is asked."""

    def __init__(self, guard: SequentialGuard = VAULT, change: VaultChange | None = SAME) -> None:
        self.guard, self.change, self.state, self.round, self.asked = guard, change, None, 0, 0
        self.rng = random.Random(5)

    def next(self, heldout: float | None = 0.5, in_loop: float = 0.5, sd: float = 0.01, **more: Any) -> Verdict:
        self.round += 1
        asked = SequentialGuard.vault_base(self.state) is not None
        self.asked += asked
        evidence = Evidence(
            round=self.round,
            heldout=None if heldout is None else self.rng.gauss(heldout, sd),
            in_loop=self.rng.gauss(in_loop, sd),
            vault=self.change if asked else None,
            **more,
        )
        self.state, verdict = self.guard.fold(self.state, evidence)
        self.state = json.loads(json.dumps(self.state))
        return verdict

    def settled(self, rounds: int = 60) -> "Run":
        assert all(self.next().kind is VerdictKind.CONTINUE for _ in range(rounds))
        return self

    def until_alarm(self, fall: float = 0.02, gain: float = 0.0) -> Verdict:
        return next(v for u in range(1, 60) if (v := self.next(0.5 - fall * u, 0.5 + gain * u)).kind != "continue")


def lucky(run: Run) -> list[Verdict]:
    """The held-out score lies 5 sigmas above its level for 24 rounds, and then at its level again."""
    return [run.next(0.55 if 60 <= t < 84 else 0.5) for t in range(160)]


def test_a_lucky_streak_that_the_vault_set_does_not_confirm_does_not_halt():
    assert any(verdict.fire for verdict in lucky(Run(PLAIN)))
    run = Run()
    verdicts = lucky(run)
    assert not any(verdict.fire for verdict in verdicts) and run.asked
    (first, *_) = [v for v in verdicts if v.warning.startswith("dismissed: ")]
    assert first.kind is VerdictKind.CONTINUE and first.reason == ""
    assert "the vault set does not confirm it: it changed by +0.001 ± 0.01 against round" in first.warning
    assert [s.value for s in first.statistics if s.name.endswith("fall")] == [0.0, 0.0]


def test_after_a_dismissed_alarm_a_fall_is_still_seen():
    run = Run().settled()
    run.until_alarm()
    assert not run.next().fire
    run.change = FELL
    assert any(run.next(0.5 - 0.02 * u).fire for u in range(1, 15))


def test_a_hack_that_the_vault_set_confirms_halts_one_round_after_the_alarm():
    plain, run = Run(PLAIN).settled(), Run(change=FELL).settled()
    straight, alarm = plain.until_alarm(), run.until_alarm()
    assert straight.fire and plain.round == run.round
    assert alarm.kind is VerdictKind.CONFIRM and not alarm.fire and alarm.warning == alarm.reason
    assert "Before a halt the vault set is scored on the next model and on that of round" in alarm.reason
    halt = run.next(0.3)
    assert halt.fire and halt.kind is VerdictKind.HALT and halt.rollback_to == straight.rollback_to
    assert "; the vault set confirms it: it changed by -0.2 ± 0.01 against round" in halt.reason
    assert run.next(0.5).reason == f"latched: {halt.reason}"


def test_a_vault_set_that_nobody_scores_delays_a_halt_by_two_rounds_and_no_more():
    run = Run(change=None).settled()
    run.until_alarm()
    waits, halt = run.next(0.3), run.next(0.3)
    assert waits.kind is VerdictKind.CONFIRM and "not scored by enough replicas" in waits.reason
    assert halt.fire and "in 2 rounds, so that nothing refutes it" in halt.reason


def test_scores_that_are_not_finite_confirm_a_fall():
    run = Run(change=VaultChange(NAN, 0.0)).settled()
    run.until_alarm()
    assert "its scores are not finite" in run.next(0.3).reason


def test_a_hacking_gap_is_dismissed_only_by_a_vault_set_that_improved():
    for change, fires in ((SAME, True), (FELL, True), (ROSE, False)):
        run = Run(change=change).settled()
        alarm = run.until_alarm(fall=0.0, gain=0.02)
        assert alarm.kind is VerdictKind.CONFIRM and alarm.reason.startswith("Hacking Gap")
        assert run.next().fire is fires


def test_a_hacking_gap_that_is_a_fall_of_the_held_out_score_alone_is_confirmed_as_a_fall():
    """Training does not gain, and the held-out score falls by .02 in each round; the vault set does not."""
    for change, fires in ((SAME, False), (FELL, True)):
        run = Run(change=change).settled()
        verdicts = [run.next(0.5 - 0.02 * u) for u in range(1, 50)]
        asked = {verdict.warning.split(":")[0] for verdict in verdicts if verdict.kind is VerdictKind.CONFIRM}
        assert any(verdict.fire for verdict in verdicts) is fires
        assert fires or "Hacking Gap" in asked


def test_alarms_of_other_numbers_do_not_wait():
    assert Run().settled().next(kl_to_init=9.0).fire
    run = Run(change=None).settled()
    run.until_alarm()
    assert run.next(kl_to_init=9.0).fire  # while another alarm waits


def test_the_last_round_does_not_wait_for_another():
    run = Run().settled()
    verdicts = [run.next(0.5 - 0.02 * u, final_evaluation=True) for u in range(1, 12)]
    fired = next(v for v in verdicts if v.fire)
    assert "(this is the last round, so that the vault set is not asked)" in fired.reason
    run = Run(change=None).settled()
    run.until_alarm()
    assert run.next(0.3, final_evaluation=True).fire


def test_without_a_base_to_compare_with_the_alarm_halts_at_once():
    run = Run()
    assert not any(run.next(rebuildable=False).fire for _ in range(60))
    fired = next(v for u in range(1, 20) if (v := run.next(0.5 - 0.02 * u, rebuildable=False)).fire)
    assert "(no better base is kept that the vault set could be compared on)" in fired.reason and not run.asked


def test_bases_can_be_rebuilt_while_payloads_or_their_snapshots_are_kept():
    config = Fleet(snapshot_every=5).config
    assert is_rebuildable(config, 3)
    needed = config.model_copy(update={"retention": config.retention.model_copy(update={"payloads": "needed"})})
    assert [is_rebuildable(needed, step) for step in (0, 3, 5, 12, 15)] == [True, False, True, False, True]


def test_a_state_without_a_vault_set_is_refused_by_a_guard_with_one():
    run = Run(PLAIN).settled(20)
    with pytest.raises(ValueError, match="settings"):
        VAULT.fold(run.state, Evidence(round=21, heldout=0.5))
    for bad in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="vault_sigmas"):
            SequentialGuard(vault_sigmas=bad)


@pytest.mark.parametrize(("mean", "error", "fires"), [(-0.06, 0.0, True), (-0.005, 0.0, False), (-0.06, 0.04, False)])
def test_a_fall_counts_beyond_its_own_error_and_beyond_the_noise_of_healthy_bases(mean, error, fires):
    """The noise of the held-out score is .01, its fall .2."""
    run = Run(change=VaultChange(mean, error)).settled()
    run.until_alarm()
    assert run.next(0.3).fire is fires


@pytest.mark.parametrize(("error", "confirms"), [(0.0, False), (0.01, False), (0.2, True)])
def test_items_that_all_fall_a_little_do_not_confirm_a_fall_that_is_many_times_as_large(error, confirms):
    """The held-out score falls by 1.6. A fall of .5 confirms it, whose error reaches a quarter of that."""
    run = Run(change=VaultChange(-0.5 if confirms else -0.03, error)).settled()
    run.until_alarm()
    verdict = run.next(-1.08, sd=0.0)
    assert verdict.fire is confirms
    if confirms:
        assert "; the vault set confirms it: it changed by -0.5 ± 0.2 against round" in verdict.reason
    else:
        most = 0.03 + 2 * error
        assert f"a fall of at most {most:.3g} (2 standard errors added), less than 25% of the held" in verdict.warning


def test_the_interval_of_the_change_must_reach_a_quarter_of_the_fall():
    """Noise .01, fall 1.6: the interval of 2 standard errors around the change reaches .4 or does not."""
    for mean, error, confirms in ((-0.35, 0.03, True), (-0.35, 0.02, False), (-0.45, 0.0, True), (-0.35, 0.2, False)):
        run = Run(change=VaultChange(mean, error)).settled()
        run.until_alarm()
        assert run.next(-1.08, sd=0.0).fire is confirms


def test_a_run_of_the_rule_before_asks_no_share_of_the_fall():
    run = Run(SequentialV1(vault_sigmas=2.0), VaultChange(-0.03, 0.0)).settled()
    run.until_alarm()
    assert run.next(-1.08, sd=0.0).fire


def test_in_a_runs_first_rounds_a_fall_of_the_vault_set_counts_beyond_the_noise():
    halts = []
    for change in (-0.02, -0.9):
        run = Run(change=VaultChange(change, 0.01))
        for t in range(8):
            run.next(0.5 + 0.1 * t, 0.5 + 0.1 * t, sd=0.0)
        next(v for _ in range(20) if (v := run.next(-0.5, sd=0.0)).kind is VerdictKind.CONFIRM)
        halts.append(run.next(-0.5, sd=0.0).fire)
    assert halts == [False, True]


# -- what the shares say ----------------------------------------------------------------------------------------------


def share(number: int, mean: float | None, sd: float = 0.1, count: int = 20) -> VaultScore:
    if mean is None:
        return VaultScore(share=number, change=None, squares=None, count=count)
    return VaultScore(share=number, change=mean * count, squares=sd * sd * (count - 1), count=count)


def test_the_change_is_the_mean_over_items_with_its_standard_error():
    found = change_of([share(0, -0.1), share(1, -0.3)], 40)
    assert found is not None and found.mean == pytest.approx(-0.2)
    assert found.error == pytest.approx(0.1 / 40**0.5)


@pytest.mark.parametrize("mean", [0.0, -0.2])
@pytest.mark.parametrize("lie", [share(7, 1000.0), share(7, -1000.0), share(7, None), share(7, 0.0, sd=1e6)])
def test_one_share_of_eight_neither_confirms_nor_refutes(mean, lie):
    honest = [share(i, mean + 0.01 * (i - 3)) for i in range(7)]
    found = change_of([*honest, lie], 160)
    assert found is not None and (found.mean < -2 * found.error) is (mean < 0)


def test_fewer_than_half_of_the_items_say_nothing_and_mostly_broken_ones_say_so():
    assert change_of([share(0, -0.1)], 60) is None and change_of([], 40) is None
    assert change_of([share(0, -0.1)], 40) is not None
    found = change_of([share(0, None), share(1, None), share(2, -0.1)], 60)
    assert found is not None and found.mean != found.mean


# -- in a run ---------------------------------------------------------------------------------------------------------


class VaultFleet(Fleet):
    """Two replicas, judged on shares of ten items; the vault set has ten for each too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(replicas=2, rounds=80, scored=True, **settings)
        assert self.heldout is not None
        self.heldout = self.heldout.model_copy(update={"vault": VaultSet(shares=(10, 10), digest="1" * 64)})


def vaulted(vault_fall: float, killed: bool = False) -> VaultFleet:
    """A run whose held-out score falls by .1 in each round after the 22nd, and its vault score by `vault_fall`.

    `killed`: the replicas are other attempts in the round in which the vault set is scored.
    """
    fleet = VaultFleet()
    participants, rng = fleet.join_all(), random.Random(3)
    while not any(p.open.stopped for p in participants) and participants[0].open.round < 44:
        if killed and vault_base(participants[0].open.guard) is not None:
            participants, killed = [fleet.join(i) for i in range(2)], False
        since = max(participants[0].open.round - 22, 0)
        asked = [vault_base(p.open.guard) is not None for p in participants]
        said = [report(i, 2.0 - 0.1 * since + rng.gauss(0, 0.05)) for i in range(2)]
        if asked[0]:
            said = [replace(each, vault=(share(i, -vault_fall * since, 0.1, 10),)) for i, each in enumerate(said)]
        play(participants, [1.0, 1.0], said)
        assert asked[0] is asked[1] and participants[0].open.stopped is participants[1].open.stopped
    return fleet


def test_a_run_waits_for_one_round_halts_at_the_same_one_everywhere_and_is_verified():
    fleet = vaulted(0.1)
    *_, alarm, last = fleet.commits()
    assert (alarm.stop, alarm.applied, alarm.verdict.kind) == ("none", True, VerdictKind.CONFIRM)  # type: ignore[union-attr]
    assert (last.stop, last.applied, last.halted_by_guard) == ("halted", False, True)
    assert last.round == alarm.round + 1 <= 32 and "the vault set confirms it" in last.reason
    assert verify_run(fleet.store).agrees
    status = RunReader(fleet.store).status()
    assert status.rounds[-2].warning.startswith("the held-out score")
    assert any("vault set" in words for words in explain(status).why)


@pytest.mark.slow
def test_the_vault_set_is_asked_again_and_again_and_never_halts_a_run_that_it_calls_healthy():
    fleet = vaulted(0.0)
    commits = fleet.commits()
    assert not any(commit.fired for commit in commits)
    assert sum(c.verdict is not None and c.verdict.kind is VerdictKind.CONFIRM for c in commits) >= 2
    assert verify_run(fleet.store).agrees


@pytest.mark.slow
def test_a_kill_between_alarm_and_answer_changes_no_verdict():
    straight, killed = vaulted(0.1), vaulted(0.1, killed=True)
    assert [c.verdict for c in killed.commits()] == [c.verdict for c in straight.commits()]


def test_a_vault_score_of_a_share_that_was_not_dealt_is_not_counted_and_verify_says_the_same():
    fleet = VaultFleet()
    participants, rng = fleet.join_all(), random.Random(3)
    for round_ in range(1, 50):
        asked = vault_base(participants[0].open.guard) is not None
        said = [report(i, 2.0 - 0.1 * max(round_ - 22, 0) + rng.gauss(0, 0.05)) for i in range(2)]
        # Replica 1 answers for both shares, with too many items for its own: nothing of it counts, and half is enough.
        lie = (share(0, 9.0, 0.1, 10), share(1, 9.0, 0.1, 99))
        said = [replace(said[0], vault=(share(0, -0.5, 0.1, 10),)), replace(said[1], vault=lie)] if asked else said
        play(participants, [1.0, 1.0], said)
        if participants[0].open.stopped:
            break
    assert fleet.commits()[-1].halted_by_guard
    assert "it changed by -0.5 ± 0.032" in fleet.commits()[-1].reason
    assert verify_run(fleet.store).agrees
