"""After a halt by the guard: which base is the default and has a snapshot, and what the next leg may change."""

from dataclasses import replace
from typing import Any

import pytest
from guarded_legs import STAMP, commit_of, ending, fleet_of, halted, scoring
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.config import OnHaltConfig, make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin, Halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.next_leg import auto_resume, begin_next_leg

SCORES = [0.1, 0.5, 0.9, 0.3, 0.2]  # the third round scores the base after the second best
BEST, NEWEST = 2, 4  # the fifth round fires, so that the newest base is that of the fourth


def collapsed(**settings: Any) -> Fleet:
    """A run that the guard has halted in round 5."""
    return fleet_of(SCORES, last_drifts=True, **{"snapshot_every": 100, **settings})[0]


def resume(fleet: Fleet, **how: Any) -> Begin:
    given = {"rounds": None, "from_round": None, "by": "test", "why": "go on", "stamp": STAMP}
    return begin_next_leg(RunLog(fleet.store), **{**given, **how})


def confirmed(fleet: Fleet) -> list[int]:
    snapshots = ConfirmedSnapshots(RunLog(fleet.store))
    return [round_ for round_ in snapshots.rounds if snapshots.take_of(round_) is not None]


# -- the default base -----------------------------------------------------------------------------------------


def test_after_a_halt_by_the_guard_replicas_write_the_snapshot_of_the_best_base_though_none_was_due():
    fleet, participants = fleet_of(SCORES, last_drifts=True, snapshot_every=100)
    assert RunLog(fleet.store).snapshots() == [0]
    for participant in participants:
        participant.finish_leg()
    assert confirmed(fleet) == [0, BEST, NEWEST]
    assert verify_run(fleet.store).agrees


def test_the_coordinator_writes_the_snapshot_of_the_best_base_if_no_replica_is_left():
    fleet = collapsed()
    for _ in range(2):  # safe to repeat
        ending(fleet).finalize()
    assert confirmed(fleet) == [0, BEST, NEWEST]


def test_a_run_that_somebody_halted_has_a_snapshot_of_its_newest_base_only():
    fleet, participants = halted(SCORES, snapshot_every=100)
    for participant in participants:
        participant.finish_leg()
    assert RunLog(fleet.store).snapshots() == [0, 5]
    assert RunReader(fleet.store).model().round == 5


def test_status_and_pull_name_the_best_base_and_the_newest_with_both_scores(tmp_path):
    fleet = collapsed()
    model = RunReader(fleet.store).status().model
    assert (model.round, model.heldout, model.newest_round, model.newest_heldout) == (BEST, 0.9, NEWEST, 0.2)
    assert model.words() == "round 2, the best by held-out score (0.9); the newest is round 4 (0.2)"
    assert copy_model(RunLog(fleet.store), tmp_path / "model") == BEST
    assert copy_model(RunLog(fleet.store), tmp_path / "named", NEWEST) == NEWEST


def test_status_and_pull_name_the_best_model_of_a_run_that_the_guard_did_not_halt_where_another_is_newest():
    fleet, _ = fleet_of([0.1, 0.5, 0.9, 0.3])
    model = RunReader(fleet.store).status().model
    assert (model.round, model.best_round, model.best_heldout) == (4, 2, 0.9)
    assert model.words() == "round 4, the newest; the best by held-out score is round 2 (0.9)"
    rising, _ = fleet_of([0.1, 0.5, 0.9, 0.95])
    assert (
        RunReader(rising.store).model().words() == "round 4, the newest; the best by held-out score is round 3 (0.95)"
    )


def test_once_the_run_goes_on_its_newest_base_is_the_default_again():
    fleet = collapsed()
    resume(fleet)
    assert RunReader(fleet.store).model().round == BEST  # the leg has no round yet: it is its newest, too
    scoring(fleet, fleet.join_all(), [0.9])
    model = RunReader(fleet.store).model()
    assert (model.round, model.after_verdict) == (6, False)


# -- settings of a leg ------------------------------------------------------------------------------------------------


def test_a_leg_steps_with_its_own_outer_learning_rate_and_verify_derives_it():
    fleet = collapsed()
    begin = resume(fleet, change={"outer.lr": 0.35})
    assert begin.settings == {"outer.lr": 0.35}
    participants = fleet.join_all()
    before = participants[0].base.copy()
    average = {name: 1.5 + 0.0 * each for name, each in before.parameters.items()}  # of 1.0 and 2.0
    scoring(fleet, participants, [0.9])
    expected = step(before, average, fleet.config.outer.model_copy(update={"lr": 0.35}))
    assert participants[0].base.digest() == expected.digest()
    assert verify_run(fleet.store).agrees
    assert fleet.join(0).digest == participants[0].digest


