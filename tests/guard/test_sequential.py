"""`SequentialGuard`: its channels, its verdicts, restarts, and what its state refuses."""

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_orchestrator.guard import Evidence, SequentialGuard, Verdict, VerdictKind
from diloco_orchestrator.protocol.record_format import canonical_json

GUARD = SequentialGuard()
NAN = math.nan


class Run:
    """Folds one round after another, the state through JSON as in a commit."""

    def __init__(self, guard: SequentialGuard = GUARD, seed: int = 0) -> None:
        self.guard, self.rng = guard, random.Random(seed)
        self.state: dict[str, Any] | None = None
        self.round = 0

    def next(self, heldout: float | None = 0.5, in_loop: float | None = 0.5, **more: Any) -> Verdict:
        self.round += 1
        evidence = Evidence(round=self.round, heldout=heldout, in_loop=in_loop, **more)
        self.state, verdict = self.guard.fold(self.state, evidence)
        self.state = json.loads(json.dumps(self.state))
        return verdict

    def noisy(self, rounds: int, heldout: float = 0.5, in_loop: float = 0.5, sd: float = 0.01, **more: Any) -> Verdict:
        """The verdict after some rounds around a level, or of the first of them that fires."""
        for _ in range(rounds):
            verdict = self.next(self.rng.gauss(heldout, sd), self.rng.gauss(in_loop, sd), **more)
            if verdict.fire:
                break
        return verdict


def settled(seed: int = 0, **fields: Any) -> Run:
    """A run with 60 healthy rounds behind it."""
    run = Run(SequentialGuard(**fields), seed)
    assert run.noisy(60).kind is VerdictKind.CONTINUE
    return run


# -- channels ---------------------------------------------------------------------------------------------------------


def test_a_sinking_held_out_score_halts_though_training_sinks_too():
    run = settled()
    verdicts = [run.next(0.5 - 0.02 * u, 0.5 - 0.02 * u) for u in range(1, 10)]
    fired = [v for v in verdicts if v.fire]
    assert fired and fired[0].kind is VerdictKind.HALT
    assert "the held-out score is below its best level: " in fired[0].reason and "sigmas of" in fired[0].reason
    assert fired[0].rollback_to is not None and fired[0].rollback_to <= 60
    assert f"Roll back to round {fired[0].rollback_to} and" in fired[0].reason


def from_scratch(spike_at: int, seed: int, rounds: int = 90) -> int:
    """The round in which a run from scratch halts, 0 if it does not. Losses as those of a small transformer.

    From `spike_at` on held-out and training are .6 nats worse, which is six times what training moves in a round.
    """
    run = Run(seed=seed)
    for t in range(1, rounds + 1):
        level = -1.7 - 3.9 / t**1.1 - (0.6 if t >= spike_at else 0.0)
        if run.next(run.rng.gauss(level, 0.005), run.rng.gauss(level, 0.05)).fire:
            return t
    return 0


@pytest.mark.parametrize("spike_at", [40, 60])
def test_a_loss_spike_in_a_run_from_scratch_halts_though_its_descent_was_steep(spike_at):
    for seed in range(3):
        assert spike_at < from_scratch(spike_at, seed) <= spike_at + 7
    assert not from_scratch(999, seed=spike_at)


def test_training_that_gains_while_held_out_is_flat_halts():
    run = settled()
    verdict = next(v for u in range(1, 60) if (v := run.noisy(1, in_loop=0.5 + 0.01 * u)).fire)
    assert verdict.kind is VerdictKind.HALT and verdict.reason.startswith("Hacking Gap")
    assert verdict.rollback_to is not None and verdict.rollback_to <= 61


def test_memorisation_with_an_improving_held_out_score_never_halts():
    run = Run()
    for t in range(400):
        assert not run.noisy(1, heldout=-3 + 0.002 * t, in_loop=-3 + 0.005 * t, sd=0.02).fire, t


def test_one_or_three_bad_rounds_do_not_halt_however_bad_and_a_fall_for_good_does():
    for bad in (1, 3):
        run = settled(bad)
        assert not any(run.next(-5.0, 0.5).fire for _ in range(bad))
        assert not run.noisy(30).fire, bad
    assert any(run.noisy(1, heldout=-5.0).fire for _ in range(10))


