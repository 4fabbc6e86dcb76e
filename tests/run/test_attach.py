"""Coordinators that die, come back, or are two; replicas that hang; runs that stop and go on in another leg."""

import os
import signal
from pathlib import Path

import pytest
from real_runs import FAST, Strike, digests, launcher, pid_of, reader_of, wait_for
from stored_snapshots import read_tensors
from tiny_workloads import mlp

from diloco_orchestrator import CollapseStopError, LocalProcessExecutor, Run, attach, launch
from diloco_orchestrator.errors import ConfigError, NoSuchRun
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.verify import verify
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import fault_in
from diloco_orchestrator.protocol.legs import bases
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.default_base import default_base
from diloco_orchestrator.store.open_store import open_store

# -- coordinators -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_coordinator_is_replaced_from_the_bucket_alone(executor, tmp_path):
    """kill -9 of the launcher, then of a replica: nobody is left to relaunch it until somebody attaches."""
    started = launcher(tmp_path, "train_holding", rounds=3, args={"folder": str(tmp_path), "hold": [1]})
    wait_for((tmp_path / "held-1").exists, "replica 1 is in the middle of round 2")
    started.kill()
    started.communicate()
    os.kill(pid_of(tmp_path / "bucket", 1), signal.SIGKILL)
    (tmp_path / "release").touch()
    result = attach(str(tmp_path / "bucket")).wait()
    assert result.status == "completed" and result.outer_steps == 3
    assert reader_of(tmp_path / "bucket").attempts.numbers(0) == [1]
    assert reader_of(tmp_path / "bucket").attempts.numbers(1) == [1, 2]
    assert {h.native["dir"].split("/")[-4] for h in executor.find(reader_of(tmp_path / "bucket").run.run_id)} == {
        "executor"
    }


@pytest.mark.slow
def test_an_attempt_whose_coordinator_died_while_launching_it_is_adopted(start, tmp_path):
    """Its handle is missing from the bucket; the process runs."""
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [0, 1]})
    wait_for(lambda: (tmp_path / "held-0").exists() and (tmp_path / "held-1").exists(), "both are in round 2")
    handle = run._means.executor.find(run._coordinator.reader.run.run_id)[1]
    (tmp_path / "bucket" / "replicas/1/attempts/1/handle.json").unlink()
    other = attach(run.url, executor=LocalProcessExecutor(tmp_path / "executor"))
    (tmp_path / "release").touch()
    assert other.wait().status == "completed"
    claim = reader_of(tmp_path / "bucket").attempts.claim(1, 1)
    assert claim is not None and claim.pid == handle.native["pid"]


@pytest.mark.slow
def test_two_coordinators_at_once_do_no_harm(start, tmp_path):
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [1]})
    other = attach(run.url, executor=LocalProcessExecutor(tmp_path / "executor"))
    strike = Strike(tmp_path, [1], signal.SIGKILL)

    def look() -> None:
        strike()
        other._coordinator.step()

    assert run.wait(on_poll=look).status == "completed"
    assert other.wait().status == "completed"
    assert strike.done and reader_of(tmp_path / "bucket").attempts.numbers(1) == [1, 2]
    assert [c.outer_step for c in reader_of(tmp_path / "bucket").commits()] == [1, 2, 3, 3]


@pytest.mark.slow
def test_attaching_to_a_finished_run_tells_its_result(start):
    run = start(rounds=1)
    first = run.wait()
    assert attach(run.url).wait() == first


