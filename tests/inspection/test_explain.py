"""`explain`: for every way in which a run stops a sentence of what, since when, and what to do."""

import random
import time
from dataclasses import replace

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.guard.robust import scale_of
from diloco_orchestrator.inspection.explain import explain, statistic_lines, why_still
from diloco_orchestrator.inspection.status import DefaultModel, ReplicaRow, RunReader, RunStatus
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Halt
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Statistic, Verdict, VerdictKind

STAMP = Stamp("test", lambda: 0.0)


def played(most: int, fall: float = 0.0, after: int = 0, **settings: object) -> RunReader:
    """A run of two replicas whose score falls by `fall` a round after round `after`."""
    fleet, rng = Fleet(replicas=2, scored=True, **settings), random.Random(3)  # type: ignore[arg-type]
    participants = fleet.join_all()
    for round_ in range(1, most + 1):
        score = 2.0 - fall * max(round_ - after, 0)
        play(participants, [1.0, 1.0], [report(i, score + rng.gauss(0, 0.05)) for i in range(2)])
        if participants[0].open.stopped:
            break
    return RunReader(fleet.store)


def told(reader: RunReader) -> tuple[str, str]:
    """Kind and whole text."""
    found = explain(reader.status(), reader.best_scored())
    return found.kind, "\n".join(found.lines())


def test_a_fall_of_the_held_out_score_names_metric_round_sigmas_and_what_to_do():
    kind, text = told(played(60, fall=0.04, after=20, rounds=80))
    assert kind == "halted by the guard"
    assert "the held-out score is below its best level: " in text and "that it has surely reached" in text
    assert "more than the noise of the score explains" in text and "Look at what changed then" in text
    assert "The last model above suspicion is that of round " in text and "diloco resume memory://" in text
    assert "slow fall" in text and "█" in text


def test_the_guards_sentence_about_a_loss_which_has_a_minus_is_explained():
    reward = played(60, fall=0.04, after=20, rounds=80).status()
    assert reward.verdict is not None and "minus" not in "\n".join(explain(reward).lines())
    rows = [replace(row, reward=None, loss=1.0) for row in reward.rounds]
    below = reward.verdict.reason.replace("best level: ", "best level: -")
    loss = replace(reward, rounds=rows, verdict=replace(reward.verdict, reason=below))
    assert "higher is better, so that a loss stands in its sentence with a minus" in "\n".join(explain(loss).lines())


def test_an_early_collapse_names_the_round_since_which_the_score_is_down():
    kind, text = told(played(40, fall=0.3, after=2, rounds=80))
    assert kind == "halted by the guard" and "fell after round 1 and has stayed down since round 2" in text
    assert "The model became worse on held-out items within the first rounds" in text
    assert "The last model above suspicion is that of round 0" in text


def test_the_rule_heldout_is_explained_too():
    reader = played(9, fall=0.2, after=3, rounds=20, guard={"min_steps": 2, "ema_alpha": 0.0})
    kind, text = told(reader)
    assert kind == "halted by the guard" and "Hacking Gap" in text and "reward hacking" in text
    assert "the best base is that of round" in text


def test_a_completed_run_and_one_that_goes_on():
    kind, text = told(played(3, rounds=2))
    assert kind == "completed" and "diloco pull" in text
    kind, text = told(played(2, rounds=9))
    assert kind == "going on" and "Nothing has to be done" in text


def test_a_completed_run_names_its_best_model_where_that_is_another_than_the_one_that_pull_takes():
    """Of rounds that were not applied there are no outer steps: round 9 is not outer step 9."""
    newest = DefaultModel(9, 1.0, 9, 1.0, False, best_round=7, best_heldout=2.0)
    completed = status(state="completed", round=10, outer_step=7, model=newest)
    assert "`diloco pull s3://b/run DESTINATION --round 7`" in "\n".join(explain(completed, best=7).todo)
    assert "--round 9" not in "\n".join(explain(completed, best=9).todo)


@pytest.mark.parametrize(
    ("reason", "kind"), [("seen enough", "halted on request"), ("max_hours=2 is reached", "at its limit")]
)
def test_a_halt_that_was_asked_for(reason, kind):
    fleet = Fleet(replicas=2, rounds=9, scored=True)
    fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason=reason).to_bytes())
    play(fleet.join_all(), [1.0, 1.0], [report(i, 1.0) for i in range(2)])
    found, text = told(RunReader(fleet.store))
    assert found == kind and reason in text and "It can go on from where it stopped: `diloco resume" in text