def test_the_settings_of_a_leg_last_until_another_leg_changes_them():
    fleet = collapsed(args={"temperature": 1.0})
    resume(fleet, change={"outer.lr": 0.35, "args.temperature": 0.5})
    ending(fleet).commit_stop("halted", "enough")
    assert resume(fleet).settings == {"outer.lr": 0.35, "args.temperature": 0.5}
    ending(fleet).commit_stop("halted", "enough")
    assert resume(fleet, change={"outer.lr": 0.7}).settings == {"args.temperature": 0.5}
    assert fleet.join(0)._attempt.config.args == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outer.lrr": 0.5}, "setting that a leg may change 'outer.lrr': did you mean 'outer.lr'?"),
        ({"args.temprature": 0.5}, "did you mean 'args.temperature'?"),
        ({"sync_every": 5}, "setting that a leg may change 'sync_every'"),
        ({"replicas": 5}, "was launched with 2 replicas, no max_replicas"),
        ({"outer.lr": -1}, "setting 'outer.lr' = -1"),
        ({"outer.momentum": 0}, "switch momentum neither on nor off"),
        ({"guard.threshold": 99.0}, "a guard that loosens itself guards nothing"),
    ],
)
def test_a_leg_cannot_change_everything_and_the_nearest_name_is_offered(change, words):
    fleet = collapsed(args={"temperature": 1.0})
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        resume(fleet, change=change)
    assert len(RunLog(fleet.store).begins()) == 1
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):  # and no launch can ask for it later
        fleet_of([], args={"temperature": 1.0}, on_halt={"change": change})


# -- an override ------------------------------------------------------------------------------------------------------


def test_an_override_begins_with_a_new_baseline_and_other_thresholds_and_status_says_why():
    fleet = collapsed()
    begin = resume(fleet, override_guard="drift is wanted here", guard={"kl_hard_stop": 9.0})
    assert begin.guard is None and begin.override_guard == "drift is wanted here"
    assert begin.settings == {"guard.kl_hard_stop": 9.0}
    status = RunReader(fleet.store).status()
    assert (status.override_guard, status.settings) == ("drift is wanted here", {"guard.kl_hard_stop": 9.0})
    scoring(fleet, fleet.join_all(), [0.9, 0.9], last_drifts=True)  # what fired before
    last = commit_of(fleet, 7)
    assert last.verdict is not None and not last.verdict.fire and last.verdict.folds == 2
    assert verify_run(fleet.store).agrees


def test_an_override_may_choose_another_rule_with_its_own_defaults():
    fleet = collapsed()
    begin = resume(fleet, override_guard="fewer false halts", guard={"rule": "sequential", "min_steps": 30})
    assert begin.settings["guard.rule"] == "sequential" and begin.settings["guard.min_steps"] == 30
    scoring(fleet, fleet.join_all(), [0.9])
    state = commit_of(fleet, 6).guard
    assert state is not None and state["rule"] == "sequential-v5"


def test_other_thresholds_without_a_reason_are_refused():
    with pytest.raises(ConfigError, match=r"need a reason.*--override-guard WHY"):
        resume(collapsed(), guard={"kl_hard_stop": 9.0})


def test_a_leg_from_a_base_that_other_settings_judged_begins_with_a_new_baseline():
    fleet = collapsed()
    resume(fleet, override_guard="drift is wanted here", guard={"kl_hard_stop": 9.0})
    scoring(fleet, fleet.join_all(), [0.9])
    ending(fleet).commit_stop("halted", "enough")
    assert resume(fleet, from_round=1).guard is None  # leg 1 judged it by another budget
    assert verify_run(fleet.store).agrees
    ending(fleet).commit_stop("halted", "enough")
    assert resume(fleet, from_round=1, override_guard="as before", guard={"kl_hard_stop": 0.08}).settings == {}


def test_verify_finds_a_leg_that_dropped_the_guards_state_without_a_word():
    fleet = collapsed()
    begin = resume(fleet, override_guard="why not")
    fleet.engine.put(keys.begin(2), begin.model_copy(update={"override_guard": ""}).to_bytes())
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.begin(2) and found.words.startswith("guard is None")


