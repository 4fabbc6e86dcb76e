"""Each round's metrics in TensorBoard, trackio and W&B, written by and read back through their own libraries."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tracked_curves import tensorboard_curves, wandb_histories, wandb_records

from diloco_orchestrator import attach
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.status import RoundRow
from diloco_orchestrator.protocol.verdict import Statistic
from diloco_orchestrator.supervision.trackers import RoundTracker, open_tracker


def row(round_: int, loss: float | None = 1.0) -> RoundRow:
    return RoundRow(
        round=round_,
        outer_step=round_,
        applied=True,
        stop="none",
        by="replica 0, attempt 1",
        reason="",
        contributors=[0, 1],
        without=[],
        late_steps=0,
        dropped_steps=0,
        loss=loss,
        reward=None,
        heldout=2.0 / round_,
        proxy_real_gap=None,
        tokens=100,
        bytes_up=8,
        bytes_down=8,
        train_s=1.5,
        warning="",
        extra={"hacks": 0.25 * round_} if loss is not None else {},
        statistics=(Statistic("slow fall", 0.5 * round_, 10.0), Statistic("KL", 0.01, 0.08)),
    )


@pytest.mark.slow
def test_a_run_leaves_event_files_for_tensorboard(start, tmp_path):
    run = start(rounds=3, track=f"tensorboard:{tmp_path / 'tb'}")
    result = run.wait()
    (folder,) = (tmp_path / "tb").iterdir()
    curves = tensorboard_curves(folder)
    for name in ("loss", "heldout", "tokens", "train_s"):
        told = [(r.round, getattr(r, name)) for r in result.metrics if getattr(r, name) is not None]
        assert curves[name] == [(round_, pytest.approx(value, rel=1e-6)) for round_, value in told]
    gaps = [(r.round, each) for r in result.metrics for each in r.statistics if each.name == "Hacking Gap"]
    assert curves["guard/hacking_gap"] == [(r, pytest.approx(each.value, abs=1e-6)) for r, each in gaps]
    assert curves["guard/hacking_gap_threshold"] == [(r, pytest.approx(each.threshold)) for r, each in gaps]
    assert gaps
    assert curves["contributors"] == [(round_, 2.0) for round_ in (1, 2, 3)] + [(4, 0.0)]
    folder.rename(tmp_path / "of_the_launcher")
    assert attach(run.url).wait().status == "completed"
    assert list((tmp_path / "tb").iterdir()) == []  # run.json names the folder: whoever may write there would choose it
    assert attach(run.url, track=f"tensorboard:{tmp_path / 'mine'}").wait().status == "completed"
    assert tensorboard_curves(tmp_path / "mine" / folder.name)["loss"] == curves["loss"]


def test_tensorboard_has_metrics_of_ones_own_in_an_event_file(tmp_path):
    curves = RoundTracker(lambda: open_tracker(f"tensorboard:{tmp_path}", "run-1", {}))
    curves.update([row(1), row(2), row(3, loss=None)])
    curves.close()
    written = tensorboard_curves(tmp_path / "run-1")
    assert written["extra.hacks"] == [(1, 0.25), (2, 0.5)]
    assert [round_ for round_, _ in written["heldout"]] == [1, 2, 3]


WRITE = """
from diloco_orchestrator.supervision.trackers import RoundTracker, open_tracker
from test_trackers import row
curves = RoundTracker(lambda: open_tracker("{track}", "run-1", {{"seed": 3}}))
curves.update([row(1)])
curves.update([row(1), row(2), row(3, loss=None)])
curves.close()
"""


def in_a_process(program: str, folder: Path, **environ: str) -> str:
    """Trackers keep state in their process. Returns its stdout."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_trackio_has_every_round(tmp_path):
    there = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    in_a_process(WRITE.format(track="trackio:mine"), tmp_path, **there)
    read = "import json, trackio; print(json.dumps(trackio.SQLiteStorage.get_logs('mine', 'run-1')))"
    logs = json.loads(in_a_process(read, tmp_path, **there).splitlines()[-1])
    assert [(each["step"], each["heldout"]) for each in logs] == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))]
    assert "loss" in logs[0] and "loss" not in logs[2]
    assert [each.get("extra.hacks") for each in logs] == [0.25, 0.5, None]
    assert [(each["guard/slow_fall"], each["guard/slow_fall_threshold"]) for each in logs] == [
        (0.5, 10.0),
        (1.0, 10.0),
        (1.5, 10.0),
    ]


def test_wandb_has_every_round(tmp_path):
    """Offline: what its own library writes down to be sent later."""
    there = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    in_a_process(WRITE.format(track="wandb:mine"), tmp_path, **there)
    (file,) = tmp_path.glob("wandb/offline-run-*-run-1/run-run-1.wandb")
    records = wandb_records(file)
    (identity,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (identity.project, identity.run_id) == ("mine", "run-1")
    (history,) = wandb_histories(tmp_path)
    assert [(h["_step"], h["heldout"]) for h in history] == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))]
    assert [h.get("extra.hacks") for h in history] == [0.25, 0.5, None]
    assert [(h["guard/kl"], h["guard/kl_threshold"]) for h in history] == [(0.01, 0.08)] * 3


class Failing:
    """A tracker whose service is down from the second round on."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def newest(self) -> int:
        return 0

    def log(self, round_: int, values: Mapping[str, float]) -> None:
        if round_ > 1:
            raise ConnectionError("502 from the tracker")
        self.rounds.append(round_)

    def close(self) -> None:
        raise AssertionError("nothing is asked of a tracker that failed")


def test_a_tracker_that_fails_costs_the_curves_and_not_the_run(caplog):
    tracker = Failing()
    curves = RoundTracker(lambda: tracker)
    for rounds in (1, 2, 3):
        curves.update([row(i + 1) for i in range(rounds)])
    curves.close()
    assert tracker.rounds == [1]
    assert [r.message for r in caplog.records] == [
        "no more metrics are sent to the tracker, the run goes on: ConnectionError: 502 from the tracker"
    ]


def test_unknown_trackers_and_missing_libraries_start_nothing(start, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'"):
        start(track="tensorbord:x")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"needs the wandb library.*pip install 'diloco-orchestrator\[wandb\]'"):
        start(track="wandb")
    assert not (tmp_path / "bucket").exists()