def status(**given: object) -> RunStatus:
    fields: dict = {"url": "s3://b/run", "run_id": "r", "leg": 1, "state": "failed", "reason": "", "round": 7}
    return RunStatus(**{**fields, "outer_step": 7, "outer_steps": 9, **given})


def replica(error: str) -> ReplicaRow:
    return ReplicaRow(1, 2, "ended: permanent", 7, 0, None, 1, error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "diloco_orchestrator.errors.QuorumLost: round 8 had 1 of 2",
            "replicas responded in time (QuorumLost: round",
        ),
        ("x.errors.BaseDiverged: replica 1 rebuilt base aa", "computes other bits than the other replicas' machines"),
        ("x.errors.ModelMismatch: this replica scores", "trains another model or scores another held-out set"),
        ("x.StoreDenied: 403", "check them on the replica's machine"),
        ("KeyError: 'text'", "its training function raised an error (KeyError: 'text')"),
    ],
)
def test_a_failed_run_names_each_replicas_error_and_what_to_do(error, words):
    failed = status(
        reason="replica 1 cannot take part: permanent", replicas=[replica(f"Traceback\n  File x\n{error}\n")]
    )
    found = explain(failed)
    assert found.kind == "failed" and words in "\n".join(found.lines())
    assert "`diloco logs s3://b/run --replica 1`" in found.lines()[-2] and "diloco resume" in found.lines()[-1]


def test_rounds_that_name_nobody_and_a_pause():
    assert "most often they are NaN" in "\n".join(explain(status(reason="3 rounds in a row named nobody; x")).lines())
    reason = "5 rounds in a row could not be judged (the last one: x). Mend the held-out evaluation and resume"
    verdict = Verdict(fire=True, reason=reason, proxy_real_gap=0.0, folds=9, action=VerdictKind.PAUSE)
    found = explain(status(state="halted", reason=f"the guard fired: {reason}", verdict=verdict))
    assert found.kind == "paused by the guard" and found.todo[-1] == "Then go on: `diloco resume s3://b/run`."


def test_a_round_that_left_no_base_is_not_named_as_one_to_go_back_to():
    """In a resumed leg the guard calls the base that it began from by the round before, which was not applied."""
    reader = played(60, fall=0.04, after=20, rounds=80)
    halted = reader.status()
    assert halted.verdict is not None
    unmade = replace(halted, verdict=replace(halted.verdict, rollback_to=halted.round))
    text = "\n".join(explain(unmade, reader.best_scored()).lines())
    assert "model above suspicion" not in text and "To go on from the base with the best held-out score" in text


def test_a_bar_is_full_at_the_threshold_and_no_longer_beyond():
    lines = statistic_lines([Statistic("gap", 5.0, 10.0), Statistic("fall", 30.0, 10.0), Statistic("KL", -1.0, 2.0)])
    half, full, empty = "█" * 10 + "·" * 10, "█" * 20, "·" * 20
    assert lines == [f"gap   {half}  5 of 10", f"fall  {full}  30 of 10", f"KL    {empty}  -1 of 2"]


def test_commands_to_copy_are_quoted_for_the_shell():
    done = replace(played(4, rounds=3).status(), url="/data/my runs/$a")
    assert "diloco pull '/data/my runs/$a' DESTINATION" in "\n".join(explain(done).lines())
    assert "diloco pull '/data/my runs/$a' DESTINATION --round 1`" in "\n".join(explain(done, best=1).lines())
    assert "--round " not in "\n".join(explain(done, best=done.outer_step).lines())
    failed = replace(done, state="failed", reason="x", replicas=[replica("Traceback\nValueError: no")])
    assert "diloco resume '/data/my runs/$a'" in "\n".join(explain(failed).lines())
    assert "diloco logs '/data/my runs/$a' --replica" in "\n".join(explain(failed).lines())


def test_one_error_of_several_replicas_is_explained_once():
    error = "Traceback\n  File x\nStoreFull: the disk is full.\n"
    rows = [replace(replica(error), replica_id=i) for i in range(3)]
    text = "\n".join(explain(status(reason="they cannot take part", replicas=rows)).lines())
    assert text.count("the disk is full") == 1 and "Replicas 0-2: there is no room left" in text


