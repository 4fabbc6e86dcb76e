"""A replica whose training metric is far from all others' is named in the warning of its rounds, and halts nothing."""

import json
import random

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.guard import Evidence, SequentialGuard
from diloco_orchestrator.inspection.explain import explain
from diloco_orchestrator.inspection.status import RunReader


def warnings(rounds: list[dict[int, float]]) -> list[str]:
    """The warning of each round, the state through JSON; nothing halts. Training metrics are given by replica."""
    guard, state, found, rng = SequentialGuard(), None, [], random.Random(1)
    for round_, trained in enumerate(rounds, start=1):
        evidence = Evidence(round=round_, heldout=rng.gauss(0.5, 0.01), trained=trained)
        state, verdict = guard.fold(state, evidence)
        state = json.loads(json.dumps(state))
        assert not verdict.fire
        found.append(verdict.warning)
    return found


@pytest.mark.parametrize(("offset", "word"), [(-3.0, "worse"), (3.0, "better")])
def test_a_replica_far_from_all_others_is_named_after_eight_rounds_with_the_numbers_of_the_last(offset, word):
    rng = random.Random(2)
    rounds = [{i: rng.gauss(-2.0 + (offset if i == 2 else 0.0), 0.05) for i in range(4)} for _ in range(12)]
    said = warnings(rounds)
    assert said[:7] == [""] * 7
    for count, (words, trained) in enumerate(zip(said[7:], rounds[7:], strict=True), start=8):
        others = [trained[i] for i in (0, 1, 3)]
        distance = min(abs(trained[2] - each) for each in others)
        width = max(others) - min(others)
        assert words.startswith(
            f"the training metric of replica 2 has been {word} than all others' for {count} rounds, in the last one by "
            f"{distance:.3g}, while the others differ by {width:.2g}; this does not halt"
        )


def test_honest_replicas_are_not_named_nor_is_one_that_changes_sides_or_one_of_three():
    rng = random.Random(3)
    healthy = [{i: rng.gauss(0.1 * i, 0.05) for i in range(8)} for _ in range(300)]
    assert not any(warnings(healthy))
    changing = [{**healthy[t], 7: 9.0 if t % 5 else -9.0} for t in range(60)]
    assert not any(warnings(changing))
    of_three = [{i: rng.gauss(9.0 * (i == 0), 0.05) for i in range(3)} for _ in range(30)]
    assert not any(warnings(of_three))


def test_status_and_explain_name_one_replica_of_four_that_trains_on_garbage_while_the_average_improves():
    fleet, rng = Fleet(replicas=4, rounds=40, scored=True), random.Random(4)
    participants = fleet.join_all()
    for t in range(12):
        level = 0.1 * t - 3.0
        trained = [-5.5 if i == 1 else level + rng.gauss(0, 0.02) for i in range(4)]
        play(participants, [1.0] * 4, [report(i, level + rng.gauss(0, 0.02), trained[i]) for i in range(4)])
    status = RunReader(fleet.store).status()
    first, last = status.rounds[0].heldout, status.rounds[-1].heldout
    assert status.state == "running" and first is not None and last is not None and last > first + 0.8
    assert "the training metric of replica 1 has been worse than all others' for 12 rounds" in status.rounds[-1].warning
    assert "replica 1" in status.rounds[-1].remark()
    assert any("replica 1" in words for words in explain(status).why)