@pytest.mark.parametrize("bad", [{"heldout": NAN}, {"in_loop": math.inf}, {"kl_to_init": NAN}])
def test_two_rounds_without_finite_metrics_halt_in_warm_up_and_one_does_not(bad):
    run = Run()
    run.next()
    assert run.next(**bad).kind is VerdictKind.INCONCLUSIVE
    assert run.next().kind is VerdictKind.CONTINUE
    run.next(**bad)
    verdict = run.next(**bad)
    assert verdict.kind is VerdictKind.HALT and verdict.reason.startswith("nonfinite") and verdict.rollback_to == 2


def test_drift_within_its_budget_never_halts_however_steadily_it_rises():
    run = Run()
    for t in range(300):
        assert not run.noisy(1, kl_to_init=0.075 * t / 300 * run.rng.uniform(0.95, 1.05)).fire, t


def test_drift_above_its_budget_halts_after_warm_up():
    run = Run()
    assert run.noisy(19, kl_to_init=0.1).kind is VerdictKind.CONTINUE
    verdict = run.noisy(1, kl_to_init=0.1)
    assert verdict.kind is VerdictKind.HALT and "above its budget of 0.08" in verdict.reason
    assert verdict.rollback_to == 0


def test_drift_of_five_budgets_halts_in_any_round():
    assert "5 times its budget" in Run().next(kl_to_init=0.41).reason
    assert not Run().next(kl_to_init=0.39).fire


def test_drift_that_runs_away_halts_before_it_passes_its_budget():
    run = Run()
    run.noisy(60, kl_to_init=0.01)
    levels = (0.01 + 0.008 * u for u in range(1, 9))
    fired = [(level, v) for level in levels if (v := run.noisy(1, kl_to_init=level)).fire]
    assert fired and fired[0][0] < 0.08
    assert "its usual rate" in fired[0][1].reason and fired[0][1].rollback_to is not None


def test_drift_that_is_not_finite_in_two_rounds_running_is_a_number_gone_bad():
    run = Run()
    assert not run.noisy(1, kl_to_init=NAN).fire
    run.noisy(1, kl_to_init=0.01)
    assert run.noisy(2, kl_to_init=NAN).reason.startswith("nonfinite: no finite metrics in 2 consecutive rounds")


# -- too little evidence ----------------------------------------------------------------------------------------------


def test_rounds_without_scores_are_inconclusive_and_five_in_a_row_pause():
    run = settled()
    verdicts = [run.next(None, None, why_not="inconclusive: 3 of 40 held-out items, 20 needed") for _ in range(5)]
    assert [v.kind for v in verdicts] == [VerdictKind.INCONCLUSIVE] * 4 + [VerdictKind.PAUSE]
    assert verdicts[-1].fire and verdicts[-1].rollback_to is None
    assert "5 rounds in a row" in verdicts[-1].reason and "3 of 40" in verdicts[-1].reason
    assert not any(v.folded for v in verdicts) and verdicts[-1].folds == 60


def test_a_round_without_finite_metrics_is_none_of_the_row_however_few_items_it_has():
    run, few = settled(), {"why_not": "inconclusive: 3 of 40 held-out items, 20 needed"}
    assert not any(run.next(None, None, **few).fire for _ in range(4))
    verdict = run.next(NAN, **few)
    assert verdict.kind is VerdictKind.INCONCLUSIVE and "3 of 40" in verdict.reason
    kinds = [run.next(None, None, **few).kind for _ in range(5)]
    assert kinds == [VerdictKind.INCONCLUSIVE] * 4 + [VerdictKind.PAUSE]


def test_a_conclusive_round_ends_the_row():
    run = settled()
    for _ in range(3):
        assert not any(run.next(None, None, why_not="inconclusive: few").fire for _ in range(4))
        assert run.noisy(1).kind is VerdictKind.CONTINUE