def test_of_a_completed_run_it_says_who_was_missing_and_why_and_of_replicas_left_out_alike_once():
    done = played(4, rounds=3).status()
    rows = [
        replace(row, without=[1] * (row.round > 1), judgements={0: "clipped: x", 1: "clipped: x"})
        for row in done.rounds
    ]
    error = "Traceback\nx.ModelMismatch: it has another layer"
    found = explain(replace(done, rounds=rows, replicas=[replica(error)]))
    assert found.kind == "completed" and "Without replica 1: 2 of 3 outer steps." in found.why
    assert sum("ModelMismatch" in words for words in found.why) == 1 and found.todo[-1].startswith("Replica 1: ")
    assert sum("did not count in full" in words for words in found.why) == 1


def test_a_run_that_nobody_works_on_says_so_and_how_to_go_on():
    """Its launcher died with all replicas; nothing but the stamps in the bucket tells a reader."""
    rows = [
        ReplicaRow(0, 1, "training", 7, 3, None, None, None),
        ReplicaRow(1, 2, "training", 7, 3, None, None, None),
        ReplicaRow(2, 1, "ended: preempted", 7, 3, None, 75, None),
        ReplicaRow(3, 1, "launching", 0, 0, None, None, None),
    ]
    dead = status(state="running", reason="4 of 4 contributions", replicas=rows, moved_at=1000.0, url="runs/my run")
    found = explain(dead, now=1000.0 + 14 * 60)
    text = "\n".join(found.lines())
    assert found.what.startswith("runs/my run: stands still at round")
    assert found.kind == "nobody works on it" and "no heartbeat moved and no record came for 14 min" in text
    assert "against this machine's clock" in text and "Nothing has to be done." not in text
    assert "Replicas 0 and 1: the heartbeat stopped (training) without an exit record" in text
    assert "Replica 2: ended: preempted, and nobody launched it again." in text
    assert "Replica 3: launched, and never claimed by a process." in text
    assert "`diloco attach 'runs/my run'`" in found.todo[0]


@pytest.mark.parametrize("given", [{"moved_at": 1000.0}, {"moved_at": 9000.0}, {"state": "completed", "moved_at": 0.0}])
def test_a_run_that_moves_or_has_ended_is_not_called_still(given):
    """Also with a reader whose clock is behind the writers'."""
    alive = status(**{"state": "running", "reason": "x", **given})
    assert explain(alive, now=1170.0).kind != "nobody works on it" and why_still(alive, 1170.0) == []


def test_the_status_knows_when_anything_moved_last():
    fleet = Fleet(replicas=2)
    play(fleet.join_all(), [1.0, 1.0])
    later = time.time() + 5000.0
    who = {"replica_id": 1, "attempt": 1, "counter": 3, "phase": "training", "round": 1, "inner_step": 2}
    beat = Heartbeat(**Stamp("beat", lambda: later)(), **who)
    fleet.store.put(keys.heartbeat(1, 1), beat.to_bytes())
    found = RunReader(fleet.store).status()
    assert (found.state, found.moved_at, found.hung_after_s) == ("running", later, 180.0)


def test_a_held_out_score_is_the_mean_of_what_was_scored_though_a_share_was_missing_in_the_first_round():
    """Replica 1 brings its share, whose items are harder, a round late; the guard's own scale stays that of share 0.

    The first round is shown as if all items had been scored: share 0 gained a quarter until share 1 had .125.
    """
    fleet = Fleet(replicas=2, scored=True)
    participants = fleet.join_all()
    easy, hard = [0.5, 0.75, 0.875, 1.0], [None, 0.125, 0.25, 0.25]
    for scores in zip(easy, hard, strict=True):
        play(participants, [1.0, 1.0], [report(i, score) for i, score in enumerate(scores)])
    reader = RunReader(fleet.store)
    means, rows = [0.1875, 0.4375, 0.5625, 0.625], reader.rows()
    assert [abs(row.heldout or 0.0) for row in rows] == means
    assert [abs(reader.heldout_of_base(base) or 0.0) for base in range(4)] == means
    folded = [row.verdict.value for row in reader.commits() if row.verdict is not None]
    assert folded == pytest.approx([0.5, 0.75, 0.875, 0.9375])
    assert f"{rows[-1].heldout:.4f} before round 4" in told(reader)[1]


JUNK = [{}, {"baselines": 3, "level": 1.0}, {"baselines": {"x": [], "0": "1"}, "level": 1.0}, {"level": None}]


@pytest.mark.parametrize("state", JUNK)
def test_a_guard_state_that_somebody_made_up_does_not_end_a_reader(state: dict[str, object]):
    assert scale_of(state, HeldoutSet(metric="reward", shares=(10, 10), digest="0" * 64))[1] == 0.0