def test_attaching_to_nothing_is_told(tmp_path):
    with pytest.raises(NoSuchRun, match="there is no folder"):
        attach(str(tmp_path / "typo"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSuchRun, match="holds no run"):
        attach(str(tmp_path / "empty"))


@pytest.mark.slow
def test_a_hung_replica_is_replaced(start, tmp_path):
    """SIGSTOP: the process lives, and sends no heartbeat."""
    run = start(
        "train_holding", args={"folder": str(tmp_path), "hold": [1]}, retry={"hung_after_s": 10.0, "backoff_s": 0}
    )
    strike = Strike(tmp_path, [1], signal.SIGSTOP)
    assert run.wait(on_poll=strike).status == "completed"
    reader = reader_of(tmp_path / "bucket")
    assert strike.done and reader.attempts.numbers(1) == [1, 2]
    cancel = reader.attempts.cancel(1, 1)
    assert cancel is not None and cancel.reason.startswith("hung: no heartbeat for")


@pytest.mark.slow
def test_the_stacks_of_a_hung_replica_are_in_its_log(start, tmp_path):
    """No Python of that process runs any more, its heartbeat included."""
    retry = {"hung_after_s": 6.0, "backoff_s": 0}
    run = start("train_holding_the_interpreter", args={"marker": str(tmp_path / "held")}, retry=retry)
    assert run.wait().status == "completed"
    records = reader_of(tmp_path / "bucket").attempts
    assert records.cancel(1, 1).reason.startswith("hung") and records.exit(1, 1) is None
    log = records.log_text(1, 1)
    assert "Timeout (0:00:03)!" in log and "in never_returns" in log and "heartbeat.py" not in log.split("Timeout")[0]
    assert "replica 1.1" in log  # what it printed before
    assert verify(run.url).agrees


@pytest.mark.slow
def test_a_replica_whose_data_loader_never_answers_is_replaced(start, tmp_path):
    """Its heartbeats go on, from a thread of their own; with `quorum="all"` everybody would wait for it."""
    retry = {"hung_after_s": 4.0, "backoff_s": 0}
    timing = {**FAST["timing"], "heartbeat_s": 1.0}
    args = {"marker": str(tmp_path / "dead")}
    run = start("train_behind_a_dead_loader", args=args, retry=retry, timing=timing, quorum="all")
    assert run.wait().status == "completed"
    records = reader_of(tmp_path / "bucket").attempts
    ended = records.exit(1, 1)
    assert records.numbers(0) == [1] and records.numbers(1) == [1, 2] and records.cancel(1, 1) is None
    assert ended.code == 1 and ended.reason == "TrainingStuck" and fault_in(ended).startswith("TrainingStuck at ")
    assert "for batch in replica.batches(data)" in ended.error and "torch/utils/data/dataloader.py" in ended.error
    assert "for 40 s, took no step" in ended.error and "TrainingStuck" in records.log_text(1, 1)
    assert verify(run.url).agrees


# -- legs -------------------------------------------------------------------------------------------------------------


def halted(start, rounds: int = 1000) -> Run:
    """A run that was halted after its first round."""
    run: Run = start(rounds=rounds)
    run.halt("lunch")
    assert run.wait().outer_steps == 1
    return run


@pytest.mark.slow
def test_a_halted_run_goes_on_in_the_next_leg(start, tmp_path):
    resumed = halted(start).resume(rounds=2)
    result = resumed.wait()
    assert (result.status, result.outer_steps) == ("completed", 3)
    commits = reader_of(tmp_path / "bucket").commits()
    assert [(c.leg, c.outer_step, c.stop) for c in commits] == [
        (1, 1, "halted"),
        (2, 2, "none"),
        (2, 3, "none"),
        (2, 3, "completed"),
    ]
    status = resumed.status()
    assert (status.leg, status.state, status.outer_steps, status.snapshots) == (2, "completed", 3, [0, 1, 3])
    steps = [m.progress.inner_steps for m in manifests(tmp_path, 3)]
    assert steps == [9, 9]  # the data goes on where it stood


def manifests(tmp_path: Path, round_: int):
    from diloco_orchestrator.protocol.records import Contribution

    store = open_store(str(tmp_path / "bucket"))
    found = [keys.contribution(round_, i) for i in (0, 1)]
    return [Contribution.from_bytes(store.get(key), key) for key in found]


@pytest.mark.slow
def test_a_halted_and_resumed_run_has_the_bases_of_an_undisturbed_one(start, tmp_path, undisturbed):
    """The inner optimizer has no state here, so a halt between two rounds changes nothing."""
    run = start("train_holding", args={"folder": str(tmp_path), "hold": []})
    run.halt("lunch")
    run.wait()
    run.resume().wait()
    assert digests(tmp_path / "bucket") == undisturbed


@pytest.mark.slow
def test_a_finished_run_takes_more_rounds_only_when_told_how_many(start, tmp_path):
    run = start(rounds=1)
    run.wait()
    with pytest.raises(ConfigError, match=r"took all its 1 outer steps\. Say how many more"):
        run.resume()
    result = run.resume(rounds=1).wait()
    assert (result.status, result.outer_steps) == ("completed", 2)


@pytest.mark.slow
def test_after_a_collapse_the_next_leg_starts_from_the_best_base(start, tmp_path):
    guard = {"min_steps": 2, "ema_alpha": 0.0}
    run = start("train_collapsing", rounds=20, guard=guard)
    with pytest.raises(CollapseStopError):
        run.wait()
    reader = reader_of(tmp_path / "bucket")
    commits = reader.commits()
    scores = {}
    base = 0
    for commit in commits:
        assert commit.verdict is not None
        scores[base] = commit.verdict.value
        base = commit.round if commit.applied else base
    best = max(scores, key=lambda round_: (scores[round_], -round_))
    assert default_base(reader.log).round == best and best in bases(commits, reader.log.begins())
    with pytest.raises(CollapseStopError):  # it collapses again, from there
        run.resume().wait()
    begin = reader.log.begins()[-1]
    assert (begin.leg, begin.after_round, begin.from_round) == (2, commits[-1].round, best)
    assert best in reader.snapshots()
    origin = next((c.guard for c in commits if c.round == best), None)
    assert begin.guard == origin
    first = manifests(tmp_path, begin.after_round + 1)[0]
    expected = next((c.base_digest for c in commits if c.round == best + 1), None)  # of the base before it
    assert expected is None or first.base_digest == expected


@pytest.mark.slow
def test_a_leg_can_start_from_any_earlier_round_and_the_rounds_between_have_no_heirs(start, tmp_path):
    run = start(rounds=4, snapshot_every=100)
    run.wait()
    with pytest.raises(ConfigError, match=r"round 77 .* left no base.*The nearest is 4"):
        run.resume(rounds=1, from_round=77)
    resumed = run.resume(rounds=2, from_round=2)
    result = resumed.wait()
    assert (result.status, result.outer_steps) == ("completed", 4)
    store = open_store(str(tmp_path / "bucket"))
    commits = reader_of(tmp_path / "bucket").commits()
    assert bases(commits, RunLog(store).begins()) == [0, 1, 2, 6, 7]
    assert 2 in resumed.snapshots()
    assert manifests(tmp_path, 6)[0].base_digest == commits[2].base_digest  # of the base before round 3
    for round_ in (1, 6):  # neither has a snapshot
        copy_model(RunLog(store), tmp_path / f"pulled-{round_}", round_)
    with pytest.raises(ConfigError, match=r"round 3 .* left no base.*The nearest is 2"):
        copy_model(RunLog(store), tmp_path / "pulled-3", 3)
    assert not (tmp_path / "pulled-3").exists()


@pytest.mark.slow
def test_only_a_stopped_run_is_resumed_and_only_a_running_one_halted(start, tmp_path):
    run = start("train_holding", args={"folder": str(tmp_path), "hold": [0, 1]})
    with pytest.raises(ConfigError, match=r"goes on \(leg 1\): there is nothing to resume"):
        run.resume()
    (tmp_path / "release").touch()
    run.wait()
    with pytest.raises(ConfigError, match=r"has ended already \(completed"):
        run.halt()


# -- pull -------------------------------------------------------------------------------------------------------------


def test_any_round_is_pulled_with_the_bits_that_the_log_names(finished, tmp_path):
    store = open_store(str(finished.folder))
    assert finished.run.snapshots() == [0, 2, 3]
    for round_ in (0, 1, 2, 3):
        assert copy_model(RunLog(store), tmp_path / str(round_), round_) == round_
        files = {path.name for path in (tmp_path / str(round_)).iterdir()}
        assert files == {"README.md", "model.safetensors", "outer.safetensors"}
    assert copy_model(RunLog(store), tmp_path / "newest") == 3
    for name in ("model.safetensors", "outer.safetensors"):
        assert (tmp_path / "newest" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()
    model = mlp()
    model.load_state_dict(read_tensors(open_store(str(tmp_path)), "1/model.safetensors"))


@pytest.mark.slow
def test_pull_overwrites_nothing(start, tmp_path):
    start(rounds=1).wait()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="exists already"):
        copy_model(RunLog(open_store(str(tmp_path / "bucket"))), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


# -- over S3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "fsspec+"], ids=["obstore", "s3fs"])
def test_a_whole_run_goes_over_s3_and_is_attached_to_and_resumed(prefix, s3_server, bucket, executor, tmp_path):
    options = s3_server.options()
    url = f"{prefix}s3://{bucket}/runs/a"
    run = launch(
        "tiny_workloads:train",
        store=url,
        storage_options=options,
        executor=executor,
        **{**FAST, "replicas": 2, "rounds": 2, "sync_every": 2},
    )
    assert run.wait().status == "completed"
    again = attach(url, storage_options=options, executor=executor)
    assert again.resume(rounds=1).wait().outer_steps == 3
    store = open_store(url, options)
    copy_model(RunLog(store), tmp_path / "model")
    secret = s3_server.secret.encode()
    assert not [info.key for info in store.list("") if secret in store.get(info.key)]
    assert not [path for path in (tmp_path / "executor").rglob("*") if path.is_file() and secret in path.read_bytes()]