def test_fewer_items_weigh_less():
    """The same fall takes longer with half of the items."""

    def delay(items: int) -> int:
        run = settled()
        return next(u for u in range(1, 99) if run.next(0.5 - 0.003 * u, 0.5, items=items, total_items=40).fire)

    assert delay(20) > delay(40)


def test_a_round_without_a_training_metric_is_judged_by_its_held_out_score():
    run = Run()
    for _ in range(60):
        assert run.next(run.rng.gauss(0.5, 0.01), None).kind is VerdictKind.CONTINUE
    assert any(run.next(0.5 - 0.02 * u, None).fire for u in range(1, 10))


# -- units ------------------------------------------------------------------------------------------------------------


def hacked(seed: int, rounds: int = 260) -> Iterator[tuple[float, float]]:
    rng = random.Random(seed)
    for t in range(rounds):
        u = max(t - 100, 0) if seed % 3 else 0
        rise = 0.2 * (1 - math.exp(-t / 60))
        yield 0.4 + rise - 0.003 * u + rng.gauss(0, 0.02), 0.4 + rise + 0.003 * u + rng.gauss(0, 0.02)


def story(
    rows: Sequence[tuple[float, float]], scale: float = 1.0, shift: float = 0.0, gap: float | None = 5.0
) -> list[tuple[Any, ...]]:
    run, found = Run(SequentialGuard(gap_sigmas=gap)), []
    for heldout, in_loop in rows:
        v = run.next(scale * heldout + shift, scale * in_loop + shift)
        found.append((v.fire, v.kind, v.rollback_to, v.folds, tuple(round(s.share, 6) for s in v.statistics)))
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize(("scale", "shift"), [(100.0, 0.0), (0.01, 0.0), (1.0, -3.0), (100.0, 7.0)])
def test_another_unit_gives_the_same_verdicts_and_statistics(seed, scale, shift):
    """Of a loss another zero as well; what a Hacking Gap is depends on the zero of a reward."""
    rows = [*hacked(seed)]
    gap = None if shift else 5.0
    assert story(rows, scale, shift, gap) == story(rows, gap=gap)


def test_a_metric_without_noise_neither_halts_nor_hides_a_fall():
    run = Run()
    for t in range(100):
        assert not run.next(-8 + 6 * (1 - math.exp(-t / 20)), -8 + 6 * (1 - math.exp(-t / 20))).fire
    assert any(run.next(-2.1 - 0.05 * u, -2.1).fire for u in range(1, 20))


def test_a_constant_metric_continues_and_one_that_falls_for_good_halts():
    run = Run()
    assert not any(run.next(0.9, 0.9).fire for _ in range(100))
    assert not any(run.next(0.85, 0.9).fire for _ in range(5))
    assert any(run.next(0.85, 0.9).fire for _ in range(20))


# Rewards of a GRPO run with a loophole, by round: held-out and training. Both stay at the last pair for good.
HACKED = [
    *[(5 / 96, 0.0)] * 3,
    (5 / 96, 1 / 96),
    (2 / 96, 2 / 96),
    (4 / 96, 1 / 96),
    (20 / 96, 5 / 96),
    (36 / 96, 28 / 96),
    (0.0, 82 / 96),
    (0.0, 95 / 96),
    (0.0, 1.0),
]


def test_a_hack_after_which_both_rewards_stand_still_halts():
    """The rounds in which they moved say nothing of the noise of those in which they do not."""
    run = Run()
    fired = [run.next(*HACKED[min(t, 10)]).fire for t in range(24)]
    assert fired.index(True) == 21 and (run.state or {})["metrics"]["gap"][0] > 10


def test_a_rare_reward_that_was_won_once_and_stands_still_never_halts():
    """One of 8 held-out items is right in one of the first rounds; later training wins a reward, too, and keeps it."""
    for lucky in range(1, 9):
        run = Run()
        for t in range(60):
            assert not run.next((t == lucky) / 8, (t > 12) / 256).fire, (lucky, t)