# -- auto-resume -----------------------------------------------------------------------------------------------------

ON_HALT = {"change": {"outer.lr": 0.35}, "at_most": 2}


def resumed(fleet: Fleet) -> Begin | None:
    return auto_resume(RunLog(fleet.store), STAMP)


def collapse_again(fleet: Fleet) -> None:
    scoring(fleet, fleet.join_all(), [0.9, 0.1], last_drifts=True)


def test_on_halt_of_a_run_of_version_0_3_names_its_base():
    named, plain = ({**each, "change": {"outer.lr": 0.35}} for each in ({"resume": "best"}, {}))
    assert OnHaltConfig.model_validate(named) == OnHaltConfig.model_validate(plain)
    with pytest.raises(ConfigError, match="resume"):
        make_config({"entrypoint": "m:f", "on_halt": {"resume": "newest"}})


def test_on_halt_begins_the_next_leg_from_the_best_base_at_most_as_often_as_asked_each_with_its_reason():
    fleet = collapsed(on_halt=ON_HALT)
    for expected in (1, 2):
        begin = resumed(fleet)
        assert begin is not None and begin.from_round == BEST and begin.settings == {"outer.lr": 0.35}
        assert begin.why.startswith(f"on_halt {expected} of at most 2 (outer.lr=0.35): kl_to_init")
        collapse_again(fleet)
    assert resumed(fleet) is None
    assert [begin.by for begin in RunLog(fleet.store).begins()] == ["test", "on_halt", "on_halt"]
    assert verify_run(fleet.store).agrees


class RacingStore(MemoryStore):
    """Before the first create of leg 2, another coordinator begins it."""

    race = False

    def create(self, key: str, data: bytes) -> bool:
        if self.race and key == keys.begin(2):
            self.race = False
            assert auto_resume(RunLog(self), STAMP) is not None
        return super().create(key, data)


def test_of_two_coordinators_one_begins_the_leg_and_both_supervise_it():
    engine = RacingStore()
    fleet = collapsed(on_halt=ON_HALT, store=engine)
    engine.race = True
    begin = resumed(fleet)
    assert begin is not None and begin.leg == 2
    assert len(RunLog(fleet.store).begins()) == 2
    assert resumed(fleet) is None  # the leg goes on


def test_nothing_is_resumed_that_somebody_stopped():
    stopped, _ = halted(SCORES, on_halt=ON_HALT)
    assert resumed(stopped) is None
    asked = collapsed(on_halt=ON_HALT)  # the verdict came before the request was obeyed
    asked.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="user", reason="supper").to_bytes())
    assert resumed(asked) is None


def test_nothing_is_resumed_unless_asked():
    assert resumed(collapsed()) is None


def test_a_pause_rolls_nothing_back_and_is_not_resumed():
    """The guard could not judge: nothing says that the model is at fault."""
    guard = {"rule": "sequential", "pause_after": 2}
    fleet = Fleet(replicas=2, rounds=50, guard=guard, scored=True, on_halt=ON_HALT)
    participants = scoring(fleet, fleet.join_all(), [0.1, 0.9])
    for _ in range(2):
        play(participants, [1.0, 2.0], [replace(report(), scores=()) for _ in participants])
    last = fleet.commits()[-1]
    assert last.stop == "halted" and last.fired and not last.halted_by_guard
    assert resumed(fleet) is None and RunReader(fleet.store).model().round == 3


def test_a_run_that_scores_strangers_goes_on_with_replicas_of_one_rank():
    """A rank holds no whole base to score: each launched replica ended in the first round with a stranger's work."""
    for scored in (True, False):
        fleet = Fleet(replicas=4, rounds=1, invited=[3], scored=True, scores_strangers=scored, quorum=None)
        fleet.join_all()
        ending(fleet).commit_stop("halted", "lunch")
        log = RunLog(fleet.store)
        again = {"rounds": 1, "from_round": None, "by": "test", "why": "go on", "stamp": STAMP}
        if scored:
            with pytest.raises(
                ConfigError, match="are scored before they are averaged, but a replica of several ranks"
            ):
                begin_next_leg(log, **again, change={"ranks_per_replica": 2})
        assert begin_next_leg(log, **again, change={"ranks_per_replica": 1 if scored else 2}).leg == 2
