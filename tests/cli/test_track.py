"""`diloco track`: a run's rounds in a tracker, from its bucket alone, each once, and only where its caller says."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import diloco, diloco_here
from protocol_fleet import Fleet, play, report
from tracked_curves import tensorboard_curves, wandb_histories

from diloco_orchestrator import open_store
from diloco_orchestrator.errors import TrackerFailed
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.records import Metric
from diloco_orchestrator.supervision.trackers import send_run


class Played:
    """A run of two replicas in a folder, whose rounds are played one by one."""

    def __init__(self, folder: Path, rounds: int, **settings: object) -> None:
        self.url = str(folder)
        self._fleet = Fleet(rounds=rounds, store=open_store(self.url), scored=True, **settings)
        self._participants = self._fleet.join_all()
        self.rounds = 0

    def play(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.rounds += 1
            metrics = {"loss": Metric(sum=2.0 / self.rounds, count=2)}
            said = [replace(report(i, 0.1 * self.rounds), metrics=metrics) for i in (0, 1)]
            play(self._participants, [1.0, 1.0], said)


@pytest.fixture
def run(tmp_path: Path) -> Played:
    return Played(tmp_path / "bucket", rounds=4)


def losses(rounds: int) -> list[tuple[int, float]]:
    return [(round_, pytest.approx(1.0 / round_)) for round_ in range(1, rounds + 1)]


def sent(url: str, to: str, cwd: Path, **environ: str) -> tuple[int, int]:
    """Rounds of the run and rounds sent, as the command says; with `environ` in a process of its own."""
    done = (diloco if environ else diloco_here)("track", url, "--to", to, "--json", cwd=cwd, environ=environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # and nothing else, though trackers' libraries print
    return told["rounds"], told["sent"]


def test_tensorboard_has_each_round_once_however_often_the_run_is_sent(run, tmp_path):
    to = f"tensorboard:{tmp_path / 'tb'}"
    run.play(2)
    assert sent(run.url, to, tmp_path) == (2, 2)
    assert sent(run.url, to, tmp_path) == (2, 0)
    run.play(1)
    told = diloco_here("track", run.url, "--to", to, cwd=tmp_path)
    assert told.stdout == f"{to}: 1 of 3 rounds of run-1 sent; 2 were there\n"
    curves = tensorboard_curves(tmp_path / "tb" / "run-1")
    assert curves["loss"] == losses(3)
    assert [round_ for round_, _ in curves["heldout"]] == [1, 2, 3]
    assert any(name.startswith("guard/") and name.endswith("_threshold") for name in curves)


def test_a_round_of_which_half_was_written_is_written_again(run, tmp_path):
    from tensorboard.summary import Writer

    run.play(2)
    half = Writer(str(tmp_path / "tb" / "run-1"))
    half.add_scalar("loss", 1.0, 1)  # and the process died before `contributors`
    half.close()
    assert sent(run.url, f"tensorboard:{tmp_path / 'tb'}", tmp_path) == (2, 2)


@pytest.mark.slow
def test_trackio_has_each_round_once(run, tmp_path):
    there = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    run.play(2)
    assert sent(run.url, "trackio:mine", tmp_path, **there) == (2, 2)
    run.play(1)
    assert sent(run.url, "trackio:mine", tmp_path, **there) == (3, 1)
    logs = trackio_logs(tmp_path, there)
    assert [(each["step"], each["loss"]) for each in logs] == losses(3)


def trackio_logs(folder: Path, environ: dict[str, str]) -> list[dict[str, float]]:
    import os
    import subprocess

    read = "import json, trackio; print(json.dumps(trackio.SQLiteStorage.get_logs('mine', 'run-1')))"
    done = subprocess.run(
        [sys.executable, "-c", read], cwd=folder, env={**os.environ, **environ}, capture_output=True, check=True
    )
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_wandb_has_every_round_in_what_it_keeps_to_be_sent_later(run, tmp_path):
    run.play(3)
    there = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    assert sent(run.url, "wandb:mine", tmp_path, **there) == (3, 3)
    (history,) = wandb_histories(tmp_path)
    assert [(each["_step"], each["loss"]) for each in history] == losses(3)


class ClockOf:
    """A clock whose every pause is `then`, which plays the next round."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then, self._now = then, 0.0

    def now(self) -> float:
        return self._now

    def wall_time(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += 60.0
        self._then()


def test_a_run_that_is_followed_is_sent_until_it_stops(run, tmp_path):
    run.play(1)
    clock = ClockOf(run.play)
    found = send_run(RunReader(open_store(run.url)), f"tensorboard:{tmp_path / 'tb'}", follow=clock)
    assert (found.rounds, found.sent) == (run.rounds, run.rounds)
    assert run.rounds >= 4
    curves = tensorboard_curves(tmp_path / "tb" / "run-1")
    assert curves["loss"] == losses(run.rounds)


def test_a_bucket_decides_neither_the_tracker_nor_the_place(tmp_path):
    run = Played(tmp_path / "bucket", rounds=2, track=f"tensorboard:{tmp_path / 'theirs'}")
    run.play(1)
    assert sent(run.url, f"tensorboard:{tmp_path / 'mine'}", tmp_path) == (1, 1)
    assert (tmp_path / "mine" / "run-1").is_dir() and not (tmp_path / "theirs").exists()
    asked = diloco_here("track", run.url, cwd=tmp_path)
    assert asked.returncode == 2 and "--to" in asked.stderr  # the setting in run.json is no default


def test_a_tracker_that_fails_is_an_error_that_says_what_to_do(run, tmp_path):
    run.play(1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrackerFailed, match=r"did not take the rounds: .*the same command goes on"):
        send_run(RunReader(open_store(run.url)), f"tensorboard:{tmp_path / 'file'}")
    told = diloco_here("track", run.url, "--to", "tensorbord", cwd=tmp_path)
    assert told.returncode == 2 and "did you mean 'tensorboard'" in told.stderr