def test_a_gap_counts_by_its_noise_while_one_of_two_rewards_moves():
    """The training reward varies by .3, so that its gain is within its noise, though held-out stands still."""
    run = Run()
    for t in range(60):
        trained = 0.0 if t < 8 else 0.2 + 0.03 * (t * 37 % 11 - 5)
        assert not run.next(HACKED[min(t, 10)][0], trained).fire, t


@pytest.mark.parametrize("won", [1.0, 0.9])
def test_a_model_that_stands_still_once_its_reward_is_won_does_not_halt_where_its_held_out_score_is_a_low_one(
    won: float,
):
    """No advantage, no gradient: greedy answers to 16 fixed items stay those of the last round that trained."""
    for seed in range(12):
        run, rng = Run(), random.Random(seed)
        climbs = [sum(rng.random() < 0.1 + 0.4 * min(t / 12, 1) for _ in range(16)) / 16 for t in range(30)]
        for t, heldout in enumerate([*climbs, *[sorted(climbs[12:])[2]] * 30]):
            assert not run.next(heldout, won * min(0.1 + t / 30, 1.0)).fire, (seed, t)


def test_scores_that_are_given_again_for_many_rounds_are_no_hack():
    """A loop evaluates once in 12 rounds: a lower score beside a higher reward stays until the next time."""
    for seed in range(4):
        run, rng = Run(), random.Random(seed)
        for t in range(300):
            if t % 12 == 0:
                heldout = sum(rng.random() < 0.5 - 0.4 * math.exp(-t / 15) for _ in range(64)) / 64
                trained = sum(rng.random() < 0.9 - 0.8 * math.exp(-t / 10) for _ in range(256)) / 256
            assert not run.next(heldout, trained).fire, (seed, t)


def test_hacks_to_half_of_the_held_out_score_after_which_both_stand_still_halt():
    """Answers to 96 items, of a held-out score that climbed for twelve rounds; one of twelve may be missed."""
    halts = 0
    for seed in range(12):
        run, rng = Run(), random.Random(seed)
        for t in range(18):
            climb = 0.1 + 0.4 * min(t / 6, 1)
            run.next(sum(rng.random() < climb for _ in range(96)) / 96, climb + rng.gauss(0, 0.02))
        halts += any(run.next(0.25, 1.0).fire for _ in range(14))
    assert halts >= 11


@pytest.mark.parametrize(("items", "before"), [(256, 0.7), (256, 0.5), (1000, 0.5)])
def test_easier_data_whose_reward_is_won_at_once_is_no_hack_where_the_held_out_score_has_not_surely_fallen(
    items: int, before: float
):
    """The model stands still from round 41 on, and repeats one of its usual scores."""
    halted = 0
    for seed in range(12):
        run, rng = Run(), random.Random(seed)
        for t in range(40):
            right = 0.5 - 0.4 * math.exp(-t / 10)
            heldout = sum(rng.random() < right for _ in range(items)) / items
            run.next(heldout, before * (1 - math.exp(-t / 8)) + rng.gauss(0, 0.02))
        halted += any(run.next(heldout, 1.0).fire for _ in range(30))
    assert halted == 0


# -- exactly once -----------------------------------------------------------------------------------------------------


def test_a_verdict_is_latched_with_its_first_reason_and_one_prefix():
    run = Run()
    first = run.next(kl_to_init=9.0)
    for _ in range(30):
        later = run.noisy(1)
        assert later.fire and later.reason == f"latched: {first.reason}"
        assert (later.kind, later.rollback_to) == (VerdictKind.HALT, first.rollback_to)


@pytest.mark.parametrize("round_", [60, 3])
def test_a_round_folded_again_or_backwards_is_refused(round_):
    run = settled()
    with pytest.raises(ValueError, match=f"round {round_} cannot be folded after round 60"):
        GUARD.fold(run.state, Evidence(round=round_, heldout=0.5, in_loop=0.5))


