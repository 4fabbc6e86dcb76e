"""Elastic runs in real processes: replicas that are killed, leave or fail, while the others go on."""

import os
import signal
from collections.abc import Callable, Sequence

import pytest
from real_runs import Strike, pid_of, reader_of, wait_for

from diloco_orchestrator import Run
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store

Start = Callable[..., Run]


def answer_of(folder, round_: int, replica_id: int) -> Contribution:
    found = ContributionReader(open_store(str(folder / "bucket"))).of(round_, replica_id)
    assert found is not None
    return found


@pytest.mark.slow
def test_a_run_goes_on_without_a_killed_replica_which_then_takes_part_again(start, tmp_path):
    """The run goes on until that has happened, however long a new process takes to come up here."""
    run = start(replicas=3, rounds=100_000, quorum=2, args={"pause_s": 0.03})
    commits = reader_of(tmp_path / "bucket").commits
    killed: list[int] = []
    halted: list[bool] = []

    def kill_once_and_halt_when_it_is_back() -> None:
        if not killed and len(commits()) >= 3:
            os.kill(pid_of(tmp_path / "bucket", 2), signal.SIGKILL)
            killed.append(len(commits()))
        elif killed and not halted and _was_away_and_is_back(commits()[killed[0] :]):
            run.halt("seen enough")
            halted.append(True)

    result = run.wait(on_poll=kill_once_and_halt_when_it_is_back)
    assert result.status == "halted" and killed
    assert run.status().replicas[2].attempt == 2


def _was_away_and_is_back(commits: Sequence[Commit]) -> bool:
    """Whether replica 2 is in an average again, after one that went on without it."""
    named = [2 in {a.replica_id for a in commit.answers if a.averaged} for commit in commits]
    return False in named and True in named[named.index(False) :]


@pytest.mark.slow
def test_sigterm_in_mid_round_publishes_the_part_that_is_done(start, tmp_path):
    strike = Strike(tmp_path, [1], signal.SIGTERM)
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [1]}, quorum=2)
    result = run.wait(on_poll=strike)
    assert strike.done and result.status == "completed"
    ended = reader_of(tmp_path / "bucket").attempts.exit(1, 1)
    assert ended is not None and ended.code == 75
    said = answer_of(tmp_path, 2, 1)
    assert (said.attempt, said.kind) == (1, "delta")
    assert [(o.round, o.steps) for o in said.origins] == [(2, 2)]
    again = answer_of(tmp_path, 3, 1)
    assert again.attempt == 2 and again.progress is not None and said.progress is not None
    assert again.progress.inner_steps > said.progress.inner_steps == 5


@pytest.mark.slow
def test_a_replica_that_cannot_be_had_again_is_gone_on_without(start, tmp_path):
    run = start("train_failing", quorum=1, retry={"max_errors": 0})
    result = run.wait()
    assert result.status == "completed" and [row.contributors for row in result.metrics[:3]] == [[0, 1], [0], [0]]
    assert run.status().replicas[1].state == "ended: ZeroDivisionError: a bug in the user's own code"


@pytest.mark.slow
def test_a_halt_that_finds_no_replica_alive_is_committed_by_the_coordinator(start, tmp_path):
    run = start(rounds=1000, args={"pause_s": 0.05}, retry={"backoff_s": 60.0})
    folder = tmp_path / "bucket"
    wait_for(lambda: reader_of(folder).commits(), "a round")
    for replica_id in (0, 1):
        os.kill(pid_of(folder, replica_id), signal.SIGKILL)
    run.halt("enough")
    result = run.wait()
    last = reader_of(folder).commits()[-1]
    assert result.status == "halted" and "halt requested: enough" in result.reason
    assert last.by_coordinator and not last.applied and last.answers == ()
    assert run.snapshots()[-1] == last.outer_step
    assert reader_of(folder).attempts.numbers(0) == [1]
    assert open_store(str(folder)).get(keys.result(1))


@pytest.mark.slow
def test_fragments_move_in_turn_and_their_transfers_overlap_with_training(start, tmp_path):
    run = start(rounds=6, sync_every=6, fragments=2, fragment_sync_delay=1, snapshot_every=4)
    result = run.wait()
    commits = reader_of(tmp_path / "bucket").commits()
    assert result.status == "completed" and [c.fragment for c in commits[:6]] == [0, 1, 0, 1, 0, 1]
    assert [[o.steps for a in c.answers for o in a.origins] for c in commits[:3]] == [[2, 2], [3, 3], [3, 3]]
    assert result.metrics[5].heldout < result.metrics[0].heldout


@pytest.mark.slow
def test_any_round_of_a_run_with_fragments_can_be_rebuilt(start, tmp_path):
    run = start(rounds=5, sync_every=6, fragments=3, snapshot_every=100)
    run.wait()
    for round_ in (1, 3, 4):
        assert copy_model(RunLog(open_store(run.url)), tmp_path / f"pulled-{round_}", round_) == round_
