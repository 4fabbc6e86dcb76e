"""Runs that are scaled while they train, in real processes, and what is refused."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import diloco_here
from real_runs import FAST, pid_of, reader_of

from diloco_orchestrator import Run, launch, plan_launch
from diloco_orchestrator.clock import random_token
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.verify import verify
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run as RunRecord
from diloco_orchestrator.protocol.records import Scale
from diloco_orchestrator.run_log.append import create_run, request_scale
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store

Start = Callable[..., Run]
ELASTIC = {**FAST, "quorum": None, "replicas": "1..3", "rounds": 100_000, "args": {"pause_s": 0.05}}


@pytest.mark.slow
def test_a_run_is_scaled_up_from_another_process_and_down_again_and_resumed_with_another_number(start, tmp_path):
    """By the command first, then by the method. The log holds all that came of it."""
    run, url = start(**ELASTIC), str(tmp_path / "bucket")
    commits, steps = reader_of(tmp_path / "bucket").commits, []

    def drive() -> None:
        together = [{a.replica_id for a in commit.answers if a.averaged} for commit in commits()]
        if not steps and len(together) > 2:
            assert diloco_here("scale", url, "3", cwd=tmp_path).returncode == 0
            steps.append("up")
        elif steps == ["up"] and {0, 1, 2} in together:
            run.scale(1)
            steps.append("down")
        elif steps == ["up", "down"] and together[-3:] == [{0}] * 3:
            run.halt("seen enough")
            steps.append("halt")

    assert run.wait(on_poll=drive).status == "halted" and steps == ["up", "down", "halt"]
    reader = reader_of(tmp_path / "bucket")
    for replica_id in (1, 2):
        ended, cancel = reader.attempts.exit(replica_id, 1), reader.attempts.cancel(replica_id, 1)
        assert ended is not None and (ended.code, ended.reason) == (75, "vacated: the run was scaled down")
        assert cancel is not None and cancel.reason == "vacated: 1 replicas are wanted"
        manifests = ContributionReader(reader.store)
        assert any((m := manifests.of(c.round, replica_id)) and m.kind == "delta" for c in reader.commits())
    assert [row.state for row in run.status().replicas][1:] == ["ended: vacated: the run was scaled down"] * 2
    assert verify(url).agrees
    again = run.resume(rounds=3, replicas=2)
    assert again.wait().status == "completed"
    last = reader_of(tmp_path / "bucket").log.begins()[-1]
    assert last.settings == {"replicas": 2}
    with pytest.raises(ConfigError, match=r"has ended \(completed\)\. Resume it with another number"):
        again.scale(3)


@pytest.mark.slow
def test_a_data_set_that_is_dealt_openly_is_read_once_by_a_fleet_that_grows_shrinks_and_is_killed(start, tmp_path):
    settings = {**ELASTIC, "deal": "open", "args": {"folder": str(tmp_path), "pause_s": 0.05}, "sync_every": 4}
    run, done = start("train_dealt", **settings), list[str]()
    commits = reader_of(tmp_path / "bucket").commits

    def drive() -> None:
        together = [{a.replica_id for a in commit.answers if a.averaged} for commit in commits()]
        if not done and len(together) > 2:
            run.scale(3), done.append("up")
        elif done == ["up"] and {0, 1, 2} in together:
            os.kill(pid_of(tmp_path / "bucket", 1), signal.SIGKILL), done.append("killed")
        elif done == ["up", "killed"] and (tmp_path / "took-1-2").exists() and 1 in together[-1]:
            run.scale(1), done.append("down")
        elif done[-1:] == ["down"] and together[-3:] == [{0}] * 3:
            run.halt("seen enough"), done.append("halt")

    assert run.wait(on_poll=drive).status == "halted"
    took: dict[tuple[int, int], list[dict[int, int]]] = {}
    for path in tmp_path.glob("took-*"):
        by_round: dict[int, dict[int, int]] = {}
        for line in path.read_text().splitlines():
            round_, step, number = map(int, line.split())
            by_round.setdefault(round_, {})[step] = number
        for round_, steps in by_round.items():
            took.setdefault((int(path.name.split("-")[1]), round_), []).append(steps)
    for attempts in took.values():
        assert all(a[step] == attempts[0][step] for a in attempts for step in a.keys() & attempts[0].keys())
    answers = [a for commit in commits() if commit.applied for a in commit.answers if a.averaged]
    longest = {who: list(max(attempts, key=len).values()) for who, attempts in took.items()}
    read = [longest[a.replica_id, o.round][step] for a in answers for o in a.origins for step in range(o.steps)]
    assert len(read) == len(set(read)) and set(range(len(read) // 2)) <= set(read)
    assert verify(run.url).agrees


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replicas": "16..4"}, "max_replicas=4 is below replicas=16"),
        ({"replicas": 4, "max_replicas": 3}, "max_replicas=3 is below replicas=4"),
        ({"replicas": "4..16", "max_replicas": 8}, "leave out one of them"),
        ({"replicas": "4..many"}, "setting 'max_replicas' = 'many'"),
        ({"replicas": "2..4", "quorum": "all"}, "replicas that nobody has launched"),
        ({"replicas": "2..4", "quorum": 3}, "quorum=3: choose 1..2"),
        ({"replicas": "2..4", "aggregate": "median"}, 'aggregate="median" with replicas=2'),
    ],
)
def test_ranges_of_replicas_that_cannot_be_meant_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_config({"entrypoint": "m:f", **settings})


def test_held_out_items_that_cannot_be_dealt_over_all_ids_are_refused_before_the_folder_is_taken(tmp_path):
    with pytest.raises(ConfigError, match="3 held-out items cannot be dealt over 4 replicas"):
        launch("tiny_workloads:train", store=str(tmp_path / "bucket"), replicas="2..4", heldout_items=[1, 2, 3])
    assert not (tmp_path / "bucket").exists()


def test_a_plan_says_how_far_a_run_can_be_scaled_and_whose_data_nobody_reads(tmp_path):
    plan = plan_launch("tiny_workloads:train", str(tmp_path), replicas="2..8", executor="local")
    assert plan.replicas == 2 and plan.to_json()["most_replicas"] == 8
    assert "scaling:   up to 8 replicas by `diloco scale`" in "\n".join(plan.lines())
    assert "dealt over 8: while 2 train, nobody reads the others' parts" in "\n".join(plan.lines())


def test_a_run_json_of_a_fixed_number_of_replicas_is_what_earlier_versions_read():
    assert "max_replicas" not in make_config({"entrypoint": "m:f"}).model_dump(mode="json")
    assert make_config({"entrypoint": "m:f", "replicas": "4..16"}).model_dump(mode="json")["max_replicas"] == 16


def test_a_run_of_a_fixed_number_of_replicas_and_numbers_out_of_range_are_not_scaled(tmp_path):
    run_log = created(tmp_path, replicas=2)
    with pytest.raises(ConfigError, match="launched with 2 replicas and no max_replicas"):
        request_scale(run_log, 3, "test", stamp())
    scalable = created(tmp_path / "scalable", replicas="2..4")
    for replicas in (1, 5):
        with pytest.raises(ConfigError, match=f"has 2 to 4 replicas, not {replicas}: choose one of these"):
            request_scale(scalable, replicas, "test", stamp())
    assert scalable.scaled_to(1) == (0, None)


def test_the_newest_request_to_scale_counts_and_junk_among_them_does_not(tmp_path):
    run_log = created(tmp_path, replicas="2..4")
    request_scale(run_log, 4, "test", stamp())
    run_log.store.create(keys.scale(1, 2), b"junk")
    forged = Scale(**stamp()(), leg=1, number=3, replicas=1000, by="somebody")
    run_log.store.create(keys.scale(1, 3), forged.to_bytes())
    assert run_log.scaled_to(1) == (3, 4)
    request_scale(RunLog(run_log.store), 3, "test", stamp())
    assert run_log.scaled_to(1) == (4, 3)


def created(folder: Path, **settings: Any) -> RunLog:
    config = make_config({"entrypoint": "m:f", **settings})
    run = RunRecord(**stamp()(), run_id="run-1", config=config, package_version="0")
    return create_run(open_store(str(folder)), run, "test", stamp())


def stamp() -> Stamp:
    return Stamp(random_token(), lambda: 0.0)