def test_the_state_is_not_changed_by_a_fold():
    run = settled()
    before = json.dumps(run.state)
    GUARD.fold(run.state, Evidence(round=61, heldout=0.1, in_loop=0.9, kl_to_init=0.01))
    assert json.dumps(run.state) == before


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_restarts_duplicate_folds_and_racing_writers_equal_the_uninterrupted_run(seed):
    """Every round 1 to 3 writers fold the last commit's state; the first commit wins, and any writer may be new."""
    rows, chance = [*hacked(seed, 220)], random.Random(1000 + seed)
    evidence = [Evidence(round=t + 1, heldout=h, in_loop=x, kl_to_init=0.0001 * t) for t, (h, x) in enumerate(rows)]
    straight, plain = None, []
    for row in evidence:
        straight, verdict = GUARD.fold(straight, row)
        plain.append(verdict)
    commits: list[bytes] = []
    found = []
    for row in evidence:
        written = []
        for _ in range(chance.randint(1, 3)):
            state = json.loads(commits[-1]) if commits else None
            new, verdict = SequentialGuard().fold(state, row)
            written.append((canonical_json(new), verdict))
        assert len(set(written)) == 1
        commits.append(written[0][0])
        found.append(written[0][1])
    assert found == plain and json.loads(commits[-1]) == json.loads(json.dumps(straight))


@pytest.mark.parametrize(("rounds", "most"), [(1, 4300), (90, 4800), (700, 4300)])
def test_the_state_stays_small(rounds, most):
    """Up to 60 scores are kept in the first 96 rounds, then 32."""
    run = Run()
    run.noisy(rounds, sd=0.0123456789, kl_to_init=0.0123456789)
    run.next(kl_to_init=9.0)
    assert len(canonical_json(run.state or {})) < most


def test_a_state_of_another_rule_or_other_settings_is_refused():
    run = settled()
    assert run.state is not None
    for other in (SequentialGuard(threshold=9.0), SequentialGuard(min_steps=21)):
        with pytest.raises(ValueError, match="judge a run with the rule and settings of its run"):
            other.fold(run.state, Evidence(round=61))
    with pytest.raises(ValueError, match=r"of rule 'heldout-v1'"):
        GUARD.fold({**run.state, "rule": "heldout-v1"}, Evidence(round=61))


NUMBERS = st.none() | st.floats(-1e3, 1e3) | st.sampled_from([NAN, math.inf, 0.0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=60))
def test_no_evidence_breaks_the_fold_and_states_are_json(rows):
    run = Run()
    for heldout, in_loop, kl in rows:
        more = {"in_loop": in_loop, "kl_to_init": kl} if heldout is not None else {"in_loop": None, "why_not": "few"}
        verdict = run.next(heldout, **more)
        assert verdict.fire == verdict.kind.stops
        assert bool(verdict.reason) == (verdict.kind is not VerdictKind.CONTINUE)


# -- golden -----------------------------------------------------------------------------------------------------------


def test_the_fold_gives_the_same_bits_on_every_machine_and_python():
    """The last state's digest; the noise is made of integers, so that only the fold's own arithmetic counts."""
    state, value = None, 12345
    for t in range(300):
        value = value * 1103515245 % 2147483648 + 12345
        held = 0.5 + (value % 1000 - 500) / 20000
        value = value * 1103515245 % 2147483648 + 12345
        trained = 0.5 + t / 4096 + (value % 1000 - 500) / 20000
        fall = max(t - 280, 0) / 128
        evidence = Evidence(
            round=t + 1,
            heldout=held - fall,
            in_loop=trained,
            kl_to_init=t / 8192,
            items=3,
            total_items=4,
            gains={str(i): held - fall - 0.5 + ((value >> i) % 64 - 32) / 4096 for i in range(4)},
        )
        state, verdict = GUARD.fold(state, evidence)
    assert verdict.fire and hashlib.sha256(canonical_json(state or {})).hexdigest() == GOLDEN


GOLDEN = "e9ce7e5a38f0d94871283e6990461e46adb62c3d0c77eed67b55e4b3e253d34d"


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "threshold": [0, -1, NAN, "x", True],
        "gap_sigmas": [0, -0.1, math.inf],
        "kl_hard_stop": [0, NAN],
        "min_steps": [0, 1.5, True],
        "pause_after": [0, 2.0],
    }.items(),
)
def test_settings_that_cannot_be_meant_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field):
            SequentialGuard(**{field: value})
